"""`Recipe`: a population of networks, or one arm of a benchmark, as data.

A recipe is a TOML file with the sections `[network]`, `[data]`, `[training]`, `[init]` and `[population]`,
`[distillation]` if there is a teacher, and `[bench]` for `weightscope bench`. It is validated strictly: an unknown key,
a wrong type or a value out of range is an error that names the field's path.

`[network] type`, `[data] name` and `[init] name` may be references `"package.module:function"` to code of one's own. A
recipe is parsed without importing it; what depends on it is checked when it is used.
"""

from weightscope.data.image_section import AugmentConfig, DataConfig
from weightscope.recipe.networks import ConvMixerConfig, ConvNeXtConfig, NetworkConfig, OwnNetworkConfig, ViTConfig
from weightscope.recipe.recipe import (
    BenchConfig,
    DataSection,
    DistillationConfig,
    InitConfig,
    PopulationConfig,
    Range,
    Recipe,
    TrainingConfig,
)

__all__ = [
    "AugmentConfig",
    "BenchConfig",
    "ConvMixerConfig",
    "ConvNeXtConfig",
    "DataConfig",
    "DataSection",
    "DistillationConfig",
    "InitConfig",
    "NetworkConfig",
    "OwnNetworkConfig",
    "PopulationConfig",
    "Range",
    "Recipe",
    "TrainingConfig",
    "ViTConfig",
]
