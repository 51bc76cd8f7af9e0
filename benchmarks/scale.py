"""Populations of 10^5 and 10^6 small networks: what looks at their files, and statistics by one worker and by several.

    python benchmarks/scale.py --networks 100000 --json benchmarks/results/scale.json
    python benchmarks/scale.py --networks 1000000 --workers 2 1 --json benchmarks/results/scale_million.json

A generator writes shards of 32 networks of about 1,000 weights. Commands are timed as a user waits for them, start of
the interpreter included, statistics against reading the same shards with their hashes by as many processes. Beside the
time is that of processors, of all processes, which a busy machine changes less. Files are warm in the page cache.
Memory is the peak of the largest worker, imports included. That the bits are equal is asserted. Without numbers after
`--workers`, only commands are timed, and with `--no-commands` only statistics.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from reporting import write

from weightscope._util.workers import Workers, spread
from weightscope.analysis.across_networks import covariance_across
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.statistics.samples import over_parts
from weightscope.training.request import Request

RECIPE = {
    "network": {"type": "convnext", "width": 12, "depth": 1, "kernel_size": 3},
    "data": {"name": "digits", "train": 64, "test": 32},
    "training": {"epochs": 1, "kernels": "torch"},
    "population": {"networks": 1, "tile": 32},
}


def make_tiles(path: Path, manifest: manifests.Manifest, first: int, **_: Any) -> None:
    """Write those of 256 shards that there are not yet, of correlated random vectors."""
    tiles = range(first, min(first + 256, manifest.tiles))
    for tile in (tile for tile in tiles if not shards.shard_file(path, tile).exists()):
        rng = np.random.default_rng(tile)
        weights = rng.standard_normal((32, manifest.spec.size), dtype=np.float32)
        weights += rng.standard_normal((32, 1), dtype=np.float32)
        metrics = {"diverged": np.zeros(32, dtype=bool), "test_accuracy": rng.random((32, 1), dtype=np.float32)}
        shards.save(path, manifest, shards.TrainedTile(tile, weights, metrics), "cpu")


def read(part: Population, _: int) -> int:
    """Read a part, with its hashes."""
    return sum(len(rows) for rows in part.chunks())


def covariance(population: Population, workers: int) -> list[np.ndarray]:
    """The joint covariance of all tensors."""
    found = covariance_across(population, "*", workers=workers, stripes=False)
    return [found.matrix, found.mean]


def exchangeable(population: Population, workers: int) -> list[np.ndarray]:
    """The covariance averaged over permutations."""
    return [
        x
        for found in covariance_exchangeable(population, workers=workers).types
        for x in (found.covariance, found.errors)
    ]


def peaks() -> list[int]:
    """Peak memory of the worker processes, in bytes."""
    files = [Path(f"/proc/{child.pid}/status") for child in psutil.Process().children()]
    lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("VmHWM")]
    return [1024 * int(line.split()[1]) for line in lines]


def processors() -> float:
    """Seconds that this process, its worker processes and those that have ended used processors."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(each.user + each.system for each in alive)


def timed(task: Any) -> tuple[dict[str, float], Any]:
    """The time that a task takes, by the clock and of processors, and its result."""
    begun, used = time.perf_counter(), processors()
    found = task()
    return {"seconds": time.perf_counter() - begun, "processor_seconds": processors() - used}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--no-commands", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the population is, or is made")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / f"{options.networks}.pop"
        recipe = Recipe.parse(RECIPE).replace({"population.networks": options.networks})
        request = Request.of(recipe, path, device="cpu")
        manifest, _ = manifests.create_or_match(path, request.manifest, resize=True)
        made, _ = timed(
            lambda: list(spread(partial(make_tiles, path, manifest), range(0, manifest.tiles, 256), Workers(count=2)))
        )
        size = manifest.spec.size
        print(f"{options.networks:,} networks of {size:,} weights, written in {made['seconds']:.0f} s", flush=True)
        rows: list[dict[str, Any]] = []
        commands: list[tuple[str, list[Any]]] = [
            ("inspect", ["inspect", path]),
            ("status", ["status", path]),
            ("collect, nothing to train", ["collect", path, "-o", path]),
            *((f"verify, {n} workers", ["verify", path, "--workers", n]) for n in options.workers[:2]),
        ]
        for name, arguments in [] if options.no_commands else commands:
            command = [sys.executable, "-m", "weightscope", *map(str, arguments)]
            taken, _ = timed(partial(subprocess.run, command, check=True, capture_output=True))
            rows.append({"row": name, **taken})
            print(rows[-1], flush=True)
        results: dict[str, Any] = {}
        for count in options.workers:
            reading, _ = timed(partial(over_parts, Population(path), read, count))
            rows.append({"row": "reading", "workers": count, **reading})
            print(rows[-1], flush=True)
            for statistic in (covariance, exchangeable):
                name = statistic.__name__
                taken, found = timed(partial(statistic, Population(path), count))
                first = results.setdefault(name, found)
                assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, found, strict=True))
                row = {"row": name, "workers": count, **taken}
                row |= {f"{key}_of_reading": taken[key] / reading[key] for key in taken}
                peak = {"worker_peak_mib": max(peaks()) / 2**20} if count > 1 else {}
                rows.append(row | peak | {"equal_bits": True})
                print(rows[-1], flush=True)
                write(options.json, rows, networks=options.networks, weights=size, load=os.getloadavg()[0])
    write(options.json, rows, networks=options.networks, weights=size, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
