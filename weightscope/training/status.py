"""`status`: how far populations are, from their files alone, so from any machine and for every backend.

A worker keeps `running/TILE.json` in the population's folder while it trains a tile. The file goes when the tile's
shard is there; it says why if the tile failed, and grows old if the worker dies.
"""

import contextlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weightscope._util import atomic
from weightscope._util.results import Result, duration
from weightscope._util.sources import POPULATION_FILE, is_population, read_regular
from weightscope._util.workers import SILENT_SECONDS
from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population.manifest import Manifest

RUNNING = "running"
_BEAT_SECONDS = 5.0
_RECENT = 8  # shards whose metrics are shown
_LARGEST = 2**16  # bytes of a mark


@contextlib.contextmanager
def marked(path: Path, tile: int, progress: Callable[[float], None] | None) -> Iterator[Callable[[float], None]]:
    """Keep the mark of a tile that this process trains; gives a `progress` that also renews it."""
    file = path / RUNNING / f"{tile:05d}.json"
    mark = {"tile": tile, "host": socket.gethostname(), "process": os.getpid(), "begun": time.time(), "done": 0.0}
    renewed = time.monotonic()

    def write() -> None:
        with contextlib.suppress(WeightscopeError, OSError):  # a full disk is reported where a shard is written
            file.parent.mkdir(exist_ok=True)  # another run removes it when it is empty
            atomic.write(file, json.dumps(mark).encode())

    def renew(fraction: float) -> None:
        nonlocal renewed
        if "start" not in mark:  # what a worker does once, such as compiling, is not the rate
            mark.update(begun=time.time(), start=fraction)
        mark["done"] = fraction
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
    """How far a population is. The rate is that of the tiles in training, and the end follows from it."""

    path: Path
    networks: int  # N of the complete population; 0 if it cannot be read
    trained: int  # networks on disk, without those in damaged shards
    marks: list[dict[str, Any]]  # of tiles that are trained now, or were when their worker died or they failed
    metrics: dict[str, float]  # means over the networks of the last few shards that did not diverge
    damaged: list[str]  # what is wrong with these shards, or with the population
    columns: ClassVar = {
        "tile": "{tile}",
        "state": "{state}",
        "done": "{done:.0%}",
        "worker": "{worker}",
        "since": "{since}",
        "heartbeat": "{heartbeat:.0f} s ago",
        "why": "{why}",
    }
    left = (1, 3, 6)

    @classmethod
    def of(cls, path: Path) -> "Status":
        """Read the state of one population."""
        population = Population(path, partial=True)
        whole, missing = population.manifest, set(population.missing)
        marks = [mark for mark in _marks(path) if mark["tile"] in missing]
        for mark in marks:
            mark["networks"] = whole.rows(mark["tile"])
        metrics, wrong = _recent(path, whole)
        trained = int((~np.isin(population.indices // whole.tile, [*wrong])).sum())
        return cls(path, whole.networks, trained, marks, metrics, [*wrong.values()])

    @cached_property
    def in_training(self) -> float:
        """Networks that the running tiles amount to so far."""
        return sum(m["done"] * m["networks"] for m in self._running)

    @cached_property
    def per_hour(self) -> float:
        """Networks per hour at the present speed; 0 if nothing is trained, or too little to tell."""
        steps = [(m, m["done"] - m["start"]) for m in self._running if m["done"] > m["start"]]
        rates = [done * m["networks"] / max(m["beat"] - m["begun"], 1e-3) for m, done in steps]
        return 3600 * len(self._running) * float(np.mean(rates)) if rates else 0.0  # those that begin are as fast

    @cached_property
    def hours_left(self) -> float | None:
        """Hours until all networks are trained, at the present speed; None if nothing is trained."""
        left = self.networks - self.trained - self.in_training
        return max(left, 0.0) / self.per_hour if self.per_hour else None

    @cached_property
    def _running(self) -> list[dict[str, Any]]:
        return [mark for mark in self.marks if mark["state"] == "running"]

    @property
    def complete(self) -> bool:
        """Whether all networks are trained."""
        return 0 < self.networks <= self.trained

    def summary(self) -> str:
        if not self.networks:
            return f"{self.path}: cannot be read"
        states = [m["state"] for m in self.marks]
        counts = ", ".join(f"{states.count(s)} {s}" for s in ("running", "silent", "failed") if s in states)
        parts = [f"{self.trained:,} of {self.networks:,} networks"] + [f"tiles: {counts}"] * bool(counts)
        if self.hours_left is not None:
            end = time.strftime("%a %H:%M", time.localtime(time.time() + 3600 * self.hours_left))
            parts += [
                f"{self.per_hour:,.0f} networks/hour",
                f"done about {end} (in {duration(3600 * self.hours_left)})",
            ]
        elif not self.complete and not self._running:
            parts.append("no tile is in training")
        parts += [f"mean {name} {value:.4g}" for name, value in self.metrics.items()]
        return f"{self.path}: " + "; ".join(parts)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tile that is trained now, failed, or lost its worker."""
        return [
            {"tile": m["tile"], "state": m["state"], "done": m["done"], "worker": f"{m['host']}:{m['process']}"}
            | {"since": time.strftime("%H:%M:%S", time.localtime(m["begun"])), "heartbeat": time.time() - m["beat"]}
            | {"why": m.get("failed", "")}
            for m in self.marks
        ]  # fmt: skip

    def notes(self) -> list[str]:
        return self.damaged

    def to_dict(self) -> dict[str, Any]:
        """JSON types; `hours_left` is null if nothing is trained."""
        numbers = {"networks": self.networks, "trained": self.trained, "networks_per_hour": self.per_hour}
        ends = {"hours_left": self.hours_left, "complete": self.complete, "metrics": self.metrics}
        return {"path": str(self.path)} | numbers | ends | {"damaged": self.damaged, "tiles": self.rows()}


def status(path: str | Path) -> list[Status]:
    r"""The state of a population, or of each population below a folder, such as a benchmark's; trains nothing.

    Raises:
        UsageError: if there is no population.
        DataError: if it is damaged; one of several is listed with what is wrong.

    Example:
        >>> print(*status("digits.pop"), sep="\n")
    """
    path = Path(path)
    if is_population(path):
        return [Status.of(path)]
    found = []
    for each in sorted(file.parent for file in path.rglob(POPULATION_FILE)):
        try:
            found.append(Status.of(each))
        except DataError as error:
            found.append(Status(each, 0, 0, [], {}, [str(error)]))
    if not found:
        raise UsageError(f"{path}: expected a population's folder, or a benchmark's, found none in it")
    return found


def _marks(path: Path) -> list[dict[str, Any]]:
    out = []
    for file in sorted((path / RUNNING).glob("*.json")):
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, OverflowError
        ):  # removed meanwhile, or not a mark
            mark = json.loads(read_regular(file, _LARGEST))
            beat = file.stat().st_mtime
            kind = "failed" if "failed" in mark else "running" if time.time() - beat < SILENT_SECONDS else "silent"
            numbers = {"tile": int(mark["tile"]), "begun": float(mark["begun"]), "done": float(mark["done"])}
            numbers["start"] = float(mark.get("start", 0))
            time.localtime(numbers["begun"])
            if not 0 <= numbers["done"] <= 1:
                continue
            texts = {key: str(mark[key]) for key in ("host", "process", *(["failed"] if kind == "failed" else []))}
            out.append({"beat": beat, "state": kind} | numbers | texts)
    return out


def _recent(path: Path, manifest: Manifest) -> tuple[dict[str, float], dict[int, str]]:
    """Means of the metrics in the last few shards, and the tiles of those that cannot be read, with what is wrong."""
    found: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    wrong = {}
    for tile in shards.tiles_on_disk(path, manifest)[-_RECENT:]:
        try:
            with shards.open_shard(shards.shard_file(path, tile), manifest, tile) as h5:
                metrics = h5["metrics"]
                fine = ~metrics["diverged"][:]
                for name in (n for n in metrics if n.startswith("test_") and not n.endswith("_per_epoch")):
                    found[name].append(metrics[name][:].reshape(len(fine), -1)[fine, -1])
        except DataError as error:
            wrong[tile] = str(error)
    joined = {name: np.concatenate(values) for name, values in found.items()}
    return {name: float(values.mean()) for name, values in joined.items() if values.size}, wrong
