"""What a benchmark compares: cells, combinations of fields of a recipe, and in each cell arms of initialisers."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from weightscope._util.arms import CONTROLS, FROZEN, epochs_text, point_text, value_text
from weightscope._util.checks import choice, count
from weightscope._util.plugins import is_reference
from weightscope.errors import RecipeError, UsageError
from weightscope.init.named import Init, init_table, labelled, numbers_text, short_name
from weightscope.recipe import InitConfig, Recipe

SECTIONS = ("network", "data", "training", "distillation")  # whose fields may vary

_LONGEST = 120  # characters of a folder's name
_LENGTH = "training.epochs"


# --- what varies ------------------------------------------------------------------------------------------------------


def combinations_of(given: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the values of some names, as name -> value; names joined by commas vary together.

    Example:
        >>> combinations_of({"network.width,network.heads": [[96, 3], [192, 6]]})
        [{'network.width': 96, 'network.heads': 3}, {'network.width': 192, 'network.heads': 6}]
    """
    axes = []
    for names, values in given.items():
        keys = [name.strip() for name in names.split(",")]
        points = [values] if isinstance(values, str) else [[value] if len(keys) == 1 else value for value in values]
        if not points or not all(isinstance(point, list | tuple) and len(point) == len(keys) for point in points):
            several = f", each a list of {len(keys)} values," if len(keys) > 1 else ""
            raise UsageError(f"{names}: expected a list of values{several} to vary it, found {values!r}")
        axes.append([dict(zip(keys, point, strict=True)) for point in points])
    return [{name: value for point in chosen for name, value in point.items()} for chosen in product(*axes)]


# --- arms -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One initialiser in one cell at one training length."""

    init: str  # the name of the initialiser or function or the file's stem, perhaps with one of `CONTROLS` and `FROZEN`
    epochs: int  # a full schedule
    recipe: Recipe  # what `collect` trains
    cell: Mapping[str, Any] = field(default_factory=dict)  # the recipe's fields that vary, and their values here
    numbers: Mapping[str, Any] = field(default_factory=dict)  # the initialiser's: `{"mimetic_mlp.sigma": 0.2}`

    @property
    def cell_key(self) -> str:
        """The cell as text, equal for equal cells."""
        return json.dumps(dict(self.cell), sort_keys=True)

    @property
    def title(self) -> str:
        """As tables call it, without slashes within a name: `kernel_size=3/mlp (scale only), 1 epoch`."""
        names = (point_text(self.cell), f"{self.init}, {epochs_text(self.epochs)}")
        return "/".join(name.replace("/", "-") for name in names if name)

    @property
    def folder(self) -> str:
        """Path of the arm's population below the folder of all."""
        name = f"{_file_name(f'{self.init}-{self.epochs}-epochs')}.pop"
        parts = [_file_name(f"{key}-{value_text(value)}") for key, value in self.cell.items()]
        return f"{_file_name('_'.join(parts))}/{name}" if parts else name


def plan_arms(
    recipe: Recipe,
    inits: Sequence[Init] | Mapping[str, Init],
    *,
    epochs: Sequence[int] = (),
    seeds: int | None = None,
    frozen: str | None = None,
    control: str | Sequence[str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> list[Arm]:
    """The arms of a benchmark: cell by cell, length by length, initialiser by initialiser.

    Args:
        recipe: network, data and training; its own [init] is not used.
        inits: registered names (several joined by `+` are applied in turn; numbers in parentheses), callables
            `f(module, *, generator) -> module`, references `"package.module:function"`, artifacts
            (.safetensors; an initialiser on top of one is joined by `+`: `"fitted.safetensors+mimetic_attention"`),
            and [init] tables, as `InitConfig`, mappings or .toml files. Or any of these by the labels they are to have.
        epochs: training lengths; the recipe's if empty.
        seeds: networks in each arm, at least 2; the recipe's if None.
        frozen: pattern of tensors; if given, each arm is also trained with these frozen at their initial values.
        control: controls that every initialiser but the default gets: "scale" for independent Gaussian entries with its
            mean and variance of each tensor, "uncorrelated" for its means and variances of every part without its
            correlations; see `weightscope.init.controls`.
        vary: fields of [network], [data], [training] and [distillation] and their values,
            `{"network.kernel_size": [3, 7]}`; a cell is a combination of them. Names joined by commas vary together:
            `{"network.width,network.heads": [[96, 3]]}`. As in TOML, which has no None, "all" and "none" are None in
            fields that are not text.
        grid: numbers of initialisers and their values, `{"mimetic_mlp.sigma": [0.1, 0.2]}`: each initialiser with this
            name is compared with each value.
    """
    candidates = _candidates(inits, grid or {}, [control] if isinstance(control, str) else control)
    networks = recipe.population.networks if seeds is None else count("seeds", seeds)
    if networks < 2:
        raise UsageError(f"seeds: a paired comparison needs at least 2 seeds, found {networks}")
    cells, lengths = _cells(recipe, vary or {}, tuple(epochs))
    variants = [""] if frozen is None else ["", FROZEN]
    by_folder: dict[str, Arm] = {}
    for cell, length, suffix in product(cells, lengths or (recipe.training.epochs,), variants):
        for label, config, numbers in candidates:
            changes = {**cell, _LENGTH: length, "population.networks": networks, "population.snapshots": None}
            changes["init"] = config.model_dump(exclude_none=True)
            if suffix:
                changes["training.frozen"] = sorted({*recipe.training.frozen, str(frozen)})
            try:
                changed = recipe.model_copy(update={"bench": None}).replace(changes)
            except RecipeError as error:
                raise RecipeError(f"{error} (at {point_text(cell)})" if cell else str(error)) from None
            arm = Arm(label + suffix, length, changed, cell, numbers)
            if (other := by_folder.setdefault(arm.folder, arm)) is not arm:
                raise UsageError(
                    f"{other.init} and {arm.init}: expected arms with folders of their own, found {arm.folder} for "
                    "both; give one a name (name:initialiser)"
                )
    return list(by_folder.values())


_Candidate = tuple[str, InitConfig, Mapping[str, Any]]
"""An initialiser's label and table, and the numbers of its grid."""


def _with_module(label: str, config: InitConfig) -> str:
    """The label of a function that another module has, too: `package.module:function`."""
    numbers = numbers_text(config.parameters)
    named = is_reference(config.name) and label == short_name(config.name) + numbers
    return config.name + numbers if named else label


def _candidates(
    inits: Sequence[Init] | Mapping[str, Init], grid: Mapping[str, Sequence[Any]], controls: Sequence[str]
) -> list[_Candidate]:
    if isinstance(inits, Mapping):
        given = [(label, labelled(init)[1]) for label, init in inits.items()]
    else:
        given = [labelled(init) for init in inits]
        times = Counter(label for label, _ in given)
        given = [(_with_module(*one) if times[one[0]] > 1 else one[0], one[1]) for one in given]
    found = [candidate for pair in given for candidate in _with_grid(*pair, grid)]
    for names in grid:
        if not any(names.split(",")[0].strip() in numbers for _, _, numbers in found):
            raise UsageError(
                f"grid: {names}: expected the name of an initialiser and one of its numbers, as in "
                f"mimetic_mlp.sigma, found none in {', '.join(label for label, _ in given) or 'no initialisers'}"
            )
    repeated = [label for label, times in Counter(label for label, _, _ in found).items() if times > 1]
    if not found or repeated:
        what = f"{', '.join(repeated)} more than once" if repeated else "none"
        raise UsageError(
            f"inits: expected initialisers with different names, found {what}; in Python, a mapping names them"
        )
    for control in controls:
        choice("control", control, CONTROLS)
    out = []
    for label, config, numbers in found:
        out.append((label, config, numbers))
        if not config.control and (config.artifact is not None or config.name != "default"):  # which changes nothing
            for control in dict.fromkeys(controls):
                out.append((label + CONTROLS[control].suffix, config.model_copy(update={"control": control}), numbers))
    return out


def _with_grid(label: str, config: InitConfig, grid: Mapping[str, Sequence[Any]]) -> list[_Candidate]:
    """An initialiser with every combination of the numbers of the grid that have its name."""
    names = {label, *short_name(config.name).split("+")} if config.artifact is None else {label}
    mine = {key: grid[key] for key in grid if all(n.strip().rpartition(".")[0] in names for n in key.split(","))}
    out: list[_Candidate] = []
    own = config.artifact is None and label == labelled(config)[0]
    for point in combinations_of(mine):
        numbers = {name.rpartition(".")[2]: value for name, value in point.items()}
        changed = init_table({**config.model_dump(exclude_none=True), **numbers}) if numbers else config
        out.append((labelled(changed)[0] if own else label + numbers_text(numbers), changed, point))
    return out


def _cells(
    recipe: Recipe, vary: Mapping[str, Sequence[Any]], epochs: tuple[int, ...]
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """The cells, and the training lengths, which are not a part of them."""
    lengths = tuple(count(_LENGTH, value) for value in vary.get(_LENGTH, ()))
    if lengths and epochs:
        raise UsageError("vary: training.epochs is given as `epochs`, too; give one of them")
    cells = combinations_of({names: values for names, values in vary.items() if names != _LENGTH})
    for name in cells[0]:
        if name.partition(".")[0] not in SECTIONS or "." not in name:
            known = ", ".join(f"{section}.*" for section in SECTIONS)
            hint = "; numbers of initialisers are varied by `grid`, the number of networks by `seeds`"
            raise UsageError(f"vary: expected a field of the recipe ({known}), found {name!r}{hint}")
    return [{name: _limit(recipe, name, value) for name, value in cell.items()} for cell in cells], lengths or epochs


def _limit(recipe: Recipe, name: str, value: Any) -> Any:
    """None for "all" and "none", unless the field has texts, as `network.residual`."""
    if value not in ("all", "none"):
        return value
    now: Any = recipe
    for part in name.split("."):
        now = getattr(now, part, None)
    return value if isinstance(now, str) else None


def default_folder(source: Recipe | str | Path) -> Path:
    """Where results go unless told otherwise: `digits-convnext-bench` for the recipe `digits-convnext.toml`."""
    stem = f"{source.network.type}-{source.data.name}" if isinstance(source, Recipe) else Path(source).stem
    return Path(f"{_file_name(stem)}-bench")


def _file_name(text: str) -> str:
    """The text with hyphens for what a file's name should not have; long ones end in a hash."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if len(name) <= _LONGEST and not re.search(r"[*?!<>|:\\]|\[.*[*?]", text):  # several of these give one name
        return name
    return f"{name[: _LONGEST - 17]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
