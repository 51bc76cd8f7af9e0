"""How many networks of the arms of a benchmark diverged, as text for titles, notes and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAMED = 3


def divergence(rows: Sequence[Mapping[str, Any]], subject: str | None = None) -> str:
    """`13 of 16 of unstable diverged`, or `networks of 5 initialisers diverged`; empty if none did.

    Rows of arms have `init`, `cell`, `epochs`, `diverged` and `networks`, the number of all; the same arm may occur
    twice. `subject` is an initialiser that the sentence before is about; if it is the only one, it is not named.
    """
    arms = {(row["init"], repr(row.get("cell")), row.get("epochs")): row for row in rows}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in arms.values():
        found.setdefault(row["init"], []).append(row)
    counts = {init: _count(mine) for init, mine in found.items() if any(row.get("diverged") for row in mine)}
    if len(counts) > _NAMED:
        return f"networks of {len(counts)} initialisers diverged"
    if list(counts) == [subject]:
        return f"{counts[str(subject)]} diverged"
    return ", ".join(f"{count} of {init}" for init, count in counts.items()) + " diverged" * bool(counts)


def _count(rows: Sequence[Mapping[str, Any]]) -> str:
    diverged = sum(row.get("diverged") or 0 for row in rows)
    if not all("networks" in row for row in rows):
        return f"{diverged} network{'s' * (diverged != 1)}"
    return f"{diverged} of {sum(row['networks'] for row in rows)}"


def count_range(counts: Sequence[int]) -> str:
    """`8`, or `2 to 8`."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"
