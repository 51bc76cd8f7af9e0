"""What a task reports about a trained network: names, units, ranges and directions. Does not import torch.

The names are those of `Population.metrics`. A section of a recipe that says what networks are trained on lists its
metrics in the property `metrics`, the primary one first.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

POINTS = "percentage points"


@dataclass(frozen=True)
class Metric:
    """A number that a task reports for each trained network.

    Attributes:
        name: in `Population.metrics`, such as `test_accuracy`; its values after each epoch are `NAME_per_epoch`.
        label: in words, without "test" and unit.
        unit: of the values as they are shown; empty if there is none.
        factor: shown value = factor x stored value.
        bounds: the smallest and the largest possible stored value.
        higher_is_better: the direction.
        length: of the evaluated sequences, as a multiple of the training length.
    """

    name: str
    label: str
    unit: str = ""
    factor: float = 1.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    higher_is_better: bool = False
    length: int = 1

    @property
    def title(self) -> str:
        """The label of an axis: `test accuracy (%)`."""
        return f"test {self.label}" + (f" ({self.unit})" if self.unit else "")

    @property
    def difference_unit(self) -> str:
        """The unit of a difference as it is shown: percentage points for per cent."""
        return POINTS if self.unit == "%" else self.unit

    @property
    def sign(self) -> int:
        """1 if a positive difference is an improvement, otherwise -1."""
        return 1 if self.higher_is_better else -1

    def better(self, difference: float) -> bool:
        """Whether a value that is larger by `difference` is better."""
        return self.sign * difference > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON types; an infinite bound is None."""
        bounds = [bound if math.isfinite(bound) else None for bound in self.bounds]
        return {**asdict(self), "bounds": bounds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Metric":
        """The inverse of `to_dict`."""
        low, high = values["bounds"]
        bounds = (-math.inf if low is None else low, math.inf if high is None else high)
        return cls(**{**values, "bounds": bounds})


def _accuracy(length: int = 1) -> Metric:
    """Of images or of the answer's tokens, at a multiple of the training length."""
    name, label = (f"_{length}x", f" at {length}x the length") if length > 1 else ("", "")
    return Metric(f"test_accuracy{name}", f"accuracy{label}", "%", 100.0, (0.0, 1.0), True, length)


ACCURACY, ACCURACY_2X, ACCURACY_4X = _accuracy(), _accuracy(2), _accuracy(4)
LOSS = Metric("test_loss", "loss", "nats", bounds=(0.0, math.inf))
BITS = Metric("test_bits", "cross entropy", "bits per token", bounds=(0.0, math.inf))
PERPLEXITY = Metric("test_perplexity", "perplexity", bounds=(1.0, math.inf))
