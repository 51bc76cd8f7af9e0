"""`OwnCode`: users' own functions, made known to worker processes."""

import os
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import cloudpickle

from weightscope._util import plugins, trust
from weightscope.errors import UsageError

_THIS_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class OwnCode:
    """A user's own functions, made known to a worker process."""

    references: tuple[str, ...]
    path: tuple[str, ...]  # working directory and `sys.path` of the launching process, with their modules
    passed: bytes  # cloudpickle of those of `plugins.passed()`, which cannot be imported
    process: str  # the launching process, where there is nothing to do
    hashes: tuple[str, ...] = ()  # of the sources of the others, which a worker must have, too

    @classmethod
    def of(cls, references: Iterable[str]) -> "OwnCode":
        """What another process needs to use these references."""
        references = tuple(references)
        passed = plugins.passed(references)
        hashes = tuple("" if r in passed else plugins.source_hash(r) for r in references)
        path = (os.getcwd(), *filter(None, sys.path))
        return cls(references, path, cloudpickle.dumps(passed), _THIS_PROCESS, hashes)

    def load(self) -> None:
        """Import the references, unless this is the launching process, and compare their sources."""
        if not self.references or self.process == _THIS_PROCESS:
            return
        plugins.restore(cloudpickle.loads(self.passed))
        before = list(sys.path)
        sys.path[:] = dict.fromkeys((self.path[0], *before, *self.path))
        try:
            for reference, expected in zip(self.references, self.hashes, strict=True):
                if not expected:
                    continue
                if (found := plugins.source_hash(reference)) != expected:
                    raise UsageError(f"{reference}: expected source hash {expected} in a worker, found {found}")
                trust.approve(reference, plugins.source_of(reference)[0], remember=False)
                plugins.imported(reference)
        finally:
            sys.path[:] = before
