"""Errors. Messages say what was expected, what was found, where, and what to do.

Every error that a user can cause derives from `WeightscopeError` and carries the command line's exit code. Any other
exception is a bug.
"""

_LONGEST = 1500  # characters of a message, whatever it quotes


class WeightscopeError(Exception):
    """Base class; the command line prints its message and exits with `exit_code`.

    The message is one line of at most 1,500 characters that can be printed; the middle of a longer one is left out.
    """

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


def one_line(text: str) -> str:
    """The text on one line, with dots in place of its middle if it is long, and `?` for what cannot be printed."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 505]} ... {text[-500:]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


class UsageError(WeightscopeError, ValueError):
    """Invalid argument, option or name (exit code 2)."""

    exit_code = 2


class RecipeError(UsageError):
    """Invalid recipe; names the field's path (exit code 2)."""


class DataError(WeightscopeError):
    """Missing, damaged or unsuitable file, tensor or data set (exit code 3)."""

    exit_code = 3


class SpecError(DataError):
    """Tensors that differ from a `WeightSpec`; names the tensors (exit code 3)."""


class AnatomyError(DataError):
    """A model without parts of the requested kind; lists what was found (exit code 3)."""


class Resumable(WeightscopeError):
    """Work stopped early in a valid state; run the same command again to resume (exit code 4)."""

    exit_code = 4
