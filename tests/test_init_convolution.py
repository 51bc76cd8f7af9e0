from functools import partial

import numpy as np
import pytest
import torch
from families import seeded
from references_init import conv_covariance as naive_covariance
from torch import nn

from weightscope.errors import UsageError
from weightscope.init import box_filters_, conv_covariance, conv_covariance_, impulse_filters_, random_filters_
from weightscope.init.convolution import PRESETS, Schedule, covariance_root, relative_depths

SETTING = {"sigma0": 0.15, "v": 0.25, "a": 1.0}


def stack(*channels, k=7):
    layers = [nn.Conv2d(c, c, k, groups=c, padding="same") for c in channels]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("sigma", [0.05, np.pi / 2, 8.0])
def test_covariance_equals_the_published_construction(k, sigma):
    np.testing.assert_allclose(conv_covariance(k, sigma), naive_covariance(k, sigma), rtol=0, atol=1e-12)


def test_roots_give_the_absolute_or_the_clipped_eigenvalues():
    sigma = conv_covariance(5, 1.0)
    values, vectors = np.linalg.eigh(sigma)
    for psd, kept in (("abs", np.abs(values)), ("clip", np.maximum(values, 0))):
        root = covariance_root(sigma, psd)
        np.testing.assert_allclose(root @ root.T, (vectors * kept) @ vectors.T, atol=1e-12)
    # Theorem (Higham 1988): no positive semi-definite matrix is nearer in Frobenius norm than the clipped one.
    clipped = covariance_root(sigma, "clip") @ covariance_root(sigma, "clip").T
    absolute = covariance_root(sigma, "abs") @ covariance_root(sigma, "abs").T
    assert np.linalg.norm(sigma - clipped) < np.linalg.norm(sigma - absolute)


def test_schedule_and_presets_are_the_published_ones():
    assert Schedule(0.5, 0.5, 3.0)(1.0) == 2.5
    assert PRESETS["cifar-patch2"] == Schedule(0.08, 0.37, 2.9)
    assert PRESETS["figure-a4"] == Schedule(0.16, 0.32, 2.88)
    doubled = [2 * PRESETS["cifar-patch2"](d) for d in (0, 0.5, 1)]
    assert [PRESETS["cifar-patch1"](d) for d in (0, 0.5, 1)] == pytest.approx(doubled)
    assert PRESETS["imagenet-middle"] == Schedule(0.15, 0.3, 0.5)
    assert PRESETS["imagenet-frozen"] == Schedule(0.15, 0.5, 0.25)
    assert PRESETS["imagenet-thawed"] == Schedule(0.15, 0.25, 1.0)
    one, other = stack(4, 4), stack(4, 4)
    conv_covariance_(one, preset="imagenet-thawed", generator=seeded())
    conv_covariance_(other, **SETTING, generator=seeded())
    assert torch.equal(one[1].weight, other[1].weight)


def test_sawtooth_starts_again_in_every_stage():
    class Part:
        def __init__(self, stage, relative_depth):
            self.stage, self.relative_depth = stage, relative_depth

    parts = [Part(s, i / 5) for i, s in enumerate((0, 0, 0, 1, 1, 2))]
    assert relative_depths(parts, "depth") == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert relative_depths(parts, "sawtooth") == [0, 0.5, 1, 0, 1, 0]
    assert relative_depths(parts[:1], "depth") == [0]


@pytest.mark.parametrize(("k", "sigma", "message"), [(4, 1.0, "odd"), (3.0, 1, "integer"), (3, 0.0, "> 0")])
def test_no_covariance_of_such_sizes(k, sigma, message):
    with pytest.raises(UsageError, match=message):
        conv_covariance(k, sigma)


def test_impulse_filters_are_impulses_dealt_evenly():
    net = stack(50, k=7)
    impulse_filters_(net, filter_size=3, generator=seeded())
    filters = net[0].weight.detach()[:, 0]
    assert torch.equal(filters.sum((1, 2)), torch.ones(50))
    assert torch.equal(filters.amax((1, 2)), torch.ones(50))
    taken = filters.sum(0)
    assert taken[2:5, 2:5].sum() == 50
    assert set(taken[2:5, 2:5].reshape(-1).tolist()) == {5.0, 6.0}  # 50 = 9 * 5 + 5


@pytest.mark.parametrize("init", [partial(impulse_filters_, order="given"), partial(box_filters_, value=1 / 3)])
def test_signs_of_filters_with_the_energy_of_impulses(init):
    """One random sign for each filter and nothing else; about half of 400, within 4.9 standard deviations, are -1."""
    net, other = init(stack(400, k=3), sign="random", generator=seeded()), init(stack(400, k=3))
    filters = net[0].weight.detach()
    assert torch.equal(filters.abs(), other[0].weight)
    assert abs(int((filters.sum((1, 2, 3)) < 0).sum()) - 200) < 49
    torch.testing.assert_close(filters.square().sum((1, 2, 3)), torch.ones(400))


def test_absolute_random_filters_are_those_of_the_same_draw():
    net, other = stack(400, k=3), stack(400, k=3)
    random_filters_(net, distribution="absolute", generator=seeded())
    random_filters_(other, generator=seeded())
    assert torch.equal(net[0].weight, other[0].weight.abs())


@pytest.mark.parametrize("distribution", ["normal", "uniform", "absolute"])
def test_random_filters_have_the_stated_mean_square(distribution):
    """E F^2 = gain^2 / (kh kw), all distributions; of 18,000 squares of variance 2 at most, within 4.9 deviations."""
    random_filters_(net := stack(2000, k=3), distribution=distribution, gain=2.0, generator=seeded())
    assert net[0].weight.square().mean().item() == pytest.approx(4 / 9, rel=4.9 * (2 / 18_000) ** 0.5)


def test_impulses_of_one_axis_are_in_its_central_pixels():
    net = nn.Sequential(nn.Conv1d(6, 6, 7, groups=6))
    impulse_filters_(net, order="given", filter_size=3)
    assert net[0].weight.detach()[:, 0].argmax(1).tolist() == [2, 3, 4, 2, 3, 4]


def test_impulse_filters_in_given_order():
    net = stack(10, k=3)
    impulse_filters_(net, order="given")
    assert net[0].weight.detach().reshape(10, 9).argmax(1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]
