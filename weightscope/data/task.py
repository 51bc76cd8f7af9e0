"""`Section`, the base of a recipe's sections, and `Task`, the section [data]: what networks are trained on, and what is
asked of them.

Another kind of task is one file: a subclass that is registered in `SECTIONS`, the source that it reads, and its
batches. Does not import torch.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from weightscope._util.names import shortened
from weightscope._util.plugins import Registry, member
from weightscope.data.metrics import Metric

if TYPE_CHECKING:
    from torch import Generator, Tensor

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Far beyond what is used, so that a typing error is an error at once and not hours later, out of memory.
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=1, le=2**12)]
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Marks a tuple, which TOML writes as a list."""


class Section(BaseModel):
    """A section without unknown keys; immutable.

    Fields that are `added` after populations were made are left out of what is written while they have their default:
    a population is identified by its written recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    added: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for name in self.added:
            if getattr(self, name) == type(self).model_fields[name].default:
                values.pop(name, None)
        return values


def check_numbers(values: Mapping[str, Any], *, tables: bool = False) -> None:
    """Raise ValueError unless the values are what TOML can hold, and finite."""
    for key, value in values.items():
        if isinstance(value, list | tuple):
            check_numbers({f"{key}[{i}]": item for i, item in enumerate(value)}, tables=tables)
        elif isinstance(value, dict) and tables:
            check_numbers({f"{key}.{name}": item for name, item in value.items()}, tables=True)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, found {value}")
        elif not isinstance(value, int | float | str):
            raise ValueError(
                f"{key}: expected a number, a text, true, false, or a list of these, found {shortened(repr(value))}"
            )


class DataSource(Protocol):
    """What a task reads: `Dataset` of images, `SequenceSource` of sequences."""

    @property
    def examples(self) -> int:
        """The number of examples of an epoch."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the data."""

    @property
    def nbytes(self) -> int:
        """The bytes that training keeps on the device."""

    def shortened(self, train: int) -> "DataSource":
        """The same with fewer examples in an epoch."""


def hash_of(tensors: "Iterable[Tensor]", about: str = "") -> str:
    """The first 16 hex digits of the SHA-256 of a text, and of shapes and entries of tensors."""
    digest = hashlib.sha256(about.encode())
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


class Task(Section):
    """What networks are trained on."""

    what: ClassVar[str]  # the inputs in one word, for messages
    input_axes: ClassVar[int]  # number of axes of one input
    stacked: ClassVar[bool] = True  # whether T networks run by `torch.vmap`, or else on the channels of one network
    causal: ClassVar[bool] = False  # whether the outputs at a place of the input must not depend on later places
    snapshot_unit: ClassVar[str] = "epoch"  # the unit of training in which `population.snapshots` counts, or "step"
    source: ClassVar[str]  # "module:function", called with the section and a folder, reads the data
    batches: ClassVar[str]  # "module:class" of the `Batches` (`weightscope.training.engine`)

    name: str  # the task or the data set

    @classmethod
    def of(cls, value: Any) -> "type[Task]":
        """The class of a section by its name, the one for images if the name is not registered."""
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        return SECTIONS[name if isinstance(name, str) and name in SECTIONS else IMAGES]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What networks report, the primary metric first; `test_loss` is one of them."""
        raise NotImplementedError

    def load(self, root: str | Path | None = None) -> Any:
        """Read the data; a folder is searched first."""
        return member(self.source)(self, root)

    def sizes(self) -> dict[str, int]:
        """The keyword arguments of a network's factory, in the order in which users' factories take them."""
        raise NotImplementedError

    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input with which a network is checked."""
        raise NotImplementedError

    def output_shape(self) -> tuple[int, ...]:
        """The shape of the outputs of a network for an input of `input_shape`."""
        raise NotImplementedError

    def inputs(self, generator: "Generator", *batch: int) -> "Tensor":
        """Random inputs (*batch, *input_shape)."""
        import torch

        return torch.randn((*batch, *self.input_shape()), generator=generator)

    def completed(self, root: str | Path | None = None) -> "Task":
        """The section with the sizes that only the data know, so that networks are built without them."""
        return self

    def absolute(self, root: str | Path | None = None) -> "Task":
        """The section with absolute paths, for a worker that runs in another folder."""
        return self

    def check(self, recipe: Any) -> None:
        """Raise ValueError for what of a recipe does not go with this task."""

    def chance(self, metric: Metric, root: str | Path | None = None) -> tuple[float, int] | None:
        """The chance level c < 1 of an accuracy, and the number of examples that it is taken over.

        None if the metric has none, the data are no longer there, or every answer is the same.
        """
        return None

    def validating(self, count: int | None, root: str | Path | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """Changes of a recipe with which `count` examples that are not test examples are evaluated, and the numbers of
        `train` and `validation` examples.
        """
        raise NotImplementedError


IMAGES = "images"
SECTIONS: Registry[type[Task]] = Registry("task")
"""Sections by their name; every other name is one of a data set of images."""
