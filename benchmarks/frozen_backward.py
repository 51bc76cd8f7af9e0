"""Time of a ConvMixer's passes with trained and with frozen filters, against the kernel size (thesis Fig. 3.2).

    python benchmarks/frozen_backward.py --json benchmarks/results/frozen_backward.json

Frozen filters need no gradient of their own; the gradient of their input remains. On a CPU, torch computes the
gradients of a convolution's filters and bias in one call, so that nothing is saved while biases are trained: a third
arm freezes them, too. One network in plain PyTorch, as in the thesis; steps of the arms alternate, so that a busy
machine slows all. Medians over rounds of the forward and the backward pass: time of the processor in one thread on a
CPU, wall time on a GPU (`--device cuda`).
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import write

from weightscope.anatomy import depthwise
from weightscope.networks import ConvMixer

ARMS = {"trained": (), "frozen": ("weight",), "frozen_biases": ("weight", "bias")}  # what is frozen


def step(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward pass."""
    wait = torch.cuda.synchronize if images.is_cuda else lambda: None
    clock = time.perf_counter if images.is_cuda else time.process_time
    network.zero_grad(set_to_none=True)
    wait()
    start = clock()
    loss = F.cross_entropy(network(images), labels)
    wait()
    middle = clock()
    loss.backward()
    wait()
    return middle - start, clock() - middle


def measure(kernel: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: medians of each arm at a kernel size."""
    torch.manual_seed(0)
    networks = {}
    for arm, frozen in ARMS.items():
        networks[arm] = ConvMixer(options.width, options.depth, kernel, options.patch, 10).to(options.device)
        for part in depthwise(networks[arm]):
            layer = networks[arm].get_submodule(part.parameters[0].rpartition(".")[0])
            for name in frozen:
                layer.get_parameter(name).requires_grad_(False)
    images = torch.randn(options.batch, 3, 32, 32, device=options.device)
    labels = torch.randint(10, (options.batch,), device=options.device)
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in networks}
    for _ in range(options.rounds + 1):
        for arm, network in networks.items():
            times[arm].append(step(network, images, labels))
    row: dict[str, Any] = {"kernel_size": kernel}
    for arm, found in times.items():
        for place, name in enumerate(("forward", "backward")):
            row[f"{arm}_{name}_s"] = statistics.median(pair[place] for pair in found[1:])  # the first warms up
    for arm in list(ARMS)[1:]:
        row[f"{arm}_backward_ratio"] = row["trained_backward_s"] / row[f"{arm}_backward_s"]
    return row


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=int, nargs="+", default=[3, 5, 7, 9, 15])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measure(kernel, options) for kernel in options.kernels]
    for row in rows:
        ratios = (
            "x{frozen_backward_ratio:.2f} with frozen filters, x{frozen_biases_backward_ratio:.2f} with biases, too"
        )
        print(f"k = {row['kernel_size']:2d}: backward {row['trained_backward_s']:.3f} s,", ratios.format(**row))
    about = {key: value for key, value in vars(options).items() if key not in ("json", "kernels")}
    write(options.json, rows, **about)
    return rows


if __name__ == "__main__":
    main()
