"""`track`: which initialised parameters were overwritten afterwards, and by what code?

Frameworks initialise as well: a `post_init`, an `apply(init_weights)`, a late `reset_parameters`. Two public libraries
overwrote Mamba's initialisation in this way for months without an error. Within `track`, every in-place operation on
the model's memory is recorded with the code that called it. Tensors written by an initialiser are copied, which takes
their memory again; later changes are reported by name, file and line.
"""

import sys
import traceback
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightscope.errors import DataError, UsageError
from weightscope.init.base import RUNNING


@dataclass(frozen=True)
class Overwrite:
    """An initialised parameter whose value changed afterwards."""

    name: str  # of the parameter
    initialiser: str  # that set it
    by: str  # "file:line in function" of the first later write and its caller, or another cause
    changed: float  # share of the entries that differ; 1.0 if the shape differs

    def __str__(self) -> str:
        share = f"{100 * self.changed:.0f} % changed"
        return f"`{self.name}`, set by {self.initialiser}, was overwritten by {self.by} ({share})"


def _changed(before: Tensor, after: Tensor) -> float:
    """The share of entries that differ by more than a change of precision explains."""
    if before.shape != after.shape:
        return 1.0
    mine, theirs = (tensor.detach().cpu().double() for tensor in (before, after))
    limits = [torch.finfo(tensor.dtype) for tensor in (before, after)] if before.dtype != after.dtype else []
    rtol, atol = max((x.eps for x in limits), default=0.0), max((x.tiny for x in limits), default=0.0)
    same = torch.isclose(theirs, mine, rtol=rtol, atol=atol, equal_nan=True)
    return 1 - float(same.double().mean()) if same.numel() else 0.0


class track(TorchDispatchMode):
    """Track which parameters initialisers set, and what overwrites them afterwards.

    Within the block every in-place write to the model's tensors is recorded, also through `.data` and views. A write
    by a function of `weightscope.init`, or by one passed to `init.get`, is initialisation; a later initialiser may
    build on an earlier one. Any other write to an initialised tensor is recorded with its place in the code, and
    `t.overwritten` lists those that changed a value, also after the block. Casting the model to another precision or
    device does not count.

    Args:
        model: the module to track.

    Raises:
        UsageError: if it is not a module.

    Example:
        >>> with track(model) as t:
        ...     mimetic_attention_(model)
        ...     model.apply(model._init_weights)
        >>> for overwrite in t.overwritten:
        ...     print(overwrite)
        `head.weight`, set by trunc_normal_, was overwritten by train.py:12 in _init_weights (100% changed)
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"track: expected a module, found {type(model).__name__}")
        super().__init__()
        self.model = model
        self._set: dict[str, tuple[str, Tensor]] = {}  # the initialiser, and what it wrote last
        self._culprits: dict[str, str] = {}
        self._storages: dict[int, list[str]] = {}
        for name, tensor in self._tensors().items():
            if not tensor.is_meta:
                self._storages.setdefault(_address(tensor), []).append(name)

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    @property
    def initialised(self) -> dict[str, str]:
        """Parameter -> the initialiser that set it last."""
        return {name: initialiser for name, (initialiser, _) in self._set.items()}

    @property
    def overwritten(self) -> tuple[Overwrite, ...]:
        """The initialised parameters that changed afterwards by any means, in the model's present state."""
        tensors, out = self._tensors(), []
        for name, (initialiser, value) in self._set.items():
            by = self._culprits.get(name, "code outside the block, or by replacing the tensor")
            by = by if name in tensors else "its removal from the model"
            changed = _changed(value, tensors[name]) if name in tensors else 1.0
            out += [Overwrite(name, initialiser, by, changed)] if changed else []
        return tuple(out)

    def check(self) -> None:
        """Raise DataError if parameters were overwritten, naming them, their initialisers and the code that did it."""
        if found := self.overwritten:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            raise DataError(f"{len(found)} of {len(self._set)}: {'; '.join(map(str, found[:3]))}{more}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = self._targets(func, args, kwargs)
        initialiser = RUNNING.get()
        out = func(*args, **kwargs)
        tensors = self._tensors() if names and initialiser is not None else {}
        for name in names:
            if initialiser is not None and name in tensors:
                self._set[name] = (initialiser, tensors[name].detach().clone())
                self._culprits.pop(name, None)
            elif name in self._set:
                self._culprits.setdefault(name, _places(sys._getframe(1)))
        return out

    def _targets(self, func: Any, args: Any, kwargs: Any) -> list[str]:
        """The names of the model's tensors that an operation writes."""
        names: list[str] = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    names += self._storages.get(_address(tensor), [])
        return names


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(frame: FrameType) -> str:
    """The innermost two frames outside torch and weightscope: `file:line in function`."""
    frames = (outer for outer, _ in traceback.walk_stack(frame))
    others = (f for f in frames if f.f_globals.get("__name__", "").split(".")[0] not in ("torch", "weightscope"))
    places = (f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in islice(others, 2))
    return ", called from ".join(places) or "unknown code"
