"""A population in one HDF5 file, as `export` writes it: /weights (n, D) f32 and what else `exporting.export` says.

The file begins with HDF5's user block of 512 bytes, which holds the SHA-256 of everything after it as text.
"""

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from weightscope.errors import DataError, WeightscopeError
from weightscope.population.manifest import Import, Manifest
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec

USER_BLOCK = 512
_TILE = 250  # networks of a part, where the file has no recipe that says it
_DIGEST = re.compile(rb"weightscope-export 1, sha256 of what follows byte 512: ([0-9a-f]{64})\n\0*")


def seal(file: BinaryIO) -> None:
    """Write the digest of everything after the user block into it."""
    text = f"weightscope-export 1, sha256 of what follows byte {USER_BLOCK}: {_content(file)}\n"
    file.seek(0)
    file.write(text.encode())


def read(path: Path) -> tuple[Manifest, np.ndarray]:
    """The manifest of an exported population, and the indices of its networks, after the digest was compared."""
    try:
        with open(path, "rb") as file:
            stated = _DIGEST.fullmatch(file.read(USER_BLOCK))
            if stated is None:
                raise DataError(
                    f"{path}: expected a file of `weightscope export` with its digest, found another one; arrays of "
                    "a Keras model are read from numpy.savez"
                )
            if (found := _content(file)) != stated[1].decode():
                raise DataError(
                    f"{path}: checksum mismatch, expected sha256 {stated[1][:16].decode()}, found {found[:16]}; "
                    "export it again"
                )
        with h5py.File(path, "r") as h5:
            spec, recipe, environment = (bytes(h5[name][()]).decode() for name in ("spec", "recipe", "environment"))
            indices = h5["network"][:]
        networks = int(indices[-1]) + 1 if len(indices) else 0
        made = _made(recipe, networks) if recipe else Import(_TILE)
        return Manifest(made, WeightSpec.from_json(spec), json.loads(environment), networks), indices
    except FileNotFoundError:
        raise DataError(f"{path}: expected a population, found no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (WeightscopeError, KeyError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected a file of `weightscope export`, found another one ({error})") from error


def _made(recipe: str, networks: int) -> Recipe:
    """The recipe, without the snapshots, which are not exported."""
    values = tomllib.loads(recipe)
    values["population"] |= {"networks": max(networks, 1)}
    values["population"].pop("snapshots", None)
    return Recipe.parse(values)


def _content(file: BinaryIO) -> str:
    """SHA-256 of everything after the user block."""
    file.flush()
    file.seek(USER_BLOCK)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
