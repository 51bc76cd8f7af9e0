"""The settings of sequences, as recipes hold them: tasks and their sizes, text, and a Markov source.

Does not import torch. The `length` of a task counts the tokens of the string before the separator; its vocabulary
includes the separator.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from weightscope.data.metrics import ACCURACY, BITS, LOSS, PERPLEXITY, Metric, accuracy_at
from weightscope.data.registry import first_found, search_folders
from weightscope.data.task import SECTIONS, Count, FromList, Positive, Seed, Task

if TYPE_CHECKING:
    from torch import Generator, Tensor


class TaskSize(NamedTuple):
    """Sizes of a task as functions of the string's length."""

    answer: Callable[[int], int] = lambda length: length  # tokens of the answer
    vocabulary: Callable[[int], int] = lambda length: 3  # the fewest, with the separator, whose answers differ
    step: int = 1  # what the length is a multiple of


TASK_SIZES = {
    "copy": TaskSize(),
    "copy_reversed": TaskSize(),
    "sort": TaskSize(vocabulary=lambda length: length + 2),
    "associative_recall": TaskSize(vocabulary=lambda length: max(length + 1, 4), step=2),
    "selective_copy": TaskSize(lambda length: -(-length // 4), lambda length: 4),
}


def sequence_length(name: str, length: int) -> int:
    """n, the tokens that a network sees: the string, the separator, and the answer but for its last token."""
    return length + TASK_SIZES[name].answer(length)


Vocabulary = Annotated[int, Field(ge=2, le=2**24)]
Part = Literal["valid", "test"]
TEXT, MARKOV = "text", "markov"
_CHECKED_TOKENS = 16  # of the sequences with which networks are checked


class SequenceConfig(Task):
    """What all sources of sequences share.

    Each network draws its `train` sequences of an epoch from its own stream, new ones in each epoch. The `test`
    held-out sequences are the same for all networks and all populations; the parts "valid" and
    "test" have different ones.
    """

    what: ClassVar[str] = "sequences"
    input_axes: ClassVar[int] = 1
    causal: ClassVar[bool] = True
    snapshot_unit: ClassVar[str] = "step"
    source: ClassVar[str] = "weightscope.data.sequences:SequenceSource.of"
    batches: ClassVar[str] = "weightscope.training.sequence_task:SequenceBatches"

    length: Count  # of the training sequences; for tasks, of the string before the separator
    train: Count | None = None
    test: Count | None = None
    held_out: Part = "test"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What networks report, the primary metric first: of text and of the Markov source bits per token."""
        return BITS, LOSS, PERPLEXITY, ACCURACY

    @property
    def trained(self) -> int:
        """n, the tokens of a training sequence that a network sees."""
        return self.length

    @property
    def longest(self) -> int:
        """The most tokens of a sequence that a network sees."""
        return self.length

    def sizes(self) -> dict[str, int]:
        """`vocabulary`; of a text whose vocabulary is not recorded, the files are read."""
        recorded = getattr(self, "vocabulary", None)
        return {"vocabulary": self.load().corpus.vocabulary if recorded is None else int(recorded)}

    def input_shape(self) -> tuple[int, ...]:
        """(n,), of a short sequence."""
        return (min(self.longest, _CHECKED_TOKENS),)

    def output_shape(self) -> tuple[int, ...]:
        """(n, v)."""
        return *self.input_shape(), self.sizes()["vocabulary"]

    def inputs(self, generator: "Generator", *batch: int) -> "Tensor":
        """Random tokens (*batch, n)."""
        import torch

        return torch.randint(self.sizes()["vocabulary"], (*batch, *self.input_shape()), generator=generator)

    def check(self, recipe: Any) -> None:
        """Refuse what images have and sequences do not, and sequences that are longer than a network's positions."""
        training = recipe.training
        for field in ("mixup", "cutmix", "precision"):
            if getattr(training, field) != type(training).model_fields[field].default:
                raise ValueError(f"training.{field} applies to images only; remove it for {self.name}")
        if recipe.distillation is not None:
            raise ValueError(f"distillation applies to images only; remove it for {self.name}")
        limit = recipe.network.longest
        if limit is not None and self.longest > limit:
            raise ValueError(
                f"network.context: expected at least {self.longest}, the tokens of the longest sequence that is "
                f"evaluated, found {limit}; or use rotary positions"
            )

    def validating(self, count: int | None, root: str | Path | None = None) -> tuple[dict[str, Any], dict[str, int]]:
        """Evaluate on the held-out part "valid", on `count` sequences of it."""
        changes: dict[str, Any] = {"data.held_out": "valid"} | ({} if count is None else {"data.test": count})
        changed = self.model_copy(update={key.removeprefix("data."): value for key, value in changes.items()})
        source = changed.load(root)
        return changes, {"train": source.examples, "validation": sum(len(batch.tokens) for batch in source.held_out[1])}


class TaskConfig(SequenceConfig):
    """A generated task: a string, a separator, and the answer, whose tokens are scored.

    Each is described in `weightscope.data.sequences`. Training strings have `length` tokens or, if `shortest` is given,
    lengths that are drawn uniformly from `shortest` to `length`. With `begin` and `stop` a sequence is
    `$ string | answer .`; the stop token is trained, and not counted in accuracies. In a `context` of n tokens strings
    follow one another; the one that its end cuts is not scored. Held-out sequences have one string of a stated length.

    The thesis has a stop token at completion, strings of varying length and uniform tokens (3.3.1, Eq. 3.36), trains
    with strings of 50 tokens and shows accuracies at 50, 100, 200 and 300 (Fig. 3.25 to 3.28, p. 54 to 61). Shortest
    length and context are not stated; its "training pipeline is taken from Jelassi et al. (2024)" (3.3.4), whose code
    (transformers_ssm_copy, synthetic_exps) has begin and stop tokens, lengths from 8 to 50 and contexts of 220 tokens.

    Source: thesis 3.3.1 to 3.3.4.
    """

    added: ClassVar[tuple[str, ...]] = ("shortest", "begin", "stop", "context")

    vocabulary: Vocabulary  # v; the separator, the stop token and the begin token are its last ones, in this order
    shortest: Count | None = None
    begin: bool = False
    stop: bool = False
    context: Count | None = None
    train: Count = 2000
    test: Count = 100
    # multiples of the training length at which networks are evaluated; the first is 1
    lengths: Annotated[tuple[Count, ...], Field(min_length=1), FromList] = (1, 2, 4)

    @model_validator(mode="after")
    def _sizes(self) -> "TaskConfig":
        if self.lengths[0] != 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths: expected 1 and then growing multiples of it, found {list(self.lengths)}")
        if self.shortest is not None and self.shortest > self.length:
            raise ValueError(f"shortest: expected at most the length, {self.length}, found {self.shortest}")
        if self.context is not None and self.context < (least := self.tokens(self.length)):
            raise ValueError(
                f"context: expected at least {least}, the tokens of the longest string with its answer, "
                f"found {self.context}"
            )
        size = TASK_SIZES[self.name]
        lengths = {m * self.length: f" (at {m} times the length; see `lengths`)" * (m > 1) for m in self.lengths}
        for length, at in ({self.shortest or self.length: " (`shortest`)"} | lengths).items():
            if length % size.step:
                raise ValueError(f"length: expected an even number, two tokens for each pair, found {length}{at}")
            if self.task_vocabulary < (least := size.vocabulary(length)):
                beside = ", besides the begin and stop tokens" * (self.begin or self.stop)
                raise ValueError(
                    f"vocabulary: expected an integer >= {least}, found {self.task_vocabulary}{beside}{at}"
                )
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Accuracy over the answer's tokens at each length, the training length first, and the loss there."""
        return (*map(accuracy_at, self.lengths), LOSS)

    @property
    def task_vocabulary(self) -> int:
        """The tokens of strings and answers, and the separator."""
        return self.vocabulary - self.begin - self.stop

    @property
    def plain(self) -> bool:
        """Whether a training sequence is one string of `length` with its answer."""
        return self.shortest is None and self.context is None and not (self.begin or self.stop)

    def tokens(self, length: int) -> int:
        """n, the tokens of one string with its answer that a network sees."""
        return sequence_length(self.name, length) + self.begin + self.stop

    @property
    def trained(self) -> int:
        """n, the tokens of a training sequence that a network sees."""
        return self.context or self.tokens(self.length)

    @property
    def longest(self) -> int:
        """The most tokens of a sequence that a network sees, in training or at the largest multiple of the length."""
        return max(self.trained, self.tokens(self.lengths[-1] * self.length))

    def chance(self, metric: Metric, root: str | Path | None = None) -> tuple[float, int] | None:
        """1 / K of K equally probable tokens of an answer; None for sorting, whose tokens depend on their place."""
        if metric.unit != "%" or self.name == "sort":
            return None
        values, answer = self.task_vocabulary - 1, TASK_SIZES[self.name].answer(metric.length * self.length)
        if self.name == "selective_copy":
            values -= 1
        if self.name == "associative_recall":  # half of the tokens are keys, and keys of the answer are not scored
            values, answer = values - values // 2, answer // 2
        return (1 / values, self.test * answer) if values > 1 else None


for _name in TASK_SIZES:
    SECTIONS.register(_name)(TaskConfig)


@SECTIONS.register(TEXT)
class TextConfig(SequenceConfig):
    """Text of one's own files: Penn Treebank, WikiText-103, or train.txt, valid.txt and test.txt.

    `train` and `test` are windows of the training text and of the held-out text, in its order; all if None.
    """

    name: Literal["text"]
    path: Annotated[str, Field(min_length=1)]  # the folder; relative ones are searched for where data are
    unit: Literal["character", "word"] = "character"
    vocabulary: Vocabulary | None = None  # v of the training text; counted if None, and recorded in populations

    def completed(self, root: str | Path | None = None) -> "TextConfig":
        """The section with the vocabulary of its text."""
        if self.vocabulary is not None:
            return self
        return self.model_copy(update={"vocabulary": self.load(root).corpus.vocabulary})

    def absolute(self, root: str | Path | None = None) -> "TextConfig":
        """The section with the absolute path of its folder."""
        return self.model_copy(update={"path": os.path.abspath(self.located(root))})

    def located(self, root: str | Path | None = None) -> Path:
        """The folder of the files; `root` is searched first, unless the path is absolute."""
        return first_found(
            self.path, [*search_folders(root), Path()], Path.is_dir, "text: expected a folder of text files"
        )


@SECTIONS.register(MARKOV)
class MarkovConfig(SequenceConfig):
    """Tokens that each depend on the one before, with known entropy, the smallest possible loss.

    The smaller the `concentration` of the transitions' Dirichlet distribution, the more certain the next token.
    """

    name: Literal["markov"]
    vocabulary: Vocabulary = 27
    train: Count = 2000
    test: Count = 100
    concentration: Positive = 0.2
    source_seed: Seed = 0  # of the transitions
