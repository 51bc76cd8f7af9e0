"""Filters drawn from a trained network's covariances, for networks of other widths, depths, kernels and families."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from families import seeded
from references_init import resized
from scipy import stats
from torch import nn

import weightscope.init as wi
from weightscope.anatomy import depthwise
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.fits import load_artifact
from weightscope.fits.filters import FilterFit, filter_distributions
from weightscope.fits.one_network import fit_filters, fit_network
from weightscope.init.convolution import target_distributions
from weightscope.networks import ConvMixer, ConvNeXt
from weightscope.statistics.filters import resized_covariance, resized_mean

ALARM = 1e-6  # probability that a correct draw fails a test of it


def mixer(width=32, depth=3, kernel=5, patch=4, seed=0):
    torch.manual_seed(seed)
    return ConvMixer(width, depth, kernel, patch, 5)


def structured(model, seed=0):
    """Filters with a random covariance and a mean of their own in every layer."""
    g = seeded(seed)
    for part in depthwise(model):
        size = math.prod(part.kernel)
        root = torch.randn(size, size, generator=g) / size**0.5
        mean = torch.randn(size, generator=g)
        filters = torch.randn(part.channels, size, generator=g) @ root.T * (1 + part.layer) + mean
        part.write(filters.reshape(part.channels, *part.kernel))
    return model


def filters(part):
    return part.read().double().reshape(part.channels, -1).numpy()


def is_drawn_from(x, covariance, mean):
    """Whitened energy and whitened mean of x (n, P) are chi-squared; nothing is outside the covariance's range."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-9 * values.max()
    y = (x - mean) @ vectors[:, kept] / np.sqrt(values[kept])
    n, r = y.shape
    inside = stats.chi2.ppf([ALARM / 4, 1 - ALARM / 4], n * r)
    assert inside[0] < np.sum(y**2) < inside[1]
    assert n * np.sum(y.mean(0) ** 2) < stats.chi2.ppf(1 - ALARM / 4, r)
    if r < len(values):
        outside = (x - mean) @ vectors[:, ~kept]
        assert np.abs(outside).max() < 1e-5 * np.abs(x - mean).max()
    # Every direction by itself, not only their sum.
    each = stats.chi2.ppf([ALARM / (4 * r), 1 - ALARM / (4 * r)], n)
    energy = np.sum(y**2, axis=0)
    assert (each[0] < energy).all()
    assert (energy < each[1]).all()


@pytest.mark.parametrize(("k", "size"), [(1, 5), (3, 7), (7, 5), (3, 1), (5, 5)])
def test_resizing_equals_the_naive_version(k, size):
    root = np.random.default_rng(k * 10 + size).normal(size=(k * k, k * k))
    covariance = root @ root.T
    found = resized_covariance(covariance, k, size)
    np.testing.assert_allclose(found, resized(covariance, k, size), rtol=0, atol=1e-12 * np.abs(covariance).max())
    assert np.array_equal(found, found.T)


@pytest.mark.parametrize(("k", "size"), [(3, 4), (4, 3)])
def test_even_sizes_have_no_centre_and_are_refused(k, size):
    with pytest.raises(UsageError, match=r"filter size: expected an odd number, .* found 4"):
        resized_covariance(np.eye(k * k), k, size)


def test_a_mean_filter_is_padded_with_its_mean_or_clipped():
    mean = np.arange(9.0).reshape(3, 3)
    wide = resized_mean(mean, 5)
    assert np.array_equal(wide[1:4, 1:4], mean)
    assert (wide[0] == 4).all()
    assert np.array_equal(resized_mean(wide, 3), mean)


@pytest.mark.parametrize(("width", "means", "rank"), [(64, False, 25), (64, True, 25), (8, False, 7)])
def test_the_same_architecture_gets_the_covariance_within_sampling_error(width, means, rank):
    """Eight filters of 25 pixels have a covariance of rank seven, and no direction is made up."""
    source = structured(mixer(width=width))
    target = wi.covariance_transfer_(mixer(width=4000, seed=1), source, means=means, generator=seeded())
    for theirs, mine in zip(depthwise(source), depthwise(target), strict=True):
        x, drawn = filters(theirs), filters(mine)
        covariance = np.cov(x.T)
        is_drawn_from(drawn, covariance, x.mean(0) if means else 0.0)
        assert np.linalg.matrix_rank(covariance, tol=1e-8) == rank
        assert np.linalg.matrix_rank(drawn - drawn.mean(0), tol=1e-4 * np.abs(drawn).max()) == rank


def test_depths_are_interpolated_between_layers():
    source = structured(mixer(width=64, depth=3, kernel=3))
    covariances = [np.cov(filters(part).T) for part in depthwise(source)]
    target = wi.covariance_transfer_(mixer(width=3000, depth=5, kernel=3, seed=1), source, generator=seeded())
    first, middle, last = covariances
    wanted = first, (first + middle) / 2, middle, (middle + last) / 2, last
    for part, covariance in zip(depthwise(target), wanted, strict=True):
        is_drawn_from(filters(part), covariance, 0.0)


@pytest.mark.parametrize(("kernel", "psd"), [(3, "abs"), (7, "abs"), (7, "clip")])
def test_other_kernel_sizes(kernel, psd):
    source = structured(mixer(width=64, kernel=5))
    target = mixer(width=3000, kernel=kernel, patch=2, seed=1)
    wi.covariance_transfer_(target, source, psd=psd, means=True, generator=seeded())
    for theirs, mine in zip(depthwise(source), depthwise(target), strict=True):
        x = filters(theirs)
        values, vectors = np.linalg.eigh(resized(np.cov(x.T), 5, kernel))
        values = np.abs(values) if psd == "abs" else np.maximum(values, 0)
        mean = resized_mean(x.mean(0).reshape(5, 5), kernel).reshape(-1)
        is_drawn_from(filters(mine), (vectors * values) @ vectors.T, mean)


def test_a_kronecker_product_is_drawn_exactly_and_others_by_their_nearest():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 3))
    a = root @ root.T
    # Filters whose sample covariance is A (x) A exactly: whitened noise.
    noise = rng.normal(size=(40, 9))
    noise -= noise.mean(0)
    white = noise @ np.linalg.inv(np.linalg.cholesky(np.cov(noise.T))).T
    source = mixer(width=40, depth=1, kernel=3).double()
    (part,) = depthwise(source)
    part.write(torch.from_numpy(white @ np.linalg.cholesky(np.kron(a, a)).T).reshape(40, 3, 3))
    target = mixer(width=4000, depth=1, kernel=3, seed=1)
    wi.covariance_transfer_(target, source, kronecker=True, generator=seeded())
    is_drawn_from(filters(depthwise(target)[0]), np.kron(a, a), 0.0)

    (layer,) = filter_distributions(structured(mixer(width=64, depth=1, kernel=3)))
    ((_, found),) = target_distributions(depthwise(target), FilterFit(layers=[layer], kronecker=True))
    factor = found.reshape(3, 3, 3, 3)[:, 0, :, 0] / math.sqrt(found[0, 0])  # A, from A[0, 0] A
    np.testing.assert_allclose(np.kron(factor, factor), found, atol=1e-12)


def test_mixed_kernel_sizes_are_resized_each_or_chosen():
    torch.manual_seed(0)
    source = nn.Sequential(
        nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 5, groups=32), nn.Conv2d(32, 32, 3, groups=32)
    )
    structured(source)
    source_layers = filter_distributions(source)
    assert [layer.kernel for layer in source_layers] == [3, 5, 3]
    target = depthwise(mixer(width=8, depth=3, kernel=7))
    found = target_distributions(target, FilterFit(layers=source_layers))
    for (_, covariance), layer in zip(found, source_layers, strict=True):
        np.testing.assert_allclose(covariance, resized_covariance(layer.covariance, layer.kernel, 7), atol=1e-12)
    five = resized_covariance(source_layers[1].covariance, 5, 7)
    for _, covariance in target_distributions(target, FilterFit(layers=source_layers, kernel=5)):
        np.testing.assert_allclose(covariance, five)
    with pytest.raises(UsageError, match="no layer of the source has 9 x 9 filters, found sizes 3, 5"):
        wi.covariance_transfer_(mixer(), source, kernel=9)


def test_stages_correspond():
    torch.manual_seed(0)
    source, target = structured(ConvNeXt((8, 16), (2, 1))), ConvNeXt((12, 24), (3, 2))
    source_layers = filter_distributions(source)
    found = [c for _, c in target_distributions(depthwise(target), FilterFit(layers=source_layers, schedule="stage"))]
    first, second, third = (layer.covariance for layer in source_layers)
    for covariance, wanted in zip(found, (first, (first + second) / 2, second, third, third), strict=True):
        np.testing.assert_allclose(covariance, wanted)
    with pytest.raises(UsageError, match="equal numbers of stages, found 1 in the source and 2"):
        wi.covariance_transfer_(target, mixer(kernel=7), schedule="stage")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), AnatomyError, "expected depthwise convolutions"),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, (3, 5), groups=8)), UsageError, r"found .* 3 x 5"),
    ],
)
def test_networks_without_such_filters_are_refused_on_both_sides(make, error, message):
    good = structured(mixer())
    with pytest.raises(error, match=message):
        wi.covariance_transfer_(mixer(), make())
    with pytest.raises(error, match=message):
        wi.covariance_transfer_(make(), good)
    with pytest.raises(error, match=message):
        fit_filters(make())


def test_weights_that_are_not_finite_are_refused_and_nothing_changes():
    source, target = structured(mixer()), mixer(seed=1)
    before = copy.deepcopy(target.state_dict())
    with torch.no_grad():
        filters_ = depthwise(source)[1].read()
        filters_[3, 0, 0], filters_[7, 1, 1] = math.nan, math.inf
        depthwise(source)[1].write(filters_)
    with pytest.raises(DataError, match=r"blocks\.1.*2 of 32 filters hold NaN or infinity"):
        wi.covariance_transfer_(target, source)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


@pytest.fixture
def path(tmp_path):
    return fit_network(structured(mixer()), "filters").save(tmp_path / "filters.safetensors")


@pytest.mark.parametrize("options", [{}, {"means": True}, {"kronecker": True, "psd": "clip"}, {"kernel": 5}])
def test_an_artifact_draws_what_the_function_draws(tmp_path, options):
    source = structured(mixer())
    init = wi.load_init(fit_network(source, "filters", **options).save(tmp_path / "f.safetensors"))
    direct = wi.covariance_transfer_(ConvNeXt((8, 16), (2, 1)), source, **options, generator=seeded(4))
    model = init(ConvNeXt((8, 16), (2, 1)), generator=seeded(4))
    for one, other in zip(depthwise(direct), depthwise(model), strict=True):
        assert torch.equal(one.read(), other.read())
    assert len(init.report.touched) == 3
    assert "negative eigenvalues" in str(init.report)  # 5 x 5 became 7 x 7
    assert ("absolute values" in str(init.report)) == (options.get("psd") != "clip")
    same = wi.load_init(tmp_path / "f.safetensors")
    same(mixer(seed=1), generator=seeded())
    assert same.report.notes == () or options.get("kronecker")


def test_an_artifact_says_what_it_holds(path):
    found = load_artifact(path)
    text = found.text()
    for word in ("filters, fitted to ConvMixer", "covariance_transfer_", "5x5", "blocks.0.0.fn.0", "0.500"):
        assert word in text
    assert [layer.depth for layer in found.layers] == [0.0, 0.5, 1.0]
    assert "filters of 3 layers" in repr(wi.load_init(path))


def two_sizes():
    """Depthwise layers of 3, 7, 7, 5 pixels; of the 7 x 7 filters, all of one layer and three of the other are dead."""
    torch.manual_seed(0)
    sizes = (3, 7, 7, 5)
    model = nn.Sequential(*(nn.Conv2d(8, 8, k, padding=k // 2, groups=8) for k in sizes))
    with torch.no_grad():
        model[1].weight.mul_(1e-9)
        model[2].weight[:3] *= 1e-6
    return model


def test_dead_filters_and_other_depths_are_said(tmp_path):
    found = fit_network(two_sizes(), "filters", kernel=7)
    assert [layer.dead for layer in found.layers] == [0, 8, 3, 0]
    expected = (
        "`1`: 8 of 8 filters are dead and not used",
        "`2`: 3 of 8 filters are dead; its distribution includes them",
        "1 of 4 layers are used, at depths 0.667 to 0.667; layers in between take a linear interpolation of these, "
        "layers outside take the first or the last",
    )
    assert found.remarks() == expected
    assert all(f"note: {line}\n" in found.text() for line in expected)
    assert found.to_pandas()["dead"].tolist() == [0, 8, 3, 0]
    init = wi.load_init(found.save(tmp_path / "f.safetensors"))
    target = init(nn.Sequential(*(nn.Conv2d(8, 8, 7, groups=8) for _ in range(3))), generator=seeded(1))
    assert init.report.notes[:3] == expected
    scale = two_sizes()[2].weight.std()
    assert all(layer.weight.std() > 0.3 * scale for layer in target), "no layer is drawn from dead filters"
    assert fit_network(structured(mixer()), "filters").remarks() == ()


def test_a_network_of_dead_filters_is_refused():
    model = two_sizes()
    with torch.no_grad():
        model[2].weight.zero_()
    for use in (fit_filters, partial(wi.covariance_transfer_, mixer())):
        with pytest.raises(UsageError, match="no layer of the source has 7 x 7 filters, found sizes 3, 5"):
            use(model, kernel=7)
    for layer in model:
        with torch.no_grad():
            layer.weight.zero_()
    with pytest.raises(DataError, match="all filters are dead: `"):
        fit_filters(model)


@pytest.mark.parametrize("seed", range(4))
def test_equal_filters_are_refused_or_drawn_as_they_are(seed):
    """Random layers of a network have filters that are all equal: never zeros in silence."""
    rng = np.random.default_rng(seed)
    source, value = structured(mixer(8, 4, int(rng.choice([3, 5, 7]))), seed), float(rng.choice([1.0, 0.1, -0.3, 7e8]))
    equal = [part for part in depthwise(source) if rng.random() < 0.5]
    for part in equal:
        part.write(torch.full_like(part.read(), value) * torch.from_numpy(rng.uniform(1, 2, part.kernel)).float())
    means = bool(rng.random() < 0.5)
    fits = [
        lambda: wi.NetworkInit(fit_network(source, "filters", means=means))(mixer(16, 4, 3), generator=seeded()),
        lambda: wi.covariance_transfer_(mixer(16, 4, 3), source, means=means, generator=seeded()),
    ]
    for made in fits:
        if equal and not means:
            with pytest.raises(DataError, match=rf"`{equal[0].name}`: its 8 filters are all equal"):
                made()
        else:
            assert all(part.read().abs().amax((1, 2)).min() > 0 for part in depthwise(made()))
