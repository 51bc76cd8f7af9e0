"""The progress bar of long work."""

import threading

from tqdm import tqdm

DELAY = 2.0  # seconds until it is shown, if standard error is a terminal


class Bar(tqdm):
    """A progress bar whose lock is not tqdm's, a semaphore shared between processes that would leak if killed."""

    _lock = threading.RLock()
