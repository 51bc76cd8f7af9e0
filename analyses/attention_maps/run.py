"""Where do the heads of a pretrained ViT-S look, and what do default and mimetic initialisation give instead?

python analyses/attention_maps/run.py MODEL_FOLDER --data DATA --out analyses/attention_maps

MODEL_FOLDER holds a Dinov2-layout ViT-S for transformers; DATA holds CIFAR-10 (`cifar-10-batches-bin`).
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope import attention_maps
from weightscope._util.environment import environment
from weightscope.analysis.attention_maps import AttentionMaps
from weightscope.data import load
from weightscope.init import mimetic_attention_, sinusoidal_positions_

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the pretrained model wants
DRAWN = ("pretrained", "default", "mimetic")  # whose maps are stored
POOL = 2  # tokens per stored cell, along each side of a map


def images(root: Path | None, count: int, size: int) -> tuple[Tensor, str]:
    """The first test images of CIFAR-10 at size x size pixels, and the data's fingerprint."""
    data = load("cifar10", root, train=1000, test=count)
    pixels = F.interpolate(data.test_images.float() / 255, size=size, mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (pixels - mean) / std, data.fingerprint


def arms(folder: Path, size: int, seeds: int) -> Iterator[tuple[str, int, nn.Module]]:
    """Name, seed and network: the pretrained one, and untrained ones of the same shape."""
    from transformers import Dinov2Config, Dinov2Model

    pretrained = Dinov2Model.from_pretrained(folder, dtype=torch.float32)
    # The file has no class token, and zeros for its position. Zero is a choice; `sensitivity` says how much it matters.
    nn.init.zeros_(pretrained.embeddings.cls_token)
    yield "pretrained", 0, pretrained
    config = Dinov2Config.from_pretrained(folder, image_size=size)
    for seed in range(seeds):
        torch.manual_seed(seed)
        network = Dinov2Model(config)
        yield "default", seed, network
        sinusoidal_positions_(network)
        yield "default, sinusoidal positions", seed, network
        yield "mimetic", seed, mimetic_attention_(network, generator=torch.Generator().manual_seed(seed))


def sensitivity(network: nn.Module, batch: Tensor, before: AttentionMaps) -> dict[str, dict[str, float]]:
    """How much the pretrained network's numbers move if the class token is random instead of zero."""
    token = network.embeddings.cls_token
    torch.manual_seed(0)
    nn.init.normal_(token, std=0.02)
    after = attention_maps(network, batch)
    nn.init.zeros_(token)
    moved = {}
    for key in ("self", "near", "special", "entropy"):
        pairs = zip(before.rows(), after.rows(), strict=True)
        change = np.array([b[key] - a[key] for a, b in pairs])
        moved[key] = {"mean": float(change.mean()), "largest": float(np.abs(change).max())}
    pairs = zip(before.condition(), after.condition(), strict=True)
    change = np.array([b["stable_rank"] - a["stable_rank"] for a, b in pairs])
    return moved | {"stable_rank": {"mean": float(change.mean()), "largest": float(np.abs(change).max())}}


def shortened(values: np.ndarray) -> np.ndarray:
    """As float16 with 7 significant bits: an error below 0.8 %, and zeros at the end, which compress."""
    return ((values.astype(np.float16).view(np.uint16) + 8) & 0xFFF0).view(np.float16)


def pooled(maps: np.ndarray, prefix: int) -> np.ndarray:
    """Head means of (H, n, n) between patches, averaged over cells."""
    block = maps.mean(axis=0)[prefix:, prefix:]
    n = len(block) // POOL
    return shortened(block.reshape(n, POOL, n, POOL).mean(axis=(1, 3)))


def stored(found: AttentionMaps, expected: bool) -> dict[str, np.ndarray]:
    arrays = {
        "maps": np.stack([pooled(layer.maps, found.tokens.prefix) for layer in found.layers]),
        "offsets": shortened(found.offsets()),
        "ranks": np.stack([layer.stable_ranks for layer in found.layers]).astype(np.float32),
    }
    if expected:
        arrays["expected"] = np.stack([pooled(layer.expected, found.tokens.prefix) for layer in found.layers])
    return arrays


def study(
    folder: Path, batch: Tensor, size: int, seeds: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    runs, arrays, moved = [], {}, {}
    for name, seed, network in arms(folder, size, seeds):
        found = attention_maps(network, batch)
        say(f"{name}, seed {seed}\n{found.text()}\n")
        runs.append({"arm": name, "seed": seed} | found.to_dict())
        if seed == 0 and name in DRAWN:
            arrays |= {f"{name}/{key}": value for key, value in stored(found, name == "mimetic").items()}
        if name == "pretrained":
            moved = sensitivity(network, batch, found)
    return {"runs": runs, "class_token_sensitivity": moved}, arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="pixels, a multiple of 14")
    parser.add_argument("--seeds", type=int, default=3, help="of the untrained networks")
    options = parser.parse_args()
    batch, fingerprint = images(options.data, options.images, options.size)
    result, arrays = study(options.model, batch, options.size, options.seeds, print)
    about = {"data": "cifar10 test", "fingerprint": fingerprint, "images": options.images, "size": options.size}
    write(options.out, about, result, arrays)


def write(out: Path, about: dict[str, Any], result: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """results.json and maps.npz in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "maps.npz", **arrays)
    text = json.dumps({"about": about, **_rounded(result), "environment": environment()})
    (out / "results.json").write_text(text.replace('{"layer":', '\n{"layer":') + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
