"""`PopulationFit`: structures fitted to a population, and their artifact; `load_artifact` reads any artifact."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.names import listing
from weightscope._util.plugins import imported, is_reference, source_hash
from weightscope._util.trust import require_trust, trusting
from weightscope.errors import DataError
from weightscope.fits.artifact import NETWORK_FORMAT, Artifact, NetworkFit, read_contents
from weightscope.fits.structure import STRUCTURES, Structure, structure_reference
from weightscope.spec import TensorSpec, WeightSpec

FORMAT, VERSION = "weightscope-initialiser", 2


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
        """The group's part of the header."""
        kind = self.structure
        reference = None if kind is None else structure_reference(type(kind))
        out: dict[str, Any] = {
            "name": self.name,
            "spec": json.loads(self.spec.to_json()),
            "structure": reference,
            "options": dict(self.options),
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
        amplified = any(group.options.get("gain", 1) > 1 for group in self.groups)  # one structure, no fit to networks
        lines = [f"{self.networks} networks ({self.excluded} excluded)"]
        lines[0] += "" if amplified else f", log-likelihood of {held_out} held out, nats each"
        if self.scale is not None:
            lines = [f"units of {listing([one.get('source', 'a network') for one in self.provenance['sources']])}"]
        fixed = {group.name: group.fixed for group in self.groups if group.fixed}
        for name in dict.fromkeys(row["group"] for row in self.table):
            lines += ["", name + (f" ({fixed[name]} entries never vary)" if fixed.get(name) else "")]
            scores = "" if amplified else f"{'held-out':>16}{'difference to best':>26}"
            lines.append(f"  {'structure':<24}{'parameters':>11}{scores}")
            for row in self.table:
                if row["group"] == name:
                    start = f"{'*' if row['chosen'] else ' '} {row['structure']:<24}"
                    if row["failed"] is not None:
                        lines.append(f"{start}{'-':>11}  {row['failed']}")
                        continue
                    error = f"{row['difference']:.2f} +- {row['difference_se']:.2f}"
                    difference = "best" if row["difference"] == 0 else error
                    scores = "" if amplified else f"{row['log_prob']:>16.2f}{difference:>26}"
                    lines.append(f"{start}{row['parameters']:>11}{scores}")
        lines += [f"{group.name}: fixed, it never varies" for group in self.groups if group.structure is None]
        for group in self.groups:
            if group.structure is not None and (notes := group.structure.notes()):
                lines += ["", f"{group.name}, {group.label}:", *(f"  {note}" for note in notes)]
        return "\n".join(lines)


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


def population_fit_of(header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> PopulationFit:
    """The fit that a header and arrays describe; errors as `load_artifact`."""
    if header["version"] == 1:  # two diagnostics had other names
        text = json.dumps(header).replace('"realised":', '"achieved":').replace('"moved":', '"projection":')
        header = json.loads(text)
    groups = []
    for i, described in enumerate(header["groups"]):
        own = {name.removeprefix(f"{i}."): array for name, array in arrays.items() if name.startswith(f"{i}.")}
        groups.append(_group(described, own))
    facts = (header[key] for key in ("networks", "excluded", "settings", "provenance"))
    return PopulationFit(_spec(header["spec"]), tuple(groups), tuple(header["table"]), *facts)


def _group(described: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Group:
    spec = inner = _spec(described["spec"])
    values, varying, structure = arrays.pop("values", None), arrays.pop("varying", None), None
    if varying is not None:
        varying = varying.astype(bool)
        inner = varying_spec(spec, varying)
    if described["structure"] is not None:
        cls = _class(described)
        structure = cls.from_tensors(arrays, inner, described["parameters"], described["diagnostics"])
    return Group(described["name"], spec, structure, described["options"], values, varying)


def _class(described: Mapping[str, Any]) -> type[Structure]:
    """The structure's class; one that is not part of weightscope is imported only if the user trusts it."""
    name = described["structure"]
    if not is_reference(name):
        if name not in STRUCTURES:
            raise DataError(f"no structure {name!r}; there are {', '.join(STRUCTURES)}")
        return STRUCTURES[name]
    require_trust([name], f"group `{described['name']}`")
    found: type[Structure] = imported(name)
    if (now := source_hash(name)) != described["source_hash"]:
        raise DataError(
            f"{name}: its source changed since the fit (hash {described['source_hash']}, now {now}); "
            "restore that version or fit again"
        )
    return found


def _spec(rows: list[Any]) -> WeightSpec:
    return WeightSpec.from_json(json.dumps(rows))


def load_artifact(path: str | Path, *, trust: bool = False) -> PopulationFit | NetworkFit:
    """Read an artifact that `PopulationFit.save` or `NetworkFit.save` wrote, after comparing its SHA-256.

    `hf://org/name[@revision]` is one that `publish` uploaded; it is downloaded once, into huggingface_hub's cache.

    An artifact whose structure is not part of weightscope names it as `"package.module:Class"`, with the hash of its
    source. It is imported only with `trust`, and only if its source is unchanged.

    Raises:
        DataError: if the file is missing, cut off or changed, not an artifact, or of another version, or if its
            structure is not known.
        UsageError: if its structure is not one of weightscope and not trusted.

    Example:
        >>> load_artifact("mlp.safetensors").groups[0].label
        'dense'
    """
    if str(path).startswith("hf://"):
        from weightscope.checkpoint.hub import artifact_file  # imports huggingface_hub

        return load_artifact(artifact_file(str(path)), trust=trust)
    header, arrays = read_contents(path)
    kind, version = header["format"], header["version"]
    if (kind, version) not in ((NETWORK_FORMAT, 1), (FORMAT, 1), (FORMAT, VERSION)):
        raise DataError(f"{path}: version {version} of {kind} is not known; use a newer weightscope")
    if kind == NETWORK_FORMAT:
        from weightscope.fits.one_network import network_fit_of  # imports torch

        return network_fit_of(header, arrays)
    try:
        with trusting(trust):
            return population_fit_of(header, arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
