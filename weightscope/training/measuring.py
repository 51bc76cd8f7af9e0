"""What is measured on short runs: memory, for the number of networks in a tile, and seconds.

A tile is part of a population's identity (its padding is trained, too, and a GPU sums in an order that depends on
sizes), so its size is chosen once, when the population is created, and recorded in its recipe. So are the kernels.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from weightscope.data.task import Source
from weightscope.errors import UsageError
from weightscope.recipe import Recipe, TrainingConfig
from weightscope.training.devices import DEFAULT_TILE, current, one_thread
from weightscope.training.engine import TileRun
from weightscope.training.kernel_choice import Choice, choose_kernels, settings
from weightscope.training.kernels import build
from weightscope.training.kernels.functions import Kernels

T = TypeVar("T")
LARGEST = 1024
_SHARE = 0.8  # of the free memory; the rest is for fragmentation and other processes
_TRIED = (4, 8)  # sizes of tiles whose memory is measured; it is linear in the size
_BATCHES = 2
_TIMED_SECONDS, _MOST_STEPS = 2.0, 64  # of a plan, on each worker
_COMPARED_SECONDS, _ROUNDS = 0.5, 5  # of steps with both kinds of kernels
_MUCH = 0.9  # of the compiled kernels' time: torch's are chosen below


def choose_tile(recipe: Recipe, data: Source, device: torch.device) -> int:
    """Choose T for a population on a device.

    On a CPU 32. On a GPU the largest power of two for which an epoch and its evaluation fit into 80 % of the free
    memory, extrapolated from two small tiles, at most 1,024 and no more than the population needs.
    """
    if device.type != "cuda":
        return DEFAULT_TILE
    with current(device):
        kernels = choose_kernels(recipe, device).kernels
        try:
            _peak(recipe, data, device, kernels, 1)  # allocates what is allocated only once, such as workspaces
            small, large = (_peak(recipe, data, device, kernels, tile) for tile in _TRIED)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"cannot choose population.tile: {_TRIED[1]} networks do not fit into the device's memory; set it, or "
                "use a smaller batch_size or another device"
            ) from error
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    each = (large - small) / (_TRIED[1] - _TRIED[0])
    return largest_tile(_SHARE * free, small - _TRIED[0] * each, each, recipe.population.networks)


def largest_tile(memory: float, fixed: float, each: float, networks: int) -> int:
    """The largest power of two T with `fixed + T each <= memory`, at most 1,024, and less than twice `networks`."""
    if fixed + each > memory:
        raise UsageError(
            f"one network takes {(fixed + each) / 2**20:.0f} MiB to train, and {memory / 2**20:.0f} MiB of the "
            "device's memory are available; use a smaller batch_size or another device"
        )
    tile = 1
    while tile < min(LARGEST, networks) and fixed + 2 * tile * each <= memory:
        tile *= 2
    return tile


def _peak(recipe: Recipe, data: Source, device: torch.device, kernels: Kernels, tile: int) -> float:
    """Peak memory of training a tile, in bytes of the device."""
    few = data.shortened(min(_BATCHES * recipe.training.batch_size, data.examples))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    peaks = []
    run = TileRun(recipe.replace({"population.tile": tile}), 0, few, device, kernels)
    for work in (lambda: run.epoch(0), run.evaluate):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    # a CUDA graph keeps the memory of its step during the evaluation
    peak = sum(peaks) if kernels == "inductor" else max(peaks)
    # the random numbers of a whole epoch and all images are on the device, too
    whole = data.examples // run.batch
    more = (whole - run.steps_per_epoch) * sum(values[0].nbytes for values in run.numbers.values())
    return peak + more + data.nbytes


def faster_kernels(recipe: Recipe, data: Source, device: torch.device, choice: Choice) -> Choice:
    """The choice, or torch's kernels if they train a tile of the recipe faster; for `kernels = "auto"`.

    Steps of both are timed in turns, for about a second, once on a machine: the first result is kept beside the
    compiled kernels.
    """
    if choice.kernels == "torch":
        return choice
    about = [choice.build, torch.__version__, str(device), recipe.population.tile, settings(recipe)]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    file = build.cache_folder() / f"timed-{name}.txt"
    if not file.exists():
        plain = recipe.replace({"init": [{"name": "default"}], "distillation": None})
        with one_thread(), current(device):
            text = _compared(plain, data, device, choice.kernels)
        with contextlib.suppress(OSError), file.open("x") as new:  # of two processes, the first one decides
            new.write(text)
    text = file.read_text() if file.exists() else text
    return Choice("torch", checked=text) if text else choice


def _compared(recipe: Recipe, data: Source, device: torch.device, compiled: Kernels) -> str:
    """What says that torch's kernels are faster, or "" if they are not."""
    one_step = data.shortened(min(recipe.training.batch_size, data.examples))
    runs = [TileRun(recipe, 0, one_step, device, kernels) for kernels in (compiled, "torch")]
    for run in runs:
        run.epoch(0)  # compiles, and allocates what is allocated once
    best, end = [math.inf, math.inf], time.perf_counter() + _COMPARED_SECONDS
    for _ in range(_ROUNDS):
        for k, run in enumerate(runs):
            best[k] = min(best[k], _timed(partial(run.epoch, 0))[0])
        if time.perf_counter() > end:
            break
    ours, torchs = (f"{1000 * seconds:.3g}" for seconds in best)
    return (
        f"torch's kernels are faster: {torchs} ms for a step, compiled ones {ours}" if best[1] < _MUCH * best[0] else ""
    )


@dataclass(frozen=True)
class TileCost:
    """Measured seconds of a tile."""

    start: float  # until its networks are initialised
    step: float  # one step of all networks
    steps: int  # number of steps of an epoch
    evaluation: float  # one evaluation of all networks

    def seconds(self, training: TrainingConfig) -> float:
        """Of the whole tile: start + epochs x steps x step + evaluations x evaluation."""
        evaluations = training.epochs if training.evaluate == "epoch" else 1
        return self.start + training.epochs * self.steps * self.step + evaluations * self.evaluation


def time_tile(recipe: Recipe, data: Source, device: torch.device, kernels: Kernels) -> TileCost:
    """What tile 0 of a recipe costs in this process, from a few steps; nothing is kept.

    Each part is done once before it is timed: code is compiled and memory is allocated on first use.
    """
    with one_thread(), current(device):
        run = TileRun(recipe, 0, data, device, kernels)
        run.evaluate()
        whole, steps = run.steps_per_epoch, min(2, run.steps_per_epoch)
        while True:  # longer and longer, until it can be timed
            few = data.shortened(steps * run.batch)
            start, short = _timed(partial(TileRun, recipe, 0, few, device, kernels))
            short.epoch(0)
            seconds, _ = _timed(partial(short.epoch, 0))
            if seconds > _TIMED_SECONDS / 4 or steps >= min(whole, _MOST_STEPS):
                break
            steps = min(2 * steps, whole, _MOST_STEPS)
        return TileCost(start, seconds / steps, whole, _timed(run.evaluate)[0])


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found
