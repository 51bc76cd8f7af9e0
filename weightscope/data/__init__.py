"""Data sets as uint8 tensors, users' own arrays, augmentation vectorised over networks, and sequences of tokens.

`load(name)` returns a `Dataset`, and `load` of a section for sequences a `SequenceSource`. These names are imported on
first use, so that the sections of recipes can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.data.dataset import Dataset, load
    from weightscope.data.registry import SourceConfig
    from weightscope.data.sequence_config import SequenceConfig
    from weightscope.data.sequences import SequenceSource

__all__ = ["Dataset", "SequenceConfig", "SequenceSource", "SourceConfig", "load"]
_HOMES = dict(zip(__all__, ("dataset", "sequence_config", "sequences", "registry", "dataset"), strict=True))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
