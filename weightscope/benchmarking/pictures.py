"""Which pictures the results of a benchmark have, with titles that say the finding."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from weightscope._util.arms import CONTROLS, Control, divergence, epochs_text, place_of, point_text
from weightscope.benchmarking.statistics import LEVEL, cell_key, control_of, mean_curves, seed_differences, summarise
from weightscope.data.metrics import ACCURACY, Metric

Rows = Sequence[dict[str, Any]]
Picture = tuple[Callable[..., Any], str | None]
"""A function of a title that draws and returns the axes, and the title that says the finding."""
_LARGEST_MAPS = 6


def of(runs: Rows, arms: Rows, metric: Metric = ACCURACY, metrics: Sequence[Metric] = ()) -> dict[str, Picture]:
    """The pictures of some results by name, the main one first."""
    from weightscope import plots  # imports matplotlib

    out: dict[str, Picture] = {}
    all_arms, arms = arms, [row for row in arms if row["mean"] is not None]
    references = [row for row in all_arms if row["difference"] is None]
    axes, found = axes_of(arms), finding(all_arms, metric)
    for axis in axes:
        out[f"along-{axis}"] = partial(plots.metric_along, arms, axis, metric=metric), found
    if arms and not axes:
        out["convergence"] = partial(plots.convergence, arms, metric=metric), found
    for kind, control in CONTROLS.items():
        if any(row.get(control.arm) for row in arms):
            said, shown = finding(from_controls(all_arms, control), metric), "scale" if kind == "scale" else control.key
            out[shown] = partial(plots.scale_and_structure, arms, metric=metric, control=kind), said
    if not axes and any(row["difference"] is not None for row in arms):
        out["differences"] = partial(_of_runs, plots.paired_differences, seed_differences, runs, metric), found
    places = {(cell_key(run), run["epochs"]) for run in runs}
    curves = [[v for v in run.get("curve") or [] if v is not None] for run in runs if run.get(metric.key) is not None]
    if len(places) == 1 and not axes and len(arms) == len(all_arms) and all(len(curve) > 1 for curve in curves):
        curves_of = partial(mean_curves, chance=arms[0].get("chance"))
        last = f"After {arms[0]['epochs']} epochs: {found}" if found else None
        out["curves"] = partial(_of_runs, plots.metric_curves, curves_of, runs, metric), last
    if not axes and (by_length := _by_length(runs, metrics)):
        chance = {"chance": all_arms[0].get("chance")}  # of a token, at every length
        drawn = {
            length: [row | chance for row in rows if row["mean"] is not None] for length, rows in by_length.items()
        }
        said = finding(by_length[max(by_length)])
        said = said and f"At {max(by_length)}x the length: {said}"
        out["accuracy-by-length"] = partial(plots.accuracy_by_length, drawn), said
    for pair in combinations(axes, 2):
        for name, rows in list(_maps(arms, *pair).items())[:_LARGEST_MAPS]:
            said = finding([*rows, *references], metric)
            draw = partial(plots.difference_map, rows, pair, metric=metric, of=name)
            out[f"map-{pair[0]}-{pair[1]}-{name}"] = draw, said
    return out


def _of_runs(draw: Callable[..., Any], statistic: Callable[..., Any], runs: Rows, metric: Metric, title: Any) -> Any:
    return draw(statistic(runs, metric), metric=metric, title=title)


def axes_of(arms: Rows) -> list[str]:
    """The fields and numbers that vary, in order."""
    return list(dict.fromkeys(name for row in arms for name in place_of(row)))


def _maps(arms: Rows, x: str, y: str) -> dict[str, list[dict[str, Any]]]:
    """Name of an initialiser -> its rows, where they fill a map of x and y and nothing else varies."""
    from weightscope.plots import label_without

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in arms:
        rest = {key: value for key, value in row.get("cell", {}).items() if key not in (x, y)}
        if row["difference"] is not None and {x, y} <= set(place_of(row)):
            parts = [label_without(row["init"], x, y), point_text(rest), epochs_text(row["epochs"])]
            groups.setdefault(", ".join(filter(None, parts)), []).append(row)
    return groups


def _by_length(runs: Rows, metrics: Sequence[Metric]) -> dict[int, Rows]:
    """Multiple of the training length -> rows of the arms of the longest training; empty unless there are several."""
    lengths = {metric.length: metric for metric in metrics if metric.key.startswith(ACCURACY.key)}
    if len(lengths) < 2:
        return {}
    epochs = max(run["epochs"] for run in runs)
    found: dict[int, Rows] = {
        length: [row for row in summarise(runs, metric) if row["epochs"] == epochs]
        for length, metric in sorted(lengths.items())
    }
    return found if all(any(row["mean"] is not None for row in rows) for rows in found.values()) else {}


def finding(arms: Rows, metric: Metric = ACCURACY) -> str | None:
    """In one sentence, the best significant difference from the reference, or the worst if none is an improvement.

    Where the initialiser has a control, the sentence says what of the difference is beyond scale or, if its control
    is uncorrelated, by correlations; or that it is not significantly different from its control, which does not show
    that they are equal. It ends with how many networks
    of the arms that it is about diverged, and names the initialisers of which none is left.
    """
    text, about = _finding(arms, metric)
    rows = list(arms)
    if about is not None:
        place = cell_key(about), about["epochs"], about["reference"]
        rows = [about, *(row for row in arms if (cell_key(row), row["epochs"], row["init"]) == place)]
    lost = divergence([*rows, *(row for row in arms if row["n"] == 0)], about["init"] if about else None)
    said = "; ".join(filter(None, [text, lost]))
    return (said if text else said[:1].upper() + said[1:]) or None


def _finding(arms: Rows, metric: Metric) -> tuple[str | None, dict[str, Any] | None]:
    """What `finding` says of the differences, and the arm that it is about, if it is about one."""
    tested = [row for row in arms if row.get("p_holm") is not None]
    rows = [row for row in tested if control_of(row["init"]) is None]
    sure = [row for row in rows if row["p_holm"] < LEVEL]
    if not sure:
        references = " or ".join(dict.fromkeys(str(row["reference"]) for row in rows))
        controls = list(dict.fromkeys(row["init"] for row in tested if row["p_holm"] < LEVEL))
        but = f", but {', '.join(controls)} does" if len(controls) == 1 else f", but {', '.join(controls)} do"
        return f"No initialiser differs significantly from {references}{but * bool(controls)}" if rows else None, None
    best = max(sure, key=lambda row: metric.sign * row["difference"])
    if not metric.better(best["difference"]):
        best = min(sure, key=lambda row: metric.sign * row["difference"])
    place = point_text(best.get("cell", {}))
    where = f" at {place}" if place else ""
    if len({row["epochs"] for row in rows}) > 1:
        where += f" after {epochs_text(best['epochs'])}"
    more = "better" if metric.better(best["difference"]) else "worse"
    text = f"{best['init']} is {metric.amount(best['difference'])} {more} than {best['reference']}{where}"
    controls = [control for control in CONTROLS.values() if best.get(f"{control.key}_p_holm") is not None]
    if more == "worse" or not controls:
        return text, best
    key = controls[-1].key
    if best[f"{key}_p_holm"] >= LEVEL:
        return f"{text}, not significantly more than {controls[-1].without}", best
    if not metric.better(best[key]):
        return f"{text}, less than {controls[-1].without}", best
    amount = metric.amount(best[key]).split()[0]
    return f"{text}, {amount} of {'them' if metric.unit else 'it'} {controls[-1].of_it}", best


def from_controls(arms: Rows, control: Control) -> Rows:
    """The arms that have a control, with differences from it in place of those from the reference, and the controls."""
    named = {(cell_key(row), row["epochs"], row[control.arm]) for row in arms}
    shown = [row for row in arms if row[control.arm] or (cell_key(row), row["epochs"], row["init"]) in named]
    renamed = {"difference": control.key, "p_holm": f"{control.key}_p_holm", "reference": control.arm}
    without = {f"{each.key}_p_holm": None for each in CONTROLS.values()}
    return [row | {to: row.get(key) for to, key in renamed.items()} | without for row in shown]
