"""Argument checks; errors name the argument, what was expected and what was found."""

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from weightscope.errors import UsageError


def number(name: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    """`value` as a finite float in [least, most]; raises UsageError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{name}: expected a finite number, found {value!r}")
    if not least <= value <= most:
        limits = f">= {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"
        raise UsageError(f"{name}: expected a number {limits}, found {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    """`value` as a finite float > 0; raises UsageError otherwise."""
    if number(name, value) <= 0:
        raise UsageError(f"{name}: expected a number > 0, found {value!r}")
    return float(value)


def count(name: str, value: Any, least: int = 1) -> int:
    """`value` as an integer >= least; raises UsageError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: expected an integer >= {least}, found {value!r}")
    return value


def odd(name: str, value: Any) -> int:
    """`value` as an odd integer >= 1, a size with a centre; raises UsageError otherwise."""
    if count(name, value) % 2 == 0:
        raise UsageError(f"{name}: expected an odd number, the size of what has a centre, found {value!r}")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """`value` if it is one of `options`; raises UsageError with the list otherwise."""
    options = tuple(options)
    if not isinstance(value, str) or value not in options:
        raise UsageError(f"{name}: expected one of {', '.join(map(repr, options))}, found {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value` if it is a bool; raises UsageError otherwise."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}: expected true or false, found {value!r}")
    return value


def divided(name: str, value: int, by: str, divisor: int) -> int:
    """`value / divisor`; raises UsageError unless it is an integer."""
    if value % divisor:
        raise UsageError(f"{by} must divide {name}, found {name} {value} and {by} {divisor}")
    return value // divisor


def chosen(name: str, wanted: Any, known: Iterable[int]) -> list[int]:
    """One integer or several of those known, in order, negative ones from the end; raises UsageError otherwise."""
    known = sorted(set(known))
    given = [wanted] if isinstance(wanted, Integral) else list(wanted)
    integers = [isinstance(n, Integral) and not isinstance(n, bool) for n in given]
    numbers = [int(n) + known[-1] + 1 if integer and n < 0 else n for n, integer in zip(given, integers, strict=True)]
    bad = [n for n, i, number in zip(given, integers, numbers, strict=True) if not i or number not in known]
    if bad or not given:
        raise UsageError(f"{name}: expected some of {known}, found {bad[0] if bad else 'none'}")
    return sorted({int(n) for n in numbers})
