"""Whether the layers of a trained network differ as starts for all places; what the design names beside its contrasts.

python analyses/one_layer_transfer/summary.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from weightscope.benchmarking import BenchResult

HERE = Path(__file__).parent
LAYERS = range(8)


def paired(differences: np.ndarray) -> dict[str, Any]:
    """The mean of paired differences (n,), its 95 % interval and its p-value."""
    n, mean = len(differences), float(differences.mean())
    half = float(stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / n**0.5)
    p = float(stats.ttest_1samp(differences, 0).pvalue)
    return {"difference": mean, "ci95": [mean - half, mean + half], "p": p, "n": n}


def repeated_measures(values: np.ndarray) -> dict[str, float]:
    """The F test that k arms (k, n), paired by seed, have one mean.

    The degrees of freedom are multiplied by Greenhouse and Geisser's (1959) estimate of epsilon, which is 1 if all
    differences of two arms have one variance, and at least 1 / (k - 1).
    """
    k, n = values.shape
    means = values.mean(1)
    rest = values - means[:, None] - values.mean(0) + values.mean()
    f = (n * np.square(means - values.mean()).sum() / (k - 1)) / (np.square(rest).sum() / ((k - 1) * (n - 1)))
    roots = np.linalg.eigvalsh(np.cov(rest))
    epsilon = roots.sum() ** 2 / ((k - 1) * np.square(roots).sum())
    p = stats.f.sf(f, epsilon * (k - 1), epsilon * (k - 1) * (n - 1))
    return {"f": float(f), "epsilon": float(epsilon), "p": float(p)}


def best_elsewhere(choose: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The layer that is best in `choose` (i, n), minus the mean of the other layers, in `test` (i, m): (m,)."""
    best = int(choose.mean(1).argmax())
    return test[best] - np.delete(test, best, 0).mean(0)


def summary(result: BenchResult) -> dict[str, Any]:
    arms = {arm: 100 * values for arm, values in result.by_arm().items()}  # accuracies in %, (n,)
    layers = np.array([arms[f"repeated_ (layer={i})"] for i in LAYERS])  # (i, n)
    mean, half = layers.mean(0), layers.shape[1] // 2
    halves = layers[:, :half], layers[:, half:]
    best = np.concatenate([best_elsewhere(*halves[::-1]), best_elsewhere(*halves)])
    return {
        "layers": [{"layer": i, "less default": paired(layers[i] - arms["default"])} for i in LAYERS],
        "layers differ": repeated_measures(layers),
        "best of one half of the seeds, in the other, minus other layers": paired(best),
        "tied minus default": paired(arms["tied_"] - arms["default"]),
        "layers minus tied": paired(mean - arms["tied_"]),
        "layer 4 minus tied, minus its scale minus default": paired(
            layers[4] - arms["tied_"] - arms["repeated_ (layer=4) (scale only)"] + arms["default"]
        ),
        "layers minus mimetic attention": paired(mean - arms["mimetic_attention"]),
        "own places minus layers": paired(arms["placed_ (own=True)"] - mean),
        "other places minus layers": paired(arms["placed_ (own=False)"] - mean),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE, help="folder with results.json; summary.json goes there")
    folder = parser.parse_args(arguments).results
    found = summary(BenchResult.load(folder))
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
