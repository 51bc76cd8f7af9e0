"""`products`: statistics from factors equal those of the formed matrices, for every family; errors; memory; the CLI."""

import json
import math
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from matplotlib.text import Text
from programs import run
from references_products import statistics
from safetensors.torch import save_file
from scipy import stats

from weightscope.analysis.attention_products import products
from weightscope.anatomy import attention, ssms
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.checkpoint import Checkpoint
from weightscope.errors import AnatomyError, UsageError
from weightscope.init import mimetic_attention_, mimetic_ssm_
from weightscope.networks import ViT

ROOT = Path(__file__).parent.parent
VIT_S = ROOT.parent / "shared" / "models" / "vit-small-patch14"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vit(depth: int = 2, seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    return ViT(32, 8, 48, depth, 3, 5)


def close(row: dict, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("d", "r"), [(40, 20), (40, 21), (30, 64), (1, 1)])
def test_statistics_equal_those_of_the_formed_matrix(d, r):
    a, b = randn(d, r), randn(d, r, seed=1) + 0.3 * randn(d, r)
    product = FactoredProduct(a, b)
    found = product.statistics()
    for name, value in statistics(a.numpy(), b.numpy()).items():
        assert float(found[name]) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    m = a @ b.T
    torch.testing.assert_close(product.corner(6), m[:6, :6])
    values = torch.linalg.svdvals(m)[: min(d, r)]
    torch.testing.assert_close(product.singular_values(), values, atol=1e-7 * float(values[0]), rtol=1e-7)


def test_factors_with_dependent_columns_have_zero_singular_values():
    a, b = randn(30, 6), randn(30, 6, seed=1)
    a[:, 5], a[:, 4] = 0, a[:, 3]
    values = FactoredProduct(a, b).singular_values()
    torch.testing.assert_close(values, torch.linalg.svdvals(a @ b.T)[:6], atol=1e-6, rtol=1e-6)
    nothing = FactoredProduct(torch.zeros(30, 6), b)
    assert not nothing.singular_values().any()
    assert math.isnan(nothing.statistics()["z"])
    assert float(nothing.statistics()["beta"]) == 0


@pytest.mark.parametrize("r", [4, 30])
def test_one_product_that_is_not_finite_leaves_the_others_alone(r):
    a, b = randn(3, 30, r), randn(3, 30, r, seed=1)
    expected = FactoredProduct(a, b).statistics()
    a[1, 0, 0] = math.nan
    b[2, 3, 1] = math.inf
    product = FactoredProduct(a, b)
    assert product.finite.tolist() == [True, False, False]
    for name, value in product.statistics().items():
        assert value.isnan().tolist() == [False, True, True], name
        torch.testing.assert_close(value[0], expected[name][0])
    assert product.singular_values().isnan().any(-1).tolist() == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("d", "r"), [(32, 8), (32, 32)])
def test_z_is_standard_normal_for_independent_gaussian_factors(d, r):
    """Kolmogorov-Smirnov over 4,000 products; a correct score fails with probability 1e-4."""
    n = 4000
    a, b = 3 * randn(n, d, r), 0.01 * randn(n, d, r, seed=1)
    found = FactoredProduct(a, b).statistics()
    assert stats.kstest(found["z"].numpy(), "norm").pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", families.rows("attention"), ids=lambda family: family.name)
def test_every_family_equals_the_reference(family):
    model = family.build()
    parts = [part for part in attention(model) if part.kind == "self"]
    if not parts:
        with pytest.raises(AnatomyError, match=r"keys 20.*not square"):
            products(model)
        return
    found = products(model)
    rows = {(row["layer"], row["part"], row["head"]): row for row in found.records}
    assert len(rows) == len(found.records) == sum(2 * part.heads + 1 for part in parts)
    for part in parts:
        q, k, v, o = (part.read(name).double().numpy() for name in "qkvo")
        total = np.zeros((part.width, part.width))
        for head in range(part.heads):
            group = head // (part.heads // part.kv_heads)
            close(rows[part.layer, "qk", head], statistics(q[head], k[group]))
            close(rows[part.layer, "vo", head], statistics(v[group], o[head].T))
            total += v[group] @ o[head]
        whole = rows[part.layer, "vo", None]
        expected = statistics(total, np.eye(part.width))
        for name in set(expected) - {"z"}:  # whose null is about the factors
            assert whole[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        assert (whole["width"], whole["rank"]) == (part.width, part.kv_heads * part.value_width)


def test_a_checkpoint_gives_what_the_module_gives(tmp_path):
    model = vit()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    config = {"num_attention_heads": 3}
    sources = [model, model.state_dict(), tmp_path / "model.safetensors", Checkpoint(tmp_path / "vit.pt")]
    found = products(*sources, config=config, labels=list("abcd"))
    strip = [[{**row, "source": ""} for row in found.records if row["source"] == label] for label in "abcd"]
    assert strip[0] == strip[1] == strip[2] == strip[3]


def test_a_fused_tensor_is_read_once(tmp_path, tensors_read):
    model = vit(depth=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "model.safetensors")
    products(checkpoint, config={"num_attention_heads": 3})
    assert sorted(tensors_read) == [f"blocks.{i}.attn.{name}.weight" for i in range(3) for name in ("proj", "qkv")]


@pytest.mark.skipif(not VIT_S.is_dir(), reason="../shared/models/vit-small-patch14 is not here")
def test_the_vit_of_the_study_as_counted_by_hand():
    found, folded = products(VIT_S), products(VIT_S, fold_scales=True, clip=None)
    qk, vo = found.count("qk"), found.count("vo", layers=True)
    assert (qk.positive, qk.n, vo.negative, vo.n) == (65, 72, 8, 12)
    assert "65 of 72" in found.text()
    assert folded.count("vo", layers=True).surely_negative == 11  # LayerScale hides the signs


def capture_norms(family: families.Family, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Attention module -> the normalisation whose output it is given, as seen in a forward pass."""
    made, found = {}, {}
    handles = []
    paths = {part.name: part for part in attention(model)}
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            handles.append(module.register_forward_hook(lambda m, _, out: made.__setitem__(out.data_ptr(), (m, out))))
        if name in paths:

            def enter(_: object, args: tuple, kwargs: dict, name: str = name) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                if x.data_ptr() in made:
                    found[name] = made[x.data_ptr()][0]

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    with torch.no_grad():
        family.call(model)
    for handle in handles:
        handle.remove()
    return found


PRE_NORM = [
    *("ours-vit", "timm-eva", "torchvision-vit", "hf-vit", "hf-gpt2", "hf-neox", "hf-llama", "hf-phi3"),
    *("hf-clip", "hf-whisper", "hf-t5"),
]


@pytest.mark.parametrize("name", PRE_NORM)
def test_folding_takes_the_gain_of_the_normalisation_that_attention_reads(name):
    family = families.FAMILIES[name]
    model = family.build()
    norms = capture_norms(family, model)
    found = {(r["name"], r["part"], r["head"]): r for r in products(model, fold_norms=True).records}
    parts = [part for part in attention(model) if part.kind == "self"]
    assert {part.name for part in parts} <= set(norms)
    for part in parts:
        gain = norms[part.name].weight.detach().double().numpy()[:, None]
        q, k, v, o = (part.read(p).double().numpy() for p in "qkvo")
        group = part.heads // part.kv_heads
        for h in range(part.heads):
            close(found[part.name, "qk", h], statistics(gain * q[h], gain * k[h // group]))
            close(found[part.name, "vo", h], statistics(gain * v[h // group], o[h].T))


@pytest.mark.parametrize("name", ["hf-bert", "hf-distilbert", "torch-encoder"])
def test_models_that_normalise_after_attention_are_not_folded(name):
    with pytest.raises(AnatomyError, match=r"normalises after it|one after the attention"):
        products(families.FAMILIES[name].build(), fold_norms=True)


def test_cross_attention_is_left_out():
    found = products(families.FAMILIES["torch-decoder"].build())
    assert found.sources[0].skipped.keys() == {f"layers.{i}.multihead_attn" for i in range(2)}
    assert "cross-attention: queries and keys read two different streams" in found.text()


BAD_OPTIONS = [
    (lambda: products(), "at least one model"),
    (lambda: products(vit(), labels=["a", "b"]), "labels: expected a list of 1"),
    (lambda: products(vit(), clip=None).plot(), "clip=64"),
]


@pytest.mark.parametrize(("call", "message"), BAD_OPTIONS)
def test_invalid_options_are_errors(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.slow
def test_nan_weights_are_reported_per_tensor_and_the_figure_is_still_drawn(tmp_path):
    model = vit()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, :5] = math.nan  # queries of head 0
        model.blocks[1].attn.proj.weight[3, 20] = math.inf  # outputs of head 1
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = products(tmp_path / "model.safetensors", config={"num_attention_heads": 3})
    assert found.sources[0].nonfinite == {"blocks.0.attn.qkv.weight": 5, "blocks.1.attn.proj.weight": 1}
    bad = {(r["layer"], r["part"], r["head"]) for r in found.records if not r["finite"]}
    assert bad == {(0, "qk", 0), (1, "vo", 1), (1, "vo", None)}
    for row in found.records:
        assert (row["beta"] is None) == (not row["finite"])
    assert found.count("qk").n == 5
    assert "warning:" in found.text()
    assert "`blocks.0.attn.qkv.weight` contains 5 NaN" in found.text()
    json.dumps(found.to_dict(), allow_nan=False)
    found.plot(tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 10_000


def test_rows_are_flat_json_with_the_stated_names():
    found = products(vit())
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    wanted = {"layer", "head", "part", "diagonal_mean", "diagonal_std", "offdiagonal_norm", "alpha", "beta", "z"}
    for row in written["rows"]:
        assert wanted <= set(row)
        assert all(value is None or isinstance(value, int | float | str) for value in row.values())
    assert written["counts"]["ViT"]["qk_heads"]["n"] == 6
    frame = found.to_pandas()
    assert list(frame["beta"]) == [row["beta"] for row in found.records]
    assert dict(frame.groupby(["part", "level"]).size()) == {("qk", "head"): 6, ("vo", "head"): 6, ("vo", "layer"): 2}


@pytest.mark.slow
def test_several_models_in_one_table_and_figure():
    found = products(vit(depth=3), vit(seed=1), mimetic_attention_(vit(seed=2)))
    assert [info.label for info in found.sources] == ["ViT", "ViT (2)", "ViT (3)"]
    assert "mean over" in found.text()
    assert found.count("qk", "ViT (3)").positive == 6
    figure = found.plot()
    lines = [[line for line in ax.lines if line.get_gid() == "mean"] for ax in figure.axes[:4]]
    assert [len(drawn) for drawn in lines] == [3] * 4
    np.testing.assert_allclose(
        lines[0][1].get_ydata(),
        [np.mean([r["beta"] for r in found.select("qk", "ViT (2)") if r["layer"] == layer]) for layer in (0, 1)],
    )


def test_the_grid_holds_the_products():
    model = vit()
    found = products(model, labels=["m"])
    q, k = (attention(model)[1].read(p).double() for p in "qk")
    figure = found.plot()
    images = [ax.images[0].get_array() for ax in figure.axes if ax.images]
    np.testing.assert_allclose(images[2 * 1 + 1], q[1] @ k[1].T, atol=1e-6)  # head 1 of layer 1
    assert len(images) == 2 * 4  # three heads and the layer's VO, two layers
    texts = dict.fromkeys(text.get_text() for text in figure.findobj(Text))
    assert [text for text in texts if text[:3] in ("QK ", "VO ")] == [*(f"QK head {i}" for i in range(3)), "VO layer"]


def test_the_command(tmp_path, capsys):
    save_file(vit().state_dict(), tmp_path / "small.safetensors")
    out, table = tmp_path / "figure.png", tmp_path / "rows.json"
    arguments = ("products", tmp_path / "small.safetensors", "--num-heads", "3", "-o", out, "--json", table)
    code, text, _ = run(*arguments, capsys=capsys)
    assert (code, "of 6 heads" in text) == (0, True)
    assert out.stat().st_size > 10_000
    assert len(json.loads(table.read_text())["rows"]) == 14
    both = (*arguments, tmp_path / "small.safetensors", "--fold-norms", "--workers", "1")
    assert "small (2)" in run(*both, capsys=capsys)[1]


SCALED = {"hf-dinov2": "layer_scale1.lambda1", "ours-vit": "ls1.gamma"}


@pytest.mark.parametrize("family", SCALED)
def test_folding_layer_scale_gives_what_is_added_to_the_residual_stream(family):
    torch.manual_seed(0)
    ours = families.scramble(ViT(32, 8, 48, 2, 3, 5, layer_scale=1.0))
    model = ours if family == "ours-vit" else families.FAMILIES[family].build()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(SCALED[family]):
                p.copy_(torch.randn(48, generator=torch.Generator().manual_seed(1)))
    plain, folded = products(model), products(model, fold_scales=True)
    assert "LayerScale" in plain.text()
    assert "LayerScale" not in folded.text()
    assert plain.select("qk") == folded.select("qk")
    parameters = dict(model.named_parameters())
    for part in attention(model):
        names = [n for n in parameters if n.endswith(SCALED[family]) and f".{part.layer}." in n]
        scale = parameters[names[0]].detach().double().numpy()
        v, o = (part.read(p).double().numpy() for p in "vo")
        m = sum(v[h] @ o[h] for h in range(3)) * scale
        row = folded.select("vo", layers=True)[part.layer]
        expected = statistics(m, np.eye(48))
        for key in set(expected) - {"z"}:
            assert row[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_products_of_state_space_layers_are_the_dense_ones(version):
    network = families.state_space(version, width=32)
    found = products(network, clip=5)
    assert len(found.records) == 3 * version
    for row in found.records:
        part = ssms(network)[row["layer"]]
        rows = slice(4 * row["head"], 4 * row["head"] + 4)
        c, b = part.read("C")[rows].double(), part.read("B")[rows].double()
        dense = c.T @ b
        assert (row["part"], row["width"], row["rank"]) == ("cb", 64 if version == 1 else 32, 4)
        assert row["beta"] == pytest.approx(float(dense.trace()) / len(dense))
        assert row["z"] == pytest.approx(float(dense.trace() * (c.numel()) ** 0.5 / (c.norm() * b.norm())))
        corner = found.corners[(network.__class__.__name__, row["layer"], "cb", row["head"])]
        np.testing.assert_allclose(corner, dense[:5, :5], rtol=1e-5, atol=1e-7)


def test_z_of_state_space_layers_tells_mimetic_from_default(tmp_path):
    """The default has |z| < 5 (false alarm 6e-7 for each of 3); (W_C + W_B) / 2 has sqrt(d N / 2) = 11.3 +- 1."""
    default, mimetic = families.state_space(1, width=32), mimetic_ssm_(families.state_space(1, width=32))
    found = products(default, mimetic, labels=["default", "mimetic"])
    for row in found.select("cb", "default"):
        assert abs(row["z"]) < 5
    for row in found.select("cb", "mimetic"):
        assert abs(row["z"] - (64 * 4 / 2) ** 0.5) < 5
    assert found.count("cb", "mimetic").sure == 3
    assert found.finding("mimetic") == "CB diagonal positive in 3 of 3 groups of state-space layers (3 with z > 4)"
    assert "mimetic: 3 state-space layers, d = 64" in found.text()
    assert found.to_dict()["counts"]["mimetic"]["cb_groups"]["positive"] == 3
    for name, one in (("grid", products(mimetic)), ("depth", found)):
        one.plot(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_products_of_a_hybrid_and_of_a_file(tmp_path):
    network = families.state_space(2, width=32, layers=["default", "attention", "default"])
    found = products(network)
    assert [row["part"] for row in found.records] == ["qk", "vo", "vo", "cb", "cb", "cb", "cb"]
    assert "1 attention modules of 1 heads and 2 state-space layers" in found.text()
    path = tmp_path / "mamba.safetensors"
    plain = families.state_space(1, width=32)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    state["backbone.layers.1.mixer.x_proj.weight"][-1, 0] = math.nan
    save_file(state, path)
    again = products(str(path))
    assert [row["finite"] for row in again.records] == [True, False, True]
    assert "`backbone.layers.1.mixer.x_proj.weight` contains 1 NaN" in again.text()
    assert again.records[0]["z"] == pytest.approx(products(plain).records[0]["z"])
