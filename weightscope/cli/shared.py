"""Options and arguments shared by several commands."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from weightscope.errors import UsageError

_TRAINING = (
    click.option("--data", type=click.Path(path_type=Path), help="Folder searched first for the data set."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--workers", type=int, help="Worker processes; by default one per core, or one on a GPU."),
)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that trains."""
    for option in reversed(_TRAINING):
        command = option(command)
    return command


partial_option = click.option("--partial", is_flag=True, help="Use the networks of an incomplete population.")


def maybe_partial(source: str, partial: bool) -> Any:
    """The source, or with `--partial` the population that it names, complete or not.

    Raises:
        UsageError: if `--partial` is given for another kind of source.
    """
    if not partial:
        return source
    from weightscope.population import population_in

    return population_in(source, partial=True)


class OutputFile(click.Path):
    """A file to be written, checked before anything is computed.

    Args:
        suffixes: allowed suffixes; any if empty.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, whose folder exists.

        Raises:
            UsageError: if the suffix is another one, the folder does not exist, or the path is a folder.
        """
        path = Path(value)
        if self.suffixes and path.suffix not in self.suffixes:
            raise UsageError(f"{path}: expected a file name ending in {', '.join(self.suffixes)}")
        if path.is_dir():
            raise UsageError(f"{path}: expected a file name, found a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: its folder {path.parent} does not exist; create it first")
        return path


json_option = click.option("--json", "json_file", type=OutputFile(), help="Also write the result as JSON.")


def out_option(help: str, default: str | None = None, type: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """`-o`, required without a default; a folder unless `type` is given."""
    settings: dict[str, Any] = (
        {"required": True} if default is None else {"default": Path(default), "show_default": True}
    )
    return click.option("-o", "--out", type=type or click.Path(path_type=Path), help=help, **settings)


def figure_option(default: str) -> Callable[[Callable[..., Any]], Any]:
    """`-o` of a figure."""
    return out_option("The figure, .png, .pdf or .svg.", default, OutputFile(".png", ".pdf", ".svg"))


def write_json(path: Path | None, values: Any) -> None:
    """Write the file of `--json`, if requested."""
    if path is None:
        return
    from weightscope._util import atomic

    atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")
