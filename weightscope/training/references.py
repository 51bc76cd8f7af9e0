"""The references to users' own code in a recipe."""

from weightscope._util import plugins
from weightscope.recipe import Recipe


def references(recipe: Recipe) -> list[tuple[str, str]]:
    """The references to one's own code in a recipe, with the section of each."""
    named = [("network", recipe.network.type), ("data", recipe.data.name)]
    if recipe.distillation is not None and recipe.distillation.network is not None:
        named.append(("distillation", recipe.distillation.network.type))
    named += [("init", part.strip()) for init in recipe.init for part in init.name.split("+")]
    return [(section, name) for section, name in named if plugins.is_reference(name)]
