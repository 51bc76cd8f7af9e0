"""`PopulationFit`: structures fitted to a population, and their artifact; `load_artifact` reads any artifact."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from weightscope._util.names import listing
from weightscope._util.plugins import imported, is_reference, source_hash
from weightscope._util.trust import trusted
from weightscope.errors import DataError
from weightscope.fits.artifact import (
    NETWORK_FORMAT,
    VERSION,
    Artifact,
    NetworkFit,
    StrictModel,
    checked_header,
    read_contents,
)
from weightscope.fits.structure import STRUCTURES, Structure, checked, matrix_shapes, structure_reference
from weightscope.spec import TensorSpec, WeightSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FORMAT = "weightscope-initialiser"


@dataclass(frozen=True)
class Group:
    """Tensors that are sampled jointly."""

    name: str  # a tensor, a block, or "all"
    spec: WeightSpec  # names and shapes of its D entries
    structure: Structure | None  # of the entries that vary, on `varying_spec(spec, varying)`; None if none does
    options: Mapping[str, Any] = field(default_factory=dict)  # of the fit
    values: np.ndarray | None = None  # (D,) of each entry that never varies (others are ignored); None if all vary
    varying: np.ndarray | None = None  # (D,) booleans; None if all vary

    @property
    def label(self) -> str:
        """Name and options of the structure, or `"fixed"`."""
        return "fixed" if self.structure is None else structure_label(self.structure.name, self.options)

    @property
    def fixed(self) -> int:
        """How many entries never vary."""
        return 0 if self.varying is None else int((~self.varying).sum())

    def draw(self, normal: Callable[[tuple[int, ...]], np.ndarray], size: int) -> np.ndarray:
        """Samples (size, D); `normal` draws a standard normal array of a shape."""
        if self.structure is None:
            inner = np.empty((size, 0))
        else:
            inner = self.structure.transform([normal((size, *shape)) for shape in self.structure.noise_shapes])
        if self.varying is None or self.values is None:
            return inner
        out = np.tile(self.values, (size, 1))
        out[:, self.varying] = inner
        return out

    def to_tensors(self) -> dict[str, np.ndarray]:
        """The arrays of the artifact."""
        out = {} if self.structure is None else self.structure.to_tensors()
        if self.varying is not None and self.values is not None:
            out |= {"values": self.values, "varying": self.varying.astype(np.uint8)}
        return out

    def describe(self) -> dict[str, Any]:
        """The group's part of the header; `form` and `matrices` are what a standalone file needs."""
        kind = self.structure
        reference = None if kind is None else structure_reference(type(kind))
        out: dict[str, Any] = {
            "name": self.name,
            "spec": json.loads(self.spec.to_json()),
            "structure": reference,
            "options": dict(self.options),
            "form": "fixed" if kind is None else kind.form,
            "matrices": [] if kind is None else [list(shape) for shape in matrix_shapes(kind.spec)],
            "parameters": 0 if kind is None else kind.parameters,
            "diagnostics": {} if kind is None else kind.diagnostics,
            "fixed": self.fixed,
        }
        return out | ({"source_hash": source_hash(reference)} if reference and is_reference(reference) else {})


@dataclass(frozen=True, repr=False)
class PopulationFit(Artifact):
    """Fitted structures for the tensors of a selection, with the comparison that chose them.

    `table` has one row for each group and candidate: `group`, `structure`, `parameters`, `log_prob` (held-out
    log-likelihood in nats per network, mean over networks) and `log_prob_se`, `difference` to the group's best and its
    paired standard error `difference_se`, `chosen`, and `failed`: why a candidate could not be fitted, or None. With
    several groups, the group `"(all)"` adds them up.
    """

    spec: WeightSpec  # of the tensors that the initialiser sets, in the network's order
    groups: tuple[Group, ...]  # what is sampled jointly; they cover the spec
    table: tuple[dict[str, Any], ...]
    networks: int  # how many were used
    excluded: int  # how many were not, because they diverged or are not finite
    settings: dict[str, Any]  # `select`, `joint`, `holdout`, `seed`, `held_out` (networks scored)
    provenance: dict[str, Any]  # where the weights came from
    problems: Mapping[str, str] = field(default_factory=dict)  # tensor -> why `resized_fit` could not resize it
    resized: tuple[str, ...] = ()  # what `resized_fit` rescaled, took from another depth, and dropped; not saved

    @property
    def scale(self) -> str | None:
        """Of a fit by `fit_pretrained`, whose tensors have places in timm's scheme: "default" or "source"."""
        return self.settings.get("scale")

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Independent weight vectors (size, D) in the order of `spec`."""
        parts: dict[str, np.ndarray] = {}
        for group in self.groups:
            parts |= group.spec.unpack(group.draw(rng.standard_normal, size))
        return np.concatenate([parts[name].reshape(size, -1) for name in self.spec.names], axis=1)

    def to_dict(self) -> dict[str, Any]:
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

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of group i as `"i.name"`."""
        return {f"{i}.{name}": array for i, g in enumerate(self.groups) for name, array in g.to_tensors().items()}

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.table]

    def summary(self) -> str:
        kinds = ", ".join(dict.fromkeys(group.label for group in self.groups))
        return f"{len(self.spec)} tensors in {len(self.groups)} groups, {self.networks} networks: {kinds}"

    def text(self) -> str:
        """The comparison as a table, networks excluded, entries that never vary, and what was shrunk or clipped."""
        held_out = self.settings.get("held_out", 0)
        lines = [
            f"{self.networks} networks ({self.excluded} excluded), log-likelihood of {held_out} held out, nats each"
        ]
        if self.scale is not None:
            lines = [f"units of {listing([one.get('source', 'a network') for one in self.provenance['sources']])}"]
        fixed = {group.name: group.fixed for group in self.groups if group.fixed}
        for name in dict.fromkeys(row["group"] for row in self.table):
            lines += ["", name + (f" ({fixed[name]} entries never vary)" if fixed.get(name) else "")]
            lines.append(f"  {'structure':<20}{'parameters':>11}{'held-out':>16}{'difference to best':>26}")
            for row in self.table:
                if row["group"] == name:
                    start = f"{'*' if row['chosen'] else ' '} {row['structure']:<20}"
                    if row["failed"] is not None:
                        lines.append(f"{start}{'-':>11}  {row['failed']}")
                        continue
                    error = f"{row['difference']:.2f} +- {row['difference_se']:.2f}"
                    difference = "best" if row["difference"] == 0 else error
                    lines.append(f"{start}{row['parameters']:>11}{row['log_prob']:>16.2f}{difference:>26}")
        lines += [f"{group.name}: fixed, it never varies" for group in self.groups if group.structure is None]
        for group in self.groups:
            if group.structure is not None and (notes := group.structure.notes()):
                lines += ["", f"{group.name}, {group.label}:", *(f"  {note}" for note in notes)]
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None, *, group: str | None = None) -> "Axes":
        """Held-out log-likelihood of the candidates relative to the best; see `weightscope.plots.heldout_scores`."""
        from weightscope.plots import heldout_scores

        return heldout_scores(self.table, ax, group=group)


def structure_label(structure: str, options: Mapping[str, Any]) -> str:
    """A structure's name with its options, such as `low_rank (rank 8)`."""
    inner = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{structure} ({inner})" if inner else structure


def varying_spec(spec: WeightSpec, varying: np.ndarray) -> WeightSpec:
    """The spec of the varying entries: whole tensors keep their shape, parts become vectors, others are dropped."""
    tensors = []
    for tensor in spec.tensors:
        count = int(varying[spec.slices[tensor.name]].sum())
        if count:
            tensors.append(TensorSpec(tensor.name, tensor.shape if count == tensor.size else (count,), tensor.role))
    return WeightSpec(tensors)


class _GroupHeader(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # what else is there must be as `Group.describe` says

    name: str
    spec: list[Any]
    structure: str | None
    options: dict[str, Any]
    parameters: int = Field(ge=0)
    diagnostics: dict[str, Any]
    source_hash: str = ""  # only of structures that are not part of weightscope


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    group: str
    structure: str
    parameters: int = Field(ge=0)
    log_prob: float | None
    difference: float | None
    difference_se: float | None
    chosen: bool
    failed: str | None

    @model_validator(mode="after")
    def _scores(self) -> Self:
        if self.failed is None and None in (self.log_prob, self.difference, self.difference_se):
            raise ValueError("expected log_prob, difference and difference_se of a candidate that was fitted")
        return self


class _Header(StrictModel):
    format: Literal["weightscope-initialiser"]
    version: Literal[1]
    spec: list[Any]
    groups: list[_GroupHeader] = Field(min_length=1)
    table: list[_Row]
    networks: int = Field(ge=0)
    excluded: int = Field(ge=0)
    settings: dict[str, Any]
    provenance: dict[str, Any]


def population_fit_of(
    values: Any, arrays: Mapping[str, np.ndarray], structures: Sequence[str | type[Structure]] = ()
) -> PopulationFit:
    """The fit that a header and arrays describe; errors as `load_artifact`."""
    header = checked_header(values, _Header)
    spec = _spec(header.spec)
    groups, left = [], dict(arrays)
    for i, described in enumerate(header.groups):
        own = {name.removeprefix(f"{i}."): left.pop(name) for name in arrays if name.startswith(f"{i}.")}
        try:
            groups.append(_group(described, own, structures))
        except DataError as error:
            raise DataError(f"group `{described.name}`: {error}") from error
    claimed = sorted(name for group in groups for name in group.spec.names)
    if claimed != sorted(spec.names) or any(spec[t.name] != t for group in groups for t in group.spec.tensors):
        raise DataError("its groups do not cover the tensors of its spec exactly")
    if left:
        raise DataError(f"found arrays that belong to no group: {list(left)[:3]}")
    facts = header.networks, header.excluded, header.settings, header.provenance
    return PopulationFit(spec, tuple(groups), tuple(row.model_dump() for row in header.table), *facts)


def _group(
    described: _GroupHeader, arrays: dict[str, np.ndarray], structures: Sequence[str | type[Structure]]
) -> Group:
    spec = inner = _spec(described.spec)
    values = varying = structure = None
    if "varying" in arrays or described.structure is None:
        # Arrays of the stated length must be in the file before anything of that length is allocated.
        values, flags = (_of_length(arrays, name, spec.size) for name in ("values", "varying"))
        values, varying = checked(values, "values", (spec.size,)), flags.astype(bool)
        if not np.isin(flags, (0, 1)).all() or (described.structure is None) != (not varying.any()):
            raise DataError("`varying`: expected zeros and ones that agree with the structure")
        inner = varying_spec(spec, varying)
        arrays = {name: array for name, array in arrays.items() if name not in ("values", "varying")}
    if described.structure is not None:
        cls = _class(described, structures)
        _of_length(arrays, "mean", inner.size)
        structure = cls.from_tensors(arrays, inner, described.parameters, described.diagnostics)
    elif arrays:
        raise DataError(f"fixed tensors with the arrays {list(arrays)[:3]}")
    group = Group(described.name, spec, structure, described.options, values, varying)
    if group.describe() != described.model_dump(exclude_unset=True):
        raise DataError("its header does not match its arrays")
    return group


def _class(described: _GroupHeader, structures: Sequence[str | type[Structure]]) -> type[Structure]:
    """The structure's class; one that is not part of weightscope is imported only if the user trusts it."""
    name = described.structure or ""
    if name in STRUCTURES:
        return STRUCTURES[name]
    if not is_reference(name):
        raise DataError(f"no structure {name!r}; there are {', '.join(STRUCTURES)}")
    names = [known if isinstance(known, str) else structure_reference(known) for known in structures]
    if name not in names and not trusted():
        raise DataError(
            f"its structure {name} is not part of weightscope and is not imported because a file says so; if you trust "
            f"it, pass structures=[{name!r}], or --trust"
        )
    found = imported(name)
    if not (isinstance(found, type) and issubclass(found, Structure)):
        raise DataError(f"{name}: expected a subclass of weightscope.fits.Structure, found {found!r}")
    if (now := source_hash(name)) != described.source_hash:
        raise DataError(
            f"{name}: its source changed since the fit (hash {described.source_hash or 'none'}, now {now}); "
            "restore that version or fit again"
        )
    return found


def _of_length(arrays: Mapping[str, np.ndarray], name: str, size: int) -> np.ndarray:
    if name not in arrays or arrays[name].shape != (size,):
        found = arrays[name].shape if name in arrays else "none"
        raise DataError(f"`{name}`: expected ({size},), found {found}")
    return arrays[name]


def _spec(rows: list[Any]) -> WeightSpec:
    spec = WeightSpec.from_json(json.dumps(rows))
    if not spec.tensors or not all(tensor.size for tensor in spec.tensors):
        raise DataError("its spec has no tensors, or empty ones")
    return spec


def load_artifact(path: str | Path, *, structures: Sequence[str | type[Structure]] = ()) -> PopulationFit | NetworkFit:
    """Read an artifact that `PopulationFit.save` or `NetworkFit.save` wrote; everything that it states is checked.

    `hf://org/name[@revision]` is one that `publish` uploaded; it is downloaded once, into huggingface_hub's cache.

    An artifact whose structure is not part of weightscope names it as `"package.module:Class"`, with the hash of its
    source. A file cannot make weightscope import anything: such an artifact is read only if the caller lists the
    structure in `structures` (as the class or that text), and only if its source is unchanged.

    Raises:
        DataError: if the file is missing, not an artifact or of another version, its arrays do not match the header
            or are not finite, or its structure is not one of weightscope and not listed.

    Example:
        >>> load_artifact("mlp.safetensors").groups[0].label
        'dense'
        >>> load_artifact("own.safetensors", structures=[MyStructure])
    """
    if str(path).startswith("hf://"):
        from weightscope.checkpoint.hub import artifact_file  # imports huggingface_hub

        return load_artifact(artifact_file(str(path)), structures=structures)
    header, arrays = read_contents(path)
    try:
        if isinstance(header, dict) and header.get("format") == NETWORK_FORMAT:
            from weightscope.fits.one_network import network_fit_of  # imports torch

            return network_fit_of(header, arrays)
        return population_fit_of(header, arrays, structures)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
