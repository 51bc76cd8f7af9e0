"""Map a function over items on workers, the results in the order of the items."""

import contextlib
import itertools
import logging
import logging.handlers
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from weightscope._util.threads import one_thread
from weightscope._util.trust import trusted, trusting
from weightscope._util.workers import TilesFailed, Workers, chosen_workers, spread
from weightscope.errors import WeightscopeError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_WAITING = 4  # results of each worker that may wait for an earlier one


@dataclass(frozen=True, eq=False)
class _Item:
    index: int
    value: Any


def in_order(
    task: Callable[[Any], T], items: Sequence[Any], names: Sequence[str], workers: Workers | int | None
) -> Generator[T | WeightscopeError, None, None]:
    """`task(item)` of each item, in their order; a `WeightscopeError` takes the place of a result that it prevents.

    Tasks run on one thread, in this process's folder and with its trust, so that results do not depend on the workers;
    one worker is this process. Few results wait for an earlier one. `names` of the items are for messages.

    Raises:
        WeightscopeError: if the workers of an item are lost, or a cluster.
    """
    chosen = chosen_workers("loky", workers, None).on_device("cpu", len(items))
    one, left, held = partial(_in_folder, task, os.getcwd(), trusted()), enumerate(items), dict[int, Any]()
    if not chosen.many:
        yield from (one(_Item(*each)) for each in left)
        return
    waiting = deque(_Item(*each) for each in itertools.islice(left, _WAITING * (chosen.count or 16)))
    try:
        with contextlib.closing(
            spread(partial(_with_warnings, one), waiting, chosen, lambda item: names[item.index])
        ) as results:
            for index in range(len(items)):
                while index not in held:
                    item, (found, warnings) = next(results)
                    held[item.index] = found
                    for text in warnings:
                        _log.warning(text)
                yield held.pop(index)
                waiting.extend(_Item(*each) for each in itertools.islice(left, 1))
    except TilesFailed as error:
        item, why = next(iter(error.errors.items()))
        raise WeightscopeError(f"{names[item.index]}: {why}; run the same command again, with fewer workers") from why


def _with_warnings(task: Callable[[_Item], T], item: _Item) -> tuple[T, list[str]]:
    """The result of a task on a worker, and what it warned of."""
    logger, kept = logging.getLogger("weightscope"), logging.handlers.BufferingHandler(1 << 16)
    logger.addHandler(kept)
    logger.propagate = False
    try:
        return task(item), [record.getMessage() for record in kept.buffer]
    finally:
        logger.removeHandler(kept)
        logger.propagate = True


def _in_folder(task: Callable[[Any], T], folder: str, trust: bool, item: _Item) -> T | WeightscopeError:
    """The result of a task in the folder of the caller, which a machine of a cluster may not have."""
    try:
        with contextlib.chdir(folder if os.path.isdir(folder) else os.sep), trusting(trust), one_thread():
            return task(item.value)
    except WeightscopeError as error:
        return error
