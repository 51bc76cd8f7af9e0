"""Covariances at the size of real populations, each against the bare arithmetic that cannot be avoided.

    python benchmarks/covariance_large.py --json benchmarks/results/covariance_large.json

Two rows, every contender in a process of its own, in turns. Data lie in `.pop` folders, warm in the page cache.

- in memory, float32: `covariance_across(population, precision="float32")`, against one call of BLAS's `ssyrk` on random
  rows of the same size that are in memory already, into a zeroed matrix.
- leading eigenpairs: `eigenpairs(population, 64)`, against reading the same rows and forming their Gram matrix in
  float64.

About 3 minutes and 25 GB of disk at full size, in the folder for temporary files.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from covariance import make_population
from reporting import in_own_process, memory, write
from scipy.linalg import blas

from weightscope._util.environment import usable_cores
from weightscope.analysis.across_networks import covariance_across, eigenpairs
from weightscope.population import Population
from weightscope.statistics.moments import add_gram

RANK = 64


def ours_in_memory(path: Path) -> Callable[[], Any]:
    return lambda: covariance_across(Population(path), "*", precision="float32", stripes=False)


def bare_syrk(path: Path) -> Callable[[], Any]:
    population = Population(path)
    rows = np.random.default_rng(0).standard_normal((len(population), population.spec.size), dtype=np.float32)

    def work() -> np.ndarray:
        out = np.empty((rows.shape[1],) * 2, np.float32, order="F")
        out.fill(0)
        add_gram(out, rows)
        return out

    return work


def ours_eigenpairs(path: Path) -> Callable[[], Any]:
    return lambda: eigenpairs(Population(path), min(RANK, len(Population(path)) - 1), "*")


def read_and_gram(path: Path) -> Callable[[], Any]:
    def work() -> np.ndarray:
        rows = np.concatenate(list(Population(path).chunks()))
        gram = np.zeros((len(rows),) * 2, order="F")
        for start in range(0, rows.shape[1], 2048):
            part = rows[:, start : start + 2048].astype(np.float64)
            blas.dsyrk(1.0, part.T, beta=1.0, c=gram, trans=1, overwrite_c=1)
        return gram

    return work


# name -> (what is done, the peer, which population)
ROWS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "in memory, float32, against bare ssyrk": (ours_in_memory, bare_syrk, "tall"),
    "64 leading eigenpairs, against reading and the Gram matrix": (ours_eigenpairs, read_and_gram, "wide"),
}
CONTENDERS = {f.__name__: f for ours, peer, _ in ROWS.values() for f in (ours, peer)}


def worker(name: str, path: Path) -> None:
    warm = np.random.default_rng(0).standard_normal((600, 600))
    add_gram(np.zeros((600, 600), order="F"), warm)  # threads are up
    before = memory()["VmRSS"]
    work = CONTENDERS[name](path)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_mib": (memory()["VmHWM"] - before) / 2**20}))


def measured(contender: Callable[[Path], Any], path: Path) -> dict[str, float]:
    return in_own_process(__file__, "--worker", contender.__name__, "--path", path)


def row(name: str, path: Path, rounds: int) -> dict[str, Any]:
    ours, peer, _ = ROWS[name]
    turns = [(measured(ours, path), measured(peer, path)) for _ in range(rounds)]
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in turns]
    population = Population(path)
    return {
        "row": f"({len(population)}, {population.spec.size}): {name}",
        "ours": statistics.median(mine["seconds"] for mine, _ in turns),
        "ours_peak_mib": max(mine["peak_mib"] for mine, _ in turns),
        "peer": statistics.median(theirs["seconds"] for _, theirs in turns),
        "unit": "seconds",
        "times_the_peer": statistics.median(ratios),
        "times_the_peer_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tall", type=int, nargs=2, default=(8_192, 15_106), metavar=("N", "D"))
    parser.add_argument("--wide", type=int, nargs=2, default=(1_024, 65_536), metavar=("N", "D"))
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.path)
        return
    rows = []
    for shape in ("tall", "wide"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.pop"
            make_population(path, *getattr(options, shape))
            path.with_suffix(".npy").unlink()  # for peers of the other benchmark
            for name in (name for name, plan in ROWS.items() if plan[2] == shape):
                r = row(name, path, options.rounds)
                rows.append(r)
                peer = f"{r['peer']:8.2f} s  x{r['times_the_peer']:.2f}"
                print(f"{r['row']:<85} {r['ours']:8.2f} s  {r['ours_peak_mib']:6.0f} MiB {peer}", flush=True)
    write(options.json, rows, rounds=options.rounds, threads=usable_cores())


if __name__ == "__main__":
    main()
