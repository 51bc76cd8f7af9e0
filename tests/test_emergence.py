"""Correlations against training: planted ones, and the commands on a small population with snapshots."""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import run
from test_exchangeable import planted
from tiny import recipe

from weightscope.analysis.exchangeable import Emergence, covariance_exchangeable
from weightscope.fits import load_artifact
from weightscope.population import Population
from weightscope.statistics.samples import WeightArray
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

VIT = {"type": "vit", "width": 8, "depth": 1, "heads": 2, "patch_size": 4}


def test_a_correlation_that_grows_is_drawn_against_training_with_the_threshold_of_its_p_value(tmp_path: Path) -> None:
    sizes = {0: 0.0, 1: 0.05, 4: 0.3, 8: 0.6}
    found = {}
    for epoch, size in sizes.items():
        x, spec, permutations = planted(300, size, seed=epoch)
        found[epoch] = covariance_exchangeable(WeightArray(x, spec), permutations=permutations)
    emergence = Emergence(found, "epoch")
    ((words, pairs),) = emergence.curves.items()
    assert words == "blocks.0: fc2 row means and blocks.1: fc2 row means"
    values = [pair.correlation for pair in pairs if pair is not None]
    np.testing.assert_allclose(values, [-size for size in sizes.values()], atol=5 / np.sqrt(300 * 7))
    assert [pair.p < 0.05 for pair in pairs if pair is not None] == [False, False, True, True]
    axes = emergence.plot(tmp_path / "a.png").axes[0]
    curve = next(line for line in axes.lines if line.get_gid() == "curve")
    np.testing.assert_allclose(curve.get_xydata(), np.c_[list(sizes), values])
    (_, upper) = (line.get_ydata() for line in axes.lines if line.get_gid() == "limit")
    # of independent samples: the quantile of 0.05 / 2 / 20 pairs over the root of 300 networks times 7 channels
    np.testing.assert_allclose(upper[:2], 3.05 / np.sqrt(300 * 7), rtol=0.15)
    assert [abs(value) > limit for value, limit in zip(values, upper, strict=True)] == [False, False, True, True]
    assert "epoch 8" in emergence.text()
    assert (tmp_path / "a.png").exists()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight ViTs of two epochs, with three snapshots."""
    folder = tmp_path_factory.mktemp("emergence") / "vit.pop"
    collect(
        recipe(network=VIT, population__networks=8, population__snapshots=[0, 1, 2]), folder, workers=1, progress=False
    )
    return folder


def test_commands_take_a_snapshot(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, data, fitted = (tmp_path / name for name in ("a.png", "a.json", "a.safetensors"))
    for at in (["--at", "1"], []):
        run("covariance", path, *at, "-o", plot, "--json", data, capsys=capsys)
        stripes = json.loads(data.read_text())["stripes"]["blocks.0.mlp.fc1.weight"]["column"]["ratio"]
        source = Population(path).at(1) if at else Population(path)
        assert json.loads(data.read_text())["diagnostics"].get("at") == ("epoch 1" if at else None)
        fc1 = source.weights("*fc1.weight").reshape(8, -1, 8).astype(np.float64)
        fc1 -= fc1.mean(0)
        assert stripes == pytest.approx(fc1.shape[1] * np.square(fc1.mean(1)).mean() / np.square(fc1).mean())
    run("covariance", path, "--exchangeable", "--at", "2", "-o", plot, "--json", data, capsys=capsys)
    last = json.loads(data.read_text())
    run("fit-init", path, "--structure", "diagonal", "--at", "1", "-o", fitted, capsys=capsys)
    assert load_artifact(fitted).provenance["snapshot"] == 1
    code, _, _ = run("covariance", path, "--exchangeable", "--at", "all", "-o", plot, "--json", data, capsys=capsys)
    snapshots = json.loads(data.read_text())["snapshots"]
    assert [each.pop("at") for each in snapshots] == [0, 1, 2]
    assert {"written_by": "weightscope covariance"} | snapshots[2] == last
    assert code == 0, "also if no correlation is significant"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "all"], "--at: expected an epoch or a step, or all with --exchangeable, found all"),
        (["--at", "-1"], "--at: expected an epoch or a step"),
        (["--at", "3"], "expected a snapshot after epoch 3; there are 0, 1, 2"),
    ],
)
def test_snapshots_that_are_not_there(
    arguments: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("covariance", path, *arguments, capsys=capsys)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
