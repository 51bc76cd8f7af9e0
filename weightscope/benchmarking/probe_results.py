"""The results of linear probes on disk, so that a probe that was stopped resumes: one small file for each network."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope._util.sources import read_regular
from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.training.request import own_code_hashes, weight_hashes

PROBES = "probes"
_NAME = "arm.json"
_LARGEST = 16 * 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResults:
    """Metrics of the networks of one arm in `folder/0.json`, `folder/1.json`, ...; `arm.json` says of what.

    Attributes:
        folder: of the arm.
        names: of the metrics of each network.
    """

    folder: Path
    names: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, fingerprint: str, names: tuple[str, ...]) -> "ProbeResults":
        """The results of an arm, none if it is new.

        Args:
            folder: see the class.
            recipe: of the arm.
            fingerprint: of the data.
            names: see the class.

        Raises:
            DataError: if the folder holds results of another recipe, data, weights or code.
        """
        text = json.dumps({**_identity(recipe), f"data {recipe.data.name}": fingerprint}, indent=1)
        wanted = json.loads(text)
        atomic.make_folder(folder)
        atomic.sweep(folder)
        if not atomic.create(folder / _NAME, text.encode() + b"\n"):
            there = _read(folder / _NAME)
            if differing := sorted(k for k in {*wanted, *there} if there.get(k) != wanted.get(k)):
                raise DataError(
                    f"{folder} holds a probe with another {', '.join(differing)}; give another folder (-o), or the "
                    "same arguments and sources"
                )
        return cls(folder, names)

    def read(self, network: int) -> dict[str, np.ndarray] | None:
        """The metrics of one network; None if there are none, or they are damaged."""
        path = self.folder / f"{network}.json"
        if not path.exists():
            return None
        try:
            values = _read(path)
            return {name: np.asarray(_number(values[name])) for name in self.names}
        except (DataError, KeyError, TypeError, ValueError):
            _log.warning("%s: damaged; the network is probed again", path)
            return None

    def write(self, network: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Store the metrics of one network."""
        values = {name: _text(metrics[name]) for name in self.names}
        atomic.write(self.folder / f"{network}.json", json.dumps(values, allow_nan=False).encode() + b"\n")


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What a network's result depends on, by name; the number of networks, training and teacher are no part of it."""
    values = recipe.to_dict()
    values.pop("distillation", None)
    training, population = values["training"], values["population"]
    values["training"] = {name: training[name] for name in ("epochs", "batch_size")}
    values["population"] = {"seed": population["seed"]}
    hashes = weight_hashes(recipe.model_copy(update={"distillation": None}))
    return {**values, **manifests.artifact_hashes(recipe), **own_code_hashes(recipe), **hashes}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give another folder (-o)") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object, found {type(found).__name__}; give another folder (-o)")
    return found


def _text(values: np.ndarray) -> Any:
    """Numbers for JSON, which has no NaN or infinity: these are text."""
    if isinstance(values, np.ndarray) and values.ndim:
        return [_text(value) for value in values]
    value = values.item()
    return value if np.isfinite(value) else str(value)


def _number(value: Any) -> Any:
    """The inverse of `_text`."""
    return (
        [_number(v) for v in value] if isinstance(value, list) else value if isinstance(value, bool) else float(value)
    )
