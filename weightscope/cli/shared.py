"""Options and arguments that several commands share."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightscope.errors import UsageError

if TYPE_CHECKING:
    from weightscope.population import Population
    from weightscope.recipe import Recipe


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that trains."""
    options = [
        click.option("--data", type=click.Path(path_type=Path), help="Folder to look for the data set in first."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
        click.option("--workers", type=int, help="Worker processes; by default one for each core, or one on a GPU."),
    ]

    @wraps(command)
    def wrapped(**arguments: Any) -> Any:
        return command(**arguments)

    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


class OutputFile(click.Path):
    """A file to be written; what would make that fail is said before anything is computed.

    Args:
        suffixes: what its name may end in; any, when there are none.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, whose folder exists.

        Raises:
            UsageError: if the name ends in something else, or its folder does not exist.
        """
        path = Path(super().convert(value, param, ctx))
        if self.suffixes and path.suffix not in self.suffixes:
            raise UsageError(f"{path}: expected a name that ends in {', '.join(self.suffixes)}")
        if path.is_dir():
            raise UsageError(f"{path}: expected the name of a file, found a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: its folder {path.parent} does not exist; make it first")
        return path


json_option = click.option("--json", "json_file", type=OutputFile(), help="Also write the table here.")


def out_option(help: str, default: str | None = None, type: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """`-o`, required where there is no default; a folder unless `type` says otherwise."""
    settings: dict[str, Any] = (
        {"required": True} if default is None else {"default": Path(default), "show_default": True}
    )
    return click.option("-o", "--out", type=type or click.Path(path_type=Path), help=help, **settings)


def figure_option(default: str) -> Callable[[Callable[..., Any]], Any]:
    """`-o` of a picture."""
    return out_option("The figure, .png, .pdf or .svg.", default, OutputFile(".png", ".pdf", ".svg"))


def write_json(path: Path | None, values: Any) -> None:
    """Write what `--json` asked for."""
    if path is None:
        return
    from weightscope._util import atomic

    atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def recipe_of(source: str) -> "Recipe":
    """A recipe file, or the recipe of a population."""
    from weightscope.recipe import Recipe

    if Path(source).is_dir():
        return population_of(source).recipe
    return Recipe.load(source)


def population_of(source: str) -> "Population":
    """A population's folder, opened."""
    from weightscope.population import Population

    if not Path(source).is_dir():
        raise UsageError(f"expected a population's folder, made by `weightscope collect`, found {source}")
    return Population(source)


def is_population(source: str) -> bool:
    """Whether a source is meant as a population, even if there is none."""
    return Path(source).suffix == ".pop" or (Path(source) / "population.json").exists()
