"""Training populations on a GPU: network-epochs per second, against the eager loop and plain `torch.func`.

    python benchmarks/population_gpu.py --json benchmarks/results/population_gpu.json

Three networks on images of CIFAR-10's size: the population's ConvNeXt, a ViT of 64 tokens, a ConvMixer. A
network-epoch is 50,000 images. All contenders run in one process, in turns for several rounds; the device is waited
for before the clock is read. Beside them stands the copying speed of the device, the bound of what memory allows.
`--device cpu` runs the same, to try the script.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from population import BATCH, IMAGES, loop, random_images, stacked, vmapped
from reporting import write

from weightscope.environment import environment
from weightscope.recipe import Recipe
from weightscope.train.engine import resolve_device

EPOCH = 50_000  # images
NETWORKS = {
    "convnext": {"type": "convnext", "width": 16, "depth": 4, "patch_size": 2, "expansion": 2},
    "vit": {"type": "vit", "width": 32, "depth": 4, "heads": 2, "patch_size": 4},
    "convmixer": {"type": "convmixer", "width": 32, "depth": 4, "kernel_size": 7, "patch_size": 2},
}


def recipe_of(network: str, tile: int, precision: str) -> Recipe:
    return Recipe.parse(
        {
            "network": NETWORKS[network],
            "data": {"name": "cifar10"},
            "training": {"epochs": 1000, "batch_size": BATCH, "precision": precision},
            "population": {"tile": tile},
        }
    )


def contenders(network: str, tiles: list[int], device: torch.device) -> dict[str, Callable[[], Callable[[], int]]]:
    """Name -> what makes the work; nothing is allocated before."""
    data = random_images(IMAGES)
    out: dict[str, Callable[[], Callable[[], int]]] = {}
    for tile in tiles:
        for precision in ("float32", "bfloat16"):
            recipe = recipe_of(network, tile, precision)
            out[f"weightscope, tile {tile}, {precision}"] = lambda recipe=recipe: stacked(recipe, data, device)
    recipe = recipe_of(network, max(tiles), "float32")
    out["eager loop, float32"] = lambda: loop(recipe, data, device)
    out[f"vmap, tile {max(tiles)}, float32"] = lambda: vmapped(recipe, data, device)
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


def measure(network: str, tiles: list[int], rounds: int, seconds: float, device: torch.device) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    peaks: dict[str, float | None] = {}
    for _ in range(rounds):
        for name, make in contenders(network, tiles, device).items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            try:
                steps = rate(make(), seconds, device)
            except torch.OutOfMemoryError:
                print(f"{network}: {name}: not enough memory")
                continue
            found.setdefault(name, []).append(steps * BATCH / EPOCH)
            peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    peers = {name: statistics.median(values) for name, values in found.items() if not name.startswith("weightscope")}
    rows = []
    for name, values in found.items():
        row = {"row": f"{network}: {name}", "network_epochs_per_second": statistics.median(values), "rounds": values}
        row |= {"peak_gib": peaks[name]}
        if name not in peers:
            row["ratios"] = {peer: row["network_epochs_per_second"] / peers[peer] for peer in peers}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one; repeat it")
    parser.add_argument("--tile", action="append", type=int, help="tiles to try; repeat it [64, 256, 1024]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    device = resolve_device(options.device)
    about = environment(str(device)) | {"copy_bytes_per_second": copying(device), "rounds": options.rounds}
    print(f"copying: {about['copy_bytes_per_second'] / 1e9:.0f} GB/s read and written")
    rows = []
    for network in options.network or NETWORKS:
        for row in measure(network, options.tile or [64, 256, 1024], options.rounds, options.seconds, device):
            ratios = ", ".join(f"x{ratio:.1f} {peer.split(',')[0]}" for peer, ratio in row.get("ratios", {}).items())
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:5.1f} GiB"
            print(f"{row['row']:<44} {row['network_epochs_per_second']:10.4f} /s  {peak}  {ratios}", flush=True)
            rows.append(row)
        write(options.json, rows, **about)  # after each network: a run that is cut off keeps what it has


if __name__ == "__main__":
    main()
