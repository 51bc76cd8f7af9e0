"""Proposition 1 of the impulse paper: ranks of what depthwise convolutions see, and what mixtures of channels reach.

Run: python analyses/frozen_filter_inits/ranks.py POPULATION.pop [NETWORK]
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope import Population
from weightscope._util.results import text_table
from weightscope.analysis.attention_maps import stable_ranks
from weightscope.analysis.runnable import images_for
from weightscope.anatomy import depthwise


def filter_inputs(model: nn.Module, images: Tensor) -> dict[str, tuple[int, int, np.ndarray]]:
    """The stable rank k = `sum s_i^2 / s_1^2` of the input X (pixels, D) of every depthwise convolution.

    By Proposition 1, mixing channels alone gives any output of f x f filters if D >= k f^2, k the rank. The stable rank
    is at most the rank, so D >= k f^2 with it is easier to meet than the condition itself; X is not centred (Remark 1).

    Args:
        model: a network with depthwise convolutions, each called once in a forward pass.
        images: (B, c, height, width), normalised as the model expects.

    Returns:
        name of the filters -> D, f, and the ranks (B,).
    """
    inputs: dict[str, Tensor] = {}
    parts = {part.parameters[0]: part for part in depthwise(model)}
    hooks = [
        model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(
            lambda _, x, name=name: inputs.__setitem__(name, x[0].flatten(2).mT)  # (B, pixels, D)
        )
        for name in parts
    ]
    model.eval()
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return {name: (part.channels, part.kernel[0], stable_ranks(inputs[name]).numpy()) for name, part in parts.items()}


def mixtures(images: np.ndarray, mixing: np.ndarray, filters: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
    """Fit `sum_j G_j z_j`, arbitrary filters G_j of k images, by channel weights w of filtered channels.

        min_w || sum_i w_i H_i x_i - sum_j G_j z_j ||,   x_i = sum_j a_ji z_j

    Each channel contributes a_ji h_i to the filter of image j, so what can be reached is the column space of the
    matrix (k f^2, D) of these coefficients: everything for D >= k f^2 generic filters, and at most k dimensions if
    all channels have one filter.

    Args:
        images: z (k, S, S), a basis of the inputs X.
        mixing: a (k, D), coordinates of the D channels in this basis.
        filters: h (D, f, f), f odd; the borders are padded with zeros.
        targets: g (m, k, f, f), filters to reach.

    Returns:
        the relative residual `||Y - Y_fitted||_F / ||Y||_F`, and the rank of the coefficients.

    Source: impulse paper, Eq. 1 to 3 and Proposition 1.
    """
    k, f = len(images), filters.shape[-1]
    coefficients = (mixing[:, None, :] * filters.reshape(len(filters), -1).T[None]).reshape(k * f * f, -1)
    r, size = f // 2, images.shape[1:]
    padded = np.pad(images, ((0, 0), (r, r), (r, r)))
    moved = [padded[:, y : y + size[0], x : x + size[1]] for y in range(f) for x in range(f)]
    basis = np.stack(moved, axis=1).reshape(k * f * f, -1).T  # (S^2, k f^2)
    wanted = basis @ targets.reshape(len(targets), -1).T
    channels = basis @ coefficients
    weights = np.linalg.lstsq(channels, wanted, rcond=None)[0]
    residual = float(np.linalg.norm(wanted - channels @ weights) / np.linalg.norm(wanted))
    return residual, int(np.linalg.matrix_rank(coefficients))


def main(population: str, network: Any = 0) -> None:
    model, images = Population(population).network(int(network)), images_for(population)
    rows = [
        (name, f"{ranks.mean():.2f}", str(f), f"{ranks.mean() * f * f:.1f}", str(width))
        for name, (width, f, ranks) in filter_inputs(model, images).items()
    ]
    print(text_table(("layer", "stable rank k", "f", "k f^2", "D"), rows))
    print(
        "the stable rank is at most the rank: D >= k f^2 with it does not show that the proposition's condition holds"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
