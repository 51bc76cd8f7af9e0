"""Random numbers of torch without the generator of the process, which all threads share: who draws from it beside us
would change our networks.
"""

import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightscope.errors import UsageError

T = TypeVar("T")
_TRIES = 3
_NUMPYS: Any = np.random
_PYTHONS = getattr(random.getrandbits, "__self__", None)


class seeded(TorchDispatchMode):
    """Within the block, random operations of this thread that name no generator draw from one of our own.

    They give the numbers that `torch.manual_seed(seed)` would give, on every device.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # of torch's; else the first operation imports its compiler, which takes more than a second

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation with a generator, if it draws and has none."""
        kwargs = kwargs or {}
        if not draws(function, args, kwargs):
            return function(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        device = torch.device(tensors[0].device if tensors else kwargs.get("device") or "cpu")
        if device.type == "meta":
            return function(*args, **kwargs)
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        if function is torch.ops.aten.native_dropout.default:  # of a GPU; it takes no generator
            x, rate, _ = args
            kept = torch.empty_like(x).bernoulli_(1 - rate, generator=self.generators[device])
            return x * kept / (1 - rate), kept.bool()
        return _with_generator(function)(*args, **kwargs | {"generator": self.generators[device]})


def draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation of torch draws random numbers from a generator of the process."""
    if not _may_draw(function):
        return False
    given = {a.name: a.default_value for a in function._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    rates = [given[name] for name in ("dropout", "dropout_p") if name in given]
    return given.get("generator") is None and given.get("train") is not False and rates != [0.0]


@cache  # `tags` takes ten times as long as a small operation
def _may_draw(function: Any) -> bool:
    no_draw = torch.ops.aten._fused_sdp_choice.default  # tagged all the same
    return function is not no_draw and torch.Tag.nondeterministic_seeded in function.tags


def _with_generator(function: Any) -> Any:
    """The form of an operation that takes a generator."""
    names = {argument.name for argument in function._schema.arguments}
    if "generator" in names:
        return function
    packet = function._overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        if {argument.name for argument in found._schema.arguments} == names | {"generator"}:
            return found
    raise UsageError(
        f"{packet} draws random numbers that cannot be repeated beside other threads; use another function"
    )


def repeatable(work: Callable[[], T], what: str) -> T:
    """The result of users' code, which is refused if it draws from `random` or `numpy.random`, as other threads may.

    Where their states have changed, it is called again to see which thread drew: NumPy's lock keeps the others out, and
    calls of `random` are those of this thread.
    """
    before = random.getstate(), _numpys()
    found = work()
    if (random.getstate(), _numpys()) == before:
        return found
    for _ in range(_TRIES):  # others may seed NumPy's generator without its lock
        drawn: list[Any] = []

        def watch(_frame: Any, event: str, function: Any, drawn: list[Any] = drawn) -> None:
            if event == "c_call" and getattr(function, "__self__", None) is _PYTHONS:
                drawn.append(function)

        profile = sys.getprofile()
        with _NUMPYS.get_bit_generator().lock:
            state = _numpys()
            sys.setprofile(watch)
            try:
                found = work()
            finally:
                sys.setprofile(profile)
            if not drawn and _numpys() == state:
                return found
    raise UsageError(
        f"{what} draws from `random` or `numpy.random`, whose generators all threads share, so its numbers cannot be "
        "repeated; use torch's functions, or the generator that an initialiser is given"
    )


def _numpys() -> Any:
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - the global one
    return state["key"].tobytes(), state["pos"]
