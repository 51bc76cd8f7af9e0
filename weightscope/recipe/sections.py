"""The sections [data] [training] [distillation] [init] [population]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from weightscope._util.names import unknown
from weightscope._util.plugins import is_reference
from weightscope.data.catalog import DATASETS, dataset_info
from weightscope.data.config import FOLDER, AugmentConfig, SourceConfig
from weightscope.data.metrics import ACCURACY, LOSS, Metric
from weightscope.data.sequence_config import (
    MARKOV,
    SEQUENCE_NAMES,
    TASK_SIZES,
    TEXT,
    MarkovConfig,
    TaskConfig,
    TextConfig,
)
from weightscope.errors import RecipeError
from weightscope.recipe.base import Count, Fraction, NonNegative, Positive, Section, Width, check_numbers
from weightscope.recipe.networks import NetworkConfig
from weightscope.recipe.parsing import explain, read_toml

MOST_NETWORKS = 10_000_000
FACTOR, PATIENCE = 0.1, 10  # those of torch.optim.lr_scheduler.ReduceLROnPlateau


class DataConfig(SourceConfig):
    """The data set by name or reference; `train` and `test` limit the number of images.

    `size` resizes the images. With `name = "folder"` they are those of `path`, see `SourceConfig`. With `validation`,
    the last so many training images are not trained on; networks are evaluated on them in place of the test images.
    """

    train: Count | None = None
    test: Count | None = None
    validation: Count | None = None
    augment: AugmentConfig = AugmentConfig()

    @property
    def counts(self) -> dict[str, int | None]:
        """The arguments `train`, `test` and `validation` of `weightscope.data.load`."""
        return {"train": self.train, "test": self.test, "validation": self.validation}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What networks report about these data, the primary metric first."""
        return ACCURACY, LOSS

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if not is_reference(value) and value not in DATASETS:
            names = (*DATASETS, *SEQUENCE_NAMES)
            raise ValueError(unknown("data set", value, names, "'package.module:name' for one of your own"))
        return value

    @model_validator(mode="after")
    def _sizes(self) -> "DataConfig":
        if is_reference(self.name) or self.name == FOLDER:
            return self
        info = dataset_info(self.name)
        for field, there in (("train", info.train), ("test", info.test)):
            wanted = getattr(self, field)
            if wanted is not None and wanted > there:
                raise ValueError(f"{field} may be at most {there} for {self.name}, found {wanted}")
        left = (info.train if self.train is None else self.train) - 1
        if self.validation is not None and self.validation > left:
            raise ValueError(f"validation may be at most {left} of the training images, found {self.validation}")
        return self


def _kind_of_data(value: Any) -> str:
    """The tag of a [data] section, for the union's discriminator."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return name if name in (TEXT, MARKOV) else "task" if name in TASK_SIZES else "images"


DataSection = Annotated[
    Annotated[DataConfig, Tag("images")]
    | Annotated[TaskConfig, Tag("task")]
    | Annotated[TextConfig, Tag("text")]
    | Annotated[MarkovConfig, Tag("markov")],
    Discriminator(_kind_of_data),
]


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
    """One message for the union; pydantic's own would list the errors of every alternative."""
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

    `kernels = "compiled"` selects kernels in C on a CPU, and Triton kernels with CUDA graphs on a GPU; "torch" selects
    torch's. With "auto" compiled kernels are used where there is a C compiler (or Triton on a GPU) and they agree with
    torch's; a population records the choice, because they round differently.
    """

    epochs: Count
    batch_size: Count = 64
    learning_rate: Swept = 0.01
    weight_decay: Swept = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    schedule: Literal["triangular", "cosine", "constant", "plateau"] = "triangular"
    warmup: Fraction = 0.2
    factor: Annotated[float, Field(gt=0, lt=1)] = FACTOR
    patience: Annotated[int, Field(ge=0, lt=2**31)] = PATIENCE
    label_smoothing: Fraction = 0.0
    clip_norm: NonNegative = 1.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    mixup_switch: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    ema: Fraction = 0.0
    frozen: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16"] = "float32"
    kernels: Literal["auto", "torch", "compiled"] = "auto"
    evaluate: Literal["end", "epoch"] = "epoch"
    engine: Literal["batched", "loop"] = "batched"

    @model_validator(mode="after")
    def _plain_loop(self) -> "TrainingConfig":
        if self.engine == "loop" and (self.kernels == "compiled" or self.precision != "float32"):
            raise ValueError(
                "engine 'loop' runs plain PyTorch: expected kernels 'torch' or 'auto' and precision 'float32', found "
                f"{self.kernels!r} and {self.precision!r}"
            )
        return self

    @model_validator(mode="after")
    def _plateau(self) -> "TrainingConfig":
        if self.schedule != "plateau":
            if (self.factor, self.patience) != (FACTOR, PATIENCE):
                raise ValueError(f"factor and patience are of schedule 'plateau', found schedule {self.schedule!r}")
        elif self.evaluate != "epoch":
            raise ValueError(f"schedule 'plateau' needs evaluate = 'epoch', found {self.evaluate!r}")
        return self

    @field_validator("betas", "frozen", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


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
    network: NetworkConfig | None = None


class InitConfig(BaseModel):
    """An initialiser by name or reference, or `artifact = "FILE"`; other keys are its named parameters.

    With both, the named initialiser is applied to the network that the artifact's has initialised.
    `control = "scale"` replaces it by independent Gaussian entries with its mean and variance of each tensor.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "default"
    artifact: str | None = None
    control: Literal["scale"] | None = None

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
        """Read an initialiser and its parameters from a TOML file with the keys of an [init] table.

        Raises:
            RecipeError: if the file cannot be read or is invalid.
        """
        values = read_toml(path)
        if not values.keys() & {"name", "artifact"}:
            found = ", ".join(values) or "no keys"
            raise RecipeError(f"{path}: expected the keys of an [init] table, with `name` or `artifact`, found {found}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{path}: {explain(error.errors(), cls)}") from None


class PopulationConfig(Section):
    """The number of networks, the root seed, and the number of networks in a tile.

    Without `tile`, it is chosen when a population is created and then kept: 32 on a CPU, on a GPU as many as its free
    memory holds.
    """

    networks: Annotated[int, Field(ge=1, le=MOST_NETWORKS)] = 256
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tile: Width | None = None
