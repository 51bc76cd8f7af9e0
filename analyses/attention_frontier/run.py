"""Which alpha and beta can the products of two d x k factors have, by how they are constructed?

python analyses/attention_frontier/run.py --out analyses/attention_frontier
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weightscope import plots
from weightscope._util.environment import environment, single_threaded
from weightscope._util.results import text_table
from weightscope.init.attention import equal_random_points, svd_point

GRID = tuple(round(0.1 * i, 1) for i in range(11))


def frontier(width: int, head_width: int, grid: Sequence[float] = GRID, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each product: its construction, the alpha and beta asked for, and those reached.

    Equal random matrices, full-rank (k = d) and of the rank of a head, give a line: the ratio of alpha and beta is
    1 and sqrt(k / d). The best approximation of rank k to alpha Z + beta I gives an area.
    """
    generator = torch.Generator().manual_seed(seed)
    points: list[dict[str, Any]] = []
    with single_threaded():
        for rank in dict.fromkeys((width, head_width)):
            points += equal_random_points(width, rank, generator)
            points += [svd_point(width, rank, alpha, beta, generator) for alpha in grid for beta in grid]
    return points


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
    plots.save(plots.root_figure(plots.alpha_beta_frontier(points)), arguments.out / "frontier.png")


if __name__ == "__main__":
    main()
