"""Training a population: weightscope against plain PyTorch loops over networks, on the same work in one run.

    python benchmarks/population.py --json benchmarks/results/population.json

The work of one network-step is a batch of 64 images: gathering it, forward, backward, clipping, AdamW. Each
contender uses all cores in its best way, one process for each core with one thread: loops over networks in the default
and in the channels-last layout and over a network that is compiled, `torch.func.vmap`, and, if it is installed, JAX
(`in_jax.py`). Eager loops and JAX are measured at a user's default, too, one process with all threads. The best loop of
the run counts. Ours is measured with torch's and with compiled kernels.

All start once and then take turns for several rounds, because machines are noisy; the medians over rounds and their
range are reported. What has not started after `--limit` seconds is stopped: its rate is below that of the steps that
it made, and "<" is printed. The rows of a network are written when they are there.
"""

import argparse
import importlib.util
import multiprocessing as mp
import os
import queue
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
from weightscope.training.devices import one_thread
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
        with one_thread():  # as in training
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
    """JAX, with the optimiser."""
    import in_jax

    return in_jax.jitted(recipe, data, device)


OURS = ("torch kernels", "compiled kernels")
MANY = ("vmap", "JAX")  # peers that are no loops over networks
TOGETHER = ("loop", "loop, channels last", "JAX")  # also in one process with all threads
CONTENDERS: dict[str, tuple[Callable[..., Callable[[], int]], dict[str, Any]]] = {
    "torch kernels": (batched, {"kernels": "torch"}),
    "compiled kernels": (batched, {"kernels": "compiled"}),
    "loop": (loop, {}),
    "loop, channels last": (loop, {"channels_last": True}),
    "compiled loop": (loop, {"compiled": "default"}),
    "vmap": (vmapped, {}),
    "JAX": (jaxed, {}),
}
PEERS = [name for name in CONTENDERS if name not in OURS]


def worker(case: str, name: str, threads: int, steps: Any, barrier: Any, turns: Any, rates: Any) -> None:
    """Make the work, and measure its rate for so many seconds whenever there is a turn; counts its steps."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    make, options = CONTENDERS[name]
    work = make(recipe_of(case), data_of(case), torch.device("cpu"), **options)
    for _ in range(2):
        done = work()
        with steps:
            steps.value += done
    rates.put(0.0)
    while True:
        try:
            seconds = turns.get(timeout=5)
        except queue.Empty:
            if mp.parent_process().is_alive():
                continue
            return  # it was killed
        barrier.wait()
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            done += work()
        rates.put(done / (time.perf_counter() - start))


class Running:
    """The processes of one setting, which wait between their turns."""

    def __init__(self, case: str, name: str, processes: int, threads: int, limit: float) -> None:
        context = mp.get_context("spawn")
        self.turns, self.rates = context.Queue(), context.Queue()
        steps, barrier = context.Value("q"), context.Barrier(processes)
        arguments = (case, name, threads, steps, barrier, self.turns, self.rates)
        self.processes = [context.Process(target=worker, args=arguments, daemon=True) for _ in range(processes)]
        for process in self.processes:
            process.start()
        self.below: float | None = None  # of a setting that was stopped
        if self._sum(time.monotonic() + limit) is None:
            unfinished = IMAGES // BATCH * CASES[case]["tile"] * processes
            self.below = (steps.value + unfinished) / limit
            self.stop()

    def rate(self, seconds: float) -> float:
        """Network-steps per second of all processes together."""
        for _ in self.processes:
            self.turns.put(seconds)
        found = self._sum(time.monotonic() + 600)
        if found is None:
            raise TimeoutError(f"{self.processes[0].name}: expected its rate after {seconds} s, found none after 600 s")
        return found

    def _sum(self, until: float) -> float | None:
        """The sum of what all processes report; None if the time is over. RuntimeError if one of them has failed."""
        found: list[float] = []
        while len(found) < len(self.processes) and time.monotonic() < until:
            try:
                found.append(self.rates.get(timeout=0.5))
            except queue.Empty:
                if any(process.exitcode is not None for process in self.processes):
                    raise RuntimeError("a process of this setting ended; its error is above") from None
        return sum(found) if len(found) == len(self.processes) else None

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()


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
    together = [(name, 1, cores) for name in names if name in TOGETHER] if cores > 1 else []
    return spread + together


def measure(case: str, rounds: int, seconds: float, limit: float, names: list[str]) -> list[dict[str, Any]]:
    chosen = settings(usable_cores(), names)
    running: dict[tuple[str, int, int], Running] = {}
    try:
        for setting in chosen:
            running[setting] = Running(case, *setting, limit)
        going = {setting: processes for setting, processes in running.items() if processes.below is None}
        turns = [{setting: processes.rate(seconds) for setting, processes in going.items()} for _ in range(rounds)]
    finally:
        for processes in running.values():
            processes.stop()
    found = {setting: [turn[setting] for turn in turns] for setting in going}
    peers = [setting for setting in chosen if setting[0] not in OURS]
    loops = [setting for setting in peers if setting in found and setting[0] not in MANY]
    best = max(loops, key=lambda setting: statistics.median(found[setting]), default=None)
    named = [(setting, "{}, {} x {} threads") for setting in peers]
    named += [(best, "the best loop ({}, {} x {} threads)")] if best else []
    rows = []
    for name in ours():
        mine = found[name, usable_cores(), 1]
        for setting, form in named:
            row: dict[str, Any] = {
                "row": f"{case}: {name} against {form.format(*setting)}",
                "ours": statistics.median(mine),
                "unit": "network-steps per second",
                "tile": CASES[case]["tile"],
            }
            if setting in found:
                ratios = [a / b for a, b in zip(mine, found[setting], strict=True)]
                row |= {"peer": statistics.median(found[setting]), "ratio": statistics.median(ratios)}
                row["ratio_range"] = [min(ratios), max(ratios)]
            else:
                row["peer_below"] = running[setting].below
            rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    if "peer_below" in row:
        return f"{row['row']:<84} {row['ours']:8.1f} <{row['peer_below']:7.1f}  stopped"
    low, high = row["ratio_range"]
    return f"{row['row']:<84} {row['ours']:8.1f} {row['peer']:8.1f}  x{row['ratio']:.2f} ({low:.2f}-{high:.2f})"


def products_alone(case: str, ours: float) -> dict[str, Any]:
    """Compiled kernels against the matrix products alone of a ViT's blocks, by the library, within the cache."""
    network, tokens = recipe_of(case).network, (32 // CASES[case]["network"]["patch_size"]) ** 2
    width, heads, rows = network.width, network.heads, BATCH * tokens
    torch.set_num_threads(1)
    work = []
    for i, o in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        x, w, g = torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)
        work += [(x, w.T), (g, w), (g.T, x)]
    q, scores = torch.randn(BATCH * heads, tokens, width // heads), torch.randn(BATCH * heads, tokens, tokens)
    work += [(q, q.mT)] * 2 + [(scores, q)] * 2 + [(scores.mT, q)] * 2
    least = 0.0
    for a, b in work:
        out, times = torch.matmul(a, b), []
        for _ in range(10):
            start = time.thread_time()
            torch.matmul(a, b, out=out)
            times.append(time.thread_time() - start)
        least += min(times)
    peer = usable_cores() / (network.depth * least)
    row = f"{case}: compiled kernels against the products of its blocks alone"
    numbers = {"ours": ours, "peer": peer, "ratio": ours / peer, "ratio_range": [ours / peer] * 2}
    return {"row": row, **numbers, "unit": "network-steps per second", "tile": CASES[case]["tile"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds in which each has to start")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--against", action="append", choices=PEERS, help="only this one; repeat it")
    options = parser.parse_args()
    names = options.against or PEERS
    if "compiled loop" in names and not (shutil.which("g++") or shutil.which("clang++")):
        print("without the compiled loop: torch.compile needs a C++ compiler, and there is none")
        names = [name for name in names if name != "compiled loop"]
    if "JAX" in names and importlib.util.find_spec("jax") is None:
        print("without JAX: pip install 'weightscope-toolkit[benchmarks]'")
        names = [name for name in names if name != "JAX"]
    rows = []
    for case in options.case or CASES:
        found = measure(case, options.rounds, options.seconds, options.limit, names)
        if CASES[case]["network"]["type"] == "vit":
            found.append(products_alone(case, max(row["ours"] for row in found)))
        for row in found:
            print(line(row))
            rows.append(row)
        write(options.json, rows, rounds=options.rounds, threads=os.cpu_count())


if __name__ == "__main__":
    main()
