"""Proposition 1 of the impulse paper: ranks of what depthwise convolutions see, and what mixtures of channels reach.

python analyses/frozen_filter_inits/ranks.py equal-energy/runs/*-random_filters-*/*.pop --data FOLDER
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope import Population
from weightscope._util.environment import environment
from weightscope._util.results import row_table
from weightscope.analysis.attention_maps import stable_ranks
from weightscope.analysis.runnable import images_for
from weightscope.anatomy import depthwise


def filter_inputs(model: nn.Module, images: Tensor) -> dict[str, tuple[int, int, np.ndarray, np.ndarray]]:
    """The stable rank k = `sum s_i^2 / s_1^2` of the input X (pixels, D) of every depthwise convolution.

    Beside it stands the least number m of singular directions with `sum_{i <= m} s_i^2 >= 0.99 sum s_i^2`.

    By Proposition 1, mixing channels alone gives any output of f x f filters if D >= k f^2, k the rank. The stable rank
    is at most the rank, so D >= k f^2 with it is easier to meet than the condition itself; X is not centred (Remark 1).

    Args:
        model: a network with depthwise convolutions, each called once in a forward pass.
        images: (B, c, height, width), normalised as the model expects.

    Returns:
        name of the filters -> D, f, the ranks (B,) and the numbers of directions (B,).
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
    return {
        name: (part.channels, part.kernel[0], stable_ranks(x).numpy(), directions(x).numpy())
        for name, part in parts.items()
        for x in [inputs[name]]
    }


def directions(x: Tensor, share: float = 0.99) -> Tensor:
    """The least number of singular directions of each matrix of (B, n, d) that hold this share of its energy: (B,)."""
    energy = torch.linalg.svdvals(x.double()).square().cumsum(1)
    return (energy < share * energy[:, -1:]).sum(1) + 1


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


def measure(path: Path, data: Path | None, count: int) -> list[dict[str, Any]]:
    """A row for each depthwise layer; means are over networks and images, the range is of networks' means."""
    population, images = Population(path), images_for(path, count=count, root=data)
    networks = [filter_inputs(population.network(i), images) for i in range(len(population))]
    rows = []
    for name, (width, f, *_) in networks[0].items():
        ranks = np.array([found[name][2].mean() for found in networks])
        row: dict[str, Any] = {"width": width, "layer": name, "f": f, "networks": len(networks), "images": len(images)}
        row |= {"stable_rank": ranks.mean(), "lowest": ranks.min(), "highest": ranks.max()}
        row["directions_99"] = np.mean([found[name][3].mean() for found in networks])
        rows.append(row | {"k_f2": ranks.mean() * f * f, "directions_f2": row["directions_99"] * f * f})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("populations", type=Path, nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("ranks.json"))
    options = parser.parse_args(arguments)
    rows = [row for path in options.populations for row in measure(path, options.data, options.images)]
    columns = {"D": "{width}", "layer": "{layer}", "stable rank k": "{stable_rank:.2f}", "k f^2": "{k_f2:.1f}"}
    columns |= {"directions of 99 %": "{directions_99:.1f}", "times f^2": "{directions_f2:.0f}"}
    print(row_table(columns, rows, left=(1,)))
    print("the stable rank is at most the rank: D >= k f^2 with it is easier to meet than the proposition's condition")
    options.out.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
