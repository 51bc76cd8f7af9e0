"""What a benchmark compares: cells of recipes, and in each cell arms of initialisers."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightscope._util.arm_labels import CONTROL, FROZEN
from weightscope._util.checks import choice, count
from weightscope.benchmarking.axes import SECTIONS, Axis, axes_of, point_text, points_of, value_text
from weightscope.benchmarking.inits import Init, labelled, short_name, with_numbers
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe import InitConfig, Recipe

__all__ = ["Arm", "Init", "default_folder", "labelled", "plan_arms"]

CONTROLS = ("scale",)
_LONGEST = 120  # characters of a folder's name
_LENGTH = "training.epochs"


@dataclass(frozen=True)
class Arm:
    """One initialiser in one cell at one training length.

    Attributes:
        init: label: the initialiser's name, the function's name or the file's stem; with ` (scale only)` if it is the
            control of that initialiser, and with ` (frozen)` if tensors are frozen.
        epochs: training length, a full schedule.
        recipe: what `collect` trains.
        cell: the recipe's fields that vary, and their values in this arm.
        numbers: the initialiser's numbers that vary, such as `{"mimetic_mlp.sigma": 0.2}`.
    """

    init: str
    epochs: int
    recipe: Recipe
    cell: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Path of the arm's population below the folder of all."""
        name = f"{_file_name(f'{self.init}-{self.epochs}-epochs')}.pop"
        parts = [_file_name(f"{key}-{value_text(value)}") for key, value in self.cell.items()]
        return f"{_file_name('_'.join(parts))}/{name}" if parts else name


@dataclass(frozen=True)
class _Candidate:
    """An initialiser with its label and the numbers of its grid."""

    label: str
    config: InitConfig
    numbers: Mapping[str, Any] = field(default_factory=dict)


def plan_arms(
    recipe: Recipe,
    inits: Sequence[Init],
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
    control: str | None = None,
    vary: Mapping[str, Any] | Sequence[Axis] = (),
    grid: Mapping[str, Any] | Sequence[Axis] = (),
) -> list[Arm]:
    """The arms of a benchmark: cell by cell, length by length, initialiser by initialiser.

    Args:
        recipe: network, data and training; its own [init] is not used.
        inits: registered names (several joined by `+` are applied in turn; numbers in parentheses), functions
            `f(module, *, generator) -> module`, references `"package.module:function"`, artifacts
            (.safetensors; an initialiser on top of one is joined by `+`: `"fitted.safetensors+mimetic_attention"`),
            and [init] tables, as `InitConfig`, mappings or .toml files.
        epochs: training lengths; the recipe's if empty.
        seeds: networks in each arm; the recipe's if None.
        frozen: pattern of tensors; if given, each arm is also trained with these frozen at their initial values.
        control: "scale" for a control arm of every initialiser but the default: independent Gaussian entries with its
            mean and variance of each tensor.
        vary: fields of [network], [data], [training] and [distillation] and their values,
            `{"network.kernel_size": [3, 7]}`; a cell is a combination of them. Names joined by commas vary together:
            `{"network.width,network.heads": [[96, 3]]}`.
        grid: numbers of initialisers and their values, `{"mimetic_mlp.sigma": [0.1, 0.2]}`: each initialiser with this
            name is compared with each value. Ranges may be given as text, `"0:1:0.1"`.

    Raises:
        UsageError: if there is no initialiser, two have the same label, an axis is invalid or names no initialiser, or
            there are fewer than 2 seeds.
        RecipeError: if a cell is not a valid recipe.
    """
    candidates = _candidates(inits, axes_of(grid or ()), control)
    networks = recipe.population.networks if seeds is None else count("seeds", seeds)
    if networks < 2:
        raise UsageError(f"seeds: a paired comparison needs at least 2 seeds, found {networks}")
    cells, lengths = _cells(axes_of(vary or ()), tuple(epochs))
    variants: list[tuple[str, tuple[str, ...]]] = [("", ())] + ([] if frozen is None else [(FROZEN, (frozen,))])
    out = []
    for cell in cells:
        for length in lengths or (recipe.training.epochs,):
            for suffix, patterns in variants:
                for candidate in candidates:
                    changes = {**cell, _LENGTH: length, "population.networks": networks}
                    changes["init"] = candidate.config.model_dump(exclude_none=True)
                    if patterns:
                        changes["training.frozen"] = sorted({*recipe.training.frozen, *patterns})
                    changed = _changed(recipe, changes, cell)
                    out.append(Arm(candidate.label + suffix, length, changed, cell, candidate.numbers))
    by_folder: dict[str, Arm] = {}
    for arm in out:
        if (other := by_folder.setdefault(arm.folder, arm)) is not arm:
            raise UsageError(
                f"{other.init} and {arm.init}: expected arms with folders of their own, found {arm.folder} for both; "
                "give one a name (name:initialiser)"
            )
    return out


def _candidates(inits: Sequence[Init], grid: Sequence[Axis], control: str | None) -> list[_Candidate]:
    given = [labelled(init) for init in inits]
    found = [candidate for pair in given for candidate in _with_grid(*pair, grid)]
    for axis in grid:
        if not any(set(axis.names) <= set(candidate.numbers) for candidate in found):
            raise UsageError(
                f"grid: {', '.join(axis.names)}: expected the name of an initialiser and one of its numbers, as in "
                f"mimetic_mlp.sigma, found none in {', '.join(label for label, _ in given) or 'no initialisers'}"
            )
    repeated = [label for label, times in Counter(c.label for c in found).items() if times > 1]
    if not found or repeated:
        what = f"{', '.join(repeated)} more than once" if repeated else "none"
        raise UsageError(f"inits: expected initialisers with different names, found {what}")
    if control is not None:
        choice("control", control, CONTROLS)
        found = [arm for candidate in found for arm in _with_control(candidate)]
    return found


def _with_grid(label: str, config: InitConfig, grid: Sequence[Axis]) -> list[_Candidate]:
    """An initialiser at every point of the axes that have its name."""
    names = {label, *short_name(config.name).split("+")} if config.artifact is None else {label}
    mine = [axis for axis in grid if all(name.rpartition(".")[0] in names for name in axis.names)]
    out = []
    for point in points_of(mine):
        numbers = {name.rpartition(".")[2]: value for name, value in point.items()}
        out.append(_Candidate(*with_numbers(label, config, numbers), point))
    return out


def _with_control(candidate: _Candidate) -> list[_Candidate]:
    """An initialiser and its control; the default has none, because it changes nothing."""
    config = candidate.config
    if config.control or (config.artifact is None and config.name == "default"):
        return [candidate]
    control = config.model_copy(update={"control": "scale"})
    return [candidate, _Candidate(candidate.label + CONTROL, control, candidate.numbers)]


def _cells(vary: Sequence[Axis], epochs: tuple[int, ...]) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """The cells, and the training lengths, which are an axis of their own."""
    for name in (name for axis in vary for name in axis.names):
        if name.partition(".")[0] not in SECTIONS or "." not in name:
            known = ", ".join(f"{section}.*" for section in SECTIONS)
            hint = "; numbers of initialisers are varied by `grid`, the number of networks by `seeds`"
            raise UsageError(f"vary: expected a field of the recipe ({known}), found {name!r}{hint}")
    lengths = [axis for axis in vary if axis.names == (_LENGTH,)]
    if lengths and epochs:
        raise UsageError("vary: training.epochs is given as `epochs`, too; give one of them")
    for (length,) in (point for axis in lengths for point in axis.points):
        epochs = (*epochs, count(_LENGTH, length))
    return points_of([axis for axis in vary if axis not in lengths]), epochs


def _changed(recipe: Recipe, changes: dict[str, Any], cell: Mapping[str, Any]) -> Recipe:
    try:
        return recipe.model_copy(update={"bench": None}).replace(changes)
    except RecipeError as error:
        raise RecipeError(f"{error} (at {point_text(cell)})" if cell else str(error)) from None


def default_folder(source: Recipe | str | Path) -> Path:
    """Where results go unless told otherwise: `digits-convnext-bench` for the recipe `digits-convnext.toml`."""
    stem = f"{source.network.type}-{source.data.name}" if isinstance(source, Recipe) else Path(source).stem
    return Path(f"{_file_name(stem)}-bench")


def _file_name(text: str) -> str:
    """The text with hyphens for what a file's name should not have; long ones end in a hash."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if len(name) <= _LONGEST and not re.search(r"[*?!<>|:\\]|\[.*[*?]", text):  # of which several give one name
        return name
    return f"{name[: _LONGEST - 17]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
