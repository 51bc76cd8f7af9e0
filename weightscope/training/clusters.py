"""What the pools of dask and of ray share."""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from weightscope.errors import UsageError

_LOOK_SECONDS = 1.0


def cluster_package(name: str, backend: str, package: str) -> Any:
    """The module of a cluster's package.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f'backend {backend} is not installed: `pip install "{package}"`') from error


def one_line(error: Exception) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


class Lookout:
    """Calls a function of a cluster again and again in a thread, which may block when the cluster is gone.

    Attributes:
        latest: what the function returned last; None before that.
    """

    def __init__(self, look: Callable[[], Any]) -> None:
        self.latest: Any = None
        self._heard = time.monotonic()
        self._over = threading.Event()

        def watch() -> None:
            while not self._over.wait(_LOOK_SECONDS):
                with contextlib.suppress(Exception):  # what counts is how long there is no answer
                    self.latest = look()
                    self._heard = time.monotonic()

        threading.Thread(target=watch, daemon=True).start()

    def age(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._heard

    def stop(self) -> None:
        """End the thread after its current call."""
        self._over.set()
