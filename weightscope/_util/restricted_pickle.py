"""Read a pickle as data, without executing it.

`pickle.load` calls any function that a pickle names, so a downloaded file can run code. `torch.load(weights_only=True)`
restricts this, but has had holes, loads all tensors at once, and does not read the NumPy arrays of CIFAR. This reader
only follows the instructions that build dictionaries, lists, tuples, strings and numbers. It imports, calls and
instantiates nothing; each call in the pickle becomes a `Call(name, arguments, state)` for the caller to interpret.
"""

import pickletools
import warnings
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from weightscope.errors import DataError

_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class Call:
    """A function named in a pickle with its arguments, not called.

    Attributes:
        name: `module function`.
        arguments: what it would be called with; None for the bare function.
        state: what would be given to the result's `__setstate__`.
    """

    name: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None


class Machine:
    """The pickle machine's stack and memo; subclasses may understand more instructions, or calls.

    Attributes:
        allowed: names of allowed functions, each as `module function`.
        limit: maximum number of instructions; a short pickle can take hours or all memory.
    """

    limit = 3_000_000

    def __init__(self, allowed: frozenset[str]) -> None:
        self.allowed = allowed
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Pop what was pushed since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def take(self, count: int) -> list[Any]:
        """Pop that many values."""
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        start = len(self.stack) - count
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def name(self, name: str) -> None:
        """Push a function, named as `module function`."""
        if name not in self.allowed:
            raise ValueError(f"it calls {name.replace(' ', '.')}, which is not needed to store such data")
        self.stack.append(Call(name))

    def call(self) -> None:
        """Replace a function and its arguments by the result."""
        function, arguments = self.take(2)
        if not isinstance(function, Call) or function.arguments is not None or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is no function")
        self.stack.append(Call(function.name, arguments))

    def build(self) -> None:
        """Set the state of the value below it."""
        (state,) = self.take(1)
        if not isinstance(self.stack[-1], Call) or self.stack[-1].arguments is None:
            raise ValueError("it sets the state of something that is no object")
        self.stack[-1].state = state

    def put(self, items: list[Any]) -> None:
        """Set keys and values, in turn, in the dictionary on top."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it sets the items of something that is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int):  # hashing a nested tuple can take forever
                raise ValueError("it has a dictionary with unusual keys")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to something that is no list")
        self.stack[-1].extend(items)

    def step(self, operation: str, argument: Any) -> None:
        """Follow one instruction."""
        if operation in _LITERALS:
            self.stack.append(argument)
        elif operation in _CONSTANTS:
            self.stack.append(_CONSTANTS[operation])
        elif operation in _TUPLES:
            self.stack.append(tuple(self.take(_TUPLES[operation])))
        else:
            self.compound(operation, argument)

    def compound(self, operation: str, argument: Any) -> None:
        """Follow an instruction that does more than push a constant."""
        match operation:
            case "MARK":
                self.marks.append(len(self.stack))
            case "TUPLE":
                self.stack.append(tuple(self.since_mark()))
            case "EMPTY_LIST":
                self.stack.append([])
            case "LIST":
                self.stack.append(self.since_mark())
            case "EMPTY_DICT":
                self.stack.append({})
            case "DICT":
                items = self.since_mark()
                self.stack.append({})
                self.put(items)
            case "APPEND":
                self.extend(self.take(1))
            case "APPENDS":
                self.extend(self.since_mark())
            case "SETITEM":
                self.put(self.take(2))
            case "SETITEMS":
                self.put(self.since_mark())
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "GLOBAL":
                self.name(argument)
            case "STACK_GLOBAL":
                self.name(" ".join(map(str, self.take(2))))
            case "REDUCE":
                self.call()
            case "BUILD":
                self.build()
            case _:
                raise ValueError(f"it uses the instruction {operation}, which is not needed to store such data")


def loads(raw: bytes, where: str, allowed: frozenset[str]) -> Any:
    """The value that a pickle describes, with `Call`s in place of calls.

    Strings of Python 2 come as text in Latin-1, one character for each byte.

    Args:
        raw: the pickle.
        where: of its file, for errors.
        allowed: names of the functions that may be named, each as `module function`.

    Raises:
        DataError: if it is no pickle, or names another function, or does anything but build data.
    """
    return run(Machine(allowed), raw, where)


def run(machine: Machine, source: bytes | BinaryIO, where: str) -> Any:
    """The result of a machine for a pickle; a stream is left at the end of the pickle. Raises as `loads`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # invalid escapes in strings, which no writer of such files produces
            for count, (operation, argument, _) in enumerate(pickletools.genops(source)):
                if count >= machine.limit:
                    raise ValueError(f"it has more than {machine.limit} instructions")
                if operation.name == "STOP":
                    (value,) = machine.take(1)
                    return value
                if operation.name not in _IGNORED:
                    machine.step(operation.name, argument)
    except (ValueError, IndexError, KeyError, Warning) as error:
        raise DataError(f"{where}: not a pickle that can be read as data: {error}") from error
    raise DataError(f"{where}: the pickle is truncated; download it again")


NUMPY_ARRAY = frozenset(
    {
        "numpy.core.multiarray _reconstruct",
        "numpy._core.multiarray _reconstruct",
        "numpy ndarray",
        "numpy dtype",
        "_codecs encode",
    }
)
"""The functions that a pickled NumPy array names."""


def uint8_array(value: Any, where: str) -> np.ndarray:
    """The uint8 array that a pickle's `Call` describes.

    Args:
        value: from `loads`, as NumPy pickles an array: `_reconstruct(ndarray, (0,), b'b')` with the state
            `(version, shape, dtype, fortran order, bytes)`.
        where: of its file, for errors.

    Raises:
        DataError: if it describes something else.
    """
    match value:
        case Call(name, _, (int(), tuple(shape), Call("numpy dtype", (str(kind), *_)), fortran, data)) if (
            name.endswith("_reconstruct") and kind in ("u1", "|u1") and not fortran
        ):
            raw = _bytes(data)
            if raw is not None and all(isinstance(n, int) and n >= 0 for n in shape):
                array = np.frombuffer(raw, np.uint8)
                if array.size == int(np.prod(shape, dtype=object)):
                    return array.reshape(shape)
    raise DataError(f"{where}: expected an array of unsigned bytes in C order, found something else")


def _bytes(value: Any) -> bytes | None:
    """Raw bytes as pickles of Python 2 and 3 hold them, or None."""
    match value:
        case Call("_codecs encode", (str(text), "latin1" | "latin-1")) | str(text):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                return None
        case bytes():
            return value
    return None
