"""Covariances of the depthwise filters of a trained network, beside default and closed-form initialisation."""

import argparse
import json
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

from weightscope import Checkpoint
from weightscope._util.environment import environment
from weightscope.analysis.within_network import Layer, NetworkCovariances, covariance_within, skeleton
from weightscope.init import conv_covariance, conv_covariance_
from weightscope.init.convolution import PRESETS, covariance_root

HERE = Path(__file__).parent
PRESET = "imagenet-thawed"
# EfficientNet-Lite0 halves the image in these blocks (its paper's table of strides); a file of weights does not say.
HALVING = (1, 3, 5, 11)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def closed_form(layer: Layer) -> np.ndarray:
    """What conv_covariance_ samples this layer from."""
    root = covariance_root(conv_covariance(layer.shape[-1], PRESETS[PRESET](layer.relative_depth)))
    return root @ root.T


def alike(layer: Layer) -> dict[str, float]:
    """Cosines between the filters' covariance and those of the two initialisations."""
    found = layer.moments.covariance
    return {"default": cosine(found, np.eye(len(found))), "conv_covariance": cosine(found, closed_form(layer))}


def rank_correlation(values: list[float]) -> dict[str, float]:
    """Spearman's correlation with the order, and the share of all orders whose correlation is at least as large."""
    ranks, order = rankdata(values), np.arange(len(values))
    all_orders = np.array(list(permutations(ranks)))  # (n!, n)
    found = np.corrcoef(order, ranks)[0, 1]
    centred = order - order.mean()
    every = all_orders @ centred / np.linalg.norm(ranks - ranks.mean()) / np.linalg.norm(centred)
    return {"rank_correlation": float(found), "p": float(np.mean(np.abs(every) >= abs(found) - 1e-9))}


def trends(found: NetworkCovariances) -> list[dict[str, object]]:
    """Rank correlations with depth over layers of one kernel that keep the image's size, with exact p-values."""
    rows = []
    for kernel in sorted({layer.shape[-1] for layer in found.of("trained")}):
        layers = [x for x in found.of("trained") if x.shape[-1] == kernel and x.layer not in HALVING]
        for key in ("relative_spread", "central_ratio", "variance", "neighbours", "mean_share"):
            values = [x.statistics[key] for x in layers]
            if len(values) > 3:
                row = {"kernel": kernel, "statistic": key, "layers": [x.layer for x in layers]}
                rows.append(row | rank_correlation(values))
    return rows


def main(source: str, out: Path) -> None:
    checkpoint = Checkpoint(source)
    closed = conv_covariance_(skeleton(checkpoint), preset=PRESET, generator=torch.Generator().manual_seed(0))
    networks = {"trained": checkpoint, "default": skeleton(checkpoint, seed=0), "conv covariance": closed}
    found = covariance_within(*networks.values(), labels=list(networks))
    rows = [layer.to_dict() | {"halves": layer.layer in HALVING} for layer in found.layers]
    for row, layer in zip(rows, found.layers, strict=True):
        if layer.source == "trained":
            row["cosine"] = alike(layer)
    result = {
        "networks": list(networks),
        "filters": {k: sum(x.moments.n for x in found.of("trained") if x.shape[-1] == k) for k in (3, 5)},
        "preset": {"name": PRESET} | vars(PRESETS[PRESET]),
        "seed": 0,
        "rows": rows,
        "trends": trends(found),
        "environment": environment(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    arrays = {}
    for layer in found.layers:
        name = f"{layer.source}/{layer.layer}"
        arrays[f"covariance/{name}"] = layer.moments.covariance.astype(np.float32)
        arrays[f"filters/{name}"] = layer.examples[:64].astype(np.float16)
    np.savez_compressed(out / "covariances.npz", **arrays)
    print(found.text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="efficientnet-lite0-57934424.pth, or another network with depthwise filters")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    main(given.source, given.out)
