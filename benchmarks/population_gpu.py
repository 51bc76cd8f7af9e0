"""Training populations on a GPU: network-epochs per second, against loops over networks and plain `torch.func`.

    python benchmarks/population_gpu.py --json benchmarks/results/population_gpu.json

The population's ConvNeXt, a ViT of 64 tokens, a ConvMixer-32/4, and one large ConvMixer-256/8 alone, on images of
CIFAR-10's size. A network-epoch is 50,000 images. All contenders run in one process, in turns for several rounds; the
device is waited for before the clock is read. Peers: a loop over networks, eager and compiled with CUDA graphs, and
vmap, in float32 and in bfloat16. The copying speed of the device is reported, too, and for the ConvNeXt the share of
it that the step would need if it moved only what it must (`CONVNEXT_BYTES`). `--device cpu` runs the same, to try the
script; compiled kernels in bfloat16 are left out there.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from population import batched, loop, random_images, vmapped
from reporting import write

from weightscope._util.environment import environment
from weightscope.recipe import Recipe
from weightscope.training.devices import resolve_device

EPOCH = 50_000  # images
NETWORKS = {
    "convnext": {"type": "convnext", "width": 16, "depth": 4, "patch_size": 2, "expansion": 2},
    "vit": {"type": "vit", "width": 32, "depth": 4, "heads": 2, "patch_size": 4},
    "convmixer": {"type": "convmixer", "width": 32, "depth": 4, "kernel_size": 7, "patch_size": 2},
    "convmixer-256/8": {"type": "convmixer", "width": 256, "depth": 8, "kernel_size": 9, "patch_size": 2},
}
ALONE = ("convmixer-256/8",)
# Bytes of an image in bfloat16 when nothing is stored that the backward pass can compute again. A block reads and
# writes maps of 16 x 16 x 16 twelve times: forward the input, the convolution's output (written and read), the input
# again as residual, the output; backward that output of the convolution and the gradient, the gradient before the MLP
# (written and read), the input, the gradient as residual, the gradient of the input. Ten more maps are the stem's and
# the head's, and six are images of 3 x 32 x 32.
CONVNEXT_BYTES = 2 * ((4 * 12 + 10) * 16 * 16 * 16 + 6 * 3 * 32 * 32)


def recipe_of(network: str, tile: int, batch: int) -> Recipe:
    return Recipe.parse(
        {
            "network": NETWORKS[network],
            "data": {"name": "cifar10"},
            "training": {"epochs": 1000, "batch_size": batch},
            "population": {"tile": tile},
        }
    )


def contenders(
    network: str, tiles: list[int], steps: int, device: torch.device
) -> dict[str, Callable[[], Callable[[], int]]]:
    """Name -> what makes the work; nothing is allocated before."""
    batch = 512 if network in ALONE else 64
    data = random_images(steps * batch)
    out: dict[str, Callable[[], Callable[[], int]]] = {}

    def add(name: str, make: Callable[..., Callable[[], int]], tile: int = 1, **options: Any) -> None:
        out[name] = lambda: make(recipe_of(network, tile, batch), data, device, **options)

    largest = 1 if network in ALONE else max(tiles)
    if device.type == "cuda":
        for tile in [1] if network in ALONE else tiles:
            name = f"weightscope compiled, tile {tile}, bfloat16"
            add(name, batched, tile, kernels="compiled", precision="bfloat16")
    add(f"weightscope compiled, tile {largest}, float32", batched, largest, kernels="compiled")
    add(f"weightscope torch, tile {largest}, float32", batched, largest)
    for precision in ("float32", "bfloat16"):
        half = precision == "bfloat16"
        add(f"eager loop, {precision}", loop, bfloat16=half)
        if device.type == "cuda":
            add(f"compiled loop, {precision}", loop, bfloat16=half, compiled="reduce-overhead")
        for tile in [] if network in ALONE else sorted({min(tiles), largest}):
            add(f"vmap, tile {tile}, {precision}", vmapped, tile, bfloat16=half)
    return out


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(work: Callable[[], int], seconds: float, device: torch.device) -> float:
    """Network-steps per second."""
    work()
    wait(device)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
        wait(device)
    return done / (time.perf_counter() - start)


def copying(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes per second that are read and written when an array is copied, the best of ten."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def measure(
    network: str, tiles: list[int], steps: int, rounds: int, seconds: float, device: torch.device, copied: float
) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    peaks: dict[str, float | None] = {}
    images = 512 if network in ALONE else 64  # of a step
    for _ in range(rounds):
        for name, make in contenders(network, tiles, steps, device).items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            try:
                value = rate(make(), seconds, device)
            except torch.OutOfMemoryError:
                print(f"{network}: {name}: not enough memory")
                continue
            found.setdefault(name, []).append(value * images / EPOCH)
            peaks[name] = torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None
    peers = {name: statistics.median(values) for name, values in found.items() if not name.startswith("weightscope")}
    rows = []
    for name, values in found.items():
        median = statistics.median(values)
        row: dict[str, Any] = {"row": f"{network}: {name}", "network_epochs_per_second": median, "rounds": values}
        row["peak_gib"] = peaks[name]
        if name not in peers:
            row["ratios"] = {peer: median / peers[peer] for peer in peers}
        if network == "convnext" and "bfloat16" in name:
            row["share_of_copying_speed"] = median * EPOCH * CONVNEXT_BYTES / copied
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one; repeat it")
    parser.add_argument("--tile", action="append", type=int, help="tiles to try; repeat it [64, 256, 1024]")
    parser.add_argument("--steps", type=int, default=32, help="steps between two looks at the clock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    device = resolve_device(options.device)
    copied = copying(device)
    about = environment(str(device)) | {"copy_bytes_per_second": copied, "rounds": options.rounds}
    print(f"copying: {copied / 1e9:.0f} GB/s read and written")
    rows = []
    for network in options.network or NETWORKS:
        tiles = options.tile or [64, 256, 1024]
        for row in measure(network, tiles, options.steps, options.rounds, options.seconds, device, copied):
            ratios = ", ".join(f"x{ratio:.1f} {peer}" for peer, ratio in row.get("ratios", {}).items())
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:5.1f} GiB"
            print(f"{row['row']:<54} {row['network_epochs_per_second']:10.4f} /s  {peak}  {ratios}", flush=True)
            rows.append(row)
        write(options.json, rows, **about)  # after each network: a run that is cut off keeps what it has


if __name__ == "__main__":
    main()
