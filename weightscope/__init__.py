"""weightscope: populations of trained networks, the structure of their weights, and initialisers made from it.

The public names are imported on first use, so `import weightscope` does not import torch, matplotlib or h5py.
"""

# ruff: noqa: F401 - what is imported for type checkers is not used here

import importlib
from typing import TYPE_CHECKING, Any

from weightscope._version import __version__

if TYPE_CHECKING:  # for type checkers and editors; at run time, `__getattr__` imports the names of `_HOMES`
    from weightscope.analysis.across_networks import covariance
    from weightscope.analysis.attention_maps import attention_maps
    from weightscope.analysis.attention_products import products
    from weightscope.analysis.describe import describe
    from weightscope.analysis.inspection import inspect, verify
    from weightscope.analysis.watch import watch
    from weightscope.anatomy.permutation_groups import permutation_spec
    from weightscope.auditing import audit, track
    from weightscope.benchmarking import bench
    from weightscope.benchmarking.comparing import compare
    from weightscope.checkpoint import Checkpoint
    from weightscope.cli.catalogue import catalogue
    from weightscope.data import Dataset
    from weightscope.fits.fitting import fit
    from weightscope.fits.one_network import fit_network
    from weightscope.fits.pretrained import fit_pretrained
    from weightscope.init import load_init
    from weightscope.init.initialise import initialise
    from weightscope.population import Population, export
    from weightscope.recipe import Recipe
    from weightscope.spec import TensorSpec, WeightSpec
    from weightscope.training.collection import collect

# Public name -> the module that defines it.
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
    "compare": "benchmarking.comparing",
    "covariance": "analysis.across_networks",
    "describe": "analysis.describe",
    "export": "population",
    "fit": "fits.fitting",
    "fit_network": "fits.one_network",
    "fit_pretrained": "fits.pretrained",
    "initialise": "init.initialise",
    "inspect": "analysis.inspection",
    "load_init": "init",
    "permutation_spec": "anatomy.permutation_groups",
    "products": "analysis.attention_products",
    "track": "auditing",
    "verify": "analysis.inspection",
    "watch": "analysis.watch",
}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weightscope.{_HOMES[name]}"), name)
