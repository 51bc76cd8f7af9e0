"""Do populations end alike for every way of training?

    python benchmarks/agreement.py --json benchmarks/results/agreement.json

ConvNeXts on the digits, trained one by one in plain PyTorch (`plain.py`), in tiles with torch's kernels, and in tiles
with compiled kernels (`--device cuda`: those of a GPU, in bfloat16 too). Each way has its own root seed, so the
samples are independent. Test accuracy and test loss are compared with the plain ones by Welch's t test of the means and
the two-sample Kolmogorov-Smirnov test, with Bonferroni's correction over all tests. The absence of a significant
difference does not prove agreement; the intervals show how large a difference could be, and `shown` is the difference
of means that the corrected Welch test shows with a power of 80 %. Spreads are hardly tested: of 128 networks, one that
is larger by half is shown with 7 %.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from joblib import Parallel, delayed
from plain import train_alone
from reporting import write
from scipy import stats

from weightscope._util.environment import environment, usable_cores
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.recipe import Recipe
from weightscope.training import train_tile

TILE = 32
PATHS = {  # root seed, kernels, precision
    "plain": (1, "torch", "float32"),
    "torch kernels": (2, "torch", "float32"),
    "compiled kernels": (3, "compiled", "float32"),
    "compiled kernels, bfloat16": (4, "compiled", "bfloat16"),
}


def recipe_of(path: str, epochs: int) -> Recipe:
    seed, kernels, precision = PATHS[path]
    return Recipe.parse(
        {
            "network": {"type": "convnext", "width": 12, "depth": 2, "patch_size": 2, "expansion": 2},
            "data": {"name": "digits"},
            "training": {"epochs": epochs, "batch_size": 64, "evaluate": "end"}
            | {"kernels": kernels, "precision": precision},
            "population": {"tile": TILE, "seed": seed},
        }
    )


def alone(recipe: Recipe, k: int, device: str) -> tuple[float, float]:
    """Test accuracy and loss of network k, in plain PyTorch."""
    torch.set_num_threads(1)
    network = train_alone(recipe, k, device).eval()
    data = load(recipe.data.name).to(device)
    with torch.no_grad():
        logits = network(normalise(data.test_images, data.mean, data.std))
    correct = (logits.argmax(1) == data.test_labels).float().mean()
    return float(correct), float(F.cross_entropy(logits, data.test_labels))


def together(recipe: Recipe, tile: int, device: str) -> list[tuple[float, float]]:
    metrics = train_tile(recipe, tile, device=device).metrics
    return list(zip(metrics["test_accuracy"].tolist(), metrics["test_loss"].tolist(), strict=True))


def sample(path: str, networks: int, epochs: int, device: str) -> np.ndarray:
    """(networks, 2): test accuracies and losses."""
    recipe = recipe_of(path, epochs)
    workers = Parallel(n_jobs=usable_cores() if device == "cpu" else 1)
    if path == "plain":
        return np.array(workers(delayed(alone)(recipe, k, device) for k in range(networks)))
    tiles = workers(delayed(together)(recipe, tile, device) for tile in range(-(-networks // TILE)))
    return np.array([row for tile in tiles for row in tile][:networks])


def compare(samples: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in list(samples)[1:]:
        for column, metric in enumerate(("test accuracy", "test loss")):
            ours, plain = samples[path][:, column], samples["plain"][:, column]
            welch = stats.ttest_ind(ours, plain, equal_var=False)
            low, high = welch.confidence_interval(0.95)
            shown = _shown(welch.df, (high - low) / 2, 4 * (len(samples) - 1))
            about = {"row": f"{path}: {metric}", "ours": ours.mean(), "plain": plain.mean(), "std": plain.std(ddof=1)}
            rows.append(about | {"difference_ci95": [low, high], "shown": shown, "test": "Welch", "p": welch.pvalue})
            rows.append(about | {"test": "Kolmogorov-Smirnov", "p": stats.ks_2samp(ours, plain).pvalue})
    for row in rows:
        row["p_bonferroni"] = min(1.0, len(rows) * row["p"])
    return [{key: v.item() if isinstance(v, np.generic) else v for key, v in row.items()} for row in rows]


def _shown(freedom: float, half: float, tests: int) -> float:
    """The difference that Welch's test, one of several, shows with a power of 80 %, from half the 95 % interval."""
    return (stats.t.isf(0.025 / tests, freedom) + stats.norm.isf(0.2)) * half / stats.t.isf(0.025, freedom)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--networks", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--path", action="append", choices=list(PATHS)[1:], help="only this one; repeat it")
    options = parser.parse_args()
    possible = [path for path, (_, _, precision) in PATHS.items() if precision == "float32" or options.device != "cpu"]
    paths = ["plain", *(options.path or possible[1:])]
    rows = compare({path: sample(path, options.networks, options.epochs, options.device) for path in paths})
    for row in rows:
        means = f"{row['ours']:.4f} {row['plain']:.4f} (std {row['std']:.4f})"
        if "difference_ci95" in row:
            low, high = row["difference_ci95"]
            means += f" difference {low:+.4f} to {high:+.4f}, {row['shown']:.4f} shown with 80 %"
        print(f"{row['row']:<34} {means}  {row['test']:<18} p {row['p']:.3f}")
    about = environment(options.device) | {"networks": options.networks, "epochs": options.epochs}
    write(options.json, rows, **about)


if __name__ == "__main__":
    main()
