"""How much of the attention is on the targets of impulse heads, on images rather than on position codes?

python analyses/impulse_inits/maps.py --data FOLDER
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from weightscope._util.environment import environment
from weightscope.analysis.attention_maps import attention_maps
from weightscope.anatomy import attention, positions
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.init import impulse_attention_
from weightscope.init.impulse_attention import attention_map, impulse_matrix, normalised
from weightscope.networks import ViT

NETWORKS = {  # image size, patch size, width, depth, heads
    "study, 24/2/3": (16, 4, 24, 2, 3),
    "144/4/9": (16, 2, 144, 4, 9),
    "192/12/3": (32, 2, 192, 12, 3),
}
STEPS = 10_000  # impulse paper, section 4.2


def measure(shape: tuple[int, ...], scale: float, norm: str, steps: int | None, data: Any) -> dict[str, Any]:
    """Layer by layer, in %: the mean weight on the targets on codes alone and on images, and the largest weight."""
    torch.manual_seed(0)
    vit = ViT(*shape, 10, pool="average", position_scale=scale)
    impulse_attention_(vit, norm=norm, adam_steps=steps, generator=torch.Generator().manual_seed(0))
    images = normalise(data.test_images.float() / 255, data.mean, data.std)
    images = torch.nn.functional.interpolate(images, shape[0], mode="bilinear", antialias=True)
    found = attention_maps(vit, images)
    codes, rows = normalised(positions(vit)[0].read()), found.rows()
    for row in rows:
        part = attention(vit)[row["layer"]]
        q, k = (part.read(name)[row["head"]].double() for name in "qk")
        wanted = impulse_matrix(found.tokens, tuple(row["offset"]))
        row["codes"] = float((attention_map(codes, q, k, part.scale) * wanted).sum() / wanted.sum())
    layers = [[row for row in rows if row["layer"] == layer] for layer in range(len(found.layers))]
    return {
        key: [round(100 * sum(row[key] for row in layer) / len(layer), 2) for layer in layers]
        for key in ("codes", "target", "peak")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("maps.json"))
    options = parser.parse_args()
    data = load("cifar10", root=options.data, train=64, test=64)
    settings = [(1.0, "free", None), (3.0, "free", None), (1.0, "start", None)]
    networks = [(*one, *setting) for one in NETWORKS.items() for setting in settings]
    small = next(iter(NETWORKS.items()))  # Algorithm 1 takes many minutes for the others
    rows = []
    for name, shape, scale, norm, steps in [*networks, (*small, 1.0, "start", STEPS)]:
        setting = {"network": name, "position_scale": scale, "norm": norm, "adam_steps": steps}
        rows.append(setting | measure(shape, scale, norm, steps, data))
        print(rows[-1], flush=True)
    options.out.write_text(json.dumps({"images": 64, "rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
