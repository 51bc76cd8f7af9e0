"""Architectures of networks as data: what a file does not say about its tensors.

The tables in `architectures/*.toml` are named after their rows; each has

    types, timm, classes    by which a config chooses it: `model_type` of transformers (with _ for -, without _text,
                            _vision and the like), a pattern at the start of timm's `architecture`, `_class_name` of
                            diffusers
    config                  what the config must state besides; "*" is anything
    needs, names, beside    by which tensors choose it: all of `needs` are in the block of the attention module, nothing
                            but `names` is (a leading dot stands for the module, the tensors below count), and all of
                            `beside` are in the file; `untyped` tables count only if no config names an architecture
    path                    a pattern that the path of the module has
    packed, rows            the packed weights whose rows are in an order of `attention_modules.LAYOUTS`
    norm, after, offset     the norm beside the attention, whether it acts after it, what is added to its weight
    heads, head_widths      keys of the config; `head_width` where it states none
    logits                  their factor, if neither 1 / sqrt(k) nor in the config
    normalised              whether queries and keys are, by a norm without weights
    notes                   what else there is in the attention, of `attention_part.NOTES`

and `names.toml` has the names of weights.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from weightscope.anatomy.tensors import NamedTensors

_ANY = (bool, int, float, str, list, dict)
_SUFFIX = re.compile(r"(_(text|vision|audio|speech|encoder|decoder|model|config))+$")


@dataclass(frozen=True)
class Architecture:
    """One table; see the module."""

    name: str
    types: list[str] = field(default_factory=list)
    timm: str = ""
    classes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    untyped: bool = False
    path: str = ""
    packed: list[str] = field(default_factory=list)
    rows: str = ""
    norm: list[str] = field(default_factory=list)
    after: bool = False
    offset: int = 0
    heads: list[str] = field(default_factory=list)
    head_widths: list[str] = field(default_factory=list)
    head_width: int = 0
    logits: float | None = None
    normalised: bool = False
    notes: list[str] = field(default_factory=list)


@cache
def tables() -> tuple[dict[str, Any], tuple[Architecture, ...]]:
    """The names of weights, and all architectures."""
    found: list[Architecture] = []
    names: dict[str, Any] = {}
    for file in sorted(files("weightscope.anatomy").joinpath("architectures").iterdir(), key=lambda file: file.name):
        if file.name == "names.toml":
            names = tomllib.loads(file.read_text())
        elif file.name.endswith(".toml"):
            found += [Architecture(name, **entry) for name, entry in tomllib.loads(file.read_text()).items()]
    return names, tuple(found)


def names(kind: str) -> Any:
    """A list or table of `names.toml`."""
    return tables()[0][kind]


def stated(tensors: NamedTensors, path: str) -> tuple[str, str, str]:
    """The model's type, timm's architecture and diffusers' class that the config states at a path, or nothing."""
    kind, timm, name = (tensors.hint(path, (key,), str) or "" for key in ("model_type", "architecture", "_class_name"))
    return _SUFFIX.sub("", kind.replace("-", "_")), timm, name


@cache
def offset_of(kind: str, norm: str) -> int | None:
    """What a norm of a type of models adds to its weight; None of an unknown type."""
    mine = [one for one in tables()[1] if kind in one.types]
    named = [one.offset for one in mine if norm in one.norm]
    return max(named or (one.offset for one in mine), default=None)


def known(tensors: NamedTensors, path: str) -> list[Architecture]:
    """The architectures that an attention module may be of: first those of the config, then those of its names."""
    kind, timm, name = stated(tensors, path)
    chosen, alike = [], []
    for one in tables()[1]:
        if one.path and not re.search(one.path, path):
            continue
        if (
            (kind and kind in one.types)
            or (timm and one.timm and re.match(one.timm, timm))
            or (name and name in one.classes)
        ):
            chosen += [one] * _states(tensors, path, one.config)
        elif (one.needs or one.names) and not (one.untyped and (kind or timm or name)):
            alike += [one] * (_states(tensors, path, one.config) and _has(tensors, path, one))
    return chosen + alike


def _states(tensors: NamedTensors, path: str, wanted: Mapping[str, Any]) -> bool:
    found = {key: tensors.hint(path, (key,), _ANY) for key in wanted}
    return all(found[key] == value or (value == "*" and found[key] is not None) for key, value in wanted.items())


def _has(tensors: NamedTensors, path: str, one: Architecture) -> bool:
    block, _, module = path.rpartition(".")
    inside = tensors.under(block)

    def there(wanted: str, names: Iterable[str]) -> bool:
        whole = module + wanted if wanted.startswith(".") else wanted
        return any(name == whole or name.startswith(f"{whole}.") for name in names)

    return (
        all(there(wanted, inside) for wanted in one.needs)
        and (not one.names or all(any(there(wanted, (name,)) for wanted in one.names) for name in inside))
        and all(any(name.split(".")[-1] == wanted for name in tensors.every) for wanted in one.beside)
    )
