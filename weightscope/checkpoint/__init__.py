"""`Checkpoint`: the tensors of one trained network, read one at a time and never executed."""

from weightscope.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
