"""Do the diagonals of W_Q W_K^T and W_V W_O of trained transformers differ from noise, and with which sign?

python analyses/attention_products/run.py VIT MINILM --out analyses/attention_products
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from weightscope import products
from weightscope._util.environment import environment
from weightscope.analysis.attention_products import ProductsResult
from weightscope.init import mimetic_attention_
from weightscope.networks import ViT

CLIP = 64
_LEFT_OUT = {"finite", "rotary", "normalised", "name", "kind"}


def untrained(depth: int, heads: int, preset: str | None) -> ViT:
    """Attention of the models' width, at torch's default initialisation or a mimetic one."""
    torch.manual_seed(0)
    model = ViT(56, 14, 384, depth, heads, 10)
    if preset is None:
        return model
    return mimetic_attention_(model, preset=preset, generator=torch.Generator().manual_seed(0))


def found_in(vit: str, minilm: str) -> list[ProductsResult]:
    """Every model, each with the options that its name says."""
    return [
        products(vit, labels=["ViT-S"], clip=CLIP),
        products(vit, labels=["ViT-S, with LayerScale"], fold_scales=True, clip=CLIP),
        products(vit, labels=["ViT-S, with LayerScale and gain"], fold_scales=True, fold_norms=True, clip=CLIP),
        products(untrained(12, 6, None), labels=["ViT-S shape, default"], clip=CLIP),
        products(untrained(12, 6, "vision"), labels=["ViT-S shape, mimetic"], clip=CLIP),
        products(minilm, labels=["MiniLM"], clip=CLIP),
        products(untrained(6, 12, None), labels=["MiniLM shape, default"], clip=CLIP),
        products(untrained(6, 12, "language"), labels=["MiniLM shape, mimetic"], clip=CLIP),
    ]


def trend(found: ProductsResult) -> dict[str, Any]:
    """Spearman's correlation of the layers' mean beta and alpha with depth."""
    out = {}
    for part, layers in (("qk", False), ("vo", True)):
        rows = found.select(part, layers=layers)
        depths = sorted({row["layer"] for row in rows})
        for key in ("beta", "alpha"):
            means = [np.mean([row[key] for row in rows if row["layer"] == depth]) for depth in depths]
            rho, p = stats.spearmanr(depths, means)
            out[f"{part} {key}"] = {"rho": float(rho), "p": float(p), "layers": len(depths)}
    return out


def corners(found: ProductsResult, heads: int) -> np.ndarray:
    """(rows, layers, n, n) float16: the first heads' W_Q W_K^T, then the layers' W_V W_O."""
    layers = sorted({key.layer for key in found.corners})
    lines = [("qk", head) for head in range(heads)] + [("vo", None)]
    kept = {(key.layer, key.part, key.head): value for key, value in found.corners.items()}
    return np.array([[kept[layer, *line] for layer in layers] for line in lines]).astype(np.float16)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items() if k not in _LEFT_OUT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vit", help="folder of the ViT-S")
    parser.add_argument("minilm", help="folder of MiniLM")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    everything = found_in(options.vit, options.minilm)
    rows = [rounded(row) for found in everything for row in found.records]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    counts = {label: value for found in everything for label, value in found.to_dict()["counts"].items()}
    trends = {found.sources[0].label: trend(found) for found in everything}
    about = {"counts": counts, "trends": trends, "environment": environment()}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about, indent=1).rstrip("}\n") + '\n },\n "rows": [\n' + lines + "\n ]\n}\n"
    json.loads(text)
    (options.out / "results.json").write_text(text)
    drawn = {"vit": corners(everything[1], 6), "minilm": corners(everything[5], 3)}
    np.savez_compressed(options.out / "corners.npz", **drawn)
    for found in everything:
        print(f"{found.sources[0].label}: {found.finding(found.sources[0].label)}")


if __name__ == "__main__":
    main()
