"""Read a pickle as data: nothing that it names is imported, called or instantiated.

The standard library's unpickler follows the instructions that build data. Each call in the pickle becomes a
`Call(name, arguments, state)` for the caller to interpret, and any other instruction is refused. It is the unpickler in
Python: the one in C allocates 64 GB for a memo if four bytes ask for it. `torch.load(weights_only=True)` runs no code,
but is no replacement (torch 2.13): nested tuples as keys or `bytearray(10**11)` end the process.
"""

import pickle
import struct
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, BinaryIO

from weightscope.errors import DataError

_DATA = (
    "PROTO FRAME MARK STOP POP NONE NEWTRUE NEWFALSE INT LONG LONG1 LONG4 BININT BININT1 BININT2 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS SETITEM SETITEMS "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID"
)
_DICTIONARIES = {"collections OrderedDict", "collections Counter"}
_ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)
_ERRORS += (EOFError, RecursionError, MemoryError, pickle.UnpicklingError, struct.error, Warning)


@dataclass
class Call:
    """A function named in a pickle with its arguments, not called."""

    name: str  # `module function`; empty for a persistent id, with its parts as arguments
    arguments: tuple[Any, ...] | None = None  # None for the bare function
    state: Any = None  # what would be given to the result's `__setstate__`


class Entries(dict[Any, Any]):
    """A dictionary of a pickle."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes | int):  # hashing a nested tuple can take forever
            raise ValueError("it has a dictionary with unusual keys")
        super().__setitem__(key, value)

    @classmethod
    def of(cls, pairs: Any) -> "Entries":
        """A dictionary of pairs, checked one by one."""
        out = cls()
        for key, value in pairs:
            out[key] = value
        return out


class _Handlers(dict[int, Callable[..., None]]):
    def __missing__(self, code: int) -> Callable[..., None]:
        raise ValueError(f"it uses the instruction {bytes([code])!r}, which is not needed to store such data")


class DataUnpickler(pickle._Unpickler):
    """Builds data; `allowed` are the functions that may be named, `instead` is what to do if others are."""

    # Of the base class, whose types typeshed does not state.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: BinaryIO, where: str, allowed: Collection[str], instead: str) -> None:
        super().__init__(file, encoding="latin1")  # strings of Python 2: one character for each byte
        self.where, self.allowed, self.instead = where, allowed, instead
        self.ids: list[Call] = []  # persistent ids

    def find_class(self, module: str, name: str) -> Call:
        """The function as data, or DataError with its name."""
        if f"{module} {name}" not in self.allowed:
            shown = ascii(f"{module}.{name}")[1:-1][:200]
            raise DataError(f"{self.where}: its pickle needs {shown}, which is not run; {self.instead}")
        return Call(f"{module} {name}")

    def persistent_load(self, pid: Any) -> Call:
        """A persistent id as data."""
        self.ids.append(Call("", tuple(pid)))
        return self.ids[-1]

    def read(self) -> Any:
        """The value of the pickle; DataError if it does anything but build data."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # invalid escapes in strings, which no writer of such files produces
                return self.load()
        except _ERRORS as error:
            reason = " ".join(ascii(str(error))[1:-1].split())[:200] or "it is truncated; download it again"
            raise DataError(f"{self.where}: not a pickle that can be read as data: {reason}") from error

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Call) or function.arguments is not None or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is no function")
        if function.name in _DICTIONARIES:
            (pairs,) = arguments or ((),)
            self.append(Entries.of(pairs.items() if isinstance(pairs, dict) else pairs))
        else:
            self.append(Call(function.name, arguments))

    def _build(self) -> None:
        state, item = self.stack.pop(), self.stack[-1]
        if isinstance(item, Call) and item.arguments is not None:
            item.state = state
        elif not isinstance(item, dict):  # the state of an OrderedDict, the versions of its modules, is dropped
            raise ValueError("it sets the state of something that is no object")

    def _dictionary(self) -> None:
        self.append(Entries())

    def _dictionary_of_items(self) -> None:
        items = self.pop_mark()
        self.append(Entries.of(zip(items[::2], items[1::2], strict=True)))

    dispatch = _Handlers(
        {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _DATA.split()}
        | {pickle.REDUCE[0]: _reduce, pickle.BUILD[0]: _build}
        | {pickle.EMPTY_DICT[0]: _dictionary, pickle.DICT[0]: _dictionary_of_items}
        # Sets are lists here, whose members need not be hashed.
        | {pickle.EMPTY_SET[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]]}
        | {pickle.ADDITEMS[0]: pickle._Unpickler.dispatch[pickle.APPENDS[0]]}
        | {pickle.FROZENSET[0]: pickle._Unpickler.dispatch[pickle.LIST[0]]}
    )
