"""One thread for small problems, and all of them for the few large ones.

On matrices of some hundred rows threads cost more time than they save, and many times more on a busy machine, where
each operation waits for the slowest of them. Every public function therefore runs in `one_thread`, and the large
products and decompositions within it in `threads_for`.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, Literal

# Sizes from which threads pay: D of a product X^T X of shape (D, D), n of a decomposition of an n x n matrix.
LARGE = {"product": 2_000, "decomposition": 1_500}

_LOADERS = ("numpy", "scipy.linalg", "scipy.special", "torch")  # modules whose import loads a library with threads


class one_thread(ContextDecorator):
    """Run NumPy, SciPy and torch on one thread within a block or a function, and give the others back after it.

    Blocks may be nested, and used in several threads of Python. Libraries that are imported within a block are limited
    from the next block on, a nested one included.

    Example:
        >>> with one_thread():
        ...     values = numpy.linalg.eigvalsh(small)
        >>> @one_thread()
        ... def products(source): ...
    """

    def __enter__(self) -> None:
        global _inside
        _here.depth += 1
        found = [name for name in _LOADERS if name in sys.modules] == _loaded
        if _here.depth > 1 and found:
            return
        with _lock:
            _inside += _here.depth == 1
            if not found:
                _find()
            _limit()

    def __exit__(self, *exception: object) -> None:
        global _inside
        _here.depth -= 1
        if _here.depth:
            return
        with _lock:
            _inside -= 1
            if _here.torch:
                sys.modules["torch"].set_num_threads(_before["torch"])
                _here.torch = False
            if _inside == 0:
                _set(limited=False)
                _before.clear()


@contextmanager
def threads_for(kind: Literal["product", "decomposition"], size: int) -> Iterator[None]:
    """Give all threads back within a block inside `one_thread`, if the problem has at least the size of `LARGE`."""
    if size < LARGE[kind] or not _here.depth:
        yield
        return
    _set(limited=False)
    try:
        yield
    finally:
        _set(limited=True)


class _Here(threading.local):
    """The blocks that a thread of Python is in; torch's number of threads belongs to a thread of Python."""

    depth = 0
    torch = False  # whether it is limited


_here = _Here()
_lock = threading.RLock()
_inside = 0  # threads of Python in a block
_loaded: list[str] = []  # of _LOADERS, when _libraries were found
_libraries: list[Any] = []  # of BLAS in this process
_before: dict[str, int] = {}  # file of a library, or "torch" -> its number of threads outside of the blocks


def _find() -> None:
    """Find the libraries of BLAS, which takes milliseconds."""
    global _loaded, _libraries
    from threadpoolctl import ThreadpoolController

    _loaded = [name for name in _LOADERS if name in sys.modules]
    _libraries = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]


def _set_library(library: Any, number: int) -> None:
    """Set a library's number from any thread of Python; threadpoolctl 3.8 obeys only the first that sets one."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(number)


def _limit() -> None:
    """Limit what is not limited yet."""
    for library in _libraries:
        if library.filepath not in _before:
            _before[library.filepath] = library.get_num_threads()
            _set_library(library, 1)
    torch = sys.modules.get("torch")
    if not _here.torch and hasattr(torch, "set_num_threads"):  # it is not there yet while torch is being imported
        _before.setdefault("torch", torch.get_num_threads())  # type: ignore[union-attr]
        torch.set_num_threads(1)  # type: ignore[union-attr]
        _here.torch = True


def _set(limited: bool) -> None:
    """Set all libraries to one thread, or to what they had outside of the blocks."""
    for library in _libraries:
        if library.filepath in _before:
            _set_library(library, 1 if limited else _before[library.filepath])
    if _here.torch:
        sys.modules["torch"].set_num_threads(1 if limited else _before["torch"])
