"""`Checkpoint`: the tensors of one trained network, read lazily by name."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.names import listing
from weightscope._util.results import Result, text_table
from weightscope._util.sources import ARTIFACT_KEY
from weightscope.checkpoint.adapters import merge
from weightscope.checkpoint.files import Folder, open_path
from weightscope.checkpoint.tensors import FileCheck, Store, StoredTensor, not_weights, open_mapping, open_module
from weightscope.errors import DataError, UsageError
from weightscope.spec import TensorSpec, WeightSpec

_STATISTICS = ("running_mean", "running_var")
_log = logging.getLogger(__name__)


class MissingTensor(DataError, KeyError):
    """A name that is not in a checkpoint, or not among its weights (exit code 3)."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class Checkpoint(Mapping[str, Tensor], Result):
    """The tensors of one trained network by name; each is read when it is asked for, and no code is executed.

    Iteration, `len` and `in` cover the weights: floating-point tensors. Others (integers, quantised and complex
    numbers) are listed in `skipped` with the reason; `raw` reads them.

    The files of a model at the hub are downloaded into huggingface_hub's cache, once. `HF_ENDPOINT`, `HF_HUB_OFFLINE`,
    `HF_TOKEN` and `HF_HOME` apply.

    Args:
        source: a `.safetensors` file; a `.pt`, `.pth`, `.bin` or `.pth.tar` file of `torch.save`; an `.npz` file,
            `.msgpack` of Flax, `.gguf`, `.pkl` of arrays; a model folder, sharded or not, or of
            `torch.distributed.checkpoint`; `hf://org/name` or `hf://org/name@revision`; an `nn.Module`; a mapping of
            tensors.
        key: name of the dictionary of weights to read, in a training checkpoint with several (`"ema"`), with dots
            between those that lie in each other (`"model.language_model"`).
        adapter: the folder of a LoRA adapter of peft, or hf://org/name, which is added to the weights.
        quiet: whether not to warn of `note`.

    Attributes:
        source: as text, for labels.
        config: the model's `config.json`; empty if it has none.
        metadata: free text of a safetensors file.
        commit: the commit at the hub that everything is read from; None elsewhere.
        note: which weights were read, if there are others like them (an average, a teacher); else empty.
        nonfinite: name -> number of NaN and infinite entries, of the tensors read so far.

    Raises:
        DataError: if the source is missing, damaged, needs code, or cannot be fetched. One line.
        UsageError: if the source is not one of the above.

    Example:
        >>> checkpoint = Checkpoint("hf://facebook/dinov2-small")
        >>> checkpoint.shape("encoder.layer.0.attention.attention.query.weight")
        (384, 384)
        >>> checkpoint["encoder.layer.0.attention.attention.query.weight"].dtype
        torch.float32
    """

    def __init__(
        self,
        source: "str | Path | nn.Module | Mapping[str, Any]",
        *,
        key: str | None = None,
        adapter: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        named, options = isinstance(source, str | Path), {"key": key, "adapter": adapter, "quiet": quiet}
        self._given = (source, options) if named else None
        self.key, self.adapter = key, None if adapter is None else str(adapter)
        self._store = _open(source, key)
        if adapter is not None:
            self._store = merge(self._store, _open(adapter, None))
        empty = [name for name, entry in self._store.tensors.items() if entry.shape == (0,)]
        if 2 * len(empty) > len(self._store.tensors):
            raise DataError(
                f"{self._store.label}: {listing(empty, 2)} are empty, as DeepSpeed ZeRO-3 leaves them; collect the "
                "weights with zero_to_fp32.py and give that file"
            )
        self.note = self._store.note
        if self.note and not quiet:
            _log.warning("%s: %s", self._store.label, self.note)
        self._files = self._store.files or Folder(Path())
        self.source = self._store.label
        self.config: dict[str, Any] = self._store.config
        self.metadata: dict[str, str] = self._store.metadata
        self.commit = self._files.commit
        self.nonfinite: dict[str, int] = {}

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Name -> why a tensor is not among the weights."""
        return not_weights(self._store.tensors) | self._store.unreadable

    @cached_property
    def _weights(self) -> dict[str, StoredTensor]:
        return {name: entry for name, entry in self._store.tensors.items() if name not in self.skipped}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, in stored order."""
        return tuple(self._weights)

    @cached_property
    def spec(self) -> WeightSpec:
        """The weights as a `WeightSpec`; a tied tensor is listed once, under its first name."""
        tensors, seen, known = [], set(), self._store.statistics
        for name, entry in self._weights.items():
            if entry.identity not in seen:
                is_statistic = name.endswith(_STATISTICS) if known is None else name in known
                tensors.append(TensorSpec(name, entry.shape, "statistic" if is_statistic else "parameter"))
            seen.add(entry.identity)
        return WeightSpec(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, skipped or not; nothing is read."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The data type of a tensor as stored, skipped or not; nothing is read."""
        entry = self._entry(name)
        if entry.dtype is None:
            raise DataError(f"{self.source}: `{name}` is stored as {entry.kind}, for which torch has no data type")
        return entry.dtype

    def raw(self, name: str) -> Tensor:
        """A tensor in the data type in which it is stored, skipped or not; DataError if it cannot be read."""
        return self._read(name, wide=False)

    def check(self) -> list[FileCheck]:
        """Compare the model's files with every checksum that is known, and say of each what was found.

        That is the hash that names a file in huggingface_hub's cache, and the CRC-32 of every record of a torch file. A
        safetensors file elsewhere has none.
        """
        return self._files.check()

    def __getitem__(self, name: str) -> Tensor:
        """A copy of a weight on the CPU: float64 if stored so, else float32.

        `MissingTensor`, which is a DataError and a KeyError, if it does not exist, or is not a weight (says why).
        """
        if name not in self._weights:
            raise self._missing(name)
        return self._read(name, wide=True)

    def read_into(self, names: Iterable[str], out: np.ndarray) -> None:
        """Read weights, one after the other, into a float32 array (D,)."""
        at = 0
        with np.errstate(over="ignore"):  # a float64 that float32 cannot hold is infinite
            for name in names:
                value = self._read(name, wide=True).numpy().reshape(-1)
                out[at : at + value.size] = value
                at += value.size

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __getstate__(self) -> Any:
        return self._given or self.__dict__  # a file is opened again in another process

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            Checkpoint.__init__(self, state[0], **state[1])
        else:
            self.__dict__.update(state)

    __eq__, __hash__ = object.__eq__, object.__hash__  # equality of mappings would read everything

    def summary(self) -> str:
        numbers = sum(entry.nbytes // entry.dtype.itemsize for entry in self._weights.values() if entry.dtype)
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"{self.source}, {len(self)} weights of {numbers:,} numbers{skipped}"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tensor: name, shape, dtype and bytes as stored, and why it is skipped (or None)."""
        keys = ("name", "shape", "dtype", "bytes", "skipped")
        found = self._store.tensors.items()
        rows = ((n, "x".join(map(str, e.shape)), e.kind, e.nbytes, self.skipped.get(n)) for n, e in found)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def text(self) -> str:
        header = ("name", "shape", "dtype", "bytes")
        return text_table(header, [[row[key] for key in header] for row in self.rows()], left=(0, 1, 2))

    def _entry(self, name: str) -> StoredTensor:
        entry = self._store.tensors.get(name)
        if entry is None:
            raise self._missing(name)
        return entry

    def _missing(self, name: str) -> MissingTensor:
        if name in self.skipped:
            return MissingTensor(f"{self.source}: `{name}` is skipped: {self.skipped[name]}")
        there = listing(self.names, most=4)
        return MissingTensor(f"{self.source}: no tensor {ascii(name)[:200]}; it has {len(self)} weights: {there}")

    def _read(self, name: str, wide: bool) -> Tensor:
        value, bad = self._entry(name).read(wide)
        if bad:
            self.nonfinite[name] = bad
        return value


def open_checkpoint(source: str | Path, **options: Any) -> Checkpoint:
    """The `Checkpoint` at a path or `hf://org/name`; DataError if it is the artifact of an initialiser."""
    found = Checkpoint(source, **options)
    if ARTIFACT_KEY in found.metadata:
        raise DataError(
            f"{source}: expected a model, found the artifact of an initialiser; `weightscope inspect` describes it, "
            "load_init applies it to a model"
        )
    return found


def _open(source: Any, key: str | None) -> Store:
    if isinstance(source, str) and source.startswith("hf://"):
        from weightscope.checkpoint.hub import open_hub  # huggingface_hub is not needed for files

        return open_hub(source, key)
    if isinstance(source, str | Path):
        if not source or (isinstance(source, str) and "://" in source):
            raise UsageError(f"expected a path or hf://org/name[@revision], found {source!a}")
        try:
            return open_path(Path(source).expanduser(), key)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, UsageError):
                raise
            raise DataError(f"{str(source)!a}: cannot be read: {error}") from error
    if isinstance(source, nn.Module | Checkpoint) and key is not None:
        raise UsageError("key= selects a dictionary in a file or a mapping, and this source is one network")
    if isinstance(source, nn.Module):
        return open_module(source)
    if isinstance(source, Checkpoint):
        return source._store
    if isinstance(source, Mapping):
        return open_mapping(source, key=key)
    raise UsageError(f"expected a path, hf://org/name, a module or a mapping, found {type(source).__name__}")
