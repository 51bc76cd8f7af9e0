"""What a difference means, in words that claim no more than the numbers do."""

import math
from collections.abc import Sequence

from weightscope.errors import UsageError


def verdict(
    difference: float | None,
    ci95: Sequence[float] | None,
    p: float | None,
    unit: str = "percentage points",
    *,
    n: int | None = None,
    alpha: float = 0.05,
) -> str:
    """A paired difference, of which more is better, in honest words.

    Significant means p < alpha *and* an interval without zero; where the two disagree (a p-value corrected for several
    comparisons) the words say so. No significance is not equality: then the interval is what can be said.

    Args:
        difference: of the mean; for the unit "percentage points" as a fraction, as in `results.json`, else in `unit`s.
        ci95: its 95 % confidence interval, likewise.
        p: its p-value.
        unit: of the difference as it is printed.
        n: number of paired seeds.
        alpha: the level of significance.

    Raises:
        UsageError: if a difference in percentage points is no fraction, or lies outside of its interval.

    Example:
        >>> verdict(0.021, (0.015, 0.027), 2e-9, n=64)
        'better by 2.1 percentage points (95 % CI 1.5 to 2.7, p = 2e-9, 64 paired seeds)'
    """
    if difference is None:
        return "the reference of the comparison"
    scale = 100.0 if unit == "percentage points" else 1.0
    if scale != 1 and abs(difference) > 1:
        raise UsageError(
            f"a difference in percentage points is given as a fraction between -1 and 1, found {difference}"
        )
    if ci95 is None or p is None or not all(map(math.isfinite, (difference, *ci95, p))):
        return f"cannot be judged: {'one seed has' if n == 1 else 'there is'} no confidence interval"
    if not ci95[0] - 1e-9 <= difference <= ci95[1] + 1e-9:
        raise UsageError(f"expected a difference within its interval, found {difference} and {tuple(ci95)}")
    chance = _chance(p) + (f", {n} paired seeds" if n is not None else "")
    return _judged(scale * difference, (scale * ci95[0], scale * ci95[1]), chance, unit, unlikely=p < alpha)


def _judged(value: float, interval: tuple[float, float], chance: str, unit: str, *, unlikely: bool) -> str:
    low, high = interval
    places = min(6, max(0, 1 - math.floor(math.log10(high - low)))) if high > low else 2
    clear = low > 0 or high < 0
    if clear and unlikely:
        word, (a, b) = ("better", (low, high)) if value > 0 else ("worse", (-high, -low))
        ends = f"{_fixed(a, places)} to {_fixed(b, places)}"
        return f"{word} by {_fixed(abs(value), places)} {unit} (95 % CI {ends}, {chance})"
    size, ends = _signed(value, places), f"{_signed(low, places)} to {_signed(high, places)}"
    if clear:
        return (
            f"no significant difference after correction for several comparisons: {size} {unit}, 95 % CI {ends} on its "
            f"own, {chance}"
        )
    return (
        f"no significant difference: {size} {unit} ({chance}); the data are compatible with anything from {ends} {unit}"
    )


def _chance(p: float) -> str:
    return f"p = {p:.2g}".replace("e-0", "e-") if p > 0 else "p < 1e-300"


def _fixed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:.{places}f}"


def _signed(value: float, places: int) -> str:
    text = _fixed(value, places)
    return "+" + text if float(text) > 0 else text
