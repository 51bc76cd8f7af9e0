"""What users give as sources: populations, their members, artifacts, recipes of the package, regular files."""

import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import cast

from weightscope._util.names import shortened, unknown
from weightscope._util.remote import RemotePath
from weightscope.errors import RecipeError, UsageError

POPULATION_FILE = "population.json"
ARTIFACT_KEY = "weightscope"  # in the metadata of a safetensors file: it holds a fitted initialiser

# A symbolic link in a checkout and an editable install, a folder in a wheel.
_RECIPES = Path(__file__).parents[1] / "populations"
_PATH_BYTES, _NAME_BYTES = 4095, 255  # of Linux
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
_URL = re.compile(  # pathlib drops one slash
    r"(?!hf:)((?:\w+::)*(?:(?:s3a?|gs|gcs|az|abfss?|memory)(?=:/)|[a-z][a-z0-9+.-]+(?=://))):/+", re.IGNORECASE
)


def location(source: str | Path | RemotePath) -> Path:
    """The path of a population; a `RemotePath`, which does what populations do with paths, for an fsspec URL."""
    text = re.sub("^file://", "", str(source), flags=re.IGNORECASE)
    if text.startswith("hf:/"):
        raise UsageError(f"{text}: expected a folder or the URL of an object store, found an address of the hub")
    if (url := _URL.match(text)) is None:
        return as_path(text)
    return cast(Path, RemotePath(f"{url[1].lower()}://{text[url.end() :]}"))


def as_path(source: str | Path) -> Path:
    """The path; UsageError if no file can have it."""
    raw = os.fsencode(str(source))
    if _URL.match(str(source)):
        raise UsageError(f"{location(source)}: expected a path on this machine; only populations may be in a store")
    if b"\0" in raw or len(raw) > _PATH_BYTES or max(map(len, raw.split(b"/"))) > _NAME_BYTES:
        found = "a NUL character" if b"\0" in raw else f"{len(raw):,}"
        limits = f"at most {_PATH_BYTES:,} bytes, {_NAME_BYTES} for each name, without NUL"
        raise UsageError(f"{shortened(str(source))}: expected a path of {limits}, found {found}")
    return Path(source)


def is_population(source: object) -> bool:
    """Whether a path denotes a population: it ends in .pop, existing or not, or contains a manifest."""
    if not isinstance(source, str | Path | RemotePath) or str(source).startswith("hf://"):
        return False
    path = location(source)
    return path.suffix == ".pop" or (path / POPULATION_FILE).exists()


def population_member(source: object) -> tuple[Path, int] | None:
    """`(PATH, k)` of the text `"PATH::k"`, network k of the population in folder PATH; None for anything else."""
    path, colons, index = str(source).rpartition("::") if isinstance(source, str | Path) else ("", "", "")
    if not colons or not is_population(path):
        return None
    if not re.fullmatch(r"[0-9]{1,9}", index):
        raise UsageError(f"{source}: expected PATH::k with the index k of a network, counted from 0, found {index!r}")
    return location(path), int(index)


def recipes() -> dict[str, Path]:
    """The files of the recipes that are part of the package, by name."""
    return {path.stem: path for path in sorted(_RECIPES.glob("*.toml"), key=lambda path: path.stem)}


def recipe_path(source: str | Path) -> Path:
    """The file of a recipe, given by its path, which is not checked, or by the name of a recipe of the package."""
    path = as_path(source)
    if path.is_file() or path.suffix or len(path.parts) != 1:
        return path
    if path.is_dir():
        raise RecipeError(f"{path}: expected a .toml file, a population or the name of a recipe, found another folder")
    shipped = recipes()
    if str(source) not in shipped:
        raise RecipeError(unknown("recipe", str(source), shipped, "the path of a .toml file"))
    return shipped[str(source)]


def open_regular(path: str | Path) -> io.BufferedIOBase:
    """A regular file, open for reading in binary; OSError if it is a pipe, a socket or a device, or unreadable.

    An object in a store is read as a whole.
    """
    if isinstance(path, RemotePath):
        return io.BytesIO(path.read_bytes())
    # Without O_NONBLOCK, opening a pipe without a writer would wait.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        found = next((kind for test, kind in _KINDS if test(mode)), "a device")
        raise OSError(errno.EINVAL, f"expected a regular file, found {found}", str(path))
    return file


def read_regular(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file; OSError if it has more than `most`."""
    if isinstance(path, RemotePath):
        found = path.stat().st_size
        data = path.read_bytes() if found <= most else b""
    else:
        with open_regular(path) as file:
            data = file.read(most + 1)
            found = max(file.seek(0, os.SEEK_END), len(data)) if len(data) > most else 0
    if found > most:
        raise OSError(errno.EFBIG, f"expected at most {most:,} bytes, found {found:,}", str(path))
    return data


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
