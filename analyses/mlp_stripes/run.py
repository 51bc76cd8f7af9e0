"""Are the stripes of the MLP paper (Fig. 1a) there, in fc1 more than in fc2?

weightscope collect populations/fashion-convnext.toml -o fashion.pop
python analyses/mlp_stripes/run.py fashion.pop --out analyses/mlp_stripes
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import weightscope
from weightscope._util.environment import environment
from weightscope.analysis.across_networks import PopulationCovariance, covariance_across
from weightscope.statistics.samples import usable_chunks
from weightscope.statistics.stripes import stripes

BOOTSTRAPS = 2000
STEP = 0.002  # correlations are stored as signed bytes times this: +-0.25 in steps well below their error


def matrices(population: weightscope.Population, name: str) -> np.ndarray:
    """One tensor of every network that did not diverge, (N, p, n)."""
    rows = np.concatenate([rows for rows, _ in usable_chunks(population, [name])])
    return rows.reshape(-1, *population.spec[name].shape).astype(np.float64)


def fast_ratio(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Sums over entries of squared group means and of squares, for each network: (N, 2)."""
    centred = matrix - matrix.mean(0)
    means = centred.mean(axis)
    return np.stack([(means**2).mean(1) * matrix.shape[axis], (centred**2).mean((1, 2))], axis=1)


def log_difference(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Logarithm of the quotient of two ratios, with a bootstrap over networks, the same networks for both."""

    def value(index: np.ndarray) -> float:
        a, b = first[index].sum(0), second[index].sum(0)
        return float(np.log(a[0] / a[1]) - np.log(b[0] / b[1]))

    n = len(first)
    draws = np.array([value(rng.integers(0, n, n)) for _ in range(BOOTSTRAPS)])
    low, high = np.quantile(draws, [0.025, 0.975])
    tail = min((draws <= 0).mean(), (draws >= 0).mean())
    return {
        "quotient": float(np.exp(value(np.arange(n)))),
        "ci95": [float(np.exp(low)), float(np.exp(high))],
        "p": float(min(1.0, 2 * max(tail, 1 / BOOTSTRAPS))),
    }


def study(population: weightscope.Population) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    blocks = sorted(name.removesuffix(".fc1.weight") for name in population.spec.names if name.endswith("fc1.weight"))
    rows, contrasts = [], []
    for depth, block in enumerate(blocks):
        parts = {}
        for label, name in (("fc1", f"{block}.fc1.weight"), ("fc2", f"{block}.fc2.weight")):
            matrix = matrices(population, name)
            found = stripes(matrix)
            for kind in ("column", "row", "overall"):
                ratio = getattr(found, kind)
                rows.append(
                    {"block": depth, "matrix": label, "means": kind, "ratio": ratio.value}
                    | {"ci95": list(ratio.ci95), "p": ratio.p}
                )
            parts[label] = matrix
        # The stripes of Eq. 1 are means over hidden units: fc1's columns; of fc2, which is (d, p), the rows.
        hidden = log_difference(fast_ratio(parts["fc1"], 1), fast_ratio(parts["fc2"], 2), rng)
        contrasts.append({"block": depth, "contrast": "means over hidden units, fc1 / fc2"} | hidden)
    return {"stripes": rows, "contrasts": contrasts}


def block_correlation(population: weightscope.Population, block: int) -> PopulationCovariance:
    """The correlation of [vec fc1, vec fc2] of one block."""
    names = [name for name in population.spec.names if name.endswith("fc1.weight")]
    prefix = sorted(names)[block].removesuffix("fc1.weight")
    return covariance_across(population, f"{prefix}fc?.weight", kind="correlation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("population")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--block", type=int, default=1, help="whose correlation is stored for the picture")
    options = parser.parse_args()
    population = weightscope.Population(options.population)
    accuracy = population.metrics["test_accuracy"][~population.diverged]
    result = {
        "networks": len(population),
        "diverged": int(population.diverged.sum()),
        "test_accuracy": {
            q: float(np.quantile(accuracy, p)) for q, p in (("q05", 0.05), ("median", 0.5), ("q95", 0.95))
        },
        **study(population),
        "recipe": population.recipe.to_dict(),
        "environment": environment() | {"population": population.environment},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    found = block_correlation(population, options.block)
    np.savez_compressed(
        options.out / "correlation.npz",
        correlation=np.clip(np.rint(found.matrix / STEP), -127, 127).astype(np.int8),
        step=STEP,
        shapes=np.array([tensor.shape for tensor in found.spec.tensors]),
        block=options.block,
        names=np.array(list(found.blocks)),
        stops=np.array([part.stop for part in found.blocks.values()]),
    )
    for row in result["contrasts"]:
        low, high = row["ci95"]
        print(f"block {row['block']}: {row['contrast']}: {row['quotient']:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
