"""Proposition 1 of the impulse paper by least squares, and the ranks that it needs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import ROOT, script
from scipy.signal import convolve2d

from weightscope.anatomy import depthwise
from weightscope.init import box_filters_, impulse_filters_, random_filters_
from weightscope.networks import ConvMixer
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

K, F, SIZE = 3, 3, 12


@pytest.fixture(scope="module")
def study():
    return script("analyses/frozen_filter_inits/ranks.py")


def problem(channels):
    g = np.random.default_rng(0)
    return g.standard_normal((K, SIZE, SIZE)), g.standard_normal((K, channels)), g.standard_normal((4, K, F, F))


def filters(kind, channels, seed=0):
    """Those that the initialisers give to a layer."""
    mixer = ConvMixer(channels, 1, F, 2, 5)
    kinds = {"random": random_filters_, "impulse": impulse_filters_, "box": box_filters_}
    kinds[kind](mixer, generator=torch.Generator().manual_seed(seed))
    return depthwise(mixer)[0].read().double().numpy().reshape(-1, F, F)


def test_the_fit_is_that_of_filtered_channels(study):
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
    residual, rank = study.mixtures(images, mixing, given, targets)
    assert abs(residual - error) < 1e-10
    assert rank == 10


@pytest.mark.parametrize("kind", ["random", "impulse"])
def test_random_and_impulse_filters_reach_everything_with_k_f_squared_channels(study, kind):
    """Impulse filters use each of the f^2 pixels k times when D = k f^2; box filters reach k dimensions only."""
    residual, rank = study.mixtures(*problem(27)[:2], filters(kind, 27), problem(27)[2])
    assert residual < 1e-9
    assert rank == K * F**2
    residual, rank = study.mixtures(*problem(26)[:2], filters(kind, 26), problem(26)[2])
    assert residual > 0.02
    assert rank == 26
    residual, rank = study.mixtures(*problem(200)[:2], filters("box", 200), problem(200)[2])
    assert residual > 0.5
    assert rank == K


def test_stable_ranks_of_a_convmixers_inputs_equal_numpys(study):
    torch.manual_seed(0)
    model = ConvMixer(12, 2, 3, 2, 5)
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    found = list(study.filter_inputs(model, images).values())
    with torch.no_grad():
        x = model.eval().stem(images)
        for i, block in enumerate(model.blocks):
            values = [np.linalg.svd(one.flatten(1).double().numpy(), compute_uv=False) for one in x]
            np.testing.assert_allclose(found[i][2], [np.sum(s**2) / s[0] ** 2 for s in values], rtol=1e-5)
            assert found[i][:2] == (12, 3)
            energy = [np.cumsum(s**2) / np.sum(s**2) for s in values]
            assert found[i][3].tolist() == [1 + int(np.sum(share < 0.99)) for share in energy]
            x = block(x)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_ranks_of_a_population_are_stored(study, tmp_path: Path):
    small = {"network.width": 4, "network.depth": 1, "training.epochs": 1, "data.train": 64, "data.test": 16}
    recipe = Recipe.load(ROOT / "populations/digits-convmixer.toml").replace(small | {"population.networks": 2})
    found = collect(recipe, tmp_path / "tiny.pop", workers=1, device="cpu", progress=False)
    study.main([str(found.path), "--images", "3", "--out", str(tmp_path / "ranks.json")])
    (row,) = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    assert (row["width"], row["networks"], row["images"]) == (4, 2, 3)
    assert 1 <= row["lowest"] <= row["stable_rank"] <= row["highest"] <= 4
    assert row["k_f2"] == pytest.approx(row["stable_rank"] * row["f"] ** 2)


def test_the_post_hoc_numbers_are_those_of_the_results(tmp_path: Path):
    study, stored = script("analyses/frozen_filter_inits/post_hoc.py"), ROOT / "analyses/frozen_filter_inits"
    study.main(tmp_path / "found.json")
    found, expected = (json.loads(p.read_text()) for p in (tmp_path / "found.json", stored / "post_hoc.json"))
    for mine, theirs in zip(found["rows"], expected["rows"], strict=True):
        assert mine["comparison"] == theirs["comparison"]
        assert [mine["difference"], *mine["interval"]] == pytest.approx([theirs["difference"], *theirs["interval"]])
