"""Generated tasks: a string, a separator, and an answer that the string determines.

A task is a pure function of (generator, batch, length, vocabulary): the same state of the generator gives the same
sequences, on the generator's device. `length` counts the tokens of the string before the separator; the vocabulary
includes the separator, which is its last token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from weightscope._util.checks import count
from weightscope._util.plugins import Registry
from weightscope.data.sequences.scoring import ScoredSequences
from weightscope.data.task_sizes import check_task

_AT_ONCE = 1 << 24  # numbers that permutations are sorted by: 128 MiB

Task = Callable[[torch.Generator, int, int, int], ScoredSequences]

TASKS: Registry[Task] = Registry("task")
"""Name -> `f(generator, batch, length, vocabulary)`."""


@TASKS.register("copy", source="Jelassi et al. 2024; thesis Eq. 3.36")
def copy(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string: `a b c | a b c`, tokens uniform.

    Args:
        generator: drawn from; its device is that of the sequences.
        batch: B.
        length: of the string.
        vocabulary: v >= 2, tokens 0 to v - 2 and the separator v - 1.

    Returns:
        Sequences of 2 length tokens.

    Raises:
        UsageError: if a number is out of range.

    Example:
        >>> copy(torch.Generator().manual_seed(0), 2, 3, 10).tokens.shape
        torch.Size([2, 6])
    """
    _checked("copy", batch, length, vocabulary)
    string = _uniform(generator, batch, length, vocabulary - 1)
    return _sequences(string, string, vocabulary)


@TASKS.register("copy_reversed", source="thesis 3.3.1")
def copy_reversed(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string in stack order, last token first: `a b c | c b a`; arguments and errors as `copy`."""
    _checked("copy_reversed", batch, length, vocabulary)
    string = _uniform(generator, batch, length, vocabulary - 1)
    return _sequences(string, string.flip(1), vocabulary)


@TASKS.register("sort", source="thesis 3.3.3")
def sort(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Sort the string, whose tokens are all different: `c a b | a b c`; arguments as `copy`.

    Raises:
        UsageError: if a number is out of range, or there are fewer than `length` tokens.
    """
    _checked("sort", batch, length, vocabulary)
    string = _permutations(generator, batch, vocabulary - 1, length)
    return _sequences(string, string.sort(1).values, vocabulary)


@TASKS.register("associative_recall", source="Arora et al. 2024; thesis Eq. 3.37")
def associative_recall(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Recall the value of each key (multi-query): `a 1 b 2 c 3 | c 3 a 1 b 2`, of which the values are scored.

    With m = floor((v - 1) / 2), keys are tokens 0 to m - 1, each at most once; values are tokens m to v - 2, uniform.
    All keys are asked for, in random order.

    Args:
        generator: drawn from; its device is that of the sequences.
        batch: B.
        length: of the string, even: two tokens for each pair.
        vocabulary: v.

    Returns:
        Sequences of 2 length tokens.

    Raises:
        UsageError: if a number is out of range, or there are fewer keys than pairs.
    """
    _checked("associative_recall", batch, length, vocabulary)
    pairs, keys = length // 2, (vocabulary - 1) // 2
    key = _permutations(generator, batch, keys, pairs)
    value = keys + _uniform(generator, batch, pairs, vocabulary - 1 - keys)
    string = torch.stack([key, value], 2)  # (B, pairs, 2)
    order = _permutations(generator, batch, pairs, pairs)
    asked = string.gather(1, order.unsqueeze(2).expand_as(string))
    found = _sequences(string.flatten(1), asked.flatten(1), vocabulary)
    found.mask[:, length::2] = False  # keys of the answer
    return found


@TASKS.register("selective_copy", source="Gu and Dao 2023, section 4.1.1")
def selective_copy(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> ScoredSequences:
    """Repeat the string without its blanks: `a _ _ b | a b`, where a quarter of the tokens (rounded up) are not blank.

    Args:
        generator: drawn from; its device is that of the sequences.
        batch: B.
        length: of the string, with its blanks.
        vocabulary: v >= 3, tokens 0 to v - 3, the blank v - 2 and the separator v - 1.

    Returns:
        Sequences of length + ceil(length / 4) tokens.

    Raises:
        UsageError: if a number is out of range.
    """
    _checked("selective_copy", batch, length, vocabulary)
    kept = -(-length // 4)
    answer = _uniform(generator, batch, kept, vocabulary - 2)
    places = _permutations(generator, batch, length, kept).sort(1).values
    string = torch.full((batch, length), vocabulary - 2, device=generator.device).scatter(1, places, answer)
    return _sequences(string, answer, vocabulary)


def _checked(name: str, batch: int, length: int, vocabulary: int) -> None:
    """Refuse numbers that are out of range.

    Raises:
        UsageError: naming the number.
    """
    count("batch", batch)
    check_task(name, length, vocabulary)


def _uniform(generator: torch.Generator, batch: int, length: int, tokens: int) -> Tensor:
    return torch.randint(tokens, (batch, length), generator=generator, device=generator.device)


def _permutations(generator: torch.Generator, batch: int, size: int, kept: int) -> Tensor:
    """The first entries of uniform permutations of 0 .. size - 1, (B, kept).

    They are drawn a few rows at a time; how many depends on `size` only, so that the numbers do not depend on the
    machine.
    """
    rows = max(1, _AT_ONCE // size)
    return torch.cat([_permuted(generator, min(rows, batch - start), size, kept) for start in range(0, batch, rows)])


def _permuted(generator: torch.Generator, batch: int, size: int, kept: int) -> Tensor:
    keys = torch.rand(batch, size, generator=generator, device=generator.device, dtype=torch.float64)
    return keys.argsort(1)[:, :kept].clone()  # a view would keep all of them in memory


def _sequences(string: Tensor, answer: Tensor, vocabulary: int) -> ScoredSequences:
    """`string | answer`, without its last token, and shifted by one."""
    separator = torch.full_like(string[:, :1], vocabulary - 1)
    whole = torch.cat([string, separator, answer], 1)
    mask = torch.zeros(whole[:, 1:].shape, dtype=torch.bool, device=whole.device)
    mask[:, string.shape[1] :] = True
    return ScoredSequences(whole[:, :-1], whole[:, 1:], mask)
