"""A total deadline for answers from a server, headers included, whatever the pace at which it sends them.

The timeouts of an HTTP library are those of single reads: a server that sends one byte of a header every few seconds
would be waited for without end. So answers are received in a thread, which is abandoned at the deadline.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 8  # items received before they are used


class TooSlow(Exception):
    """The deadline has passed."""


def within(deadline: float, items: Callable[[], Iterable[T]]) -> Iterator[T]:
    """The items of an iterable that is made and iterated in a thread of its own.

    Args:
        deadline: on the clock `time.monotonic`.
        items: makes the iterable; its errors are raised here.

    Raises:
        TooSlow: if an item or the end does not arrive before the deadline.
    """
    received: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(_AHEAD)
    abandoned = threading.Event()

    def receive() -> None:
        try:
            for item in items():
                received.put(("item", item))
                if abandoned.is_set():
                    return
            received.put(("end", None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            received.put(("error", error))

    threading.Thread(target=receive, daemon=True).start()
    try:
        while True:
            try:
                kind, value = received.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TooSlow from None
            if kind == "end":
                return
            if kind == "error":
                raise value  # type: ignore[misc]
            yield value  # type: ignore[misc]
    finally:
        abandoned.set()
        while not received.empty():  # the thread may be waiting for room
            received.get_nowait()
