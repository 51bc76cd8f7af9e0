"""Initialisers as a benchmark's user writes them: names, numbers in parentheses, files, functions; and their labels."""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weightscope._util.arm_labels import CONTROL
from weightscope._util.plugins import reference_to
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe import InitConfig
from weightscope.recipe.parsing import explain

Init = str | Path | InitConfig | Callable[..., Any] | Mapping[str, Any]
_FORM = re.compile(r"\s*([\w.:-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def labelled(init: Init) -> tuple[str, InitConfig]:
    """The label of an initialiser and its [init] table.

    Args:
        init: a registered name or a reference, several joined by `+`, each with numbers in parentheses if wanted:
            `"conv_covariance(sigma0=0.15, v=0.25)"`, `"mimetic_ssm(a=false)"`; an artifact, with such names on top of
            it joined by `+`; a .toml file; an [init] table; a function.

    Raises:
        UsageError: if it is none of these; for a function without a name.
        RecipeError: if a .toml file is not an [init] table.
    """
    if isinstance(init, Mapping):
        return labelled(init_table(init))
    if isinstance(init, InitConfig):
        label = short_name(init.name) + numbers_text(init.parameters)
        if init.artifact is not None:
            stem = Path(init.artifact).stem
            label = stem if init.name == "default" else f"{stem}+{label}"
        return label + (CONTROL if init.control else ""), init
    if isinstance(init, str | Path):
        path = Path(init)
        if match := re.fullmatch(r"(.+\.safetensors)(?:\+([^/]+))?", str(init)):
            on_top = parse_init(match[2]) if match[2] else InitConfig()
            return labelled(on_top.model_copy(update={"artifact": match[1]}))
        if path.suffix == ".toml":
            return path.stem, InitConfig.load(path)
        return labelled(parse_init(str(init)))
    if not callable(init):
        raise UsageError(f"inits: expected a name, a file, a function or an InitConfig, found {init!r}")
    return labelled(reference_to(init))


def parse_init(text: str) -> InitConfig:
    """The [init] table of `"name"`, `"name(number=1.5)"`, or several of these joined by `+`.

    Raises:
        UsageError: if the text has another form, or a number is given twice.

    Example:
        >>> parse_init("mimetic_attention(alpha_qk=0.6)+mimetic_mlp").parameters
        {'alpha_qk': 0.6}
    """
    names: list[str] = []
    numbers: dict[str, Any] = {}
    for part in re.split(r"\+(?![^(]*\))", text):
        found = _FORM.fullmatch(part)
        if found is None:
            raise UsageError(f"--init: expected NAME or NAME(NUMBER=VALUE, ...), found {text!r}")
        names.append(found[1])
        for key, value in _keywords(found[2] or "", text).items():
            if key in numbers:
                raise UsageError(f"--init: expected {key} once, found it twice in {text!r}")
            numbers[key] = value
    return init_table({"name": "+".join(names), **numbers})


def init_table(values: Mapping[str, Any]) -> InitConfig:
    """The [init] table of a mapping.

    Raises:
        RecipeError: if it is not valid.
    """
    try:
        return InitConfig.model_validate(dict(values))
    except ValidationError as error:
        raise RecipeError(f"init: {explain(error.errors(), InitConfig)}") from None


def with_numbers(label: str, config: InitConfig, numbers: Mapping[str, Any]) -> tuple[str, InitConfig]:
    """The same initialiser with other numbers, and its label."""
    if not numbers:
        return label, config
    changed = init_table({**config.model_dump(exclude_none=True), **numbers})
    own = config.artifact is None and label == labelled(config)[0]
    return (labelled(changed)[0] if own else label + numbers_text(numbers)), changed


def short_name(name: str) -> str:
    """`my_init` for `package.module:my_init`; names joined by `+` stay joined."""
    return "+".join(part.strip().rpartition(":")[2].rpartition(".")[2] for part in name.split("+"))


def numbers_text(numbers: Mapping[str, Any]) -> str:
    """` (alpha_qk=0.6)`, or nothing without numbers."""
    inner = ", ".join(f"{key}={value}" for key, value in numbers.items())
    return f" ({inner})" if inner else ""


def _keywords(inner: str, text: str) -> dict[str, Any]:
    """The values of `a=1, b="x"`; nothing is executed."""
    try:
        call = ast.parse(f"f({inner})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise UsageError(f"--init: expected NUMBER=VALUE, ... in the parentheses, found {text!r}") from None


def _literal(node: ast.expr) -> Any:
    """A value, where `true` and `false` may be spelt as in recipes."""
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    return ast.literal_eval(node)
