"""Which alpha and beta can the products of two d x k factors have, by how they are constructed?

python analyses/attention_frontier/run.py --out analyses/attention_frontier
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from weightscope import plots
from weightscope._util.environment import environment
from weightscope._util.results import text_table
from weightscope._util.threads import one_thread
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.init.attention import query_key, same_random
from weightscope.plots import theme

GRID = tuple(round(0.1 * i, 1) for i in range(11))


def frontier(width: int, head_width: int, grid: Sequence[float] = GRID, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each product: its construction, the alpha and beta asked for, and those reached.

    Equal random matrices, full-rank (k = d) and of the rank of a head, give a line: the ratio of alpha and beta is
    1 and sqrt(k / d). The best approximation of rank k to alpha Z + beta I gives an area.
    """
    generator = torch.Generator().manual_seed(seed)
    points: list[dict[str, Any]] = []
    with one_thread():
        for rank in dict.fromkeys((width, head_width)):
            for scale in (0.25, 0.5, 0.75, 1.0):
                points.append(point("equal random", *same_random(width, rank, scale, generator)))
            for alpha, beta in product(grid, grid):
                queries, keys = query_key(width, rank, 1, alpha, beta, generator)
                points.append(point("SVD", queries[0], keys, alpha, beta))
    return points


def point(
    name: str, left: Tensor, right: Tensor, alpha: float | None = None, beta: float | None = None
) -> dict[str, Any]:
    """The closest `alpha Z + beta I` to L R^T, and the alpha and beta that were asked for."""
    (d, rank), found = left.shape, FactoredProduct(left, right).statistics()
    kind = f"{name}, {f'rank {rank}' if rank < d else 'full rank'}"
    reached = {"alpha": float(found["alpha"]), "beta": float(found["diagonal_mean"])}
    return {"construction": kind, "rank": rank, "asked_alpha": alpha, "asked_beta": beta, **reached}


@theme.themed()
def draw(points: list[dict[str, Any]]) -> Axes:
    """Beta against alpha, for each construction; equal random matrices of one rank have one ratio, a line."""
    canvas, ax = theme.canvas(None, 5.6, 5.2)
    for order, name in enumerate(dict.fromkeys(row["construction"] for row in points)):
        rows = sorted((row["alpha"], row["beta"]) for row in points if row["construction"] == name)
        line = name.startswith("equal random")
        alpha, beta = zip(*[(0.0, 0.0)] * line, *rows, strict=True)
        style = theme.style(order, marker=None) if line else theme.style(order, ls="", ms=3.4, alpha=0.8)
        ax.plot(alpha, beta, label=name, zorder=2 + (not line), **style)
    ax.set_xlabel("alpha (noise)")
    ax.set_ylabel("beta (diagonal)")
    ax.grid(axis="both")
    ax.margins(0.04)
    canvas.legend(ax.get_legend_handles_labels()[0])
    return canvas.finish(None)


def table(points: list[dict[str, Any]]) -> str:
    """For each construction the ranges of alpha, beta and their ratio."""
    lines = []
    for name in dict.fromkeys(row["construction"] for row in points):
        mine = [row for row in points if row["construction"] == name]
        ratios = [row["beta"] / row["alpha"] for row in mine if row["alpha"] > 1e-6]
        ranges = ([row["alpha"] for row in mine], [row["beta"] for row in mine], ratios)
        lines.append([name, *(f"{min(values):.2f} to {max(values):.2f}" for values in ranges)])
    return text_table(("construction", "alpha", "beta", "beta / alpha"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    points = frontier(arguments.width, arguments.head_width)
    print(table(points))
    result = {"environment": environment(), "width": arguments.width, "points": points}
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    plots.save(plots.root_figure(draw(points)), arguments.out / "frontier.png")


if __name__ == "__main__":
    main()
