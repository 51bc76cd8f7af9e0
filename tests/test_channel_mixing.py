"""Proposition 1 of the impulse paper by least squares, and the ranks that it needs."""

import numpy as np
import pytest
import torch
from scipy.signal import convolve2d
from torch import nn

from weightscope.analysis.filter_inputs import filter_inputs
from weightscope.anatomy import depthwise
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init import box_filters_, impulse_filters_, random_filters_
from weightscope.networks import ConvMixer, ConvNeXt
from weightscope.statistics.channel_mixing import channel_mixing

K, F, SIZE = 3, 3, 12


def problem(channels, seed=0):
    g = np.random.default_rng(seed)
    return g.standard_normal((K, SIZE, SIZE)), g.standard_normal((K, channels)), g.standard_normal((4, K, F, F))


def filters(kind, channels, seed=0):
    """Those that the initialisers give to a layer."""
    mixer = ConvMixer(channels, 1, F, 2, 5)
    kinds = {"random": random_filters_, "impulse": impulse_filters_, "box": box_filters_}
    kinds[kind](mixer, generator=torch.Generator().manual_seed(seed))
    return depthwise(mixer)[0].read().double().numpy().reshape(-1, F, F)


def test_the_fit_is_that_of_filtered_channels():
    """Against convolved images, one channel and one target at a time."""
    images, mixing, targets = problem(10)
    given = filters("random", 10)
    channels = [
        convolve2d(np.tensordot(mixing[:, i], images, 1), given[i][::-1, ::-1], mode="same").ravel() for i in range(10)
    ]
    wanted = [sum(convolve2d(z, g[::-1, ::-1], mode="same") for z, g in zip(images, t, strict=True)) for t in targets]
    wanted = np.stack([w.ravel() for w in wanted], 1)
    weights, *_ = np.linalg.lstsq(np.stack(channels, 1), wanted, rcond=None)
    error = np.linalg.norm(wanted - np.stack(channels, 1) @ weights) / np.linalg.norm(wanted)
    found = channel_mixing(images, mixing, given, targets)
    assert abs(found.residual - error) < 1e-10
    assert (found.rank, found.needed) == (10, 27)


@pytest.mark.parametrize("kind", ["random", "impulse"])
def test_random_and_impulse_filters_reach_everything_with_k_f_squared_channels(kind):
    """Impulse filters use each of the f^2 pixels k times when D = k f^2."""
    enough = channel_mixing(*problem(27)[:2], filters(kind, 27), problem(27)[2])
    assert enough.residual < 1e-9
    assert enough.rank == enough.needed == 27
    few = channel_mixing(*problem(26)[:2], filters(kind, 26), problem(26)[2])
    assert few.rank == 26
    assert few.residual > 0.02


def test_box_filters_reach_k_dimensions_however_many_channels():
    found = channel_mixing(*problem(200)[:2], filters("box", 200), problem(200)[2])
    assert found.rank == K
    assert found.residual > 0.5


def test_shapes_must_fit():
    images, mixing, targets = problem(5)
    with pytest.raises(UsageError, match=r"f odd, found .*\(5, 2, 2\)"):
        channel_mixing(images, mixing, np.ones((5, 2, 2)), targets)
    with pytest.raises(UsageError, match=r"targets: expected \(m, 3, 3, 3\)"):
        channel_mixing(images, mixing, np.ones((5, 3, 3)), targets[:, :2])


def batch(count=5, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_stable_ranks_of_a_convmixers_inputs_equal_numpys(tmp_path):
    torch.manual_seed(0)
    model = ConvMixer(12, 2, 3, 2, 5)
    images = batch()
    found = filter_inputs(model, images, batch_size=2)
    assert model.training
    model.eval()
    with torch.no_grad():
        x = model.stem(images)
        for i, block in enumerate(model.blocks):
            values = [np.linalg.svd(one.flatten(1).double().numpy(), compute_uv=False) for one in x]
            wanted = [np.sum(s**2) / s[0] ** 2 for s in values]
            np.testing.assert_allclose(found.stable_ranks[i], wanted, rtol=1e-5)
            x = block(x)
    row = found.rows()[0]
    assert (row["filter_size"], row["width"]) == (3, 12)
    assert row["needed"] == pytest.approx(9 * found.stable_ranks[0].mean())
    assert row["holds"] == (row["needed"] <= 12)
    assert "D >= k f^2 holds in" in found.text()
    assert found.plot(tmp_path / "ranks.png").axes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_layer_whose_width_is_enough_is_told_from_one_that_is_not():
    """An image of equal pixels has rank 1, and one of independent noise a rank near its pixels."""
    model = nn.Sequential(nn.Conv2d(3, 40, 1), nn.Conv2d(40, 40, 3, padding=1, groups=40))
    equal = torch.ones(2, 3, 8, 8) + 1e-4 * batch(2, 8)
    (flat,) = filter_inputs(model, equal).rows()
    assert flat["stable_rank"] == pytest.approx(1, abs=1e-3)
    assert flat["holds"]
    assert flat["largest_f"] == 5  # 36 <= 40 < 49
    noisy = nn.Sequential(nn.Conv2d(40, 40, 3, padding=1, groups=40))
    (row,) = filter_inputs(noisy, torch.randn(2, 40, 8, 8, generator=torch.Generator().manual_seed(0))).rows()
    assert row["stable_rank"] > 10
    assert not row["holds"]


def test_inputs_that_cannot_be_ranked():
    with pytest.raises(AnatomyError, match="depthwise"):
        filter_inputs(nn.Sequential(nn.Linear(3, 3)), batch())
    model = ConvNeXt(8, 2, 3, 2, 5)
    with pytest.raises(DataError, match="not finite"):
        filter_inputs(model, batch() * float("nan"))
    assert not any(module._forward_pre_hooks for module in model.modules())
    layer = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_dw = layer

        def forward(self, x):
            return self.conv_dw(self.conv_dw(x))

    with pytest.raises(DataError, match="one call in each of 1 passes, found 2"):
        filter_inputs(Twice(), torch.randn(2, 4, 8, 8))
