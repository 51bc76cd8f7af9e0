"""Errors that say what was expected, what was found, where, and what to do.

Every error that a user can cause derives from `WeightscopeError` and carries the exit code that the
command line answers with. Anything else that reaches the user is a bug.
"""


class WeightscopeError(Exception):
    """Base class; the command line prints its message as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(WeightscopeError, ValueError):
    """An argument, an option or a name that cannot be meant (exit code 2)."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that does not parse or does not make sense; names the field's path (exit code 2)."""


class DataError(WeightscopeError):
    """A file, a tensor or a data set that is missing, damaged or of the wrong kind (exit code 3)."""

    exit_code = 3


class SpecError(DataError):
    """Tensors that do not fit a `WeightSpec`; names the tensors (exit code 3)."""


class AnatomyError(DataError):
    """A model that has no part of the wanted kind; lists what was found (exit code 3)."""


class Resumable(WeightscopeError):
    """Work stopped early in a valid state; the same command goes on from there (exit code 4)."""

    exit_code = 4
