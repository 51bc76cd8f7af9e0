"""The closed form of the conv covariance: C, S, M and Sigma (thesis Fig. 3.6), and Sigma over depth (Fig. 3.7)."""

import math
from pathlib import Path

import numpy as np
import torch

from weightscope import plots
from weightscope.init.convolution import draw_filters
from weightscope.statistics.filters import Schedule, closed_form, conv_covariance

HERE = Path(__file__).parent
SIDE, SIGMA = 7, math.pi / 2  # Fig. 3.6
SCHEDULE = Schedule(0.5, 0.5, 3.0)  # Fig. 3.7
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def blocks(matrix: np.ndarray) -> np.ndarray:
    """(k^2, k^2) with pixels in row-major order to k x k blocks of k x k pixels, as the thesis draws it."""
    k = math.isqrt(len(matrix))
    return matrix.reshape(k, k, k, k).transpose(0, 2, 1, 3).reshape(k * k, k * k)


def main(out: Path = HERE / "closed_form.png") -> None:
    c, s, m = closed_form(SIDE, SIGMA)
    figure = plots.matrix_grid(
        [[blocks(matrix) for matrix in (c, s, m, conv_covariance(SIDE, SIGMA))]],
        column_labels=("C, moving bumps", "S, one bump", "M, mask", "Σ = (M (C - S) + S C) / 2"),
        quantity="entries",
        title=f"The closed form at k = {SIDE}, σ = π/2: block (i, j) is the covariance of pixel (i, j) with all",
    )
    plots.save(figure, out)
    generator = torch.Generator().manual_seed(0)
    covariances, samples = [], []
    for depth in DEPTHS:
        sigma = conv_covariance(SIDE, SCHEDULE(depth))
        covariances.append(blocks(sigma))
        drawn = draw_filters(SIDE**2, sigma, "abs", generator).numpy().reshape(SIDE, SIDE, SIDE, SIDE)
        samples.append(drawn.transpose(0, 2, 1, 3).reshape(SIDE**2, SIDE**2))  # k x k filters of k x k pixels
    figure = plots.matrix_grid(
        [covariances, samples],
        row_labels=("covariance", f"{SIDE**2} filters"),
        column_labels=[f"depth {depth:g}, σ = {SCHEDULE(depth):.2f}" for depth in DEPTHS],
        quantity="entries",
        title="From the first layer to the last: σ grows quadratically, and filters become larger and smoother",
    )
    plots.save(figure, out.with_name(f"{out.stem}_depth{out.suffix}"))


if __name__ == "__main__":
    main()
