"""Everything that is available by name: initialisers, structures, networks, data sets and recipes."""

import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from weightscope._util.names import unknown
from weightscope._util.results import Result
from weightscope.cli.options import Named, command, json_option, show
from weightscope.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

_WIDTH = 110
_DATA_FOLDERS = "./data, WEIGHTSCOPE_DATA or the folder of --data"


@dataclass(frozen=True)
class Entry:
    """A component that is available by name."""

    kind: str  # one of `KINDS`
    name: str
    description: str
    parameters: dict[str, Any]  # name -> default of its optional parameters; for a recipe its main settings
    required: tuple[str, ...] = ()  # names of its required parameters
    source: str = ""  # the paper, or where to get a data set

    @property
    def signature(self) -> str:
        """`name(parameter, parameter=default)`."""
        given = [*self.required, *(f"{key}={value!r}" for key, value in self.parameters.items())]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        parameters = json.loads(json.dumps(self.parameters, default=repr))
        values = {"name": self.name, "description": self.description, "parameters": parameters}
        return {**values, "required": list(self.required), "source": self.source}


@dataclass(frozen=True, repr=False)
class Catalogue(Result):
    """Entries, in the order of their kinds."""

    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UsageError(unknown("entry", name, [entry.name for entry in self.entries]))

    def text(self) -> str:
        lines: list[str] = []
        for kind, entries in self._by_kind().items():
            lines += ([""] if lines else []) + [kind]
            for entry in entries:
                lines += _wrapped(entry.signature, "  ", " " * 8)
                for text in (entry.description, f"source: {entry.source}" if entry.source else ""):
                    lines += _wrapped(text, " " * 6, " " * 6)
        return "\n".join(lines)

    def _by_kind(self) -> dict[str, list[Entry]]:
        kinds: dict[str, list[Entry]] = {}
        for entry in self.entries:
            kinds.setdefault(entry.kind, []).append(entry)
        return kinds

    def rows(self) -> list[dict[str, Any]]:
        """One row per entry: `kind`, `name`, `signature`, `description`, `source`."""
        keys = ("kind", "name", "signature", "description", "source")
        return [{key: getattr(entry, key) for key in keys} for entry in self.entries]

    def summary(self) -> str:
        return ", ".join(f"{len(entries)} {kind}" for kind, entries in self._by_kind().items())

    def to_dict(self) -> dict[str, Any]:
        """JSON types: kind -> entries."""
        return {kind: [entry.to_dict() for entry in entries] for kind, entries in self._by_kind().items()}


def catalogue(kind: str | None = None) -> Catalogue:
    """What is available by name, with parameters and sources, of one kind or of all; UsageError for an unknown kind.

    Example:
        >>> catalogue("networks")["convnext"].parameters["kernel_size"]
        7
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(unknown("kind of entry", kind, KINDS))
    return Catalogue(tuple(entry for name in ([kind] if kind else KINDS) for entry in KINDS[name]()))


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Lines of `_WIDTH`, not broken at hyphens, which are part of paths and names."""
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _functions(kind: str, registry: Any, skip: tuple[str, ...], about: str = "") -> Iterator[Entry]:
    """The entries of a registry of functions, or of classes with a function `fit`."""
    for name, item in registry.items():
        known = inspect.signature(getattr(item, "fit", item)).parameters.values()
        chosen = [p for p in known if p.name not in skip and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        defaults = {p.name: p.default for p in chosen if p.default is not p.empty}
        required = tuple(p.name for p in chosen if p.default is p.empty)
        yield Entry(kind, name, about + _first_line(item), defaults, required, _source(registry, name, item))


def _initialisers() -> Iterator[Entry]:
    from weightscope.init import INITIALISERS

    return _functions("initialisers", INITIALISERS, ("module", "generator"))


def _structures() -> Iterator[Entry]:
    from weightscope.fits import STRUCTURES
    from weightscope.fits.one_network import NETWORK_FITS

    yield from _functions("structures", STRUCTURES, ("cls", "data", "spec"))
    yield from _functions("structures", NETWORK_FITS, ("source",), "Of one network. ")


def _networks() -> Iterator[Entry]:
    from weightscope.recipe.networks import SECTIONS

    for name, section in SECTIONS.items():
        yield Entry("networks", name, _first_line(section), *_fields(section, "type"))


def _datasets() -> Iterator[Entry]:
    from weightscope.data.image_section import DATASETS, dataset_info
    from weightscope.data.registry import FOLDER
    from weightscope.data.sequence_config import MARKOV, TEXT, MarkovConfig, TaskConfig, TextConfig
    from weightscope.data.sequences import TASKS

    for name in DATASETS:
        text, where = "images of one's own, any number of classes", DATASETS.details[name].get("how_to_get", "")
        if name != FOLDER:
            info = dataset_info(name)
            text = f"{info.classes} classes, {info.channels} x {info.size} x {info.size} pixels, "
            text += f"{info.train:,} training and {info.test:,} test images"
            where = info.how_to_get.replace("one of these", _DATA_FOLDERS)  # which an error lists before it
        yield Entry("datasets", name, text, {}, source=where)
    configs: dict[str, Any] = {**dict.fromkeys(TASKS, TaskConfig), TEXT: TextConfig, MARKOV: MarkovConfig}
    for name, config in configs.items():
        about, source = (TASKS[name], _source(TASKS, name, TASKS[name])) if name in TASKS else (config, "")
        text = _first_line(about).replace("`", "").partition(";")[0]
        yield Entry("datasets", name, f"Sequences. {text.removesuffix('.')}.", *_fields(config, "name"), source)


def _recipes() -> Iterator[Entry]:
    from weightscope._util.sources import recipes

    for name, path in recipes().items():
        text = path.read_text(encoding="utf-8")
        lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        comment = " ".join(line.lstrip("# ") for line in lines)
        values = tomllib.loads(text)
        settings = {"network": values["network"]["type"], "data": values["data"]["name"]}
        settings |= {"epochs": values["training"]["epochs"]}
        settings |= {"networks": values.get("population", {}).get("networks")}
        yield Entry("recipes", name, re.split(r"(?<=\.)\s(?=[A-Z])", comment)[0], settings)


KINDS: dict[str, Callable[[], Iterator[Entry]]] = {
    "initialisers": _initialisers,
    "structures": _structures,
    "networks": _networks,
    "datasets": _datasets,
    "recipes": _recipes,
}


def _fields(config: "type[BaseModel]", tag: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Defaults of the optional fields of a recipe's section, and names of the required ones, but for its tag."""
    fields = {key: field for key, field in config.model_fields.items() if key != tag}
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    return defaults, tuple(key for key in fields if key not in defaults)


def _source(registry: Any, name: str, item: Any) -> str:
    """What the registry records, or the docstring's section `Source:`."""
    recorded = getattr(registry, "details", {}).get(name, {}).get("source")
    found = re.search(r"^Source: (.*?)(?:\n\n|\Z)", inspect.getdoc(item) or "", flags=re.MULTILINE | re.DOTALL)
    return recorded or ("" if found is None else " ".join(found[1].split()).removesuffix("."))


def _first_line(item: Any) -> str:
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")


@command("list")
@click.argument("kind", required=False, type=Named("kinds", files=False))
@json_option
def list_(kind: str | None) -> None:
    """List initialisers, structures, networks, data sets and recipes, with their parameters and sources.

    KIND is initialisers, structures, networks, datasets or recipes; everything by default.

    \b
    Examples:
      weightscope list
      weightscope list initialisers --json initialisers.json
    """
    show(catalogue(kind))
