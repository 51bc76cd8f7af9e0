"""`Recipe` and its sections [data] [training] [distillation] [init] [population] [bench]."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from weightscope._util.names import shortened, suggestion
from weightscope._util.plugins import is_reference, reference_to
from weightscope._util.sources import reason, recipe_path
from weightscope.data import sequence_config  # noqa: F401 - registered in SECTIONS
from weightscope.data.image_section import DataConfig
from weightscope.data.task import (
    Count,
    Fraction,
    FromList,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
    Task,
    Width,
    check_numbers,
)
from weightscope.errors import RecipeError, UsageError
from weightscope.recipe.networks import SECTIONS, NetworkField

_MOST_ERRORS = 3
MOST_NETWORKS = 10_000_000
Snapshot = Annotated[int, Field(ge=0, lt=2**31)]
FACTOR, PATIENCE = 0.1, 10  # those of torch.optim.lr_scheduler.ReduceLROnPlateau


_Model = TypeVar("_Model", bound=BaseModel)


# --- TOML text to values, and errors to messages ----------------------------------------------------------------------


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of TOML text; raises RecipeError."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise RecipeError(f"{where}: not TOML: {error}") from error


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file; raises RecipeError."""
    try:
        text = Path(path).read_text("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read {path}: expected a TOML file in UTF-8, found other bytes") from error
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {reason(error)}") from error
    return parse_toml(text, str(path))


def validated(model: type[_Model], values: Any, where: str) -> _Model:
    """The values as a model; RecipeError with the first few errors as `path: what is allowed, found what`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors: Sequence[Any] = error.errors()
    # which keys a section has may depend on its name, so they are not judged where that is wrong
    misnamed = {error["loc"][:-1] for error in errors if error["loc"][-1:] == ("name",)}
    told = [e for e in errors if e["type"] != "extra_forbidden" or e["loc"][:-1] not in misnamed]
    lines = [_explain(error, model, values) for error in told[:_MOST_ERRORS]]
    more = [f"and {len(told) - len(lines)} more"] * (len(told) > len(lines))
    raise RecipeError(f"{where}: {'; '.join(lines + more)}")


def _explain(error: Any, model: type[BaseModel], values: Any) -> str:
    parts, known = _path(error["loc"], model, values)
    path = shortened(".".join(parts)) or "(top level)"
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key, {suggestion(parts[-1], known)}"
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    said = isinstance(error["input"], dict) or (isinstance(error["input"], str) and repr(error["input"]) in message)
    found = "" if said else f", found {shortened(repr(error['input']))}"
    return f"{path}: {message[0].lower()}{message[1:]}{found}"


def _path(loc: Sequence[str | int], model: type[BaseModel], values: Any) -> tuple[list[str], list[str]]:
    """The path of an error in the recipe, without pydantic's tags of unions, and the keys of the section there."""
    models, path = [model], []
    known: list[str] = []
    for part in loc:
        models = [m.of(values) if hasattr(m, "of") else m for m in models]
        known = list(dict.fromkeys(key for m in models for key in m.model_fields))
        if isinstance(part, str) and part not in known and not (isinstance(values, Mapping) and part in values):
            continue
        path.append(str(part))
        if isinstance(part, int):
            continue
        values = values.get(part) if isinstance(values, Mapping) else None
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [inner for field in fields for inner in _models(field.annotation)]
    return path, known


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


# --- the sections -----------------------------------------------------------------------------------------------------


def _section(value: Any) -> Any:
    """The [data] section by its name; errors keep the paths of the fields."""
    return value if isinstance(value, Task) else Task.of(value).model_validate(value)


DataSection = Annotated[SerializeAsAny[Task], BeforeValidator(_section)]


class Range(Section):
    """A hyperparameter drawn log-uniformly from [low, high] for each network."""

    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _order(self) -> "Range":
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, found {self.low} > {self.high}")
        return self


def _swept(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    # one message for the union; pydantic's own would list the errors of every alternative
    try:
        return handler(value)
    except ValidationError as error:
        if isinstance(value, dict):
            raise
        raise ValueError("expected a finite number >= 0, a list of these, or {low, high}") from error


Swept = Annotated[
    Annotated[Range, Tag("range")]
    | Annotated[NonNegative, Tag("number")]
    | Annotated[Annotated[list[NonNegative], Field(min_length=1)], Tag("list")],
    Discriminator(lambda v: "range" if isinstance(v, dict | Range) else "list" if isinstance(v, list) else "number"),
    WrapValidator(_swept),
]


class TrainingConfig(Section):
    """AdamW with a learning-rate schedule.

    `learning_rate` and `weight_decay` may be a number, a list (network k takes entry k mod its length) or a range
    `{low, high}`, so a sweep is a population, too. `clip_norm = 0` disables clipping.

    `mixup` and `cutmix` are the parameters alpha of Beta(alpha, alpha), 0 for none. With both, each batch has CutMix
    with probability `mixup_switch` and mixup otherwise. `ema` is the decay of an exponential moving average of the
    weights, 0 for none; the averages are evaluated and stored in place of the weights.

    `schedule = "plateau"` multiplies a network's rate by `factor` whenever its loss on validation data has not improved
    for more than `patience` epochs, after the warm-up.

    `engine = "batched"` trains the networks of a tile together; "loop" trains any `nn.Module`, one network at a time.

    `kernels = "compiled"` selects kernels in C on a CPU, and `torch.compile` on a GPU; "torch" selects
    torch's. With "auto" compiled kernels are used where there is a C compiler (or Triton on a GPU) and they agree with
    torch's; a population records the choice, because they round differently.
    """

    added: ClassVar[tuple[str, ...]] = ("decay_exclude",)

    epochs: Count
    batch_size: Count = 64
    learning_rate: Swept = 0.01
    weight_decay: Swept = 0.01
    betas: Annotated[tuple[Fraction, Fraction], FromList] = (0.9, 0.999)
    schedule: Literal["triangular", "cosine", "constant", "plateau"] = "triangular"
    warmup: Fraction = 0.2
    factor: Annotated[float, Field(gt=0, lt=1)] = FACTOR
    patience: Annotated[int, Field(ge=0, lt=2**31)] = PATIENCE
    label_smoothing: Fraction = 0.0
    clip_norm: NonNegative = 1.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    mixup_switch: Share = 0.5
    ema: Fraction = 0.0
    frozen: Annotated[tuple[str, ...], FromList] = ()
    decay_exclude: Annotated[tuple[str, ...], FromList] = ()
    precision: Literal["float32", "bfloat16"] = "float32"
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    evaluate: Literal["end", "epoch"] = "epoch"
    engine: Literal["batched", "loop"] = "batched"

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingConfig":
        if self.engine == "loop" and (self.kernels == "compiled" or self.precision != "float32"):
            raise ValueError(
                "engine 'loop' runs plain PyTorch: expected kernels 'torch' or 'auto' and precision 'float32', found "
                f"{self.kernels!r} and {self.precision!r}"
            )
        if self.schedule != "plateau":
            if (self.factor, self.patience) != (FACTOR, PATIENCE):
                raise ValueError(f"factor and patience are of schedule 'plateau', found schedule {self.schedule!r}")
        elif self.evaluate != "epoch":
            raise ValueError(f"schedule 'plateau' needs evaluate = 'epoch', found {self.evaluate!r}")
        return self


class DistillationConfig(Section):
    """A term of the loss that compares all networks with one trained network, the teacher.

        logit     L = L_class + alpha KL(p_t || p_s)           p: probabilities; the teacher has the same classes
        feature   L = L_class + alpha |O_t - MLP(O_s)|         O: inputs of the classifier; mean over their entries

    `teacher` is a file or folder of weights, `hf://org/name`, or network k of a population, `"PATH.pop::k"`. It sees
    the same augmented images as the student, in evaluation mode. `network` describes it, with the keys of [network];
    without, it is the network of its population's recipe, or that of this recipe. Nothing is computed if `alpha = 0`.

    The MLP (linear, GELU, linear, as wide as O_t) belongs to each network, is trained with it, and is not stored.

    Source: selection paper, section 4.4, Eq. 1 and 2.
    """

    teacher: str
    kind: Literal["logit", "feature"] = "logit"
    alpha: NonNegative = 1.0
    network: NetworkField | None = None


class InitConfig(BaseModel):
    """An initialiser by name or reference, or `artifact = "FILE"`; other keys are its named parameters.

    With both, the named initialiser is applied to the network that the artifact's has initialised.
    `control = "scale"` replaces it by independent Gaussian entries with its mean and variance of each tensor,
    `control = "uncorrelated"` by those with its means and variances of every part (see `weightscope.init.controls`).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "default"
    artifact: str | None = None
    control: Literal["scale", "uncorrelated"] | None = None

    @model_validator(mode="after")
    def _numbers(self) -> "InitConfig":
        check_numbers(self.parameters, tables=True)
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The initialiser's named parameters."""
        return dict(self.model_extra or {})

    @classmethod
    def load(cls, path: str | Path) -> "InitConfig":
        """Read an initialiser and its parameters from a TOML file with the keys of an [init] table."""
        values = read_toml(path)
        if not values.keys() & {"name", "artifact"}:
            found = ", ".join(values) or "no keys"
            raise RecipeError(f"{path}: expected the keys of an [init] table, with `name` or `artifact`, found {found}")
        return validated(cls, values, str(path))


class PopulationConfig(Section):
    """The number of networks, the root seed, and the number of networks in a tile.

    Without `tile`, it is chosen when a population is created and then kept: 32 on a CPU, on a GPU as many as its free
    memory holds. `snapshots` are the epochs (of sequences, the steps) after which weights are stored too, 0 the start.
    """

    networks: Annotated[int, Field(ge=1, le=MOST_NETWORKS)] = 256
    seed: Seed = 0
    tile: Width | None = None
    snapshots: Annotated[tuple[Snapshot, ...], Field(min_length=1), FromList] | None = None

    @field_validator("snapshots")
    @classmethod
    def _ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise ValueError(f"expected ascending numbers, each once, found {list(value)}")
        return value


Values = dict[str, list[Any]]


class BenchConfig(Section):
    """A benchmark as data; every key is an argument of `bench`.

    `init` has texts such as `"mimetic_mlp(sigma=0.3)"` and tables such as `{ name = "mimetic_mlp", sigma = 0.3 }`.
    `vary` maps fields of the recipe to values, `grid` numbers of initialisers: `"mimetic_mlp.sigma" = [0.1, 0.2]`.
    `control` has the controls, `contrasts` the contrasts that are declared beforehand, each a list of terms:
    `[{ init = "mimetic_mlp" }, { init = "default", weight = -1 }]`. `metric` is one of the task's, such as
    `"test_loss"`.
    """

    added: ClassVar[tuple[str, ...]] = ("control", "contrasts")
    init: tuple[str | dict[str, Any], ...] = ()
    vary: Values = Field(default_factory=dict)
    grid: Values = Field(default_factory=dict)
    epochs: tuple[Count, ...] = ()
    seeds: Count | None = None
    seed: Seed | None = None
    frozen: str | None = None
    control: tuple[str, ...] = ()
    contrasts: list[list[dict[str, Any]]] = Field(default_factory=list)
    metric: str | None = None

    @field_validator("init", "epochs", "control", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str | int | dict) else value


# --- the recipe -------------------------------------------------------------------------------------------------------


class Recipe(Section):
    """A population as data, made by `Recipe.load(path)` or `Recipe.parse(text_or_dict)`.

    Example:
        >>> recipe = Recipe.load("populations/digits-convnext.toml")
        >>> recipe.replace({"population.networks": 64, "training.epochs": 3})
    """

    network: NetworkField
    data: DataSection
    training: TrainingConfig
    distillation: DistillationConfig | None = None
    init: tuple[InitConfig, ...] = (InitConfig(),)
    population: PopulationConfig = PopulationConfig()
    bench: BenchConfig | None = None

    @field_validator("init", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value in ([], ()):
            raise ValueError("expected at least one table")
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    @model_validator(mode="after")
    def _one_kind(self) -> "Recipe":
        """A network for what the task has, and nothing that is of other tasks only."""
        takes, has = self.network.takes, self.data.what
        if takes not in (None, has):
            fitting = [name for name, section in SECTIONS.items() if section.takes == has]
            named = ", ".join((*fitting, "'package.module:function'"))
            raise ValueError(
                f"network.type: {self.network.type} takes {takes}, {self.data.name} has {has}; expected one of "
                f"{named}, or data that have {takes}"
            )
        self.data.check(self)
        return self

    @property
    def images(self) -> DataConfig:
        """The section [data] of images; UsageError if it has sequences."""
        if not isinstance(self.data, DataConfig):
            raise UsageError(f"data.name: expected images, found {self.data.name}, which has {self.data.what}")
        return self.data

    def completed(self, root: str | Path | None = None) -> "Recipe":
        """The recipe with the sizes of its folder or the vocabulary of its text, so that networks are built without."""
        return self.model_copy(update={"data": self.data.completed(root)})

    @property
    def references(self) -> list[tuple[str, str]]:
        """The references to one's own code, with the section of each."""
        named = [("network", self.network.type), ("data", self.data.name)]
        if self.distillation is not None and self.distillation.network is not None:
            named.append(("distillation", self.distillation.network.type))
        named += [("init", part.strip()) for init in self.init for part in init.name.split("+")]
        return [(section, name) for section, name in named if is_reference(name)]

    @classmethod
    def parse(cls, source: str | Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """Parse TOML text or nested dictionaries.

        Callables are accepted as `network`, `data` and `init` (or as the `type` or `name` in them) and stored as
        references. RecipeError with the field's path, what is allowed and what was found; UsageError for a callable
        without a name, such as a lambda.
        """
        values = parse_toml(source, where) if isinstance(source, str) else _with_references(source)
        return validated(cls, values, where)

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe from a TOML file, or one of the package by its name (`weightscope list recipes`).

        RecipeError if the file is missing or no valid recipe, or no recipe has this name.

        Example:
            >>> Recipe.load("digits-convnext").population.networks
            384
        """
        return cls.parse(read_toml(recipe_path(path)), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries of JSON types, defaults included; `Recipe.parse` is the inverse."""
        return self.model_dump(mode="json", exclude_none=True)

    def replace(self, changes: dict[str, Any]) -> "Recipe":
        """A copy with some fields changed, each given by its path: `{"training.epochs": 3, "init": my_initialiser}`."""
        values = self.to_dict()
        for path, value in changes.items():
            *parents, last = path.split(".")
            section = values
            for depth, key in enumerate(parents, 1):
                section = section.setdefault(key, {})
                if not isinstance(section, dict):
                    whole, found = ".".join(parents[:depth]), shortened(repr(section))
                    raise RecipeError(f"{path}: expected a table at `{whole}`, found {found}; replace it as a whole")
            section[last] = value
        return Recipe.parse(values)

    def differences(self, other: "Recipe") -> list[str]:
        """One line `path: mine -> theirs` for each field in which two recipes differ."""
        mine, theirs = _flatten(self.to_dict()), _flatten(other.to_dict())
        pairs = ((path, mine.get(path, "absent"), theirs.get(path, "absent")) for path in sorted({*mine, *theirs}))
        return [f"{path}: {here} -> {there}" for path, here, there in pairs if here != there]


def _with_references(values: Any) -> Any:
    """The values of a recipe with callables replaced by references."""
    keys = {"network": "type", "data": "name", "init": "name"}

    def named(value: Any, key: str) -> Any:
        if isinstance(value, list | tuple):
            return [named(item, key) for item in value]
        if callable(value):
            return {key: reference_to(value)}
        if isinstance(value, Mapping) and callable(value.get(key)):
            return {**value, key: reference_to(value[key])}
        return value

    if not isinstance(values, Mapping):
        return values
    return {section: named(value, keys[section]) if section in keys else value for section, value in values.items()}


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    parts = (_flatten(inner, f"{path}.{key}" if path else key) for key, inner in value.items())
    return {key: inner for part in parts for key, inner in part.items()}
