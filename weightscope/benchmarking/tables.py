"""Tables like those of the papers: initialisers in rows, cells in columns, in text, Markdown and LaTeX."""

from collections.abc import Mapping, Sequence
from typing import Any

from weightscope._util.arm_labels import LEVEL
from weightscope._util.checks import choice
from weightscope._util.divergence import count_range, divergence
from weightscope._util.results import text_table
from weightscope.benchmarking.axes import point_text
from weightscope.benchmarking.statistics import cell_key
from weightscope.data.metrics import ACCURACY, Metric

FORMATS = ("text", "markdown", "latex")


def paper_table(arms: Sequence[Mapping[str, Any]], form: str = "text", metric: Metric = ACCURACY) -> str:
    """Means with the half width of their paired intervals, one column for each cell and length.

    An entry is the mean of the metric, accuracies in per cent. Behind +- is the half width of the 95 % interval of its
    difference from the reference on the same seeds; the reference, in the first row, has none. The best mean of a
    column is bold (`*` in text), of the arms with the most seeds: a mean over the networks that did not diverge is not
    comparable with one over all. A dagger marks a difference from the reference at an adjusted level of 0.05.

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
    best = {place: _best([row for key, row in found.items() if key[:2] == place], metric) for place in columns}
    body = [
        [init, *(_entry(found.get((*place, init)), best[place], form, metric) for place in columns)] for init in inits
    ]
    note, lost = _note(arms, metric), divergence(arms)
    if form == "latex":
        return _latex(["initialiser", *heads], body, note, lost)
    note += f"; {lost}" if lost else ""
    if form == "markdown":
        head = ["initialiser", *heads]
        lines = [head, ["---"] + ["---:"] * len(heads), *body]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([*rows, "", _plain(note)]) + "\n"
    return text_table(["initialiser", *heads], body) + f"\n{_plain(note, star=True)}"


def _best(column: Sequence[Mapping[str, Any]], metric: Metric) -> tuple[int, float] | None:
    """The largest number of seeds and the best mean of the arms with so many; None if no network has a finite value."""
    most = max(row["n"] for row in column)
    means = [row["mean"] for row in column if row["n"] == most and row["mean"] is not None]
    return (most, max(means, key=lambda mean: metric.sign * mean)) if means else None


def _note(arms: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    note = f"{metric.title[0].upper()}{metric.title[1:]} of {count_range([row['n'] for row in arms])} seeds"
    note += "; +- half the 95 % interval of the paired difference from the first row"
    if any(row["n"] != row["pairs"] for row in arms if row.get("pairs") is not None):
        note += f" on {count_range([row['pairs'] for row in arms if row.get('pairs') is not None])} seeds of both"
    return f"{note}; dagger: p < 0.05, adjusted (Holm){metric.direction}"


def _head(row: Mapping[str, Any], lengths: bool) -> str:
    text = point_text(row.get("cell", {}))
    length = f"{row['epochs']} epoch{'s' * (row['epochs'] != 1)}"
    return ", ".join(filter(None, [text, length if lengths or not text else ""]))


def _entry(row: Mapping[str, Any] | None, best: tuple[int, float] | None, form: str, metric: Metric) -> str:
    if row is None or row["mean"] is None:
        return ""
    decimals = metric.decimals - 1
    mean = f"{metric.factor * row['mean']:.{decimals}f}"
    if best is not None and (row["n"], row["mean"]) == best:
        mean = {"latex": rf"\textbf{{{mean}}}", "markdown": f"**{mean}**", "text": f"*{mean}"}[form]
    if row["difference_ci95"] is None:
        return mean
    low, high = row["difference_ci95"]
    half = f"{metric.factor / 2 * (high - low):.{decimals}f}"
    sure = row["p_holm"] is not None and row["p_holm"] < LEVEL
    if form == "latex":
        return rf"{mean} $\pm$ {half}" + (r"$^\dagger$" if sure else "")
    return f"{mean} ± {half}" + ("†" if sure else "")


def _plain(note: str, *, star: bool = False) -> str:
    return note.replace("+-", "±").replace("dagger", "†") + ("; *: best of its column" if star else "")


def _latex(header: Sequence[str], body: Sequence[Sequence[str]], note: str, lost: str) -> str:
    """`lost` is a line of the table itself: the note is a comment, which is not printed."""
    lines = [r"\begin{tabular}{l" + "r" * (len(header) - 1) + "}", r"\toprule"]
    lines += [" & ".join(map(_escaped, header)) + r" \\", r"\midrule"]
    lines += [" & ".join([_escaped(row[0]), *row[1:]]) + r" \\" for row in body]
    foot = [rf"\multicolumn{{{len(header)}}}{{l}}{{\footnotesize {_escaped(lost)}}} \\"] if lost else []
    lines += [r"\bottomrule", *foot, r"\end{tabular}"]
    return "% " + _plain(note) + "\n" + "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for character in ("&", "%", "$", "#", "_", "{", "}"):
        text = text.replace(character, "\\" + character)
    return text
