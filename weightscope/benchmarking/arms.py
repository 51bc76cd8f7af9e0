"""What a benchmark compares: arms, one for each initialiser, training length and choice of frozen tensors."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightscope._util.checks import choice, count
from weightscope._util.plugins import reference_to
from weightscope._util.sources import is_population
from weightscope.errors import UsageError
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe

Init = str | Path | InitConfig | Callable[..., Any]
FROZEN = " (frozen)"  # suffix of the label of an arm whose tensors are frozen
CONTROL = " (scale only)"  # suffix of the label of a control arm, before that of a frozen one
CONTROLS = ("scale",)


@dataclass(frozen=True)
class Arm:
    """One initialiser at one training length.

    Attributes:
        init: label: the initialiser's name, the function's name or the file's stem; with ` (scale only)` if it is the
            control of that initialiser, and with ` (frozen)` if tensors are frozen.
        epochs: training length, a full schedule.
        recipe: what `collect` trains.
    """

    init: str
    epochs: int
    recipe: Recipe

    @property
    def folder(self) -> str:
        """Name of the arm's population."""
        return f"{_file_name(f'{self.init}-{self.epochs}-epochs')}.pop"


def plan_arms(
    recipe: Recipe,
    inits: Sequence[Init],
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
    control: str | None = None,
) -> list[Arm]:
    """The arms of a benchmark, initialiser by initialiser within each length.

    Args:
        recipe: network, data and training; its own [init] is not used.
        inits: registered names (several joined by `+` are applied in turn), functions
            `f(module, *, generator) -> module`, references `"package.module:function"`, artifacts
            (.safetensors; an initialiser on top of one is joined by `+`: `"fitted.safetensors+mimetic_attention"`),
            and [init] tables, as `InitConfig` or as .toml files: a name with its parameters.
        epochs: training lengths; the recipe's if empty.
        seeds: networks in each arm; the recipe's if None.
        frozen: pattern of tensors; if given, each arm is also trained with these frozen at their initial values.
        control: "scale" for a control arm of every initialiser but the default: independent Gaussian entries with its
            mean and variance of each tensor.

    Raises:
        UsageError: if there is no initialiser, two have the same label, or there are fewer than 2 seeds.
    """
    configs = [labelled(init) for init in inits]
    if control is not None:
        choice("control", control, CONTROLS)
        configs = [pair for config in configs for pair in _with_control(*config)]
    labels = [label for label, _ in configs]
    repeated = [label for label, times in Counter(labels).items() if times > 1]
    if not configs or repeated:
        found = f"{', '.join(repeated)} more than once" if repeated else "none"
        raise UsageError(f"inits: expected initialisers with different names, found {found}")
    networks = recipe.population.networks if seeds is None else count("seeds", seeds)
    if networks < 2:
        raise UsageError(f"seeds: a paired comparison needs at least 2 seeds, found {networks}")
    variants: list[tuple[str, tuple[str, ...]]] = [("", ())] + ([] if frozen is None else [(FROZEN, (frozen,))])
    out = []
    for length in epochs or (recipe.training.epochs,):
        for suffix, patterns in variants:
            for label, config in configs:
                changes: dict[str, Any] = {
                    "training.epochs": length,
                    "init": config.model_dump(exclude_none=True),
                    "population.networks": networks,
                }
                if patterns:
                    changes["training.frozen"] = sorted({*recipe.training.frozen, *patterns})
                out.append(Arm(label + suffix, length, recipe.replace(changes)))
    return out


def _with_control(label: str, config: InitConfig) -> list[tuple[str, InitConfig]]:
    """An initialiser and its control; the default has none, because it changes nothing."""
    if config.control or (config.artifact is None and config.name == "default"):
        return [(label, config)]
    return [(label, config), (label + CONTROL, config.model_copy(update={"control": "scale"}))]


def recipe_of(source: Recipe | str | Path) -> Recipe:
    """A recipe: itself, that of a population's folder, or the one that `Recipe.load` finds by name or path."""
    if isinstance(source, Recipe):
        return source
    if is_population(source):
        return Population(source, partial=True).recipe
    return Recipe.load(source)


def default_folder(source: Recipe | str | Path) -> Path:
    """Where results go unless told otherwise: `digits-convnext-bench` for the recipe `digits-convnext.toml`."""
    stem = f"{source.network.type}-{source.data.name}" if isinstance(source, Recipe) else Path(source).stem
    return Path(f"{_file_name(stem)}-bench")


def labelled(init: Init) -> tuple[str, InitConfig]:
    """The label of an initialiser and its [init] table.

    Raises:
        UsageError: if it is neither a name, a file, a function nor an `InitConfig`; for a function without a name.
        RecipeError: if a .toml file is not an [init] table.
    """
    if isinstance(init, InitConfig):
        numbers = ", ".join(f"{key}={value}" for key, value in init.parameters.items())
        label = _short(init.name) + (f" ({numbers})" if numbers else "")
        if init.artifact is not None:
            stem = Path(init.artifact).stem
            label = stem if init.name == "default" else f"{stem}+{label}"
        return label + (CONTROL if init.control else ""), init
    if isinstance(init, str | Path):
        path = Path(init)
        if match := re.fullmatch(r"(.+\.safetensors)(?:\+([^/]+))?", str(init)):
            return labelled(InitConfig(artifact=match[1], name=match[2] or "default"))
        if path.suffix == ".toml":
            return path.stem, InitConfig.load(path)
        return _short(str(init)), InitConfig(name=str(init))
    if not callable(init):
        raise UsageError(f"inits: expected a name, a file, a function or an InitConfig, found {init!r}")
    return labelled(reference_to(init))


def _short(name: str) -> str:
    """`my_init` for `package.module:my_init`; names joined by `+` stay joined."""
    return "+".join(part.strip().rpartition(":")[2].rpartition(".")[2] for part in name.split("+"))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
