"""`export`: a population as one HDF5 file, for sharing and for many networks; every analysis takes it like a folder."""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import tomli_w

from weightscope._util import atomic
from weightscope._util.sources import EXPORTED
from weightscope._util.workers import Workers
from weightscope.errors import UsageError
from weightscope.population.one_file import USER_BLOCK, seal
from weightscope.population.reading import Population
from weightscope.population.shards import new_file

_HEADERS = 2**16  # bytes, more than HDF5's own structures take
_PART = 4096  # networks that a worker copies at least


def export(
    population: Population,
    path: str | Path,
    select: str | Sequence[str] = "*",
    *,
    workers: Workers | int | None = None,
) -> Path:
    """Write one HDF5 file, which analyses take like the population, and which can be read without weightscope.

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
    if path.suffix not in EXPORTED:
        hint = "; for the array alone use numpy.save(path, population.weights(select))" if path.suffix == ".npy" else ""
        raise UsageError(f"{path}: expected a file name ending in {' or '.join(EXPORTED)}{hint}")
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
        with new_file(file, USER_BLOCK) as h5:
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
        seal(file)
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
