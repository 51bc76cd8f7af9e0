"""`reads`: an initialiser refuses a model of which it would set only a part."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from weightscope._util.checks import flag
from weightscope.anatomy import FINDERS, NamedTensors, named_tensors
from weightscope.anatomy.lookalikes import described, refusal, unparsed
from weightscope.errors import AnatomyError

F = TypeVar("F", bound=Callable[..., Any])
Kinds = tuple[str, ...]


def require_read(kinds: Iterable[str], tensors: NamedTensors, *, strict: bool, caller: str) -> tuple[str, ...]:
    """Check that everything that looks like parts of some kinds was read as such.

    Args:
        kinds: "attention modules", "MLPs", "depthwise convolutions".
        tensors: of the model.
        strict: whether anything else is an error.
        caller: for the message.

    Returns:
        The names of the tensors that could not be read, if not strict.

    Raises:
        AnatomyError: if strict, naming the tensors and what to do.
    """
    out: list[str] = []
    for kind in kinds:
        parts = FINDERS[kind](tensors)
        left = unparsed(kind, tensors, parts)
        if left and strict:
            raise AnatomyError(f"{caller}: {refusal(kind, tensors, left, len(parts))}")
        out += left
    return tuple(out)


def reads(kinds: Kinds | Callable[[Mapping[str, Any]], Kinds]) -> Callable[[F], F]:
    """Decorate an initialiser that sets all parts of some kinds: a model with others that look alike is refused.

    The initialiser has a parameter `strict: bool = True`. The check precedes any change of the module. With
    `strict=False` the parts that were read are set, and a warning lists the tensors that are left as they are.

    Args:
        kinds: of parts, or a function that gives them from the initialiser's named arguments.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def checked(module: Any, *args: Any, strict: bool = True, **parameters: Any) -> Any:
            flag("strict", strict)
            wanted = kinds(parameters) if callable(kinds) else kinds
            tensors = named_tensors(module)
            left = require_read(wanted, tensors, strict=strict, caller=function.__name__)
            if left:
                warnings.warn(
                    f"{function.__name__}: {len(left)} tensors look like {' or '.join(wanted)} and are left as they "
                    f"are: {described(tensors, left)}",
                    stacklevel=2,
                )
            return function(module, *args, strict=strict, **parameters)

        return cast("F", checked)

    return decorate
