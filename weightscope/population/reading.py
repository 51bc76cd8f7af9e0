"""`Population`: N trained networks, read from their shards; and weights of any source, opened."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

import h5py
import numpy as np

from weightscope._util import plugins
from weightscope._util.names import unknown
from weightscope._util.results import Result
from weightscope._util.sources import EXPORTED, is_population, location, population_member
from weightscope._util.trust import CannotRun, require_trust, trusted
from weightscope.data.metrics import PER_EPOCH, at_end
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.population import manifest as manifests
from weightscope.population import one_file, shards
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 32 * 2**20
_CACHED = ("missing", "indices", "_table")  # what follows from the tiles on disk


class MissingMetric(UsageError, KeyError):
    """A metric that a population does not have."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class _Metrics(dict[str, np.ndarray]):
    def __missing__(self, name: str) -> np.ndarray:
        raise MissingMetric(unknown("metric", name, self))


class Population(Result):
    """N trained networks: weights (N, D) float32, seeds (N,), metrics, recipe, spec and environment.

    `population[k]` is network k as a module, counted from the end if k is negative; `population[2:5]` are the weights
    (3, D) of a slice of networks. Iterating gives the networks as modules, and `numpy.asarray(population)` all weights
    (N, D). The SHA-256 of a shard is verified when its weights are first read, not for its seeds and metrics; `verify`
    compares all.

    Args:
        path: the population's folder, its URL in an object store, `"s3://bucket/digits.pop"`, or a file of `export`.
        partial: open an incomplete population. Its rows, and what `population[k]` counts, are then the networks of
            `indices`, in ascending order.
        trust: run the code that the population names where networks are built (docs/architecture.md).

    Raises:
        DataError: if it is not a population, or is damaged or incomplete.

    Example:
        >>> population = Population("digits.pop")
        >>> population.weights("*fc1.weight").shape
        (256, 2048)
    """

    def __init__(self, path: str | Path, *, partial: bool = False, trust: bool = False) -> None:
        self.path, self._trust = location(path), trust or trusted()
        self._snapshot: int | None = None  # place of the snapshot that is read; None: the end of training
        self.verified: set[int] = set()  # tiles of the shards whose hash was compared
        # Tile -> where its networks are in the file that holds it: a shard of its own, or one file of all of them.
        self._rows: dict[int, slice]
        self._exported = self.path.suffix in EXPORTED
        if self._exported:
            self.manifest, indices = one_file.read(self.path)
            tiles, first = np.unique(indices // self.manifest.tile, return_index=True)
            ends = [*first[1:].tolist(), len(indices)]
            self._rows = dict(zip(tiles.tolist(), map(slice, first.tolist(), ends), strict=True))
        else:
            self.manifest = manifests.read(self.path)
            there = shards.tiles_on_disk(self.path, self.manifest)
            self._rows = {tile: slice(0, self.manifest.rows(tile)) for tile in there}
        if self.missing and not partial:
            raise DataError(
                f"{self.path}: expected {self.manifest.networks} networks, found {len(self)}; missing "
                f"{self.manifest.described(self.missing)}; {self.manifest.again}, or use "
                "the others with --partial (in Python, partial=True)"
            )

    @classmethod
    def of(
        cls, networks: Iterable[Any], path: str | Path, *, network: Any = None, trust: bool = False, **options: Any
    ) -> "Population":
        """Import networks that were trained elsewhere; `weightscope import` on the command line.

        They are copied into ordinary shards, one network in memory at a time, half precision as float32. If it is
        interrupted, the same call resumes. What does not fit is named for all networks at once, and nothing is kept.
        `diverged` marks those with NaN or infinite weights and those equal to an earlier one, which statistics leave
        out; a warning names them.

        Args:
            networks: state dicts, modules, or paths or addresses that `Checkpoint` takes (and .npz); or mappings of
                epochs or steps of training to these, whose last is the network and all of which are its snapshots
                (`Population.at`).
            path: the population's folder. If it exists, it must have been made from the same networks.
            network: what builds the network: `"package.module:function"` or a function, called without arguments,
                that returns it, or it and example inputs; or a recipe. Without, what needs only weights works.
            trust: run the code that a population, given as `network`, names (docs/architecture.md).
            options: `metrics`, name -> numbers, one for each network; `count`, the number of networks, if the iterable
                has no length; `select`, patterns of tensor names, others are left out; `rename`, beginnings of tensor
                names, each `"OLD=NEW"`, such as `"module.="`; `key`, the dictionary of weights in files or mappings
                that hold several; `snapshots`, the epochs or steps to keep of mappings, by default those of the first;
                `skip_unfit`, leave out networks that do not fit, with a warning; `progress`, show a bar if stderr is a
                terminal.

        Raises:
            DataError: if networks do not fit or cannot be read, or `path` holds others.
            UsageError: for an invalid argument, or other options than `path` was made with.
            Resumable: if interrupted.

        Example:
            >>> Population.of([torch.load(file) for file in files], "zoo.pop", metrics={"test_accuracy": accuracies})
        """
        from weightscope.population.importing import import_networks

        if not (network is None or callable(network) or plugins.is_reference(network)):
            network = recipe_of(network, trust=trust)
        import_networks(networks, path, network=network, **options)
        return cls(path, trust=True)  # its code has just run

    def at(self, epoch: int) -> "Population":
        """The same networks after so many epochs (of sequences, steps) of training; 0 is the start.

        Its weights are those of a snapshot (`population.snapshots` in the recipe). Metrics, and which networks
        diverged, are those of the end of training, so that all snapshots have the same networks.

        UsageError if there is no such snapshot.

        Example:
            >>> Population("digits.pop").at(4).weights("*fc1.weight")
        """
        if epoch not in self.snapshots:
            found = ", ".join(map(str, self.snapshots)) or "none; give the recipe's [population] a list `snapshots`"
            raise UsageError(f"{self.path}: expected a snapshot after {self.unit} {epoch!r}; there are {found}")
        return self._view(self.__dict__ | {"_snapshot": self.snapshots.index(epoch)})

    def parts(self, networks: int) -> "list[Population]":
        """Views of consecutive tiles with at least so many networks, but for the last; tiles keep their part."""
        step = -(-networks // self.manifest.tile)
        rows: dict[int, dict[int, slice]] = {}
        for tile, own in self._rows.items():
            rows.setdefault(tile // step, {})[tile] = own
        kept = {key: value for key, value in self.__dict__.items() if key not in _CACHED}
        return [self._view(kept | {"_rows": own}) for own in rows.values()]

    def _view(self, state: dict[str, Any]) -> "Population":
        view = object.__new__(type(self))
        view.__dict__.update(state)
        return view

    @property
    def name(self) -> str:
        """The path, with the first and last shard of a part: `"digits.pop, shards 00000.h5 to 00007.h5"`."""
        files = [shards.shard_file(self.path, tile).name for tile in (min(self._rows), max(self._rows))]
        return f"{self.path}, shards {files[0]} to {files[1]}"

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker, which may run in another folder."""
        kept = {key: value for key, value in self.__dict__.items() if key not in _CACHED}
        return kept | {"path": self.path.absolute(), "verified": self.verified & self._rows.keys()}

    @property
    def snapshot(self) -> int | None:
        """The epoch or step that was given to `at`; None for the end of training."""
        return None if self._snapshot is None else self.snapshots[self._snapshot]

    @property
    def unit(self) -> str:
        """What `snapshots` count: `"epoch"`, or `"step"` of sequences and of imported networks."""
        made = self.manifest.made
        return made.data.snapshot_unit if isinstance(made, Recipe) else "step"

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The epochs or steps that `at` takes, ascending."""
        return self.manifest.snapshots

    def __len__(self) -> int:
        return sum(rows.stop - rows.start for rows in self._rows.values())

    @overload
    def __getitem__(self, k: SupportsIndex) -> "torch.nn.Module": ...
    @overload
    def __getitem__(self, k: slice) -> np.ndarray: ...
    def __getitem__(self, k: SupportsIndex | slice) -> "torch.nn.Module | np.ndarray":
        if isinstance(k, slice):
            return self._rows_at(np.arange(len(self))[k])
        return self.network(int(self.indices[k]))

    def __iter__(self) -> "Iterator[torch.nn.Module]":
        return (self.network(int(k)) for k in self.indices)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All weights, shape (n, D); see `weights`."""
        if copy is False:
            raise ValueError("weights are read from disk; expected copy=None or True, found False")
        return self.weights().astype(dtype or np.float32, copy=False)

    def rows(self) -> list[dict[str, Any]]:
        """One record for each network: index, seed or source, and its metrics at the end of training; see `curves`."""
        columns: dict[str, list[Any]] = {"network": self.indices.tolist()}
        if self.manifest.imported is None:
            columns["seed"] = self.seeds.tolist()
        elif sources := self.manifest.imported.sources:
            columns["source"] = [sources[k][0] for k in self.indices]
        columns |= {name: values.tolist() for name, values in at_end(self.metrics).items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def curves(self) -> Any:
        """The metrics after each epoch as a `pandas.DataFrame`: one row for each network and epoch, from 1."""
        import pandas  # half a second

        found = {name: values for name, values in self.metrics.items() if values.ndim == 2}
        epochs = max((values.shape[1] for values in found.values()), default=0)
        columns: dict[str, Any] = {"network": np.repeat(self.indices, epochs)}
        columns["epoch"] = np.tile(np.arange(1, epochs + 1), len(self))
        kept = {name.removesuffix(PER_EPOCH): x.ravel() for name, x in found.items() if x.shape[1] == epochs}
        return pandas.DataFrame(columns | kept)

    def summary(self) -> str:
        networks = f"{len(self)} of {self.manifest.networks} networks" if self.missing else f"{len(self)} networks"
        made = self.manifest.made
        what = f"{made.network.type}, {made.data.name}" if isinstance(made, Recipe) else "imported"
        when = "" if self.snapshot is None else f", after {self.unit} {self.snapshot}"
        return f"{self.path}: {networks} ({what}), D={self.spec.size}{when}"

    def text(self) -> str:
        """The summary, and means over the networks that did not diverge."""
        kept = ~self.diverged
        last = {name: values[kept] for name, values in at_end(self.metrics).items() if name.startswith("test_")}
        means = [f"mean {name} {values.mean():.4g}" for name, values in last.items() if values.size]
        return "\n".join([self.summary(), "; ".join([f"{int(self.diverged.sum())} diverged", *means])])

    @property
    def spec(self) -> WeightSpec:
        """Names and shapes of one network's tensors."""
        return self.manifest.spec

    @property
    def recipe(self) -> Recipe:
        """What the networks were trained with; `recipe.population.networks` is N of the complete population.

        UsageError if they were imported without one.
        """
        return self.manifest.recipe

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine with which the population was created."""
        return self.manifest.environment

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """The tiles that are not on disk; of an exported file none."""
        # A population may be planned to have millions of tiles, of which few exist.
        return () if self._exported else tuple(t for t in range(self.manifest.tiles) if t not in self._rows)

    @cached_property
    def indices(self) -> np.ndarray:
        """The index k of the network in each row, shape (n,); 0 to N - 1 in a complete population."""
        first = self.manifest.tile
        parts = [tile * first + np.arange(rows.stop - rows.start) for tile, rows in self._rows.items()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def seeds(self) -> np.ndarray:
        """The torch seed of each network's initial weights, shape (n,) uint64; 0 of imported networks."""
        return self._table[0]

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Name -> value of each network, shape (n,), or of each epoch, shape (n, E)."""
        return self._table[1]

    @cached_property
    def hits(self) -> np.ndarray | None:
        """Which of the m test images each network classifies rightly, shape (n, m) bool.

        None of sequences and imported networks, and if a shard was written by a version that did not store them.
        """
        parts = []
        for tile, rows in self._files():
            with self._open(tile) as h5:
                parts.append(shards.hits_in(h5, rows))
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if known and len(known) == len(parts) else None

    @property
    def diverged(self) -> np.ndarray:
        """Which networks statistics leave out, shape (n,) bool: those that diverged in training.

        Of imported networks, those with weights that are not finite, or equal to an earlier network's.
        """
        return self.metrics["diverged"]

    def weights(self, select: str | Sequence[str] = "*") -> np.ndarray:
        """The selected tensors of every network, shape (n, D') float32; patterns as in `WeightSpec.select`.

        UsageError if a pattern matches nothing, DataError if a shard is damaged; likewise in the other methods.
        """
        blocks, out, start = self.chunks(select), np.empty((len(self), self.spec.select(select).size), np.float32), 0
        for block in blocks:
            out[start : start + len(block)] = block
            start += len(block)
        return out

    def chunks(self, select: str | Sequence[str] = "*", size: int | None = None) -> Iterator[np.ndarray]:
        """Blocks of rows (size, D') float32 in network order; the last one may be shorter.

        Only one block is in memory. `size` changes speed and memory only; by default a block takes about 32 MiB.
        """
        return (block for block, _ in self.marked_chunks(select, size))

    def marked_chunks(
        self, select: str | Sequence[str] = "*", size: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Like `chunks`, each block with booleans (size,): which of its networks diverged."""
        sub = self.spec.select(select)
        if size is not None and size < 1:
            raise UsageError(f"size: expected a positive number of rows, found {size}")
        return self._blocks(sub, size or max(1, _BLOCK_BYTES // (4 * max(1, sub.size))))

    def _blocks(self, sub: WeightSpec, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        total, done, filled, runs = len(self), 0, 0, _runs(self.spec, sub)
        block, marks = np.empty((min(size, total), sub.size), dtype=np.float32), np.empty(min(size, total), dtype=bool)
        for tile, rows in self._files():
            with self._open(tile) as h5:
                start, diverged = rows.start, shards.read(h5, "metrics/diverged")
                while start < rows.stop:
                    take = min(rows.stop - start, len(block) - filled)
                    part, here = slice(filled, filled + take), slice(start, start + take)
                    shards.read_weights(h5, self._snapshot, here, runs, block[part])
                    marks[part] = diverged[here]
                    start, filled = start + take, filled + take
                    if filled == len(block):
                        yield block, marks
                        done, filled = done + filled, 0
                        left = min(size, total - done)
                        block, marks = np.empty((left, sub.size), dtype=np.float32), np.empty(left, dtype=bool)

    def vector(self, k: int) -> np.ndarray:
        """The weight vector of the network with index k, shape (D,) float32; UsageError if there is no network k."""
        row = int(np.searchsorted(self.indices, k))
        if row == len(self) or self.indices[row] != k:
            raise UsageError(
                f"{self.path}: no network {k!r}; found {len(self)} of {self.manifest.networks}, counted from 0"
                + f"; {self.manifest.again}" * bool(self.missing)
            )
        return self._rows_at(np.array([row]))[0]

    def network(self, k: int) -> "torch.nn.Module":
        """The network with index k as a module in evaluation mode, with its trained weights.

        UsageError if there is no network k, its own code is not trusted, or the population was imported without code;
        DataError if the source of that code has changed; SpecError if it builds another network than was recorded.
        """
        if (template := self.template()) is None:
            raise manifests.NoRecipe(
                f"{self.path}: its networks were imported as weights only; to run them, import them with --network "
                "MODULE:FUNCTION or --network RECIPE"
            )
        module, _ = template
        if lines := self.spec.differences(WeightSpec.of(module)):
            made = "network the population names" if self.manifest.imported else "network built from the recipe"
            raise SpecError(f"{self.path}: the {made} differs: {'; '.join(lines[:3])}")
        # Integer buffers are not in the spec; everything else was compared above.
        module.load_state_dict(self._tensors(k), strict=False)
        return module.eval()

    def template(self) -> "tuple[torch.nn.Module, Any] | None":
        """A network like the population's with random weights, and inputs of some examples; errors as of `network`.

        None if it was imported without code; the inputs are None if the function that builds the network returns none.
        """
        import torch

        from weightscope._util.torch_random import seeded
        from weightscope.networks import build_for

        imported = self.manifest.imported
        if imported and not imported.network and imported.recipe is None:
            return None
        kind = imported.network if imported and imported.network else self.recipe.network.type
        if plugins.is_reference(kind):
            self.require_trust([kind])
        if (recorded := self.manifest.inputs.get(f"network {kind}")) is not None:
            plugins.check_source(kind, recorded, self.path)
        with seeded(0):
            if imported and imported.network:
                from weightscope.population.importing import built

                return built(kind)
            return build_for(self.recipe), self.recipe.data.inputs(torch.Generator().manual_seed(0), 4)

    def require_trust(self, references: Iterable[str]) -> None:
        """Raise `CannotRun` if the population names code of users' own that it was not opened with `trust` for."""
        if not self._trust:
            require_trust(references, self.path)

    def opened(self, k: int) -> "torch.nn.Module | dict[str, torch.Tensor]":
        """The network with index k as a module, or its tensors if its code is missing, not trusted or changed."""
        try:
            return self.network(k)
        except (CannotRun, plugins.SourceChanged, manifests.NoRecipe):
            return self._tensors(k)

    def _tensors(self, k: int) -> "dict[str, torch.Tensor]":
        import torch

        found = self.spec.unpack(self.vector(k)).items()
        out = _StateDict((name, torch.from_numpy(value)) for name, value in found)
        out.config = self.manifest.imported.config if self.manifest.imported else {}
        return out

    def provenance(self) -> dict[str, int]:
        """`"torch VERSION on DEVICE"` -> number of shards; more than one entry means mixed builds."""
        return dict(self._table[2])

    def check_shards(self) -> list[tuple[str, str]]:
        """Name of each file, and what is wrong with its SHA-256 or header; empty if nothing is."""
        self.verified.clear()
        shards.downloaded.cache_clear()
        out = {}
        for tile, _ in self._files():
            name, error = self.path.name if self._exported else shards.shard_file(self.path, tile).name, ""
            try:
                if self._exported:
                    one_file.read(self.path)
                with self._open(tile):
                    pass
            except DataError as found:
                error = str(found)
            out[name] = error
        return [*out.items()]

    @cached_property
    def _table(self) -> tuple[np.ndarray, dict[str, np.ndarray], Counter[str]]:
        """Seeds, metrics, and what trained the shards, with their number; no hash is compared for them."""
        seeds: list[np.ndarray] = []
        columns: dict[str, list[np.ndarray]] = {}
        made = Counter[str]()
        for tile, rows in self._files():
            try:
                with self._open(tile, verify=False) as h5:
                    columns = columns or {name: [] for name in h5["metrics"]}
                    seeds.append(shards.read(h5, "seed")[rows])
                    for name, parts in columns.items():
                        parts.append(shards.read(h5, f"metrics/{name}")[rows])
                    if not self._exported:
                        made[f"torch {shards.header_text(h5, 'torch')} on {shards.header_text(h5, 'device')}"] += 1
            except (KeyError, OSError, RuntimeError) as error:  # of HDF5
                raise DataError(f"{self.path}: cannot read the metrics of tile {tile}: {error}") from error
        joined = _Metrics((name, np.concatenate(parts)) for name, parts in columns.items())
        joined = joined or _Metrics(diverged=np.empty(0, bool))
        for array in joined.values():
            array.flags.writeable = False
        return np.concatenate(seeds) if seeds else np.empty(0, "u8"), joined, made

    def _files(self) -> list[tuple[int, slice]]:
        """The rows of each file that are read, with the tile of their first: of each shard, or of the exported file."""
        rows = [*self._rows.items()]
        return [(rows[0][0], slice(rows[0][1].start, rows[-1][1].stop))] if self._exported and rows else rows

    def _rows_at(self, rows: np.ndarray) -> np.ndarray:
        """The weights of these rows, shape (len(rows), D) float32."""
        out, first = np.empty((len(rows), self.spec.size), dtype=np.float32), 0
        for tile, there in self._files():
            count = there.stop - there.start
            inside = np.flatnonzero((rows >= first) & (rows < first + count))
            if len(inside):
                local = rows[inside] - first + there.start
                start, stop = int(local.min()), int(local.max()) + 1
                block = np.empty((stop - start, self.spec.size), dtype=np.float32)
                with self._open(tile) as h5:
                    shards.read_weights(h5, self._snapshot, slice(start, stop), _runs(self.spec, self.spec), block)
                out[inside] = block[local - start]
            first += count
        return out

    @contextlib.contextmanager
    def _open(self, tile: int, *, verify: bool = True) -> Iterator[h5py.File]:
        """The file that holds a tile; the hash of a shard is compared when it is first opened with `verify`."""
        if self._exported:
            with h5py.File(self.path, "r", locking=False) as h5:
                yield h5
            return
        verify = verify and tile not in self.verified
        with shards.open_shard(self.path, self.manifest, tile, verify=verify) as h5:
            if verify:
                self.verified.add(tile)
            yield h5


class _StateDict(dict[str, Any]):
    """Tensors by name, with the `config` of their network."""

    config: dict[str, Any]


def population_in(source: str | Path | Population, *, partial: bool = False) -> Population:
    """The population at a path, which must be complete unless `partial`, or the one that is given."""
    return source if isinstance(source, Population) else Population(source, partial=partial)


def _runs(spec: WeightSpec, sub: WeightSpec) -> list[slice]:
    """The columns of `sub` as few ascending slices; adjacent tensors are read together."""
    runs: list[slice] = []
    for name in sub.names:
        part = spec.slices[name]
        if runs and runs[-1].stop == part.start:
            runs[-1] = slice(runs[-1].start, part.stop)
        elif part.stop > part.start:
            runs.append(part)
    return runs


def recipe_of(source: Recipe | str | Path, *, trust: bool = False) -> Recipe:
    """A recipe: itself, that of a population's folder, or the one that `Recipe.load` finds by name or path.

    A population is data: `CannotRun` if its recipe names code of users' own, unless with `trust`.
    """
    if isinstance(source, Recipe):
        return source
    if is_population(source):
        population = Population(source, partial=True, trust=trust)
        population.require_trust(name for _, name in population.recipe.references)
        return population.recipe
    return Recipe.load(source)


WeightSource: TypeAlias = "str | Path | Population | torch.nn.Module | Mapping[str, Any]"
"""What `open_source` and `open_network` take: a path of a population or a checkpoint, `"PATH.pop::k"`, `hf://org/name`,
a `Population`, a `Checkpoint`, a module, or a state dict."""


def open_source(source: Any, *, partial: bool = False) -> Any:
    """Open weights: a `Population` for the folder of one, else as `open_network`; what is open is returned as it is.

    Example:
        >>> open_source("digits.pop")
        <Population: digits.pop: 256 networks (convnext, digits), D=27018>
    """
    named = isinstance(source, Population) or is_population(source)
    return population_in(source, partial=partial) if named else open_network(source)


def member_of(source: Any) -> tuple[Population, int] | None:
    """The population, which may be incomplete, and k of `"PATH.pop::k"`; at a snapshot, of `"PATH.pop::k@EPOCH"`."""
    if (found := population_member(source)) is None:
        return None
    path, k, epoch = found
    population = Population(path, partial=True)
    return population if epoch is None else population.at(epoch), k


def open_network(source: Any) -> Any:
    """Open one network: a module for `"PATH.pop::k"`, a `Checkpoint` for another path, else the given source as it is.

    The tensors of a network of a population, if its code is not here, not trusted or has changed
    (`Population.opened`). UsageError if the population, which may be incomplete, has no network k; DataError for a
    whole population or the artifact of an initialiser, or if adapters (LoRA) change the network's weights.
    """
    from weightscope.anatomy.effective import refuse_adapters  # torch
    from weightscope.checkpoint import open_checkpoint

    if isinstance(source, Population):
        raise DataError(f"{source.path}: expected one network, found a population; give population.network(k)")
    if (found := member_of(source)) is not None:
        source = found[0].opened(found[1])
    elif isinstance(source, str | Path):
        source = open_checkpoint(source)
    refuse_adapters(source)
    return source
