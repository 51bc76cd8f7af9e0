"""`SequenceSource`: where the sequences of a recipe come from, for training and for evaluation."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path

import torch
from torch import Tensor

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.data.sequence_config import MarkovConfig, Part, SequenceConfig, TaskConfig, TextConfig
from weightscope.data.sequences.markov import MarkovSource
from weightscope.data.sequences.scoring import ScoredSequences
from weightscope.data.sequences.tasks import TASKS
from weightscope.data.sequences.text import Text
from weightscope.errors import DataError, UsageError


@dataclass(frozen=True, eq=False)
class SequenceSource:
    """Sequences of tokens by a recipe's section [data].

    Attributes:
        config: the section.
        corpus: the text or the Markov source; None for a task.
        train: sequences of an epoch.
        held_out: multiple of the training length -> held-out sequences, batches of equal length each.
    """

    config: SequenceConfig
    corpus: Text | MarkovSource | None
    train: int
    held_out: dict[int, tuple[ScoredSequences, ...]]

    @classmethod
    def of(cls, config: SequenceConfig, root: str | Path | None = None) -> "SequenceSource":
        """Read or prepare what a section describes.

        Held-out sequences of tasks and of the Markov source have streams of their own, which depend on nothing but the
        multiple of the length; so they are the same for all populations with these settings.

        Args:
            config: the section.
            root: a folder to search first for text.

        Raises:
            DataError: if text is missing, empty, or not UTF-8.
            UsageError: if the text is shorter than a sequence.
        """
        if isinstance(config, TextConfig):
            text = Text.read(config.located(root), config.unit)
            if config.vocabulary not in (None, text.vocabulary):
                raise DataError(
                    f"{config.path}: expected a text with a vocabulary of {config.vocabulary}, found {text.vocabulary}"
                )
            windows = _windows(text, config)
            return cls(config, text, config.train or windows, {1: _batched(text, config, config.held_out)})
        corpus = None
        if isinstance(config, MarkovConfig):
            corpus = MarkovSource.random(config.vocabulary, concentration=config.concentration, seed=config.source_seed)
        assert config.train is not None
        assert config.test is not None
        made = cls(config, corpus, config.train, {})
        for multiple in config.lengths if isinstance(config, TaskConfig) else (1,):
            made.held_out[multiple] = made.part(config.held_out, multiple)
        return made

    def part(self, name: Part, multiple: int = 1) -> tuple[ScoredSequences, ...]:
        """The sequences of a held-out part, batches of equal length each, on the CPU.

        Args:
            name: "valid" or "test".
            multiple: of the training length; of text 1.
        """
        if isinstance(self.corpus, Text):
            assert isinstance(self.config, TextConfig)
            return _batched(self.corpus, self.config, name)
        assert self.config.test is not None
        purpose = Purpose.HELD_OUT if name == "test" else Purpose.VALIDATION
        generator = torch.Generator().manual_seed(torch_seed(0, multiple, purpose))
        return (self._drawn(generator, self.config.test, multiple * self.config.length),)

    @property
    def vocabulary(self) -> int:
        """The number of tokens, v."""
        if isinstance(self.config, TaskConfig):
            return self.config.vocabulary
        assert self.corpus is not None
        return self.corpus.vocabulary

    @property
    def examples(self) -> int:
        """The number of training sequences of an epoch."""
        return self.train

    @property
    def nbytes(self) -> int:
        """0: sequences are drawn step by step."""
        return 0

    @property
    def mask(self) -> Tensor:
        """Whether each target of a training sequence is scored, (n,); the same in all."""
        return self.held_out[1][0].mask[0]

    def _drawn(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        if isinstance(self.config, TaskConfig):
            return TASKS[self.config.name](generator, batch, length, self.config.vocabulary)
        assert self.corpus is not None
        return self.corpus.batch(generator, batch, length)

    def draw_compact(self, generator: torch.Generator, batch: int) -> Tensor:
        """Draw B training sequences in a compact form, int32 (B, m) on the generator's device.

        Of text, which is on the device anyway, these are the places; of others the tokens themselves.
        """
        if isinstance(self.corpus, Text):
            return self.corpus.starts(generator, batch, self.config.length).int()
        found = self._drawn(generator, batch, self.config.length)
        return torch.cat([found.tokens, found.targets[:, -1:]], 1).int()

    def expanded(self, compact: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets int64 (..., n) of sequences in compact form (..., m)."""
        whole = self.corpus.windows(compact, self.config.length) if isinstance(self.corpus, Text) else compact.long()
        return whole[..., :-1], whole[..., 1:]

    def to(self, device: torch.device) -> "SequenceSource":
        """The same with its tensors on a device."""
        held_out = {
            multiple: tuple(ScoredSequences(*(value.to(device) for value in batch)) for batch in batches)
            for multiple, batches in self.held_out.items()
        }
        corpus = self.corpus
        if isinstance(corpus, Text):
            corpus = replace(corpus, train=corpus.train.to(device))
        return replace(self, corpus=corpus, held_out=held_out)

    def shortened(self, train: int) -> "SequenceSource":
        """The same with shorter epochs."""
        return replace(self, train=train)

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of the text, or of the settings and the held-out sequences."""
        digest = hashlib.sha256()
        if isinstance(self.corpus, Text):
            digest.update(json.dumps(self.corpus.units).encode())
            tensors = [self.corpus.train, self.corpus.valid, self.corpus.test]
        else:
            digest.update(json.dumps(self.config.model_dump(mode="json", exclude={"train", "held_out"})).encode())
            tensors = [batch.tokens for batches in self.held_out.values() for batch in batches]
        for tensor in tensors:
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]


def _windows(text: Text, config: TextConfig) -> int:
    """How many windows the training text has."""
    windows = (len(text.train) - 1) // config.length
    if windows < 1:
        raise UsageError(
            f"data.length: expected less than the {len(text.train)} tokens of the text, found {config.length}"
        )
    return windows


def _batched(text: Text, config: TextConfig, part: Part) -> tuple[ScoredSequences, ...]:
    """The windows of a held-out part; those of equal length in one batch."""
    windows: Iterator[ScoredSequences] = islice(text.held_out(config.length, part), config.test)
    groups = (list(group) for _, group in groupby(windows, lambda window: window.tokens.shape[1]))
    return tuple(ScoredSequences(*map(torch.cat, zip(*group, strict=True))) for group in groups)
