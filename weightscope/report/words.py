"""Statistical differences as text."""

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
    higher_is_better: bool = True,
) -> str:
    """Describe a paired difference.

    Significant means p < alpha and an interval that excludes zero. If the two disagree (a p-value corrected for several
    comparisons), the text says so. A difference that is not significant is reported with its interval, not as equality.

    Args:
        difference: of the means; a fraction for the unit "percentage points", as in `results.json`, else in `unit`s.
        ci95: its 95 % confidence interval, likewise.
        p: its p-value.
        unit: printed unit of the difference.
        n: number of paired seeds.
        alpha: significance level.
        higher_is_better: whether a positive difference is an improvement.

    Raises:
        UsageError: if a difference in percentage points is not a fraction, or is outside its interval.

    Example:
        >>> verdict(0.021, (0.015, 0.027), 2e-9, n=64)
        'better by 2.1 percentage points (95 % CI 1.5 to 2.7, p = 2e-9, 64 paired seeds)'
    """
    if difference is None:
        return "the reference of the comparison"
    scale = 100.0 if unit == "percentage points" else 1.0
    if scale != 1 and abs(difference) > 1:
        raise UsageError(f"difference: expected a fraction between -1 and 1 for percentage points, found {difference}")
    if ci95 is None or p is None or not all(map(math.isfinite, (difference, *ci95, p))):
        return f"cannot be judged: no confidence interval{' with one seed' if n == 1 else ''}"
    if not ci95[0] - 1e-9 <= difference <= ci95[1] + 1e-9:
        raise UsageError(f"difference: expected a value within its interval {tuple(ci95)}, found {difference}")
    chance = _chance(p) + (f", {n} paired seeds" if n is not None else "")
    values = (scale * difference, scale * ci95[0], scale * ci95[1])
    return _judged(values, chance, unit, unlikely=p < alpha, sign=1 if higher_is_better else -1)


def _judged(values: tuple[float, float, float], chance: str, unit: str, *, unlikely: bool, sign: int) -> str:
    value, low, high = values
    places = min(6, max(0, 1 - math.floor(math.log10(high - low)))) if high > low else 2
    clear = low > 0 or high < 0
    if clear and unlikely:
        word = "better" if sign * value > 0 else "worse"
        a, b = (low, high) if value > 0 else (-high, -low)
        ends = f"{_fixed(a, places)} to {_fixed(b, places)}"
        return f"{word} by {_fixed(abs(value), places)} {unit} (95 % CI {ends}, {chance})"
    size, ends = _signed(value, places), f"{_signed(low, places)} to {_signed(high, places)}"
    if clear:
        corrected = "no significant difference after correction for multiple comparisons"
        return f"{corrected}: {size} {unit} (uncorrected 95 % CI {ends}, {chance})"
    return f"no significant difference: {size} {unit} (95 % CI {ends}, {chance})"


def _chance(p: float) -> str:
    return f"p = {p:.2g}".replace("e-0", "e-") if p > 0 else "p < 1e-300"


def _fixed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:.{places}f}"


def _signed(value: float, places: int) -> str:
    text = _fixed(value, places)
    return "+" + text if float(text) > 0 else text
