"""weightscope: the distribution of trained weights, and initialisers made from it.

The public names below are imported when they are first used, so `import weightscope` needs neither torch nor
matplotlib nor h5py.
"""

import importlib
from typing import TYPE_CHECKING, Any

from weightscope._version import __version__

if TYPE_CHECKING:
    from weightscope.analysis.attention_maps import attention_maps
    from weightscope.analysis.attention_products import products
    from weightscope.analysis.covariances import covariance
    from weightscope.analysis.inspection import inspect
    from weightscope.auditing import audit, track
    from weightscope.benchmarking import bench
    from weightscope.checkpoint import Checkpoint
    from weightscope.fitting.network import fit_network
    from weightscope.fitting.population import fit
    from weightscope.fitting.source import fit_init
    from weightscope.init import load_init
    from weightscope.population import Population
    from weightscope.recipe import Recipe
    from weightscope.spec import TensorSpec, WeightSpec
    from weightscope.statistics.moments import Moments
    from weightscope.training.collection import collect

_HOMES = {
    "Checkpoint": "checkpoint",
    "Moments": "statistics.moments",
    "Population": "population",
    "Recipe": "recipe",
    "TensorSpec": "spec",
    "WeightSpec": "spec",
    "attention_maps": "analysis.attention_maps",
    "audit": "auditing",
    "bench": "benchmarking",
    "collect": "training.collection",
    "covariance": "analysis.covariances",
    "fit": "fitting.population",
    "fit_init": "fitting.source",
    "fit_network": "fitting.network",
    "inspect": "analysis.inspection",
    "load_init": "init",
    "products": "analysis.attention_products",
    "track": "auditing",
}

__all__ = [
    "Checkpoint",
    "Moments",
    "Population",
    "Recipe",
    "TensorSpec",
    "WeightSpec",
    "__version__",
    "attention_maps",
    "audit",
    "bench",
    "collect",
    "covariance",
    "fit",
    "fit_init",
    "fit_network",
    "inspect",
    "load_init",
    "products",
    "track",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weightscope.{_HOMES[name]}"), name)
