"""Modules and state dicts in memory as sources of tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from weightscope.checkpoint.entries import MemoryEntry, Store
from weightscope.errors import DataError

# Hints that a finder asks for; a module keeps them as attributes where a file has them in its config.
_HINTS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "num_key_value_heads")


def open_module(module: nn.Module) -> Store:
    """The state dict of a module, with its configuration where it has one."""
    store = open_mapping(module.state_dict(keep_vars=True), type(module).__name__)
    store.statistics = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
    store.config = _config(module)
    return store


def open_mapping(tensors: Mapping[str, Any], label: str = "state dict") -> Store:
    """The tensors of a mapping.

    Raises:
        DataError: if a key is no text, or there is no tensor at all.
    """
    if not all(isinstance(name, str) for name in tensors):
        raise DataError(f"{label}: expected names of tensors as keys, found other keys")
    entries = {name: MemoryEntry(name, value) for name, value in tensors.items() if isinstance(value, Tensor)}
    if tensors and not entries:
        there = ", ".join(list(tensors)[:6])
        raise DataError(f"{label}: expected a mapping of names to tensors, found none under {there}")
    others = {name: f"a {type(value).__name__}, no tensor" for name, value in tensors.items() if name not in entries}
    return Store(label, dict(entries), others, dict(getattr(tensors, "config", None) or {}))


def _config(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if isinstance(config, Mapping):
        return dict(config)
    out = {}
    for key in _HINTS:
        found = {v for m in module.modules() if type(v := getattr(m, key, None)) is int}
        if len(found) == 1:  # where layers differ, one number would be wrong for some
            out[key] = found.pop()
    return out
