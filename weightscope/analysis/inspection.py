"""`look`: what is in a population, an artifact or a checkpoint, as plain data and as text."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import toml
from weightscope.artifacts import NetworkFit, PopulationFit, load_artifact
from weightscope.artifacts.format import KEY
from weightscope.population import Population

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the spec: its name, shape, role, and where it lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class Description:
    """What a population holds.

    Attributes:
        path: its folder.
        networks: N, how many there are to be.
        done: how many are there.
        missing_tiles: the tiles that are not there, or not with all their networks.
        diverged: how many of those that are there diverged in training.
        dimension: D, the length of one network's weight vector.
        tile: T.
        root_seed: of the population.
        first_seeds: the torch seeds of the first few networks' initial weights.
        tensors: the spec.
        quantiles: metric -> {"0.05": value, ...} over the networks that did not diverge.
        made_on: "torch VERSION on DEVICE" -> number of shards.
        bytes_on_disk: of all its files.
        environment: versions and machine that began it.
        recipe: as nested dictionaries.
    """

    path: str
    networks: int
    done: int
    missing_tiles: tuple[int, ...]
    diverged: int
    dimension: int
    tile: int
    root_seed: int
    first_seeds: tuple[int, ...]
    tensors: tuple[TensorRow, ...]
    quantiles: dict[str, dict[str, float]]
    made_on: dict[str, int]
    bytes_on_disk: int
    environment: dict[str, Any]
    recipe: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and finite numbers, as JSON takes them."""
        return asdict(self)

    def text(self) -> str:
        """Everything as text for a terminal, sections separated by blank lines."""
        return "\n\n".join((self._counts(), self._spec(), self._metrics(), self._origin(), self._recipe()))

    def _counts(self) -> str:
        missing = len(self.missing_tiles)
        lines = [
            f"{self.path}: {self.done:,} of {self.networks:,} networks of {self.dimension:,} weights each, "
            f"{_bytes(self.bytes_on_disk)}",
            f"tiles of {self.tile}; {missing or 'none'} missing; {self.diverged or 'none'} of the networks diverged",
        ]
        if missing:
            lines.append("run `weightscope collect` again to train the missing ones")
        return "\n".join(lines)

    def _spec(self) -> str:
        rows = [(t.name, "x".join(map(str, t.shape)) or "scalar", t.role, f"{t.start}:{t.stop}") for t in self.tensors]
        return _table(("tensor", "shape", "role", "columns"), rows)

    def _metrics(self) -> str:
        if not self.quantiles:
            return "no metrics yet"
        head = ("metric", *(_quantile_name(q) for q in _QUANTILES))
        rows = [(name, *(f"{values[str(q)]:.4g}" for q in _QUANTILES)) for name, values in self.quantiles.items()]
        return _table(head, rows)

    def _origin(self) -> str:
        lines = [f"root seed {self.root_seed}; seeds of the first networks {', '.join(map(str, self.first_seeds))}"]
        lines += [f"{count} shards made with {made}" for made, count in self.made_on.items()]
        for key, value in self.environment.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            lines.append(f"{key}: {text}")
        return "\n".join(lines)

    def _recipe(self) -> str:
        return toml.dumps(self.recipe).rstrip()


def describe(path: str | Path) -> Description:
    """What is in the population at `path`, complete or not. Every shard's hash is compared on the way.

    Raises:
        DataError: if it is no population, or a shard is damaged or foreign.

    Example:
        >>> print(describe("digits.pop").text())
    """
    population = Population(path, partial=True)
    spec = population.spec
    return Description(
        path=str(path),
        networks=population.recipe.population.networks,
        done=len(population),
        missing_tiles=population.missing,
        diverged=int(population.diverged.sum()),
        dimension=spec.size,
        tile=population.recipe.population.tile,
        root_seed=population.recipe.population.seed,
        first_seeds=tuple(int(seed) for seed in population.seeds[:4]),
        tensors=tuple(
            TensorRow(t.name, t.shape, t.role, spec.slices[t.name].start, spec.slices[t.name].stop)
            for t in spec.tensors
        ),
        quantiles=_quantiles(population),
        made_on=population.provenance(),
        bytes_on_disk=sum(file.stat().st_size for file in population.path.rglob("*") if file.is_file()),
        environment=population.environment,
        recipe=population.recipe.to_dict(),
    )


@dataclass(frozen=True)
class CheckpointDescription:
    """What a checkpoint holds, read from its header alone.

    Attributes:
        source: file, folder or address.
        tensors: (name, shape, type) of every weight.
        skipped: name -> why it is not among the weights.
        config: the model's `config.json`, empty where there is none.
    """

    source: str
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    skipped: dict[str, str]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)

    def text(self) -> str:
        """Counts, the table of tensors, and what was skipped."""
        numbers = sum(math.prod(shape) for _, shape, _ in self.tensors)
        rows = [(name, "x".join(map(str, shape)) or "scalar", kind) for name, shape, kind in self.tensors]
        lines = [
            f"{self.source}: {len(rows):,} tensors, {numbers:,} weights",
            "",
            _table(("tensor", "shape", "type"), rows),
        ]
        lines += [f"skipped `{name}`: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def look(source: str) -> Description | PopulationFit | NetworkFit | CheckpointDescription:
    """What is in a population, an initialiser's artifact or a checkpoint; each has `.text()` and `.to_dict()`.

    Raises:
        DataError: if there is no such thing, or it is damaged.

    Example:
        >>> print(look("digits-mlp.safetensors").text())
    """
    path = Path(source)
    if path.suffix == ".pop" or (path / "population.json").exists():
        return describe(path)
    from weightscope.checkpoint import Checkpoint

    checkpoint = Checkpoint(source)
    if KEY in checkpoint.metadata:
        return load_artifact(path)
    rows = ((n, checkpoint.shape(n), str(checkpoint.dtype(n)).removeprefix("torch.")) for n in checkpoint.names)
    return CheckpointDescription(source, tuple(rows), dict(checkpoint.skipped), dict(checkpoint.config))


def _quantiles(population: Population) -> dict[str, dict[str, float]]:
    """Of every metric with one number for each network, over those that did not diverge."""
    kept = ~population.diverged
    found = {}
    for name, values in sorted(population.metrics.items()):
        if values.ndim == 1 and name not in ("diverged", "init"):
            finite = values[kept & np.isfinite(values)]
            if len(finite):
                numbers = np.quantile(finite.astype(np.float64), _QUANTILES)
                found[name] = {str(q): float(x) for q, x in zip(_QUANTILES, numbers, strict=True)}
    return found


def _quantile_name(q: float) -> str:
    return {0.0: "least", 0.5: "median", 1.0: "most"}.get(q, f"{100 * q:g} %")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    # Names to the left, everything else to the right.
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
