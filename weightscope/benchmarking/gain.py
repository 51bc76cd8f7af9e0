"""`choose_gain`: how much to amplify a population's correlations, chosen by short paired trainings."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope._util import atomic
from weightscope._util.checks import count, number
from weightscope._util.results import Result, finite_or_none, row_table, text_table
from weightscope._util.seeding import Purpose, torch_seed
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import bench
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import DataError, UsageError
from weightscope.fits.fitting import fit_each
from weightscope.fits.population_fit import PopulationFit
from weightscope.population import Population
from weightscope.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAINS = (0.0, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, repr=False)
class GainChoice(Result):
    """The gain that was chosen, and the curve that chose it.

    The curve has one row for each distribution: `gain`, `same` (larger candidates with this distribution), `n`, the
    mean of the primary metric on the validation images under its name without `test_` (`accuracy`), paired `difference`
    to the smallest gain and to the best one (`to_best`) with their standard errors `difference_se` and `to_best_se`,
    `log_prob` (of held-out networks, nats each), `realised` and `chosen`. `realised` has, for each type with kept
    correlations, the gain that clipping and projection leave. Where a network's metric is not finite, the mean and
    what is compared with it are None. The settings are `epochs`, `seeds`, `seed` (the root), `train` and `validation`
    (numbers of images, or of sequences), `metric`, and `data`.
    """

    gain: float  # the smallest candidate whose primary metric is within one standard error of the best one's
    curve: tuple[dict[str, Any], ...]
    fit: PopulationFit  # with the chosen gain; its settings have the curve under "gain"
    trainings: BenchResult  # of the candidates
    settings: dict[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.curve]

    def summary(self) -> str:
        s, gains = self.settings, ", ".join(map(_gains, self.curve))
        where = "sequences of the validation part"
        if s["data"] == "images":
            where = "other training images, on which the population was trained: this favours its correlations"
        return (
            f"gain {self.gain:g} of {gains}, by {s['seeds']} paired trainings of {s['epochs']} epochs on {s['train']} "
            f"{s['data']}, evaluated on {s['validation']} {where}"
        )

    def text(self) -> str:
        metric, form = self.trainings.metric, f".{self.trainings.metric.decimals}f"
        rows = self.rows()
        for row in rows:
            for key in (metric.key, "difference", "difference_se", "to_best", "to_best_se"):
                row[key] = None if row[key] is None else metric.factor * row[key]
            row["label"] = f"{'*' if row['chosen'] else ' '} {_gains(row)}"
        columns = {
            "gain": "{label}",
            f"{metric.label} {metric.unit}".strip(): f"{{{metric.key}:{form}}}",
            f"to gain {self.curve[0]['gain']:g}": f"{{difference:+{form}}} +- {{difference_se:{form}}}",
            "to the best": f"{{to_best:+{form}}} +- {{to_best_se:{form}}}",
            "log-likelihood": "{log_prob:.4g}",
        }
        rule = (
            f"* the smallest within one standard error of the best{metric.direction}\n"
            "log-likelihood: of held-out networks, nats each, under what is drawn from; a gain above 1\n"
            "enlarges correlations on purpose: that is no density of trained networks, and this does not rank gains"
        )
        kept, head = _types_kept(self.fit), "realised gain: what clipping and projection leave, by type"
        types = [[t, n["kept"], *(f"{row['realised'][t]:.3g}" for row in rows)] for t, n in kept.items()]
        realised = text_table(["type", "kept", *(f"{row['gain']:g}" for row in rows)], types)
        return "\n".join([self.summary(), row_table(columns, rows), rule, *([head, realised] if types else [])])

    def to_dict(self) -> dict[str, Any]:
        return {"gain": self.gain, "curve": self.rows(), "settings": self.settings, "runs": self.trainings.runs}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """The primary metric against gain, with standard errors of the paired differences and the choice marked."""
        from weightscope import plots

        return plots.finished(plots.gain_curve(self.curve, metric=self.trainings.metric, title=title), path)


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
    evaluated on the last ones, and their root seed is that of a domain of its own. The population itself saw those last
    images: collect it with a smaller `data.train` for a choice by images that nothing has seen. Networks for sequences
    are evaluated on those of `data.held_out = "valid"`. The smallest gain within one standard error of the best is
    taken (Breiman et al. 1984, section 3.4.3), because a larger gain is a larger departure from what was estimated:
    more is clipped and projected. Gains at which clipping and projection leave the same distribution are one candidate.

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
    count("seeds", seeds, least=2)
    population.require_trust(name for _, name in population.recipe.references)
    recipe, settings = _short(population.recipe, seeds, epochs, validation, training.get("data"))
    fitting = {"joint": "all", **(fitting or {})}
    options = dict(fitting.pop("options", None) or {})
    each = [options | {"gain": gain} for gain in candidates]
    fits = fit_each(population, select, "exchangeable", each, **fitting)
    # A folder for each content, so that a population that has grown replaces nothing.
    folder = Path(out) / hashlib.sha256("".join(one.fingerprint for one in fits).encode()).hexdigest()[:12]
    atomic.make_folder(folder)
    first = [i for i, one in enumerate(fits) if i == 0 or not _same(fits[i - 1], one)]
    same = [candidates[a + 1 : b] for a, b in zip(first, [*first[1:], len(fits)], strict=True)]
    candidates, fits = [candidates[i] for i in first], [fits[i] for i in first]
    files = [one.save(folder / f"gain-{gain:g}.safetensors") for gain, one in zip(candidates, fits, strict=True)]
    training = {"metric": recipe.data.metrics[0].name} | training
    options = {"seeds": seeds, "seed": settings["seed"], "overwrite": True, **training}
    trainings = bench(recipe, files, folder / "bench", **options)
    metric = trainings.metric
    found = [np.nan if run[metric.key] is None else run[metric.key] for run in trainings.runs]
    values = np.array(found).reshape(len(candidates), seeds)
    curve, chosen = curve_of(candidates, values, metric)
    for row, others, one in zip(curve, same, fits, strict=True):
        row["log_prob"] = float(sum(r["log_prob"] for r in one.table if r["group"] != "(all)"))
        row |= {"same": others, "realised": {label: note["realised"] for label, note in _types_kept(one).items()}}
    settings |= {"seeds": seeds, "metric": metric.name}
    best = replace(fits[chosen], settings=fits[chosen].settings | {"gain": {"curve": curve, **settings}})
    return GainChoice(candidates[chosen], tuple(curve), best, trainings, settings)


def _types_kept(fitted: PopulationFit) -> dict[str, dict[str, Any]]:
    """The diagnostics of each type that keeps correlations, by its label; of several groups, with the group's name."""
    found = {
        f"{group.name}: {label}" if len(fitted.groups) > 1 else label: note
        for group in fitted.groups
        for label, note in (group.structure.diagnostics if group.structure else {}).items()
    }
    return {label: note for label, note in found.items() if isinstance(note, dict) and note.get("kept")}


def _same(one: PopulationFit, other: PopulationFit) -> bool:
    """Whether two fits of the same tensors are one distribution, up to rounding."""
    arrays = other.arrays()
    return all(np.allclose(array, arrays[name], rtol=1e-6, atol=1e-9) for name, array in one.arrays().items())


def _gains(row: Mapping[str, Any]) -> str:
    """`30`, or `30 = 100 = 300` for gains with one distribution."""
    return " = ".join(f"{gain:g}" for gain in (row["gain"], *row["same"]))


def curve_of(gains: Sequence[float], values: np.ndarray, metric: Metric = ACCURACY) -> tuple[list[dict[str, Any]], int]:
    """The rows of `GainChoice.curve`, without likelihoods, and the index of the choice."""
    means = values.mean(axis=1)
    if not np.isfinite(means).any():
        raise DataError(f"gains: networks of every one diverged; found no finite {metric.name}")
    best = int(np.nanargmax(np.where(np.isfinite(means), metric.sign * means, np.nan)))

    def paired(reference: int) -> tuple[np.ndarray, np.ndarray]:
        differences = values - values[reference]
        return differences.mean(axis=1), differences.std(axis=1, ddof=1) / np.sqrt(values.shape[1])

    (first, first_se), (top, top_se) = paired(0), paired(best)
    chosen = int(np.flatnonzero(-metric.sign * top <= top_se)[0])
    columns = {metric.key: means, "difference": first, "difference_se": first_se, "to_best": top, "to_best_se": top_se}
    rows = []
    for i, gain in enumerate(gains):
        numbers = {key: finite_or_none(column[i]) for key, column in columns.items()}
        rows.append({"gain": float(gain), "n": values.shape[1], **numbers, "chosen": i == chosen})
    return rows, chosen


def _short(
    recipe: Recipe, seeds: int, epochs: int | None, validation: int | None, data: str | Path | None
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of the candidates' trainings, and its numbers."""
    length = count("epochs", max(1, recipe.training.epochs // 4) if epochs is None else epochs)
    changes: dict[str, Any] = {"training.epochs": length}
    if recipe.training.schedule != "plateau":
        changes["training.evaluate"] = "end"
    held_back, numbers = recipe.data.validating(validation, data)
    seed = torch_seed(recipe.population.seed, 0, Purpose.GAIN)
    changes |= held_back | {"population.networks": seeds}  # checked before candidates are fitted
    return recipe.replace(changes), {"epochs": length, "seed": seed, **numbers, "data": recipe.data.what}
