"""What an initialiser from a file did to a module."""

from dataclasses import dataclass

from weightscope._util.names import listing


@dataclass(frozen=True)
class InitReport:
    """What an initialiser did to a module.

    Attributes:
        touched: names of the tensors that it set.
        untouched: names of the module's other parameters, which keep what they had.
        absent: names in the artifact that the module does not have in that shape (only with `strict=False`).
        notes: what was changed on the way, such as covariances made positive semi-definite.
    """

    touched: tuple[str, ...]
    untouched: tuple[str, ...]
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [("set", self.touched), ("left alone", self.untouched), ("not in the module", self.absent)]
        lines = [f"{what} {len(names)} tensors: {listing(names)}" for what, names in parts if names]
        return "; ".join((*lines, *self.notes))
