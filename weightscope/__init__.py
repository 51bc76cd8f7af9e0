"""weightscope: the distribution of trained weights, and initialisers made from it."""

from weightscope._version import __version__

__all__ = ["__version__"]
