"""`choose_gain`: how much to amplify a population's correlations, chosen by short paired trainings."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope._util.checks import number
from weightscope._util.results import Result, finite_or_none, row_table
from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.threads import one_thread
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import bench
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import DataError, UsageError
from weightscope.fits.fitting import fit_each
from weightscope.fits.population_fit import PopulationFit
from weightscope.population import Population

GAINS = (0.0, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, repr=False)
class GainChoice(Result):
    """The gain that was chosen, and the curve that chose it.

    The curve has one row for each gain: `gain`, `n`, the mean of the primary metric on the validation images under its
    name without `test_` (`accuracy`), paired `difference` to the smallest gain and to the best one (`to_best`) with
    their standard errors `difference_se` and `to_best_se`, `log_prob` (of held-out networks, nats each) and `chosen`.
    Where a network's metric is not finite, the mean and what is compared with it are None. The settings are `epochs`,
    `seeds`, `seed` (the root), `train` and `validation` (numbers of images, or of sequences), `metric`, and `data`.
    """

    gain: float  # the smallest candidate whose primary metric is within one standard error of the best one's
    curve: tuple[dict[str, Any], ...]
    fit: PopulationFit  # with the chosen gain; its settings have the curve under "gain"
    trainings: BenchResult  # of the candidates
    settings: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.curve]

    def summary(self) -> str:
        s, gains = self.settings, ", ".join(f"{row['gain']:g}" for row in self.curve)
        images = "other training images, on which the population was trained: this favours its correlations"
        where = images if s["data"] == "images" else "sequences of the validation part"
        return (
            f"gain {self.gain:g} of {gains}, by {s['seeds']} paired trainings of {s['epochs']} epochs on {s['train']} "
            f"{s['data']}, evaluated on {s['validation']} {where}"
        )

    def text(self) -> str:
        columns = {
            "gain": "{gain:g}",
            self.trainings.metric.label: f"{{{self.trainings.metric.key}:.4f}}",
            f"to gain {self.curve[0]['gain']:g}": "{difference:+.4f} +- {difference_se:.4f}",
            "to the best": "{to_best:+.4f} +- {to_best_se:.4f}",
            "log-likelihood": "{log_prob:.4g}",
        }
        return "\n".join([self.summary(), row_table(columns, self.curve), *self.notes()])

    def notes(self) -> list[str]:
        return [
            f"the smallest gain within one standard error of the best{self.trainings.metric.direction}",
            "log-likelihood: nats per held-out network; a gain above 1 is no density of trained networks",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"gain": self.gain, "curve": self.rows(), "settings": self.settings, "runs": self.trainings.runs}


@one_thread()
def choose_gain(
    population: Population | str | Path,
    select: str | Sequence[str] = "*",
    out: str | Path = "gain",
    *,
    gains: Sequence[float] = GAINS,
    seeds: int = 16,
    epochs: int | None = None,
    validation: int | None = None,
    fitting: Mapping[str, Any] | None = None,
    **training: Any,
) -> GainChoice:
    """Fit `exchangeable` with each gain and choose one by short trainings on paired seeds.

    No test image and no seed of a later benchmark is used: networks are trained on the first training images and
    evaluated on the last ones, with a root seed for this alone. The population itself saw those last images: collect
    it with a smaller `data.train` for a choice by images that nothing has seen. Networks for sequences are evaluated on
    those of `data.held_out = "valid"`. The smallest gain within one standard error of the best is taken (Breiman et al.
    1984, section 3.4.3), because a larger gain is a larger departure from what was estimated.

    The recipe of the population is trained, `seeds` networks for each of the `gains` (0 has the variances of all parts
    and no correlation), for a quarter of its epochs unless `epochs` are given, and evaluated on a fifth of its training
    images unless `validation` is. `select` are patterns of tensors that the initialiser sets, `fitting` further
    arguments of `fit` (by default `{"joint": "all"}`; "denoise" may be in its options) and `training` those of `bench`.
    `out` is the folder of the candidates and their trainings; calling again resumes.

    Example:
        >>> choice = choose_gain(Population("digits.pop"), "stages.*")
        >>> print(choice)
        >>> choice.fit.save("digits.safetensors")
    """
    population = population if isinstance(population, Population) else Population(population)
    candidates = sorted({number("gains", float(gain), least=0) for gain in gains})
    if len(candidates) < 2:
        raise UsageError(f"gains: expected at least 2 different numbers, found {list(gains)}")
    recipe = population.recipe
    held_back, counts = recipe.data.validating(validation, training.get("data"))
    length = max(1, recipe.training.epochs // 4) if epochs is None else epochs
    evaluate = {} if recipe.training.schedule == "plateau" else {"training.evaluate": "end"}
    seed = torch_seed(recipe.population.seed, 0, Purpose.GAIN)
    recipe = recipe.replace(held_back | evaluate | {"training.epochs": length, "population.networks": seeds})
    fitting = {"joint": "all", **(fitting or {})}
    options = dict(fitting.pop("options", None) or {})
    fits = fit_each(population, select, "exchangeable", [options | {"gain": gain} for gain in candidates], **fitting)
    # A folder for each content, so that a population that has grown replaces nothing.
    folder = Path(out) / hashlib.sha256("".join(one.fingerprint for one in fits).encode()).hexdigest()[:12]
    atomic.make_folder(folder)
    files = [one.save(folder / f"gain-{gain:g}.safetensors") for gain, one in zip(candidates, fits, strict=True)]
    given: dict[str, Any] = {"metric": recipe.data.metrics[0].name, "seeds": seeds, "seed": seed, "overwrite": True}
    trainings = bench(recipe, files, folder / "bench", **(given | training))
    curve, chosen = curve_of(candidates, np.array(list(trainings.by_arm().values())), trainings.metric)
    for row, one in zip(curve, fits, strict=True):
        row["log_prob"] = float(sum(r["log_prob"] for r in one.table if r["group"] != "(all)"))
    settings = {"epochs": length, "seed": seed, **counts, "data": recipe.data.what}
    settings |= {"seeds": seeds, "metric": trainings.metric.name}
    best = replace(fits[chosen], settings=fits[chosen].settings | {"gain": {"curve": curve, **settings}})
    return GainChoice(candidates[chosen], tuple(curve), best, trainings, settings)


def curve_of(gains: Sequence[float], values: np.ndarray, metric: Metric = ACCURACY) -> tuple[list[dict[str, Any]], int]:
    """The rows of `GainChoice.curve`, without likelihoods, and the index of the choice, of values (gains, seeds)."""
    means = values.mean(axis=1)
    if not np.isfinite(means).any():
        raise DataError(f"gains: networks of every one diverged; found no finite {metric.name}")
    best = int(np.nanargmax(metric.sign * np.where(np.isfinite(means), means, np.nan)))
    columns = {metric.key: means}
    for key, reference in (("difference", 0), ("to_best", best)):
        differences = values - values[reference]
        columns |= {key: differences.mean(1), f"{key}_se": differences.std(1, ddof=1) / np.sqrt(values.shape[1])}
    chosen = int(np.flatnonzero(-metric.sign * columns["to_best"] <= columns["to_best_se"])[0])
    rows = []
    for i, gain in enumerate(gains):
        found = {key: finite_or_none(column[i]) for key, column in columns.items()}
        rows.append({"gain": float(gain), "n": values.shape[1], **found, "chosen": i == chosen})
    return rows, chosen
