"""The file format of fits: a safetensors file with arrays and one JSON header; and fits to one network.

`{"format": FORMAT, "version": 1, ...}`: the format says what was fitted, the rest is described by the class of that
format. Next to it is the SHA-256 of header and arrays, which is compared when a file is read. Reading executes nothing.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from weightscope._util import atomic
from weightscope._util.results import Result
from weightscope._util.sources import ARTIFACT_KEY
from weightscope.errors import DataError

KEY = ARTIFACT_KEY  # of the header in the file's metadata
DIGEST = "sha256"  # key of the digest


class Artifact(Result):
    """A fitted initialiser that can be saved; `load_artifact` reads it."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, in JSON types; the header of the artifact."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the artifact by name."""

    def save(self, path: str | Path) -> Path:
        """Write the artifact atomically; a WeightscopeError if that fails."""
        header, arrays = self._contents()
        atomic.write(path, _ordered(to_bytes(arrays, metadata={KEY: header, DIGEST: digest(header, arrays)})))
        return Path(path)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 that `save` writes."""
        return digest(*self._contents())

    def _contents(self) -> tuple[str, dict[str, np.ndarray]]:
        header = json.dumps(self.to_dict(), allow_nan=False, sort_keys=True, separators=(",", ":"))
        # Not `ascontiguousarray`, which makes a scalar a vector.
        return header, {name: np.asarray(array, order="C") for name, array in self.arrays().items()}


def read_contents(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON header and the arrays of an artifact of any format, after comparing its digest; else a DataError."""
    try:
        Path(path).stat()
        with safe_open(str(path), framework="numpy") as tensors:
            metadata = tensors.metadata() or {}
            arrays = {name: tensors.get_tensor(name) for name in tensors.keys()} if KEY in metadata else {}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path}: expected an initialiser's artifact, found no file") from None
    except (DataError, SafetensorError, OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise DataError(
            f"{path}: expected an initialiser's artifact, found an invalid safetensors file: {error}"
        ) from error
    if KEY not in metadata:
        raise DataError(
            f"{path}: expected an initialiser's artifact, found a safetensors file without its header; "
            "`weightscope fit-init` writes artifacts"
        )
    stated = metadata.get(DIGEST, "(none stated)")
    if (found := digest(metadata[KEY], arrays)) != stated:
        raise DataError(
            f"{path}: checksum mismatch: expected sha256 {stated[:16]}..., found {found[:16]}...; the file was "
            "changed or damaged: restore it, or fit again"
        )
    return json.loads(metadata[KEY]), arrays


def digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a header, and of names, types, shapes and bytes of arrays, as hexadecimal digits."""
    out = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        out.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        out.update(array.reshape(-1).view(np.uint8).data)
    return out.hexdigest()


def _ordered(raw: bytes) -> bytes:
    """A safetensors file with its metadata sorted: the library writes several keys in random order."""
    stop = 8 + int.from_bytes(raw[:8], "little")
    values = json.loads(raw[8:stop])
    values["__metadata__"] = dict(sorted(values["__metadata__"].items(), reverse=True))
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[stop:]


NETWORK_FORMAT = "weightscope-network-initialiser"


class NetworkFit(Artifact, BaseModel):
    """An initialiser fitted to one network: its numbers, layer by layer, and where they came from."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    structure: str
    layers: tuple[Any, ...]
    left_out: tuple[str, ...] = ()  # layers that are not fitted, and why
    provenance: dict[str, Any] = Field(default_factory=dict, exclude=True)

    def to_dict(self) -> dict[str, Any]:
        numbers = self.model_dump(mode="json", exclude=None if self.left_out else {"left_out"})
        return {"format": NETWORK_FORMAT, "version": 1, "numbers": numbers, "provenance": self.provenance}

    def arrays(self) -> dict[str, np.ndarray]:
        """Of `filters`: `"i.mean"` (k*k,) and `"i.covariance"` (k*k, k*k) of layer i; otherwise none."""
        return {}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer, with its numbers."""
        return [layer.model_dump() for layer in self.layers]

    def summary(self) -> str:
        return f"{self.structure} of {len(self.layers)} layers, fitted to {self._origin}"

    def text(self) -> str:
        return f"{self.structure}, fitted to {self._origin}\n{self.report()}"

    def report(self) -> str:
        """The numbers with their fit, layer by layer."""
        raise NotImplementedError

    @property
    def _origin(self) -> str:
        return self.provenance.get("source") or "a network in memory"
