"""What looks like attention, an MLP or a depthwise filter by its name and shape, and was not read as one.

An initialiser that sets the parts that it recognises and leaves the others would make a network that is initialised
in part, without a word. So what resembles a part is found independently of the adapters, and compared with the parts.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weightscope.anatomy.attention_modules import SCHEMES as ATTENTION_SCHEMES
from weightscope.anatomy.convolution import weight_norm
from weightscope.anatomy.mlp import POSITIONAL
from weightscope.anatomy.tensors import NamedTensors

_ATTENTION = re.compile(r"(attn|attention)s?\d*$", re.IGNORECASE)
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_?forward|ff|experts)s?\d*$", re.IGNORECASE)
_FILTER = re.compile(r"(^|[._])(dw_?conv|conv_?dw|depth_?wise(_conv)?)[._\d]")
# Projections of queries, keys and values under any module's name.
_PROJECTIONS = {"qk", "kv"} | {name.split(".")[0] for s in ATTENTION_SCHEMES for name in (s.q, s.k, s.v)}


def unparsed(kind: str, tensors: NamedTensors, parts: Iterable[Any]) -> tuple[str, ...]:
    """The names of the tensors that look like parts of a kind and belong to none that was found.

    - attention: two or more matrices in a module `..attn`, `..attention`, or one that has packed or separate
      projections of queries and keys;
    - MLPs: two or more matrices in a module `..mlp`, `..ffn`, `..feed_forward`, `..ff` or `..experts`;
    - depthwise filters: filters of the shapes (C, 1, k, k, k) and (C, 1, 0, 0), those of weight normalisation, and
      tensors named `dwconv`, `conv_dw` or `depthwise` with a kernel.

    Args:
        kind: "attention modules", "MLPs" or "depthwise convolutions"; none of another kind is ever listed.
        tensors: of the model.
        parts: those found.
    """
    found = list(parts)
    names = {name for part in found for name in _names(part.parameters)}
    done = {tensors.identity(name) for name in names}
    left = [name for name in tensors.names if tensors.identity(name) not in done]
    if kind == "depthwise convolutions":
        return tuple(name for name in left if _filters(tensors, name))
    owner = {"attention modules": _attention_module, "MLPs": _mlp_module}.get(kind)
    return () if owner is None else _grouped(tensors, left, [part.name for part in found], owner)


def _names(parameters: Mapping[str, tuple[str, ...]] | tuple[str, ...]) -> list[str]:
    """The tensors' names of a part, from either form of its `parameters`."""
    return [n for names in parameters.values() for n in names] if isinstance(parameters, Mapping) else [*parameters]


def _grouped(
    tensors: NamedTensors, left: list[str], parsed: list[str], owner: Callable[[str], str | None]
) -> tuple[str, ...]:
    """The matrices of modules that have at least two of them and contain no part; in the order of the model."""
    modules: dict[str, list[str]] = {}
    for name in left:
        module = owner(name)
        if module is not None and _is_matrix(tensors.shape(name)):
            modules.setdefault(module, []).append(name)
    several = {
        module
        for module, names in modules.items()
        if (len(names) > 1 or "qkv" in names[0].split("."))
        and not any(_within(module, path) or _within(path, module) for path in parsed)
    }
    return tuple(name for name in left if owner(name) in several and _is_matrix(tensors.shape(name)))


def _within(inner: str, outer: str) -> bool:
    return inner == outer or outer == "" or inner.startswith(f"{outer}.")


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """A matrix, a 1 x 1 convolution, or a stack of matrices (experts)."""
    if len(shape) == 3 and min(shape[1:]) > 1:
        return True
    return len(shape) >= 2 and min(shape[:2]) > 1 and all(n == 1 for n in shape[2:])


def _deepest(name: str, pattern: re.Pattern[str]) -> str | None:
    """The path of a tensor up to its last module whose name matches."""
    words = name.split(".")
    for i in range(len(words) - 2, -1, -1):
        if pattern.search(words[i]):
            return ".".join(words[: i + 1])
    return None


def _attention_module(name: str) -> str | None:
    found = _deepest(name, _ATTENTION)
    words = name.split(".")
    if found is None and any(word in _PROJECTIONS for word in words[-3:]):
        at = next(i for i, word in enumerate(words) if i >= len(words) - 3 and word in _PROJECTIONS)
        return ".".join(words[:at])
    return found


def _mlp_module(name: str) -> str | None:
    return None if POSITIONAL.search(name) else _deepest(name, _MLP)


def _filters(tensors: NamedTensors, name: str) -> bool:
    shape = tensors.shape(name)
    if len(shape) < 3 or all(n == 1 for n in shape[2:]):
        return False
    if len(shape) == 4 and shape[1] == 1 and 0 in shape:
        return True
    path = name.rpartition(".")[0]
    if tensors.own(path, "transposed") is True:
        return False
    volume = len(shape) == 5 and shape[1] == 1 and shape[0] > 1 and (tensors.own(path, "groups") or shape[0]) > 1
    normed = len(shape) == 4 and shape[1] == 1 and shape[0] > 1 and weight_norm(tensors, name)
    return volume or normed or _FILTER.search(name) is not None


def described(tensors: NamedTensors, names: tuple[str, ...]) -> str:
    """The first few of the tensors with their shapes."""
    some = ", ".join(f"`{name}` {tensors.shape(name)}" for name in names[:3])
    return some + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refusal(kind: str, tensors: NamedTensors, names: tuple[str, ...], parts: int) -> str:
    """The error message for tensors that look like parts of a kind and were not read, with what to do next."""
    step = (
        f"strict=False uses the {parts} that were read and lists the others"
        if parts
        else "none can be used; write an initialiser for this layout (docs: Your own initialiser)"
    )
    return (
        f"expected {kind} that can be read, found {len(names)} tensors that look like them and were not: "
        f"{described(tensors, names)}; {step}"
    )
