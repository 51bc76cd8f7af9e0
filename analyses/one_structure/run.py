"""Are the published schemes entries of one covariance, and does an initialiser drawn from it beat them and scale alone?

    python analyses/one_structure/run.py collect --work one-structure
    python analyses/one_structure/run.py table --work one-structure
    python analyses/one_structure/run.py bench --work one-structure --workers 2

`collect` trains a population of each architecture on the digits, `table` writes `table.json` (the entries that the
published schemes are), `bench` fits initialisers, chooses their gain on seeds and images apart, and writes
`results.json`. All can be interrupted and resume.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import weightscope
from weightscope._util.environment import environment
from weightscope.analysis.across_networks import ExchangeableCovariance, exchangeable_covariance
from weightscope.benchmarking import bench
from weightscope.benchmarking.statistics import summarise
from weightscope.fitting.population import fit
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
POPULATION_SEED, BENCH_SEED = 0, 2_000_000  # the gain is chosen on further seeds of its own, see `fitting.gain`
TESTED_ON = ("short", "long", "other data", "other width")


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        recipe: of the population.
        select: the tensors of the blocks, which the initialisers set.
        hand_made: published initialisers of such networks.
        short: epochs of a short training on the digits.
        long: epochs of a long one.
        patch: patch size on Fashion-MNIST (28 x 28 pixels).
        networks: in the population.
    """

    recipe: Path
    select: str
    hand_made: tuple[str, ...]
    short: int
    long: int
    patch: int
    networks: int

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Changes of the recipe under which initialisers are compared."""
        fashion = {"data.name": "fashion-mnist", "data.train": 3000, "data.test": 2000, "network.patch_size": self.patch}
        width = Recipe.load(self.recipe).network.parameters["width"]
        return {
            "short": {"training.epochs": self.short},
            "long": {"training.epochs": self.long},
            "other data": {"training.epochs": 2, **fashion},
            "other width": {"training.epochs": self.short, "network.width": 2 * width},
        }


CASES = {
    "convnext": Case(
        ROOT / "weightscope/demo/demo.toml", "stages.*", ("mimetic_mlp", "conv_covariance"), 3, 12, 4, 256
    ),
    "vit": Case(
        ROOT / "populations/digits-vit.toml",
        "blocks.*",
        ("mimetic_attention", "mimetic_mlp", "mimetic_attention+mimetic_mlp"),
        4,
        16,
        4,
        128,
    ),
    "convmixer": Case(
        ROOT / "populations/digits-convmixer.toml", "blocks.*.weight,blocks.*.bias", ("conv_covariance",), 3, 12, 4, 128
    ),
}



def entries(architecture: str, depth: int) -> Iterator[tuple[str, str, str, int]]:
    """Published schemes, and what crosses layers, as pairs of tensors: (scheme, a, b, axes that are not averaged)."""
    for i in range(depth):
        block = f"stages.0.blocks.{i}." if architecture == "convnext" else f"blocks.{i}."
        if architecture != "convmixer":
            yield "fc1 and fc2, one unit and channel", f"{block}mlp.fc1.weight", f"{block}mlp.fc2.weight", 2
        if architecture == "vit":
            yield "query and key, one unit and channel", f"{block}attn.qkv.weight[q]", f"{block}attn.qkv.weight[k]", 2
            yield "value and output, one unit and channel", f"{block}attn.qkv.weight[v]", f"{block}attn.proj.weight", 2
            yield "norm2 bias and fc1 column means", f"{block}norm2.bias", f"{block}mlp.fc1.weight", 1
        if architecture == "convnext":
            yield "norm bias and fc1 column means", f"{block}norm.bias", f"{block}mlp.fc1.weight", 1
            yield "filter bias and fc1 column means", f"{block}conv_dw.bias", f"{block}mlp.fc1.weight", 1
            yield "across layers: stem bias and fc2 row means", "stem.0.bias", f"{block}mlp.fc2.weight", 1
        for j in range(i if architecture != "convmixer" else 0):
            a, b = (f"{block.replace(f'{i}.', f'{k}.')}mlp.fc2.weight" for k in (j, i))
            yield "across layers: fc2 row means of two blocks", a, b, 1
    if architecture == "convnext":
        yield "across layers: stem and head norm weights", "stem.1.weight", "head.norm.weight", 1


def table(population: Population, architecture: str) -> list[dict[str, Any]]:
    """The schemes as entries of the exchangeable covariance, each with its size and 95 % interval over networks."""
    pairs = {(frozenset((p.a, p.b)), len(p.groups)): p for p in exchangeable_covariance(population).pairs()}
    rows: list[dict[str, Any]] = []
    for scheme, a, b, axes in entries(architecture, population.recipe.network.depth):
        pair = pairs[frozenset((a, b)), axes]
        size = {"value": pair.correlation, "ci95": list(pair.ci95), "z": float(pair.z), "p": pair.p}
        rows.append({"scheme": scheme, "what": "correlation", "a": a, "b": b, "groups": list(pair.groups)} | size)
    for tensor in population.spec.tensors:
        shape = tensor.shape
        if len(shape) == 4 and shape[1] == 1 and shape[-1] > 1 and "stem" not in tensor.name:
            rows.append(_neighbours(_weights(population, tensor.name)) | {"a": tensor.name})
        elif tensor.name.endswith(("fc1.weight", "fc2.weight")) or (len(shape) == 4 and "blocks" in tensor.name):
            matrices = _weights(population, tensor.name).reshape(len(population), *shape[:2])
            rows += [_means(matrices, axis) | {"a": tensor.name} for axis in (1, 2)]
    return rows


def _weights(population: Population, name: str) -> np.ndarray:
    """One tensor of all networks, (N, *shape), less its mean over networks."""
    weights = population.weights(name).reshape(len(population), *population.spec[name].shape).astype(np.float64)
    return weights - weights.mean(0)


def _means(matrices: np.ndarray, axis: int) -> dict[str, Any]:
    """Variance of column or row means, relative to that of independent entries: n mean(means^2) / mean(entries^2)."""
    above = matrices.shape[axis] * np.square(matrices.mean(axis)).mean(1)
    kind = "column" if axis == 1 else "row"
    return {"scheme": f"stripes: {kind} means", "what": "variance ratio"} | _ratio(
        above, np.square(matrices).mean((1, 2))
    )


def _neighbours(filters: np.ndarray) -> dict[str, Any]:
    """Correlation of neighbouring positions of depthwise filters (N, channels, 1, k, k)."""
    w = filters[:, :, 0]
    above = (w[..., 1:, :] * w[..., :-1, :]).mean((1, 2, 3)) + (w[..., 1:] * w[..., :-1]).mean((1, 2, 3))
    row = {"scheme": "filters: neighbouring positions", "what": "correlation"}
    return row | _ratio(above, 2 * np.square(w).mean((1, 2, 3)))


def _ratio(above: np.ndarray, below: np.ndarray) -> dict[str, Any]:
    """sum(above) / sum(below) over networks, with a 95 % interval by the jackknife."""
    n = len(above)
    value = above.sum() / below.sum()
    left_out = (above.sum() - above) / (below.sum() - below)
    error = float(np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum()))
    return {"value": float(value), "ci95": [float(value - 1.96 * error), float(value + 1.96 * error)]}
