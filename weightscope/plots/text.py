"""Text in figures: line breaks, numbers, and tensor names shortened for labels."""

import math
import re
import textwrap
from collections.abc import Sequence

FONT = "DejaVu Sans"  # ships with matplotlib, so figures do not depend on installed fonts
TITLE, LABEL, SMALL = 10.5, 9.0, 8.0  # points
_WIDTH = 0.56  # of a mean character, relative to the font size; bold ones are 1.13 times as wide

_LONG = 40  # characters; longer names are cut in the middle


def inches(text: str, size: float = SMALL) -> float:
    """About how wide a text is; layout engines do the rest."""
    return max(map(len, text.split("\n"))) * _WIDTH * size / 72


def wrap(text: str, width: float, size: float = SMALL) -> str:
    """Break a text into lines of about `width` inches; `size` TITLE is bold."""
    characters = int(width * 72 / (_WIDTH * size * (1.13 if size == TITLE else 1)))
    lines = [textwrap.fill(line, max(8, characters), break_on_hyphens=False) for line in text.split("\n")]
    return "\n".join(lines)


def number(value: float, digits: int = 3) -> str:
    """A number as text: 0.0012, 1.5, 12,300, 1.2×10⁻⁷, with a typographic minus sign."""
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}×10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return text.replace("-", "−")


def signed(value: float, places: int) -> str:
    """A difference with its sign: +2.1, −0.4, 0.0."""
    text = f"{value:+,.{places}f}"
    return text[1:] if round(value, places) == 0 else text.replace("-", "−")


def places(width: float) -> int:
    """The number of decimals that shows an interval of this width to two digits."""
    return min(6, max(0, 1 - math.floor(math.log10(width)))) if width > 0 and math.isfinite(width) else 1


def interval(low: float, high: float) -> str:
    """`+0.4 to +2.1`, to two digits of its width."""
    return f"{signed(low, places(high - low))} to {signed(high, places(high - low))}"


def p_value(p: float) -> str:
    """A p-value: `p = 0.012`, `p = 2×10⁻⁹`, `p < 10⁻³⁰⁰`."""
    if p < 1e-300:
        return "p < 10⁻³⁰⁰"
    return f"p = {p:.2g}" if p >= 1e-3 else f"p = {number(p, 1)}"


def rounded_up(limit: float) -> float:
    """The limit of a colour scale, rounded up to two digits so that the printed value is exact."""
    if limit <= 0:
        return limit
    step = 10.0 ** (math.floor(math.log10(limit)) - 1)
    return float(f"{math.ceil(limit / step * (1 - 1e-12)) * step:.2g}")


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names without the parts that they all share, with numbered words as `block 1`; distinct names stay distinct.

    `stages.0.blocks.0.mlp.fc1.weight` and `stages.0.blocks.1.mlp.fc2.weight` become `block 0 mlp.fc1` and
    `block 1 mlp.fc2`; long names are cut in the middle. Returns them, and a remark that says which is which.
    """
    parts = [re.sub(r"\b([A-Za-z_]+?)(?:(?<![aisu])s)?\.(\d+)\b", r"\1 \2", name).split(".") for name in names]
    first = last = 0
    if len(names) > 1 and not any("(" in name for name in names):
        most = min(map(len, parts)) - 1
        first = next((i for i in range(most) if len({p[i] for p in parts}) > 1), most)
        last = next((i for i in range(most - first) if len({p[-1 - i] for p in parts}) > 1), most - first)
    short = [re.sub(r"(?<=\d)\.", " ", ".".join(p[first : len(p) - last])) for p in parts]
    short = [f"module {name}" if name.isdecimal() else name for name in short]  # of a Sequential
    cut = [name if len(name) <= _LONG else f"{name[: _LONG // 2 - 1]}…{name[-_LONG // 2 :]}" for name in short]
    cut = cut if len(set(cut)) == len(set(names)) else short if len(set(short)) == len(set(names)) else list(names)
    return cut, f"{cut[0]} is {names[0]}" if first or last else ""
