"""Initialisers as users write them: names, numbers in parentheses, files, tables or functions."""

import ast
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weightscope._util.arms import CONTROLS
from weightscope._util.names import shortened, split_initialisers
from weightscope._util.plugins import name_of, reference_to
from weightscope.errors import UsageError
from weightscope.init.base import Initialiser, compose, steps
from weightscope.recipe import InitConfig
from weightscope.recipe.recipe import validated

Init = str | Path | InitConfig | Callable[..., Any] | Mapping[str, Any]

_FORM = re.compile(r"\s*([\w.:-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def labelled(init: Init) -> tuple[str, InitConfig]:
    """The label of an initialiser and its [init] table."""
    if isinstance(init, Mapping):
        return labelled(init_table(init))
    if isinstance(init, InitConfig):
        label = short_name(init.name) + numbers_text(init.parameters)
        if init.artifact is not None:
            stem = Path(init.artifact).stem
            label = stem if init.name == "default" else f"{stem}+{label}"
        return label + (CONTROLS[init.control].suffix if init.control else ""), init
    if isinstance(init, str | Path):
        path = Path(init)
        if match := re.fullmatch(r"hf://([^+]+)(\+.*)?", str(init)):
            from weightscope.checkpoint.hub import artifact_file  # imports huggingface_hub

            file = artifact_file(f"hf://{match[1]}")
            label, config = labelled(f"{file}{match[2] or ''}")
            return match[1].partition("@")[0].rpartition("/")[2] + label.removeprefix(file.stem), config
        if match := re.fullmatch(r"(.+\.safetensors)(?:\+([^/]+))?", str(init)):
            on_top = parse_init(match[2]) if match[2] else InitConfig()
            return labelled(on_top.model_copy(update={"artifact": match[1]}))
        if path.suffix == ".toml":
            return path.stem, InitConfig.load(path)
        return labelled(parse_init(str(init)))
    if not callable(init):
        raise UsageError(f"inits: expected a name, a file, a callable or an InitConfig, found {init!r}")
    numbers = numbers_text(init.keywords) if isinstance(init, functools.partial) else ""
    return name_of(init) + numbers, labelled(reference_to(init))[1]


def parse_init(text: str) -> InitConfig:
    """The [init] table of `"name"`, `"name(number=1.5)"`, or several of these joined by `+`."""
    names: list[str] = []
    numbers: dict[str, Any] = {}
    for part in split_initialisers(text):
        found = _FORM.fullmatch(part)
        if found is None:
            raise UsageError(f"--init: expected NAME or NAME(NUMBER=VALUE, ...), found {shortened(text)!r}")
        names.append(found[1])
        for key, value in _keywords(found[2] or "", text):
            if key in numbers:
                raise UsageError(f"--init: expected {key} once, found it twice in {text!r}")
            numbers[key] = value
    return init_table({"name": "+".join(names), **numbers})


def init_table(values: Mapping[str, Any]) -> InitConfig:
    """The [init] table of a mapping."""
    return validated(InitConfig, dict(values), "init")


def short_name(name: str) -> str:
    """`my_init` for `package.module:my_init`; names joined by `+` stay joined."""
    return "+".join(part.strip().rpartition(":")[2].rpartition(".")[2] for part in name.split("+"))


def numbers_text(numbers: Mapping[str, Any]) -> str:
    """` (alpha_qk=0.6)`, or nothing without numbers."""
    inner = ", ".join(f"{key}={value}" for key, value in numbers.items())
    return f" ({inner})" if inner else ""


def _keywords(inner: str, text: str) -> list[tuple[str, Any]]:
    """The names and values of `a=1, b="x"`; nothing is executed."""
    try:
        call = ast.parse(f"f({inner})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return [(str(keyword.arg), _literal(keyword.value)) for keyword in call.keywords]
    except (SyntaxError, ValueError, AssertionError):
        raise UsageError(
            f"--init: expected NAME=VALUE, ... in the parentheses, text in quotes, found {text!r}"
        ) from None


def _literal(node: ast.expr) -> Any:
    """A value, where `true` and `false` may be spelt as in recipes."""
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    return ast.literal_eval(node)


def resolve(config: InitConfig) -> Initialiser:
    """The initialiser of an [init] table: an artifact's, then the named ones on top, several joined by `+`."""
    found = resolved_steps(config)
    return found[0][1] if len(found) == 1 else compose(*(step for _, step in found))


def resolved_steps(config: InitConfig) -> list[tuple[str, Initialiser]]:
    """The initialisers of an [init] table, one by one, with their names."""
    found: list[tuple[str, Initialiser]] = []
    if config.artifact is not None:
        from weightscope.init.from_artifact import load_init  # SciPy: a second to import

        found = [(Path(config.artifact).name, load_init(config.artifact))]
    if not found or config.name != "default" or config.parameters:
        found += steps(config.name, **config.parameters)
    return found
