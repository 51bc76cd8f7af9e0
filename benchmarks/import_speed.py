"""Import of many small networks: seconds and memory, beside reading the same files; killed and resumed.

    python benchmarks/import_speed.py --networks 10000 --json benchmarks/results/import_speed.json

Each measurement is a process of its own, after the files were read once (a warm cache). Seconds are of the clock and of
the processor, since the machine may be busy.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weightscope import Checkpoint, Population
from weightscope._util import atomic
from weightscope._util.environment import environment

SUFFIXES: dict[str, Callable[[Path], Any]] = {
    ".pt": lambda file: torch.load(file, weights_only=True),
    ".safetensors": load_file,
}


def network() -> nn.Module:
    """About 8,000 weights in six layers, as the CNNs of Model Zoos."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5),
        nn.Conv2d(8, 8, 5),
        nn.Conv2d(8, 4, 3),
        nn.Linear(36, 100),
        nn.Linear(100, 20),
        nn.Linear(20, 10),
    )


def read(files: list[Path], suffix: str) -> None:
    """Read every file, one after the other, and keep nothing."""
    for file in files:
        SUFFIXES[suffix](file)


def read_safely(files: list[Path]) -> None:
    """Read every file with the reader that import uses, which runs no code and trusts no header."""
    for file in files:
        checkpoint = Checkpoint(file)
        for name in checkpoint:
            checkpoint[name]


def imported(files: list[Path], path: Path) -> None:
    """Import every file."""
    Population.of(files, path, progress=False)


def measured(work: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """Seconds and peak memory of a call in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_measure, args=(results, work, *arguments))
    process.start()
    found: dict[str, float] = results.get()
    process.join()
    return found


def _measure(results: Any, work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    work(*arguments)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    results.put(
        {"seconds": wall, "processor_seconds": cpu, "added_megabytes": (after.ru_maxrss - before.ru_maxrss) / 1024}
    )


def killed_and_resumed(files: list[Path], path: Path) -> int:
    """Kill an import once three shards are there, import again; the number of networks that were kept."""
    process = multiprocessing.get_context("spawn").Process(target=imported, args=(files, path))
    process.start()
    while process.is_alive() and len(list(path.glob("shards/*.h5"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    kept = len(Population(path, partial=True))
    imported(files, path)
    return kept


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"networks": options.networks, "environment": environment(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            root = Path(folder, suffix[1:])
            root.mkdir()
            files = [root / f"{k:06}{suffix}" for k in range(options.networks)]
            torch.manual_seed(0)
            for file in files:
                state = network().state_dict()
                (torch.save if suffix == ".pt" else save_file)(state, file)
            read(files, suffix)
            row: dict[str, Any] = {"reading": measured(read, files, suffix)}
            row["import"] = measured(imported, files, root / "zoo.pop")
            row["weights"] = Population(root / "zoo.pop").spec.size
            row["reading_safely"] = measured(read_safely, files)
            for kind in ("reading", "reading_safely"):
                for unit in ("seconds", "processor_seconds"):
                    row[f"import over {kind}, {unit}"] = row["import"][unit] / row[kind][unit]
            row["kept_of_the_killed"] = killed_and_resumed(files, root / "killed.pop")
            pairs = zip(Population(root / "zoo.pop").chunks(), Population(root / "killed.pop").chunks(), strict=True)
            row["resumed_is_equal"] = all((a == b).all() for a, b in pairs)
            found[suffix] = row
            print(suffix, json.dumps(row))
    if options.json is not None:
        atomic.write(options.json, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
