"""The number of threads of small problems."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run NumPy, SciPy and torch on one thread within the block.

    On matrices of some hundred rows threads cost more time than they save, and many times more on a busy machine, where
    each operation waits for the slowest of them. SciPy must have been imported before: only loaded libraries are
    limited.
    """
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own MKL is not among the libraries that threadpoolctl finds
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)
