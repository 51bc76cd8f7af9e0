"""Invariant covariances against brute force over all permutations, known densities, planted effects and renumbering."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from safetensors.torch import save_file
from scipy import stats

from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.cli import main
from weightscope.errors import DataError
from weightscope.fits.exchangeable import Exchangeable
from weightscope.fits.fitting import fit
from weightscope.init import mimetic_attention_
from weightscope.networks import ViT
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.exchangeable import (
    ExchangeableMoments,
    TypeCovariance,
    assembled,
    correlated_pairs,
    design_effect,
    invariant_parts,
)
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightArray
from weightscope.statistics.shrinkage import amplified, nearest_correlation

SPEC = WeightSpec(
    [
        TensorSpec("conv", (3, 1, 2)),
        TensorSpec("fc1.weight", (4, 3)),
        TensorSpec("fc1.bias", (4,)),
        TensorSpec("fc2.weight", (3, 4)),
        TensorSpec("q", (2, 3)),
        TensorSpec("k", (2, 3)),
        TensorSpec("head", (2, 3)),
        TensorSpec("mid", (4, 4)),
        TensorSpec("filters", (4, 4, 1, 2)),
        TensorSpec("maps", (4, 3, 4)),
        TensorSpec("three", (3, 3)),
        TensorSpec("two", (2, 2)),
    ]
)
AXES = {
    "conv": ("channels", None, None),
    "fc1.weight": ("hidden", "channels"),
    "fc1.bias": ("hidden",),
    "fc2.weight": ("channels", "hidden"),
    "q": ("~units", "channels"),
    "k": ("~units", "channels"),
    "head": (None, "channels"),
    "mid": ("hidden", "hidden"),
    "filters": ("hidden", "hidden", None, None),
    "maps": ("hidden", "channels", "hidden"),
    "three": ("channels", "channels"),
    "two": ("units", "units"),
}
PERMUTATIONS = PermutationSpec.from_axes(SPEC, AXES)


def elements():
    """All 3! x 4! x (2! x 2^2) renumberings as signed permutations of the D entries: (order, signs)."""
    for c, h, u in itertools.product(*(itertools.permutations(range(n)) for n in (3, 4, 2))):
        for signs in itertools.product([1.0, -1.0], repeat=2):
            element = {
                "channels": (np.array(c), np.ones(3)),
                "hidden": (np.array(h), np.ones(4)),
                "units": (np.array(u), np.array(signs)),
            }
            index = PERMUTATIONS.apply(SPEC.unpack(np.arange(1.0, SPEC.size + 1)), element)
            moved = SPEC.pack(index, dtype=np.float64)
            yield np.abs(moved).astype(int) - 1, np.sign(moved)


def weights(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, SPEC.size)) @ rng.standard_normal((SPEC.size, SPEC.size)) + rng.standard_normal(
        SPEC.size
    )


def dense(covariances) -> np.ndarray:
    """The D x D covariance of small ones, by way of the parts of the unit vectors."""
    out = np.zeros((SPEC.size, SPEC.size))
    for found, part in zip(covariances, invariant_parts(np.eye(SPEC.size), SPEC, PERMUTATIONS), strict=True):
        flat = part.reshape(SPEC.size, -1, found.kind.multiplicity)
        out += np.einsum("iac,cd,jad->ij", flat, found.covariance, flat)
    return out


def test_parts_are_an_orthogonal_decomposition() -> None:
    x = weights(5)
    parts = dict(zip((k.groups for k in PERMUTATIONS.types), invariant_parts(x, SPEC, PERMUTATIONS), strict=True))
    np.testing.assert_allclose(assembled(parts, SPEC, PERMUTATIONS), x, atol=1e-12)
    squares = sum(np.square(part).reshape(len(x), -1).sum(1) for part in parts.values())
    np.testing.assert_allclose(squares, np.square(x).sum(1), rtol=1e-12)
    assert sum(k.dimension * k.multiplicity for k in PERMUTATIONS.types) == SPEC.size


def test_the_streamed_estimate_is_the_projection_of_numpys_covariance() -> None:
    x = weights(20)
    raw = np.cov(x.T)
    projected = np.mean([raw[np.ix_(i, i)] * np.outer(s, s) for i, s in elements()], axis=0)
    moments = ExchangeableMoments(SPEC, PERMUTATIONS)
    for block in (x[:7], x[7:7], x[7:]):
        moments.update(block)
    np.testing.assert_allclose(dense(moments.covariances()), projected, atol=1e-12 * np.abs(raw).max())


def test_renumbering_each_network_changes_nothing() -> None:
    x, rng = weights(30), np.random.default_rng(3)
    moved = np.stack(
        [SPEC.pack(PERMUTATIONS.apply(SPEC.unpack(row), PERMUTATIONS.random(rng)), dtype=np.float64) for row in x]
    )
    assert not np.allclose(moved, x)
    before, after = (ExchangeableMoments(SPEC, PERMUTATIONS).update(rows).covariances("zero") for rows in (x, moved))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a.covariance, b.covariance, rtol=1e-10, atol=1e-10 * np.abs(a.covariance).max())


def test_filter_covariance_of_one_network_is_a_block_of_its_channels() -> None:
    """Thesis 3.1.1: the covariance of the filters of one layer, its channels being the samples."""
    spec = WeightSpec([TensorSpec("conv", (40, 1, 3, 3)), TensorSpec("bias", (40,))])
    x = np.random.default_rng(0).standard_normal((1, spec.size)) + 2
    permutations = PermutationSpec.from_axes(spec, {"conv": ("c", None, None, None), "bias": ("c",)})
    found = covariance_exchangeable(WeightArray(x, spec), permutations=permutations)
    kind = next(t for t in found.types if t.kind.groups == ("c",))
    block = kind.covariance[kind.kind.slices["conv"], kind.kind.slices["conv"]]
    np.testing.assert_allclose(block, np.cov(spec.unpack(x)["conv"][0].reshape(40, 9).T), atol=1e-12)


def planted(n: int, correlation: float, seed: int = 0) -> tuple[np.ndarray, WeightSpec, PermutationSpec]:
    """Networks in which the fc2 of two blocks have this correlation, entry by entry of one residual channel's mean."""
    spec = WeightSpec(
        [t for b in range(2) for t in (TensorSpec(f"blocks.{b}.fc1", (16, 8)), TensorSpec(f"blocks.{b}.fc2", (8, 16)))]
    )
    axes = {}
    for b in range(2):
        axes |= {f"blocks.{b}.fc1": (f"hidden.{b}", "channels"), f"blocks.{b}.fc2": ("channels", f"hidden.{b}")}
    rng = np.random.default_rng(seed)
    tensors = {t.name: rng.standard_normal((n, *t.shape)) for t in spec.tensors}
    shared = rng.standard_normal((n, 8))
    for b, sign in ((0, 1.0), (1, -1.0)):
        name = f"blocks.{b}.fc2"
        own = tensors[name].mean(2, keepdims=True)
        mixed = np.sqrt(abs(correlation)) * sign * shared[..., None] / 4 + np.sqrt(1 - abs(correlation)) * own
        tensors[name] += mixed - own
    x = np.concatenate([tensors[t.name].reshape(n, -1) for t in spec.tensors], axis=1)
    return x, spec, PermutationSpec.from_axes(spec, axes)


def test_a_planted_correlation_across_layers_is_found_and_drawn() -> None:
    x, spec, permutations = planted(1000, 0.6)
    found = covariance_exchangeable(WeightArray(x, spec), permutations=permutations)
    first = found.pairs()[0]
    assert {first.a, first.b} == {"blocks.0.fc2", "blocks.1.fc2"}
    assert first.groups == ("channels",)
    assert abs(first.correlation + 0.6) < 5 * 0.64 / np.sqrt(7000)
    assert first.p < 1e-100
    fitted = Exchangeable.fit(x, spec, permutations=permutations)
    again = covariance_exchangeable(
        WeightArray(fitted.sample(np.random.default_rng(1), 1000), spec), permutations=permutations
    ).pairs()[0]
    assert {again.a, again.b} == {"blocks.0.fc2", "blocks.1.fc2"}
    assert abs(again.correlation + 0.6) < 0.05
    found.__dict__["_pairs"] = [replace(first, z=-np.inf)]
    assert "no spread over networks" in found.text().splitlines()[-1], "not p = 0"
    found.__dict__["_pairs"] = [replace(first, p=8.6e-205)]
    assert "  < 0.001  " in found.text().splitlines()[-1]


def test_a_diagonal_that_goes_with_a_bias_is_found() -> None:
    spec = WeightSpec([TensorSpec("mid.weight", (8, 8)), TensorSpec("mid.bias", (8,))])
    x = np.random.default_rng(0).standard_normal((100, spec.size))
    tensors = spec.unpack(x)
    tensors["mid.weight"][:, range(8), range(8)] += tensors["mid.bias"]
    axes = {"mid.weight": ("c", "c"), "mid.bias": ("c",)}
    found = covariance_exchangeable(WeightArray(x, spec), permutations=axes)
    first, second = found.pairs()[:2]
    assert {first.a, first.b} == {"mid.weight diagonal", "mid.bias"}
    assert abs(first.correlation - np.sqrt(0.5)) < 5 * 0.5 / np.sqrt(700)
    assert second.p > 1e-4
    assert "mid.weight diagonal" in found.text()


@pytest.mark.parametrize(("n", "spread"), [(30, 0.0), (8, 1.0)])
def test_intervals_of_canonical_correlations_cover(n: int, spread: float) -> None:
    """Several copies each: the interval covers no correlation, and a planted one, in at least 95 % of populations."""
    spec = WeightSpec([TensorSpec("a", (8, 6)), TensorSpec("b", (8, 5))])
    permutations = PermutationSpec.from_axes(spec, {"a": ("units", None), "b": ("units", None)})
    for rho in (0.0, 0.3):
        covered = tested = 0
        for seed in range(100):
            rng = np.random.default_rng(seed)
            x = rng.standard_normal((n, spec.size))
            a, b = (spec.unpack(x)[name] for name in ("a", "b"))
            b[..., 0] = rho * a[..., 0] + np.sqrt(1 - rho**2) * b[..., 0]
            x *= np.exp(spread * rng.standard_normal((n, 1)))
            for pair in correlated_pairs(ExchangeableMoments(spec, permutations).update(x).covariances()):
                covered, tested = covered + (pair.ci95[0] <= rho <= pair.ci95[1]), tested + 1
        assert tested > 50, "the few of very unequal scale have too few samples for a test"
        assert covered >= stats.binom.isf(1 - 1e-4, tested, 0.95)


@pytest.mark.parametrize("units", [3, 8])
def test_correlations_of_few_units_are_not_too_small(units: int) -> None:
    """Sample correlations of 3 units have mean 0.50 where the true one is 0.6; the interval covers 0.6."""
    spec = WeightSpec([TensorSpec("a", (units,)), TensorSpec("b", (units,))])
    permutations = PermutationSpec.from_axes(spec, {"a": ("units",), "b": ("units",)})
    covered = 0
    for seed in range(100):
        x = np.random.default_rng(seed).standard_normal((256, spec.size))
        x[:, units:] = -0.6 * x[:, :units] + 0.8 * x[:, units:]
        (pair,) = correlated_pairs(ExchangeableMoments(spec, permutations, index=False).update(x).covariances())
        covered += pair.ci95[0] <= -0.6 <= pair.ci95[1]
    assert stats.binom.isf(1 - 1e-4, 100, 0.95) <= covered


def test_standard_errors_know_that_networks_differ() -> None:
    """Entries of a network that share a scale are no independent samples; the error over networks says so."""
    x, spec, permutations = planted(400, 0.0)
    scales = np.exp(np.random.default_rng(0).standard_normal((400, 1)))
    plain, mixed = (
        next(
            t
            for t in ExchangeableMoments(spec, permutations).update(rows).covariances()
            if t.kind.groups == ("channels",)
        )
        for rows in (x, x * scales)
    )
    assert 0.7 < design_effect(plain) < 1.4
    assert design_effect(mixed) > 3
    assert all(pair.p > 1e-3 for pair in correlated_pairs((mixed,)))


def test_too_few_networks_and_bad_numbers_are_refused() -> None:
    moments = ExchangeableMoments(SPEC, PERMUTATIONS)
    with pytest.raises(DataError, match="at least 2 networks"):
        moments.update(weights(1)).covariances()
    assert len(moments.covariances("zero")) == len(PERMUTATIONS.types)
    with pytest.raises(DataError, match="NaN or infinity"):
        moments.update(np.full((1, SPEC.size), np.nan))
    with pytest.raises(DataError, match="differ in"):
        ExchangeableMoments(WeightSpec(SPEC.tensors[1:]), PERMUTATIONS)


def test_nearest_correlation_against_highams_example() -> None:
    """Higham 2002, section 4: the nearest correlation matrix of a tridiagonal one."""
    found = nearest_correlation(np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]), floor=0.0)
    expected = np.array([[1.0, 0.7607, 0.1573], [0.7607, 1.0, 0.7607], [0.1573, 0.7607, 1.0]])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    valid = np.array([[1.0, 0.5], [0.5, 1.0]])
    np.testing.assert_allclose(nearest_correlation(valid), valid, atol=1e-12)


def test_amplification_keeps_what_is_significant_and_says_what_it_did() -> None:
    correlation = np.array([[1.0, 0.10, 0.01], [0.10, 1.0, 0.40], [0.01, 0.40, 1.0]])
    matrix, done = amplified(correlation, np.full((3, 3), 0.02), 3.0)
    assert (done["kept"], done["dropped"], done["clipped"]) == (2, 1, 1)
    assert np.linalg.eigvalsh(matrix)[0] > 0
    np.testing.assert_allclose(matrix.diagonal(), 1.0)
    assert 0.2 < matrix[0, 1] < 0.4 < 0.8 < matrix[1, 2] <= 0.9
    slope = (matrix[0, 1] * 0.1 + matrix[1, 2] * 0.4) / (0.1**2 + 0.4**2)
    assert done["achieved"] == pytest.approx(slope), "of 3: the larger one is clipped"
    assert amplified(correlation, np.full((3, 3), 0.02), 1.0)[1]["achieved"] == pytest.approx(1)


def test_inflation_does_not_depend_on_the_unit_of_the_weights() -> None:
    """Weights of trained networks are small: products of their squares are far below one."""
    spec = WeightSpec([TensorSpec(name, (12,)) for name in ("gain", "bias")])
    permutations = PermutationSpec.from_axes(spec, {"gain": ("c",), "bias": ("c",)})
    x = np.random.default_rng(0).standard_normal((8, spec.size)) * np.arange(1, 9)[:, None]
    one, small = (ExchangeableMoments(spec, permutations).update(f * x).covariances() for f in (1.0, 1e-3))
    for a, b in zip(one, small, strict=True):
        if a.inflation is not None:
            np.testing.assert_allclose(b.inflation, a.inflation, rtol=1e-9)
    assert max(a.inflation.max() for a in one if a.inflation is not None) > 1.2


@pytest.mark.parametrize(
    ("by", "scale", "mean", "n"),
    [("network", 0.7, 3.0, 8), ("unit", 0.7, 1.0, 8), ("first", 3.0, 3.0, 96)],
)
def test_scales_and_means_that_tensors_share_make_no_false_alarms(by: str, scale: float, mean: float, n: int) -> None:
    """300 populations of n networks: 5 % is 15, 31 or more have p = 2e-4. Pairs, and errors of amplified fits.

    Networks or units differ in scale by this log sd, or the first 64 networks are e^3 times as large; each unit has a
    mean that all networks and tensors share. About means over networks whose errors forget the cross terms, false
    alarms were 19 % (pairs) and 18 % (errors); 84 % where units differ in scale; 28 % where what is subtracted is the
    mean of copies scaled to length one, since the median of the large networks is far from the others.
    """
    spec = WeightSpec([TensorSpec("conv", (12, 1, 2, 2)), *(TensorSpec(name, (12,)) for name in ("gain", "bias"))])
    permutations = PermutationSpec.from_axes(spec, {"conv": ("c", None, None, None), "gain": ("c",), "bias": ("c",)})
    g, pairs, amplified_pairs = np.random.default_rng(0), 0, 0
    shared = g.standard_normal((300, 12))

    def networks(means: np.ndarray, planted: float = 0.0) -> np.ndarray:
        tensors = spec.unpack(g.standard_normal((n, spec.size)))
        first = (np.arange(n) < 64)[:, None]
        factor = np.exp(scale * (first if by == "first" else g.standard_normal((n, 12 if by == "unit" else 1))))
        tensors["bias"] += planted * tensors["gain"]
        shapes = {name: (-1, *[1] * (x.ndim - 2)) for name, x in tensors.items()}
        rows = [x * factor.reshape(n, *shapes[k]) + mean * means.reshape(shapes[k]) for k, x in tensors.items()]
        return np.concatenate([x.reshape(n, -1) for x in rows], axis=1)

    def found(means: np.ndarray, planted: float = 0.0) -> list[TypeCovariance]:
        return ExchangeableMoments(spec, permutations).update(networks(means, planted)).covariances()

    for means in shared:
        some = found(means)
        pairs += min(pair.p for pair in correlated_pairs(some)) < 0.05
        amplified_pairs += 2 * stats.t.sf(abs(some[1].correlation()[4, 5]) / some[1].errors[4, 5], n - 1) < 0.05
    assert pairs < 31
    assert amplified_pairs < 31
    power = [pair.p < 0.01 for means in shared[:20] for pair in correlated_pairs(found(means, 0.9)) if pair.signed]
    assert np.mean(power) > 0.3


def test_what_all_networks_share_is_in_no_pair() -> None:
    spec = WeightSpec([TensorSpec("positions", (1, 5, 12)), TensorSpec("gain", (12,)), TensorSpec("bias", (12,))])
    permutations = PermutationSpec.from_axes(spec, {"positions": (None, None, "c"), "gain": ("c",), "bias": ("c",)})
    x = np.random.default_rng(0).standard_normal((30, spec.size))
    x[:, :60] = x[0, :60]
    found = covariance_exchangeable(WeightArray(x, spec), permutations=permutations)
    assert len(found.pairs()) == 1
    assert found.constant == found.to_dict()["constant"] == ["positions"]
    assert "the same in all networks, in no pair: `positions`" in found.text()


def test_mimetic_attention_is_two_entries_of_the_table() -> None:
    """Queries and keys positive, values and outputs negative, from one network; in a default network nothing."""
    torch.manual_seed(0)
    default = ViT(16, 4, 96, 2, 3, 10)
    assert all(pair.p > 1e-4 for pair in covariance_exchangeable(default).pairs())
    pairs = covariance_exchangeable(mimetic_attention_(default)).pairs()
    found = {(pair.a, pair.b): pair for pair in pairs if len(pair.groups) == 2}
    for block in (0, 1):
        assert found[f"blocks.{block}.attn.qkv.weight[q]", f"blocks.{block}.attn.qkv.weight[k]"].z > 50
        assert found[f"blocks.{block}.attn.qkv.weight[v]", f"blocks.{block}.attn.proj.weight"].z < -50


def test_layers_of_a_safetensors_file_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Such a file lists its tensors in alphabetical order, layer 10 before layer 2."""
    vit = ViT(8, 4, 4, 11, 1, 3)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    found = covariance_exchangeable(tmp_path / "vit.safetensors")
    order = [view.name for view in found.types[0].kind.views if view.name.endswith("norm1.bias")]
    assert order == [f"blocks.{i}.norm1.bias" for i in range(11)]
    figure = found.plot()
    assert any("from 1 network: " in text.get_text() for text in figure.findobj(Text))


def test_fit_compares_it_over_a_whole_network() -> None:
    x, spec, _ = planted(300, 0.6)
    names = {t.name: f"stages.0.{t.name[:8]}.mlp.{t.name[9:]}.weight" for t in spec.tensors}  # as a ConvNeXt has them
    spec = WeightSpec([TensorSpec(names[t.name], t.shape) for t in spec.tensors])
    result = fit(WeightArray(x, spec), "*", joint="all", structure=["diagonal", "dense", "exchangeable"])
    assert result.groups[0].structure is not None
    assert result.groups[0].structure.name == "exchangeable"
    rows = {row["structure"]: row for row in result.rows()}
    assert rows["diagonal"]["difference"] < -3 * rows["diagonal"]["difference_se"]
    assert rows["dense"]["difference"] < -3 * rows["dense"]["difference_se"]


@pytest.mark.parametrize("option", ["--cells=600", "--init=default", "--kind=correlation"])
def test_the_command_refuses_options_that_do_not_apply(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["covariance", str(tmp_path), "--exchangeable", option])
    assert stop.value.code == 2
    assert (
        "does not apply with --exchangeable, which takes --select, --computed, --fold-norms, --permutations"
        in capsys.readouterr().err
    )
