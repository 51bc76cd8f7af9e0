"""`analyses/one_structure/filter_mlp.py`: the correlation, its standard error, and a planted effect."""

import numpy as np
import pytest
from programs import script
from scipy import stats

from weightscope.errors import AnatomyError, DataError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray

filter_mlp_correlation = script("analyses/one_structure/filter_mlp.py").filter_mlp_correlation
C, P = 6, 8
SPEC = WeightSpec(
    TensorSpec(f"stages.0.blocks.{i}.{name}", shape)
    for i in range(2)
    for name, shape in (
        ("conv_dw.weight", (C, 1, 3, 3)),
        ("norm.weight", (C,)),
        ("mlp.fc1.weight", (P, C)),
        ("mlp.fc2.weight", (C, P)),
    )
)


def tensors(rows, block):
    names = ("conv_dw.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    full = [f"stages.0.blocks.{block}.{name}" for name in names]
    return [rows[:, SPEC.slices[name]].reshape(-1, *SPEC[name].shape) for name in full]


def coordinates(rows, block):
    """f (N, C) and d (N, C), by loops."""
    filters, fc1, fc2 = tensors(rows, block)
    diagonal = np.array([[one[c] @ other[:, c] for c in range(C)] for one, other in zip(fc2, fc1, strict=True)])
    return filters[:, :, 0, 1, 1], diagonal


def independent(n, seed):
    """Independent weights, but both coordinates share a number of their network's: channels are not independent."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, SPEC.size))
    for block in range(2):
        filters, fc1, fc2 = tensors(rows, block)
        filters[:, :, 0, 1, 1] += rng.standard_normal((n, 1))
        fc2[:, :, 0] = 2.0  # d_c = 2 W1_0c + ...
        fc1[:, 0, :] = 1.5 * rng.standard_normal((n, 1))
    return rows


def planted(n, seed, correlation):
    rows = np.random.default_rng(seed).standard_normal((n, SPEC.size))
    for block in range(2):
        filters, _, _ = tensors(rows, block)
        _, diagonal = coordinates(rows, block)
        noise = filters[:, :, 0, 1, 1]
        filters[:, :, 0, 1, 1] = correlation * diagonal / np.sqrt(P) + np.sqrt(1 - correlation**2) * noise
    return rows


def test_the_correlation_equals_that_of_the_coordinates():
    rows = planted(40, 0, -0.4) + 0.1
    found = filter_mlp_correlation(WeightArray(rows, SPEC))
    pairs = [coordinates(rows, block) for block in range(2)]
    for block, (f, d) in zip(found.blocks, pairs, strict=True):
        assert block.correlation == pytest.approx(np.corrcoef(f.ravel(), d.ravel())[0, 1], abs=1e-12)
    f, d = (np.stack([side - side.mean() for side in sides]).ravel() for sides in zip(*pairs, strict=True))
    assert found.total.correlation == pytest.approx(f @ d / np.sqrt((f @ f) * (d @ d)), abs=1e-12)
    assert (found.total.channels, found.n, found.excluded) == (2 * C, 40, 0)


def test_magnitudes_and_folded_gains():
    """|f| and |d| by loops, d_c times the weight of the norm; a network without LayerScale has no other gain."""
    rows = planted(40, 1, -0.4) + 0.1
    for block, name in enumerate(("stages.0.blocks.0.norm.weight", "stages.0.blocks.1.norm.weight")):
        f, d = coordinates(rows, block)
        d = d * rows[:, SPEC.slices[name]]
        for magnitude, (x, y) in {"": (f, d), "diagonal": (f, abs(d)), "both": (abs(f), abs(d))}.items():
            found = filter_mlp_correlation(WeightArray(rows, SPEC), magnitude, folded=True).blocks[block]
            assert found.correlation == pytest.approx(np.corrcoef(x.ravel(), y.ravel())[0, 1], abs=1e-12)


def test_a_filter_that_follows_the_magnitude_is_found_by_that_alone():
    """f = -0.5 |d| + noise, with d symmetric about zero: no correlation with d, at N = 300 beyond 5 standard errors."""
    rows = np.random.default_rng(3).standard_normal((300, SPEC.size))
    for block in range(2):
        filters, diagonal = tensors(rows, block)[0], coordinates(rows, block)[1]
        filters[:, :, 0, 1, 1] -= 0.5 * np.abs(diagonal)
    signed, magnitude = (filter_mlp_correlation(WeightArray(rows, SPEC), of).total for of in ("", "diagonal"))
    assert abs(signed.correlation) < 5 * signed.error
    assert magnitude.correlation < -5 * magnitude.error


def test_a_planted_effect_is_found():
    """At N = 300 the standard error is below 0.02; five of them have a false-alarm rate below 1e-6."""
    for correlation in (-0.4, 0.2):
        found = filter_mlp_correlation(WeightArray(planted(300, 2, correlation), SPEC)).total
        assert found.correlation == pytest.approx(correlation, abs=5 * found.error)
        assert found.ci95[0] < correlation < found.ci95[1]
        assert found.error < 0.02
        assert found.p < 1e-6


def test_independent_weights_are_found_correlated_in_one_of_twenty_populations():
    """Channels of one network depend on each other here; 200 populations of 40 networks."""
    p = np.array([filter_mlp_correlation(WeightArray(independent(40, seed), SPEC)).total.p for seed in range(200)])
    assert stats.binomtest(int((p < 0.05).sum()), 200, 0.05).pvalue > 1e-3


def test_networks_that_are_not_finite_are_counted():
    rows = planted(30, 5, -0.5)
    rows[3, 0] = np.nan
    found = filter_mlp_correlation(WeightArray(rows, SPEC))
    assert (found.n, found.excluded) == (29, 1)
    assert "29 networks (1 excluded)" in found.text()
    assert found.to_dict()["correlations"][-1]["block"] == "all blocks"


def test_bad_input():
    with pytest.raises(DataError, match="at least 3 networks for a standard error, found 2"):
        filter_mlp_correlation(WeightArray(np.random.default_rng(0).standard_normal((2, SPEC.size)), SPEC))
    with pytest.raises(DataError, match=r"conv_dw`: central pixels or the diagonal .* do not vary"):
        filter_mlp_correlation(WeightArray(np.ones((9, SPEC.size)), SPEC))
    vit = WeightSpec([TensorSpec("blocks.0.mlp.fc1.weight", (P, C)), TensorSpec("blocks.0.mlp.fc2.weight", (C, P))])
    with pytest.raises(AnatomyError, match="expected depthwise convolutions, each with an MLP"):
        filter_mlp_correlation(WeightArray(np.zeros((5, vit.size)), vit))
