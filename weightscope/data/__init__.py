"""Data sets as uint8 tensors, and augmentation vectorised over networks.

`load(name, root)` returns a `Dataset`. The names below are imported when they are first used, because the
catalogue next door is read without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.data.dataset import Dataset, load

__all__ = ["Dataset", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from weightscope.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
