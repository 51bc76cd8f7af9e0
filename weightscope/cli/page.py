"""HTML pages of results: `weightscope report`, and the report of `weightscope demo`.

A page is one file without scripts, which opens without a server, in light and dark, on a phone as well.
"""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope import plots
from weightscope._util import atomic
from weightscope.analysis.exchangeable import ExchangeableCovariance, covariance_exchangeable, emergence, p_floor
from weightscope.data.metrics import PER_EPOCH, at_end, metric_named
from weightscope.errors import AnatomyError, UsageError
from weightscope.plots.theme import signed
from weightscope.population import Population
from weightscope.statistics.index_effects import described

_NOT_RESULTS = ("diverged", "duplicate", "init", "learning_rate", "weight_decay")
_PAIRS = 30  # rows of the table
_CSS_PIXELS = 96  # per inch


@dataclass(frozen=True)
class Section:
    """A part of a page: sentences, then pictures, then a table."""

    heading: str
    text: Sequence[str] = ()
    pictures: Sequence[tuple[Any, str]] = ()  # axes or figures, each with its caption
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None  # the heads of its columns, and its rows


def write_page(population: Population, path: str | Path, select: str | Sequence[str] = "*") -> Path:
    """Write the page of a population; returns its path.

    It shows the metrics of the networks, the correlations of `covariance_exchangeable` of the selected tensors as a map
    and as a table of the strongest pairs and, if there are snapshots, the strongest correlations over training
    (`emergence`). Of `population.at(4)`, it shows the weights of that snapshot. If the networks' permutations are
    unknown, the page says so.

    Example:
        >>> write_page(Population("digits.pop"), "page.html")
    """
    population.spec.select(select)  # an error of the patterns is one
    found: ExchangeableCovariance | str
    try:
        found = covariance_exchangeable(population, select)
    except (AnatomyError, UsageError) as error:  # no tensor whose permutations are known
        found = f"No structure: {error}"
    sections = population_sections(population, found)
    if population.snapshots and not isinstance(found, str):
        training = emergence(population, select)
        sections.append(Section("Over training", [training.summary()], [(training.plot(), "The strongest pairs.")]))
    return write_html(path, population.path.name, [population.summary()], sections)


def write_html(path: str | Path, title: str, lead: Sequence[str], sections: Sequence[Section]) -> Path:
    """Write a page with a title and sentences above its sections; returns its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["embedded"] = _embedded
    text = environment.get_template("page.html").render(title=title, lead=lead, sections=sections)
    atomic.write(Path(path), text.encode())
    return Path(path)


def population_sections(population: Population, found: ExchangeableCovariance | str) -> list[Section]:
    """The metrics of a population, and its covariance; a text says why there is none."""
    sections = [_metrics(population)]
    if isinstance(found, str):
        return [*sections, Section("Correlations of the weights", [found])]
    text = [
        "Renumbering hidden units, channels or the coordinates of a head leaves the function of a network unchanged. "
        "The covariance is an average over all renumberings, so that every unit of every network is a sample.",
        f"{found.summary()}; {described(found.index_effects)}".strip("; "),
    ]
    if population.snapshot is not None:
        text.append(f"The weights are those after {population.unit} {population.snapshot}; the metrics are final.")
    sure = [pair for pair in found.pairs() if pair.p < 0.05]
    heads = ["pair", "correlation", "95 % interval", "p"]
    rows = [
        [
            found.words(pair) + ("" if pair.signed else " (largest canonical)"),
            signed(pair.correlation, 2),
            f"{signed(pair.ci95[0], 2)} to {signed(pair.ci95[1], 2)}",
            p_floor(pair),
        ]
        for pair in sure[:_PAIRS]
    ]
    if not rows:
        text.append("No pair of tensors is correlated (p < 0.05, adjusted for all pairs).")
    elif len(sure) > _PAIRS:
        text.append(f"The table has the {_PAIRS} of {len(sure)} pairs with the smallest p (< 0.05, adjusted for all).")
    caption = "Outside the blocks on the diagonal: correlations between tensors and between layers."
    table = (heads, rows) if rows else None
    return [*sections, Section("Correlations of the weights", text, [(found.plot(), caption)], table)]


def _embedded(drawn: Any) -> dict[str, Any]:
    """A picture as PNG in base64, and its size in CSS pixels."""
    png = plots.render(drawn)
    width, height = (round(n * _CSS_PIXELS / plots.theme.DPI) for n in struct.unpack(">II", png[16:24]))
    return {"base64": base64.b64encode(png).decode(), "width": width, "height": height}


def _metrics(population: Population) -> Section:
    """Quantiles of every metric over the networks, and the first one with a value after each epoch over training."""
    kept, rows, pictures = ~population.diverged, list[list[str]](), list[tuple[Any, str]]()
    for name, values in sorted(at_end(population.metrics).items(), key=lambda item: not item[0].startswith("test_")):
        finite = values[kept][np.isfinite(values[kept])]
        if name in _NOT_RESULTS or not finite.size:
            continue
        rows.append([name, *(f"{q:.4g}".replace("-", "−") for q in np.quantile(finite, (0.05, 0.5, 0.95)))])
        curves = population.metrics.get(f"{name}{PER_EPOCH}", np.empty((len(kept), 0)))[kept]
        evaluated = curves[:, np.isfinite(curves).any(axis=0)]
        if not pictures and evaluated.shape[1] == curves.shape[1] > 1 and (metric := metric_named(name)) is not None:
            pictures.append((plots.training_curves(curves, metric=metric), "Median and central 90 % of the networks."))
    heads = ["metric", "5 % of the networks below", "median", "95 % below"]
    text = [f"{len(kept):,} networks of {population.spec.size:,} weights each, {(~kept).sum():,} of them left out."]
    return Section("Metrics of the networks", text, pictures, (heads, rows) if rows else None)
