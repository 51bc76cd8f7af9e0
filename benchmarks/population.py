"""Training a population: weightscope against plain PyTorch loops over networks, on the same work in one run.

    python benchmarks/population.py --json benchmarks/results/population.json

The work of one network-step is a batch of 64 images: gathering it, forward, backward, clipping, AdamW. Each
contender uses all cores in its best way: the loop is measured in one process with all threads and in one process
for each core with one thread, in the default and in the channels-last layout, eager and (with --compile) compiled;
its best setting of the run counts. Ours is measured with torch's and with compiled kernels. Contenders take turns for
several rounds, because machines are noisy; the medians over rounds and their range are reported.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.data.catalog import CATALOG
from weightscope.data.dataset import Dataset
from weightscope.environment import environment, usable_cores
from weightscope.recipe import Recipe
from weightscope.train import build_network
from weightscope.train.engine import TileRun
from weightscope.train.memory import keep_freed_memory

BATCH = 64
CASES = {
    "8x8": {"data": "digits", "tile": 32, "channels": 1},
    "32x32": {"data": "cifar10", "tile": 8, "channels": 3},
}


def recipe_of(case: str, kernels: str = "torch") -> Recipe:
    plan = CASES[case]
    return Recipe.parse(
        {
            "network": {"type": "convnext", "width": 16, "depth": 4, "patch_size": 2, "expansion": 2},
            "data": {"name": plan["data"]},
            "training": {"epochs": 1000, "batch_size": BATCH, "kernels": kernels},
            "population": {"tile": plan["tile"]},
        }
    )


def data_of(case: str, images: int) -> Dataset:
    """The digits, or random images of CIFAR's shape (what is in a picture does not change the time)."""
    info = CATALOG[CASES[case]["data"]]
    if info.name == "digits":
        return load("digits", train=images)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (images,), generator=generator)
    return Dataset(info, pixels, labels, pixels[:100], labels[:100], torch.full((3,), 0.5), torch.full((3,), 0.25))


def stacked(case: str, *, kernels: str) -> Callable[[], int]:
    run = TileRun(recipe_of(case, kernels), 0, data_of(case, 4 * BATCH), torch.device("cpu"))

    def work() -> int:
        run.epoch(0)
        return run.steps_per_epoch * len(run.ids)

    return work


def loop(case: str, *, channels_last: bool = False, compiled: bool = False) -> Callable[[], int]:
    data = data_of(case, 4 * BATCH)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = build_network(recipe_of(case)).to(memory_format=layout)
    forward = torch.compile(network) if compiled else network
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def work() -> int:
        for index in torch.randperm(4 * BATCH).view(4, BATCH):
            images = normalise(data.train_images[index], data.mean, data.std).contiguous(memory_format=layout)
            optimiser.zero_grad()
            F.cross_entropy(forward(images), data.train_labels[index]).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
        return 4

    return work


def vmapped(case: str) -> Callable[[], int]:
    """Plain `torch.func`: vmap over stacked parameters, without an optimiser's cost."""
    count, data = CASES[case]["tile"], data_of(case, 4 * BATCH)
    template = build_network(recipe_of(case))
    parameters, buffers = torch.func.stack_module_state([build_network(recipe_of(case)) for _ in range(count)])

    def loss(parameters: Any, buffers: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(template, (parameters, buffers), (images,)), labels)

    gradient = torch.func.vmap(torch.func.grad(loss))

    def work() -> int:
        index = torch.randint(0, 4 * BATCH, (count, BATCH))
        images = normalise(data.train_images[index.flatten()], data.mean, data.std).unflatten(0, (count, BATCH))
        gradient(parameters, buffers, images, data.train_labels[index])
        return count

    return work


OURS = ("torch kernels", "compiled kernels")
CONTENDERS: dict[str, tuple[Callable[..., Callable[[], int]], dict[str, Any]]] = {
    "torch kernels": (stacked, {"kernels": "torch"}),
    "compiled kernels": (stacked, {"kernels": "compiled"}),
    "loop": (loop, {}),
    "loop, channels last": (loop, {"channels_last": True}),
    "compiled loop": (loop, {"compiled": True}),
    "vmap": (vmapped, {}),
}


def worker(case: str, name: str, threads: int, seconds: float, barrier: Any, results: Any) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    keep_freed_memory()  # for every contender alike
    make, options = CONTENDERS[name]
    work = make(case, **options)
    work(), work()
    barrier.wait()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
    results.put(done / (time.perf_counter() - start))


def rate(case: str, name: str, processes: int, threads: int, seconds: float) -> float:
    """Network-steps per second of all processes together."""
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    arguments = (case, name, threads, seconds, barrier, results)
    running = [context.Process(target=worker, args=arguments) for _ in range(processes)]
    for process in running:
        process.start()
    total = sum(results.get(timeout=600) for _ in running)
    for process in running:
        process.join()
    return total


def settings(cores: int, compiled: bool) -> list[tuple[str, int, int]]:
    """(contender, processes, threads) to measure; ours come first."""
    names = [n for n in CONTENDERS if n not in OURS and (compiled or n != "compiled loop")]
    spread = [(name, cores, 1) for name in (*OURS, *names)]
    together = [(name, 1, cores) for name in names] if cores > 1 else []
    return spread + together


def measure(case: str, rounds: int, seconds: float, compiled: bool) -> list[dict[str, Any]]:
    found: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds):
        for setting in settings(usable_cores(), compiled):
            found.setdefault(setting, []).append(rate(case, *setting, seconds))
    ours = {name: found.pop((name, usable_cores(), 1)) for name in OURS}
    loops = [setting for setting in found if setting[0] != "vmap"]
    best = max(loops, key=lambda setting: statistics.median(found[setting]))
    rows = []
    for name, mine in ours.items():
        for setting in [*found, best]:
            peer = f"{setting[0]}, {setting[1]} x {setting[2]} threads"
            peer = f"the best loop ({peer})" if len(rows) % (len(found) + 1) == len(found) else peer
            ratios = [a / b for a, b in zip(mine, found[setting], strict=True)]
            rows.append(
                {
                    "row": f"{case}: {name} against {peer}",
                    "ours": statistics.median(mine),
                    "peer": statistics.median(found[setting]),
                    "ratio": statistics.median(ratios),
                    "ratio_range": [min(ratios), max(ratios)],
                    "unit": "network-steps per second",
                    "tile": CASES[case]["tile"],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--compile", action="store_true", help="also the compiled loop (needs a C++ compiler)")
    options = parser.parse_args()
    rows = []
    for case in options.case or CASES:
        for row in measure(case, options.rounds, options.seconds, options.compile):
            low, high = row["ratio_range"]
            print(f"{row['row']:<84} {row['ours']:8.1f} {row['peer']:8.1f}  x{row['ratio']:.2f} ({low:.2f}-{high:.2f})")
            rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"rows": rows, "environment": environment() | {"rounds": options.rounds, "threads": os.cpu_count()}}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
