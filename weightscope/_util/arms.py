"""Arms of a benchmark that are controls of others, frozen or diverged: labels, columns of their rows, and words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_NAMED = 3
FROZEN = " (frozen)"  # suffix of the label of an arm whose tensors are frozen
CI = "95 % intervals (Holm)"


class Control(NamedTuple):
    """A control of initialisers: networks with means and variances of theirs and nothing else."""

    suffix: str  # of the label of such an arm, before that of a frozen one
    arm: str  # the column of a row with the label of its control
    key: str  # and the column with the difference from it
    parts: tuple[str, str]  # what the control changes, and what its initialiser adds
    about: str  # above a table
    without: str
    of_it: str


CONTROLS = {
    "scale": Control(
        " (scale only)",
        "control",
        "beyond_scale",
        ("effect of scale", "structure beyond scale"),
        "structure beyond scale: an initialiser minus its control, independent Gaussian entries with the same mean and "
        "variance of each tensor",
        "its scale alone",
        "beyond scale",
    ),
    "uncorrelated": Control(
        " (uncorrelated)",
        "uncorrelated",
        "correlations",
        ("effect of means and variances", "correlations"),
        "correlations: an initialiser minus its control, with the same means and variances of every part",
        "without its correlations",
        "by correlations",
    ),
}


def divergence(rows: Sequence[Mapping[str, Any]]) -> str:
    """`13 of 16 of unstable diverged`, or `networks of 5 initialisers diverged`; empty if none did.

    Rows of arms have `init`, `cell`, `epochs`, `diverged` and `networks`, the number of all; the same arm may occur
    twice.
    """
    arms = {(row["init"], repr(row.get("cell")), row.get("epochs")): row for row in rows}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in arms.values():
        found.setdefault(row["init"], []).append(row)
    counts = {init: _count(mine) for init, mine in found.items() if any(row.get("diverged") for row in mine)}
    if len(counts) > _NAMED:
        return f"networks of {len(counts)} initialisers diverged"
    return ", ".join(f"{count} of {init}" for init, count in counts.items()) + " diverged" * bool(counts)


def _count(rows: Sequence[Mapping[str, Any]]) -> str:
    diverged = sum(row.get("diverged") or 0 for row in rows)
    if not all("networks" in row for row in rows):
        return f"{diverged} network{'s' * (diverged != 1)}"
    return f"{diverged} of {sum(row['networks'] for row in rows)}"


def point_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the recipe and the numbers of the initialiser that vary, with their values in a row."""
    return {**row.get("cell", {}), **row.get("numbers", {})}


def point_text(point: Mapping[str, Any]) -> str:
    """`kernel_size=7, train=all` for a point: names without their sections."""
    return ", ".join(f"{name.rpartition('.')[2]}={value_text(value, name)}" for name, value in point.items())


def value_text(value: Any, name: str = "data.") -> str:
    """A value as on the command line; None is `all` images, else `none`."""
    if value is None:
        return "all" if name.startswith("data.") else "none"
    if isinstance(value, bool | list):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def epochs_text(epochs: float) -> str:
    """`1 epoch`, `3 epochs`."""
    return f"{epochs:g} epoch{'s' * (epochs != 1)}"


def count_range(counts: Sequence[int]) -> str:
    """`8`, or `2 to 8`."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def seeds_text(pairs: Sequence[int | None]) -> str:
    """`, 2 to 8 seeds`: how many differences are over; empty if rows do not have `pairs`."""
    known = [n for n in pairs if n is not None]
    return f", {count_range(known)} seed{'s' * (max(known) != 1)}" if known else ""


def bars_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many seeds the means of rows have, what their bars are, and how many networks diverged."""
    counts, lost = [row["n"] for row in rows], divergence(rows)
    compared = [row for row in rows if row.get("difference") is not None]
    text = f"mean of {count_range(counts)} seeds"
    if set(counts) == {1}:
        text = "1 seed, so no interval"
    elif not compared:
        text += " with 95 % CI"
    else:
        references = " or ".join(dict.fromkeys(row.get("reference") or rows[0]["init"] for row in compared))
        text += f"; bars: adjusted {CI} of the paired difference from {references}"
        if any(row["n"] != row["pairs"] for row in compared if row.get("pairs") is not None):
            text += seeds_text([row.get("pairs") for row in compared]) + " of both"
    return f"{text}; {lost}" if lost else text
