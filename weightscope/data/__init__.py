"""Data sets as uint8 tensors, users' own arrays, and augmentation vectorised over networks.

`load(name)` returns a `Dataset`. These names are imported on first use, so that the catalogue next door can be read
without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.data.config import SourceConfig
    from weightscope.data.dataset import Dataset, load

__all__ = ["Dataset", "SourceConfig", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from weightscope.data import config, dataset

        return getattr(config if hasattr(config, name) else dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
