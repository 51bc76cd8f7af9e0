"""`reads`: an initialiser refuses a model of which it would set only a part."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from weightscope._util.checks import flag
from weightscope.anatomy import named_tensors, require_read
from weightscope.anatomy.lookalikes import described

F = TypeVar("F", bound=Callable[..., Any])
Kinds = tuple[str, ...]


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
