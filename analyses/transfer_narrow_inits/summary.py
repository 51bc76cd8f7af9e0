"""Do factorised covariances start networks as well as direct ones, within half a point? And what the covariances are.

python analyses/transfer_narrow_inits/summary.py FOLDER/teacher.pop [--results FOLDER]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from weightscope.benchmarking import BenchResult
from weightscope.benchmarking.statistics import values_of
from weightscope.fits.filters import filter_distributions
from weightscope.population import Population
from weightscope.statistics.kronecker import nearest_kronecker

HERE = Path(__file__).parent
MARGIN = 0.5  # points
LABEL = "transferred_ (mode={})"


def equivalence(differences: np.ndarray, margin: float = MARGIN) -> dict[str, Any]:
    """Two one-sided t-tests at 5 % of paired differences (n,): |mean| < margin, and mean > -margin.

    Source: Schuirmann 1987. Equivalent if and only if the 90 % interval lies within the margin.
    """
    n, mean = len(differences), float(differences.mean())
    std = float(differences.std(ddof=1))
    error = std / n**0.5
    worse = float(stats.t.sf((mean + margin) / error, n - 1))  # p of "no worse"
    better = float(stats.t.cdf((mean - margin) / error, n - 1))
    low, high = (mean + sign * float(stats.t.ppf(0.95, n - 1)) * error for sign in (-1, 1))
    wide = float(stats.t.ppf(0.975, n - 1)) * error
    return {
        "n": n,
        "difference": mean,
        "ci90": [low, high],
        "margin": margin,
        "std": std,
        "p_no_worse": worse,
        "p_equivalent": max(worse, better),
        "wide": {"difference": mean, "ci95": [mean - wide, mean + wide]},
    }


def compared(result: BenchResult, one: str, other: str) -> np.ndarray:
    """Differences of two arms by seed, in points, of seeds whose networks both have an accuracy."""
    values = [values_of([run for run in result.runs if run["init"] == name], result.metric) for name in (one, other)]
    return 100 * np.array([values[0][seed] - values[1][seed] for seed in sorted(values[0].keys() & values[1].keys())])


def described(source: Path) -> dict[str, Any]:
    """For each layer, means over the networks: rank, what A (x) A explains of Sigma, and its trace over Sigma's."""
    population = Population(source)
    rows = []
    for k in range(len(population)):
        for i, layer in enumerate(filter_distributions(population.network(k))):
            factors = nearest_kronecker(layer.covariance, same=True)
            rank = int(np.linalg.matrix_rank(layer.covariance, hermitian=True))
            trace = np.kron(factors.rows, factors.columns).trace() / layer.covariance.trace()
            rows.append((i, rank, factors.explained, trace, layer.dead))
    table = np.array(rows, dtype=float)
    keys = ("layer", "rank", "explained", "trace_ratio", "dead")
    layers = [dict(zip(keys, table[table[:, 0] == i].mean(0).tolist(), strict=True)) for i in np.unique(table[:, 0])]
    accuracy = 100 * population.metrics["test_accuracy"].astype(float)
    return {
        "networks": len(population),
        "accuracy": [accuracy.min(), accuracy.mean(), accuracy.max()],
        "layers": layers,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="population of the narrow networks")
    parser.add_argument("--results", type=Path, default=HERE, help="folder with results.json; summary.json goes there")
    options = parser.parse_args(arguments)
    result = BenchResult.load(options.results)
    found = {
        "kronecker - direct": equivalence(compared(result, LABEL.format("kronecker"), LABEL.format("direct"))),
        "sources": described(options.source),
    }
    (options.results / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
