"""The papers' populations of 16,000 networks on a GPU, in calls of a few minutes, on machines that keep nothing.

    python analyses/gpu_populations/collect.py --minutes 9 --data-root FOLDER_OF_CIFAR10 --out gpu-populations

A call goes on where the last one stopped, and ends before the time is over. What it leaves is all that the next one
needs, so that it can be carried from machine to machine: 42 MB for the three populations, by calculation. The networks
themselves, 0.5 GB of each population, are not kept. `--report` prints the correlated pairs and draws their figures.

- `NAME.sums.npz`: how many networks, their test accuracies, the sums of the whole network's covariance
  (`ExchangeableMoments`), and mean and covariance of the entries of the second block's MLP (Fig. 3.35).
- `NAME.sample.npy`: the first 512 networks, (512, D) float16.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.analysis.exchangeable import ExchangeableCovariance
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.statistics.exchangeable import ExchangeableMoments
from weightscope.training import train_tile

NAMES = ("cifar10-convnext-tiny", "cifar10-vit-tiny", "cifar10-convnext-3")
GOALS = (2_048, 16_000)  # networks: of each population, before the next goal of any
SAMPLE = 512
FASTEST = {"population.tile": 256, "training.kernels": "compiled", "training.precision": "bfloat16"}
JOINT = "*blocks.1.mlp.fc?.weight"


class Sums:
    """What is kept of a population."""

    def __init__(self, name: str, recipe: Recipe, out: Path) -> None:
        self.file, self.sample_file = out / f"{name}.sums.npz", out / f"{name}.sample.npy"
        network = build_for(recipe)
        spec, self.permutations = WeightSpec.of(network), permutation_spec(network)
        self.joint = spec.columns(spec.select(JOINT))
        self.networks, self.accuracy = 0, np.empty(0, np.float32)
        self.sample = np.empty((0, spec.size), np.float16)
        self.moments = ExchangeableMoments(spec, self.permutations, index=False)
        self.mean, self.scatter = np.zeros(len(self.joint)), np.zeros((len(self.joint), len(self.joint)))
        if self.file.exists():
            with np.load(self.file) as found:
                arrays = dict(found)
            self.networks, self.accuracy = int(arrays["networks"]), arrays["accuracy"]
            self.sample = np.load(self.sample_file)[: self.networks]  # it may be newer than the sums
            self.moments = ExchangeableMoments.restored(spec, self.permutations, arrays)
            self.mean, half = arrays["mean"], np.triu_indices(len(self.joint))
            self.scatter[half] = arrays["scatter"]
            self.scatter.T[half] = arrays["scatter"]

    def add(self, weights: np.ndarray, accuracy: np.ndarray, diverged: np.ndarray) -> None:
        """Take up networks (n, D)."""
        room = SAMPLE - len(self.sample)
        self.sample = np.concatenate([self.sample, weights[:room].astype(np.float16)])
        self.accuracy = np.concatenate([self.accuracy, accuracy.astype(np.float32)])
        self.networks += len(weights)
        good, before = weights[~diverged].astype(np.float64), self.moments.n
        self.moments.update(good)
        self.moments.excluded += int(diverged.sum())
        if len(good):
            rows = good[:, self.joint]
            step = rows.mean(0) - self.mean
            rows -= rows.mean(0)
            after = before + len(good)
            self.scatter += rows.T @ rows + np.outer(step, step) * before * len(good) / after
            self.mean += step * len(good) / after

    def save(self) -> None:
        """The sample first: the sums say how many networks there are."""
        half = np.triu_indices(len(self.joint))
        arrays = self.moments.arrays() | {"networks": np.array(self.networks), "accuracy": self.accuracy}
        arrays |= {"mean": self.mean, "scatter": self.scatter[half].astype(np.float32)}
        for file, write in (
            (self.sample_file, lambda to: np.save(to, self.sample)),
            (self.file, lambda to: np.savez_compressed(to, **arrays)),
        ):
            new = file.with_suffix(".new")
            with open(new, "wb") as to:
                write(to)
            new.replace(file)

    def covariance(self) -> ExchangeableCovariance:
        """The covariance of the whole network, averaged over permutations."""
        found = self.moments
        return ExchangeableCovariance(found.covariances(), self.permutations, found.n, found.excluded, ())

    def joint_correlation(self) -> np.ndarray:
        """Correlations of the entries of one MLP (D', D'), fc1 and then fc2."""
        std = np.sqrt(np.diag(self.scatter))
        return self.scatter / np.outer(std, std)


def collect(sums: Sums, recipe: Recipe, goal: int, until: float, **where: Any) -> bool:
    """Train tiles until there are so many networks; False if the next one would not be ready in time."""
    tile = recipe.population.tile
    assert tile is not None
    longest = 0.0
    while sums.networks < goal:
        start = time.monotonic()
        if start + 1.2 * longest > until:
            return False
        trained = train_tile(recipe, sums.networks // tile, **where)
        left = goal - sums.networks
        bad = trained.metrics["diverged"] | ~np.isfinite(trained.weights).all(1)
        # a goal within a tile keeps its first networks, and the tile is trained again for the next goal
        skipped = sums.networks % tile
        rows = slice(skipped, min(tile, skipped + left))
        sums.add(trained.weights[rows], trained.metrics["test_accuracy"][rows], bad[rows])
        sums.save()
        longest = max(longest, time.monotonic() - start)
        print(f"{sums.file.name}: {sums.networks:,} of {goal:,}, {longest:.0f} s for a tile", flush=True)
    return True


def report(sums: Sums) -> None:
    """Correlated pairs of the whole network, and its figures, beside the sums."""
    found = sums.covariance()
    print(f"{sums.file.name}: test accuracy {np.nanmean(sums.accuracy):.2%}")
    print(found.text())
    found.plot(sums.file.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", action="append", help="instead of the three; repeat it")
    parser.add_argument("--networks", type=int, action="append", help="goals, ascending [2048, 16000]; repeat it")
    parser.add_argument("--tile", type=int, default=FASTEST["population.tile"])
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes - 10  # to write and to end
    options.out.mkdir(parents=True, exist_ok=True)
    settings = FASTEST | {"population.tile": options.tile}
    if options.device == "cpu":
        settings |= {"training.precision": "float32", "training.kernels": "auto"}
    for goal in options.networks or GOALS:
        for name in options.recipe or NAMES:
            recipe = Recipe.load(name).replace(settings)
            sums = Sums(Path(name).stem, recipe, options.out)
            if options.report:
                report(sums)
            elif not collect(sums, recipe, goal, until, data_root=options.data_root, device=options.device):
                return


if __name__ == "__main__":
    main()
