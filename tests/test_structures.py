"""One contract for every structure: a new one adds a row to CASES."""

import numpy as np
import pytest
import references_statistics as naive
from scipy.stats import multivariate_normal
from sklearn.covariance import LedoitWolf

from weightscope.errors import DataError, UsageError
from weightscope.fits import (
    STRUCTURES,
    Dense,
    Diagonal,
    Exchangeable,
    GroupMeans,
    Isotropic,
    Kronecker,
    LowRank,
    structure_class,
)
from weightscope.fits.gaussian import ledoit_wolf_intensity
from weightscope.fits.structure import fit_mean, structure_reference
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutations import PermutationSpec

MATRICES = WeightSpec([TensorSpec("fc1.weight", (5, 3)), TensorSpec("fc2.weight", (3, 4))])
MIXED = WeightSpec([TensorSpec("conv.weight", (4, 1, 2, 2)), TensorSpec("bias", (5,)), TensorSpec("scale", ())])
VECTOR = WeightSpec([TensorSpec("bias", (6,))])
MLP = WeightSpec([TensorSpec("fc1.weight", (5, 3)), TensorSpec("fc1.bias", (5,)), TensorSpec("fc2.weight", (3, 5))])
COLUMN = WeightSpec([TensorSpec("a.weight", (6, 1)), TensorSpec("b.weight", (1, 4))])

SMALL = WeightSpec(
    [
        TensorSpec("conv", (3, 1, 2)),
        TensorSpec("fc2", (3, 4)),
        TensorSpec("q", (2, 3)),
        TensorSpec("mid", (4, 4)),
        MLP.tensors[1],
    ]
)
SIGNED = PermutationSpec.from_axes(
    SMALL, {"conv": ("c", None, None), "fc2": ("c", "h"), "q": ("~units", "c"), "mid": ("h", "h"), "fc1.bias": (None,)}
)

# structure, options, spec
CASES = [
    *[
        (cls, {}, spec)
        for cls in (Isotropic, Diagonal, Dense, GroupMeans)
        for spec in (MATRICES, MIXED, VECTOR, COLUMN)
    ],
    (LowRank, {"rank": 1}, MATRICES),
    (LowRank, {"rank": 3}, MIXED),
    (Kronecker, {}, MATRICES),
    (Kronecker, {}, COLUMN),
    (Exchangeable, {}, MLP),
    (Exchangeable, {"permutations": SIGNED}, SMALL),
    (Exchangeable, {"permutations": SIGNED, "gain": 3.0}, SMALL),
]
IDS = [f"{c.name}-{'-'.join(map(str, o))}-{s.tensors[0].name}" for c, o, s in CASES]
contract = pytest.mark.parametrize(("cls", "options", "spec"), CASES, ids=IDS, scope="module")


def data_of(spec, n=40, seed=0):
    """Correlated data with different variances and means."""
    rng = np.random.default_rng(seed)
    mixing = naive.random_covariance(spec.size, rng) * np.linspace(0.5, 2, spec.size)
    return rng.standard_normal((n, spec.size)) @ mixing + np.linspace(-1, 1, spec.size)


@pytest.fixture(scope="module")
def fitted(cls, options, spec):
    return cls.fit(data_of(spec), spec, **options)


def test_every_structure_is_under_the_contract():
    assert {cls for cls, _, _ in CASES} == set(STRUCTURES.values())
    assert all(cls.name == name and cls.__doc__ for name, cls in STRUCTURES.items())


@contract
def test_density_equals_the_dense_normal(fitted, spec):
    x = data_of(spec, 12, seed=1)
    expected = multivariate_normal(fitted.mean, fitted.covariance()).logpdf(x)
    np.testing.assert_allclose(fitted.log_prob(x), expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(fitted.log_prob(x.reshape(3, 4, -1)), expected.reshape(3, 4), rtol=1e-8, atol=1e-8)
    assert fitted.log_prob(x[0]).shape == ()


@contract
def test_noise_has_the_covariance(fitted, spec):
    # the root is linear in the noise: its matrix L, found column by column, must satisfy L L^T = Cov exactly.
    shapes = fitted.noise_shapes
    sizes = [int(np.prod(shape)) for shape in shapes]
    columns = np.eye(sum(sizes))
    noise = [
        part.reshape(-1, *shape)
        for part, shape in zip(np.split(columns, np.cumsum(sizes)[:-1], axis=1), shapes, strict=True)
    ]
    linear = fitted.apply_root(noise).T
    np.testing.assert_allclose(linear @ linear.T, fitted.covariance(), atol=1e-12)


@contract
def test_samples_have_the_moments(fitted, spec):
    # |z| < 5.5 for each of at most 27 * 28 / 2 covariances of 20,000 samples: false-alarm rate below 1e-4.
    n = 20_000
    samples = fitted.sample(np.random.default_rng(2), n)
    assert samples.shape == (n, spec.size)
    covariance = fitted.covariance()
    spread = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / n)
    assert (np.abs(naive.covariance(samples) - covariance) < 5.5 * spread).all()
    assert (np.abs(samples.mean(axis=0) - fitted.mean) < 5.5 * np.sqrt(np.diag(covariance) / n)).all()


@contract
def test_fit_after_sample_recovers_the_distribution(cls, options, spec, fitted):
    # The Kullback-Leibler divergence of a maximum-likelihood fit from n samples is about parameters / (2 n) nats;
    # ten times that leaves room for shrinkage and for the largest of these rows.
    n = 4000
    again = cls.fit(fitted.sample(np.random.default_rng(3), n), spec, **options)
    fresh = fitted.sample(np.random.default_rng(4), 4000)
    divergence = (fitted.log_prob(fresh) - again.log_prob(fresh)).mean()
    assert divergence < 10 * fitted.parameters / (2 * n)
    np.testing.assert_allclose(again.covariance(), fitted.covariance(), atol=0.15 * np.diag(fitted.covariance()).max())


@contract
def test_order_of_networks_changes_nothing(cls, options, spec, fitted):
    data = np.random.default_rng(7).permutation(data_of(spec))
    again = cls.fit(data, spec, **options)
    np.testing.assert_allclose(again.covariance(), fitted.covariance(), rtol=0, atol=1e-10)
    x = data_of(spec, 5, seed=8)
    np.testing.assert_allclose(again.log_prob(x), fitted.log_prob(x), rtol=1e-10, atol=1e-9)
    ours, theirs = (s.sample(np.random.default_rng(9), 2) for s in (fitted, again))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-8)


@contract
def test_streaming_equals_fitting_at_once(cls, options, spec, fitted):
    data = data_of(spec)
    sums, made = cls.accumulator(spec, **options)
    for part in np.split(data, [1, 9, 30]):
        rows = part.copy()
        sums.update(rows)
        rows[...] = np.nan  # a block belongs to the caller again
    streamed = made(sums)
    assert (streamed.parameters, streamed.diagnostics.keys()) == (fitted.parameters, fitted.diagnostics.keys())
    np.testing.assert_allclose(streamed.mean, fitted.mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(streamed.covariance(), fitted.covariance(), rtol=0, atol=1e-11)
    np.testing.assert_allclose(streamed.log_prob(data), fitted.log_prob(data), rtol=1e-11, atol=1e-9)


@contract
def test_sums_of_parts_add_up(cls, options, spec):
    if cls.needs_samples:
        pytest.skip("takes all samples at once")
    data = data_of(spec, 160)
    centre = {"centre": np.median(data, axis=0)} if cls is Exchangeable else {}
    (whole, made), *parts = (cls.accumulator(spec, **options, **centre) for _ in range(5))
    whole.update(data)
    for (sums, _), rows in zip(parts, np.split(data, [1, 60, 110]), strict=True):
        sums.update(rows)
    total = parts[0].sums
    for sums, _ in parts[1:]:
        total += sums
    np.testing.assert_allclose(made(total).covariance(), made(whole).covariance(), rtol=0, atol=1e-11)


@contract
def test_scaling_the_weights_scales_the_structure(cls, options, spec, fitted):
    again = cls.fit(100.0 * data_of(spec), spec, **options)
    np.testing.assert_allclose(again.covariance(), 1e4 * fitted.covariance(), rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("cls", [Isotropic, Diagonal, Dense, GroupMeans, LowRank, Kronecker])
def test_fewer_networks_than_entries(cls):
    spec = WeightSpec([TensorSpec("fc1.weight", (12, 10))])
    fitted = cls.fit(np.random.default_rng(0).standard_normal((20, 120)), spec)
    assert np.linalg.eigvalsh(fitted.covariance()).min() > 0
    assert np.isfinite(fitted.log_prob(np.zeros(120)))


@pytest.mark.parametrize("cls", STRUCTURES.values())
def test_bad_data(cls):
    spec = WeightSpec([TensorSpec("fc1.weight", (3, 2))])
    with pytest.raises(DataError, match=r"expected weight vectors \(N, 6\), found \(9, 5\)"):
        cls.fit(np.ones((9, 5)), spec)
    with pytest.raises(DataError, match="at least 2 networks, found 1"):
        cls.fit(np.ones((1, 6)), spec)
    bad = np.random.default_rng(0).standard_normal((30, 6))
    bad[3, 3] = np.nan
    with pytest.raises(DataError, match="found NaN or infinity"):
        cls.fit(bad, spec)
    options = {"rank": 2} if cls is LowRank else {}
    with pytest.raises(UsageError, match="do not vary"):
        cls.fit(np.ones((9, 6)), spec, **options)


def test_registry():
    assert list(STRUCTURES)[:2] == ["isotropic", "group_means"]  # in the order in which `fit` tries them
    assert structure_class("dense") is structure_class(Dense) is Dense
    assert structure_class("low-rank") is LowRank
    assert structure_class("weightscope.fits.gaussian:Dense") is Dense
    assert structure_reference(Dense) == "dense"
    with pytest.raises(UsageError, match="no structure 'full'; there are isotropic, group_means, diagonal"):
        structure_class("full")
    for wrong in (dict, "collections:OrderedDict", 3):
        with pytest.raises(UsageError, match="expected a subclass of weightscope"):
            structure_class(wrong)


@pytest.mark.parametrize("n", [15, 50])  # as a factor of N columns, and as a Cholesky factor
def test_dense_scales_each_tensor(n):
    """The intensity for several tensors of different scales."""
    spec = WeightSpec([TensorSpec("a", (3, 4)), TensorSpec("b", (5,)), TensorSpec("c", (2, 2))])
    data = data_of(spec, n) * np.repeat([1e-2, 1.0, 30.0], [12, 5, 4])
    data[:, :12] += 0.05 - data[:, :12].mean(axis=0)  # one mean for all entries of `a`
    fitted = Dense.fit(data, spec)
    rows = data - fitted.mean
    scale = np.concatenate([np.full(s.stop - s.start, np.sqrt(np.mean(rows[:, s] ** 2))) for s in spec.slices.values()])
    intensity, target = ledoit_wolf_intensity(rows / scale), np.mean((rows / scale) ** 2)
    assert fitted.diagnostics["mean"]["a"] == "scalar"
    assert 0.01 < intensity < 0.999
    assert fitted.diagnostics["shrinkage"] == pytest.approx(intensity, rel=1e-10)
    expected = (1 - intensity) * rows.T @ rows / n + np.diag(intensity * target * scale**2)
    scales = np.outer(scale, scale)
    np.testing.assert_allclose(fitted.covariance() / scales, expected / scales, atol=1e-11)


def test_group_means_finds_the_variance_components():
    # Var of an estimated component is 2 l^2 / (N (n - 1)); 20 % is more than five of those standard errors.
    rng = np.random.default_rng(1)
    p, n, size = 12, 8, 3000
    shapes = {0.5: (1, 1), 0.4: (p, 1), 0.3: (1, n), 1.0: (p, n)}
    data = sum(scale * rng.standard_normal((size, *shape)) for scale, shape in shapes.items())
    fitted = GroupMeans.fit(data.reshape(size, -1), WeightSpec([TensorSpec("fc1", (p, n))]))
    found = fitted.diagnostics["components"]["fc1"]
    assert found == pytest.approx({"residual": 1, "row": 0.16, "column": 0.09, "overall": 0.25}, rel=0.2)
    assert fitted.diagnostics["negative_components"] == []
    assert fitted.parameters == 5


def test_group_means_with_less_variation_than_independence():
    rng = np.random.default_rng(2)
    data = rng.standard_normal((2000, 9, 7))
    data -= 0.7 * data.mean(axis=1, keepdims=True)
    fitted = GroupMeans.fit(data.reshape(2000, -1), WeightSpec([TensorSpec("fc2", (9, 7))]))
    assert "fc2: column" in fitted.diagnostics["negative_components"]
    assert np.linalg.eigvalsh(fitted.covariance()).min() > 0
    samples = fitted.sample(rng, 4000).reshape(-1, 9, 7)
    ratio = samples.mean(axis=1).var() / (samples.var() / 9)
    assert ratio == pytest.approx(0.09, rel=0.15)


@pytest.mark.parametrize(
    ("cls", "options", "n"),
    [
        (Diagonal, {}, 30),
        (GroupMeans, {}, 30),
        (LowRank, {"rank": 2}, 200),
        (Kronecker, {}, 30),
    ],
)
def test_a_fit_by_maximum_likelihood_is_a_maximum(cls, options, n):
    spec = WeightSpec([TensorSpec("w", (4, 6))])
    x = data_of(spec, n)
    fitted, rng = cls.fit(x, spec, **options), np.random.default_rng(3)
    best, arrays = fitted.log_prob(x).sum(), fitted.to_tensors()
    for _ in range(100):
        moved = {key: a * np.exp(0.03 * rng.standard_normal(a.shape)) for key, a in arrays.items() if key != "mean"}
        assert cls.from_tensors(moved | {"mean": fitted.mean}, spec).log_prob(x).sum() < best


def test_low_rank_is_factor_analysis():
    """Equal to EM to convergence (Rubin and Thayer 1982), on the covariance about the chosen mean."""
    spec = WeightSpec([TensorSpec("w", (10,))])
    rng = np.random.default_rng(5)
    data = rng.standard_normal((500, 3)) @ rng.standard_normal((3, 10)) + 9 * np.arange(10)
    data += rng.standard_normal((500, 10))
    covariance = naive.covariance(data) * 499 / 500
    factor, noise = np.linalg.cholesky(covariance)[:, :3], 0.5 * np.diag(covariance)
    for _ in range(3000):
        weights = np.linalg.solve(factor @ factor.T + np.diag(noise), factor).T  # (3, D)
        spread = np.eye(3) - weights @ factor + weights @ covariance @ weights.T
        factor = covariance @ weights.T @ np.linalg.inv(spread)
        noise = np.diag(covariance - factor @ weights @ covariance)
    ours = LowRank.fit(data, spec, rank=3)
    expected = multivariate_normal(data.mean(axis=0), factor @ factor.T + np.diag(noise)).logpdf(data).mean()
    assert ours.log_prob(data).mean() == pytest.approx(expected, abs=1e-4)
    np.testing.assert_allclose(ours.covariance(), factor @ factor.T + np.diag(noise), rtol=0.02, atol=0.02)
    assert ours.diagnostics["converged"]


@pytest.mark.parametrize(("n", "size"), [(30, 80), (80, 30), (500, 20), (3, 50), (2, 5), (9, 1)])
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_dense_equals_scikit_learns_ledoit_wolf(n, size, mean):
    rng = np.random.default_rng(n + size)
    data = rng.standard_normal((n, size)) @ naive.random_covariance(size, rng) + mean + 99 * np.arange(size)
    expected = LedoitWolf().fit(data)
    fitted = Dense.fit(data, WeightSpec([TensorSpec("w", (size,))]))
    assert fitted.diagnostics["shrinkage"] == pytest.approx(expected.shrinkage_, abs=1e-9)
    np.testing.assert_allclose(fitted.covariance(), expected.covariance_, rtol=0, atol=1e-9)


def test_nothing_to_shrink():
    """Of exactly white rows, S is a multiple of the identity already."""
    assert ledoit_wolf_intensity(np.concatenate([np.eye(4), -np.eye(4)])) == 0


def test_low_rank_ranks():
    spec = WeightSpec([TensorSpec("w", (4, 6))])
    for rank in (0, 24, -1):
        with pytest.raises(UsageError, match="rank: expected 1 to 23"):
            LowRank.fit(data_of(spec, 200), spec, rank=rank)
    assert [c["rank"] for c in LowRank.candidates(300, 1024)] == [1, 2, 4, 8, 16, 32, 64]
    assert [c["rank"] for c in LowRank.candidates(40, 6)] == [1]
    assert [c["rank"] for c in LowRank.candidates(3, 6)] == [1]


def test_kronecker_order_and_shapes():
    spec = WeightSpec([TensorSpec("conv.weight", (4, 1, 3, 3))])
    rng = np.random.default_rng(6)
    rows, columns = naive.random_covariance(4, rng), naive.random_covariance(9, rng)
    data = rng.standard_normal((3000, 36)) @ np.linalg.cholesky(np.kron(rows, columns)).T
    fitted = Kronecker.fit(data, spec)
    np.testing.assert_allclose(fitted.covariance(), np.kron(rows, columns), atol=0.1)
    with pytest.raises(UsageError, match="two or more axes, found `bias`"):
        Kronecker.fit(data_of(MIXED), MIXED)


def test_the_mean_is_scalar_unless_entries_differ():
    spec = WeightSpec([TensorSpec("same", (20,)), TensorSpec("different", (20,))])
    data = np.random.default_rng(7).standard_normal((200, 40)) + np.repeat([0.3, 0.0], 20)
    data[:, 20:] += np.arange(20)
    mean, parameters, kinds = fit_mean(data, spec)
    assert kinds == {"same": "scalar", "different": "entries"}
    assert parameters == 21
    assert len(set(mean[:20])) == 1
    np.testing.assert_allclose(mean, data.mean(axis=0), atol=0.5)
