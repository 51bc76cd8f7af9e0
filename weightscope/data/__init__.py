"""Data sets as uint8 tensors, users' own arrays, augmentation vectorised over networks, and sequences of tokens.

`load(name)` returns a `Dataset`, and `load` of a section for sequences a `SequenceSource`. These names are imported on
first use, so that the catalogue next door can be read without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.data.config import SourceConfig
    from weightscope.data.dataset import Dataset, load
    from weightscope.data.sequence_config import SequenceConfig
    from weightscope.data.sequences import SequenceSource

__all__ = ["Dataset", "SequenceConfig", "SequenceSource", "SourceConfig", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from weightscope.data import config, sequence_config

        for light in (config, sequence_config):
            if hasattr(light, name):
                return getattr(light, name)
        from weightscope.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
