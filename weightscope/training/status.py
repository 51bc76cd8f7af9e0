"""`status`: how far populations are, from their files alone, so from any machine and for every backend.

A worker keeps `running/TILE.json` in the population's folder while it trains a tile. The file goes when the tile's
shard is there; it says why if the tile failed, and grows old if the worker dies.
"""

import contextlib
import json
import os
import re
import socket
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope._util.results import Result, duration, text_table
from weightscope._util.sources import POPULATION_FILE, is_population, location, read_regular
from weightscope._util.workers import SILENT_SECONDS, makespan
from weightscope.data.metrics import at_end
from weightscope.errors import DataError, UsageError, WeightscopeError, one_line
from weightscope.population import Population, shards
from weightscope.population.manifest import Manifest
from weightscope.recipe import Recipe

RUNNING = "running"
_BEAT_SECONDS = 5.0
_RECENT, _RECENT_BYTES = 8, 2**28  # shards whose metrics are shown
_STATES = ("failed", "silent", "running")
_verified: defaultdict[Path, set[int]] = defaultdict(set)  # shards, which are hashed once
_LARGEST = 2**16  # bytes of a mark


@contextlib.contextmanager
def marked(path: Path, tile: int, progress: Callable[[float], None] | None) -> Iterator[Callable[[float], None]]:
    """Keep the mark of a tile that this process trains; gives a `progress` that also renews it."""
    file = path / RUNNING / f"{tile:05d}.json"
    mark: dict[str, Any] = {"tile": tile, "host": socket.gethostname(), "process": os.getpid(), "begun": time.time()}
    mark |= {"done": 0.0, "start": 0.0, "seconds": 0.0}
    renewed = time.monotonic()

    def write() -> None:
        with contextlib.suppress(WeightscopeError, OSError):  # a full disk is reported where a shard is written
            file.parent.mkdir(exist_ok=True)  # another run removes it when it is empty
            atomic.write(file, json.dumps(mark).encode())

    def renew(fraction: float) -> None:
        nonlocal renewed
        if not mark["start"]:  # what a worker does once, such as compiling, is not the rate
            mark.update(begun=time.time(), start=fraction)
        mark.update(done=fraction, seconds=time.time() - mark["begun"])  # the reader's clock may differ
        if time.monotonic() - renewed > _BEAT_SECONDS:
            renewed = time.monotonic()
            write()
        if progress is not None:
            progress(fraction)

    write()
    try:
        yield renew
    except Exception as error:
        mark["failed"] = f"{type(error).__name__}: {error}"
        write()
        raise
    except BaseException:
        forget(path, [tile])
        raise
    forget(path, [tile])


def forget(path: Path, tiles: Container[int] | None = None) -> None:
    """Remove the marks of `tiles`, or all, and the folder once it is empty."""
    atomic.sweep(path / RUNNING)
    with contextlib.suppress(OSError):  # another worker may do the same
        for file in (path / RUNNING).glob("*.json"):
            if tiles is None or (file.stem.isdecimal() and int(file.stem) in tiles):
                file.unlink(missing_ok=True)
        (path / RUNNING).rmdir()


@dataclass(frozen=True, repr=False)
class Status(Result):
    """How far a population is, or those of a benchmark. The rate is that of the tiles in training."""

    path: Path
    networks: int  # N of the complete population; 0 if it cannot be read
    trained: int  # networks on disk, without those in damaged shards
    waiting: int  # tiles that are neither on disk nor running
    epochs: int  # of a tile's training, to which its time is proportional
    marks: list[dict[str, Any]]  # of tiles that are trained now, or were when their worker died or they failed
    metrics: dict[str, float]  # means over the networks of the last few shards that did not diverge
    damaged: list[str]  # what is wrong with these shards, or with the population
    populations: tuple["Status", ...] = ()  # of a benchmark

    @classmethod
    def of(cls, path: Path) -> "Status":
        """Read the state of one population."""
        population = Population(path, partial=True)
        whole, missing = population.manifest, set(population.missing)
        epochs = whole.made.training.epochs if isinstance(whole.made, Recipe) else 1
        marks = [mark for mark in _marks(path) if mark["tile"] in missing]
        for mark in marks:
            mark |= {"networks": whole.rows(mark["tile"]), "epochs": epochs}
        metrics, wrong = _recent(path, whole)
        waiting = len(missing | wrong.keys()) - sum(mark["state"] == "running" for mark in marks)
        trained = int((~np.isin(population.indices // whole.tile, [*wrong])).sum())
        return cls(path, whole.networks, trained, waiting, epochs, marks, metrics, [*wrong.values()])

    @classmethod
    def together(cls, path: Path, parts: list["Status"]) -> "Status":
        """The state of the populations in a folder."""
        networks, trained, waiting = (sum(getattr(p, k) for p in parts) for k in ("networks", "trained", "waiting"))
        marks = [mark | {"population": part.name(path)} for part in parts for mark in part.marks]
        wrong = [line for part in parts for line in part.damaged]
        return cls(path, networks, trained, waiting, 0, marks, {}, wrong, tuple(parts))

    def name(self, folder: Path) -> str:
        """The population's path in a benchmark's folder, in short."""
        return str(self.path).removeprefix(f"{folder}/").removeprefix("runs/").removesuffix(".pop")

    @cached_property
    def _seconds(self) -> float:
        """Of one epoch of a tile; 0 if nothing is trained, or too little to tell."""
        steps = [(m, m["done"] - m["start"]) for m in self._running if m["done"] > m["start"]]
        return float(np.mean([m["seconds"] / done / m["epochs"] for m, done in steps])) if steps else 0.0

    @cached_property
    def per_hour(self) -> float:
        """Networks per hour at the present speed; 0 if nothing is trained, or too little to tell."""
        seconds = max(self._seconds, 1e-6)  # those that begin are as fast
        return 3600 * sum(m["networks"] / m["epochs"] for m in self._running) / seconds if self._seconds else 0.0

    @cached_property
    def hours_left(self) -> float | None:
        """Hours until all networks are trained, if no worker joins or leaves; None if nothing is trained."""
        if not self._seconds:
            return None
        tiles = (epochs for part in self.populations or (self,) for epochs in repeat(part.epochs, part.waiting))
        return self._seconds * makespan(tiles, [m["epochs"] * (1 - m["done"]) for m in self._running]) / 3600

    @cached_property
    def _running(self) -> list[dict[str, Any]]:
        return [mark for mark in self.marks if mark["state"] == "running"]

    @property
    def complete(self) -> bool:
        """Whether all networks are trained."""
        return 0 < self.networks <= self.trained

    def summary(self) -> str:
        return f"{self.path}: " + "; ".join(self._lines())

    def _lines(self) -> list[str]:
        if not self.networks:
            return ["cannot be read"]
        lines = [f"{self.trained:,} of {self.networks:,} networks"]
        if not self.complete:
            states = [m["state"] for m in self.marks]
            counts = [f"{states.count(s)} {s}" for s in reversed(_STATES) if s in states] or ["none running"]
            lines.append(f"tiles: {', '.join([*counts, f'{self.waiting:,} to train'])}")
        if self.hours_left is not None:
            seconds = 3600 * self.hours_left
            end = time.strftime("%a %H:%M", time.localtime(time.time() + seconds))
            lines.append(f"{self.per_hour:,.0f} networks/hour; done about {end} (in {duration(seconds)})")
        if self.metrics:
            means = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
            lines.append(f"mean of the last tiles: {means}")
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tile that failed, lost its worker, or is trained now, in this order."""
        rows = []
        for m in sorted(self.marks, key=lambda mark: _STATES.index(mark["state"])):
            start = m["start"]
            row = {"population": m["population"]} if "population" in m else {}
            row |= {"tile": m["tile"], "state": m["state"], "done": m["done"]}
            row |= {"step": round(m["done"] / start) if start else None, "steps": round(1 / start) if start else None}
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(m["begun"]))
            row |= {"worker": m["worker"], "since": since}
            rows.append(row | {"heartbeat": m["heartbeat"], "why": m["why"]})
        return rows

    def notes(self) -> list[str]:
        return self.damaged

    def text(self) -> str:
        """What there is and when it ends, the populations of a benchmark, and the tiles that failed or are running."""
        first, *others = self._lines()
        parts = ["\n".join([f"{self.path}: {first}", *others, *self.notes()])]
        if self.populations:
            names = list(dict.fromkeys(name for each in self.populations for name in each.metrics))
            cells = [[each.name(self.path), f"{each.trained:,} of {each.networks:,}"] for each in self.populations]
            for line, each in zip(cells, self.populations, strict=True):
                line += [f"{each.metrics[name]:.4g}" if name in each.metrics else "-" for name in names]
            parts.append(text_table(("population", "networks", *names), cells))
        if rows := self.rows():
            today, columns = time.strftime("%Y-%m-%d "), ["tile", "state", "step", "worker", "since"]
            for row in rows:  # the name of a host without its domain, and a time of this year
                row["worker"] = re.sub(r"^([^.:]*[a-z][^.:]*)\.[^:]*", r"\1", row["worker"])
                row["since"] = row["since"].removeprefix(today)[-14:-3]
                row["step"] = "-" if row["step"] is None else f"{row['step']:,} of {row['steps']:,}"
            columns = ["population", *columns] if self.populations else columns
            left = [i for i, name in enumerate(columns) if name not in ("tile", "step")]
            head, *lines = text_table(columns, [[row[name] for name in columns] for row in rows], left=left).split("\n")
            why = [[f"      {part}" for part in textwrap.wrap(row["why"], 72)] for row in rows]
            parts.append("\n".join([head, *(x for line, own in zip(lines, why, strict=True) for x in (line, *own))]))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `hours_left` is null if nothing is trained."""
        values: dict[str, Any] = {"path": str(self.path), "networks": self.networks, "trained": self.trained}
        values |= {"networks_per_hour": self.per_hour, "hours_left": self.hours_left, "complete": self.complete}
        values |= {"metrics": self.metrics, "damaged": self.damaged, "tiles": self.rows()}
        return values | ({"populations": [p.to_dict() for p in self.populations]} if self.populations else {})


def status(path: str | Path) -> Status:
    r"""The state of a population, or of all populations below a folder, such as a benchmark's; trains nothing.

    Raises:
        UsageError: if there is no population.
        DataError: if it is damaged; one of several is listed with what is wrong.

    Example:
        >>> print(status("digits.pop"))
    """
    path = location(path)
    if is_population(path):
        return Status.of(path)
    found = []
    for each in sorted(file.parent for file in path.rglob(POPULATION_FILE)):
        try:
            found.append(Status.of(each))
        except DataError as error:
            found.append(Status(each, 0, 0, 0, 1, [], {}, [str(error)]))
    if not found:
        what = "none in it" if path.is_dir() else "no such folder"
        raise UsageError(f"{path}: expected a population's folder, or a benchmark's, found {what}")
    return Status.together(path, found)


def _marks(path: Path) -> list[dict[str, Any]]:
    out, files = {}, []
    unread = OSError, ValueError, KeyError, TypeError, OverflowError  # removed meanwhile, or not a mark
    with contextlib.suppress(FileNotFoundError):  # the folder, removed meanwhile
        files = sorted((path / RUNNING).glob("*.json"))
    for file in files:
        with contextlib.suppress(*unread):
            mark = json.loads(read_regular(file, _LARGEST))
            beat = file.stat().st_mtime
            tile, silence = int(mark["tile"]), max(time.time() - beat, 0.0)
            why = mark.get("failed", "")
            if not why and mark["host"] == socket.gethostname() and not _runs(int(mark["process"])):
                why = "its process has ended"
            elif not why and silence > SILENT_SECONDS:
                why = f"no heartbeat for {duration(silence)}"
            kind = "failed" if "failed" in mark else "silent" if why else "running"
            found: dict[str, Any] = {"tile": tile, "state": kind, "heartbeat": silence}
            found |= {key: float(mark[key]) for key in ("begun", "done", "start", "seconds")}
            found |= {"worker": one_line(f"{mark['host']}:{mark['process']}"), "why": one_line(why)}
            time.localtime(found["begun"])
            start, seconds = found["start"], found["seconds"]
            if 0 <= found["done"] <= 1 and (start == 0 or 1e-9 < start <= 1) and 0 <= seconds < 1e9:
                out[tile] = found
    return [*out.values()]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def _recent(path: Path, manifest: Manifest) -> tuple[dict[str, float], dict[int, str]]:
    """Means of the metrics in the last few shards, and the tiles of those that cannot be read, with what is wrong."""
    found: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    wrong, size = {}, 0
    for tile in reversed(shards.tiles_on_disk(path, manifest)[-_RECENT:]):
        if size > _RECENT_BYTES:
            break
        try:
            file = shards.shard_file(path, tile)
            with shards.open_shard(file, manifest, tile, verified=_verified[path]) as h5:
                size += file.stat().st_size
                metrics = h5["metrics"]
                fine = ~metrics["diverged"][:]
                for name, values in at_end(metrics).items():
                    if name.startswith("test_"):
                        found[name].append(values[:][fine])
        except FileNotFoundError:
            wrong[tile] = f"{file}: has disappeared; {shards.AGAIN}"
        except DataError as error:
            wrong[tile] = str(error)
    joined = {name: np.concatenate(values) for name, values in found.items()}
    return {name: float(values.mean()) for name, values in joined.items() if values.size}, wrong
