"""Files that commands write: checked before anything is computed, so that nothing else is ever replaced."""

import os
from pathlib import Path

from weightscope._util import atomic
from weightscope._util.sources import POPULATION_FILE, is_population
from weightscope.errors import UsageError

WRITTEN_BY = "written_by"  # first key of the JSON of a command; its value is "weightscope COMMAND"
# Suffix -> what is in the first or last 64 KiB of a file that weightscope wrote.
_MARKS = {
    ".png": b"tEXtSoftware\0weightscope",
    ".pdf": b"/Creator (weightscope)",
    ".svg": b"<dc:title>weightscope</dc:title>",
    ".h5": b"weightscope-export 1, sha256",
    ".hdf5": b"weightscope-export 1, sha256",
    ".html": b'<meta name="generator" content="weightscope report">',
    ".safetensors": b'{"__metadata__":{"weightscope":',
}
_ENDS = 1 << 16


def writable_path(
    path: str | os.PathLike[str], *suffixes: str, json_of: str | None = None, overwrite: bool = False
) -> Path:
    """The path of a file that can be written, whose suffix is one of those if any are given.

    An existing file is replaced only if weightscope wrote it, as it says in itself, and it is of the same kind: that of
    its suffix, or JSON of the command `json_of`. Any other is a UsageError unless `overwrite`.
    """
    path = Path(path)
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{path}: expected a file name ending in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: its folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: expected the name of a file, found a folder or a device")
    folder = path.absolute().parent
    if path.name == POPULATION_FILE or (folder.name == "shards" and is_population(folder.parent)):
        raise UsageError(f"{path}: expected a name that no file of a population has; only `collect` writes these")
    atomic.check_writable(path)
    if path.exists() and not overwrite and not _ours(path, json_of):
        advice = "name another file, remove it, or add --overwrite"
        raise UsageError(f"{path}: exists, and nothing in it says that this command wrote it; {advice}")
    return path


def _ours(path: Path, json_of: str | None) -> bool:
    try:
        with path.open("rb") as file:
            text = file.read(_ENDS)
            file.seek(max(len(text), path.stat().st_size - _ENDS))
            text += file.read()
    except OSError:  # it cannot be read
        return False
    mark = f'\n "{WRITTEN_BY}": "weightscope {json_of}"'.encode() if json_of else _MARKS.get(path.suffix)
    return not text or (mark is not None and mark in text)
