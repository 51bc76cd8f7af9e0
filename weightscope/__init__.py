"""weightscope: the distribution of trained weights, and initialisers made from it.

The public names below are imported when they are first used, so `import weightscope` needs neither torch nor
matplotlib nor h5py.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weightscope._version import __version__

if TYPE_CHECKING:
    from weightscope.attention_maps import attention_maps
    from weightscope.audit import audit
    from weightscope.bench import bench
    from weightscope.checkpoint import Checkpoint
    from weightscope.closed_form import fit_network
    from weightscope.collect import collect
    from weightscope.covariance import covariance
    from weightscope.fit import fit
    from weightscope.init import load_init
    from weightscope.population import Population
    from weightscope.products import products
    from weightscope.recipe import Recipe
    from weightscope.spec import TensorSpec, WeightSpec
    from weightscope.statistics.moments import Moments
    from weightscope.tracking import track
    from weightscope.within import covariance_within

_HOMES = {
    "Checkpoint": "weightscope.checkpoint",
    "Moments": "weightscope.statistics.moments",
    "Population": "weightscope.population",
    "Recipe": "weightscope.recipe",
    "TensorSpec": "weightscope.spec",
    "WeightSpec": "weightscope.spec",
    "attention_maps": "weightscope.attention_maps",
    "audit": "weightscope.audit",
    "bench": "weightscope.bench",
    "collect": "weightscope.collect",
    "covariance": "weightscope.covariance",
    "covariance_within": "weightscope.within",
    "fit": "weightscope.fit",
    "fit_network": "weightscope.closed_form",
    "load_init": "weightscope.init",
    "products": "weightscope.products",
    "track": "weightscope.tracking",
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
    "covariance_within",
    "fit",
    "fit_network",
    "load_init",
    "products",
    "track",
]


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `weightscope.fit` the function, also after the module of the same name was imported."""

    def __getattribute__(self, name: str) -> Any:
        homes = super().__getattribute__("__dict__").get("_HOMES", {})
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Package
