"""Exchangeable fits to single networks: what they find, where they apply, what audits say of them."""

import re
from pathlib import Path

import numpy as np
import pytest
import shims
import torch
from programs import run
from torch import nn

from weightscope.anatomy import named_tensors
from weightscope.anatomy.architectures import tables
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.anatomy.places import Source, unit_offset
from weightscope.auditing import audit
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits.pretrained import _covariance, fit_pretrained
from weightscope.init import load_init
from weightscope.init.from_artifact import PopulationInit
from weightscope.networks import ConvNeXt, ViT
from weightscope.statistics.exchangeable import ExchangeableMoments
from weightscope.statistics.permutations import PermutationSpec, View

PLANTED = {"channels x ~qk": 0.6, "channels x ~vo": -0.5, "channels x hidden": -0.3}


def vit(width: int = 48, depth: int = 3, layer_scale: float | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"patch_size": 2, "in_channels": 1, "image_size": 8, "num_classes": 10, "expansion": 2}
    return ViT(width=width, depth=depth, heads=2, layer_scale=layer_scale, **sizes)


def mixed(mine: torch.Tensor, other: torch.Tensor, r: float) -> torch.Tensor:
    """A tensor whose correlation with another of its deviation is r."""
    return r * other / other.std() * mine.std() + (1 - r**2) ** 0.5 * mine


@torch.no_grad()
def planted(module: nn.Module) -> nn.Module:
    """Correlations within queries and keys, values and outputs, and the two layers of the MLP of every block."""
    for block in module.blocks:
        q, k, v = block.attn.qkv.weight.chunk(3)
        k.copy_(mixed(k, q, 0.6))
        block.attn.proj.weight.copy_(mixed(block.attn.proj.weight, v.T, -0.5))
        block.mlp.fc2.weight.copy_(mixed(block.mlp.fc2.weight, block.mlp.fc1.weight.T, -0.3))
    return module


def correlations(module: nn.Module) -> dict[str, float]:
    """Each type with two views -> their correlation, without a threshold; blocks averaged."""
    structure = fit_pretrained(module, gain=1.0).groups[0].structure
    found: dict[str, list[float]] = {}
    for kind, matrix in zip(structure.permutations.types, structure.correlations, strict=True):
        label = " x ".join(sorted(group.split(".")[0] for group in kind.groups))
        if kind.multiplicity == 2:
            found.setdefault(label, []).append(float(matrix[0, 1]))
    return {label: float(np.mean(values)) for label, values in found.items()}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_pretrained(planted(vit(96))).save(tmp_path_factory.mktemp("fit") / "fit.safetensors")


def renamed(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a ViT under the names of transformers' DINOv2, queries, keys and values apart."""
    out = {"embeddings.patch_embeddings.projection.weight": module.patch_embed.proj.weight}
    for name, value in module.state_dict().items():
        if not name.startswith("blocks."):
            continue
        name = "encoder.layer." + name.removeprefix("blocks.")
        for mine, theirs in (("attn.proj", "attention.output.dense"), (".gamma", ".lambda1"), (".ls", ".layer_scale")):
            name = name.replace(mine, theirs)
        if ".attn.qkv." in name:
            for part, own in zip(value.chunk(3), ("query", "key", "value"), strict=True):
                out[name.replace("attn.qkv", f"attention.attention.{own}")] = part
        else:
            out[name] = value
    return out


def test_planted_correlations_are_found_and_independent_ones_are_not() -> None:
    found, nothing = correlations(planted(vit(96))), correlations(vit(96))
    for label, r in PLANTED.items():
        assert found[label] == pytest.approx(r, abs=0.03)  # five standard errors of 1 / sqrt(3 * 96 * 95)
        assert nothing[label] == 0  # 21 pairs at a rate of 6e-5


def test_covariances_are_those_about_zero() -> None:
    module = planted(vit())
    fit = fit_pretrained(module, gain=1.0)
    structure = fit.groups[0].structure
    weights = fit.spec.pack({name: module.state_dict()[name].double() for name in fit.spec.names}, np.float64)
    moments = ExchangeableMoments(fit.spec, permutation_spec(fit.spec)).update(weights[None])
    for mine, factor in zip(moments.covariances(about="zero"), structure.factors, strict=True):
        if mine.kind.groups:
            np.testing.assert_allclose(np.square(factor).sum(1), mine.covariance.diagonal(), rtol=1e-9)


@pytest.mark.parametrize("rank", [64, 2])
def test_standard_errors_are_those_of_unrelated_rows_whatever_channels_they_read(rank: int) -> None:
    """The z of 300 pairs has a deviation of at most 1 within 5 standard errors."""
    rng = np.random.default_rng(0)
    views = tuple(View(name, name, (24, 64), ("~qk", "channels")) for name in "ab")
    kind = next(k for k in PermutationSpec(views).types if len(k.groups) == 2)
    z, plain = [], []
    for _ in range(300):
        read = np.linalg.qr(rng.standard_normal((64, rank)))[0]  # directions that both maps read
        part = np.einsum("qrv,cr->qcv", rng.standard_normal((24, rank, 2)), read)
        part -= part.mean(1, keepdims=True)
        found = _covariance(kind, part, {})
        z.append(found.correlation()[0, 1] / found.errors[0, 1])
        plain.append(found.correlation()[0, 1] * np.sqrt(found.samples))
    assert np.std(z) < 1 + 5 / np.sqrt(600)
    assert (np.std(plain) > 2) == (rank == 2)  # the number of samples alone would claim too much


def test_gains_are_folded_and_names_do_not_matter() -> None:
    plain, scaled = planted(vit()), planted(vit(layer_scale=0.1))
    with torch.no_grad():
        for block in scaled.blocks:
            gain = torch.linspace(0.5, 2, 48)
            for scale, layer in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                scale.weight.copy_(gain)
                layer.weight.div_(gain)
            for scale, layer in ((block.ls1, block.attn.proj), (block.ls2, block.mlp.fc2)):
                scale.gamma.copy_(gain)
                layer.weight.div_(gain[:, None])
    expected = fit_pretrained(plain).groups[0].structure
    for source in (scaled, renamed(scaled)):
        found = fit_pretrained(source).groups[0].structure
        assert sorted(found.spec.names) == sorted(expected.spec.names)
        by_label = {frozenset(k.groups): c for k, c in zip(found.permutations.types, found.factors, strict=True)}
        for kind, factor in zip(expected.permutations.types, expected.factors, strict=True):
            np.testing.assert_allclose(by_label[frozenset(kind.groups)], factor, atol=1e-6)


def test_a_network_within_another_module_is_the_same_one(artifact: Path) -> None:
    network = planted(vit(96))
    within = fit_pretrained({f"model.{name}": value for name, value in network.state_dict().items()})
    mine, theirs = (fit.groups[0].structure.correlations for fit in (fit_pretrained(network), within))
    assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    plain, wrapped = vit(), nn.ModuleDict({"model": vit()})
    load_init(artifact)(plain, generator=0)
    load_init(artifact)(wrapped, generator=0)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


def test_drawn_networks_have_the_correlations_and_the_targets_scale(artifact: Path) -> None:
    init, target = load_init(artifact), vit(80, 4, layer_scale=0.1, seed=1)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    init(target, generator=torch.Generator().manual_seed(0))
    found = correlations(target)
    for label, r in PLANTED.items():
        assert found[label] == pytest.approx(r, abs=0.05)
    for name, value in target.state_dict().items():
        if name in init.report.touched:
            assert float(value.std()) == pytest.approx(float(before[name].std()), rel=0.1), name
        else:
            assert torch.equal(value, before[name])
    assert {name.split(".")[2] + name[-7:] for name in init.report.touched} == {"attn.weight", "mlp.weight"}


def test_the_scale_of_the_source() -> None:
    source, target = planted(vit(48)), vit(96, layer_scale=0.1, seed=1)
    with torch.no_grad():
        for block in source.blocks:
            block.mlp.fc1.weight.mul_(3)
    PopulationInit(fit_pretrained(source, scale="source"))(target, generator=torch.Generator().manual_seed(0))
    for block, other in zip(source.blocks, target.blocks, strict=True):
        ratio = other.mlp.fc1.weight.detach().std() / block.mlp.fc1.weight.detach().std()
        assert float(ratio) == pytest.approx(2**-0.5, rel=0.05)
        assert (other.ls1.gamma == 1).all()


def test_networks_of_other_sizes_are_pooled() -> None:
    pooled = fit_pretrained([planted(vit(48, 2)), planted(vit(64, 4, seed=1)), vit(64, 4, seed=2)], gain=1.0)
    structure = pooled.groups[0].structure
    assert len({name.split(".")[1] for name in pooled.spec.names}) == 4
    for kind, matrix in zip(structure.permutations.types, structure.correlations, strict=True):
        if len(kind.groups) == 2 and any(group.startswith("~qk") for group in kind.groups):
            d = [48 * 47, 64 * 63, 64 * 63]
            assert matrix[0, 1] == pytest.approx(0.6 * (d[0] + d[1]) / sum(d), abs=0.05)
    kind = next(k for k in structure.permutations.types if k.groups == ("channels",))
    assert structure.diagnostics["channels"]["samples"] == 47 + 63 + 63
    assert kind.multiplicity == 8


def test_an_audit_tells_the_default_start_from_the_fit(artifact: Path) -> None:
    model = vit(64, seed=3)
    assert audit(model, str(artifact)).outcomes == {"fit": "failed"}
    load_init(artifact)(model, generator=torch.Generator().manual_seed(0))
    report = audit(model, str(artifact))
    assert report.outcomes == {"fit": "passed"}
    assert report.powers["fit"]["an untouched network"] > 0.99


def test_the_commands(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(planted(vit(32)).state_dict(), tmp_path / "a.pt")
    torch.save(vit(48, 2).state_dict(), tmp_path / "b.pt")
    out = tmp_path / "fit.safetensors"
    sources = tmp_path / "a.pt", tmp_path / "b.pt"
    code, text, _ = run("fit-init", *sources, "--structure", "exchangeable", "--gain", "2", "-o", out, capsys=capsys)
    assert code == 0
    assert "units of `a.pt`, `b.pt`" in text
    assert run("audit", tmp_path / "a.pt", "--init", artifact, capsys=capsys)[0] == 0
    assert run("audit", tmp_path / "b.pt", "--init", artifact, capsys=capsys)[0] == 1
    for wrong in (("--holdout", "0.5"), ("--partial",), ("--option", "gains=2")):
        arguments = ("fit-init", *sources, "--structure", "exchangeable", *wrong, "-o", tmp_path / "no.safetensors")
        assert run(*arguments, capsys=capsys)[0] == 2
    assert not (tmp_path / "no.safetensors").exists()


def test_what_does_not_fit_is_an_error(artifact: Path, tmp_path: Path) -> None:
    network = vit()
    with pytest.raises(UsageError, match="no matrices in numbered blocks"):
        fit_pretrained({"weight": torch.randn(3, 3)})
    with pytest.raises(SpecError, match="expected tensors like"):
        load_init(artifact)(ConvNeXt(16, 2, 3, 2, 4, expansion=2, in_channels=1))
    with pytest.raises(DataError, match="expected the tensors of"):
        fit_pretrained([network, ConvNeXt(16, 2, 3, 2, 4, expansion=2, in_channels=1)])
    broken = {name: value.clone() for name, value in network.state_dict().items()}
    broken["blocks.1.mlp.fc1.weight"][0, 0] = float("nan")
    huge = {name: 1e38 * value for name, value in network.state_dict().items()}  # gains of norms, too
    for state in (broken, huge):
        with pytest.raises(DataError, match="expected finite weights"):
            fit_pretrained(state)
    with pytest.raises(DataError, match="on the meta device"):
        fit_pretrained(vit().to("meta"))
    with torch.no_grad():
        network.blocks[0].attn.proj.weight.zero_()
    with pytest.raises(DataError, match="found zeros"):
        load_init(artifact)(network)


@pytest.mark.parametrize(("name", "size"), [("norm1.weight", 24), ("ls1.gamma", 7)])
def test_a_gain_of_another_length_is_an_error(name: str, size: int) -> None:
    """24 entries would fit the 48 channels twice."""
    tensors = vit(layer_scale=0.1).state_dict() | {f"blocks.1.{name}": torch.ones(size)}
    with pytest.raises(DataError, match=rf"`blocks\.1\.{name}`: expected 48 entries, .*found {size}"):
        fit_pretrained(tensors)


def test_split_is_the_inverse_of_whole() -> None:
    named = renamed(vit())
    source = Source(named)
    for name in source.names:
        for own, value in source.split(name, source.whole(name).detach().numpy()).items():
            np.testing.assert_array_equal(value, named[own].detach().numpy())


def test_gains_of_norms_are_those_that_the_model_multiplies_by() -> None:
    """Gemma's norms multiply by 1 + weight, Gemma 2's have a norm after the attention; names alone do not tell."""
    transformers = shims.transformers()
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    sizes |= {"intermediate_size": 64, "vocab_size": 11}
    for kind, offset in (("Llama", 0), ("Gemma", 1), ("Gemma2", 1), ("Nemotron", 1), ("StableLm", 0)):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
        layer, x = model.model.layers[0], torch.randn(3, 32)
        before = layer.pre_feedforward_layernorm if kind == "Gemma2" else layer.post_attention_layernorm
        with torch.no_grad():
            for norm in (layer.input_layernorm, before):
                norm.weight.normal_()
        state = model.state_dict()
        source = Source(state, model)
        for norm, name in ((layer.input_layernorm, "self_attn.q_proj"), (before, "mlp.up_proj")):
            path = f"model.layers.0.{name}.weight"
            centred = x - x.mean(-1, keepdim=True) if hasattr(norm, "bias") else x
            plain = centred / centred.square().mean(-1, keepdim=True).add(1e-6).sqrt()
            folded = torch.from_numpy(source.folded([path])[path]).float()
            torch.testing.assert_close(plain @ folded.T, layer.get_submodule(name)(norm(x)), rtol=0, atol=1e-4)
        gain = "model.layers.0.input_layernorm.weight"
        configured = named_tensors(state, model.config.to_dict())
        assert source.offset(gain) == unit_offset(configured, gain) == offset
        with pytest.raises(DataError, match="multiplies by its weight or by 1"):
            Source(state).offset(gain)


def test_the_types_whose_norms_add_one_are_those_of_transformers() -> None:
    """By the source of every model that transformers has: `* (1.0 + self.weight)` in a norm."""
    folder = Path(shims.transformers().__file__).parent / "models"
    files = {path.parent.name: path.read_text() for path in folder.glob("*/modeling_*.py")}
    adds = re.compile(r"1(\.0)? \+ self\.weight\b|self\.weight(\.float\(\))? \+ 1(\.0)?\b")
    assert {"gemma", "nemotron"} <= (found := {kind for kind, text in files.items() if adds.search(text)})
    offset = {kind for one in tables()[1] if one.offset for kind in one.types}
    assert found <= offset
    decoders = re.compile(r"self\.(input_layernorm|post_attention_layernorm|pre_feedforward_layernorm|[qk]_norm)\b")
    assert {kind for kind, text in files.items() if decoders.search(text)} <= {
        kind for one in tables()[1] for kind in one.types
    }


@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm.weight", "blocks.0.norm1.weight"])
def test_norms_of_code_that_is_not_known_are_refused(name: str) -> None:
    state, remote = {name: torch.zeros(8)}, {"auto_map": {"AutoModel": "code.Own"}, "model_type": "own"}
    for config in (remote, {"model_type": "own"}, {}):
        if config == remote or "layers" in name:
            found = "the unknown model type 'own'" if config else "none"
            with pytest.raises(DataError, match=f"by 1 \\+ weight, found {found}; give the module, or 'norm"):
                unit_offset(named_tensors(state, config), name)
        else:
            assert unit_offset(named_tensors(state, config), name) == 0
        assert [unit_offset(named_tensors(state, config | {"norm_offset": c}), name) for c in (0, 1, True)] == [0, 1, 1]
    assert unit_offset(named_tensors(state, remote | {"model_type": "gemma3_text"}), name) == 1
    assert unit_offset(named_tensors(state, remote | {"model_type": "llama"}), name) == 0
    for wrong in (2, "1", [1]):
        with pytest.raises(DataError, match=rf"found norm_offset {re.escape(repr(wrong))}"):
            unit_offset(named_tensors(state, {"model_type": "llama", "norm_offset": wrong}), name)


def test_a_norm_of_ones_own_is_measured() -> None:
    """By running it, as its class and the model's type are unknown; one that computes something else is refused."""

    class Norm(nn.LayerNorm):
        kind = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, x.shape[-1:]) * (self.kind + self.weight) + self.bias

    model = vit()
    model.blocks[1].norm1 = Norm(48)
    offsets = [Source(model.state_dict(), model).offset(f"blocks.{i}.norm1.weight") for i in range(2)]
    assert offsets == [0, 1]
    model.blocks[1].norm1.kind = 0.5
    with pytest.raises(DataError, match=r"`blocks.1.norm1`: expected a norm that multiplies by its weight or by 1"):
        Source(model.state_dict(), model).offset("blocks.1.norm1.weight")
