"""What docs/whole-network.md says of tests of exchangeable covariances: false alarms, and groups with an index.

    python analyses/one_structure/whole_network.py --work whole-network

Trains three populations (it resumes), simulates the others, and writes `whole_network.json`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from weightscope._util.environment import environment
from weightscope.analysis.exchangeable import correlated_pairs, covariance_exchangeable
from weightscope.recipe import Recipe
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.exchangeable import ExchangeableMoments
from weightscope.statistics.permutations import PermutationSpec
from weightscope.training.collection import collect

HERE = Path(__file__).parent
TRAINED = {
    "ViT, sinusoidal positions": ("digits-vit", {"network.positions": "sinusoidal"}, 32, 2),
    "ViT, learned positions": ("digits-vit", {"network.positions": "learned"}, 32, 2),
    "ConvNeXt": ("digits-convnext", {}, 64, 4),
}
SIMULATED = {
    "nothing": ("network", 0.0, 0.0),
    "scales of networks and means of units": ("network", 0.7, 3.0),
    "scales and means of units": ("unit", 0.7, 1.0),
}  # what the tensors share -> of networks or of units, log sd of the scales, sd of the means
NETWORKS, UNITS, POPULATIONS = (8, 30), 12, 300


def index_effects(work: Path, **options: Any) -> list[dict[str, Any]]:
    """Of each trained population and group of units, whether means or variances depend on the index."""
    rows = []
    for name, (recipe, changes, networks, epochs) in TRAINED.items():
        sized = Recipe.load(recipe).replace(changes | {"training.epochs": epochs, "population.networks": networks})
        population = collect(sized, work / f"{name.replace(', ', '-').replace(' ', '-')}.pop", **options)
        found = covariance_exchangeable(population, "*").to_dict()["index_effects"]
        rows += [{"population": name, "networks": networks, "epochs": epochs, **effect} for effect in found]
    return rows


def false_alarms(shared: str, n: int, populations: int) -> dict[str, Any]:
    """The share of simulated populations of n networks with independent Gaussian weights with a pair at p < 0.05.

    A network has a 2 x 2 filter, a gain and a bias for each of its units. `pairs` are all pairs of tensors, adjusted
    for their number; `errors` one correlation over its standard error over networks, which amplified structures use, by
    Student's t.
    """
    spec = WeightSpec(
        [TensorSpec("conv", (UNITS, 1, 2, 2)), *(TensorSpec(name, (UNITS,)) for name in ("gain", "bias"))]
    )
    axes = {"conv": ("c", None, None, None), "gain": ("c",), "bias": ("c",)}
    permutations, rng = PermutationSpec.from_axes(spec, axes), np.random.default_rng(0)
    by, scale, mean = SIMULATED[shared]
    alarms = {"pairs": 0, "errors": 0}
    for _ in range(populations):
        factor = np.exp(scale * rng.standard_normal((n, UNITS if by == "unit" else 1)))
        means = mean * rng.standard_normal(UNITS)
        tensors = spec.unpack(rng.standard_normal((n, spec.size)))
        shapes = {name: (-1, *[1] * (x.ndim - 2)) for name, x in tensors.items()}
        rows = [x * factor.reshape(n, *shapes[k]) + means.reshape(shapes[k]) for k, x in tensors.items()]
        weights = np.concatenate([x.reshape(n, -1) for x in rows], axis=1)
        found = ExchangeableMoments(spec, permutations).update(weights).covariances()
        alarms["pairs"] += min(pair.p for pair in correlated_pairs(found)) < 0.05
        alarms["errors"] += 2 * stats.t.sf(abs(found[1].correlation()[4, 5]) / found[1].errors[4, 5], n - 1) < 0.05
    return {"shared": shared, "n": n, "populations": populations} | {
        name: number / populations for name, number in alarms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("whole-network"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    effects = index_effects(options.work, workers=options.workers, device="cpu")
    alarms = [false_alarms(shared, n, POPULATIONS) for shared in SIMULATED for n in NETWORKS]
    found = {"index_effects": effects, "false_alarms": alarms, "environment": environment()}
    (options.out / "whole_network.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
