"""What the engine needs of the data that networks are trained on."""

from typing import Protocol

from torch import Tensor


class Batches(Protocol):
    """The batches of T networks."""

    batch: int
    reported: tuple[str, ...]
    steps: int
    evaluated: tuple[str, ...]

    def draw(self) -> dict[str, Tensor]:
        """The numbers of the next epoch, a row for each step, from each network's own streams."""
        ...

    def losses(self, numbers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Losses (T,), with a graph, and what else is reported of the step whose row of numbers is given, (T,) each."""
        ...

    def evaluate(self) -> dict[str, Tensor]:
        """Metrics of held-out data, each (T,); `test_loss` is one of them."""
        ...


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """1.0 where the label has the largest logit, 0.0 elsewhere; float32 (T, B) of logits (T, B, K).

    A prediction whose largest logit is NaN or infinite counts as wrong (`argmax` of NaN may be the label).
    """
    value, place = logits.max(2)
    return ((place == labels) & value.isfinite()).float()
