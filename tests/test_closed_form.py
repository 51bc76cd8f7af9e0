"""Numbers of closed-form initialisers, recovered from networks that were initialised with them."""

import copy
import json
import math
import re

import numpy as np
import pytest
import torch
from families import seeded
from programs import run
from safetensors.torch import save_file as save_torch
from torch import nn

import weightscope.init as wi
from weightscope.analysis.inspection import inspect
from weightscope.anatomy import attention, depthwise
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.cli import main
from weightscope.cli.options import parsed_options
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.fits import load_artifact
from weightscope.fits.filters import FilterFit
from weightscope.fits.one_network import NETWORK_FITS, fit_conv_schedule, fit_identity_product, fit_network
from weightscope.init.attention import write_query_key, write_value_output
from weightscope.init.convolution import PRESETS, conv_covariance
from weightscope.networks import ConvMixer, ConvNeXt, ViT


def mixer(width=256, depth=8, kernel=7, seed=0):
    torch.manual_seed(seed)
    return ConvMixer(width, depth, kernel, 4, 5)


def vit(width=96, depth=4, heads=3, seed=0):
    torch.manual_seed(seed)
    return ViT(16, 4, width, depth, heads, 5)


def stack(width, depth, kernel):
    """Depthwise convolutions alone."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(width, width, kernel, groups=width) for _ in range(depth)))


@pytest.mark.parametrize("preset", ["figure-a4", "imagenet-thawed"])
def test_a_schedule_is_recovered(preset):
    """Filters whose sample covariance is the closed form to rounding: whitened noise times its root."""
    from weightscope.init.convolution import covariance_root

    source = mixer(200, 5, 5).double()
    curve = PRESETS[preset]
    noise = torch.randn(200, 25, generator=seeded(), dtype=torch.float64)
    noise -= noise.mean(0)
    white = noise @ torch.linalg.inv(torch.linalg.cholesky(noise.T @ noise / 199)).T
    for part in depthwise(source):
        root = torch.from_numpy(covariance_root(conv_covariance(5, curve(part.layer / 4))))
        part.write((2 * white @ root.T).reshape(200, 5, 5))
    found = fit_conv_schedule(source)
    assert (found.sigma0, found.v, found.a) == pytest.approx((curve.sigma0, curve.v, curve.a), abs=2e-3)
    assert found.scale == pytest.approx(2, rel=1e-3)
    assert found.r2 == pytest.approx(1, abs=1e-5)


def test_goodness_of_fit_is_the_stated_formula():
    source = wi.random_filters_(mixer(64, 2, 3), generator=seeded())
    for layer, part in zip(fit_conv_schedule(source, psd="clip").layers, depthwise(source), strict=True):
        sample = np.cov(part.read().double().reshape(64, -1).numpy().T)
        values, vectors = np.linalg.eigh(conv_covariance(3, layer.sigma))
        closed = (vectors * np.maximum(values, 0)) @ vectors.T
        # The least-squares factor, and what is left.
        factor = np.linalg.lstsq(closed.reshape(-1, 1), sample.reshape(-1), rcond=None)[0][0]
        assert layer.scale == pytest.approx(math.sqrt(factor), rel=1e-9)
        rest = np.sum((sample - factor * closed) ** 2) / np.sum(sample**2)
        assert layer.r2 == pytest.approx(1 - rest, rel=1e-9)
        square, trace = np.sum(closed**2), np.trace(closed)
        assert layer.attainable == pytest.approx(square / (square + (trace**2 + square) / 63), rel=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_shallow_networks_fix_as_many_numbers_as_they_have_layers(depth):
    source = wi.conv_covariance_(stack(1000, depth, 5), preset="imagenet-frozen", generator=seeded())
    found = fit_conv_schedule(source)
    curve = PRESETS["imagenet-frozen"]
    for layer in found.layers:
        assert layer.sigma == pytest.approx(curve(layer.depth), rel=0.1)
    assert (found.v == 0) == (depth < 2)
    assert (found.a == 0) == (depth < 3)


def test_a_sawtooth_is_recovered_stage_by_stage():
    torch.manual_seed(0)
    source = ConvNeXt((256, 256), (4, 4))
    wi.conv_covariance_(source, preset="imagenet-frozen", schedule="sawtooth", generator=seeded())
    found = fit_conv_schedule(source, schedule="sawtooth")
    curve = PRESETS["imagenet-frozen"]
    assert found.sigma0 == pytest.approx(curve.sigma0, rel=0.1)
    assert found.sigma0 + found.v + found.a / 2 == pytest.approx(curve(1.0), rel=0.1)
    assert found.r2 > fit_conv_schedule(source).r2


def test_a_schedule_never_falls_to_zero():
    """Sigma shrinks with depth: a parabola through the layers' own would be negative in between."""
    source = mixer(256, 5, 5)
    for part, sigma in zip(depthwise(source), (2.0, 0.4, 0.03, 0.03, 0.9), strict=True):
        wi.conv_covariance_(holder := mixer(256, 1, 5), sigma0=sigma, v=0.0, a=0.0, generator=seeded(part.layer))
        part.write(depthwise(holder)[0].read())
    found = fit_conv_schedule(source)
    assert min(found.sigma0 + found.v * d + found.a * d**2 / 2 for d in np.linspace(0, 1, 101)) > 0
    wi.conv_covariance_(mixer(16, 20, 5), sigma0=found.sigma0, v=found.v, a=found.a)


def test_the_artifact_of_a_schedule_is_the_call_that_it_prints(tmp_path):
    source = wi.conv_covariance_(mixer(), preset="imagenet-thawed", generator=seeded())
    fitted = fit_network(source, "conv_schedule", psd="clip")
    init = wi.load_init(fitted.save(tmp_path / "schedule.safetensors"))
    given = {key: getattr(fitted, key) for key in ("sigma0", "v", "a", "scale", "psd", "schedule")}
    for make in (lambda: mixer(24, 3, 9), lambda: ConvNeXt((8, 16), (2, 1))):
        one, other = init(make(), generator=seeded(5)), wi.conv_covariance_(make(), **given, generator=seeded(5))
        for mine, theirs in zip(depthwise(one), depthwise(other), strict=True):
            assert torch.equal(mine.read(), theirs.read())
    assert f"sigma0={fitted.sigma0:.4g}" in inspect(str(tmp_path / "schedule.safetensors")).text()


@pytest.mark.parametrize(
    ("width", "heads", "numbers"),
    [
        (192, 3, (0.7, 0.7, 0.4, 0.4)),
        (192, 12, (0.7, 0.7, 0.4, 0.4)),  # heads of 16: their products have a twelfth of the rank
        (96, 2, (0.3, -0.6, 0.5, -0.3)),
        (64, 1, (0.9, 0.1, 0.1, 0.9)),
    ],
)
def test_alpha_and_beta_are_recovered(width, heads, numbers):
    """Within 4 / width and 2 %: products fluctuate by 1 / width, and the limit of large widths is simulated at 192."""
    names = ("alpha_qk", "beta_qk", "alpha_vo", "beta_vo")
    source = wi.mimetic_attention_(vit(width, 3, heads), **dict(zip(names, numbers, strict=True)), generator=seeded())
    for layer in fit_identity_product(source).layers:
        found = (layer.qk.alpha, layer.qk.beta, layer.vo.alpha, -layer.vo.beta)
        assert found == pytest.approx(numbers, rel=0.02, abs=4 / width)
        assert max(layer.qk.residual, layer.vo.residual) < 2 / width  # of singular values a place off, 2.1 and more


def test_a_multiple_of_a_projection_has_no_noise():
    """W W^T = beta P of rank r is the best part of rank r of beta I, so alpha = 0, exactly."""
    source = vit(96, 1, 3)
    part = attention(source)[0]
    basis = torch.linalg.qr(torch.randn(96, 32, generator=seeded(), dtype=torch.float64))[0]
    for name in ("q", "k"):
        part.write(name, basis.mul(0.8).expand(3, -1, -1))
    found = fit_identity_product(source, parts="qk").layers[0].qk
    assert (found.alpha, found.beta) == pytest.approx((0, 0.64), abs=1e-3)
    assert found.residual < 1e-3


def test_one_layer_that_is_not_square_is_left_out_and_listed(tmp_path, capsys):
    model = nn.Sequential(nn.Conv2d(3, 64, 1), *(nn.Conv2d(64, 64, k, groups=64) for k in (3, (1, 7), 3)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=seeded()))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for structure in ("filters", "conv_schedule"):
        out = tmp_path / f"{structure}.safetensors"
        with pytest.raises(SystemExit) as end:
            main(["fit-init", str(tmp_path / "m.pt"), "--structure", structure, "-o", str(out)])
        assert end.value.code == 0
        assert "left out, not square: 2 1x7" in capsys.readouterr().out
        init = wi.load_init(out)
        assert init.result.left_out == ("2 1x7",)
        target = copy.deepcopy(model)
        with pytest.raises(UsageError, match=r"expected square filters of odd size, found `2` 1 x 7.*strict=False"):
            init(target)
        assert all(torch.equal(a, b) for a, b in zip(target.parameters(), model.parameters(), strict=True))
        with pytest.warns(UserWarning, match="left as they are, not square: `2` 1 x 7"):
            init(target, generator=seeded(), strict=False)
        assert torch.equal(target[2].weight, model[2].weight)
        assert not torch.equal(target[1].weight, model[1].weight)
        assert set(init.report.touched) == {"1.weight", "3.weight"}


def test_shared_keys_are_recovered():
    """Three query heads with one key have smaller diagonals than one would; at width 192, as above."""
    sizes = {"q": 192, "k": 64, "v": 64, "o": 192}
    state = {f"layers.{i}.self_attn.{p}_proj.weight": torch.zeros(n, 192) for i in range(2) for p, n in sizes.items()}
    config = {"num_attention_heads": 6, "num_key_value_heads": 2}
    g = seeded()
    for part in attention(state, config):
        write_query_key(part, "svd", 0.7, 0.7, g)
        write_value_output(part, "svd", 0.4, 0.4, g)
    for layer in fit_network(state, "identity_product", config=config).layers:
        assert (layer.qk.alpha, layer.qk.beta) == pytest.approx((0.7, 0.7), abs=4 / 192)
        assert (layer.vo.alpha, layer.vo.beta) == pytest.approx((0.4, -0.4), abs=4 / 192)
        assert layer.qk.residual < 0.05
        assert layer.vo.residual < 0.05


def test_a_recipe_has_the_diagonal_and_the_norm_of_the_product():
    """Whatever the product is, not only a mimetic one: same-shape application reproduces both moments."""
    source = vit(192, 2, 6)
    g = seeded(3)
    for part in attention(source):
        q = torch.randn(6, 192, 32, generator=g) * 0.1
        part.write("q", q)
        part.write("k", q + 0.1 * torch.randn(6, 192, 32, generator=g))
    fitted = fit_network(source, "identity_product")
    target = vit(192, 2, 6, seed=1)
    wi.NetworkInit(fitted)(target, generator=seeded())
    for theirs, mine in zip(attention(source), attention(target), strict=True):
        found = []
        for part in (theirs, mine):
            q, k = part.read("q").double(), part.read("k").double()
            rows = FactoredProduct(q, k).statistics()
            found.append([float(rows[key].mean()) for key in ("diagonal_mean", "alpha")])
        assert found[1] == pytest.approx(found[0], rel=0.02)


def test_layer_scale_is_folded_or_warned_of():
    """Folding s is fitting a network whose output projections carry it; left out, the text says so."""
    torch.manual_seed(0)
    scaled = ViT(16, 4, 48, 2, 3, 5, layer_scale=1.0)
    wi.mimetic_attention_(scaled, generator=seeded())
    g = seeded(1)
    for block in scaled.blocks:
        nn.init.normal_(block.ls1.gamma, generator=g)
    merged = {name: value.clone() for name, value in scaled.state_dict().items() if ".ls1." not in name}
    for i, block in enumerate(scaled.blocks):
        merged[f"blocks.{i}.attn.proj.weight"] *= block.ls1.gamma.detach()[:, None]
    config = {"num_attention_heads": 3}
    folded = fit_network(scaled, "identity_product", fold_scales=True)
    for mine, theirs in zip(folded.layers, fit_identity_product(merged, config=config).layers, strict=True):
        assert mine.vo.beta == pytest.approx(theirs.vo.beta, rel=1e-6)
        assert mine.vo.alpha == pytest.approx(theirs.vo.alpha, rel=1e-6)
    plain = fit_network(scaled, "identity_product")
    assert plain.layers[0].vo.beta == pytest.approx(-0.4, abs=0.1)
    assert "warning: LayerScale" in plain.text()
    assert "folded" in folded.text()
    assert "LayerScale" not in fit_network(merged, "identity_product", config=config).text()
    scaled.blocks[1].ls1.gamma.data[3] = math.nan
    with pytest.raises(DataError, match=r"ls1\.gamma.*1 of 48"):
        fit_network(scaled, "identity_product", fold_scales=True)


def test_the_rows_are_the_ten_line_computation():
    source = vit(48, 2, 3)
    for layer, part in zip(fit_identity_product(source).layers, attention(source), strict=True):
        q, k, v, o = (part.read(name).double().numpy() for name in "qkvo")
        products = [q[h] @ k[h].T for h in range(3)]
        total = sum(v[h] @ o[h] for h in range(3))
        for found, several in ((layer.qk, products), (layer.vo, [total])):
            betas = [np.trace(m) / 48 for m in several]
            rests = [np.linalg.norm(m - b * np.eye(48)) / math.sqrt(48) for m, b in zip(several, betas, strict=True)]
            r2 = [48 * b**2 / np.sum(m**2) for m, b in zip(several, betas, strict=True)]
            assert found.diagonal == pytest.approx(np.mean(betas), abs=1e-12)
            assert found.noise == pytest.approx(np.mean(rests))
            assert found.r2 == pytest.approx(np.mean(r2), abs=1e-12)
        assert layer.vo.beta == pytest.approx(layer.vo.diagonal, rel=0.03, abs=1e-3)  # full rank: least squares
        assert layer.vo.alpha == pytest.approx(layer.vo.noise, rel=0.03)


def test_a_recipe_fits_any_width_depth_and_head_count(tmp_path):
    source = vit(192, 3, 3)
    for i, beta in enumerate((0.2, 0.6, 1.0)):
        wi.mimetic_attention_(source, beta_qk=beta, alpha_qk=0.1, layers=i, generator=seeded(i))
    init = wi.load_init(fit_network(source, "identity_product").save(tmp_path / "p.safetensors"))
    target = init(vit(144, 5, 4, seed=1), generator=seeded())
    found = fit_identity_product(target).layers
    assert [layer.qk.beta for layer in found] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=0.04)
    assert [layer.vo.beta for layer in found] == pytest.approx([-0.4] * 5, abs=0.04)
    assert len(init.report.touched) == 10  # a fused projection and an output in each of 5 layers
    assert "head.weight" in init.report.untouched
    only = init(vit(48, 1, 2), generator=seeded())
    assert fit_identity_product(only).layers[0].qk.beta == pytest.approx(0.2, abs=0.1)


def test_parts_are_chosen():
    source = wi.mimetic_attention_(vit(), generator=seeded())
    target = vit(seed=1)
    before = [(part.read("q"), part.read("v"), part.read("o")) for part in attention(target)]
    init = wi.NetworkInit(fit_network(source, "identity_product", parts="vo"))
    init(target, generator=seeded())
    for (q, v, o), part in zip(before, attention(target), strict=True):
        assert torch.equal(part.read("q"), q)
        assert not torch.equal(part.read("v"), v)
        assert not torch.equal(part.read("o"), o)


def test_weights_that_are_not_finite():
    source = vit()
    with torch.no_grad():
        source.blocks[1].attn.qkv.weight[3, 4] = math.nan
    with pytest.raises(DataError, match=r"`blocks\.1\.attn\.qkv\.weight`: 1 of 9216 weights are NaN"):
        fit_network(source, "identity_product")


def test_networks_that_have_nothing_to_fit():
    with pytest.raises(AnatomyError, match="expected attention"):
        fit_network(mixer(16, 2, 3), "identity_product")
    for structure in ("filters", "conv_schedule"):
        for source in (vit(), nn.Sequential(nn.ReLU())):
            with pytest.raises(AnatomyError, match="expected depthwise"):
                fit_network(source, structure)
    with pytest.raises(DataError, match="filters are all equal"):
        fit_network(wi.box_filters_(mixer(16, 2, 3)), "conv_schedule")
    with pytest.raises(DataError, match="the product is zero"):
        fit_network(wi.mimetic_attention_(vit(), alpha_qk=0.0, beta_qk=0.0), "identity_product")
    with pytest.raises(UsageError, match="no layer has 9 x 9 filters, found 3"):
        fit_network(mixer(16, 2, 3), "conv_schedule", kernel=9)


@pytest.mark.parametrize(
    ("structure", "options", "message"),
    [
        ("magic", {}, "no network structure 'magic'; there are filters, conv_schedule, identity_product"),
        ("dense", {}, "'dense' needs a population .*for one network"),
        ("filters", {"rank": 3}, "filters has no option 'rank'; its options are kronecker"),
        ("conv_schedule", {"psd": "no"}, "psd: expected one of"),
    ],
)
def test_invalid_structures_and_options(structure, options, message):
    with pytest.raises(UsageError, match=message):
        fit_network(mixer(16, 2, 3), structure, **options)


def first_layers(source, *, kernel: int = 3):
    """A fit as a user would write it."""
    found = fit_network(source, "filters", kernel=kernel)
    return FilterFit(layers=found.layers[:1], kernel=kernel)


def test_a_fit_of_ones_own_and_names_with_hyphens(tmp_path):
    source = mixer(16, 3, 3)
    for structure in (first_layers, f"{__name__}:first_layers"):
        found = fit_network(source, structure, kernel=3)
        assert (len(found.layers), found.provenance["source"]) == (1, "ConvMixer")
        again = load_artifact(found.save(tmp_path / "own.safetensors"))
        np.testing.assert_array_equal(again.layers[0].covariance, found.layers[0].covariance)
        with pytest.raises(UsageError, match="has no option 'rank'; its options are kernel"):
            fit_network(source, structure, rank=1)
    one, other = (fit_network(source, name).to_dict() for name in ("conv-schedule", "conv_schedule"))
    assert one == other


def test_fits_are_tables_and_what_was_saved_is_what_is_loaded(artifacts):
    for structure, path in artifacts.items():
        found = load_artifact(path)
        assert found.save(path.with_suffix(".again")).read_bytes() == path.read_bytes()
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
        assert f"Fit: {structure} of {len(found.layers)} layers, fitted to " in repr(found)
        assert len(found.to_pandas()) == len(found.rows()) == len(found.layers) * (1 + ("identity" in structure))


@pytest.fixture(scope="module")
def fits():
    sources = {"conv_schedule": mixer(64, 3, 5), "identity_product": vit()}
    return {structure: fit_network(source, structure) for structure, source in sources.items()}


@pytest.fixture
def artifacts(fits, tmp_path):
    return {structure: found.save(tmp_path / f"{structure}.safetensors") for structure, found in fits.items()}


@pytest.fixture
def models(tmp_path):
    """A ConvMixer's and a ViT's checkpoints."""
    save_torch(mixer(32, 3, 5).state_dict(), tmp_path / "mixer.safetensors")
    folder = tmp_path / "vit"
    folder.mkdir()
    save_torch(vit().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_attention_heads": 3}')
    return {"mixer": tmp_path / "mixer.safetensors", "vit": folder}


@pytest.mark.parametrize("structure", list(NETWORK_FITS))
def test_fit_init_of_a_checkpoint_inspect_and_bench(structure, models, tmp_path, capsys):
    source, out = models["vit" if structure == "identity_product" else "mixer"], tmp_path / f"{structure}.safetensors"
    table = tmp_path / "table.json"
    arguments = ("fit-init", source, "--structure", structure, "-o", out, "--json", table)
    code, text, err = run(*arguments, capsys=capsys)
    assert code == 0, err
    assert f"{structure}, fitted to {source.name}" in text
    assert json.loads(table.read_text())["numbers"]["structure"] == structure
    code, shown, _ = run("inspect", out, capsys=capsys)
    assert code == 0
    assert shown.strip() in text
    assert wi.load_init(out).result.provenance["source"] == source.name


def test_heads_of_a_file_without_a_config_are_an_option(models, tmp_path, capsys):
    save_torch(vit().state_dict(), tmp_path / "bare.safetensors")
    arguments = (
        "fit-init",
        tmp_path / "bare.safetensors",
        "--structure",
        "identity_product",
        "-o",
        tmp_path / "p.safetensors",
    )
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 3
    assert "--heads H" in err
    code, text, err = run(*arguments, "--num-heads", 3, capsys=capsys)
    assert code == 0, err
    assert "identity_product" in text


def test_options_of_a_structure(models, tmp_path, capsys):
    arguments = ("fit-init", models["mixer"], "--structure", "filters", "-o", tmp_path / "f.safetensors")
    code, text, _ = run(*arguments, "--option", "kronecker=true", "--option", "schedule=stage", capsys=capsys)
    assert code == 0
    assert "kronecker True, means False, schedule stage, psd abs, all kernels" in text
    assert "kernel 5 only" in fit_network(mixer(16, 2, 5), "filters", kernel=5).text()
    assert parsed_options(["rank=8", "a=x=y", "c=true"]) == {"rank": 8, "a": "x=y", "c": True}
    for bad in (["rank"], ["=3"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="name=value"):
            parsed_options(bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MIXER",), "'auto' needs a population .*for one network .*: filters, conv_schedule"),
        (("MIXER", "--structure", "filters", "--select", "*"), "--select: does not apply to one network"),
        (("POP", "--structure", "filters"), "no structure 'filters'; there are iso"),
    ],
)
def test_the_wrong_kind_of_source_is_one_line(models, tmp_path, arguments, message, capsys):
    import fake_training as fake

    fake.write_population(tmp_path / "a.pop", fake.recipe())
    known = {"MIXER": models["mixer"], "POP": tmp_path / "a.pop"}
    filled = [known.get(a, a) for a in arguments]
    code, _, err = run("fit-init", *filled, "-o", tmp_path / "out.safetensors", capsys=capsys)
    assert code in (2, 3)
    assert err.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()
    assert re.search(message, err)
