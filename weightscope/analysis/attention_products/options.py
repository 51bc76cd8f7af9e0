"""Options of `products`."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from weightscope._util.checks import choice
from weightscope.errors import UsageError

Spectra = Literal["heads", "all", "none"]
AVERAGE = range(256)  # relative positions of rotary="average"


@dataclass(frozen=True)
class Options:
    """Options of `products`."""

    fold_norms: bool
    fold_scales: bool
    biases: bool
    rotary: Any
    spectra: Spectra
    clip: int | None

    @property
    def positions(self) -> range | None:
        """Relative positions that the rotation is averaged over; None for position 0."""
        if self.rotary == "zero" or self.rotary == 0:
            return None
        if self.rotary == "average":
            return AVERAGE
        return range(self.rotary, self.rotary + 1) if isinstance(self.rotary, int) else self.rotary

    def checked(self) -> "Options":
        """These options.

        Raises:
            UsageError: if one is invalid.
        """
        words, number = self.rotary in ("zero", "average"), type(self.rotary) is int
        if not (words or number or (isinstance(self.rotary, range) and len(self.rotary))):
            raise UsageError(
                f"rotary: expected 'zero', 'average', a relative position or a range of them, found {self.rotary!r}"
            )
        choice("spectra", self.spectra, get_args(Spectra))
        if self.clip is not None and self.clip < 1:
            raise UsageError(f"clip: expected at least 1 or None, found {self.clip}")
        return self
