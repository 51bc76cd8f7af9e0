"""Scans of Mamba and Mamba-2, forward and backward, against loops over time and transformers' own; and populations.

Seconds of processor time in one thread, medians of rounds in which all take turns. A population's tile of 32 small
Mambas is compared with a plain loop over the networks and with one whose network is compiled. Two processes halve the
time of either, those of the plain loop and the workers of `collect`, so their ratio is that of one.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from plain import train_sequences_alone
from reporting import write
from torch import Tensor

from weightscope import networks
from weightscope.data import load
from weightscope.networks.sequences import TokenEmbedding, block_scan, selective_scan
from weightscope.recipe import Recipe
from weightscope.training.engine import TileRun
from weightscope.training.kernels.functions import Kernels

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import references_sequences as loops

NETWORKS_OF_LOOP = 3

Contenders = dict[str, Callable[..., Tensor]]


def theirs(version: int) -> Callable[..., Tensor] | None:
    """The scan that transformers runs on a CPU; None where transformers is not installed."""
    try:
        import shims

        shims._torchvision()
        from transformers.models.mamba import modeling_mamba
        from transformers.models.mamba2 import modeling_mamba2
    except ImportError:
        return None
    if version == 1:

        def scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            channels_first = (value.transpose(1, 2) for value in (x, delta, b, c))
            x, delta, b, c = channels_first
            return modeling_mamba.mamba_selective_scan(x, delta, a, b, c).transpose(1, 2)

        return scan
    return lambda x, delta, a, b, c: modeling_mamba2.mamba2_chunk_scan(x, delta, a, b, c, chunk_size=64)


def inputs(version: int, batch: int, tokens: int, channels: int, states: int) -> list[Tensor]:
    if version == 1:
        shapes = [
            (batch, tokens, channels),
            (batch, tokens, channels),
            (batch, tokens, states),
            (batch, tokens, states),
        ]
        rates = -torch.arange(1.0, states + 1).repeat(channels, 1)
    else:
        heads = channels // 16
        shapes = [(batch, tokens, heads, 16), (batch, tokens, heads), *[(batch, tokens, 1, states)] * 2]
        rates = -torch.arange(1.0, heads + 1)
    x, delta, b, c = (torch.randn(shape) for shape in shapes)
    return [value.requires_grad_() for value in (x, delta.abs() / 10, rates, b, c)]


def seconds(scan: Callable[..., Tensor], values: list[Tensor]) -> float:
    start = time.process_time()
    torch.autograd.grad(scan(*values).sum(), values)
    return time.process_time() - start


def compared(version: int, size: tuple[int, int, int, int], rounds: int) -> list[dict]:
    ours, loop = ((selective_scan, loops.selective_scan), (block_scan, loops.heads_scan))[version - 1]
    contenders: Contenders = {"ours": ours, "a loop over time": loop}
    if (peer := theirs(version)) is not None:
        contenders["transformers"] = peer
    values = inputs(version, *size)
    for scan in contenders.values():
        seconds(scan, values)
    turns = [{name: seconds(scan, values) for name, scan in contenders.items()} for _ in range(rounds)]
    rows = []
    for name in list(contenders)[1:]:
        ratios = [turn[name] / turn["ours"] for turn in turns]
        batch, tokens, channels, states = size
        rows.append(
            {
                "row": f"Mamba-{version}, batch {batch}, {tokens} tokens, {channels} channels, {states} states: {name}",
                "ours": statistics.median(turn["ours"] for turn in turns),
                "peer": statistics.median(turn[name] for turn in turns),
                "unit": "seconds",
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
        )
        r = rows[-1]
        print(f"{r['row']:<85} {r['ours'] * 1e3:8.1f} ms {r['peer'] * 1e3:8.1f} ms  x{r['ratio']:.1f}")
    return rows


def stacked(recipe: Recipe, kernels: Kernels) -> Callable[[], int]:
    """One epoch of a tile; returns network-steps."""
    run = TileRun(recipe, 0, load(recipe.data), torch.device("cpu"), kernels)

    def work() -> int:
        run.epoch(0)
        return run.steps_per_epoch * len(run.ids)

    return work


def loop(recipe: Recipe, compiled: bool = False) -> Callable[[], int]:
    """One epoch of one network after the other, few of which tell the time of all.

    A compiled network is compiled once; the others' weights are written into it.
    """
    few = recipe.replace({"training.epochs": 1})
    network = networks.build_for(recipe) if compiled else None
    for layer in () if network is None else network.modules():
        if isinstance(layer, TokenEmbedding):
            layer.checks = False  # which would break its graph
    fast = None if network is None else torch.compile(network, dynamic=False)

    def work() -> int:
        for k in range(NETWORKS_OF_LOOP):
            train_sequences_alone(few, k, forward=lambda plain: plain if fast is None else fast, into=network)
        return NETWORKS_OF_LOOP * (few.data.train // few.training.batch_size)

    return work


def populations(rounds: int) -> list[dict]:
    recipe = Recipe.load("copying-mamba-small").replace({"population.tile": 32, "data.train": 40})
    contenders = {"ours": stacked(recipe, "c"), "with torch's kernels": stacked(recipe, "torch")}
    contenders["a plain loop"] = loop(recipe)
    if shutil.which("g++") or shutil.which("clang++"):  # which torch.compile needs
        contenders["a loop over compiled networks"] = loop(recipe, compiled=True)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, work in contenders.items():
            start = time.process_time()
            steps = work()
            found[name].append((time.process_time() - start) / steps)
    rows = []
    for name in list(contenders)[1:]:
        ratios = [theirs / ours for theirs, ours in zip(found[name][1:], found["ours"][1:], strict=True)]
        row = {
            "row": f"a step of one of 32 Mambas, width 32, 2 layers, batch 8, 16 tokens: {name}",
            "ours": statistics.median(found["ours"][1:]),
            "peer": statistics.median(found[name][1:]),
            "unit": "seconds",
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
        }
        rows.append(row)
        print(f"{row['row']:<85} {row['ours'] * 1e3:8.2f} ms {row['peer'] * 1e3:8.2f} ms  x{row['ratio']:.1f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--populations", action="store_true", help="only the populations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = populations(options.rounds)
    sizes = () if options.populations else ((1, 64, 16), (4, 64, 16), (8, 128, 16))
    for batch, channels, states in sizes:
        for version in (1, 2):
            rows += compared(version, (batch, options.tokens, channels, states), options.rounds)
    write(options.json, rows, rounds=options.rounds, threads=1)


if __name__ == "__main__":
    main()
