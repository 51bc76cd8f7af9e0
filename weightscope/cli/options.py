"""Options and arguments of several commands, and the names that the shell completes.

Names are found without importing torch, which would take seconds for each key press.
"""

import contextlib
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from weightscope.errors import UsageError

_STDOUT, _OVERWRITE = "stdout of --json -", "value of --overwrite"
_JSON, _CSV = "file of --json", "file of --csv"


def _registered(registry: str, package: str) -> list[str]:
    """The names that `REGISTRY.register("name", ...)` gives in the files of a package, in alphabetical order."""
    spec = find_spec("weightscope")  # does not import its parts
    folder = Path(spec.origin or "").parent / package if spec is not None else Path(package)
    pattern = re.compile(rf'^@?{registry}\.register\(\s*"(\w[\w-]*)"', re.MULTILINE)
    return sorted({name for file in folder.glob("*.py") for name in pattern.findall(file.read_text(encoding="utf-8"))})


def _recipes() -> list[str]:
    from weightscope._util.sources import recipes

    return list(recipes())


NAMES: Mapping[str, Callable[[], list[str]]] = {
    "initialisers": lambda: _registered("INITIALISERS", "init"),
    "structures": lambda: ["auto", *_registered("STRUCTURES", "fits"), *_registered("NETWORK_FITS", "fits")],
    "recipes": _recipes,
    "datasets": lambda: _registered("DATASETS", "data"),
    "tasks": lambda: [f"{name}:" for name in _registered("TASKS", "data")],
    "devices": lambda: ["auto", "cpu", "cuda"],
    "parts": lambda: ["filters", "mlp-rows", "mlp-columns", "patch"],
    "kinds": lambda: ["initialisers", "structures", "networks", "datasets", "recipes"],
}


class Named(click.ParamType):
    """A text that the shell completes: registered names of some kinds (see `NAMES`), files, or both."""

    name = "text"

    def __init__(self, *kind: str, files: bool = True) -> None:
        self.kinds = kind
        self.files = files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin like this, and paths."""
        # After a plus sign follows another name: mimetic_attention+mimetic_mlp
        done, plus, last = incomplete.rpartition("+")
        found = [name for kind in self.kinds for name in NAMES[kind]() if name.startswith(last)]
        items = [CompletionItem(done + plus + name) for name in found]
        return items if items or not self.files else [CompletionItem(incomplete, type="file")]


class _Workers(click.ParamType):
    """A number, or auto, which is None."""

    name = "number|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value == "auto" else click.IntRange(1).convert(value, param, ctx)


device_option = click.option("--device", type=Named("devices", files=False), default="auto", help="auto, cpu or cuda.")


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that trains."""
    workers = click.option(
        "--workers", type=_Workers(), help="Worker processes; auto, the default, is one per core, or one per GPU."
    )
    return data_option(device_option(workers(command)))


data_option = click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), help="Folder searched first for the data set."
)


def spread_options(command: Callable[..., Any], read: str = "more than 4,096 networks") -> Callable[..., Any]:
    """Where the parts of a large population are read; the command gets `workers`, None or `Workers`."""

    @functools.wraps(command)
    def run(*args: Any, workers: int | None, backend: str, scheduler: str | None, **options: Any) -> Any:
        if (backend, scheduler) == ("loky", None):
            return command(*args, workers=workers, **options)
        from weightscope._util.workers import chosen_workers

        return command(*args, workers=chosen_workers(backend, workers, scheduler), **options)

    text = f"Processes that read {read}; auto, the default, is one per core."
    return click.option("--workers", type=_Workers(), help=text)(backend_options(run))


many_options = functools.partial(spread_options, read="models, each of them one at a time")


def backend_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--backend` and `--scheduler`."""
    command = click.option("--scheduler", help="Address of the cluster, such as tcp://host:8786.")(command)
    return click.option("--backend", default="loky", help="loky, dask or ray.")(command)


def file_options(command: Callable[..., Any], adapter: bool = True) -> Callable[..., Any]:
    """`--key` and `--adapter`; with them the command gets checkpoints in place of `source` or `sources`."""

    @functools.wraps(command)
    def run(*args: Any, key: str | None, adapter: str | None = None, **options: Any) -> Any:
        if key is not None or adapter is not None:
            from weightscope._util.sources import is_population, population_member
            from weightscope.checkpoint import open_checkpoint

            given = "--adapter" if key is None else "--key"
            name = "source" if "source" in options else "sources"
            texts = [options[name]] if name == "source" else options[name]
            if found := [text for text in texts if is_population(text) or population_member(text)]:
                raise UsageError(f"{given}: expected files or folders of one network, found the population {found[0]}")
            opened = tuple(open_checkpoint(text, key=key, adapter=adapter) for text in texts)
            options[name] = opened[0] if name == "source" else opened
        return command(*args, **options)

    if adapter:
        text = "LoRA adapter of peft (a folder or hf://org/name) to add to the weights."
        run = click.option("--adapter", metavar="FOLDER", help=text)(run)
    text = "The dictionary of weights in files that hold several, such as ema or model.encoder."
    return click.option("--key", metavar="NAME", help=text)(run)


key_option = functools.partial(file_options, adapter=False)

partial_option = click.option("--partial", is_flag=True, help="Use the networks of an incomplete population.")


def maybe_partial(source: str, partial: bool, at: int | None = None) -> Any:
    """The source; with `--partial` the population that it names, complete or not, with `--at` a snapshot of it."""
    if not partial and at is None:
        return source
    from weightscope.population import population_in

    population = population_in(source, partial=partial)
    return population if at is None else population.at(at)


class OutputFile(click.Path):
    """A file to be written, with one of the suffixes if any are given, checked before anything is computed."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, see `weightscope._util.outputs.writable_path`."""
        from weightscope._util import outputs

        return outputs.writable_path(value, *self.suffixes, overwrite=overwriting(ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Paths, completed by the shell."""
        return [CompletionItem(incomplete, type="file")]


class _JSONFile(OutputFile):
    """A file, or `-` for standard output; everything else that the command prints then goes to standard error."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if os.fspath(value) != "-":
            from weightscope._util import outputs

            return outputs.writable_path(value, json_of=ctx.command.name if ctx else None, overwrite=overwriting(ctx))
        if ctx is not None and not ctx.resilient_parsing:
            ctx.meta[_STDOUT] = sys.stdout
            ctx.with_resource(contextlib.redirect_stdout(sys.stderr))
        return Path("-")


def _note_overwrite(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_OVERWRITE] = value
    return value


def overwriting(ctx: click.Context | None) -> bool:
    """Whether `--overwrite` was given."""
    return ctx is not None and bool(ctx.meta.get(_OVERWRITE))


class Command(click.Command):
    """A command that has, with files to write, an option `--overwrite`, read before them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        own = next((p for p in self.params if p.name == "overwrite"), None)
        if own is None and any(isinstance(p.type, OutputFile) for p in self.params):
            own = click.Option(["--overwrite"], is_flag=True, expose_value=False, help="Replace files of others.")
            self.params.append(own)
        if own is not None:
            own.is_eager, own.callback = True, _note_overwrite


command = functools.partial(click.command, cls=Command)


def _noted(flag: str, file: OutputFile, key: str, help: str) -> Callable[[Callable[..., Any]], Any]:
    """An option whose file `show` writes."""

    def note(context: click.Context, _: click.Parameter, path: Path | None) -> None:
        context.meta[key] = path

    return click.option(flag, type=file, help=help, expose_value=False, callback=note)


json_option = _noted("--json", _JSONFile(), _JSON, "Also write the result as JSON; - writes it to standard output.")
csv_option = _noted("--csv", OutputFile(".csv"), _CSV, "Also write the rows as CSV.")


def out_option(help: str, default: str | None = None, type: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """`-o`, required without a default; a folder unless `type` is given."""
    settings: dict[str, Any] = {"default": Path(default)} if default else {"required": True}
    return click.option("-o", "--out", type=type or click.Path(path_type=Path), help=help, **settings)


def figure_option(default: str) -> Callable[[Callable[..., Any]], Any]:
    """`-o` of a figure."""
    return out_option("The figure, .png, .pdf or .svg.", default, OutputFile(".png", ".pdf", ".svg"))


class Heads(click.ParamType):
    """Numbers of heads: one, or one for each part of a model, PART=H,PART=H."""

    name = "N|PART=N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """An integer, or a dictionary."""
        if re.fullmatch("0*[1-9][0-9]*", str(value)):
            return int(value)
        pairs = [re.fullmatch("(.+)=(0*[1-9][0-9]*)", text) for text in str(value).split(",")]
        if not all(pairs):
            self.fail(f"expected a number of heads, or PART=NUMBER,..., found {value!r}", param, ctx)
        return {pair[1]: int(pair[2]) for pair in pairs if pair}


heads_option = click.option(
    "--heads",
    "--num-heads",
    "heads",
    type=Heads(),
    help="Number of heads, in place of the config's; vision=16,text=32 for parts of a model or of its names.",
)
layout_option = click.option(
    "--layout",
    metavar="NAME",
    help="Order of the rows that pack queries, keys and values, where the architecture is not known: blocks (all q, "
    "k, v), heads (q, k, v of head 0, then of head 1), groups (queries of a key, key, value), codegen, strided.",
)


code_option = click.option(
    "--code",
    metavar="MODULE:FUNCTION",
    help="A function that returns a module with the names of the file, or timm:NAME: its forward pass tells what they "
    "mean.",
)


def reading_config(heads: Any, layout: str | None, code: str | None = None) -> dict[str, Any] | None:
    """The `config` that stands for --heads, --layout and --code; None without them."""
    out = {} if heads is None else {"heads" if isinstance(heads, dict) else "num_attention_heads": heads}
    given = {"layout": layout, "code": code}
    return out | {key: value for key, value in given.items() if value is not None} or None


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--heads`, `--layout` and `--code`; the command gets the `config` that stands for them."""

    @functools.wraps(command)
    def run(*args: Any, heads: Any, layout: str | None, code: str | None, **options: Any) -> Any:
        return command(*args, config=reading_config(heads, layout, code), **options)

    return heads_option(layout_option(code_option(run)))


def choice_option(name: str, values: str, help: str, default: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """An option that takes one of some words."""
    return click.option(name, type=click.Choice(values.split()), default=default, help=help)


permutations_option = click.option(
    "--permutations",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A TOML file of rules for what may be permuted, where neither names nor the network's code tell.",
)


def refuse_others(given: Iterable[str], takes: Iterable[str], what: str) -> None:
    """The error of an option that was given and does not apply."""
    if wrong := [key for key in given if key not in takes]:
        flag, *flags = (f"--{key.replace('_', '-')}" for key in (wrong[0], *takes))
        raise UsageError(f"{flag}: does not apply {what}, which takes {', '.join(flags) or 'none of the others'}")


set_option = click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Of the recipe, as training.epochs=2; repeatable."
)


def varied(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Name -> values of `NAME=VALUE,VALUE,...`: those of a JSON list, or words and numbers."""
    out = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not values:
            raise UsageError(f"--vary: expected FIELD=VALUE,VALUE,..., found {text!r}")
        try:
            out[name] = json.loads(f"[{values}]")
        except ValueError:
            out[name] = [_value(word.strip()) for word in values.split(",")]
    return out


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """Texts `name=value`, each name once, as a dictionary; values in JSON (a number, true) are decoded."""
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in out:
            raise UsageError(f"option: expected name=value, each name once, found {text!r}")
        out[name] = _value(value)
    return out


class Warnings(logging.Handler):
    """Prints each warning of the package once; the file of `--json` has them, too."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        if (text := record.getMessage()) not in self.texts:
            self.texts.append(text)
            click.echo(text, err=True)


def show(result: Any) -> None:
    """Print a result, and write the files of `--csv` and `--json`, if requested."""
    click.echo(result.text())
    write_csv(result)
    write_json(result.to_dict())


def write_json(values: Mapping[str, Any]) -> None:
    """Write the file of `--json`, if requested."""
    context = click.get_current_context()
    if (path := context.meta.get(_JSON)) is None:
        return
    from weightscope._util import atomic, outputs

    told = [text for handler in logging.getLogger("weightscope").handlers for text in getattr(handler, "texts", ())]
    values = {outputs.WRITTEN_BY: f"weightscope {context.command.name}", **values} | (
        {"warnings": told} if told else {}
    )
    text = json.dumps(values, indent=1, allow_nan=False)
    if str(path) == "-":
        click.echo(text, file=context.meta[_STDOUT])
        return
    atomic.write(path, text.encode() + b"\n")


def write_csv(result: Any) -> None:
    """Write the file of `--csv`, if requested: the rows of a result, or of several by the names of their models."""
    if (path := click.get_current_context().meta.get(_CSV)) is not None:
        import pandas  # half a second

        from weightscope._util import atomic

        if isinstance(result, Mapping):
            tables = {name: found.to_pandas() for name, found in result.items()}
            frame = pandas.concat(tables, names=["model"]).reset_index(level=0)
        else:
            frame = result.to_pandas()
        atomic.write(path, frame.to_csv(index=False).encode())
