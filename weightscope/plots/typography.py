"""Text in figures: its width, line breaks, and formatted numbers."""

import math
import re
from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

FONT = "DejaVu Sans"  # ships with matplotlib, so figures do not depend on installed fonts
TITLE, LABEL, SMALL = 10.5, 9.0, 8.0  # points


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = SMALL, *, bold: bool = False) -> float:
    """Width in points of one line of text."""
    if not text.strip():
        return 0.0
    properties = FontProperties(family=FONT, weight="bold" if bold else "normal", size=size)
    # Hinted glyphs are up to 2 % wider than their outlines.
    return 1.025 * float(text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0])


def wrap(text: str, points: float, size: float = SMALL, *, bold: bool = False) -> str:
    """Break a text into lines of at most `points` at spaces and after `+`; longer words are broken anywhere."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for piece in re.findall(r"\s+|[^\s+]+\+*|\++", paragraph):
            if text_width(line + piece, size, bold=bold) <= points:
                line += piece
                continue
            if line:
                lines.append(line.rstrip())
            line = piece.lstrip()
            while text_width(line, size, bold=bold) > points and len(line) > 1:
                fits = max(1, sum(text_width(line[:i], size, bold=bold) <= points for i in range(1, len(line))))
                lines.append(line[:fits])
                line = line[fits:]
        lines.append(line.rstrip())
    return "\n".join(lines)


def number(value: float, digits: int = 3) -> str:
    """A number as text: 0.0012, 1.5, 12,300, 1.2×10⁻⁷, with a typographic minus sign."""
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{places}f}"
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


def rounded_up(limit: float) -> float:
    """The limit of a colour scale, rounded up to two digits so that the printed value is exact."""
    if limit <= 0:
        return limit
    step = 10.0 ** (math.floor(math.log10(limit)) - 1)
    return float(f"{math.ceil(limit / step * (1 - 1e-12)) * step:.2g}")
