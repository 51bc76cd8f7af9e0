"""`inspect` and `verify`: the contents of a population, an artifact or a checkpoint, and whether they are intact."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from weightscope._util.names import joined, numbered
from weightscope._util.results import Result, row_table, text_table
from weightscope._util.sources import ARTIFACT_KEY, is_population, location
from weightscope._util.threads import one_thread
from weightscope.data.metrics import metric_named
from weightscope.errors import AnatomyError, DataError
from weightscope.population import Population, member_of, shards
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutation_rules import permutations_by_name
from weightscope.statistics.permutations import is_signed

if TYPE_CHECKING:
    from weightscope._util.workers import Workers
    from weightscope.checkpoint import Checkpoint
    from weightscope.fits import NetworkFit, PopulationFit

_MOST_METRICS = 14  # of a summary
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@one_thread()
def inspect(
    source: "str | Path | Population | Checkpoint", config: Mapping[str, Any] | None = None
) -> "PopulationContents | CheckpointContents | PopulationFit | NetworkFit":
    """The contents of a population (a folder or an exported file), an initialiser's artifact or a checkpoint.

    Of a population recipe, seeds and metrics are read, of a checkpoint the header; `verify` compares hashes.

    `source` is a path, `"PATH.pop::k"` (network k of a population), `hf://org/name[@revision]`, a `Population` or a
    `Checkpoint`; `config` is that of a checkpoint without one. DataError if it does not exist or is damaged.

    Example:
        >>> print(inspect("digits.pop").text())
    """
    if isinstance(source, Population):
        return population_contents(source.path)
    if is_population(source):
        return population_contents(source)  # type: ignore[arg-type]
    from torch import nn

    from weightscope.anatomy import inventory, named_tensors, unreadable  # torch, which a population does not need
    from weightscope.checkpoint import Checkpoint

    found = member_of(source)
    opened = source if found is None else found[0].opened(found[1])
    checkpoint = opened if isinstance(opened, Checkpoint) else Checkpoint(opened)
    model = opened if isinstance(opened, nn.Module) else checkpoint
    if ARTIFACT_KEY in checkpoint.metadata:
        from weightscope.fits import load_artifact

        return load_artifact(checkpoint.source)
    names = numbered(checkpoint.names)
    rows = [(n, checkpoint.shape(n), str(checkpoint.dtype(n)).removeprefix("torch.")) for n in names]
    groups = _groups(WeightSpec(TensorSpec(n, tuple(shape)) for n, shape, kind in rows if "float" in kind))
    facts = dict(checkpoint.skipped), dict(checkpoint.config)
    label, tensors = str(source if found else checkpoint.source), named_tensors(model, config)
    return CheckpointContents(label, tuple(rows), *facts, inventory(tensors), unreadable(tensors), groups)


def _tensors(spec: WeightSpec) -> list[dict[str, Any]]:
    """One record for each tensor: its name, shape, role, and its columns of the weight matrix."""
    places = zip(spec.tensors, spec.slices.values(), strict=True)
    return [asdict(tensor) | {"start": part.start, "stop": part.stop} for tensor, part in places]


def _with_sizes(tensors: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with their shapes as text."""
    return [row | {"shape": "x".join(map(str, row["shape"])) or "scalar"} for row in tensors]


def _groups(spec: WeightSpec) -> dict[str, dict[str, Any]]:
    """Group of units that may be permuted -> its size, whether signs flip, its tensors; empty for unknown names."""
    try:
        found = permutations_by_name(spec)
    except AnatomyError:
        return {}
    signed = {label[1:] for view in found.views for label in view.labels if is_signed(label)}
    names = {g: [view.name for view in found.views if {g, f"~{g}"} & set(view.labels)] for g in found.sizes}
    return {g: {"size": n, "signed": g in signed, "tensors": names[g]} for g, n in found.sizes.items()}


def _permuted(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """One line: `permuted together: 32 channels; 3 x 128 hidden; with signs 3 x 32 qk`."""
    if not groups:
        return "permutations are not known from these names: derived from code, or given by --permutations FILE.toml"
    kinds = Counter((g["signed"], g["size"], name.partition(".")[0]) for name, g in groups.items())
    texts = [f"{f'{many} x ' if many > 1 else ''}{n} {'~' * signed}{kind}" for (signed, n, kind), many in kinds.items()]
    return f"permuted together (~ with signs): {', '.join(texts)}"


@dataclass(frozen=True, repr=False)
class PopulationContents(Result):
    """The contents of a population."""

    path: str  # its folder
    networks: int  # N, the number of networks in the recipe
    done: int  # trained networks
    missing_tiles: tuple[int, ...]  # missing and incomplete tiles
    diverged: int  # trained networks that diverged
    dimension: int  # D, the length of one network's weight vector
    tile: int | None  # T
    root_seed: int | None  # of the population; None of imported networks, which have no seeds
    first_seeds: tuple[int, ...]  # the torch seeds of the first few networks' initial weights
    tensors: list[dict[str, Any]]  # name, shape, role, and columns `start` to `stop` of the weight matrix
    quantiles: dict[str, dict[str, float | None]]  # of those that did not diverge, metric -> {"0.05": value, ...}
    made_on: dict[str, int]  # "torch VERSION on DEVICE" -> number of shards
    bytes_on_disk: int  # of all its files
    environment: dict[str, Any]  # versions and machine with which it was begun
    recipe: dict[str, Any]  # as nested dictionaries; empty without one
    imported: dict[str, Any] | None  # where imported networks are from, and how they were read
    sources: dict[str, str]  # reference to code of users' own -> text of its module when the population was created
    hashes: dict[str, str]  # what the recipe refers to -> 16 hex digits of its hash
    spec: WeightSpec

    @cached_property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Units that may be permuted together, by name: size, whether signs flip, tensors."""
        return _groups(self.spec)

    def summary(self) -> str:
        return f"{self.path}: {self.done:,} of {self.networks:,} networks of {self.dimension:,} weights each"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tensor of the spec: name, shape, role, and its columns of the weight matrix."""
        return _with_sizes(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "spec"}
        return values | {"groups": self.groups}

    def text(self) -> str:
        """Everything as text for a terminal, sections separated by blank lines."""
        columns = {"tensor": "{name}", "shape": "{shape}", "role": "{role}", "columns": "{start}:{stop}"}
        seeds = f"; seeds of the first networks {', '.join(map(str, self.first_seeds))}" if self.first_seeds else ""
        origin = [f"root seed {self.root_seed}{seeds}"] if self.imported is None else [self._origin(self.imported)]
        origin += [f"shards made with {made}: {count}" for made, count in self.made_on.items()]
        for key, value in self.environment.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            origin.append(f"{key}: {text}")
        table, recipe = row_table(columns, self.rows()), tomli_w.dumps(self.recipe).rstrip()
        parts = self._counts(), table, _permuted(self.groups), self._metrics(), "\n".join(origin), recipe
        return "\n\n".join(parts).rstrip()

    def _origin(self, imported: dict[str, Any]) -> str:
        options = [f"names {text}" for text in imported["rename"]]
        options += [f"network {imported['network']}"] * bool(imported["network"])
        where = joined((each[0] for each in imported["sources"]), most=4) or "memory"
        return "; ".join([f"imported from {where}", *options])

    def code(self) -> str:
        """The texts of `sources`, each under its reference."""
        texts = [f"# {name}\n\n{text}" for name, text in self.sources.items()]
        return "\n\n".join(texts) or f"{self.path}: its recipe names no code of users' own"

    def brief(self) -> str:
        """Counts and metrics on less than a screen, and where the rest is."""
        rest = f"`weightscope inspect {self.path}` also lists tensors, origin and recipe"
        return "\n\n".join((self._counts(), self._metrics(most=_MOST_METRICS), rest))

    def _counts(self) -> str:
        unit, name = (2**20, "MiB") if self.bytes_on_disk >= 2**20 else (2**10, "KiB")
        missing, size = len(self.missing_tiles), f"{self.bytes_on_disk / unit:,.1f} {name}"
        command, what = ("import", "left out of statistics") if self.imported else ("collect", "diverged")
        counts = f"tiles of {self.tile}; {missing or 'none'} missing; {self.diverged or 'none'} of the networks {what}"
        again = [f"run `weightscope {command}` again for the missing ones"] * bool(missing)
        return "\n".join([f"{self.summary()}, {size}", counts, *again])

    def _metrics(self, most: int | None = None) -> str:
        if not self.quantiles:
            lost = 0 < self.done == self.diverged and not self.imported
            return "no metrics" + (": every network diverged" if lost else "" if self.done else " yet")
        quantiles = {0.0: "minimum", 0.5: "median", 1.0: "maximum"}
        head = ("metric", *(quantiles.get(q, f"{100 * q:g} %") for q in _QUANTILES))
        names = sorted(self.quantiles, key=lambda name: metric_named(name) is None)  # first what the task reports
        rows = []
        for name in names[:most]:
            known = metric_named(name.replace("train_", "test_"))
            unit, factor = (f" ({known.unit})" if known.unit else "", known.factor) if known else ("", 1.0)
            numbers = [self.quantiles[name][str(q)] for q in _QUANTILES]
            rows.append((name + unit, *("not finite" if x is None else f"{factor * x:.4g}" for x in numbers)))
        return text_table(head, rows)


def population_contents(path: str | Path) -> PopulationContents:
    """The contents of a population, complete or not."""
    population = Population(path, partial=True)
    manifest, spec, recipe = population.manifest, population.spec, getattr(population, "recipe", None)
    return PopulationContents(
        path=str(path),
        networks=manifest.networks,
        done=len(population),
        missing_tiles=population.missing,
        diverged=int(population.diverged.sum()),
        dimension=spec.size,
        tile=manifest.tile,
        root_seed=None if recipe is None else recipe.population.seed,
        first_seeds=() if recipe is None else tuple(int(seed) for seed in population.seeds[:4]),
        tensors=_tensors(spec),
        quantiles=_quantiles(population.metrics),
        made_on=population.provenance(),
        bytes_on_disk=shards.bytes_on_disk(population.path),
        environment=population.environment,
        recipe={} if recipe is None else recipe.to_dict(),
        imported=manifest.imported.to_dict() if manifest.imported else None,
        sources=manifest.sources,
        hashes=manifest.inputs,
        spec=spec,
    )


@dataclass(frozen=True, repr=False)
class CheckpointContents(Result):
    """The contents of a checkpoint, read from its header alone."""

    source: str  # file, folder or address
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]  # (name, shape, type) of every weight
    skipped: dict[str, str]  # name -> why it is not among the weights
    config: dict[str, Any]  # the model's `config.json`; empty without one
    parts: dict[str, int] = field(default_factory=dict)  # kind -> number of recognised parts
    unread: dict[str, str] = field(default_factory=dict)  # what looks like a part and cannot be read -> why
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # see `PopulationContents`

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tensor: name, shape, type."""
        return _with_sizes({"name": name, "shape": shape, "type": kind} for name, shape, kind in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        numbers = sum(math.prod(shape) for _, shape, _ in self.tensors)
        return f"{self.source}: {len(self.tensors):,} tensors, {numbers:,} weights"

    def text(self) -> str:
        """Counts, recognised parts, the table of tensors, and what was skipped."""
        found = ", ".join(f"{kind}: {number}" for kind, number in self.parts.items() if number)
        lines = [self.summary(), f"recognised {found or 'no parts: its naming may be unknown to weightscope'}"]
        lines += [f"cannot be read: `{name}`, {why}" for name, why in self.unread.items()]
        lines.append(_permuted(self.groups))
        table = row_table({"tensor": "{name}", "shape": "{shape}", "type": "{type}"}, self.rows())
        return "\n".join([*lines, "", table, *(f"skipped `{n}`: {why}" for n, why in self.skipped.items())])


def _quantiles(metrics: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Quantiles of every metric with one number per network, over the networks that did not diverge; else None."""
    kept = ~metrics["diverged"]
    found = {}
    for name, values in sorted(metrics.items()):
        if values.ndim == 1 and name not in ("diverged", "duplicate", "init"):
            finite = values[kept & np.isfinite(values)]
            numbers = (
                np.quantile(finite.astype(np.float64), _QUANTILES).tolist() if len(finite) else [None] * len(_QUANTILES)
            )
            if kept.any():
                found[name] = dict(zip(map(str, _QUANTILES), numbers, strict=True))
    return found


# --- whether the bytes are those that were written -------------------------------------------------------------------

_PART, _PARTS = 2**28, 64  # bytes that a worker verifies at least, and parts at most
_MOST = 1000  # missing files that are listed


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """What was compared with a checksum.

    Each file has a `name`, a `status` ("verified", "unverified", "missing", "damaged"), what was `compared` ("sha256",
    "sha1", "crc32" or empty), and `detail`: why it is not verified, and what to do.
    """

    source: str
    files: tuple[dict[str, str], ...]

    @property
    def damaged(self) -> tuple[str, ...]:
        """The details of the damaged files."""
        return tuple(row["detail"] for row in self.files if row["status"] == "damaged")

    def raise_if_damaged(self) -> None:
        """Raise DataError if a file is damaged; names the first and their number."""
        if self.damaged:
            more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
            raise DataError(f"{self.damaged[0]}{more}")

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.files]

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "files": self.rows()}

    def summary(self) -> str:
        statuses = [row["status"] for row in self.files]
        kinds = ("verified", "unverified", "missing", "damaged")
        counts = [f"{n} {kind}" for kind in kinds if (n := statuses.count(kind))]
        return f"{self.source}: {', '.join(counts) or 'no files'}"

    def text(self) -> str:
        """The counts, and a table of all files that are not verified, or of all if there are few."""
        shown = [row for row in self.files if row["status"] != "verified"] or list(self.files[:20])
        cells = [(row["name"], f"{row['status']} {row['compared']}".strip(), row["detail"]) for row in shown]
        return "\n".join([self.summary(), "", text_table(("file", "", ""), cells, left=(0, 1, 2))])


def verify(source: "str | Path | Population | Checkpoint", *, workers: "Workers | int | None" = None) -> Verification:
    """Compare the files of a population, an artifact or a model with every checksum that is known of them.

    - A population: the SHA-256 and the structure of every shard.
    - An artifact: the digest beside its header.
    - A model at the hub: the hash that the hub states, which names the file in huggingface_hub's cache.
    - A file of `torch.save`: the CRC-32 of its records.

    `source` is a path, `hf://org/name[@revision]`, a `Population` or a `Checkpoint`; `workers`, as of `covariance`,
    read a population of more than 256 MiB. DataError if the source cannot be read at all; damaged files are listed in
    the result.

    Example:
        >>> print(verify("digits.pop").text())
    """
    if is_population(source):
        return _population(location(str(source)), workers)
    if isinstance(source, Population):
        return _population(source.path, workers)
    from weightscope.checkpoint import Checkpoint

    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    label = str(checkpoint.source)
    if ARTIFACT_KEY in checkpoint.metadata and checkpoint.commit is None:
        from weightscope.fits.artifact import read_contents

        name = Path(label).name
        try:
            read_contents(label)
        except DataError as error:
            return Verification(label, (_row(name, "damaged", "sha256", str(error)),))
        return Verification(label, (_row(name, "verified", "sha256"),))
    checks = checkpoint.check()
    return Verification(label, tuple(_row(c.name, c.status, c.compared, c.detail) for c in checks))


def _population(path: Path, workers: "Workers | int | None") -> Verification:
    from weightscope.statistics.samples import over_parts  # half a second

    population = Population(path, partial=True)
    rows = []
    networks = max(_PART // (4 * population.spec.size + 1), len(population) // _PARTS) + 1
    check = partial(over_parts, population, workers=workers, networks=networks)
    for name, error in check(lambda part, _: part.check_shards()):
        rows.append(_row(name, "damaged" if error else "verified", "sha256", error or ""))
    for tile in population.missing[:_MOST]:
        name = shards.shard_file(path, tile).name
        rows.append(_row(name, "missing", detail="not there yet, or removed"))
    return Verification(str(path), tuple(rows))


def _row(name: str, status: str, compared: str = "", detail: str = "") -> dict[str, str]:
    return {"name": name, "status": status, "compared": compared, "detail": detail}
