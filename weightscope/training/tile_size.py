"""The number of networks in a tile if the recipe does not give it.

A tile is part of a population's identity (its padding is trained, too, and a GPU sums in an order that depends on
sizes), so the number is chosen once, when the population is created, and recorded in its recipe.
"""

import torch

from weightscope.data.task import Source
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.training.devices import current
from weightscope.training.engine import TileRun
from weightscope.training.many_networks import DEFAULT_TILE

LARGEST = 1024
_SHARE = 0.8  # of the free memory; the rest is for fragmentation and other processes
_TRIED = (4, 8)  # sizes of tiles whose memory is measured; it is linear in the size
_BATCHES = 2


def choose_tile(recipe: Recipe, data: Source, device: torch.device) -> int:
    """Choose T for a population on a device.

    On a CPU 32. On a GPU the largest power of two for which an epoch and its evaluation fit into 80 % of the free
    memory, extrapolated from two small tiles, at most 1,024 and no more than the population needs.
    """
    if device.type != "cuda":
        return DEFAULT_TILE
    with current(device):
        try:
            _peak(recipe, data, device, 1)  # allocates what is allocated only once, such as workspaces of libraries
            small, large = (_peak(recipe, data, device, tile) for tile in _TRIED)
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


def _peak(recipe: Recipe, data: Source, device: torch.device, tile: int) -> float:
    """Peak memory of training a tile, in bytes of the device."""
    kept = _BATCHES * recipe.training.batch_size
    few = data.shortened(min(kept, data.examples))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    peaks = []
    run = TileRun(recipe.replace({"population.tile": tile}), 0, few, device)
    for work in (lambda: run.epoch(0), run.evaluate):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    # a CUDA graph keeps the memory of its step during the evaluation
    peak = sum(peaks) if run.nets.kernels == "inductor" else max(peaks)
    # the random numbers of a whole epoch and all images are on the device, too
    whole = data.examples // run.batch
    more = (whole - run.steps_per_epoch) * sum(values[0].nbytes for values in run.numbers.values())
    return peak + more + data.nbytes
