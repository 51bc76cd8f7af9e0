"""`export`: a population as one HDF5 file, for sharing."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weightscope._util import atomic, toml
from weightscope.errors import UsageError
from weightscope.population.reading import Population
from weightscope.population.shard_format import new_file

_HEADERS = 2**16  # bytes, more than HDF5's own structures take


def export(population: Population, path: str | Path, select: str | Sequence[str] = "*") -> Path:
    """Write one HDF5 file that can be read without weightscope.

    It holds `/weights` (n, D') float32 (contiguous, so that it can be memory-mapped), `/network` (n,) the networks'
    indices, `/seed` (n,), `/metrics/*`, and the texts `/spec` (JSON), `/recipe` (TOML), `/environment` (JSON). The
    weights are copied block by block.

    Args:
        population: what to write; open it with `partial=True` to export an incomplete one.
        path: the file; replaced if it exists.
        select: patterns as in `WeightSpec.select`; D' is the size of the selected tensors.

    Raises:
        UsageError: if a pattern matches nothing or the path is a folder.
        DataError: if a shard is damaged.
        WeightscopeError: if the file cannot be written; no partial file is left.

    Example:
        >>> export(Population("digits.pop"), "digits.h5")
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path}: expected the name of a file, found a folder")
    spec = population.spec.select(select)
    shape = (len(population), spec.size)
    columns = {"network": population.indices, "seed": population.seeds}
    columns |= {f"metrics/{name}": values for name, values in population.metrics.items()}
    texts = {
        "spec": spec.to_json(),
        "recipe": toml.dumps(population.recipe.to_dict()),
        "environment": json.dumps(population.environment),
    }
    columns |= {name: np.asarray(np.bytes_(text.encode())) for name, text in texts.items()}
    with atomic.replacing(path) as file:
        # Find a full disk before HDF5 does: version 1.14 crashes the interpreter when a write to its file fails.
        size = 4 * shape[0] * shape[1] + sum(values.nbytes for values in columns.values()) + _HEADERS
        os.posix_fallocate(file.fileno(), 0, size)
        os.ftruncate(file.fileno(), 0)
        with new_file(file) as h5:
            for name, values in columns.items():
                h5.create_dataset(name, data=values, track_times=False)
            weights = h5.create_dataset("weights", shape, "<f4", track_times=False)
            start = 0
            for block in population.chunks(select):
                weights[start : start + len(block)] = block
                start += len(block)
    return path
