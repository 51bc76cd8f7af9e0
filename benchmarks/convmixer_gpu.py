"""One ConvMixer-256/8 on CIFAR-10, alone on a GPU: seconds for an epoch and final accuracy, against a plain loop.

    python benchmarks/convmixer_gpu.py --data-root DIR --json benchmarks/results/convmixer_gpu.json

Ours is a tile of one network with compiled kernels; the peer is the same recipe in plain PyTorch (`plain.py`, eager,
float32), from the same seeds with the same batches in the same order. They alternate, seed by seed. Accuracies are
compared by a paired t test. The first epoch of each, in which kernels are compiled, is left out of the times.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from plain import train_alone
from reporting import write
from scipy import stats

from weightscope._util.environment import environment
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.recipe import Recipe
from weightscope.training.devices import resolve_device
from weightscope.training.engine import TileRun
from weightscope.training.network_check import choose_kernels


def recipe_of(data: str, width: int, depth: int, epochs: int, precision: str) -> Recipe:
    kernels = {"kernels": "compiled", "precision": precision}
    return Recipe.parse(
        {
            "network": {"type": "convmixer", "width": width, "depth": depth, "kernel_size": 9, "patch_size": 2},
            "data": {"name": data},
            "training": {"epochs": epochs, "batch_size": 512, "evaluate": "end"} | kernels,
            "population": {"tile": 1},
        }
    )


def ours(recipe: Recipe, k: int, data: Any, device: torch.device) -> tuple[list[float], float]:
    """Seconds of each epoch, and the test accuracy, of network k."""
    run, seconds = TileRun(recipe, k, data, device, choose_kernels(recipe, device).kernels), []
    for epoch in range(recipe.training.epochs):
        start = time.perf_counter()
        run.epoch(epoch)
        seconds.append(time.perf_counter() - start)
    return seconds, float(run.evaluate()["test_accuracy"][0])


def loop(recipe: Recipe, k: int, data: Any, device: torch.device) -> tuple[list[float], float]:
    """The same of the plain loop; an epoch's numbers come to the host at its end, so its time is whole."""
    seconds: list[float] = []
    start = time.perf_counter()

    def ended() -> None:
        nonlocal start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()

    network = train_alone(recipe, k, str(device), data=data, after_epoch=ended).eval()
    there = data.to(device)
    with torch.no_grad():
        parts = zip(there.test_images.split(500), there.test_labels.split(500), strict=True)
        right = sum(
            int((network(normalise(images, there.mean, there.std)).argmax(1) == labels).sum())
            for images, labels in parts
        )
    return seconds, right / len(data.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--train", type=int, help="only so many images")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    device = resolve_device(options.device)
    data = load(options.data, options.data_root, train=options.train)
    recipe = recipe_of(options.data, options.width, options.depth, options.epochs, options.precision)
    found: dict[str, list[tuple[list[float], float]]] = {"ours": [], "loop": []}
    for k in range(options.seeds):
        found["ours"].append(ours(recipe, k, data, device))
        found["loop"].append(loop(recipe, k, data, device))
    seconds = {name: statistics.median(s for runs in rows for s in runs[0][1:]) for name, rows in found.items()}
    accuracy = {name: [row[1] for row in rows] for name, rows in found.items()}
    paired = stats.ttest_rel(accuracy["ours"], accuracy["loop"])
    row = {
        "row": f"ConvMixer-{options.width}/{options.depth}, {options.data}, {options.precision}",
        "ours": seconds["ours"],
        "peer": seconds["loop"],
        "unit": "seconds for an epoch",
        "ratio": seconds["loop"] / seconds["ours"],
        "accuracy": accuracy,
        "accuracy_difference_ci95": list(paired.confidence_interval(0.95)),
        "p": float(paired.pvalue),
    }
    print(f"{row['row']}: {row['ours']:.3f} s for an epoch against {row['peer']:.3f}, x{row['ratio']:.1f}")
    low, high = (100 * value for value in row["accuracy_difference_ci95"])
    print(f"accuracy against the loop's {low:+.2f} to {high:+.2f} points (95 %), p = {row['p']:.2g}")
    write(options.json, [row], **environment(str(device)), epochs=options.epochs, seeds=options.seeds)


if __name__ == "__main__":
    main()
