"""The vectorised trainer: many networks, one device program."""

from weightscope.training.engine import Tile, build_network, spec_of, train_tile

__all__ = ["Tile", "build_network", "spec_of", "train_tile"]
