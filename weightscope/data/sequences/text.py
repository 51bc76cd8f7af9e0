"""Text of the user's files as tokens: characters or words."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from weightscope._util.checks import choice, count
from weightscope.data.sequences.scoring import ScoredSequences
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


@dataclass(frozen=True, eq=False)
class Text:
    """Training, validation and test text as tokens; the vocabulary is that of the training text.

    Attributes:
        units: the vocabulary's characters or words, sorted; a token is an index.
        train: int64 (n,).
        valid: int64 (n,).
        test: int64 (n,).
    """

    units: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor

    @classmethod
    def read(cls, folder: str | Path, unit: Unit) -> "Text":
        """Read the three files of a folder: Penn Treebank, WikiText-103, or train.txt, valid.txt and test.txt.

        Words are separated by white space, and each line ends with `<eos>`. So do the characters of Penn Treebank's
        files for characters, `ptb.char.train.txt` and so on, which are read for characters where they are. A word that
        the training text lacks becomes `<unk>` if the training text has `<unk>`, as both corpora do.

        Args:
            folder: that holds the files.
            unit: "character" or "word".

        Raises:
            DataError: if a file is missing, empty or not UTF-8, or has a character or word that the training text
                lacks.
            UsageError: if the unit is unknown.

        Example:
            >>> text = Text.read("penn-treebank", "word")
        """
        choice("unit", unit, ("character", "word"))
        paths = _files(Path(folder), unit)
        units = tuple(sorted(set(_units(paths[0], unit))))
        number = {name: i for i, name in enumerate(units)}
        return cls(units, *(_tokens(path, unit, number) for path in paths))

    @property
    def vocabulary(self) -> int:
        """The number of characters or words, v."""
        return len(self.units)

    def batch(self, generator: torch.Generator, batch: int, length: int) -> ScoredSequences:
        """Draw windows of `length` tokens (B, n) from the training text, all of which are scored.

        Raises:
            UsageError: if the training text is not longer than a window.
        """
        return _scored(self.windows(self.starts(generator, batch, length), length))

    def starts(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draw the first tokens (B, 1) of windows of the training text; errors as `batch`."""
        count("batch", batch)
        starts = len(self.train) - count("length", length)
        if starts < 1:
            raise UsageError(f"length: expected less than the {len(self.train)} tokens of the text, found {length}")
        return torch.randint(starts, (batch, 1), generator=generator, device=generator.device)

    def windows(self, first: Tensor, length: int) -> Tensor:
        """The windows of the training text, with the token after each, (..., length + 1) from `starts` (..., 1)."""
        return _windows(self.train, first.to(self.train.device), length)

    def held_out(self, length: int, part: Literal["valid", "test"] = "valid") -> Iterator[ScoredSequences]:
        """Consecutive windows of a held-out text, one at a time: each token but the first is scored once.

        Raises:
            UsageError: if the part is unknown or has a single token.
        """
        text: Tensor = getattr(self, choice("part", part, ("valid", "test")))
        count("length", length)
        if len(text) < 2:
            raise UsageError(f"{part}: expected at least 2 tokens, found {len(text)}")
        for start in range(0, len(text) - 1, length):
            first = torch.tensor([[start]], device=text.device)
            yield _scored(_windows(text, first, min(length, len(text) - 1 - start)))


def _windows(text: Tensor, first: Tensor, length: int) -> Tensor:
    return text[first + torch.arange(length + 1, device=text.device)]


def _scored(whole: Tensor) -> ScoredSequences:
    return ScoredSequences(whole[:, :-1], whole[:, 1:], torch.ones_like(whole[:, 1:], dtype=torch.bool))


def _files(folder: Path, unit: Unit) -> list[Path]:
    for names in sorted(LAYOUTS, key=lambda names: names[0].startswith(_PTB_CHARACTERS) != (unit == "character")):
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    expected = "; ".join(", ".join(names) for names in LAYOUTS)
    raise DataError(f"{folder}: expected the files of a text corpus, one of {expected}; found none of these complete")


def _units(path: Path, unit: Unit) -> Iterable[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8, found the byte {error.object[error.start]:#04x} at {error.start}"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
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
            raise DataError(f"{path}: the {unit} {name!r} is not in the training text, which has no {UNKNOWN}")
        out.append(token)
    return torch.tensor(out)
