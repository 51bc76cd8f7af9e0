"""Training populations on a GPU: network-epochs per second, against loops over networks and plain `torch.func`.

    python benchmarks/population_gpu.py --minutes 7 --json benchmarks/results/population_gpu.json

The population's ConvNeXt, a ViT of 64 tokens, a ConvMixer-32/4, and one large ConvMixer-256/8 alone, on images of
CIFAR-10's size. A network-epoch is 50,000 images. Peers: a loop over networks, eager and compiled with CUDA graphs, and
vmap, in float32 and in bfloat16. A row is made once, which compiles it, compared with torch's operations in float64
where kernels are compiled, and timed `--rounds` times; the device is waited for before the clock is read. The rows that
matter most come first: ConvNeXt and ViT in bfloat16 beside their loops, then tile by tile, then the others.

Each row is written when it is there. What fails is a row with its error, and the next is tried, in a new process if the
device does not answer any more. A run goes on where the file stops. The copying speed of the device is reported, too,
and for the ConvNeXt the share of it that the step would need if it moved only what it must (`CONVNEXT_BYTES`).
`--device cpu` runs the same, to try the script; compiled kernels in bfloat16 are left out there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from population import batched, loop, random_images, vmapped
from reporting import save

from weightscope._util.environment import environment
from weightscope.recipe import Recipe
from weightscope.training.devices import resolve_device
from weightscope.training.network_check import choose_kernels

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

Make = Callable[..., Callable[[], int]]
Contender = tuple[Make, int, dict[str, Any]]  # with its tile and its options


def recipe_of(network: str, tile: int, **training: str) -> Recipe:
    return Recipe.parse(
        {
            "network": NETWORKS[network],
            "data": {"name": "cifar10"},
            "training": {"epochs": 1000, "batch_size": batch_of(network)} | training,
            "population": {"tile": tile},
        }
    )


def batch_of(network: str) -> int:
    return 512 if network in ALONE else 64


def plan(networks: list[str], tiles: list[int], cuda: bool) -> dict[str, Contender]:
    """Name of each row -> what makes its work, the most important first."""
    stages: list[dict[str, Contender]] = [{}, {}, {}]

    def add(stage: int, network: str, name: str, make: Make, tile: int = 1, **options: Any) -> None:
        stages[stage][f"{network}: {name}"] = make, tile, options

    for network in networks:
        first, *others = [1] if network in ALONE else tiles
        early = network in ("convnext", "vit")
        for tile in (first, *others):
            stage = (0 if tile == first else 1) if early else 2
            if cuda:
                name = f"weightscope compiled, tile {tile}, bfloat16"
                add(stage, network, name, batched, tile, kernels="compiled", precision="bfloat16")
            if tile == first:
                add(stage, network, "eager loop, bfloat16", loop, bfloat16=True)
        stage = 1 if early else 2
        if cuda:
            add(stage, network, "compiled loop, bfloat16", loop, bfloat16=True, compiled="reduce-overhead")
        add(stage, network, "eager loop, float32", loop)
        add(stage, network, f"weightscope compiled, tile {first}, float32", batched, first, kernels="compiled")
        add(2, network, f"weightscope torch, tile {first}, float32", batched, first, kernels="torch")
        if network not in ALONE:
            add(2, network, f"vmap, tile {first}, bfloat16", vmapped, first, bfloat16=True)
            add(2, network, f"vmap, tile {first}, float32", vmapped, first)
        if cuda:
            add(2, network, "compiled loop, float32", loop, compiled="reduce-overhead")
    return {name: contender for stage in stages for name, contender in stage.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(work: Callable[[], int], seconds: float, device: torch.device) -> float:
    """Network-steps per second."""
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


def measured(name: str, contender: Contender, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """A row: made once, timed several times."""
    network = name.split(": ")[0]
    make, tile, given = contender
    torch._dynamo.reset()  # or the shapes of other rows make this one's dynamic
    start = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    row: dict[str, Any] = {"row": name}
    if make is batched:
        row["compared in float64"] = choose_kernels(recipe_of(network, tile, **given), device).comparison
    work = make(recipe_of(network, tile), random_images(options.steps * batch_of(network)), device, **given)
    work()
    work()  # a CUDA graph is recorded in the second call
    wait(device)
    row["seconds until it runs"] = time.perf_counter() - start
    images = batch_of(network)
    row["rounds"] = [rate(work, options.seconds, device) * images / EPOCH for _ in range(options.rounds)]
    row["network_epochs_per_second"] = statistics.median(row["rounds"])
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return row


def compared(rows: list[dict[str, Any]], copied: float) -> list[dict[str, Any]]:
    """The rows, ours with ratios to every peer that there is."""
    rates = {row["row"]: row["network_epochs_per_second"] for row in rows if "rounds" in row}
    for row in rows:
        network, name = row["row"].split(": ", 1)
        if not name.startswith("weightscope") or "rounds" not in row:
            continue
        mine = rates[row["row"]]
        peers = [p for p in rates if p.startswith(f"{network}: ") and "weightscope" not in p]
        row["ratios"] = {p.split(": ", 1)[1]: mine / rates[p] for p in peers}
        if network == "convnext" and "bfloat16" in name:
            row["share_of_copying_speed"] = mine * EPOCH * CONVNEXT_BYTES / copied
    return rows


def stored(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(options: argparse.Namespace, until: float) -> None:
    """The rows that are not in the file, until the time is over."""
    device = resolve_device(options.device)
    copied = copying(device)
    about = environment(str(device)) | {"copy_bytes_per_second": copied}
    rows = stored(options.json)
    done = {row["row"] for row in rows}
    for name, contender in plan(options.network or list(NETWORKS), options.tile, device.type == "cuda").items():
        if name in done:
            continue
        if time.time() > until:
            return
        options.json.with_suffix(".now").write_text(name)
        try:
            row = measured(name, contender, device, options)
        except Exception as error:  # noqa: BLE001 - a row that fails must not cost the others
            row = {"row": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        rows.append(row)
        save(options.json, compared(rows, copied), **about)
        value, peak = row.get("network_epochs_per_second"), row.get("peak_gib")
        ratios = ", ".join(f"x{ratio:.1f} {peer}" for peer, ratio in row.get("ratios", {}).items())
        text = row["error"] if value is None else f"{value:10.4f} /s"
        print(f"{name:<54} {text}  {'' if peak is None else f'{peak:5.1f} GiB'}  {ratios}", flush=True)
        wait(device)  # a device that does not answer any more ends this process; the next begins anew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="only this one; repeat it")
    parser.add_argument("--tile", action="append", type=int, help="tiles, the most important first [256, 1024, 64]")
    parser.add_argument("--steps", type=int, default=32, help="steps between two looks at the clock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tile = options.tile or [256, 1024, 64]
    if options.until is not None:
        measure(options, options.until)
        return
    until, now = time.time() + 60 * options.minutes, options.json.with_suffix(".now")
    status = 1
    while status and time.time() < until:
        now.unlink(missing_ok=True)
        command = [sys.executable, *sys.argv, "--until", str(until)]
        try:
            status = subprocess.run(command, timeout=until - time.time() + 5).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if not status:
            break
        if not now.exists():
            raise SystemExit(status)  # it did not come to the first row
        name, rows = now.read_text(), stored(options.json)
        if name not in {row["row"] for row in rows}:
            rows.append({"row": name, "error": "the time was over" if status < 0 else f"ended with status {status}"})
            save(options.json, rows, device=options.device)
    now.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
