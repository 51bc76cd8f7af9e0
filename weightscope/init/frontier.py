"""Which alpha and beta the products of attention weights can have, by how they are constructed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightscope._util.checks import count
from weightscope._util.results import Result
from weightscope._util.tables import text_table
from weightscope._util.threads import single_threaded
from weightscope.errors import UsageError
from weightscope.init.attention import noisy_identity, query_key, same_random

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

_GRID = tuple(round(0.1 * i, 1) for i in range(11))
_SCALES = (0.25, 0.5, 0.75, 1.0)  # of equal random matrices, whose ratio of alpha and beta does not depend on them


@dataclass(frozen=True, repr=False)
class AttentionFrontier(Result):
    """The alpha and beta of products made in different ways.

    Attributes:
        width: d.
        points: one row for each product: `construction` (such as "SVD, rank 64"), `rank`, the numbers that were asked
            for (`asked_alpha`, `asked_beta`; None for equal random matrices) and those reached, `alpha` and `beta`.
    """

    width: int
    points: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """The products."""
        return self.points

    def summary(self) -> str:
        """The width and the numbers of constructions and products."""
        kinds = len({row["construction"] for row in self.points})
        return f"{len(self.points)} products of width {self.width}, {kinds} constructions"

    def text(self) -> str:
        """For each construction the ranges of alpha, beta and their ratio."""
        lines = []
        for name in dict.fromkeys(row["construction"] for row in self.points):
            mine = [row for row in self.points if row["construction"] == name]
            alphas, betas = [row["alpha"] for row in mine], [row["beta"] for row in mine]
            ratios = [b / a for a, b in zip(alphas, betas, strict=True) if a > 1e-6]
            lines.append([name, *(f"{min(v):.2f} to {max(v):.2f}" for v in (alphas, betas, ratios))])
        return text_table(("construction", "alpha", "beta", "beta / alpha"), lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"width": self.width, "points": self.points}

    def plot(self, path: "str | Path | None" = None, *, title: str | None = None) -> "Figure":
        """Beta against alpha, a marker for each construction.

        Args:
            path: a .png, .pdf or .svg file to write; none if None.
            title: of the figure.
        """
        from weightscope import plots

        figure = plots.root_figure(plots.alpha_beta_frontier(self.points, title=title))
        if path is not None:
            plots.save(figure, path)
        return figure


def attention_frontier(
    width: int = 192,
    head_width: int = 64,
    *,
    alphas: Sequence[float] = _GRID,
    betas: Sequence[float] = _GRID,
    generator: torch.Generator | None = None,
) -> AttentionFrontier:
    """The alpha and beta that products of two d x k factors reach, see `reached`.

    Equal random matrices, full-rank (k = d) and of the rank of a head, give a line: the ratio of alpha and beta is
    1 and sqrt(k / d). The best approximation of rank k to alpha Z + beta I gives an area.

    Args:
        width: d.
        head_width: k <= d.
        alphas: what the SVD construction is asked for, in all combinations with `betas`.
        betas: see `alphas`.
        generator: a CPU generator; None for torch's global one.

    Raises:
        UsageError: if k > d or a number is not positive.

    Source: attention paper, Fig. 3; thesis, Fig. 3.19.

    Example:
        >>> attention_frontier(192, 64).plot("frontier.png")
    """
    count("width", width)
    if count("head_width", head_width) > width:
        raise UsageError(f"head_width: expected at most the width, {width}, found {head_width}")
    points: list[dict[str, Any]] = []
    with single_threaded():
        for rank in dict.fromkeys((width, head_width)):
            points += equal_random(width, rank, generator)
            points += [svd(width, rank, alpha, beta, generator) for alpha in alphas for beta in betas]
    return AttentionFrontier(width, points)


def equal_random(width: int, rank: int, generator: torch.Generator | None) -> list[dict[str, Any]]:
    """Points of `scale Z Z^T`, Z (d, rank) of entries N(0, 1 / rank), for several scales."""
    out = []
    for scale in _SCALES:
        left, right = same_random(width, rank, scale, generator)
        out.append(_point("equal random", width, rank, (None, None), left @ right.T))
    return out


def svd(width: int, rank: int, alpha: float, beta: float, generator: torch.Generator | None) -> dict[str, Any]:
    """The point of the best approximation of a rank to `alpha Z + beta I`."""
    if rank == width:
        product = noisy_identity(width, alpha, beta, generator)
    else:
        queries, keys = query_key(width, rank, 1, alpha, beta, generator)
        product = queries[0] @ keys.T
    return _point("SVD", width, rank, (alpha, beta), product)


def reached(product: Tensor) -> tuple[float, float]:
    """Alpha and beta of the closest `alpha Z + beta I` to a product, Z of independent entries N(0, 1/d).

        beta = tr(P) / d,    alpha = ||P - beta I||_F / sqrt(d)

    Args:
        product: P (d, d).
    """
    d = len(product)
    beta = float(product.diagonal().mean())
    rest = product.clone()
    rest.diagonal().sub_(beta)
    return float(rest.norm()) / math.sqrt(d), beta


def _point(
    name: str, width: int, rank: int, asked: tuple[float | None, float | None], product: Tensor
) -> dict[str, Any]:
    alpha, beta = reached(product)
    kind = f"rank {rank}" if rank < width else "full rank"
    return {
        "construction": f"{name}, {kind}",
        "rank": rank,
        "asked_alpha": asked[0],
        "asked_beta": asked[1],
        "alpha": alpha,
        "beta": beta,
    }
