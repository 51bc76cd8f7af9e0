"""Sequences of tokens: generated tasks with a stated answer, the user's text, and a source of known entropy.

A task is a pure function of (generator, batch, length, vocabulary): the same state of the generator gives the same
sequences, on the generator's device. Its string, a separator, and an answer that the string determines make a sequence.
`length` counts the tokens of the string before the separator; the vocabulary includes the separator, its last token.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weightscope._util.names import shortened
from weightscope._util.plugins import Registry
from weightscope._util.seeding import Purpose, torch_seed
from weightscope.data.images import reading
from weightscope.data.sequence_config import (
    TASK_SIZES,
    MarkovConfig,
    Part,
    SequenceConfig,
    TaskConfig,
    TextConfig,
)
from weightscope.data.task import hash_of
from weightscope.errors import DataError, UsageError

Unit = Literal["character", "word"]
UNKNOWN, END = "<unk>", "<eos>"  # as in Penn Treebank and WikiText
_PTB_CHARACTERS = "ptb.char."  # files with a space after every character, and _ for the space
# Training, validation and test files: Penn Treebank (words, characters), WikiText-103, and plain names.
LAYOUTS = (
    ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    tuple(f"{_PTB_CHARACTERS}{part}.txt" for part in ("train", "valid", "test")),
    ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ("train.txt", "valid.txt", "test.txt"),
)


class ScoredSequences(NamedTuple):
    """Sequences of n tokens, the token that follows each, and which of these are scored."""

    tokens: Tensor  # int64 (B, n)
    targets: Tensor  # int64 (B, n), the token after each
    mask: Tensor  # bool (B, n), whether the target belongs to the answer; only these are scored

    @classmethod
    def of(cls, whole: Tensor, unscored: int = 0) -> "ScoredSequences":
        """Whole sequences (B, n + 1), without scores of the first targets."""
        mask = torch.ones_like(whole[:, 1:], dtype=torch.bool)
        mask[:, :unscored] = False
        return cls(whole[:, :-1], whole[:, 1:], mask)


def accuracy(logits: Tensor, batch: ScoredSequences) -> float:
    """The share of the answer's tokens that are the most probable ones, logits (B, n, v)."""
    return float((logits.argmax(-1) == batch.targets)[batch.mask].float().mean())


def cross_entropy(logits: Tensor, batch: ScoredSequences) -> Tensor:
    """The mean of -log p of the answer's tokens, in nats, logits (B, n, v)."""
    return F.cross_entropy(logits[batch.mask], batch.targets[batch.mask])


class Corpus:
    """Where sequences come from: a generated task, a text, or a Markov source."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens, v."""
        raise NotImplementedError

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw training sequences of `length`."""
        raise NotImplementedError

    def compact(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draw training sequences in a compact form, int32 (B, m): here all tokens."""
        found = self.batch(generator, batch, length)
        return torch.cat([found.tokens, found.targets[:, -1:]], 1).int()

    def expanded(self, compact: Tensor, length: int) -> Tensor:
        """All tokens, int64 (..., n + 1), of the compact form (..., m)."""
        return compact.long()

    def part(self, config: SequenceConfig, name: Part, multiple: int) -> tuple[ScoredSequences, ...]:
        """A held-out part in batches; its stream depends on nothing but the part and the multiple of the length."""
        assert config.test is not None
        purpose = Purpose.HELD_OUT if name == "test" else Purpose.VALIDATION
        generator = torch.Generator().manual_seed(torch_seed(0, multiple, purpose))
        return (self.batch(generator, config.test, multiple * config.length),)

    def to(self, device: torch.device) -> "Corpus":
        """The same with the tensors of the training part on a device."""
        return self


# --- generated tasks --------------------------------------------------------------------------------------------------


TASKS: Registry[Callable[[torch.Generator, int, int, int], ScoredSequences]] = Registry("task")
"""Name -> `f(generator, batch, length, vocabulary)`."""


@TASKS.register("copy", source="Jelassi et al. 2024; thesis Eq. 3.36")
def copy(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string: `a b c | a b c`, tokens 0 to v - 2 uniform, then the separator v - 1; v >= 3.

    All tasks take the generator, on whose device sequences are, B, the length of the string, and the vocabulary v.

    Example:
        >>> copy(torch.Generator().manual_seed(0), 2, 3, 10).tokens.shape
        torch.Size([2, 6])
    """
    string = _uniform(generator, batch, length, vocabulary - 1)
    return _joined(string, string, vocabulary)


@TASKS.register("copy_reversed", source="thesis 3.3.1")
def copy_reversed(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string in stack order, last token first: `a b c | c b a`."""
    string = _uniform(generator, batch, length, vocabulary - 1)
    return _joined(string, string.flip(1), vocabulary)


@TASKS.register("sort", source="thesis 3.3.3")
def sort(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Sort the string, whose tokens are all different: `c a b | a b c`; v >= length + 2, so that strings differ."""
    string = _permutations(generator, batch, vocabulary - 1, length)
    return _joined(string, string.sort(1).values, vocabulary)


@TASKS.register("associative_recall", source="Arora et al. 2024; thesis Eq. 3.37")
def associative_recall(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Recall the value of each key (multi-query): `a 1 b 2 c 3 | c 3 a 1 b 2`; the values are scored.

    With m = floor((v - 1) / 2), keys are tokens 0 to m - 1, each at most once; values are tokens m to v - 2, uniform.
    All keys are asked for, in random order. The length is even, and there are at least as many keys as pairs.
    """
    pairs, keys = length // 2, (vocabulary - 1) // 2
    key = _permutations(generator, batch, keys, pairs)
    value = keys + _uniform(generator, batch, pairs, vocabulary - 1 - keys)
    string = torch.stack([key, value], 2)  # (B, pairs, 2)
    order = _permutations(generator, batch, pairs, pairs)
    asked = string.gather(1, order.unsqueeze(2).expand_as(string))
    found = _joined(string.flatten(1), asked.flatten(1), vocabulary)
    found.mask[:, length::2] = False  # keys of the answer
    return found


@TASKS.register("selective_copy", source="Gu and Dao 2023, section 4.1.1")
def selective_copy(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string without its blanks: `a _ _ b | a b`, where a quarter of the tokens (rounded up) are not blank.

    Tokens are 0 to v - 3, the blank v - 2 and the separator v - 1; v >= 4, so that answers differ.
    """
    kept = -(-length // 4)
    answer = _uniform(generator, batch, kept, vocabulary - 2)
    places = _permutations(generator, batch, length, kept).sort(1).values
    string = torch.full((batch, length), vocabulary - 2, device=generator.device).scatter(1, places, answer)
    return _joined(string, answer, vocabulary)


def _uniform(generator: torch.Generator, batch: int, length: int, tokens: int) -> Tensor:
    return torch.randint(tokens, (batch, length), generator=generator, device=generator.device)


def _permutations(generator: torch.Generator, batch: int, size: int, kept: int) -> Tensor:
    """The first entries of uniform permutations of 0 .. size - 1, (B, kept)."""
    keys = torch.rand(batch, size, generator=generator, device=generator.device, dtype=torch.float64)
    return keys.argsort(1)[:, :kept].clone()  # a view would keep all of them in memory


def _joined(string: Tensor, answer: Tensor, vocabulary: int) -> ScoredSequences:
    """`string | answer`."""
    separator = torch.full_like(string[:, :1], vocabulary - 1)
    return ScoredSequences.of(torch.cat([string, separator, answer], 1), unscored=string.shape[1])


# --- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Text(Corpus):
    """Training, validation and test text as tokens; the vocabulary is that of the training text."""

    units: tuple[str, ...]  # the vocabulary's characters or words, sorted; a token is an index
    train: Tensor  # int64 (n,)
    valid: Tensor
    test: Tensor

    @classmethod
    def read(cls, folder: str | Path, unit: Unit) -> "Text":
        """Read the three files of a folder: Penn Treebank, WikiText-103, or train.txt, valid.txt and test.txt.

        Words, and the characters of `ptb.char.train.txt` and so on, are separated by white space, and each line ends
        with `<eos>`. A word that the training text lacks becomes `<unk>` if the training text has `<unk>`. DataError if
        a file is missing, empty or not UTF-8, or has a character or word that the training text lacks.

        Example:
            >>> text = Text.read("penn-treebank", "word")
        """
        order = sorted(LAYOUTS, key=lambda names: names[0].startswith(_PTB_CHARACTERS) != (unit == "character"))
        names = next((names for names in order if all((Path(folder) / name).is_file() for name in names)), None)
        if names is None:
            expected = "; ".join(", ".join(names) for names in LAYOUTS)
            raise DataError(
                f"{folder}: expected the files of a text corpus, one of {expected}; found none of these complete"
            )
        units = tuple(sorted(set(_units(Path(folder) / names[0], unit))))
        number = {name: i for i, name in enumerate(units)}
        return cls(units, *(_tokens(Path(folder) / name, unit, number) for name in names))

    @property
    def vocabulary(self) -> int:
        return len(self.units)

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw windows of `length` tokens (B, n) from the training text; all are scored."""
        return ScoredSequences.of(self.expanded(self.compact(generator, batch, length), length))

    def compact(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draw the places of windows (B, 1); UsageError if the training text is not longer than a window."""
        starts = len(self.train) - length
        if starts < 1:
            raise UsageError(f"length: expected less than the {len(self.train)} tokens of the text, found {length}")
        return torch.randint(starts, (batch, 1), generator=generator, device=generator.device).int()

    def expanded(self, compact: Tensor, length: int) -> Tensor:
        """The windows at places (..., 1) of the training text, with the token after each, (..., length + 1)."""
        return self.train[compact.to(self.train.device) + torch.arange(length + 1, device=self.train.device)]

    def held_out(self, length: int, part: Part = "valid") -> Iterator[ScoredSequences]:
        """Consecutive windows of a held-out text, one at a time: each token but the first is scored once."""
        text: Tensor = getattr(self, part)
        if len(text) < 2:
            raise UsageError(f"{part}: expected at least 2 tokens, found {len(text)}")
        for start in range(0, len(text) - 1, length):
            yield ScoredSequences.of(text[None, start : start + length + 1])

    def part(self, config: SequenceConfig, name: Part, multiple: int) -> tuple[ScoredSequences, ...]:
        """The first windows of a held-out text, in batches of equal length."""
        windows = islice(self.held_out(config.length, name), config.test)
        groups = (list(group) for _, group in groupby(windows, lambda window: window.tokens.shape[1]))
        return tuple(ScoredSequences(*map(torch.cat, zip(*group, strict=True))) for group in groups)

    def to(self, device: torch.device) -> "Text":
        return replace(self, train=self.train.to(device))


def _units(path: Path, unit: Unit) -> Iterable[str]:
    with reading(path, "text in UTF-8", "write it again"):
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    if not text.strip():
        raise DataError(f"{path}: expected text, found none")
    if unit == "character" and not path.name.startswith(_PTB_CHARACTERS):
        return text
    return (word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), END))


def _tokens(path: Path, unit: Unit, number: dict[str, int]) -> Tensor:
    other = number.get(UNKNOWN)
    out = []
    for name in _units(path, unit):
        token = number.get(name, other)
        if token is None:
            raise DataError(
                f"{path}: the {unit} {shortened(name)!r} is not in the training text, which has no {UNKNOWN}"
            )
        out.append(token)
    return torch.tensor(out)


# --- a source of known entropy ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MarkovSource(Corpus):
    """Tokens that each depend on the one before, started from the stationary distribution.

    `transitions`, P (v, v), are positive probabilities of the next token; rows sum to 1.

    Example:
        >>> source = MarkovSource.random(27)
        >>> source.batch(torch.Generator().manual_seed(0), 8, 64).tokens.shape
        torch.Size([8, 64])
    """

    transitions: np.ndarray

    @classmethod
    def random(cls, vocabulary: int, *, concentration: float = 0.2, seed: int = 0) -> "MarkovSource":
        """Draw the rows from a symmetric Dirichlet distribution; the smaller its `concentration`, the more certain the
        next token.
        """
        drawn = np.random.default_rng(seed).gamma(concentration, size=(vocabulary, vocabulary))
        drawn += 1e-6  # so that every token can follow every other
        return cls(drawn / drawn.sum(1, keepdims=True))

    @property
    def vocabulary(self) -> int:
        return len(self.transitions)

    @property
    def stationary(self) -> np.ndarray:
        """Probabilities of the tokens, pi (v,) with pi P = pi."""
        size = self.vocabulary
        equations = np.vstack([self.transitions.T - np.eye(size), np.ones(size)])
        return np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0))[0]

    @property
    def entropy(self) -> float:
        """-sum_i pi_i sum_j P_ij log2 P_ij, bits per token: the smallest possible loss of a network."""
        return float(-(self.stationary[:, None] * self.transitions * np.log2(self.transitions)).sum())

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw sequences of `length` tokens (B, n), all scored, on the generator's device."""
        shape, device = (length + 1, batch), generator.device
        chance = torch.rand(shape, generator=generator, device=device, dtype=torch.float64).unsqueeze(2)
        rows = torch.from_numpy(self.transitions).cumsum(1).to(device)
        cumulated = torch.from_numpy(self.stationary).cumsum(0).to(device).repeat(batch, 1)  # (B, v)
        tokens: list[Tensor] = []
        for row in chance:  # the token whose interval of the cumulated probabilities holds the number
            found = torch.searchsorted(cumulated, row, right=True).squeeze(1)
            tokens.append(found.clamp_max(self.vocabulary - 1))  # where rounding leaves the last sum below 1
            cumulated = rows[tokens[-1]]
        return ScoredSequences.of(torch.stack(tokens, 1))


# --- what a recipe's section [data] describes -------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedTask(Corpus):
    """A task with the vocabulary of a section [data]."""

    config: TaskConfig

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw sequences of one string each, which has `length` tokens."""
        whole, scored = self._strings(generator, batch, length)
        return ScoredSequences(whole[:, :-1], whole[:, 1:], scored[:, 1:])

    def compact(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draw training sequences; where masks differ between them, ~t is stored for a scored token t."""
        if self.config.plain:
            return super().compact(generator, batch, length)
        whole, scored = self._packed(generator, batch)
        return torch.where(scored, ~whole, whole).int()

    def expanded(self, compact: Tensor, length: int) -> Tensor:
        return torch.where(compact < 0, ~compact, compact).long()

    def _strings(
        self, generator: torch.Generator, batch: int, length: int, stop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`$ string | answer .`, (B, m), and which tokens are scored; the stop token is if `stop`."""
        config, size = self.config, self.config.task_vocabulary
        found = TASKS[config.name](generator, batch, length, size)
        whole, scored = torch.cat([found.tokens, found.targets[:, -1:]], 1), F.pad(found.mask, (1, 0))
        if config.begin:
            whole, scored = F.pad(whole, (1, 0), value=self.vocabulary - 1), F.pad(scored, (1, 0))
        if config.stop:
            whole, scored = F.pad(whole, (0, 1), value=size), F.pad(scored, (0, 1), value=stop)
        return whole, scored

    def _packed(self, generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
        """Strings of drawn lengths behind one another, cut to (B, n + 1), and which tokens are scored."""
        config, device, end = self.config, generator.device, self.config.trained + 1
        low, step = config.shortest or config.length, TASK_SIZES[config.name].step
        most = 1 if config.context is None else -(-end // (config.tokens(low) + 1))  # strings of a sequence
        kinds = (config.length - low) // step + 1
        lengths = low + step * torch.randint(kinds, (batch, most), generator=generator, device=device)
        sizes = torch.tensor([config.tokens(low + step * i) + 1 for i in range(kinds)], device=device)
        sizes = sizes[(lengths - low) // step]
        starts = sizes.cumsum(1) - sizes
        whole = torch.full((batch, end + config.tokens(config.length)), self.vocabulary - 1, device=device)
        scored = torch.zeros_like(whole, dtype=torch.bool)
        for length in range(low, config.length + 1, step):
            rows, slots = ((lengths == length) & (starts < end)).nonzero(as_tuple=True)
            if not len(rows):
                continue
            first = starts[rows, slots].unsqueeze(1)
            tokens, answers = self._strings(generator, len(rows), length, stop=True)
            places = rows.unsqueeze(1), first + torch.arange(tokens.shape[1], device=device)
            whole[places], scored[places] = tokens, answers & (first + tokens.shape[1] <= end)
        return whole[:, :end], scored[:, :end]


@dataclass(frozen=True, eq=False)
class SequenceSource:
    """Sequences of tokens by a recipe's section [data]."""

    config: SequenceConfig
    corpus: Corpus
    examples: int  # training sequences of an epoch
    held_out: dict[int, tuple[ScoredSequences, ...]]  # multiple of the length -> batches of sequences of equal length

    nbytes: ClassVar[int] = 0  # sequences are drawn step by step

    @classmethod
    def of(cls, config: SequenceConfig, root: str | Path | None = None) -> "SequenceSource":
        """Read or prepare what a section describes; a folder is searched first for text."""
        corpus: Corpus
        train, lengths = config.train or 0, config.lengths if isinstance(config, TaskConfig) else (1,)
        if isinstance(config, TaskConfig):
            corpus = GeneratedTask(config)
        elif isinstance(config, MarkovConfig):
            corpus = MarkovSource.random(config.vocabulary, concentration=config.concentration, seed=config.source_seed)
        else:
            assert isinstance(config, TextConfig)
            corpus = Text.read(config.located(root), config.unit)
            if config.vocabulary not in (None, corpus.vocabulary):
                raise DataError(
                    f"{config.path}: expected a text with a vocabulary of {config.vocabulary}, "
                    f"found {corpus.vocabulary}"
                )
            tokens = len(corpus.train)
            if tokens <= config.length:
                raise UsageError(
                    f"data.length: expected less than the {tokens} tokens of the text, found {config.length}"
                )
            train = config.train or (tokens - 1) // config.length
        made = cls(config, corpus, train, {})
        made.held_out.update({multiple: made.part(config.held_out, multiple) for multiple in lengths})
        return made

    def part(self, name: Part, multiple: int = 1) -> tuple[ScoredSequences, ...]:
        """The sequences of a held-out part at a multiple of the length, batches of equal length each, on the CPU."""
        return self.corpus.part(self.config, name, multiple)

    @property
    def mask(self) -> Tensor | None:
        """Whether each target of a training sequence is scored, (n,), if it is the same in all."""
        return self.held_out[1][0].mask[0] if not isinstance(self.config, TaskConfig) or self.config.plain else None

    def expanded(self, compact: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets int64 (..., n) of sequences in compact form (..., m)."""
        whole = self.corpus.expanded(compact, self.config.length)
        return whole[..., :-1], whole[..., 1:]

    def weights(self, compact: Tensor) -> Tensor | None:
        """The weights of targets in the mean over the scored ones, (T, B n) of (T, B, n + 1); None with a mask."""
        if self.mask is not None:
            return None
        scored = (compact[..., 1:] < 0).flatten(1)
        return scored / scored.sum(1, keepdim=True)

    def to(self, device: torch.device) -> "SequenceSource":
        """The same with its tensors on a device."""
        held_out = {
            multiple: tuple(ScoredSequences(*(value.to(device) for value in batch)) for batch in batches)
            for multiple, batches in self.held_out.items()
        }
        return replace(self, corpus=self.corpus.to(device), held_out=held_out)

    def shortened(self, train: int) -> "SequenceSource":
        """The same with shorter epochs."""
        return replace(self, examples=train)

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of the text, or of the settings and the held-out sequences."""
        if isinstance(self.corpus, Text):
            about: Any = self.corpus.units
            tensors = [self.corpus.train, self.corpus.valid, self.corpus.test]
        else:
            about = self.config.model_dump(mode="json", exclude={"train", "held_out"})
            tensors = [batch.tokens for batches in self.held_out.values() for batch in batches]
        return hash_of(tensors, json.dumps(about))
