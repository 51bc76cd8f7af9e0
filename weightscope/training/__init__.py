"""Training of populations: `collect` trains one, `train_tile` trains T networks of it."""

from weightscope.training.engine import spec_of, train_tile

__all__ = ["spec_of", "train_tile"]
