"""Axes of a benchmark: fields of a recipe and numbers of initialisers, and the values that each takes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from weightscope.errors import UsageError

SECTIONS = ("network", "data", "training", "distillation")
_LARGEST = 10_000  # values of one axis
_EVERYTHING = ("all", "none")


@dataclass(frozen=True)
class Axis:
    """Names that vary together, with a tuple of values for each point.

    Attributes:
        names: such as `("network.kernel_size",)`.
        points: one value for each name.
    """

    names: tuple[str, ...]
    points: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, names: str, values: str | Sequence[Any]) -> "Axis":
        """An axis from its names, joined by commas, and its values.

        Args:
            names: one name, or several that vary together.
            values: a list, of lists if there are several names; or text as on the command line, see `parse`.

        Raises:
            UsageError: if there is no value, one is given twice, or their number is not that of the names.
        """
        if isinstance(values, str):
            return cls.parse(f"{names}={values}")
        keys = tuple(name.strip() for name in names.split(","))
        points = tuple(tuple(v) if len(keys) > 1 and isinstance(v, list | tuple) else (v,) for v in values)
        for point in points:
            if len(point) != len(keys):
                raise UsageError(f"{names}: expected {len(keys)} values at each point, found {_text(point)}")
        texts = [_text(point) for point in points]
        if not points or len(set(texts)) < len(points):
            again = sorted({text for text in texts if texts.count(text) > 1})
            raise UsageError(
                f"{names}: expected different values, found {', '.join(again) + ' twice' if again else 'none'}"
            )
        return cls(keys, points)

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """An axis from `NAME=VALUE,VALUE,...`, `NAME=START:STOP:STEP` or `NAME,NAME=VALUE/VALUE,...`.

        A value is a number, true, false, a list in brackets, `all` or `none` for no limit, or text. A range includes
        both ends.

        Raises:
            UsageError: if the text has another form.

        Example:
            >>> Axis.parse("mimetic_attention.alpha_qk=0:1:0.5").points
            ((0.0,), (0.5,), (1.0,))
        """
        names, equals, values = text.partition("=")
        if not equals or not names.strip() or not values.strip():
            raise UsageError(f"expected NAME=VALUE,VALUE,... or NAME=START:STOP:STEP, found {text!r}")
        several = "," in names
        points: list[Any] = []
        for item in re.split(r",(?![^\[]*\])", values):
            if several:
                points.append([_value(part) for part in item.split("/")])
            else:
                points += _range(item, names) or [_value(item)]
        return cls.of(names, points)


def axes_of(given: Mapping[str, str | Sequence[Any]] | Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of a mapping from names to values, or axes themselves.

    Raises:
        UsageError: if a name is in more than one axis, or see `Axis.of`.
    """
    axes = tuple(Axis.of(n, v) for n, v in given.items()) if isinstance(given, Mapping) else tuple(given)
    names = [name for axis in axes for name in axis.names]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{repeated[0]}: expected each name in one axis, found it in several")
    return axes


def points_of(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """All combinations of the axes' points, as name -> value; one empty combination without axes."""
    return [
        {
            name: value
            for axis, point in zip(axes, chosen, strict=True)
            for name, value in zip(axis.names, point, strict=True)
        }
        for chosen in product(*(axis.points for axis in axes))
    ]


def point_text(point: Mapping[str, Any]) -> str:
    """`kernel_size=7, train=all` for a point: names without their sections; None is `all` images, else `none`."""
    texts = {name: value_text(value) for name, value in point.items()}
    texts |= {name: "none" for name, value in point.items() if value is None and not name.startswith("data.")}
    return ", ".join(f"{name.rpartition('.')[2]}={text}" for name, text in texts.items())


def value_text(value: Any) -> str:
    """A value as on the command line."""
    if value is None:
        return "all"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, list) else str(value)


def _text(point: Sequence[Any]) -> str:
    return "/".join(map(value_text, point))


def _value(text: str) -> Any:
    text = text.strip()
    if text in _EVERYTHING:
        return None
    try:
        return json.loads(text)
    except ValueError:
        if not text:
            raise UsageError("expected a value between the commas, found none") from None
        return float(text) if re.fullmatch(r"[+-]?\.\d+", text) else text


def _range(text: str, names: str) -> list[float] | None:
    """The numbers of `START:STOP:STEP`, both ends included; None if the text is not a range."""
    ends = text.split(":")
    if len(ends) != 3:
        return None
    try:
        start, stop, step = map(float, ends)
        count = (stop - start) / step
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{names}: expected START:STOP:STEP with a step that is not 0, found {text!r}") from None
    if not 0 <= count < _LARGEST or abs(count - round(count)) > 1e-6:
        raise UsageError(
            f"{names}: expected STEP to lead from START to STOP in at most {_LARGEST} steps, found {text!r}"
        )
    numbers = [float(f"{start + i * step:.12g}") for i in range(round(count) + 1)]
    whole = all("." not in end and "e" not in end.lower() for end in ends)
    return [int(n) for n in numbers] if whole else numbers
