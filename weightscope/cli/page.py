"""`weightscope report`: a population as one HTML file to look into, without a server or a network.

Everything shown is computed here; the page draws, sorts and filters. plotly's library is in the file, compressed.
"""

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope.analysis.exchangeable import ExchangeableCovariance, covariance_exchangeable, emergence
from weightscope.data.metrics import PER_EPOCH, at_end
from weightscope.errors import AnatomyError, UsageError
from weightscope.population import Population
from weightscope.statistics.exchangeable import Pair, TypeCovariance

_ENTRIES = 250  # rows of a map
_PAIRS = 1000  # rows of the table
_CURVES = 8  # lines of a picture
_MOMENTS = 7  # columns of filters, beside that of the end
_BINS = 40
_NOT_RESULTS = ("diverged", "duplicate", "init", "learning_rate", "weight_decay")


def write_page(population: Population, path: str | Path, select: str | Sequence[str] = "*") -> Path:
    """Write the page of a population; returns its path.

    It shows the metrics of the networks (their distribution, and median and central 90 % over training), the
    correlations of `covariance_exchangeable` of the selected tensors as maps and as a table of pairs, the strongest
    ones over depth and, if there are snapshots, over training (`emergence`), and the variance of each filter position
    over depth and training. Of `population.at(4)`, it shows the weights of that snapshot. What is too large is left
    out, and the page says so; likewise if the networks' permutations are unknown.

    UsageError if plotly is not installed.

    Example:
        >>> write_page(Population("digits.pop"), "page.html")
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError("plotly is not installed; `pip install plotly`, whose library the page contains") from error
    from markupsafe import Markup

    values: dict[str, Any] = {"metrics": _metrics(population), "types": [], "pairs": [], "curves": [], "notes": []}
    facts = {"networks": len(population), "weights in each": population.spec.size}
    facts |= {"left out: diverged or equal": int(population.diverged.sum())}
    if population.snapshot is not None:
        when = f"{population.unit} {population.snapshot}"
        values["notes"].append(f"The structure is that of {when}; metrics are those at the end of training.")
    population.spec.select(select)  # an error of the patterns is one
    try:
        found = covariance_exchangeable(population, select)
    except (AnatomyError, UsageError) as error:  # no tensor whose permutations are known
        values["notes"].append(f"No structure: {error}")
    else:
        structure = _structure(found)
        values |= structure | {"notes": values["notes"] + structure["notes"]}
        if population.snapshots:
            training = emergence(population, select)
            lines = [_line(words, list(training.found), pairs) for words, pairs in training.curves.items()]
            values["curves"].append(
                {"title": "The strongest correlations, over training", "axis": training.unit, "order": []}
                | {"lines": lines[:_CURVES]}
            )
            moments = list(training.found.items())[:: -(-len(training.found) // _MOMENTS)]
            filters = [{"title": f"{training.unit} {at}", "layers": _filters(one)} for at, one in moments]
            last = values["filters"][0]["layers"]
            values["filters"] = filters + values["filters"] * all(one["layers"] != last for one in filters)
    text = template("page.html").render(
        title=population.path.name,
        summary=population.summary(),
        facts=facts,
        notes=values["notes"],
        has={key: bool(values[key]) for key in ("metrics", "types", "pairs")},
        data=Markup(json.dumps(values, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
        library=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )
    atomic.write(Path(path), text.encode(errors="replace"))  # a name that is not UTF-8
    return Path(path)


def template(name: str, **filters: Callable[..., str]) -> Any:
    """A jinja2 template of this folder, in which a name without a value is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(filters)
    return environment.get_template(name)


def _rounded(values: Any) -> Any:
    """Nested lists of numbers with four digits; None for what is not finite."""
    if isinstance(values, np.ndarray | list | tuple):
        return [_rounded(value) for value in values]
    return float(f"{values:.4g}") if math.isfinite(values) else None


def _metrics(population: Population) -> list[dict[str, Any]]:
    """Of each metric the histogram at the end of training, and quantiles after each epoch if they are known."""
    kept, out = ~population.diverged, []
    found = {name: values[kept] for name, values in at_end(population.metrics).items() if name not in _NOT_RESULTS}
    for name in sorted(found, key=lambda name: not name.startswith("test_")):
        last = found[name][np.isfinite(found[name])].astype(float) / 2  # twice the largest number is infinite
        if not last.size:
            continue
        low, width = last.min(), np.ptp(last) or max(abs(last[0]), 1)  # bins of large, near numbers need a scale
        counts, edges = np.histogram((last - low) / width, bins=min(_BINS, max(5, math.isqrt(last.size))))
        edges = 2 * (edges * width + low).clip(max=last.max())
        curves = population.metrics.get(f"{name}{PER_EPOCH}", np.empty((len(kept), 0)))[kept]
        evaluated = np.isfinite(curves).any(axis=0).sum() > 1  # else there is nothing to draw
        low, middle, high = 2 * np.quantile(curves / 2, (0.05, 0.5, 0.95), axis=0) if evaluated else np.empty((3, 0))
        out.append(
            {"name": name, "median": _rounded(2 * np.median(last)), "counts": counts.tolist(), "edges": edges.tolist()}
            | {"low": _rounded(low), "middle": _rounded(middle), "high": _rounded(high)}
        )
    return out


def _structure(found: ExchangeableCovariance) -> dict[str, Any]:
    """Maps of types, the table of pairs, and what can be drawn over depth."""
    pairs, notes = found.pairs(), []
    rows = [
        {"groups": " x ".join(pair.groups), "a": pair.a, "b": pair.b, "r": _rounded(pair.correlation)}
        | {"low": _rounded(pair.ci95[0]), "high": _rounded(pair.ci95[1]), "z": _rounded(pair.z), "p": _rounded(pair.p)}
        | {"words": found.words(pair), "signed": pair.signed}
        for pair in pairs[:_PAIRS]
    ]
    if len(pairs) > _PAIRS:
        notes.append(f"The table has the {_PAIRS:,} largest effects of {len(pairs):,} pairs.")
    maps = [_map(one, pairs, notes) for one in found.types if len(one.kind.views) > 1]
    types = [one for one in maps if len(one["labels"]) > 1]
    types.sort(key=lambda one: (one["dimensions"] != 1, -len(one["labels"])))
    return {
        "types": types,
        "pairs": rows,
        "notes": notes,
        "curves": _over_depth(found, pairs),
        "filters": [{"title": "end", "layers": _filters(found)}],
    }


def _map(found: TypeCovariance, pairs: Sequence[Pair], notes: list[str]) -> dict[str, Any]:
    """Correlations of the entries of one type, those of the strongest pairs if there are too many."""
    kind, chosen, size = found.kind, dict[str, None](), 0
    copies = {view.name: view.copies for view in kind.views}
    ordered = [name for pair in pairs if pair.groups == kind.groups for name in (pair.a, pair.b)]
    for name in dict.fromkeys([*ordered, *copies]):
        if size + copies[name] <= _ENTRIES:
            chosen[name], size = None, size + copies[name]
    if len(chosen) < len(copies):
        notes.append(
            f"{kind.label}: the map shows {len(chosen)} of {len(copies)} tensors, those of the largest effects."
        )
    names = [name for name in copies if name in chosen]
    places = np.concatenate([np.arange(copies[n]) + kind.slices[n].start for n in names] or [np.empty(0, int)])
    matrix = found.correlation()[np.ix_(places, places)]
    constant = found.covariance.diagonal()[places] <= 0
    matrix[constant], matrix[:, constant] = np.nan, np.nan
    labels = [f"{n}[{i}]" if copies[n] > 1 else n for n in names for i in range(copies[n])]
    return {
        "groups": kind.label,
        "dimensions": len(kind.groups),
        "samples": found.samples,
        "labels": labels,
        "views": [i for i, n in enumerate(names) for _ in range(copies[n])],
        "names": names,
        "matrix": [[None if math.isnan(x) else round(float(x), 3) for x in row] for row in matrix],
    }


def _over_depth(found: ExchangeableCovariance, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Correlations of the same two parts of each block, the largest effects first."""
    lines = defaultdict[str, dict[str, Pair]](dict)
    for pair in pairs:
        block, _, parts = found.words(pair).partition(": ")
        if pair.signed and pair.a.startswith(f"{block}.") and pair.b.startswith(f"{block}."):
            lines[parts][block] = pair
    several = {name: line for name, line in lines.items() if len(line) > 1}
    views = [view.name for view in found.permutations.views]
    blocks = {block for line in several.values() for block in line}
    order = sorted(blocks, key=lambda block: [name.startswith(f"{block}.") for name in views].index(True))
    drawn = [_line(name, order, [line.get(block) for block in order]) for name, line in several.items()][:_CURVES]
    return [{"title": "Correlations within a block, over depth", "axis": "block", "order": order, "lines": drawn}]


def _line(name: str, x: Sequence[int | str], pairs: Sequence[Pair | None]) -> dict[str, Any]:
    ends = [(math.nan, math.nan) if pair is None else pair.ci95 for pair in pairs]
    r = [math.nan if pair is None else pair.correlation for pair in pairs]
    low, high = zip(*ends, strict=True)
    return {"name": name, "x": list(x), "r": _rounded(r), "low": _rounded(low), "high": _rounded(high)}


def _filters(found: ExchangeableCovariance) -> list[dict[str, Any]]:
    """The variance of each position of depthwise filters, over units and networks."""
    out: list[dict[str, Any]] = []
    for one in found.types:
        for view in one.kind.views:
            *others, h, w = view.shape if len(view.shape) == 4 else (0, 1, 1)
            if one.kind.groups and view.copies == h * w > 1 and view.axes[-2:] == (None, None) and others[1:] == [1]:
                grid = one.covariance.diagonal()[one.kind.slices[view.name]].reshape(h, w)
                out.append({"name": view.name, "groups": one.kind.label, "grid": _rounded(grid)})
    return out
