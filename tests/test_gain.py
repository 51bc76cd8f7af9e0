"""The gain of exchangeable: chosen by the one-standard-error rule, on images and seeds apart; by type; reported."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import PLAIN
from programs import run

from weightscope.benchmarking.gain import choose_gain, curve_of
from weightscope.data import load
from weightscope.errors import UsageError
from weightscope.fits import exchangeable, load_artifact
from weightscope.fits.exchangeable import Exchangeable
from weightscope.fits.fitting import fit, fit_each
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics import samples
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.shrinkage import amplified, eigenvalues_clipped
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")
RECIPE = Recipe.parse({**PLAIN, "population": {"networks": 8, "tile": 4}})


def test_the_smallest_gain_within_one_standard_error_is_taken() -> None:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(64)  # what seeds have in common cancels in the pairs
    noise = 0.002 * rng.standard_normal((5, 64))
    means = np.array([0.70, 0.72, 0.7499, 0.75, 0.74])
    rows, chosen = curve_of([0, 1, 3, 10, 30], means[:, None] + 0.1 * shared + noise)
    assert chosen == 2
    assert [row["chosen"] for row in rows] == [False, False, True, False, False]
    differences = (means[1] - means[0]) + noise[1] - noise[0]
    assert rows[1]["difference"] == pytest.approx(differences.mean())
    assert rows[1]["difference_se"] == pytest.approx(differences.std(ddof=1) / 8)
    assert rows[1]["difference_se"] < 0.001 < 0.1 / 8  # unpaired, the standard error would be that of the seeds
    best = int(np.argmax([row["accuracy"] for row in rows]))
    assert (rows[best]["to_best"], rows[best]["to_best_se"]) == (0, 0)
    assert curve_of([0, 1], np.full((2, 3), 0.5))[1] == 0


def test_validation_images_are_training_images_and_not_trained_on() -> None:
    plain, held = load("digits", train=100, test=30), load("digits", train=100, test=30, validation=25)
    assert torch.equal(held.train_images, plain.train_images[:75])
    assert torch.equal(held.test_images, plain.train_images[75:])
    assert torch.equal(held.test_labels, plain.train_labels[75:])
    assert held.mean != plain.mean
    assert held.fingerprint != plain.fingerprint
    with pytest.raises(UsageError, match="expected 1 to 99 images, found 100"):
        load("digits", train=100, validation=100)


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Population:
    return collect(RECIPE, tmp_path_factory.mktemp("gain") / "tiny.pop", workers=1, device="cpu", progress=False)


@pytest.fixture
def all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No correlation counts as noise; of 8 networks, none is beyond 4 standard errors."""
    monkeypatch.setattr(exchangeable, "amplified", lambda r, errors, gain: amplified(r, 0 * errors, gain))


@pytest.mark.usefixtures("all_kept")
def test_it_is_chosen_on_images_and_seeds_apart(population: Population, tmp_path: Path) -> None:
    options = {"workers": 1, "device": "cpu", "progress": False}
    choice = choose_gain(population, "stages.*", tmp_path, gains=(0, 5), seeds=4, epochs=2, **options)
    assert [row["gain"] for row in choice.curve] == [0, 5]
    assert len(choice.trainings.runs) == 2 * 4
    trained = choice.trainings.environment["recipe"]
    assert (trained["data"]["validation"], trained["data"]["train"]) == (12, 64)
    assert trained["training"]["epochs"] == 2
    assert trained["population"]["seed"] not in (0, RECIPE.population.seed)
    arm = Population(next(tmp_path.glob("*/bench/runs/gain-5*.pop")), partial=True)
    assert set(arm.seeds).isdisjoint(population.seeds)
    assert choice.fit.settings["gain"]["curve"] == choice.rows()
    assert choice.fit.groups[0].options == {"gain": choice.gain}
    again = load_artifact(choice.fit.save(tmp_path / "chosen.safetensors"))
    assert again.settings["gain"]["validation"] == 12
    for text in (
        "the smallest gain within one standard error of the best",
        "4 paired trainings of 2 epochs on 52 images",
        "on which the population was trained",
    ):
        assert text in choice.text()
    assert json.loads(json.dumps(choice.to_dict()))["gain"] == choice.gain
    assert "no density of trained networks" in choice.text()
    with pytest.raises(UsageError, match="at least 2 different numbers"):
        choose_gain(population, out=tmp_path, gains=(3,))


def test_all_gains_are_fitted_in_the_passes_of_one(population: Population, monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = [], Population.marked_chunks
    monkeypatch.setattr(samples, "LEAF", 4)
    monkeypatch.setattr(Population, "marked_chunks", lambda *a, **b: read.append(a) or plain(*a, **b))
    options: list[Any] = [{"gain": gain} for gain in (0.0, 2.0, 5.0)]
    several = fit_each(population, "stages.*", "exchangeable", options, joint="all", workers=1)
    passes = len(read)
    for found, each in zip(several, options, strict=True):
        alone = fit(population, "stages.*", structure="exchangeable", options=each, joint="all", workers=1)
        assert found.to_dict() == alone.to_dict()
        assert all(np.array_equal(x, alone.arrays()[name]) for name, x in found.arrays().items())
    assert len(read) == 4 * passes
    assert len({found.fingerprint for found in several}) == 3


def test_it_is_chosen_on_sequences_apart(tmp_path: Path) -> None:
    plan = {
        "network": {"type": "mamba", "width": 4, "depth": 1, "state": 2},
        "data": {"name": "copy", "length": 2, "vocabulary": 4, "train": 16, "test": 6, "lengths": [1]},
        "training": {"epochs": 2, "batch_size": 8, "schedule": "plateau"},
        "population": {"networks": 8, "tile": 4},
    }
    options = {"workers": 1, "device": "cpu", "progress": False}
    found = collect(plan, tmp_path / "a.pop", **options)
    choice = choose_gain(found, "*", tmp_path / "gain", gains=(0, 2), seeds=2, epochs=1, **options)
    assert [row["difference"] for row in choice.curve] == [0, 0], "nothing is kept"
    assert choice.gain == 0
    trained = choice.trainings.environment["recipe"]
    assert (trained["data"]["held_out"], trained["data"]["test"]) == ("valid", 6)
    assert set(Population(next(tmp_path.glob("gain/*/bench/runs/gain-0*.pop")), partial=True).seeds).isdisjoint(
        found.seeds
    )
    assert "on 16 sequences, evaluated on 6 sequences of the validation part" in choice.text()


@pytest.mark.slow
def test_the_command_takes_a_number_or_chooses_one(
    population: Population, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit_init(*arguments: str) -> str:
        code, *text = run("fit-init", population.path, *arguments, capsys=capsys)
        assert code == 0, text
        return "".join(text)

    out, file = tmp_path / "a.safetensors", tmp_path / "a.json"
    common = ["--structure", "exchangeable", "--joint", "all", "--select", "stages.*", "-o", str(out)]
    text = fit_init(*common, "--gain", "12")
    assert "kept (beyond 4 standard errors), times the gain, clipped at 0.9, changed by the projection" in text
    assert re.search(r"channels\S* +\d+ +\S+ +\d+ of \d+ +12 +\d+ +\S+%", text)
    assert load_artifact(out).groups[0].options == {"gain": 12}
    budget = ["--gain-seeds", "2", "--gain-epochs", "1", "--workers", "1", "--device", "cpu"]
    fit_init(*common, "--gain", "auto", *budget, "--json", str(file))
    curve = json.loads(file.read_text())["gain"]["curve"]
    assert [row["gain"] for row in curve] == [0, 1, 3, 10, 30]
    assert sum(row["chosen"] for row in curve) == 1


SPEC = WeightSpec([TensorSpec("a", (12,)), TensorSpec("b", (12,)), TensorSpec("c", (20,)), TensorSpec("d", (20,))])
PERMUTATIONS = PermutationSpec.from_axes(SPEC, {"a": ("one",), "b": ("one",), "c": ("two",), "d": ("two",)})


def weights() -> np.ndarray:
    """Correlations of 0.2 in each of two groups of units."""
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((300, n)) for n in (12, 20)]
    mixed = [[p, 0.2 * p + np.sqrt(0.96) * rng.standard_normal(p.shape)] for p in parts]
    return np.concatenate([part for pair in mixed for part in pair], axis=1)


def test_a_gain_multiplies_the_correlations_of_all_types() -> None:
    def found(**options) -> dict[str, float]:
        found = Exchangeable.fit(weights(), SPEC, permutations=PERMUTATIONS, **options)
        enlarged = any(isinstance(n, dict) and n.get("gain", 0) > 1 for n in found.diagnostics.values())
        assert ("no density of trained networks" in " ".join(found.notes())) == enlarged
        kinds = zip(found.permutations.types, found.correlations, strict=True)
        return {kind.groups[0]: float(matrix[0, 1]) for kind, matrix in kinds if kind.groups}

    plain, both = found(gain=1.0), found(gain=3.0)
    assert both["one"] == pytest.approx(3 * plain["one"])
    assert both["two"] == pytest.approx(3 * plain["two"])
    for options, message in (
        ({"gain": -1}, "gain: expected a number >= 0"),
        ({"gain": "auto"}, "--gain auto"),
        ({"denoise": "eigenvalues"}, "needs a gain, found none"),
        ({"gain": 1, "denoise": "magic"}, "denoise: expected one of"),
    ):
        with pytest.raises(UsageError, match=message):
            found(**options)


def test_eigenvalues_within_the_edge_of_noise_are_replaced_by_their_mean() -> None:
    rng = np.random.default_rng(0)
    n, c = 2000, 40
    noise = np.corrcoef(rng.standard_normal((n, c)).T)
    cleaned, kept = eigenvalues_clipped(noise, n)
    assert kept == 0
    np.testing.assert_allclose(cleaned, np.eye(c), atol=1e-12)
    direction = rng.choice([-0.5, 0.5], (1, c))
    one = np.corrcoef((rng.standard_normal((n, c)) + rng.standard_normal((n, 1)) * direction).T)
    truth = direction.T @ direction + np.eye(c)
    truth /= np.sqrt(np.outer(truth.diagonal(), truth.diagonal()))
    cleaned, kept = eigenvalues_clipped(one, n)
    assert kept == 1
    np.testing.assert_allclose(cleaned.diagonal(), 1)
    assert np.linalg.norm(cleaned - truth) < 0.7 * np.linalg.norm(one - truth)
    found = Exchangeable.fit(weights(), SPEC, permutations=PERMUTATIONS, gain=2.0, denoise="eigenvalues")
    assert any("eigenvalues beyond the noise" in line for line in found.notes())
