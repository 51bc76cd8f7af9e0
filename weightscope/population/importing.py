"""`Population.of`: networks that were trained elsewhere are copied into a population.

Memory holds one network and the tile that is being filled. A tile is done when its shard is there; the same call
resumes by reading the networks again and comparing them with the shards.
"""

import glob
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from weightscope._util import atomic, plugins
from weightscope._util.environment import environment
from weightscope._util.names import joined, listing, numbered, shortened
from weightscope._util.remote import is_there
from weightscope._util.sources import is_population, location
from weightscope._util.threads import one_thread
from weightscope.anatomy.effective import adapters, refuse_adapters
from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.checkpoint.files import CANDIDATES, CONFIG, SUFFIXES
from weightscope.errors import DataError, Resumable, UsageError
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.population.manifest import Import, Manifest
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec

_log = logging.getLogger(__name__)
_HUB = "hf://"
_TILE, _TILE_BYTES = 250, 32 * 2**20  # networks and bytes of a shard, at most; 250 are one chunk of HDF5
_BUFFERS = {torch.bool, torch.int16, torch.int32, torch.int64}  # counters and indices, which no network learns
_NAMED = 4  # networks and tensors of a message


@dataclass(frozen=True)
class _Wanted:
    """What every network is read with and compared with."""

    made: Import
    patterns: tuple[str, ...]
    spec: WeightSpec | None = None  # without, that of the network


@dataclass(frozen=True)
class _Network:
    """What was read of a network and of its M snapshots."""

    spec: WeightSpec | None = None
    weights: np.ndarray = field(default_factory=lambda: np.empty(0))  # (1 + M, D) float32
    config: dict[str, Any] = field(default_factory=dict)
    commits: tuple[str | None, ...] = ()  # of models at the hub
    reasons: tuple[str, ...] = ()  # why it does not fit
    note: str = ""  # which weights were chosen in its file


class _Run:
    """One call of `Population.of`: the tile that is being filled, and what was found so far."""

    def __init__(self, path: Path, count: int, metrics: dict[str, np.ndarray], skip_unfit: bool) -> None:
        self.path, self.count, self.metrics, self.skip_unfit = path, count, metrics, skip_unfit
        self.manifest: Manifest | None = None  # known with the first network, as is
        self.there = 0  # how many networks the population has, or is to have
        self.kept: list[int] = []  # place in the iterable of each network
        self.sources: list[tuple[str, ...]] = []
        self.first: dict[bytes, str] = {}  # digest -> the first network that has it
        self.config: dict[str, Any] | None = None  # what those of all networks have in common
        self.told: dict[str, list[str]] = {}  # what to warn of -> networks
        self.unfit: dict[str, list[str]] = {}  # reason -> networks

    def all(self, networks: Iterable[tuple[Any, ...]], begin: Callable[..., Any], made: Import) -> None:
        """Import every network; DataError names all that do not fit, and leaves nothing of this call."""
        reference = made.network or (made.recipe.network.type if made.recipe else "")
        existed, created = self.path.exists(), not is_there(self.path / manifests.NAME)
        try:
            number = -1
            for number, (label, sources, steps, found) in enumerate(networks):
                if number >= self.count:
                    break
                if found.reasons:
                    self.unfit.setdefault(joined(found.reasons, _NAMED), []).append(label)
                    continue
                reference = reference or label
                if not self.unfit or self.skip_unfit:
                    if self.manifest is None:
                        self.manifest, self.there = begin(found.spec, steps)
                        self.empty_tile(self.manifest)
                    self.fill(self.manifest, number, label, sources, found)
            if number + 1 != self.count:
                more = "more" if number >= self.count else number + 1
                raise UsageError(f"count: expected {self.count} networks, found {more}")
            if self.manifest is None or (self.unfit and not self.skip_unfit):
                reasons = "; ".join(f"{joined(names, _NAMED)}: {why}" for why, names in self.unfit.items())
                raise DataError(
                    f"{sum(map(len, self.unfit.values()))} of {self.count} networks do not fit "
                    f"the tensors of {reference or 'a network'}: {reasons}; --rename, --select and --key adapt "
                    "tensors, --skip-unfit leaves networks out (rename=, select=, key=, skip_unfit=)"
                )
            self.finish(self.manifest)
        except KeyboardInterrupt:
            done = 0 if self.manifest is None else shards.networks_on_disk(self.path, self.manifest)
            raise Resumable(
                f"stopped: {done} of {self.count} networks are kept in {self.path}; run the same command again"
            ) from None
        except (DataError, UsageError) as error:
            if created and self.manifest is not None and (self.unfit or isinstance(error, UsageError)):
                manifests.remove(self.path, existed)
            raise
        for what, names in (self.told | {f"not imported: {why}": names for why, names in self.unfit.items()}).items():
            count = f"{len(names)} network{'s' * (len(names) > 1)}"
            _log.warning("%s: %s %s: %s", self.path, count, what, joined(names, _NAMED))

    def empty_tile(self, manifest: Manifest) -> None:
        """Begin a tile: the rows that no network fills stay NaN, and diverged."""
        shape = (manifest.tile, 1 + len(manifest.snapshots), manifest.spec.size)
        self.weights = np.full(shape, np.nan, np.float32)
        self.marks = {"diverged": np.ones(manifest.tile, bool), "duplicate": np.zeros(manifest.tile, bool)}

    def fill(self, manifest: Manifest, number: int, label: str, sources: list[Any], found: _Network) -> None:
        """Put a network into the tile, and write the tile if it is full."""
        row = len(self.kept) % manifest.tile
        self.weights[row], key = found.weights, hashlib.sha256(found.weights.data).digest()
        if found.note:
            self.told.setdefault(found.note, []).append(label)
        duplicate, finite = key in self.first, bool(np.isfinite(found.weights[0]).all())
        if not finite:
            self.told.setdefault("left out of statistics, with NaN or infinite weights", []).append(label)
        if duplicate:
            equal = f"{label} (= {self.first[key]})"
            self.told.setdefault("left out of statistics, equal to an earlier one", []).append(equal)
        self.marks["diverged"][row], self.marks["duplicate"][row] = not finite or duplicate, duplicate
        self.first.setdefault(key, label)
        common = found.config if self.config is None else self.config
        self.config = {k: v for k, v in common.items() if k in found.config and found.config[k] == v}
        self.kept.append(number)
        self.sources.append(tuple(map(_address, sources, found.commits)))
        if row == manifest.tile - 1:
            self.write(manifest)

    def write(self, manifest: Manifest) -> None:
        """Write the tile; DataError if it is there and has other networks or metrics."""
        tile = (len(self.kept) - 1) // manifest.tile
        kept = self.kept[tile * manifest.tile :]
        metrics = dict(self.marks)
        for name, values in self.metrics.items():
            metrics[name] = np.full(manifest.tile, np.nan)
            metrics[name][: len(kept)] = values[kept]
        snapshots = self.weights[:, 1:] if manifest.snapshots else None
        trained = shards.TrainedTile(tile, self.weights[:, 0], metrics, snapshots)
        self.empty_tile(manifest)
        if not shards.is_done(self.path, manifest, tile):
            shards.save(self.path, manifest, trained, "import")
            return
        now = {"weights": trained.weights} | ({"snapshots": snapshots} if snapshots is not None else {}) | metrics
        with shards.open_shard(self.path, manifest, tile, verify=False) as h5:
            groups = h5, h5["metrics"]
            before = {name: group[name][:] for group in groups for name in group if name not in ("metrics", "seed")}
        none = np.empty(0)
        changed = [
            shortened(name)
            for name in sorted(now.keys() | before.keys())
            if not np.array_equal(before.get(name, none), now.get(name, none), equal_nan=True)
        ]
        if changed:
            raise DataError(
                f"{self.path}: {joined(changed, _NAMED)} of {manifest.described([tile])} differ from what was "
                "imported; give another folder, or the networks and metrics that they were"
            )

    def finish(self, manifest: Manifest) -> None:
        """Write the last tile, and the manifest with the networks that fitted."""
        n, imported = len(self.kept), manifest.imported
        assert imported is not None
        if n % manifest.tile:
            self.write(manifest)
        if self.there not in (self.count, n):
            raise UsageError(f"{self.path} holds {self.there} networks, found {n}; give another folder")
        recipe = imported.recipe and imported.recipe.replace({"population.networks": n})
        sources = tuple(self.sources) if all(all(each) for each in self.sources) else ()
        made = replace(imported, recipe=recipe, sources=sources, config=self.config or {})
        atomic.write(self.path / manifests.NAME, replace(manifest, made=made, networks=n).to_bytes())


def _address(source: Any, commit: str | None) -> str:
    """The text that the manifest has of a source: of a model at the hub with its commit."""
    if not isinstance(source, str | Path):
        return ""
    return str(source) if commit is None else f"{str(source).partition('@')[0]}@{commit}"


@one_thread()
def import_networks(
    networks: Iterable[Any],
    path: str | Path,
    *,
    metrics: Mapping[str, Sequence[float]] | None = None,
    count: int | None = None,
    select: str | Sequence[str] = "*",
    rename: Sequence[str] = (),
    key: str | None = None,
    network: Any = None,
    snapshots: Sequence[int] | None = None,
    skip_unfit: bool = False,
    progress: bool = True,
) -> None:
    """`Population.of`, which describes the arguments; `network` is a reference, a function or a `Recipe`."""
    path = location(path)
    if count is None:
        if not isinstance(networks, Sized):
            raise UsageError("count: expected the number of networks, since this iterable has no length")
        count = len(networks)
    if count < 1:
        raise UsageError("expected at least one network, found none")
    columns = {_metric(name): np.asarray(values, dtype=np.float64) for name, values in (metrics or {}).items()}
    if len(columns) < len(metrics or {}):
        raise UsageError(f"metrics: two have one name, {', '.join(sorted(columns))}, with '.' for '/'; rename one")
    for name, values in columns.items():
        if values.shape != (count,):
            raise UsageError(f"metrics: expected {count} numbers of {name}, one for each network, found {values.shape}")
    for text in rename:
        if not text.partition("=")[0] or "=" not in text:
            raise UsageError(f"rename: expected OLD=NEW, beginnings of names such as 'module.=', found {text!r}")
    made = Import(0, rename=tuple(rename), key=key)
    if isinstance(network, Recipe):
        made = replace(made, recipe=network.replace({"population.networks": count}))
    elif network is not None:
        made = replace(made, network=plugins.reference_to(network) if callable(network) else network)
    patterns = tuple(p.strip() for p in select.split(",")) if isinstance(select, str) else tuple(select)
    wanted, inputs = _expected(_Wanted(made, patterns))

    def begin(spec: WeightSpec, steps: tuple[int, ...]) -> tuple[Manifest, int]:
        """Make the population with the tensors that are expected, and snapshots beside the last; its number, too."""
        fitting = _TILE_BYTES // (4 * max(1, spec.size) * (1 + len(steps)))
        there = manifests.read(path) if is_there(path / manifests.NAME) else None
        tile = there.tile if there and there.imported else max(1, min(_TILE, fitting, count))
        texts = plugins.texts_of(name.partition(" ")[2] for name in inputs)
        imported = replace(made, tile=tile, snapshots=steps)
        manifest = Manifest(imported, spec, environment("cpu"), count, inputs, texts)
        matched, _ = manifests.create_or_match(path, manifest, resize=False)
        manifests.sweep(path)
        return manifest, matched.networks

    read = _read(wanted, networks, None if snapshots is None else tuple(snapshots))
    with tqdm(read, total=count, desc="import", disable=None if progress else True) as found:
        _Run(path, count, columns, skip_unfit).all(found, begin, made)


# --- one source -------------------------------------------------------------------------------------------------------


def _expected(wanted: _Wanted) -> tuple[_Wanted, dict[str, str]]:
    """The tensors of the network that a function builds, or a recipe, as those that are expected; and its hash."""
    made = wanted.made
    if made.recipe is None and not made.network:
        return wanted, {}
    from weightscope._util.torch_random import seeded
    from weightscope.networks import build_for

    kind = made.network or made.recipe.network.type  # type: ignore[union-attr]
    with seeded(0):
        module = built(kind)[0] if made.network else build_for(made.recipe)  # type: ignore[arg-type]
    inputs = {f"network {kind}": plugins.source_hash(kind)} if plugins.is_reference(kind) else {}
    spec = WeightSpec.of(module).select(wanted.patterns)
    return replace(wanted, spec=spec), inputs


def _read(
    wanted: _Wanted, networks: Iterable[Any], snapshots: tuple[int, ...] | None
) -> Iterator[tuple[str, list[Any], tuple[int, ...], _Network]]:
    """Label, sources and snapshots of every network, and what was read of it; the first one that fits is expected."""
    for number, item in enumerate(networks):
        if isinstance(item, Mapping) and item and all(isinstance(key, int) for key in item):
            if snapshots is None:
                snapshots = tuple(sorted(item))
            last = item[max(item)]
            if missing := [step for step in snapshots if step not in item]:
                raise UsageError(f"snapshots: {last} has none of {joined(map(str, missing), _NAMED)}; leave these out")
            sources = [last, *(item[step] for step in snapshots)]
        elif snapshots:
            raise UsageError(f"snapshots: expected a mapping of epochs or steps to sources, found {item!r}")
        else:
            snapshots, sources = (), [item]
        label = str(sources[0]) if isinstance(sources[0], str | Path) else f"network {number}"
        found = _read_network(wanted, label, sources)
        if wanted.spec is None and not found.reasons:
            wanted = replace(wanted, spec=found.spec)
        yield label, sources, snapshots, found


def _read_network(wanted: _Wanted, label: str, sources: Sequence[Any]) -> _Network:
    """Read a network and its snapshots."""
    opened, reasons, spec = [], list[str](), wanted.spec
    try:
        for source in sources:
            checkpoint = _opened(source, wanted.made.key)
            names = _names_in(checkpoint, wanted.made.rename)
            spec = spec or WeightSpec(
                replace(checkpoint.spec[stored], name=name) for name, stored in names.items()
            ).select(wanted.patterns)
            if found := _misfits(wanted, spec, checkpoint, names):
                reasons += found
                continue
            if set(spec.names) - set(adapters(names)):  # a population of adapters alone is one
                refuse_adapters(checkpoint)
            opened.append((checkpoint, names))
    except DataError as error:
        if any(str(source).startswith(_HUB) for source in sources):
            raise  # it may be there the next time
        reasons = [f"cannot be read: {str(error).removeprefix(f'{label}: ')}"]
    if reasons or spec is None:
        return _Network(reasons=tuple(reasons))
    weights = np.empty((len(opened), spec.size), np.float32)
    for row, (checkpoint, names) in zip(weights, opened, strict=True):
        checkpoint.read_into((names[name] for name in spec.names), row)
    commits = tuple(checkpoint.commit for checkpoint, _ in opened)
    return _Network(spec, weights, opened[0][0].config, commits, note=opened[0][0].note)


def _misfits(wanted: _Wanted, spec: WeightSpec, checkpoint: Checkpoint, names: dict[str, str]) -> list[str]:
    """What of a network is not as expected."""
    chosen = {name for name in names if any(fnmatchcase(name, p) for p in wanted.patterns)}
    refused = {}
    for stored, why in checkpoint.skipped.items():
        name = _renamed(stored, wanted.made.rename)
        if _is_weight(checkpoint, stored) and any(fnmatchcase(name, p) for p in (*spec.slices, *wanted.patterns)):
            refused[name] = f"`{name}` is {why}"
    for name in chosen:
        kind = checkpoint.dtype(names[name])
        if name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in names:
            refused[name] = f"`{name}` is pruned by a mask; save it after torch.nn.utils.prune.remove"
        elif kind.itemsize == 1:
            refused[name] = f"`{name}` is of 8 bits ({kind})"
    lacking = [name for name in spec.names if name not in names and name not in refused]
    out = [*refused.values()] + ([f"lacks {listing(lacking, most=_NAMED)}"] if lacking else [])
    for name in spec.names:
        if name in names and (found := checkpoint.shape(names[name])) != spec[name].shape:
            out.append(f"`{name}` has shape {found}, expected {spec[name].shape}")
    extra = [name for name in names if name in chosen and name not in spec.slices]
    return out + ([f"also has {listing(extra, most=_NAMED)}"] if extra else [])


def _renamed(name: str, rename: Sequence[str]) -> str:
    """A tensor's name after each `"OLD=NEW"`, which replaces a beginning."""
    for text in rename:
        old, _, new = text.partition("=")
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


def _names_in(checkpoint: Checkpoint, rename: Sequence[str]) -> dict[str, str]:
    """The tensors' names -> the names they are stored under."""
    names = {_renamed(stored, rename): stored for stored in checkpoint.spec.names}
    if len(names) < len(checkpoint.spec):
        raise DataError(f"{checkpoint.source}: two tensors have one name after {', '.join(rename)}")
    if not checkpoint.spec.size:
        raise DataError(f"{checkpoint.source}: holds no weights; an optimiser's state?")
    return names


def _opened(source: Any, key: str | None) -> Checkpoint:
    named = isinstance(source, str | Path)
    try:
        return (open_checkpoint if named else Checkpoint)(source, key=key, quiet=True)
    except UsageError as error:  # of another kind, or without this key
        if named and str(source).startswith(_HUB):
            raise
        raise DataError(str(error)) from error


def _is_weight(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor that a checkpoint skips could be a weight; counters, indices and what is no tensor are none."""
    why = checkpoint.skipped[name]
    if why.startswith("outside"):
        return False
    if why.endswith("no tensor"):
        return name.endswith(("weight", "bias"))
    try:
        return checkpoint.dtype(name) not in _BUFFERS or name.endswith(("weight", "bias"))
    except DataError:
        return True


def _metric(name: str) -> str:
    """The name of a metric as one of HDF5."""
    name = name.strip().replace("/", ".") or "metric"
    return f"{name}_given" if name in ("diverged", "duplicate", ".") else name


def built(reference: str) -> tuple[torch.nn.Module, Any]:
    """What a function of one's own returns: a network, or a network and example inputs."""
    made = plugins.imported(reference)()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"network: expected {reference}() to return a module, or a module and example inputs, found "
            f"{type(made).__name__}"
        )
    return module, inputs


# --- sources of the command line --------------------------------------------------------------------------------------

_PATHS = ("path", "file", "checkpoint", "source", "weights")  # columns of a table
_TRIAL = re.compile(r"checkpoint_(\d{1,9})")
# What Ray Tune notes of its own in each line of result.json.
_RAY = {"done", "pid", "timestamp", "should_checkpoint", "warmup_time", "time_this_iter_s", "time_total_s"}
_RAY_ENDS = ("s_total", "_since_restore")


def sources_of(texts: Sequence[str]) -> tuple[list[Any], dict[str, list[float]], list[int] | None]:
    """What `import_networks` takes: networks, metrics and snapshots, of paths, patterns, tables, folders and addresses.

    Networks with several snapshots (checkpoints of a trial, revisions at the hub) are mappings of epochs or steps to
    sources; the snapshots are those that all of them have.
    """
    found: list[tuple[Any, dict[str, float]]] = []
    hub: dict[str, list[str]] = {}
    for text in texts:
        if text.startswith(_HUB):
            for address in _braces(text):
                hub.setdefault(address.partition("@")[0], []).append(address)
            continue
        path = Path(text).expanduser()
        paths = [path] if path.exists() else list(map(Path, numbered(sorted(glob.glob(str(path), recursive=True)))))
        if not paths:
            raise DataError(f"{text}: no such file or folder, and no file matches it as a pattern")
        found += [each for path in paths for each in _at(path)]
    for addresses in hub.values():
        found.append((_snapshots(addresses) if len(addresses) > 1 else addresses[0], {}))
    ends = Counter(max(source) for source, _ in found if isinstance(source, dict))
    if len(ends) > 1:
        counts = ", ".join(f"{ends[step]} end at {step}" for step in sorted(ends))
        _log.warning("not all networks were trained for as long: %s", counts)
    if any(isinstance(source, dict) and len(source) > 1 for source, _ in found):
        if plain := [source for source, _ in found if not isinstance(source, dict)]:
            raise UsageError(f"{plain[0]}: expected several snapshots, as the other networks have, found one")
        common = sorted(set.intersection(*(set(source) for source, _ in found)))
    else:
        common, found = None, [(next(iter(s.values())) if isinstance(s, dict) else s, m) for s, m in found]
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    columns = {name: [metrics.get(name, math.nan) for _, metrics in found] for name in names}
    return [source for source, _ in found], columns, common


def _braces(text: str) -> list[str]:
    """The texts of a text with {a,b} and {1..9}."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    values: Iterable[str] = match[1].split(",")
    if span := re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})", match[1]):
        width = len(span[1]) if span[1].startswith("0") else 0
        values = (str(n).zfill(width) for n in range(int(span[1]), int(span[2]) + 1))
    found: list[str] = []
    for value in values:
        found += _braces(text[: match.start()] + value + text[match.end() :])
    return found


def _snapshots(addresses: list[str]) -> dict[int, str]:
    """Step -> address of each revision of one model, from the number that the revision ends in."""
    found = {}
    for address in addresses:
        number = re.search(r"(\d{1,12})$", address.partition("@")[2])
        if number is None or int(number[1]) in found:
            raise UsageError(
                f"{address}: expected several revisions of one model to end in different numbers, the steps of its "
                "training, such as @step{0,1000}"
            )
        found[int(number[1])] = address
    return found


def _at(path: Path) -> list[tuple[Any, dict[str, float]]]:
    """The networks in a path, each with its metrics."""
    if path.suffix == ".csv":
        return _table(path)
    if is_population(path):
        raise UsageError(f"{path}: expected networks, found a population, which every command takes as it is")
    if not path.is_dir():
        return [(str(path), {})]
    inside = [path / name for name in numbered(sorted(file.name for file in path.iterdir()))]
    if trials := [folder for folder in (path, *inside) if (folder / "result.json").is_file()]:
        return [_trial(folder) for folder in trials]
    if _is_model(path):
        return [(str(path), {})]
    files = [str(p) for p in inside if (p.suffix in SUFFIXES and p.is_file()) or (p.is_dir() and _is_model(p))]
    if not files:
        raise DataError(
            f"{path}: expected files of networks ({', '.join(SUFFIXES)}) or folders of models, found none; "
            f"for files further down give a pattern, '{path}/*/*.pt'"
        )
    return [(file, {}) for file in files]


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*CANDIDATES, CONFIG))


def _trial(folder: Path) -> tuple[Any, dict[str, float]]:
    """A trial of Ray Tune as Model Zoos are published: its checkpoints by epoch, and the results of the last one."""
    files = {int(m[1]): str(p / "checkpoints") for p in folder.iterdir() if (m := _TRIAL.fullmatch(p.name))}
    files = {epoch: files[epoch] for epoch in sorted(files) if Path(files[epoch]).is_file()}
    if not files:
        raise DataError(f"{folder}: expected checkpoint_NNNNNN/checkpoints beside result.json, found none")
    settings = _json_lines(folder / "params.json")[0] if (folder / "params.json").is_file() else {}
    results = _json_lines(folder / "result.json")
    last = next((row for row in results if row.get("training_iteration") == max(files)), None)
    if last is None:
        iterations = any("training_iteration" in row for row in results)
        last = {} if iterations else results[-1]
        if iterations:
            _log.warning("%s: no results of its last checkpoint, %d", folder, max(files))
    given = {k: v for k, v in (settings | last).items() if k not in _RAY and not k.endswith(_RAY_ENDS)}
    return files, {k: float(v) for k, v in given.items() if isinstance(v, int | float)}


def _json_lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text()
        return [json.loads(line) for line in ([text] if file.name == "params.json" else text.splitlines()) if line]
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON: {error}") from error


def _table(file: Path) -> list[tuple[Any, dict[str, float]]]:
    """A table with a column of paths, relative to its folder, and columns of numbers."""
    import pandas  # half a second

    try:
        text = file.read_text(encoding="utf-8-sig")
        separator = next((s for s in ",;\t" if s in text.partition("\n")[0]), ",")
        decimal = "," if separator != "," and re.search(r"\d,\d", text) else "."  # of spreadsheets in Europe
        table = pandas.read_csv(file, dtype=dict.fromkeys(_PATHS, str), sep=separator, decimal=decimal)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as a table: {error}") from error
    column = next((name for name in _PATHS if name in table), None)
    if column is None or not len(table):
        raise DataError(f"{file}: expected a column {', '.join(_PATHS)}, found {joined(map(str, table), 8)}")
    if not isinstance(table.index, pandas.RangeIndex):
        raise DataError(f"{file}: expected {len(table.columns)} values in each line, as there are names of columns")
    if (empty := table[column].isna()).any():
        raise DataError(f"{file}: row {empty.argmax() + 1} has no {column}")
    numbers = table.drop(columns=column).select_dtypes("number")
    if left := [name for name in table if name not in numbers and name != column]:
        _log.warning("%s: no column of numbers, left out: %s", file, joined(map(str, left), 8))
    paths = [text if text.startswith(_HUB) else str(file.parent / Path(text).expanduser()) for text in table[column]]
    rows = numbers.astype(float).to_dict("records")
    return [(path, {str(name): value for name, value in row.items()}) for path, row in zip(paths, rows, strict=True)]
