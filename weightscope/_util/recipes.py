"""The recipes that are part of the package: those of the folder `populations/`, by name."""

from pathlib import Path
from typing import NamedTuple

from weightscope._util.names import unknown
from weightscope.errors import RecipeError

# A symbolic link in a checkout and an editable install, a folder in a wheel.
_FOLDER = Path(__file__).parents[1] / "populations"


class ShippedRecipe(NamedTuple):
    """One recipe of the package.

    Attributes:
        path: its TOML file.
        about: the first line of the comment at its top.
    """

    path: Path
    about: str


def recipes() -> dict[str, ShippedRecipe]:
    """The recipes that are part of the package, by name.

    Example:
        >>> recipes()["digits-convnext"].about
        'Tiny ConvNeXts on scikit-learn's handwritten digits, ...'
    """
    found = {}
    for path in sorted(_FOLDER.glob("*.toml"), key=lambda path: path.stem):
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        found[path.stem] = ShippedRecipe(path, first.removeprefix("#").strip() if first.startswith("#") else "")
    return found


def recipe_path(source: str | Path) -> Path:
    """The file of a recipe, given by its path or by the name of a recipe of the package.

    A path wins over a name. A path is not checked; reading the file does that.

    Raises:
        RecipeError: if there is no such file and no recipe of that name.
    """
    path = Path(source)
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path
    if path.is_dir():
        raise RecipeError(f"{path}: expected a .toml file, a population or the name of a recipe, found another folder")
    shipped = recipes()
    if str(source) not in shipped:
        raise RecipeError(unknown("recipe", str(source), shipped, "the path of a .toml file"))
    return shipped[str(source)].path
