"""Decide the two claims of thesis 3.4.3 from the sums of a population, and count how often the tests are wrong.

    python analyses/cifar_structure/run.py

Reads `cifar10-convnext-16px.sums.npz`, which `analyses/gpu_populations/collect.py` goes on with, and writes
`results.json`.
"""

import argparse
import json
import math
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtr, stdtrit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "gpu_populations"))

from collect import Scatter, Sums  # noqa: E402 - beside this folder

from weightscope._util.environment import environment  # noqa: E402
from weightscope.networks import build_for  # noqa: E402
from weightscope.recipe import Recipe  # noqa: E402
from weightscope.statistics.exchangeable import ExchangeableMoments, unbiased  # noqa: E402

NAME, LAST = "cifar10-convnext-16px", 4096
LEVELS = {"first": 0.005, "last": 0.02}  # of each of the two claims, at each look
PLANTED = (-0.035, -0.016)
FEATURES = ("f", "|f|", "d", "|d|", "f^2", "d^2", "f d", "f |d|", "|f| |d|")
KINDS = {  # what is correlated: both factors, and their product
    "central pixel and |diag(W2 W1)|": ("f", "|d|", "f |d|"),
    "central pixel and diag(W2 W1)": ("f", "d", "f d"),
    "|central pixel| and |diag(W2 W1)|": ("|f|", "|d|", "|f| |d|"),
}
MAGNITUDE = next(iter(KINDS))


def interval(r: float, error: float, n: int, level: float) -> dict[str, Any]:
    """On Fisher's scale, with Student's n - 1 degrees of freedom."""
    centre, step = math.atanh(r), error / (1 - r**2)
    half = -float(stdtrit(n - 1, level / 2)) * step
    p = 2 * float(stdtr(n - 1, -abs(centre) / step))
    return {"correlation": r, "error": error, "ci": [math.tanh(centre - half), math.tanh(centre + half)], "p": p}


def of_filters(found: Scatter, channels: int, kind: str, blocks: list[int], level: float) -> dict[str, Any]:
    """The correlation of two properties of channels, over networks, blocks and channels.

        r = A / sqrt(B C),  A, B, C the sums of products about the means of each block, over all networks
        psi_k = a_k / sqrt(B C) - (r / 2) (b_k / B + c_k / C),   error^2 = N / (N - 1) sum of psi_k^2

    a_k, b_k and c_k of a network are linear in its sums over channels once the means are known, so that the mean and
    the covariance of these sums are enough.
    """
    n = found.n
    one, other, product = KINDS[kind]
    squares = {"f": "f^2", "|f|": "f^2", "d": "d^2", "|d|": "d^2"}
    rows = {"a": np.zeros(len(found.mean)), "b": np.zeros(len(found.mean)), "c": np.zeros(len(found.mean))}
    constant = dict.fromkeys(rows, 0.0)
    for block in blocks:
        at = {name: len(FEATURES) * block + i for i, name in enumerate(FEATURES)}
        x, y = (found.mean[at[name]] / channels for name in (one, other))
        for row, u, v, square, mu, mv in (
            ("a", one, other, product, x, y),
            ("b", one, one, squares[one], x, x),
            ("c", other, other, squares[other], y, y),
        ):
            rows[row][at[square]] += 1
            rows[row][at[u]] -= mv
            rows[row][at[v]] -= mu
            constant[row] += channels * mu * mv
    a, b, c = (n * (rows[row] @ found.mean + constant[row]) for row in "abc")
    r = a / math.sqrt(b * c)
    weights = rows["a"] / math.sqrt(b * c) - r / 2 * (rows["b"] / b + rows["c"] / c)
    return interval(r, math.sqrt(n / (n - 1) * weights @ found.products @ weights), n, level)


def of_layers(moments: ExchangeableMoments, one: int, other: int, level: float) -> dict[str, Any]:
    """The correlation over channels of the row means of fc2 in two blocks, the mean of that in each network."""
    names = [f"stages.0.blocks.{block}.mlp.fc2.weight" for block in (one, other)]
    for found in moments.covariances():
        if len(found.kind.groups) == 1 and set(names) <= found.kind.slices.keys():
            i, j = (found.kind.slices[name].start for name in names)
            assert found.own is not None
            row = interval(*(float(value) for value in found.own[:, i, j]), found.networks, level)
            mean, ends = row["correlation"], row["ci"]
            r, *ends = (unbiased(value, found.kind.dimension) for value in (mean, *ends))
            return row | {"correlation": r, "ci": ends}
    raise AssertionError(names)


def verdict(row: dict[str, Any], least: float) -> str:
    """As DESIGN.md says."""
    if row["ci"][1] < 0:
        return "holds"
    return "refuted" if row["ci"][0] > least else "undecided"


def errors(recipe: Recipe, n: int, populations: int, level: float) -> list[dict[str, Any]]:
    """How often untouched networks, and those with planted correlations, are called anticorrelated."""
    out = []
    for planted in ((0.0, 0.0), PLANTED):
        called = np.zeros(2)
        for k in range(populations):
            torch.manual_seed(k)
            sums = Sums("none", recipe, Path("none"), sums_only=True)
            rows = [torch.cat([p.detach().flatten() for p in build_for(recipe).parameters()]) for _ in range(n)]
            weights = torch.stack(rows).double().numpy()
            plant(sums.spec.unpack(weights), *planted)
            sums.add(weights, np.zeros(n), np.zeros(n, bool))
            width, depth = recipe.network.width, recipe.network.depth
            found = (
                of_layers(sums.moments, 0, depth - 1, level),
                of_filters(sums.filters, width, MAGNITUDE, list(range(depth)), level),
            )
            called += [row["ci"][1] < 0 for row in found]
        out.append({"planted": list(planted), "n": n, "populations": populations, "called": list(called / populations)})
    return out


def plant(tensors: dict[str, np.ndarray], of_rows: float, of_pixels: float) -> None:
    """Correlate row means of fc2 of the last block with those of the first, and central pixels with |diag(W2 W1)|."""
    blocks = [name.removesuffix("conv_dw.weight") for name in tensors if name.endswith("conv_dw.weight")]
    first, last = (tensors[f"{block}mlp.fc2.weight"] for block in (blocks[0], blocks[-1]))
    mean, other = first.mean(2), last.mean(2)
    last += (of_rows * mean / mean.std() * other.std() + ((1 - of_rows**2) ** 0.5 - 1) * other)[:, :, None]
    for block in blocks:
        filters = tensors[f"{block}conv_dw.weight"]
        d = np.abs(np.einsum("nij,nji->ni", tensors[f"{block}mlp.fc2.weight"], tensors[f"{block}mlp.fc1.weight"]))
        pixel = filters[:, :, 0, filters.shape[-2] // 2, filters.shape[-1] // 2]
        pixel += of_pixels * (d - d.mean()) / d.std() * pixel.std() + ((1 - of_pixels**2) ** 0.5 - 1) * pixel


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default=f"{HERE.parents[1]}/populations/{NAME}.toml")
    parser.add_argument("--sums", type=Path, default=HERE)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--populations", type=int, default=40)
    options = parser.parse_args(arguments)
    recipe = Recipe.load(options.recipe)
    sums = Sums(Path(options.recipe).stem, recipe, options.sums, sums_only=True)
    n, width, depth = sums.moments.n, recipe.network.width, recipe.network.depth
    look = "first" if sums.networks < LAST else "last"
    level, every = LEVELS[look], list(range(depth))
    claims = [
        {"claim": "W2 of the last and first block", "least": -0.02} | of_layers(sums.moments, 0, depth - 1, level),
        {"claim": MAGNITUDE, "least": -0.01} | of_filters(sums.filters, width, MAGNITUDE, every, level),
    ]
    pointwise = [
        {"what": f"W2 of blocks {i} and {j}"} | of_layers(sums.moments, i, j, 0.05) for i, j in combinations(every, 2)
    ]
    for kind in KINDS:
        places = [("all blocks", every), *((f"block {block}", [block]) for block in every)]
        pointwise += [{"what": f"{kind}, {w}"} | of_filters(sums.filters, width, kind, b, 0.05) for w, b in places]
    result = {
        "networks": n,
        "excluded": sums.moments.excluded,
        "test_accuracy": float(np.nanmean(sums.accuracy)),
        "look": look,
        "level": level,
        "claims": [row | {"verdict": verdict(row, row["least"])} for row in claims],
        "pointwise": pointwise,
        "wrong": errors(recipe, n, options.populations, level),
        "environment": environment(),
    }
    (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    for row in main()["claims"]:
        print(row["claim"], row["verdict"], row["correlation"], row["ci"], row["p"])
