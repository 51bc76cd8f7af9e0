"""What a benchmark compares: cells of recipes along axes, and in each cell arms of initialisers.

Initialisers are written as names, numbers in parentheses, files or functions; axes are fields of a recipe and numbers
of initialisers, and the values that each takes.
"""

import ast
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from weightscope._util.arms import CONTROLS, FROZEN, epochs_text, point_text, value_text
from weightscope._util.checks import choice, count
from weightscope._util.names import parts_of, shortened
from weightscope._util.plugins import name_of, reference_to
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe import InitConfig, Recipe
from weightscope.recipe.recipe import validated

SECTIONS = ("network", "data", "training", "distillation")  # whose fields may vary
Init = str | Path | InitConfig | Callable[..., Any] | Mapping[str, Any]

_MOST_VALUES = 10_000  # of one axis
_MOST_POINTS = 100_000  # of all axes together
_EVERYTHING = ("all", "none")
_FORM = re.compile(r"\s*([\w.:-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_LONGEST = 120  # characters of a folder's name
_LENGTH = "training.epochs"


# --- axes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Names that vary together, such as `("network.kernel_size",)`, with a tuple of values for each point."""

    names: tuple[str, ...]
    points: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, names: str, values: str | Sequence[Any]) -> "Axis":
        """An axis from its names, joined by commas, and its different values.

        Values are a list, of lists if there are several names; or text as on the command line, see `parse`.
        """
        if isinstance(values, str):
            return cls.parse(f"{names}={values}")
        keys = tuple(name.strip() for name in names.split(","))
        points = tuple(tuple(v) if len(keys) > 1 and isinstance(v, list | tuple) else (v,) for v in values)
        for point in points:
            if len(point) != len(keys):
                raise UsageError(f"{names}: expected {len(keys)} values at each point, found {_text(point)}")
        texts = [_text(point) for point in points]
        if not points or len(set(texts)) < len(points):
            again = sorted({text for text in texts if texts.count(text) > 1})
            raise UsageError(
                f"{names}: expected different values, found {', '.join(again) + ' twice' if again else 'none'}"
            )
        return cls(keys, points)

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """An axis from `NAME=VALUE,VALUE,...`, `NAME=START:STOP:STEP` or `NAME,NAME=VALUE/VALUE,...`.

        A value is a number, true, false, a list in brackets, `all` or `none` for no limit, or text. A range includes
        both ends.

        Example:
            >>> Axis.parse("mimetic_attention.alpha_qk=0:1:0.5").points
            ((0.0,), (0.5,), (1.0,))
        """
        names, equals, values = text.partition("=")
        if not equals or not names.strip() or not values.strip():
            raise UsageError(f"expected NAME=VALUE,VALUE,... or NAME=START:STOP:STEP, found {text!r}")
        several = "," in names
        points: list[Any] = []
        for item in re.split(r",(?![^\[]*\])", values):
            if several:
                points.append([_value(part) for part in item.split("/")])
            else:
                points += _range(item, names) or [_value(item)]
        return cls.of(names, points)


def axes_of(given: Mapping[str, str | Sequence[Any]] | Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of a mapping from names to values, or axes themselves."""
    axes = tuple(Axis.of(n, v) for n, v in given.items()) if isinstance(given, Mapping) else tuple(given)
    names = [name for axis in axes for name in axis.names]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{repeated[0]}: expected each name in one axis, found it in several")
    return axes


def points_of(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """All combinations of the axes' points, as name -> value; one empty combination without axes."""
    if (found := prod(len(axis.points) for axis in axes)) > _MOST_POINTS:
        raise UsageError(f"expected at most {_MOST_POINTS:,} combinations of what varies, found {found:,}")
    each = [[dict(zip(axis.names, point, strict=True)) for point in axis.points] for axis in axes]
    return [{name: value for point in chosen for name, value in point.items()} for chosen in product(*each)]


def _text(point: Sequence[Any]) -> str:
    return "/".join(map(value_text, point))


def _value(text: str) -> Any:
    text = text.strip()
    if text in _EVERYTHING:
        return None
    try:
        return json.loads(text)
    except ValueError:
        if not text:
            raise UsageError("expected a value between the commas, found none") from None
        return float(text) if re.fullmatch(r"[+-]?\.\d+", text) else text


def _range(text: str, names: str) -> list[float] | None:
    """The numbers of `START:STOP:STEP`, both ends included; None if the text is not a range."""
    ends = text.split(":")
    if len(ends) != 3:
        return None
    try:
        start, stop, step = map(float, ends)
        count = (stop - start) / step
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{names}: expected START:STOP:STEP with a step that is not 0, found {text!r}") from None
    if not 0 <= count < _MOST_VALUES or abs(count - round(count)) > 1e-6:
        raise UsageError(
            f"{names}: expected STEP to lead from START to STOP in at most {_MOST_VALUES} steps, found {text!r}"
        )
    numbers = [float(f"{start + i * step:.12g}") for i in range(round(count) + 1)]
    whole = all("." not in end and "e" not in end.lower() for end in ends)
    return [int(n) for n in numbers] if whole else numbers


# --- initialisers -----------------------------------------------------------------------------------------------------


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
    for part in parts_of(text):
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
        raise UsageError(f"--init: expected NUMBER=VALUE, ... in the parentheses, found {text!r}") from None


def _literal(node: ast.expr) -> Any:
    """A value, where `true` and `false` may be spelt as in recipes."""
    if isinstance(node, ast.Name) and node.id in ("true", "false"):
        return node.id == "true"
    return ast.literal_eval(node)


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
    def place(self) -> str:
        """The cell as text, equal for equal cells."""
        return json.dumps(dict(self.cell), sort_keys=True)

    @property
    def title(self) -> str:
        """As tables call it, without slashes within a name: `kernel_size=3/mlp (scale only), 1 epoch`."""
        names = (point_text(self.cell), f"{self.init}, {epochs_text(self.epochs)}")
        return "/".join(name.replace("/", "-") for name in names if name)

    @property
    def kind(self) -> str:
        """The initialiser without its numbers."""
        config = self.recipe.init[0]
        return f"{config.artifact or config.name} {config.control}"

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
    vary: Mapping[str, Any] | Sequence[Axis] = (),
    grid: Mapping[str, Any] | Sequence[Axis] = (),
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
            `{"network.width,network.heads": [[96, 3]]}`.
        grid: numbers of initialisers and their values, `{"mimetic_mlp.sigma": [0.1, 0.2]}`: each initialiser with this
            name is compared with each value. Ranges may be given as text, `"0:1:0.1"`.
    """
    candidates = _candidates(inits, axes_of(grid or ()), [control] if isinstance(control, str) else control)
    networks = recipe.population.networks if seeds is None else count("seeds", seeds)
    if networks < 2:
        raise UsageError(f"seeds: a paired comparison needs at least 2 seeds, found {networks}")
    cells, lengths = _cells(axes_of(vary or ()), tuple(epochs))
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


def _candidates(
    inits: Sequence[Init] | Mapping[str, Init], grid: Sequence[Axis], controls: Sequence[str]
) -> list[_Candidate]:
    if isinstance(inits, Mapping):
        given = [(label, labelled(init)[1]) for label, init in inits.items()]
    else:
        given = [labelled(init) for init in inits]
    found = [candidate for pair in given for candidate in _with_grid(*pair, grid)]
    for axis in grid:
        if not any(set(axis.names) <= set(numbers) for _, _, numbers in found):
            raise UsageError(
                f"grid: {', '.join(axis.names)}: expected the name of an initialiser and one of its numbers, as in "
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


def _with_grid(label: str, config: InitConfig, grid: Sequence[Axis]) -> list[_Candidate]:
    """An initialiser at every point of the axes that have its name."""
    names = {label, *short_name(config.name).split("+")} if config.artifact is None else {label}
    mine = [axis for axis in grid if all(name.rpartition(".")[0] in names for name in axis.names)]
    out: list[_Candidate] = []
    own = config.artifact is None and label == labelled(config)[0]
    for point in points_of(mine):
        numbers = {name.rpartition(".")[2]: value for name, value in point.items()}
        changed = init_table({**config.model_dump(exclude_none=True), **numbers}) if numbers else config
        out.append((labelled(changed)[0] if own else label + numbers_text(numbers), changed, point))
    return out


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
