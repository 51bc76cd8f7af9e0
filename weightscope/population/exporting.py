"""`export`: a population as one HDF5 file, for sharing.

The file begins with HDF5's user block of 512 bytes, which holds the SHA-256 of everything after it as text. HDF5 skips
the block; `read_export` compares the digest first, so that HDF5 never parses a damaged file.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tomli_w

from weightscope._util import atomic
from weightscope._util.sources import open_regular
from weightscope._util.workers import Workers
from weightscope.errors import DataError, UsageError
from weightscope.population.reading import Population
from weightscope.population.shards import new_file
from weightscope.spec import WeightSpec

_HEADERS = 2**16  # bytes, more than HDF5's own structures take
_USER_BLOCK = 512
_PART = 4096  # networks that a worker copies at least
_DIGEST = re.compile(rb"weightscope-export 1, sha256 of what follows byte 512: ([0-9a-f]{64})\n\0*")
_MOST_TEXT = 64 * 2**20
SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True)
class Exported:
    """What an exported file holds, without its weights; attributes as of `Population`."""

    networks: int
    spec: WeightSpec
    metrics: dict[str, np.ndarray]
    recipe: str
    environment: dict[str, object]


def export(
    population: Population,
    path: str | Path,
    select: str | Sequence[str] = "*",
    *,
    workers: Workers | int | None = None,
) -> Path:
    """Write one HDF5 file that can be read without weightscope.

    It holds `/weights` (n, D') float32 (contiguous, so that it can be memory-mapped), `/network` (n,) the networks'
    indices, `/seed` (n,), `/metrics/*`, and the texts `/spec` (JSON), `/recipe` (TOML, empty without one) and
    `/environment` (JSON). The weights are copied block by block. `select` has patterns as in `WeightSpec.select`; D' is
    the size of the selected tensors. `workers`, as of `covariance`, copy a population of more than 4,096 networks; the
    bytes do not depend on them. WeightscopeError if the file cannot be written; the old one is kept, and no
    partial one is left.

    Example:
        >>> export(Population("digits.pop"), "digits.h5")
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path}: expected the name of a file, found a folder")
    if path.suffix not in SUFFIXES:
        hint = "; for the array alone use numpy.save(path, population.weights(select))" if path.suffix == ".npy" else ""
        raise UsageError(f"{path}: expected a file name ending in {' or '.join(SUFFIXES)}{hint}")
    spec = population.spec.select(select)
    shape = (len(population), spec.size)
    columns = {"network": population.indices, "seed": population.seeds}
    columns |= {f"metrics/{name}": values for name, values in population.metrics.items()}
    recipe = getattr(population, "recipe", None)
    texts = {
        "spec": spec.to_json(),
        "recipe": "" if recipe is None else tomli_w.dumps(recipe.to_dict()),
        "environment": json.dumps(population.environment),
    }
    columns |= {name: np.asarray(np.bytes_(text.encode())) for name, text in texts.items()}
    with atomic.replacing(path) as file:
        # Find a full disk before HDF5 does: version 1.14 crashes the interpreter when a write to its file fails.
        size = 4 * shape[0] * shape[1] + sum(values.nbytes for values in columns.values()) + _HEADERS
        os.posix_fallocate(file.fileno(), 0, size)
        os.ftruncate(file.fileno(), 0)
        with new_file(file, _USER_BLOCK) as h5:
            for name, values in columns.items():
                h5.create_dataset(name, data=values, track_times=False)
            weights = h5.create_dataset("weights", shape, "<f4", track_times=False)
            if weights.size:
                weights[-1:, -1:] = 0  # gives the array its place in the file
            place = weights.id.get_offset()
        if place is not None:
            file.flush()  # what HDF5 wrote, before others write beside it
            starts = np.cumsum([0, *(len(part) for part in population.parts(_PART))])
            copy = partial(_copy, os.path.abspath(file.name), place, starts, select)
            from weightscope.statistics.samples import over_parts  # SciPy

            over_parts(population, copy, workers, networks=_PART)
        text = f"weightscope-export 1, sha256 of what follows byte {_USER_BLOCK}: {_content(file)}\n"
        file.seek(0)
        file.write(text.encode())
    return path


def _copy(file: str, place: int, starts: np.ndarray, select: str | Sequence[str], part: Population, i: int) -> int:
    """Write the rows of a part to their place in the file; how many they are."""
    row = int(starts[i])
    with open(file, "r+b") as out:
        for block in part.chunks(select):
            out.seek(place + row * block.shape[1] * block.itemsize)
            out.write(block.astype("<f4", copy=False).data)
            row += len(block)
    return row - int(starts[i])


def read_export(path: str | Path) -> Exported:
    """Describe a file that `export` wrote, after its digest was compared."""
    try:
        with open_regular(path) as file:
            stated = _DIGEST.fullmatch(file.read(_USER_BLOCK))
            if stated is None:
                raise DataError(f"{path}: expected a file of `weightscope export` with its digest, found another one")
            if (found := _content(file)) != stated[1].decode():
                raise DataError(
                    f"{path}: checksum mismatch, expected sha256 {stated[1][:16].decode()}, found {found[:16]}; "
                    "export it again"
                )
            file.seek(0)
            with h5py.File(file, "r") as h5:
                return _described(h5)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path}: expected a file of `weightscope export`, found another one ({error})") from error


def _described(h5: h5py.File) -> Exported:
    def text(name: str) -> str:
        data = h5[name]
        if data.shape != () or data.dtype.kind != "S" or data.dtype.itemsize > _MOST_TEXT:
            raise ValueError(f"/{name}: expected a text")
        return bytes(data[()]).decode()

    spec = WeightSpec.from_json(text("spec"))
    networks = len(h5["network"])
    if h5["weights"].shape != (networks, spec.size):
        raise ValueError(f"/weights: expected shape {(networks, spec.size)}, found {h5['weights'].shape}")
    metrics = {name: values[:] for name, values in h5["metrics"].items()}
    return Exported(networks, spec, metrics, text("recipe"), json.loads(text("environment")))


def _content(file: Any) -> str:
    """SHA-256 of everything after the user block."""
    file.flush()
    file.seek(_USER_BLOCK)
    return hashlib.file_digest(file, "sha256").hexdigest()
