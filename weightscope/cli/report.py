"""The page that `weightscope demo` writes: self-contained HTML in which every number links to the file that has it."""

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightscope._util import atomic
from weightscope.benchmarking.statistics import tells
from weightscope.plots.text import interval, p_value, places, signed

PAIRS = 12  # rows of the table of correlated pairs
FITTED = "fitted"
HEADINGS = {
    "benchmark": "On the population's data",
    "benchmark-longer": "After training as long as the population's",
    "benchmark-fashion": "On Fashion-MNIST",
}
_CSS_PIXELS, _DPI = 96, 150  # per inch, of the browser and of the pictures


def write_report(
    path: Path,
    *,
    pictures: Mapping[str, bytes],
    pairs: Sequence[Mapping[str, Any]],
    fits: Mapping[str, Any],
    benchmarks: Mapping[str, Sequence[Mapping[str, Any]]],
    **values: Any,
) -> Path:
    """Write the page, beside the files that it links to; see `report.html`, the template.

    `pictures` are PNGs by name, those of the benchmarks by the names of their folders, and `benchmarks` rows of arms by
    folder; `fits` is in `structures.json`, and `pairs` are rows of the exchangeable covariance, strongest first.
    `values` are `contents`, as in `inspection.json`, `effects`, whether units are exchangeable by distribution, `gain`,
    and `drawn`, the held-out log-likelihood of the amplified distribution.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    sections = []
    for folder, arms in benchmarks.items():
        row = next(row for row in arms if row["init"] == FITTED)
        keys = ("", "_ci_holm", "_p_holm", "_pairs")
        beyond, own = (verdict(*(row[f"{kind}{key}"] for key in keys)) for kind in ("beyond_scale", "correlations"))
        default = verdict(row["difference"], row["difference_ci_holm"], row["p_holm"], row["pairs"])
        about = {"folder": folder, "heading": HEADINGS[folder], "arms": arms, "epochs": row["epochs"]}
        sections.append(about | {"beyond": beyond, "correlations": own, "default": default})
    text = environment.get_template("report.html").render(
        pictures={name: _embedded(png) for name, png in pictures.items()},
        pairs=[row for row in pairs if row["p"] < 0.05][:PAIRS],
        fits=fits,
        scores=[row for row in fits["table"] if row["group"] == "all" and row["failed"] is None],
        benchmarks=sections,
        **values,
    )
    atomic.write(path, text.encode())
    return path


def _embedded(png: bytes) -> dict[str, Any]:
    """A picture as text, and the size in CSS pixels for which its own text was set."""
    width, height = (round(n * _CSS_PIXELS / _DPI) for n in struct.unpack(">II", png[16:24]))
    return {"base64": base64.b64encode(png).decode(), "width": width, "height": height}


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number as text, times `scale`; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "no spread" if math.isinf(value) else "not finite"
    return format(value * scale if scale != 1 else value, form).replace("-", "−", 1)


def verdict(difference: float | None, ci95: Sequence[float] | None, p: float | None, n: int | None) -> str:
    """Describe a paired difference of accuracies (fractions) in words that follow "the initialiser is".

    The interval is at the level of its p-value's test in a correction for several comparisons: it excludes zero where
    p < 0.05, which means significant. What is not significant is not called equal.
    """
    if difference is None:
        return "the reference of the comparison"
    if ci95 is None or p is None or not tells(ci95):
        return f"cannot be judged: too few seeds{f' ({n})' if n is not None else ''}"
    value, low, high = (100 * number for number in (difference, *ci95))
    digits = places(high - low)
    chance = p_value(p) + (f", {n} paired seeds" if n is not None else "")
    if (low > 0 or high < 0) and p < 0.05:
        least, most = sorted((abs(low), abs(high)))
        size, ends = f"{abs(value):.{digits}f}", f"95 % CI {least:.{digits}f} to {most:.{digits}f}"
        return f"{'better' if value > 0 else 'worse'} by {size} percentage points ({ends}, {chance})"
    found = f"{signed(value, digits)} percentage points (95 % CI {interval(low, high)}, {chance})"
    return f"not significantly different: {found}"
