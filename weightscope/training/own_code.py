"""`OwnCode`: users' own functions, made known to worker processes."""

import importlib
import os
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import cloudpickle

from weightscope._util import plugins
from weightscope.errors import UsageError

_THIS_PROCESS = uuid.uuid4().hex

# Module -> hash of its source when this worker imported it for a task.
_versions: dict[str, str] = {}


@dataclass(frozen=True)
class OwnCode:
    """A user's own functions, made known to a worker process.

    Attributes:
        references: the functions of a recipe.
        path: of the launching process, on which their modules are: its working directory and `sys.path`.
        passed: cloudpickle of those of `plugins.passed()`, which cannot be imported.
        process: of the launching process, where there is nothing to do.
        hashes: of the sources of the others, which a worker must have, too.
    """

    references: tuple[str, ...]
    path: tuple[str, ...]
    passed: bytes
    process: str
    hashes: tuple[str, ...] = ()

    @classmethod
    def of(cls, references: Iterable[str]) -> "OwnCode":
        """What another process needs to use these references."""
        references = tuple(references)
        passed = plugins.passed(references)
        hashes = tuple(
            "" if name in passed else plugins.source_hash(plugins.imported(name), name) for name in references
        )
        path = (os.getcwd(), *filter(None, sys.path))
        return cls(references, path, cloudpickle.dumps(passed), _THIS_PROCESS, hashes)

    def load(self) -> None:
        """Import the references, unless this is the launching process."""
        if not self.references or self.process == _THIS_PROCESS:
            return
        plugins.restore(cloudpickle.loads(self.passed))
        before = list(sys.path)
        sys.path[:] = dict.fromkeys((self.path[0], *before, *self.path))
        try:
            for reference, expected in zip(self.references, self.hashes, strict=True):
                module = sys.modules.get(reference.partition(":")[0])
                if expected and module is not None and _versions.get(module.__name__, expected) != expected:
                    importlib.reload(module)  # a worker outlives the call of `collect` for which it was started
                item = plugins.imported(reference)
                if not expected:
                    continue
                if (found := plugins.source_hash(item, reference)) != expected:
                    raise UsageError(f"{reference}: expected source hash {expected} in a worker, found {found}")
                _versions[reference.partition(":")[0]] = expected
        finally:
            sys.path[:] = before
