"""Tables like those of the papers: initialisers in rows, cells in columns, in text, Markdown and LaTeX."""

from collections.abc import Mapping, Sequence
from typing import Any

from weightscope._util.checks import choice
from weightscope._util.tables import text_table
from weightscope.benchmarking.axes import point_text
from weightscope.benchmarking.statistics import cell_key
from weightscope.data.metrics import ACCURACY, Metric

FORMATS = ("text", "markdown", "latex")
_LEVEL = 0.05


def paper_table(arms: Sequence[Mapping[str, Any]], form: str = "text", metric: Metric = ACCURACY) -> str:
    """Means with the half width of their paired intervals, one column for each cell and length.

    An entry is the mean of the metric, accuracies in per cent. Behind +- is the half width of the 95 % interval of its
    difference from the reference on the same seeds; the reference, in the first row, has none. The best mean of a
    column is bold (`*` in text), and a dagger marks a difference from the reference at an adjusted level of 0.05.

    Args:
        arms: rows of `BenchResult.arms`.
        form: "text", "markdown" or "latex" (booktabs).
        metric: that the arms are compared by.

    Raises:
        UsageError: for another form.
    """
    choice("form", form, FORMATS)
    columns = {(cell_key(dict(row)), row["epochs"]): row for row in arms}
    lengths = len({epochs for _, epochs in columns}) > 1
    heads = [_head(row, lengths) for row in columns.values()]
    inits = list(dict.fromkeys(row["init"] for row in arms))
    found = {(cell_key(dict(row)), row["epochs"], row["init"]): row for row in arms}
    best: dict[tuple[str, int], float] = {}
    for (cell, epochs, _), row in found.items():
        other = best.get((cell, epochs), row["mean"])
        if row["mean"] is not None:
            best[cell, epochs] = row["mean"] if other is None or metric.better(row["mean"] - other) else other
    body = [
        [init, *(_entry(found.get((*place, init)), best.get(place), form, metric) for place in columns)]
        for init in inits
    ]
    seeds = sorted({row["n"] for row in arms})
    note = f"{metric.title[0].upper()}{metric.title[1:]} of {seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else "")
    note += " seeds; +- half the 95 % interval of the paired difference from the first row"
    note += f"; dagger: p < 0.05, adjusted (Holm){metric.direction}"
    if form == "latex":
        return _latex(["initialiser", *heads], body, note)
    if form == "markdown":
        head = ["initialiser", *heads]
        lines = [head, ["---"] + ["---:"] * len(heads), *body]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([*rows, "", _plain(note)]) + "\n"
    return text_table(["initialiser", *heads], body) + f"\n{_plain(note, star=True)}"


def _head(row: Mapping[str, Any], lengths: bool) -> str:
    text = point_text(row.get("cell", {}))
    length = f"{row['epochs']} epoch{'s' * (row['epochs'] != 1)}"
    return ", ".join(filter(None, [text, length if lengths or not text else ""]))


def _entry(row: Mapping[str, Any] | None, best: float | None, form: str, metric: Metric) -> str:
    if row is None or row["mean"] is None:
        return ""
    decimals = metric.decimals - 1
    mean = f"{metric.factor * row['mean']:.{decimals}f}"
    if row["mean"] == best:
        mean = {"latex": rf"\textbf{{{mean}}}", "markdown": f"**{mean}**", "text": f"*{mean}"}[form]
    if row["difference_ci95"] is None:
        return mean
    low, high = row["difference_ci95"]
    half = f"{metric.factor / 2 * (high - low):.{decimals}f}"
    sure = row["p_holm"] is not None and row["p_holm"] < _LEVEL
    if form == "latex":
        return rf"{mean} $\pm$ {half}" + (r"$^\dagger$" if sure else "")
    return f"{mean} ± {half}" + ("†" if sure else "")


def _plain(note: str, *, star: bool = False) -> str:
    return note.replace("+-", "±").replace("dagger", "†") + ("; *: best of its column" if star else "")


def _latex(header: Sequence[str], body: Sequence[Sequence[str]], note: str) -> str:
    lines = [r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(_escaped, header)) + r" \\", r"\midrule"]
    lines += [" & ".join([_escaped(row[0]), *row[1:]]) + r" \\" for row in body]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "% " + _plain(note) + "\n" + "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for character in ("&", "%", "$", "#", "_", "{", "}"):
        text = text.replace(character, "\\" + character)
    return text
