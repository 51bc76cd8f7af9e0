"""weightscope: populations of trained networks, the structure of their weights, and initialisers made from it.

The public names are imported on first use, so `import weightscope` does not import torch, matplotlib or h5py.
"""

import importlib
from typing import TYPE_CHECKING, Any

from weightscope._version import __version__

if TYPE_CHECKING:
    from weightscope.analysis.attention_maps import attention_maps
    from weightscope.analysis.attention_products import products
    from weightscope.analysis.covariances import covariance
    from weightscope.analysis.inspection import inspect
    from weightscope.analysis.verification import verify
    from weightscope.auditing import audit, track
    from weightscope.benchmarking import bench
    from weightscope.checkpoint import Checkpoint
    from weightscope.cli.catalogue import catalogue
    from weightscope.data import Dataset
    from weightscope.fits.fitting import fit, fit_init
    from weightscope.fits.one_network import fit_network
    from weightscope.init import load_init
    from weightscope.population import Population, export
    from weightscope.recipe import Recipe
    from weightscope.spec import TensorSpec, WeightSpec
    from weightscope.training.collection import collect

# Public name -> "module" that has it under the same name, or "module:other_name".
_HOMES = {
    "Checkpoint": "checkpoint",
    "Dataset": "data",
    "Population": "population",
    "Recipe": "recipe",
    "TensorSpec": "spec",
    "WeightSpec": "spec",
    "attention_maps": "analysis.attention_maps",
    "audit": "auditing",
    "bench": "benchmarking",
    "catalogue": "cli.catalogue",
    "collect": "training.collection",
    "covariance": "analysis.covariances",
    "export": "population",
    "fit": "fits.fitting",
    "fit_init": "fits.fitting",
    "fit_network": "fits.one_network",
    "inspect": "analysis.inspection",
    "load_init": "init",
    "products": "analysis.attention_products",
    "track": "auditing",
    "verify": "analysis.verification",
}

__all__ = [
    "Checkpoint",
    "Dataset",
    "Population",
    "Recipe",
    "TensorSpec",
    "WeightSpec",
    "__version__",
    "attention_maps",
    "audit",
    "bench",
    "catalogue",
    "collect",
    "covariance",
    "export",
    "fit",
    "fit_init",
    "fit_network",
    "inspect",
    "load_init",
    "products",
    "track",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    module, _, other = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"weightscope.{module}"), other or name)
