"""`BenchResult`: the runs of a benchmark and their summary, as tables, text, JSON and pictures that say the finding."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope._util.arms import CONTROLS, Control, count_range, divergence, epochs_text, point_of, point_text
from weightscope._util.results import Result, text_table
from weightscope._util.sources import reason
from weightscope.benchmarking.statistics import (
    LEVEL,
    Contrast,
    Hits,
    arm_key,
    between_cells,
    cell_key,
    chance_note,
    contrast_tests,
    control_of,
    has_fields,
    seed_differences,
)
from weightscope.data.metrics import ACCURACY, LOSS, Metric, metric_named
from weightscope.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOO_FEW = "too few seeds"  # in place of an interval
_COMPARED = ("difference", "interval (Holm)", "p (Holm)")
_IMAGES = ("other images too",)
_SPEEDS = ("parameters", "images/s")


@dataclass(frozen=True, repr=False)
class BenchResult(Result):
    """Result of a benchmark.

    `runs` has one row for each network: `init`, `cell` (the recipe's fields that vary, with their values), `numbers`
    (the initialiser's that vary), `epochs`, `seed` (its number), each of the task's metrics under its name without
    `test_` (for images `accuracy` and `loss`; None if it is not finite), `diverged` and `curve` (the compared metric
    after each epoch).

    `arms`, which `results.json` calls `summary`, are the rows of `summarise`: means of the compared metric with their
    intervals, and differences from the first initialiser in the cell at the same length. `parameters` are those of a
    network. Where `bench(throughput=True)` measured it, `images_per_second` is the number of test images times T
    networks of a tile, over the seconds of their forward passes and losses at an evaluation: on a CPU processor seconds
    of one thread. It is the median of the evaluations without the first, and of the tiles, with the digits that these
    have in common; `measured_on` the machine.
    """

    runs: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)  # versions, machine, device and the recipe
    metric: Metric = ACCURACY  # that is compared; all of `arms` and the differences are in its stored unit
    metrics: tuple[Metric, ...] = (ACCURACY, LOSS)  # all that the task reports
    contrasts: list[dict[str, Any]] = field(default_factory=list)  # that were declared, see `contrast_tests`
    hits: Hits = field(default_factory=dict, compare=False)  # by arm (n, images) from `bench`, none where it is loaded

    @classmethod
    def load(cls, path: str | Path) -> "BenchResult":
        """Read a `results.json`, or the one in a folder; a DataError if it is not the result of a benchmark."""
        path = Path(path)
        path = path / "results.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text())
            metrics = {name: metric_named(name) for name in (values["metric"], *values["metrics"])}
            known = {name: metric for name, metric in metrics.items() if metric is not None}
            compared, named = known[values["metric"]], tuple(known[name] for name in values["metrics"])
            rows, found = (values["runs"], values["summary"]), values.get("contrasts", [])
            return cls(*rows, values["environment"], compared, named, found)
        except OSError as error:
            raise DataError(f"{path}: {reason(error)}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: expected the results of a benchmark, found something else: {error}") from None

    def rows(self) -> list[dict[str, Any]]:
        """`arms` with one value in each cell: a column for each field or number that varies, and two for an interval.

        The interval `difference_ci_holm` becomes `difference_holm_low` and `difference_holm_high`; `difference_ci95`,
        `difference_low` and `difference_high`. Columns that are empty are left out.
        """
        axes, out = axes_of(self.arms), []
        for row in self.arms:
            place = point_of(row)
            out.append({"init": row["init"], **{name: place.get(name) for name in axes}})
            for key, value in row.items():
                stem, is_interval, kind = key.rpartition("ci")
                if is_interval and kind in ("95", "_holm", "_images"):
                    stem += kind.removeprefix("_") + "_" if kind != "95" else ""
                    out[-1] |= zip((f"{stem}low", f"{stem}high"), value or (None, None), strict=True)
                elif key not in ("cell", "numbers"):
                    out[-1][key] = value
        kept = [key for key in out[0] if any(row.get(key) is not None for row in out)] if out else []
        return [{key: row.get(key) for key in kept} for row in out]

    def summary(self) -> str:
        recipe = self.environment.get("recipe", {})
        data = f" on {recipe['data']['name']}" if recipe else ""
        return f"{len(self.arms)} arms, {len(self.runs)} networks{data}"

    def text(self) -> str:
        """Contrasts, and a table with one line for each arm; with the pairs where they are not all of the seeds."""
        metric = self.metric
        value = f"{metric.label} %" if metric.unit == "%" else metric.label
        pairs = any(row["pairs"] not in (None, row["n"]) for row in self.arms)
        images = any(row.get("difference_ci_images") for row in self.arms)
        speeds = any(row.get("images_per_second") for row in self.arms)
        compared = (*("pairs",)[:pairs], *_COMPARED, *_IMAGES[:images], *_SPEEDS[: 2 * speeds], "")
        header = ("initialiser", *("epochs",)[: self._lengths], "n", value, "95 % interval", *compared)
        cells = [(row, _cells(row, metric, pairs, images, speeds)) for row in self.arms]
        table = _ruled(header, [(row, each if self._lengths else each[:1] + each[2:]) for row, each in cells])
        if self.contrasts:
            table = f"{contrasts_text(self.contrasts, metric)}\n\nexploratory, adjusted for one another:\n{table}"
        parts = ["\n".join([table, *self.notes()]), *map(self._against, CONTROLS.values())]
        return "\n\n".join(filter(None, parts))

    @property
    def _lengths(self) -> bool:
        """Whether the lengths of training are known; they are 0 in runs that were made elsewhere."""
        return any(row["epochs"] for row in self.arms)

    def notes(self) -> list[str]:
        """What the table's numbers mean where it is not plain."""
        metric, out = self.metric, []
        if not metric.higher_is_better:
            out.append(f"{metric.title}{metric.direction}")
        if guesses := chance_note(self.arms):
            out.append(guesses)
        if any(row["n"] < row["networks"] for row in self.arms):
            out.append(
                "a network without a finite value has the worst rank in p (Wilcoxon); means are of the others, and "
                "differences have no interval"
            )
        known = any(row["mean"] is not None and row["difference"] is not None for row in self.arms)
        if any(key.endswith("_ci_images") and row[key] for row in [*self.arms, *self.contrasts] for key in row):
            out.append("other images too: the interval for other test images as well (both random, crossed)")
        elif metric.unit == "%" and known:
            out.append("intervals are over networks, for the test examples that were used")
        if machines := dict.fromkeys(row["measured_on"] for row in self.arms if row.get("measured_on")):
            out.append(f"images/s: of evaluations, the median without the first; {'; '.join(machines)}")
        arms = {arm_key(row): row for row in self.arms}
        for row in self.arms:
            base = arms.get((cell_key(row), row["epochs"], row["reference"]))
            if base is not None and row["difference"] == 0 and row.get("loss") == base.get("loss"):
                same = f"{row['init']}: the results of {base['init']} on every seed; does it change any weight?"
                out.append(same)
        return out

    def _against(self, control: Control) -> str:
        """What an initialiser adds to a control; empty without such a control."""
        images = any(row.get(f"{control.key}_ci_images") for row in self.arms)
        lines = []
        for row in (row for row in self.arms if row.get(control.arm) is not None):
            pairs = "" if (n := row[f"{control.key}_pairs"]) is None else f"{n}"
            cells = _difference(row, control.key, self.metric, images)
            lines.append((row, [row["init"], f"{row['epochs']}", pairs, *cells]))
        header = ("initialiser", "epochs", "pairs", control.parts[1].removeprefix("structure "), *_COMPARED[1:])
        return f"{control.about}\n{_ruled((*header, *_IMAGES[:images]), lines)}" if lines else ""

    def table(self) -> str:
        """A table like in the papers, in Markdown: a column per cell and length.

        An entry is the mean of the metric, accuracies in per cent. Behind ± is the half width of the adjusted interval
        of its difference from the reference on the same seeds; the reference, in the first row, has none. The best mean
        of a column is bold, of the arms with the most seeds: a mean over the networks that did not diverge is not
        comparable with one over all. A dagger marks a difference from the reference at an adjusted level of 0.05.
        """
        columns: dict[Any, dict[str, Mapping[str, Any]]] = {}
        for row in self.arms:
            columns.setdefault((cell_key(row), row["epochs"]), {})[row["init"]] = row
        heads, several = ["initialiser"], len({row["epochs"] for row in self.arms}) > 1
        entries: dict[str, list[str]] = {row["init"]: [] for row in self.arms}
        for column in columns.values():
            first, best = next(iter(column.values())), _best_of(list(column.values()), self.metric)
            cell, length = point_text(first["cell"]), epochs_text(first["epochs"])
            heads.append(", ".join(filter(None, [cell, length if several or not cell else ""])))
            for init, cells in entries.items():
                cells.append(_entry(column.get(init), best, self.metric))
        lines = [heads, ["---"] + ["---:"] * len(columns), *([init, *cells] for init, cells in entries.items())]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        metric, seeds = self.metric, count_range([row["n"] for row in self.arms])
        note = f"{metric.title[0].upper()}{metric.title[1:]} of {seeds} seeds; ± half the 95 % interval (Holm) of the "
        note += f"paired difference from the first row; †: p < 0.05, adjusted (Holm){metric.direction}"
        return "\n".join([*rows, "", "; ".join(filter(None, [note, divergence(self.arms)]))]) + "\n"

    def contrast(self, terms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The test of one contrast, `[{"init": "a"}, {"init": "default", "weight": -1}]`; for terms see `Contrast.of`.

        It is post hoc: what decides is declared beforehand, as `bench(contrasts=...)`. Of a result that was loaded,
        `ci_images` is None.
        """
        arms = [(row["cell"], row["epochs"], row["init"]) for row in self.arms]
        return contrast_tests([Contrast.of(terms, arms)], self.runs, self.metric, hits=self.hits)[0]

    def by_arm(self, metric: str | None = None, **fields: Any) -> dict[str, np.ndarray]:
        """The metric of each initialiser's networks by seed, (n,), a mean over the cells and lengths of these fields.

        `metric` is a key of the runs, the compared one if None; fields are those of a term of a contrast.

        Example:
            >>> found = result.by_arm(epochs=10)
            >>> found["mimetic_mlp"] - found["default"]
        """
        key = metric or self.metric.key
        found: dict[str, dict[int, list[float]]] = {}
        for run in self.runs:
            if has_fields(run.get("cell", {}), run["epochs"], fields):
                value = np.nan if run[key] is None else run[key]
                found.setdefault(run["init"], {}).setdefault(run["seed"], []).append(value)
        return {init: np.array([np.mean(seeds[k]) for k in sorted(seeds)]) for init, seeds in found.items()}

    def between(self, field: str) -> list[dict[str, Any]]:
        """Each arm against the same arm at the first value of a varied field of the recipe, on the same seeds.

        One row for each arm: `init`, `cell`, `epochs`, `reference` (the field and its first value), `difference`,
        `difference_ci95`, `p`, `pairs`, and `p_holm`, `difference_ci_holm` and `difference_ci_images`, adjusted over
        these rows; the last is None where the result was loaded.

        Example:
            >>> BenchResult.load("bench/results.json").between("distillation.alpha")
        """
        return between_cells(self.runs, field, self.metric, self.hits)

    def to_dict(self) -> dict[str, Any]:
        described = {metric.name: metric.to_dict() for metric in self.metrics}
        compared = {"metric": self.metric.name, "metrics": described}
        found = {"contrasts": self.contrasts} if self.contrasts else {}
        return {"runs": self.runs, **found, "summary": self.arms, **compared, "environment": self.environment}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """The metric against what was varied: the first axis, else the training length, else the initialiser.

        A file that is named after one of `figures`, such as along-network.width.png, has that one.
        """
        figures = self.figures(title=title)
        return figures.get("" if path is None else Path(path).stem, next(iter(figures.values())))(path)

    def figures(self, *, title: str | None = None) -> "dict[str, Callable[..., Figure]]":
        """The pictures that these results have, by name, each a function of the file to write (or None).

        `convergence` (one cell), `differences` (paired), `scale` and `correlations` (with controls), `along-AXIS` for
        each axis, `along-parameters` where they differ in number (thesis Fig. 2.1), `map-X-Y` for each pair of axes. By
        default each title says the finding.
        """
        from weightscope import plots  # imports matplotlib

        found = _pictures(self.runs, self.arms, self.metric)

        def drawn(name: str, path: str | Path | None = None) -> "Figure":
            draw, said = found[name]
            return plots.finished(draw(title=title or said), path)

        return {name: partial(drawn, name) for name in found}


def _cells(row: dict[str, Any], metric: Metric, pairs: bool, images: bool, speeds: bool) -> list[str]:
    mean = "" if row["mean"] is None else _number(row["mean"], metric)
    interval = _interval(row["ci95"], metric)
    if row["n"] and interval in ("", _interval(metric.bounds, metric)):
        interval = TOO_FEW
    cells = [row["init"], f"{row['epochs']}", f"{row['n']}", mean, interval]
    cells += ["" if row["pairs"] is None else f"{row['pairs']}"] * pairs + _difference(
        row, "difference", metric, images
    )
    if speeds:
        speed = row.get("images_per_second")
        cells += [f"{row['parameters']:,}", "" if speed is None else f"{speed:,.0f}"]
    return [*cells, f"({row['diverged']} diverged)" if row["diverged"] else ""]


def contrasts_text(contrasts: Sequence[dict[str, Any]], metric: Metric) -> str:
    """The contrasts as a table, and which of them were not declared before the results."""
    several, images = len(contrasts) > 1, any(row.get("ci_images") for row in contrasts)
    kind = "interval (Holm)" if several else f"{100 - 100 * LEVEL:g} % interval"
    lines = []
    for row in contrasts:
        found = ["", TOO_FEW, ""]
        if (p := row["p_holm" if several else "p"]) is not None:
            found = _compared(row["difference"], row["ci"], p, row["pairs"] < row["seeds"], metric)
        found += [_told(both, metric) if (both := row.get("ci_images")) else ""] * images
        lines.append((row, [row["contrast"], f"{row['pairs']}", *found, "" if row["declared"] else "post hoc"]))
    name = "declared contrast" if all(row["declared"] for row in contrasts) else "contrast"
    header = (name, "seeds", "difference", kind, "p (Holm)" if several else "p", *_IMAGES[:images], "")
    return _ruled(header, lines)


def _ruled(header: tuple[str, ...], rows: Iterable[tuple[Mapping[str, Any], list[str]]]) -> str:
    """A table of rows and what is shown of them, below a line; with a column of their cells if they are in any."""
    found = [(point_text(row.get("cell", {})), shown) for row, shown in rows]
    cells = any(cell for cell, _ in found)
    lines = [[cell, *shown] if cells else shown for cell, shown in found]
    text = text_table(("cell", *header) if cells else header, lines, left=(0, 1) if cells else (0,))
    head, *below = text.split("\n")
    return "\n".join([head, "-" * len(head), *below])


def _difference(row: dict[str, Any], key: str, metric: Metric, images: bool) -> list[str]:
    """A difference, its interval and adjusted p-value, and the interval over images; empty without a test."""
    prefix = "" if key == "difference" else f"{key}_"
    p, pairs = row[f"{prefix}p_holm"], row[f"{prefix}pairs"]
    if p is None:
        return [""] * (3 + images)
    cells = _compared(row[key], row[f"{key}_ci_holm"], p, pairs < row["networks"], metric)
    return cells + [_told(both, metric) if (both := row.get(f"{key}_ci_images")) else ""] * images


def _compared(
    difference: float | None, interval: Sequence[float] | None, p: float, lost: bool, metric: Metric
) -> list[str]:
    """The cells of a test; the interval is empty if networks were `lost`, that is, have no finite value."""
    value = "" if difference is None else _number(difference, metric, "+")
    return [value, "" if lost else _told(interval, metric), f"{p:.2g}".replace("e-0", "e-")]


def _told(interval: Sequence[float] | None, metric: Metric) -> str:
    """The interval of a difference."""
    return _interval(interval, metric, "+") if metric.tells(interval) else TOO_FEW


def _number(value: float, metric: Metric, form: str = "") -> str:
    return format(metric.factor * value, f"{form}.{metric.decimals}f")


def _interval(interval: Sequence[float] | None, metric: Metric, sign: str = "") -> str:
    return " to ".join(_number(value, metric, f"{sign}{metric.decimals + 3}") for value in interval or [])


def _lost(row: Mapping[str, Any]) -> bool:
    """Whether a network of an arm, or of the arm that it is compared with, has no finite value."""
    return row.get("pairs") is not None and row["pairs"] < row["networks"]


# --- tables like in the papers ----------------------------------------------------------------------------------------


def _best_of(column: Sequence[Mapping[str, Any]], metric: Metric) -> tuple[int, float] | None:
    """The largest number of seeds, and the best mean of the arms with so many; None if none can be compared."""
    compared = [row["difference_ci_holm"] for row in column if row["difference"] is not None and not _lost(row)]
    if compared and not any(metric.tells(interval) for interval in compared):
        return None
    most = max(row["n"] for row in column)
    means = [row["mean"] for row in column if row["n"] == most and row["mean"] is not None]
    return (most, max(means, key=lambda mean: metric.sign * mean)) if means else None


def _entry(row: Mapping[str, Any] | None, best: tuple[int, float] | None, metric: Metric) -> str:
    if row is None or row["mean"] is None:
        return ""
    decimals = metric.decimals - 1
    mean = f"{metric.factor * row['mean']:.{decimals}f}"
    if best is not None and (row["n"], row["mean"]) == best:
        mean = f"**{mean}**"
    sure = "†" * (row["p_holm"] is not None and row["p_holm"] < LEVEL)
    if row["p_holm"] is None or _lost(row):
        return f"{mean}{sure}"
    if not metric.tells(row["difference_ci_holm"]):
        return f"{mean} ({TOO_FEW})"
    low, high = row["difference_ci_holm"]
    return f"{mean} ± {metric.factor / 2 * (high - low):.{decimals}f}{sure}"


# --- pictures ---------------------------------------------------------------------------------------------------------

Rows = Sequence[dict[str, Any]]
Picture = tuple[Callable[..., Any], str | None]
"""A function of a title that draws and returns the axes, and the title that says the finding."""
_LARGEST_MAPS = 6


def _pictures(runs: Rows, arms: Rows, metric: Metric) -> dict[str, Picture]:
    """The pictures of some results by name, the main one first."""
    from weightscope import plots  # imports matplotlib

    out: dict[str, Picture] = {}
    all_arms, arms = arms, [row for row in arms if row["mean"] is not None]
    axes, found = axes_of(arms), finding(all_arms, metric)
    for axis in axes:
        out[f"along-{axis}"] = partial(plots.metric_along, arms, axis, metric=metric), found
    if sized := _by_parameters(arms):
        out["along-parameters"] = partial(plots.metric_along, sized, "parameters", metric=metric), found
    if arms and not axes:
        out["convergence"] = partial(plots.convergence, arms, metric=metric), found
    for kind, control in CONTROLS.items():
        if any(row.get(control.arm) for row in arms):
            said, shown = finding(from_controls(all_arms, control), metric), "scale" if kind == "scale" else control.key
            out[shown] = partial(plots.scale_and_structure, all_arms, metric=metric, control=kind), said
    if not axes and any(row["difference"] is not None for row in arms):
        out["differences"] = (
            (lambda title: plots.paired_differences(seed_differences(runs, metric), metric=metric, title=title)),
            found,
        )
    references = [row for row in all_arms if row["p_holm"] is None]
    for pair in combinations(axes, 2):
        for name, rows in list(_maps(arms, *pair).items())[:_LARGEST_MAPS]:
            said = finding([*rows, *references], metric)
            draw = partial(plots.difference_map, rows, pair, metric=metric, of=name)
            out[f"map-{pair[0]}-{pair[1]}-{name}"] = draw, said
    return out


def axes_of(arms: Rows) -> list[str]:
    """The fields and numbers that vary, in order."""
    return list(dict.fromkeys(name for row in arms for name in point_of(row)))


def _by_parameters(arms: Rows) -> list[dict[str, Any]]:
    """The arms with the number of parameters as their cell; none unless it differs, and tells the cells apart."""
    cells = {(cell_key(row), row.get("parameters")) for row in arms}
    numbers = {number for _, number in cells}
    if None in numbers or not 1 < len(numbers) == len(cells):
        return []
    return [row | {"cell": {"parameters": row["parameters"]}} for row in arms]


def _maps(arms: Rows, x: str, y: str) -> dict[str, list[dict[str, Any]]]:
    """Name of an initialiser -> its rows, where they fill a map of x and y and nothing else varies."""
    from weightscope.plots import label_without

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in arms:
        rest = {key: value for key, value in row.get("cell", {}).items() if key not in (x, y)}
        if row["difference"] is not None and {x, y} <= set(point_of(row)):
            parts = [label_without(row["init"], x, y), point_text(rest), epochs_text(row["epochs"])]
            groups.setdefault(", ".join(filter(None, parts)), []).append(row)
    return groups


def finding(arms: Rows, metric: Metric = ACCURACY) -> str | None:
    """In one sentence, the best significant difference from the reference, or the worst if none is an improvement.

    Where the initialiser has a control, the sentence says how much of the difference is beyond scale or, if its control
    is uncorrelated, by correlations; or that it is not significantly different from its control, which does not show
    that they are equal. It ends with how many networks diverged.
    """
    tested = [row for row in arms if row.get("p_holm") is not None and control_of(row["init"]) is None]
    sure = [row for row in tested if row["p_holm"] < LEVEL]
    complete = [row for row in sure if not _lost(row)]
    text = ""
    if complete:
        text = _sentence(complete, metric, several=len({row["epochs"] for row in tested}) > 1)
    elif sure:
        text = f"{sure[0]['init']} differs significantly from {sure[0]['reference']}"
    elif tested:
        references = dict.fromkeys(str(row["reference"]) for row in tested)
        text = f"No initialiser differs significantly from {' or '.join(references)}"
    return "; ".join(filter(None, [text, divergence(arms)])) or None


def _sentence(rows: Rows, metric: Metric, several: bool) -> str:
    """The best of significant differences, or the worst; `several` training lengths are told apart."""
    best = max(rows, key=lambda row: metric.sign * row["difference"])
    improved = metric.better(best["difference"])
    if not improved:
        best = min(rows, key=lambda row: metric.sign * row["difference"])
    place = point_text(best.get("cell", {}))
    where = (f" at {place}" if place else "") + (f" after {epochs_text(best['epochs'])}" if several else "")
    more = "better" if improved else "worse"
    text = f"{best['init']} is {metric.amount(best['difference'])} {more} than {best['reference']}{where}"
    tested = [one for one in CONTROLS.values() if best.get(f"{one.key}_p_holm") is not None]
    known = [one for one in tested if best[one.key] is not None]
    if not improved or not known or best[f"{known[-1].key}_pairs"] < best["networks"]:
        return text
    control, beyond = known[-1], best[known[-1].key]
    if best[f"{control.key}_p_holm"] >= LEVEL:
        return f"{text}, not significantly more than {control.without}"
    if not metric.better(beyond):
        return f"{text}, less than {control.without}"
    amount = metric.amount(beyond).split()[0]
    return f"{text}, {amount} of {'them' if metric.unit else 'it'} {control.of_it}"


def from_controls(arms: Rows, control: Control) -> Rows:
    """The arms that have a control, with differences from it in place of those from the reference, and the controls."""
    named = {(cell_key(row), row["epochs"], row[control.arm]) for row in arms}
    shown = [row for row in arms if row[control.arm] or arm_key(row) in named]
    key = control.key
    renamed = {"difference": key, "p_holm": f"{key}_p_holm", "pairs": f"{key}_pairs", "reference": control.arm}
    without = {f"{each.key}_p_holm": None for each in CONTROLS.values()}
    return [row | {to: row.get(key) for to, key in renamed.items()} | without for row in shown]
