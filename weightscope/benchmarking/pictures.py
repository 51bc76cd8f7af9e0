"""Which pictures the results of a benchmark have, with titles that say the finding."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from weightscope.benchmarking.axes import point_text
from weightscope.benchmarking.statistics import cell_key, control_of

Rows = Sequence[dict[str, Any]]
Draw = Callable[[str | None], Any]
_LEVEL = 0.05
_LARGEST_MAPS = 6


def of(runs: Rows, arms: Rows, network: Mapping[str, Any]) -> dict[str, Draw]:
    """Name -> function of a title (or None) that returns the axes, the main picture first.

    Args:
        runs: rows of the networks.
        arms: rows of the arms.
        network: the recipe's [network] table; empty if it is not known.
    """
    out: dict[str, Draw] = {}
    axes = axes_of(arms)
    for axis in axes:
        out[f"along-{axis}"] = partial(_along, arms, axis)
    if not axes:
        out["convergence"] = partial(_convergence, arms)
    if any(row.get("control") for row in arms):
        out["scale"] = partial(_scale, arms)
    if not axes and len({run["init"] for run in runs}) > 1:
        out["differences"] = partial(_differences, runs, arms)
    places = {(cell_key(run), run["epochs"]) for run in runs}
    if len(places) == 1 and not axes and all(len(_known(run)) > 1 for run in runs):
        out["curves"] = partial(_curves, runs, arms)
    for x, y in combinations(axes, 2):
        for name, rows in list(_maps(arms, x, y).items())[:_LARGEST_MAPS]:
            out[f"map-{x}-{y}-{name}"] = partial(_map, rows, (x, y))
            if (part := _products(x, y)) and (size := _size(rows, network)):
                out[f"frontier-{part}-{name}"] = partial(_frontier, rows, (x, y), part, size)
    return out


def axes_of(arms: Rows) -> list[str]:
    """The fields and numbers that vary, in order."""
    return list(dict.fromkeys(name for row in arms for name in (*row.get("cell", {}), *row.get("numbers", {}))))


def _maps(arms: Rows, x: str, y: str) -> dict[str, list[dict[str, Any]]]:
    """Name of an initialiser -> its rows, where they fill a map of x and y and nothing else varies."""
    from weightscope.plots.sweeps import initialiser_without

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in arms:
        place = {**row.get("cell", {}), **row.get("numbers", {})}
        rest = {key: value for key, value in row.get("cell", {}).items() if key not in (x, y)}
        if row["difference"] is not None and {x, y} <= set(place):
            name = ", ".join(
                filter(None, [initialiser_without(row, x, y), point_text(rest), f"{row['epochs']} epochs"])
            )
            groups.setdefault(name, []).append(row)
    return groups


def _known(run: dict[str, Any]) -> list[float]:
    return [value for value in run.get("curve") or [] if value is not None]


def _along(arms: Rows, axis: str, title: str | None) -> Any:
    from weightscope import plots

    return plots.accuracy_along(arms, axis, title=title or finding(arms))


def _convergence(arms: Rows, title: str | None) -> Any:
    from weightscope import plots

    return plots.convergence(arms, title=title or finding(arms))


def _scale(arms: Rows, title: str | None) -> Any:
    from weightscope import plots

    return plots.scale_and_structure(arms, title=title or scale_finding(arms))


def _differences(runs: Rows, arms: Rows, title: str | None) -> Any:
    from weightscope import plots

    return plots.paired_differences(runs, title=title or finding(arms))


def _curves(runs: Rows, arms: Rows, title: str | None) -> Any:
    from weightscope import plots

    return plots.accuracy_curves(runs, title=title or finding(arms))


def _map(rows: Rows, axes: tuple[str, str], title: str | None) -> Any:
    from weightscope import plots

    return plots.difference_map(rows, axes, title=title or _map_finding(rows, axes))


def _products(x: str, y: str) -> str | None:
    """`qk` or `vo`, if the axes are alpha and beta of these products."""
    found = re.fullmatch(r"mimetic_attention\.alpha_(qk|vo)", x)
    return found[1] if found and y == f"mimetic_attention.beta_{found[1]}" else None


def _size(rows: Rows, network: Mapping[str, Any]) -> tuple[int, int] | None:
    """Width and number of heads of the networks; None if they have none."""
    cell = {key.removeprefix("network."): value for key, value in rows[0].get("cell", {}).items()}
    found = tuple({**network, **cell}.get(key) for key in ("width", "heads"))
    return found if all(isinstance(value, int) for value in found) else None  # type: ignore[return-value]


def _frontier(rows: Rows, axes: tuple[str, str], part: str, size: tuple[int, int], title: str | None) -> Any:
    """The arms at the alpha and beta that their products reach; those of values and outputs have full rank."""
    import torch

    from weightscope import plots
    from weightscope._util.threads import single_threaded
    from weightscope.init.frontier import equal_random, svd

    generator, (width, heads) = torch.Generator().manual_seed(0), size
    rank = width // heads if part == "qk" else width
    with single_threaded():
        points = equal_random(width, width, generator)
        points += equal_random(width, rank, generator) if rank < width else []
        for row in rows:
            alpha, beta = (float(row["numbers"][axis]) for axis in axes)
            points.append({**row, **svd(width, rank, alpha, beta, generator)})
    return plots.alpha_beta_frontier(points, part=part, title=title or _map_finding(rows, axes))


def finding(arms: Rows) -> str | None:
    """In one sentence, the best significant difference from the reference, or the worst if none is positive.

    Where the initialiser has a control, the sentence says what of the difference is beyond scale.
    """
    rows = [row for row in arms if row.get("p_holm") is not None and control_of(row["init"]) is None]
    sure = [row for row in rows if row["p_holm"] < _LEVEL]
    if not rows:
        return None
    if not sure:
        references = " or ".join(dict.fromkeys(str(row["reference"]) for row in rows))
        return f"No initialiser differs significantly from {references}"
    best = max(sure, key=lambda row: row["difference"])
    if best["difference"] < 0:
        best = min(sure, key=lambda row: row["difference"])
    points = 100 * abs(best["difference"])
    place = point_text(best.get("cell", {}))
    where = f" at {place}" if place else ""
    if len({row["epochs"] for row in rows}) > 1:
        where += f" after {best['epochs']} epoch{'s'[: best['epochs'] != 1]}"
    more = "better" if best["difference"] > 0 else "worse"
    text = f"{best['init']} is {points:.1f} points {more} than {best['reference']}{where}"
    if more == "worse" or best.get("beyond_scale_p_holm") is None:
        return text
    beyond = best["beyond_scale_p_holm"] < _LEVEL and best["beyond_scale"] > 0
    return (
        f"{text}, {100 * best['beyond_scale']:.1f} of them beyond scale" if beyond else f"{text}: scale, not structure"
    )


def scale_finding(arms: Rows) -> str | None:
    """In one sentence, which structures add something to their scale at an adjusted level of 0.05."""
    rows = [row for row in arms if row.get("beyond_scale_p_holm") is not None]
    better = [row["init"] for row in rows if row["beyond_scale_p_holm"] < _LEVEL and row["beyond_scale"] > 0]
    better = list(dict.fromkeys(better))
    if not rows:
        return None
    worse = [row["init"] for row in rows if row["beyond_scale_p_holm"] < _LEVEL and row["beyond_scale"] < 0]
    if not better and worse:
        return f"Worse than scale alone: {', '.join(dict.fromkeys(worse))}"
    if not better:
        return "No initialiser is significantly better than its scale alone"
    return f"Better than {'its' if len(better) == 1 else 'their'} scale alone: {', '.join(better)}"


def _map_finding(rows: Rows, axes: tuple[str, str]) -> str:
    best = max(rows, key=lambda row: row["difference"])
    place = {**best.get("cell", {}), **best.get("numbers", {})}
    where = point_text({axis: place[axis] for axis in axes})
    sure = best["p_holm"] is not None and best["p_holm"] < _LEVEL
    more = "better" if best["difference"] > 0 else "worse"
    text = f"Best at {where}: {100 * abs(best['difference']):.1f} points {more} than {best['reference']}"
    return text if sure else f"{text}, not significant"
