"""What users give as sources: populations, their members, artifacts, recipes of the package, regular files."""

import re
from pathlib import Path

from weightscope._util import remote
from weightscope._util.names import unknown
from weightscope.errors import RecipeError, UsageError

POPULATION_FILE = "population.json"
EXPORTED = (".h5", ".hdf5")  # a population in one file; see `weightscope.population.exporting`
ARTIFACT_KEY = "weightscope"  # in the metadata of a safetensors file: it holds a fitted initialiser

# A symbolic link in a checkout and an editable install, a folder in a wheel.
_RECIPES = Path(__file__).parents[1] / "populations"
_URL = re.compile(r"(?!hf:)([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)  # pathlib drops one slash


def location(source: str | Path) -> Path:
    """The path of a population; for a URL of fsspec a `UPath`, which does what populations do with paths."""
    text = re.sub("^file://", "", str(source), flags=re.IGNORECASE)
    if text.startswith("hf:/"):
        raise UsageError(f"{text}: expected a folder or the URL of an object store, found an address of the hub")
    if (url := _URL.match(text)) is None:
        return Path(text)
    return remote.remote_path(f"{url[1].lower()}://{text[url.end() :]}")


def as_path(source: str | Path) -> Path:
    """The path of a file; UsageError for a URL."""
    if _URL.match(str(source)):
        raise UsageError(f"{source}: expected a path on this machine; only populations may be in a store")
    return Path(source)


def is_population(source: object) -> bool:
    """Whether a path denotes a population: it ends in .pop, existing or not, contains a manifest, or was exported."""
    if not (isinstance(source, str | Path) or remote.is_remote(source)) or str(source).startswith("hf://"):
        return False
    if "::" in str(source):  # a network of one; fsspec would take it for a chain of stores
        return False
    path = location(source)  # type: ignore[arg-type]
    with remote.reporting(path):
        return path.suffix in (".pop", *EXPORTED) or (path / POPULATION_FILE).exists()


def population_member(source: object) -> tuple[Path, int, int | None] | None:
    """`(PATH, k, E)` of the text `"PATH::k@E"`: network k of the population in folder PATH, after E epochs (or steps).

    E is None for `"PATH::k"`, the end of training; the result is None for anything else.
    """
    path, colons, index = str(source).rpartition("::") if isinstance(source, str | Path) else ("", "", "")
    if not colons or not is_population(path):
        return None
    if (found := re.fullmatch(r"([0-9]{1,9})(?:@([0-9]{1,15}))?", index)) is None:
        wanted = "PATH::k or PATH::k@EPOCH with the index k of a network, counted from 0"
        raise UsageError(f"{source}: expected {wanted}, found {index!r}")
    return location(path), int(found[1]), None if found[2] is None else int(found[2])


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


def read_bytes(path: Path) -> bytes:
    """The content of a file, or of an object in a store."""
    return remote.get(path) if remote.is_remote(path) else path.read_bytes()


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
