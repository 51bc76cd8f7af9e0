"""Covariances within one network: filters, rows, columns and patches as samples, layer by layer.

found = covariance_within("efficientnet-lite0.pth", fresh, part="filters", labels=["trained", "default"])
print(found.text())
found.plot("filters.png", picture="maps")
"""

from weightscope.analysis.within_network.computing import covariance_within
from weightscope.analysis.within_network.layers import Layer
from weightscope.analysis.within_network.parts import PARTS, Part, skeleton
from weightscope.analysis.within_network.result import NetworkCovariances
from weightscope.fits.filters import filter_distributions

__all__ = [
    "PARTS",
    "Layer",
    "NetworkCovariances",
    "Part",
    "covariance_within",
    "filter_distributions",
    "skeleton",
]
