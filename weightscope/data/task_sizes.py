"""Sizes of the generated tasks. Does not import torch.

`length` counts the tokens of the string before the separator; the vocabulary includes the separator.
"""

from collections.abc import Callable
from typing import NamedTuple

from weightscope._util.checks import count
from weightscope._util.names import unknown
from weightscope.errors import UsageError


class TaskSize(NamedTuple):
    """Sizes of a task as functions of the string's length.

    Attributes:
        answer: tokens of the answer.
        vocabulary: the fewest tokens, the separator included.
        varied: the fewest tokens, the separator included, with which sequences have different answers.
        why: what needs so many, for messages; takes the length and this number.
        step: what the length is a multiple of: the tokens of a pair, 2, or 1.
    """

    answer: Callable[[int], int]
    vocabulary: Callable[[int], int]
    varied: Callable[[int], int]
    why: Callable[[int, int], str] | None = None
    step: int = 1


def _same(length: int) -> int:
    return length


TASK_SIZES = {
    "copy": TaskSize(_same, lambda length: 2, lambda length: 3),
    "copy_reversed": TaskSize(_same, lambda length: 2, lambda length: 3),
    "sort": TaskSize(
        _same,
        lambda length: length + 1,
        lambda length: length + 2,
        lambda length, least: f"sorting {length} different tokens needs at least {least} with the separator",
    ),
    "associative_recall": TaskSize(
        _same,
        lambda length: length + 1,
        lambda length: max(length + 1, 4),
        lambda length, least: f"{length // 2} different keys, as many values and the separator need at least {least}",
        step=2,
    ),
    "selective_copy": TaskSize(lambda length: -(-length // 4), lambda length: 3, lambda length: 4),
}


def check_task(name: str, length: int, vocabulary: int) -> None:
    """Refuse sizes for which a task has no sequences.

    Raises:
        UsageError: if the task is unknown, a number is out of range or the vocabulary is too small.
    """
    if name not in TASK_SIZES:
        raise UsageError(unknown("task", name, tuple(TASK_SIZES)))
    size = TASK_SIZES[name]
    count("length", length, size.step)
    if length % size.step:
        raise UsageError(f"length: expected an even number, two tokens for each pair, found {length}")
    least = size.vocabulary(length)
    if size.why is None:
        count("vocabulary", vocabulary, least)
    elif count("vocabulary", vocabulary, 2) < least:
        raise UsageError(f"vocabulary: {size.why(length, least)}, found {vocabulary}")


def sequence_length(name: str, length: int) -> int:
    """n, the tokens that a network sees: the string, the separator, and the answer but for its last token."""
    return length + TASK_SIZES[name].answer(length)
