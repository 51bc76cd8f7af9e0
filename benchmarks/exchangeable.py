"""The covariance averaged over permutations of hidden units, against reading the population and against the raw one.

    python benchmarks/exchangeable.py --json benchmarks/results/exchangeable.json

A population of N = 16,384 ConvNeXts of D = 15,546 weights (random numbers; width 16, depth 8), on disk, warm in the
page cache. Three contenders, each in a process of its own, in turns: `covariance_exchangeable`; reading and checking
the same shards; `covariance_across(precision="float32")`, which forms the D x D matrix. Time, and memory as the peak
of the process above its imports. About 3 minutes and 2 GB of disk at full size.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from covariance import make_population
from reporting import in_own_process, memory, write

from weightscope._util.environment import usable_cores
from weightscope.analysis.across_networks import covariance_across
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.networks import ConvNeXt
from weightscope.population import Population
from weightscope.spec import WeightSpec


def ours(path: Path) -> Any:
    return covariance_exchangeable(Population(path)).types


def reading(path: Path) -> float:
    return sum(float(block[0, 0]) for block in Population(path).chunks())


def raw_covariance(path: Path) -> Any:
    return covariance_across(Population(path), "*", precision="float32", stripes=False).matrix


CONTENDERS: dict[str, Callable[[Path], Any]] = {f.__name__: f for f in (ours, reading, raw_covariance)}


def network(depth: int) -> WeightSpec:
    with torch.device("meta"):
        return WeightSpec.of(ConvNeXt(16, depth, 7, 2, 10, expansion=2, in_channels=1, layer_scale=None))


def worker(name: str, path: Path) -> None:
    permutation_spec(network(1))  # what is imported on first use
    before = memory()["VmRSS"]
    start = time.perf_counter()
    CONTENDERS[name](path)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_mib": (memory()["VmHWM"] - before) / 2**20}))


def measured(name: str, path: Path) -> dict[str, float]:
    return in_own_process(__file__, "--worker", name, "--path", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", type=int, default=8_192)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.path)
        return
    spec = network(options.depth)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.pop"
        make_population(path, options.networks, spec.size, spec)
        path.with_suffix(".npy").unlink()
        turns = [{name: measured(name, path) for name in CONTENDERS} for _ in range(options.rounds)]
    rows = []
    for peer in ("reading", "raw_covariance"):
        ratios = [turn["ours"]["seconds"] / turn[peer]["seconds"] for turn in turns]
        rows.append(
            {
                "row": f"({options.networks}, {spec.size}): exchangeable covariance against {peer.replace('_', ' ')}",
                "ours": statistics.median(turn["ours"]["seconds"] for turn in turns),
                "ours_peak_mib": max(turn["ours"]["peak_mib"] for turn in turns),
                "peer": statistics.median(turn[peer]["seconds"] for turn in turns),
                "peer_peak_mib": max(turn[peer]["peak_mib"] for turn in turns),
                "unit": "seconds",
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
        )
        r = rows[-1]
        print(f"{r['row']:<75} {r['ours']:7.2f} s {r['ours_peak_mib']:5.0f} MiB  {r['peer']:7.2f} s  x{r['ratio']:.2f}")
    write(options.json, rows, rounds=options.rounds, threads=usable_cores())


if __name__ == "__main__":
    main()
