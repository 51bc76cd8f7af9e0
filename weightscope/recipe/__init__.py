"""`Recipe`: a population of networks, or one arm of a benchmark, as data.

A recipe is a TOML file with the sections `[network]`, `[data]`, `[training]`, `[init]` and `[population]`,
`[distillation]` if there is a teacher, and `[bench]` for `weightscope bench`. It is validated strictly: an unknown key,
a wrong type or a value out of range is an error that names the field's path.

`[network] type`, `[data] name` and `[init] name` may be references `"package.module:function"` to code of one's own. A
recipe is parsed without importing it; what depends on it is checked when it is used.
"""

from weightscope.data.image_section import AugmentConfig as AugmentConfig
from weightscope.data.image_section import DataConfig as DataConfig
from weightscope.recipe.networks import ConvMixerConfig as ConvMixerConfig
from weightscope.recipe.networks import ConvNeXtConfig as ConvNeXtConfig
from weightscope.recipe.networks import NetworkConfig as NetworkConfig
from weightscope.recipe.networks import OwnNetworkConfig as OwnNetworkConfig
from weightscope.recipe.networks import ViTConfig as ViTConfig
from weightscope.recipe.recipe import Recipe as Recipe
from weightscope.recipe.sections import BenchConfig as BenchConfig
from weightscope.recipe.sections import DataSection as DataSection
from weightscope.recipe.sections import DistillationConfig as DistillationConfig
from weightscope.recipe.sections import InitConfig as InitConfig
from weightscope.recipe.sections import PopulationConfig as PopulationConfig
from weightscope.recipe.sections import Range as Range
from weightscope.recipe.sections import TrainingConfig as TrainingConfig
