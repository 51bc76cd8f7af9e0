"""Training a population: weightscope against plain PyTorch loops over networks, on the same work in one run.

    python benchmarks/population.py --json benchmarks/results/population.json

The work of one network-step is a batch of 64 images: gathering it, forward, backward, clipping, AdamW. Each
contender uses all cores in its best way: the loop is measured in one process with all threads and in one process
for each core with one thread, in the default and in the channels-last layout, eager and compiled; its best setting of
the run counts. `torch.func.vmap` and, if it is installed, `jax.jit(jax.vmap(step))` (`in_jax.py`) are measured as well.
Ours is measured with torch's and with compiled kernels. Contenders take turns for
several rounds, because machines are noisy; the medians over rounds and their range are reported.
"""

import argparse
import importlib.util
import multiprocessing as mp
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import write
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightscope._util.environment import usable_cores
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.data.dataset import Dataset
from weightscope.data.image_section import dataset_info
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.training.engine import TileRun
from weightscope.training.kernels import build
from weightscope.training.network_check import choose_kernels

BATCH = 64
IMAGES = 4 * BATCH  # as many as an epoch of the contenders has
CONVNEXT = {"type": "convnext", "width": 16, "depth": 4, "patch_size": 2, "expansion": 2}
CASES: dict[str, dict[str, Any]] = {
    "8x8": {"data": "digits", "tile": 32, "network": CONVNEXT},
    "32x32": {"data": "cifar10", "tile": 8, "network": CONVNEXT},
    "ViT": {
        "data": "cifar10",
        "tile": 8,
        "network": {"type": "vit", "width": 32, "depth": 4, "heads": 2, "patch_size": 4},
    },
    "ConvMixer": {
        "data": "cifar10",
        "tile": 8,
        "network": {"type": "convmixer", "width": 32, "depth": 4, "kernel_size": 7, "patch_size": 2},
    },
}


def recipe_of(case: str) -> Recipe:
    plan = CASES[case]
    return Recipe.parse(
        {
            "network": plan["network"],
            "data": {"name": plan["data"]},
            "training": {"epochs": 1000, "batch_size": BATCH},
            "population": {"tile": plan["tile"]},
        }
    )


def data_of(case: str) -> Dataset:
    """The digits, or random images of CIFAR's shape (what is in a picture does not change the time)."""
    return load("digits", train=IMAGES) if CASES[case]["data"] == "digits" else random_images(IMAGES)


def random_images(count: int) -> Dataset:
    """Images of CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    half, quarter = torch.full((3,), 0.5), torch.full((3,), 0.25)
    return Dataset(dataset_info("cifar10"), pixels, labels, pixels[:100], labels[:100], half, quarter)


def batched(recipe: Recipe, data: Dataset, device: torch.device, **training: str) -> Callable[[], int]:
    """weightscope; `training` are fields of the recipe's section."""
    recipe = recipe.replace({f"training.{name}": value for name, value in training.items()})
    run = TileRun(recipe, 0, data, device, choose_kernels(recipe, device).kernels)

    def work() -> int:
        run.epoch(0)
        return run.steps_per_epoch * len(run.ids)

    return work


def loop(
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
    *,
    channels_last: bool = False,
    compiled: str | None = None,
    bfloat16: bool = False,
) -> Callable[[], int]:
    """One network in plain PyTorch; `compiled` is the mode of `torch.compile`."""
    images, labels, mean, std = (v.to(device) for v in (data.train_images, data.train_labels, data.mean, data.std))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = build_for(recipe).to(device, memory_format=layout)
    if compiled:
        torch._dynamo.reset()  # or another network's shapes make this one's dynamic
    forward = torch.compile(network, mode=compiled) if compiled else network
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)

    def work() -> int:
        batches = torch.randperm(len(images)).to(device).view(-1, recipe.training.batch_size)
        for index in batches:
            batch = normalise(images[index], mean, std).contiguous(memory_format=layout)
            optimiser.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                loss = F.cross_entropy(forward(batch), labels[index])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
        return len(batches)

    return work


def vmapped(recipe: Recipe, data: Dataset, device: torch.device, *, bfloat16: bool = False) -> Callable[[], int]:
    """Plain `torch.func`: vmap over stacked parameters, without an optimiser's cost."""
    count, size = recipe.population.tile, recipe.training.batch_size
    images, labels, mean, std = (v.to(device) for v in (data.train_images, data.train_labels, data.mean, data.std))
    template = build_for(recipe).to(device)
    parameters, buffers = torch.func.stack_module_state([build_for(recipe).to(device) for _ in range(count)])
    if bfloat16:
        buffers = {name: v.bfloat16() if v.is_floating_point() else v for name, v in buffers.items()}

    def loss(parameters: Any, buffers: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if bfloat16:
            parameters, images = {name: v.bfloat16() for name, v in parameters.items()}, images.bfloat16()
        logits = torch.func.functional_call(template, (parameters, buffers), (images,))
        return F.cross_entropy(logits.float(), labels)

    gradient = torch.func.vmap(torch.func.grad(loss))

    def work() -> int:
        index = torch.randint(0, len(images), (count, size)).to(device)
        batch = normalise(images[index.flatten()], mean, std).unflatten(0, (count, size))
        with sdpa_kernel(SDPBackend.MATH):  # vmap would run the others network by network
            gradient(parameters, buffers, batch, labels[index])
        return count

    return work


def jaxed(recipe: Recipe, data: Dataset, device: torch.device) -> Callable[[], int]:
    """`jax.jit(jax.vmap(step))`, with the optimiser."""
    import in_jax

    return in_jax.jitted(recipe, data, device)


OURS = ("torch kernels", "compiled kernels")
MANY = ("vmap", "jax.vmap")  # peers that are no loops over networks
CONTENDERS: dict[str, tuple[Callable[..., Callable[[], int]], dict[str, Any]]] = {
    "torch kernels": (batched, {"kernels": "torch"}),
    "compiled kernels": (batched, {"kernels": "compiled"}),
    "loop": (loop, {}),
    "loop, channels last": (loop, {"channels_last": True}),
    "compiled loop": (loop, {"compiled": "default"}),
    "vmap": (vmapped, {}),
    "jax.vmap": (jaxed, {}),
}
PEERS = [name for name in CONTENDERS if name not in OURS]


def worker(case: str, name: str, threads: int, seconds: float, barrier: Any, results: Any) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    make, options = CONTENDERS[name]
    work = make(recipe_of(case), data_of(case), torch.device("cpu"), **options)
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


def ours() -> tuple[str, ...]:
    """Ours that can run here."""
    try:
        build.library("float")
    except UsageError as error:
        print(error)
        return OURS[:1]
    return OURS


def settings(cores: int, names: list[str]) -> list[tuple[str, int, int]]:
    """(contender, processes, threads) to measure; ours come first."""
    spread = [(name, cores, 1) for name in (*ours(), *names)]
    together = [(name, 1, cores) for name in names] if cores > 1 else []
    return spread + together


def measure(case: str, rounds: int, seconds: float, names: list[str]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(rounds):
        for setting in settings(usable_cores(), names):
            found.setdefault(setting, []).append(rate(case, *setting, seconds))
    measured = {name: found.pop((name, usable_cores(), 1)) for name in ours()}
    loops = [setting for setting in found if setting[0] not in MANY]
    best = max(loops, key=lambda setting: statistics.median(found[setting]), default=None)
    rows = []
    for name, mine in measured.items():
        named = [(setting, "{}, {} x {} threads") for setting in found]
        named += [(best, "the best loop ({}, {} x {} threads)")] if best else []
        for setting, form in named:
            peer = form.format(*setting)
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
    parser.add_argument("--against", action="append", choices=PEERS, help="only this one; repeat it")
    options = parser.parse_args()
    names = options.against or PEERS
    if "compiled loop" in names and not (shutil.which("g++") or shutil.which("clang++")):
        print("without the compiled loop: torch.compile needs a C++ compiler, and there is none")
        names = [name for name in names if name != "compiled loop"]
    if "jax.vmap" in names and importlib.util.find_spec("jax") is None:
        print("without JAX: pip install 'weightscope-toolkit[benchmarks]'")
        names = [name for name in names if name != "jax.vmap"]
    rows = []
    for case in options.case or CASES:
        for row in measure(case, options.rounds, options.seconds, names):
            low, high = row["ratio_range"]
            print(f"{row['row']:<84} {row['ours']:8.1f} {row['peer']:8.1f}  x{row['ratio']:.2f} ({low:.2f}-{high:.2f})")
            rows.append(row)
    write(options.json, rows, rounds=options.rounds, threads=os.cpu_count())


if __name__ == "__main__":
    main()
