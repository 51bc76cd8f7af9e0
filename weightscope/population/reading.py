"""`Population`: N trained networks, read from their shards."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from weightscope.errors import DataError, SpecError, UsageError
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.shard_format import header_text
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 32 * 2**20


class Population:
    """N trained networks: weights (N, D) float32, seeds (N,), metrics, recipe, spec and environment.

    Every shard's sha256 is compared when it is first read, so damage is an error and never a number.

    Args:
        path: the population's folder.
        partial: take what is there of a population that is not complete. Rows then are the networks of
            `indices`, in rising order. Without it an incomplete population is an error, because a
            covariance of half a run looks like any other.

    Raises:
        DataError: if this is no population, or it is damaged or not complete.

    Example:
        >>> population = Population("digits.pop")
        >>> population.weights("*fc1.weight").shape
        (256, 2048)
    """

    def __init__(self, path: str | Path, *, partial: bool = False) -> None:
        self.path = Path(path)
        self._manifest = manifests.read(self.path)
        self._verified: dict[int, tuple[int, ...]] = {}
        present = shards.tiles_on_disk(self.path, self._manifest)
        self._rows = {tile: self._rows_of(tile) for tile in present}
        if self.missing and not partial:
            raise DataError(
                f"{self.path}: expected {self._manifest.networks} networks, found {len(self)}; missing "
                f"{_listing(self.missing, self._manifest)}; run `weightscope collect` again to train them, "
                "or open it with partial=True (--partial) to use what is there"
            )

    def __len__(self) -> int:
        return sum(self._rows.values())

    def __repr__(self) -> str:
        return f"Population({str(self.path)!r}, networks={len(self)} of {self._manifest.networks}, D={self.spec.size})"

    @property
    def spec(self) -> WeightSpec:
        """Names and shapes of one network's tensors."""
        return self._manifest.spec

    @property
    def recipe(self) -> Recipe:
        """What the networks were trained with; `recipe.population.networks` is how many there are to be."""
        return self._manifest.recipe

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine that began the population."""
        return self._manifest.environment

    @property
    def missing(self) -> tuple[int, ...]:
        """The tiles that are not there, or not yet with all their networks."""
        expected = self._manifest
        return tuple(t for t in range(expected.tiles) if self._rows.get(t, 0) < expected.rows(t))

    @cached_property
    def indices(self) -> np.ndarray:
        """The number k of the network in each row, shape (n,); 0 to N - 1 in a complete population."""
        first = self._manifest.tile
        parts = [np.arange(tile * first, tile * first + rows) for tile, rows in self._rows.items()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def seeds(self) -> np.ndarray:
        """The torch seed of each network's initial weights, shape (n,) uint64."""
        return self._table[0]

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Name -> values of each network, shape (n,), or (n, E) for those of every epoch."""
        return self._table[1]

    @property
    def diverged(self) -> np.ndarray:
        """Which networks diverged in training, shape (n,) bool; their weights mean nothing."""
        return self.metrics["diverged"]

    def weights(self, select: str | Sequence[str] = "*") -> np.ndarray:
        """The tensors whose names match, of every network, shape (n, D') float32.

        Args:
            select: patterns as in `WeightSpec.select`; D' is the size of what they choose.

        Raises:
            UsageError: if a pattern matches nothing.
            DataError: if a shard is damaged.
        """
        sub = self.spec.select(select)
        out = np.empty((len(self), sub.size), dtype=np.float32)
        start = 0
        for tile, rows in self._rows.items():
            self._read(tile, slice(0, rows), sub, out[start : start + rows])
            start += rows
        return out

    def chunks(self, select: str | Sequence[str] = "*", size: int | None = None) -> Iterator[np.ndarray]:
        """Blocks of rows (size, D') float32 in network order, the last one shorter.

        Memory is that of one block, whatever N is. `size` changes speed and memory only; by default a block
        takes about 32 MiB.

        Raises:
            UsageError: if a pattern matches nothing or the size is not positive.
            DataError: if a shard is damaged.
        """
        return (block for block, _ in self.marked_chunks(select, size))

    def marked_chunks(
        self, select: str | Sequence[str] = "*", size: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As `chunks`, each block with booleans (size,): which of its networks diverged, read with them.

        Raises:
            UsageError: if a pattern matches nothing or the size is not positive.
            DataError: if a shard is damaged.
        """
        sub = self.spec.select(select)
        if size is not None and size < 1:
            raise UsageError(f"size: expected a positive number of rows, found {size}")
        return self._blocks(sub, size or max(1, _BLOCK_BYTES // (4 * max(1, sub.size))))

    def _blocks(self, sub: WeightSpec, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        total, done, filled = len(self), 0, 0
        block, marks = np.empty((min(size, total), sub.size), dtype=np.float32), np.empty(min(size, total), dtype=bool)
        for tile, rows in self._rows.items():
            start = 0
            while start < rows:
                take = min(rows - start, len(block) - filled)
                part = slice(filled, filled + take)
                self._read(tile, slice(start, start + take), sub, block[part], marks[part])
                start, filled = start + take, filled + take
                if filled == len(block):
                    yield block, marks
                    done, filled = done + filled, 0
                    rows_left = min(size, total - done)
                    block, marks = np.empty((rows_left, sub.size), dtype=np.float32), np.empty(rows_left, dtype=bool)

    def vector(self, k: int) -> np.ndarray:
        """The weight vector of network number k, shape (D,) float32.

        Raises:
            UsageError: if there is no network k.
        """
        tile, slot = divmod(k, self._manifest.tile)
        if k < 0 or slot >= self._rows.get(tile, 0):
            raise UsageError(f"{self.path}: no network {k}; it holds {len(self)} of {self._manifest.networks}")
        out = np.empty((1, self.spec.size), dtype=np.float32)
        self._read(tile, slice(slot, slot + 1), self.spec, out)
        return out[0]

    def network(self, k: int) -> "torch.nn.Module":
        """Network number k as a module in evaluation mode, with its trained weights.

        Raises:
            UsageError: if there is no network k.
            SpecError: if this version of weightscope builds another network from the recipe.
        """
        import torch

        from weightscope.networks import build_for

        module = build_for(self.recipe)
        if lines := self.spec.differences(WeightSpec.of(module)):
            raise SpecError(f"{self.path}: the network built from the recipe differs: {'; '.join(lines[:3])}")
        tensors = {name: torch.from_numpy(value) for name, value in self.spec.unpack(self.vector(k)).items()}
        # Integer buffers are no weights and stand in no spec; everything else was compared above.
        module.load_state_dict(tensors, strict=False)
        return module.eval()

    def provenance(self) -> dict[str, int]:
        """`"torch VERSION on DEVICE"` -> the number of shards made so; more than one means mixed builds."""
        counts: dict[str, int] = {}
        for tile in self._rows:
            with self._open(tile) as h5:
                made = f"torch {header_text(h5, 'torch')} on {header_text(h5, 'device')}"
            counts[made] = counts.get(made, 0) + 1
        return counts

    def verify(self) -> None:
        """Hash every shard again and compare its structure with the recipe's.

        Raises:
            DataError: names every shard that is damaged or foreign.
        """
        self._verified.clear()
        bad = []
        for tile in self._rows:
            try:
                with self._open(tile):
                    pass
            except DataError as error:
                bad.append(str(error))
        if bad:
            raise DataError(f"{len(bad)} of {len(self._rows)} shards are bad: {'; '.join(bad)}")

    @cached_property
    def _table(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        seeds, metrics = [np.empty(0, dtype=np.uint64)], []
        for tile, rows in self._rows.items():
            with self._open(tile) as h5:
                seeds.append(h5["seed"][:rows])
                metrics.append({name: h5["metrics"][name][:rows] for name in h5["metrics"]})
                if metrics[0].keys() != metrics[-1].keys():
                    raise DataError(
                        f"{shards.shard_file(self.path, tile)}: expected the metrics {', '.join(metrics[0])}, "
                        f"found {', '.join(metrics[-1])}; delete it and {shards.AGAIN}"
                    )
        joined = {name: np.concatenate([m[name] for m in metrics]) for name in (metrics[0] if metrics else ())}
        joined = joined or {"diverged": np.empty(0, dtype=bool)}
        for array in joined.values():
            array.flags.writeable = False
        return np.concatenate(seeds), joined

    def _rows_of(self, tile: int) -> int:
        rows = self._manifest.rows(tile)
        if self._manifest.shorter_rows(tile):
            with self._open(tile) as h5:
                rows = min(rows, h5["weights"].shape[0])
        return rows

    @contextlib.contextmanager
    def _open(self, tile: int) -> Iterator[h5py.File]:
        file = shards.shard_file(self.path, tile)
        try:
            with shards.opened(file, self._manifest, tile, self._verified.get(tile)) as h5:
                self._verified[tile] = shards.signature(file)
                yield h5
        except FileNotFoundError:
            raise DataError(f"{file}: expected a shard, found no file any more; {shards.AGAIN}") from None

    def _read(
        self, tile: int, rows: slice, sub: WeightSpec, out: np.ndarray, diverged: np.ndarray | None = None
    ) -> None:
        with self._open(tile) as h5:
            if diverged is not None:
                diverged[...] = h5["metrics"]["diverged"][rows]
            start = 0
            for columns in _runs(self.spec, sub):
                width = columns.stop - columns.start
                h5["weights"].read_direct(out, np.s_[rows, columns], np.s_[:, start : start + width])
                start += width


def _runs(spec: WeightSpec, sub: WeightSpec) -> list[slice]:
    """The columns of `sub` as few, rising slices: neighbouring tensors are read together."""
    runs: list[slice] = []
    for name in sub.names:
        part = spec.slices[name]
        if runs and runs[-1].stop == part.start:
            runs[-1] = slice(runs[-1].start, part.stop)
        elif part.stop > part.start:
            runs.append(part)
    return runs


def _listing(tiles: Sequence[int], manifest: manifests.Manifest, most: int = 4) -> str:
    text = ", ".join(
        f"tile {t} (networks {t * manifest.tile}-{t * manifest.tile + manifest.rows(t) - 1})" for t in tiles[:most]
    )
    return text + (f" and {len(tiles) - most} more tiles" if len(tiles) > most else "")
