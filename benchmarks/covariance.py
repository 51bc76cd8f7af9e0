"""Covariance of a population on disk against peers that hold the array in memory, in one run.

    python benchmarks/covariance.py --json benchmarks/results/covariance.json

Ours reads a `.pop` folder (shards of 32 networks, hashes checked, warm in the page cache) anew each time. The peers
start from a float32 array in memory, which costs them no time, and get the faster of their settings:
`numpy.cov` computes float32 input in float64 unless `dtype` is given, so it is compared with both of our modes, and
with `dtype=numpy.float32` against our float32 mode. Every contender runs in a process of its own with the
same number of threads, in turns for several rounds; memory is that process's peak above what it held after its
imports, the peer's array included. Medians and ranges over rounds are reported, and the largest error in units of the
standard deviations' product. The limit is shown by bare symmetric products of centred float64 rows in memory: SciPy's
`dsyrk`, one triangle only, and `torch.mm`, which uses MKL where torch has it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reporting import in_own_process, memory, write

from weightscope._util.environment import environment, usable_cores
from weightscope.analysis.across_networks import covariance_across
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.moments import Moments


def make_population(path: Path, networks: int, size: int, spec: WeightSpec | None = None) -> None:
    """Correlated random vectors with means in a population folder, and beside it as one array."""
    spec = spec or WeightSpec([TensorSpec("weights", (size,))])
    plain = {
        "network": {"type": "convnext", "width": 16, "depth": 4},
        "data": {"name": "digits"},
        "training": {"epochs": 1},
        "population": {"networks": networks, "tile": 32},
    }
    wanted = manifests.Manifest(Recipe.parse(plain), spec, environment(), networks)
    manifest, _ = manifests.create_or_match(path, wanted, resize=False)
    rng = np.random.default_rng(0)
    common, mean = rng.standard_normal((8, size), dtype=np.float32), rng.standard_normal(size, dtype=np.float32)
    rows = []
    for tile in range(manifest.tiles):
        weights = rng.standard_normal((32, size), dtype=np.float32) + mean
        weights += rng.standard_normal((32, 8), dtype=np.float32) @ common
        trained = shards.TrainedTile(tile, weights, {"diverged": np.zeros(32, dtype=bool)})
        shards.save(path, manifest, trained, "cpu")
        rows.append(weights[: manifest.rows(tile)])
    np.save(path.with_suffix(".npy"), np.concatenate(rows))


def ours(path: Path, precision: Any) -> Callable[[], np.ndarray]:
    return lambda: covariance_across(Population(path), "*", precision=precision, stripes=False).matrix


def numpy_cov(path: Path, dtype: Any) -> Callable[[], np.ndarray]:
    array = np.load(path.with_suffix(".npy"))
    return lambda: np.cov(array, rowvar=False, dtype=dtype)


def torch_cov(path: Path) -> Callable[[], np.ndarray]:
    import torch

    array = torch.from_numpy(np.load(path.with_suffix(".npy")))
    return lambda: torch.cov(array.T).numpy()


def sklearn_empirical(path: Path) -> Callable[[], np.ndarray]:
    from sklearn.covariance import EmpiricalCovariance

    array = np.load(path.with_suffix(".npy")).astype(np.float64)
    return lambda: EmpiricalCovariance(store_precision=False).fit(array).covariance_


def centred(path: Path) -> np.ndarray:
    array = np.load(path.with_suffix(".npy")).astype(np.float64)
    return (array - array.mean(axis=0)) / np.sqrt(len(array) - 1)


def dsyrk(path: Path) -> Callable[[], np.ndarray]:
    from scipy.linalg.blas import dsyrk

    rows = centred(path)
    return lambda: dsyrk(1.0, rows.T)


def torch_mm(path: Path) -> Callable[[], np.ndarray]:
    import torch

    rows = torch.from_numpy(centred(path))
    return lambda: torch.mm(rows.T, rows).numpy()


CONTENDERS: dict[str, Callable[[Path], Callable[[], np.ndarray]]] = {
    "ours float64": lambda path: ours(path, "float64"),
    "ours float32": lambda path: ours(path, "float32"),
    "numpy.cov float64": lambda path: numpy_cov(path, None),
    "numpy.cov float32": lambda path: numpy_cov(path, np.float32),
    "torch.cov float32": torch_cov,
    "sklearn EmpiricalCovariance": sklearn_empirical,
    "bare dsyrk": dsyrk,
    "bare torch.mm float64": torch_mm,
}
PAIRS = [
    ("ours float64", "numpy.cov float64"),
    ("ours float32", "numpy.cov float64"),
    ("ours float32", "numpy.cov float32"),
    ("ours float32", "torch.cov float32"),
    ("ours float64", "sklearn EmpiricalCovariance"),
    ("bare dsyrk", "numpy.cov float64"),
    ("bare torch.mm float64", "numpy.cov float64"),
]


def worker(path: Path, name: str, check: bool) -> None:
    """Time one contender in this process; prints seconds, memory and, if asked, the error as JSON."""
    import sklearn.covariance  # noqa: F401
    import torch  # noqa: F401 - every contender's process starts with the same imports

    warm = np.random.default_rng(0).standard_normal((600, 600))
    np.cov(warm), Moments(600).update(warm).covariance()  # threads are up
    start_memory = memory()["VmRSS"]
    work = CONTENDERS[name](path)
    start = time.perf_counter()
    matrix = work()
    seconds, peak = time.perf_counter() - start, memory()["VmHWM"] - start_memory
    result = {"seconds": seconds, "peak_mib": peak / 2**20}
    print(json.dumps(result | ({"error": error_of(path, name, matrix)} if check else {})))


def error_of(path: Path, name: str, matrix: np.ndarray) -> float:
    """The largest difference to NumPy's float64 result, in units of the standard deviations."""
    rows = np.load(path.with_suffix(".npy")).astype(np.float64)
    if "Empirical" in name:
        expected = np.cov(rows, rowvar=False, bias=True)
    else:
        expected = np.cov(rows, rowvar=False)
    scale = np.sqrt(np.diag(expected))
    expected -= matrix
    expected /= scale
    expected /= scale[:, None]
    return float(np.abs(np.triu(expected)).max())


def measure(path: Path, names: list[str], rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds):
        for name in names:
            arguments = ["--worker", name, "--path", path, *["--check"] * (turn == 0)]
            for key, value in in_own_process(__file__, *arguments, threads=threads).items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


def row(pair: tuple[str, str], found: dict[str, dict[str, list[float]]], shape: str) -> dict[str, Any]:
    mine, theirs = (found[name] for name in pair)
    ratios = [b / a for a, b in zip(mine["seconds"], theirs["seconds"], strict=True)]
    return {
        "row": f"{shape}: {pair[0]}{' from disk' * pair[0].startswith('ours')}, {pair[1]} in memory",
        "ours": statistics.median(mine["seconds"]),
        "peer": statistics.median(theirs["seconds"]),
        "unit": "seconds",
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "ours_peak_mib": statistics.median(mine["peak_mib"]),
        "peer_peak_mib": statistics.median(theirs["peak_mib"]),
        "ours_error": max(mine["error"]),
        "peer_error": max(theirs["error"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", type=int, default=4096)
    parser.add_argument("--size", type=int, default=5338)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="only the first so many comparisons")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.path, options.worker, options.check)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.pop"
        make_population(path, options.networks, options.size)
        pairs = PAIRS[: options.pairs]
        found = measure(
            path, list(dict.fromkeys(name for pair in pairs for name in pair)), options.rounds, options.threads
        )
    rows = [row(pair, found, f"({options.networks}, {options.size})") for pair in pairs]
    for r in rows:
        low, high = r["ratio_range"]
        print(
            f"{r['row']:<75} {r['ours']:7.3f} s {r['peer']:7.3f} s  x{r['ratio']:.2f} ({low:.2f}-{high:.2f})  "
            f"{r['ours_peak_mib']:5.0f} {r['peer_peak_mib']:5.0f} MiB  "
            f"error {r['ours_error']:.0e} {r['peer_error']:.0e}"
        )
    write(options.json, rows, rounds=options.rounds, threads=options.threads, load=os.getloadavg())


if __name__ == "__main__":
    main()
