"""Files that commands write: checked before anything is computed, so that nothing else is ever replaced."""

import os
import re
from pathlib import Path

from weightscope._util import atomic
from weightscope._util.names import shortened
from weightscope._util.sources import POPULATION_FILE, is_population
from weightscope.errors import UsageError

# Suffix -> what is at the beginning, and somewhere in the first or last 64 KiB, of a file that weightscope wrote.
_KINDS = {
    ".png": rb"\x89PNG.*weightscope",
    ".pdf": rb"%PDF.*weightscope",
    ".svg": rb"<\?xml.*weightscope",
    ".h5": rb"weightscope-export",
    ".hdf5": rb"weightscope-export",
    ".npz": rb"PK\x03\x04.{26}(matrix|mean/\d+)\.npy",
    ".npy": rb"\x93NUMPY.*'shape': \((\d+), \1\)",
    ".py": rb'"""Initialise tensors of a network from an artifact',
    ".safetensors": rb'.{8}\{"__metadata__":\{"weightscope":',
}
_ENDS = 1 << 16
# Command -> the first and a later key of the object that its --json writes.
_KEYS = {
    "inspect": ("path|source|format", "hashes|recipe|unread|provenance"),
    "verify": ("source", "files"),
    "list": ("initialisers|structures|networks|datasets|recipes", ""),
    "covariance": ("n|networks|part", "transposed|pairs|correlations|rows"),
    "products": ("rows", "options"),
    "attention-maps": ("images|sequences", "layers"),
    "audit": ("passed", "checks"),
    "fit-init": ("format", "provenance"),
    "bench": ("runs|cells", "environment|seconds"),
}


def checked(path: str | os.PathLike[str], *suffixes: str, json_of: str | None = None) -> Path:
    """The path of a file that can be written, whose suffix is one of those if any are given.

    An existing file is replaced only if it is of the same kind: a figure, an artifact, an exported population, a
    standalone initialiser, a NumPy file, or the JSON of the command `json_of`. Anything else is a UsageError.
    """
    path = Path(path)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, NUL, permissions
        raise UsageError(f"{shortened(str(path))}: cannot be written: {getattr(error, 'strerror', error)}") from None
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{path}: expected a file name ending in {', '.join(suffixes)}")
    if path.is_dir():
        raise UsageError(f"{path}: expected a file name, found a folder")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: its folder {path.parent} does not exist; create it first")
    if path.is_symlink():
        raise UsageError(f"{path}: expected the name of a file, found a symbolic link; name the file that it points to")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: expected the name of a file, found a pipe or a device")
    folder = path.absolute().parent
    if path.name == POPULATION_FILE or (folder.name == "shards" and is_population(folder.parent)):
        raise UsageError(f"{path}: expected a name that no file of a population has; only `collect` writes these")
    atomic.check_writable(path)
    if path.exists() and not _same_kind(path, json_of):
        raise UsageError(f"{path}: exists, and this command would not have written it; name another file or remove it")
    return path


def _same_kind(path: Path, json_of: str | None) -> bool:
    try:
        with path.open("rb") as file:
            text = file.read(_ENDS)
            file.seek(max(len(text), path.stat().st_size - _ENDS))
            text += file.read()
    except OSError:  # it cannot be read
        return False
    pattern = _KINDS.get(path.suffix)
    if json_of is not None:
        first, later = _KEYS[json_of]
        pattern = rf'\{{\n "({first})": '.encode() + (rf'.*\n "({later})": '.encode() if later else b"")
    return not text or (pattern is not None and re.match(pattern, text, re.DOTALL) is not None)
