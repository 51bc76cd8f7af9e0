"""Analysis of trained weights: covariances over networks and within one, attention products and maps, contents."""

from weightscope._util.workers import Workers

__all__ = ["Workers"]
