"""Analysis of trained weights: covariances over networks and within one, attention products and maps, contents."""

import importlib
from typing import Any

from weightscope._util.workers import Workers

# Function -> the module that defines it, which is imported on first use: some need torch.
_HOMES = {
    "covariance_across": "across_networks",
    "covariance_exchangeable": "exchangeable",
    "covariance_within": "within_network",
    "eigenpairs": "across_networks",
}

__all__ = ["Workers", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
