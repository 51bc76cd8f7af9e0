"""The artifact of a fitted initialiser: one safetensors file with everything that sampling needs, and its history."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from weightscope._util import atomic
from weightscope.checkpoint.safetensors_header import read_header
from weightscope.errors import DataError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.structures import STRUCTURES, Structure
from weightscope.structures.base import checked, matrix_shapes

FORMAT = "weightscope-initialiser"
# Of `weightscope.artifacts.network_fit`.
NETWORK_FORMAT = "weightscope-network-initialiser"
VERSION = 1
# The key of the JSON header in the file's metadata.
KEY = "weightscope"


@dataclass(frozen=True)
class Group:
    """Tensors that are sampled together.

    Attributes:
        name: of the group: a tensor, a block, or `"all"`.
        spec: of its D entries.
        structure: the distribution of the entries that vary, on `varying_spec(spec, varying)`; None if none does.
        options: what the structure was fitted with.
        values: (D,) the value of each entry that never varies (others are ignored); None if all vary.
        varying: (D,) booleans; None if all vary.
    """

    name: str
    spec: WeightSpec
    structure: Structure | None
    options: Mapping[str, Any] = field(default_factory=dict)
    values: np.ndarray | None = None
    varying: np.ndarray | None = None

    @property
    def label(self) -> str:
        """Name and options of the structure, or `"fixed"`."""
        return "fixed" if self.structure is None else labelled(self.structure.name, self.options)

    @property
    def fixed(self) -> int:
        """How many entries never vary."""
        return 0 if self.varying is None else int((~self.varying).sum())

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the standard normal arrays that one sample takes, in the order in which they are drawn."""
        return () if self.structure is None else self.structure.noise_shapes

    def transform(self, noise: Sequence[np.ndarray], size: int) -> np.ndarray:
        """Standard normal arrays (size, *shape), one for each of `noise_shapes`, to samples (size, D)."""
        if self.varying is None:
            return self.structure.transform(noise)
        out = np.tile(self.values, (size, 1))
        if self.structure is not None:
            out[:, self.varying] = self.structure.transform(noise)
        return out

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Independent samples (size, D)."""
        return self.transform([rng.standard_normal((size, *shape)) for shape in self.noise_shapes], size)

    def to_tensors(self) -> dict[str, np.ndarray]:
        """The arrays that the artifact holds."""
        out = {} if self.structure is None else self.structure.to_tensors()
        if self.varying is not None:
            out |= {"values": self.values, "varying": self.varying.astype(np.uint8)}
        return out

    def describe(self) -> dict[str, Any]:
        """The JSON header's part; `form` and `matrices` say all that a standalone file needs to know."""
        there = self.structure is not None
        return {
            "name": self.name,
            "spec": json.loads(self.spec.to_json()),
            "structure": self.structure.name if there else None,
            "options": dict(self.options),
            "form": self.structure.form if there else "fixed",
            "matrices": [list(shape) for shape in matrix_shapes(self.structure.spec)] if there else [],
            "parameters": self.structure.parameters if there else 0,
            "diagnostics": self.structure.diagnostics if there else {},
            "fixed": self.fixed,
        }


@dataclass(frozen=True)
class FitResult:
    """Fitted structures for the tensors of a selection, with the comparison that chose them.

    Attributes:
        spec: of the touched tensors, in the network's order.
        groups: what is sampled together; they cover the spec.
        table: one row for each group and candidate: `group`, `structure`, `parameters`, `log_prob` (held-out
            log-likelihood in nats per network, mean over networks) and `log_prob_se`, `difference` to the
            group's best and its paired standard error `difference_se`, `chosen`, and `failed`: why a
            candidate could not be fitted, or None. With several groups, the group `"(all)"` adds them up.
        networks: how many networks were used.
        excluded: how many were left out because they diverged or are not finite.
        settings: `select`, `joint`, `holdout`, `seed`, `held_out` (networks scored).
        provenance: where the weights came from.
    """

    spec: WeightSpec
    groups: tuple[Group, ...]
    table: tuple[dict[str, Any], ...]
    networks: int
    excluded: int
    settings: dict[str, Any]
    provenance: dict[str, Any]

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Independent weight vectors (size, D) in the order of `spec`."""
        parts: dict[str, np.ndarray] = {}
        for group in self.groups:
            parts |= group.spec.unpack(group.sample(rng, size))
        return np.concatenate([parts[name].reshape(size, -1) for name in self.spec.names], axis=1)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON types; this is the artifact's header."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "spec": json.loads(self.spec.to_json()),
            "groups": [group.describe() for group in self.groups],
            "table": [dict(row) for row in self.table],
            "networks": self.networks,
            "excluded": self.excluded,
            "settings": self.settings,
            "provenance": self.provenance,
        }

    def text(self) -> str:
        """The comparison as a table for the terminal, with what was excluded, fixed and chosen."""
        held_out = self.settings.get("held_out", 0)
        lines = [
            f"{self.networks} networks ({self.excluded} excluded), log-likelihood of {held_out} held out, nats each"
        ]
        fixed = {group.name: group.fixed for group in self.groups if group.fixed}
        for name in dict.fromkeys(row["group"] for row in self.table):
            lines += ["", name + (f" ({fixed[name]} entries never vary)" if fixed.get(name) else "")]
            lines.append(f"  {'structure':<20}{'parameters':>11}{'held-out':>16}{'difference to best':>26}")
            lines += [_row_text(row) for row in self.table if row["group"] == name]
        lines += [f"{group.name}: fixed, it never varies" for group in self.groups if group.structure is None]
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write the artifact: whole, or not at all.

        Raises:
            WeightscopeError: if the file cannot be written.
        """
        tensors = {
            f"{i}.{name}": np.ascontiguousarray(array)
            for i, group in enumerate(self.groups)
            for name, array in group.to_tensors().items()
        }
        header = json.dumps(self.to_dict(), allow_nan=False, sort_keys=True, separators=(",", ":"))
        atomic.write(path, to_bytes(tensors, metadata={KEY: header}))
        return Path(path)


def labelled(structure: str, options: Mapping[str, Any]) -> str:
    """A structure's name with its options, such as `low_rank (rank 8)`."""
    inner = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{structure} ({inner})" if inner else structure


def varying_spec(spec: WeightSpec, varying: np.ndarray) -> WeightSpec:
    """The spec of the varying entries: whole tensors keep their shape, parts become vectors, others go."""
    tensors = []
    for tensor in spec.tensors:
        count = int(varying[spec.slices[tensor.name]].sum())
        if count:
            tensors.append(TensorSpec(tensor.name, tensor.shape if count == tensor.size else (count,), tensor.role))
    return WeightSpec(tensors)


def load_artifact(path: str | Path) -> FitResult:
    """Read an artifact that was fitted to a population; nothing that it says about itself is believed unchecked.

    Args:
        path: a file that `FitResult.save` wrote.

    Raises:
        DataError: if the file is missing, is no artifact, is of another version, or its arrays do not fit the
            header or are not finite.

    Example:
        >>> load_artifact("mlp.safetensors").groups[0].label
        'dense'
    """
    return artifact_of(path, *read_contents(path))


def artifact_of(path: str | Path, header: Any, arrays: Mapping[str, np.ndarray]) -> FitResult:
    """The artifact that `read_contents` found at a path.

    Raises:
        DataError: as `load_artifact`.
    """
    try:
        return _restored(_parsed(header), arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_contents(path: str | Path) -> tuple[Any, dict[str, np.ndarray]]:
    """The JSON header and the arrays of an initialiser's artifact, of whatever kind; the file is sound then.

    Raises:
        DataError: if the file is missing, damaged, or no artifact.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            read_header(lambda start, stop: os.pread(file.fileno(), stop - start, start), size, "it")
        with safe_open(str(path), framework="numpy") as file:
            text = (file.metadata() or {}).get(KEY)
            arrays = {name: file.get_tensor(name) for name in file.keys()} if text else {}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path}: expected an initialiser's artifact, found no file") from None
    except (DataError, SafetensorError, OSError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: expected an initialiser's artifact, found no sound safetensors file: {error}"
        ) from error
    if text is None:
        raise DataError(f"{path}: a safetensors file, but no initialiser's artifact; `weightscope fit-init` makes one")
    try:
        return json.loads(text), arrays
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its header is not JSON: {error}") from error


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["weightscope-initialiser"]
    version: Literal[1]
    spec: list[Any]
    groups: list["_GroupHeader"] = Field(min_length=1)
    table: list[dict[str, Any]]
    networks: int = Field(ge=0)
    excluded: int = Field(ge=0)
    settings: dict[str, Any]
    provenance: dict[str, Any]


class _GroupHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    spec: list[Any]
    structure: str | None
    options: dict[str, Any]
    form: str
    matrices: list[Any]
    parameters: int = Field(ge=0)
    diagnostics: dict[str, Any]
    fixed: int = Field(ge=0)


def _parsed(values: Any) -> _Header:
    if isinstance(values, dict) and values.get("format") == NETWORK_FORMAT:
        raise DataError("it was fitted to one network, not to a population; load_init applies it")
    if isinstance(values, dict) and values.get("format") == FORMAT and values.get("version") != VERSION:
        raise DataError(
            f"expected version {VERSION} of the format, found {values.get('version')!r}; use a newer weightscope"
        )
    try:
        return _Header.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "header"
        raise DataError(f"its header does not make sense: {where}: {first['msg'].lower()}") from None


def _restored(header: _Header, arrays: Mapping[str, np.ndarray]) -> FitResult:
    spec = _spec(header.spec)
    groups = []
    for i, described in enumerate(header.groups):
        own = {name.removeprefix(f"{i}."): array for name, array in arrays.items() if name.startswith(f"{i}.")}
        try:
            groups.append(_group(described, own))
        except DataError as error:
            raise DataError(f"group `{described.name}`: {error}") from error
    claimed = sorted(name for group in groups for name in group.spec.names)
    if claimed != sorted(spec.names) or any(spec[t.name] != t for group in groups for t in group.spec.tensors):
        raise DataError("its groups do not cover the tensors of its spec exactly")
    if stray := [name for name in arrays if not _belongs(name, len(groups))]:
        raise DataError(f"found arrays that belong to no group: {stray[:3]}")
    return FitResult(
        spec,
        tuple(groups),
        tuple(header.table),
        header.networks,
        header.excluded,
        header.settings,
        header.provenance,
    )


def _group(described: _GroupHeader, arrays: dict[str, np.ndarray]) -> Group:
    spec = _spec(described.spec)
    values = varying = structure = None
    inner = spec
    if "varying" in arrays or described.structure is None:
        # Arrays of the claimed length must be in the file before anything of that length is made.
        values, flags = (_of_length(arrays, name, spec.size) for name in ("values", "varying"))
        values, varying = checked(values, "values", (spec.size,)), flags.astype(bool)
        if not np.isin(flags, (0, 1)).all() or (described.structure is None) != (not varying.any()):
            raise DataError("`varying`: expected zeros and ones that fit the structure")
        inner = varying_spec(spec, varying)
        arrays = {name: array for name, array in arrays.items() if name not in ("values", "varying")}
    if described.structure is None:
        if arrays:
            raise DataError(f"fixed tensors with the arrays {list(arrays)[:3]}")
    elif described.structure not in STRUCTURES:
        raise DataError(f"no structure {described.structure!r}; there are {', '.join(STRUCTURES)}")
    else:
        _of_length(arrays, "mean", inner.size)
        structure = STRUCTURES[described.structure].from_tensors(
            arrays, inner, described.parameters, described.diagnostics
        )
    group = Group(described.name, spec, structure, described.options, values, varying)
    if group.describe() != described.model_dump():
        raise DataError("its header does not fit its arrays")
    return group


def _of_length(arrays: Mapping[str, np.ndarray], name: str, size: int) -> np.ndarray:
    if name not in arrays or arrays[name].shape != (size,):
        found = arrays[name].shape if name in arrays else "none"
        raise DataError(f"`{name}`: expected ({size},), found {found}")
    return arrays[name]


def _belongs(name: str, groups: int) -> bool:
    prefix, dot, _ = name.partition(".")
    return bool(dot) and prefix.isdecimal() and int(prefix) < groups and prefix == str(int(prefix))


def _spec(rows: list[Any]) -> WeightSpec:
    spec = WeightSpec.from_json(json.dumps(rows))
    if not spec.tensors or not all(tensor.size for tensor in spec.tensors):
        raise DataError("its spec holds no tensors, or empty ones")
    return spec


def _row_text(row: Mapping[str, Any]) -> str:
    mark = "*" if row["chosen"] else " "
    if row["failed"] is not None:
        return f"{mark} {row['structure']:<20}{'-':>11}  {row['failed']}"
    difference = "best" if row["difference"] == 0 else f"{row['difference']:.2f} +- {row['difference_se']:.2f}"
    return f"{mark} {row['structure']:<20}{row['parameters']:>11}{row['log_prob']:>16.2f}{difference:>26}"
