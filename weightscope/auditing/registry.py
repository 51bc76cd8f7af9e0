"""Expectations of initialisers by name."""

from collections.abc import Callable

from weightscope._util.plugins import Registry
from weightscope.auditing.report import Check

EXPECTATIONS: Registry[Callable[..., list[Check]]] = Registry("audit")
"""Initialiser -> `f(tensors: NamedTensors, **parameters) -> list[Check]`.

`.details[name]["variants"]` are the parameters that `audit(model)` tries, if not only the defaults.
"""
