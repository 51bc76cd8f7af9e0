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
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.init import impulse_attention_
from weightscope.networks import ViT

NETWORKS = {  # image size, patch size, width, depth, heads
    "study, 24/2/3": (16, 4, 24, 2, 3),
    "144/4/9": (16, 2, 144, 4, 9),
    "192/12/3": (32, 2, 192, 12, 3),
}


def measure(shape: tuple[int, ...], scale: float, norm: str, data: Any) -> list[float]:
    """The mean weight on the targets, layer by layer, in %."""
    torch.manual_seed(0)
    vit = ViT(*shape, 10, pool="average", position_scale=scale)
    impulse_attention_(vit, norm=norm, generator=torch.Generator().manual_seed(0))
    images = normalise(data.test_images.float() / 255, data.mean, data.std)
    images = torch.nn.functional.interpolate(images, shape[0], mode="bilinear", antialias=True)
    rows = attention_maps(vit, images).rows()
    layers = sorted({row["layer"] for row in rows})
    means = [[row["target"] for row in rows if row["layer"] == layer] for layer in layers]
    return [round(100 * sum(values) / len(values), 2) for values in means]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("maps.json"))
    options = parser.parse_args()
    data = load("cifar10", root=options.data, train=64, test=64)
    rows = [
        {"network": name, "position_scale": scale, "norm": norm, "target": measure(shape, scale, norm, data)}
        for name, shape in NETWORKS.items()
        for scale, norm in ((1.0, "free"), (3.0, "free"), (1.0, "start"))
    ]
    for row in rows:
        print(row)
    options.out.write_text(json.dumps({"images": 64, "rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
