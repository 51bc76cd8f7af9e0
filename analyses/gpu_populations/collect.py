"""The papers' populations of 16,000 networks on a GPU, in calls of a few minutes, on machines that keep nothing.

    python analyses/gpu_populations/collect.py --minutes 9 --data-root FOLDER_OF_CIFAR10 --out gpu-populations

The same for one recipe on a CPU, keeping what is small enough for a repository, is

    python analyses/gpu_populations/collect.py --minutes 90 --data-root FOLDER_OF_CIFAR10 --device cpu --tile 16
        --recipe cifar10-convnext-16px --networks 4096 --sums-only --out analyses/cifar_structure

A call goes on where the last one stopped, and ends before the time is over. What it leaves is all that the next one
needs, so that it can be carried from machine to machine: 47 MB for the three populations, of which 16 MB of sums once
their samples are whole. The networks themselves, 0.5 GB of each population, are not kept. `--report` prints the
correlated pairs and draws their figures.

- `NAME.sums.npz`: how many networks, their test accuracies, the sums of the whole network's covariance
  (`ExchangeableMoments`), and mean and covariance of what Fig. 3.40 is computed from (`filter_products`, of ConvNeXts)
  and of the entries of the second block's MLP (Fig. 3.35), without which it is 0.8 MB (`--sums-only`).
- `NAME.sample.npy`: the first 512 networks, (512, D) float16.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.analysis.exchangeable import ExchangeableCovariance
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.errors import UsageError
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


class Scatter:
    """Mean (D,) and sums of products about it (D, D), of rows that are added in turns."""

    def __init__(self, size: int) -> None:
        self.n, self.mean, self.products = 0, np.zeros(size), np.zeros((size, size))

    def add(self, rows: np.ndarray) -> None:
        """Take up rows (n, D)."""
        mean, after = rows.mean(0), self.n + len(rows)
        step, rows = mean - self.mean, rows - mean
        self.products += rows.T @ rows + np.outer(step, step) * self.n * len(rows) / after
        self.mean += step * len(rows) / after
        self.n = after


def filter_products(weights: np.ndarray, spec: WeightSpec) -> np.ndarray:
    """Sums over channels of products of powers of f and d, (N, 9 B), of networks (N, D) with B blocks.

    f is the central pixel of a depthwise filter and d the diagonal of W2 W1 of the MLP after it; for each block the
    sums of f, |f|, d, |d|, f^2, d^2, f d, f |d| and |f| |d|.
    """
    tensors, out = spec.unpack(weights), []
    for name in (name for name in tensors if name.endswith("conv_dw.weight")):
        block, filters = name.removesuffix("conv_dw.weight"), tensors[name]
        f = filters[:, :, 0, filters.shape[-2] // 2, filters.shape[-1] // 2]
        d = np.einsum("nij,nji->ni", tensors[f"{block}mlp.fc2.weight"], tensors[f"{block}mlp.fc1.weight"])
        g, e = np.abs(f), np.abs(d)
        out += [x.sum(1) for x in (f, g, d, e, f * f, d * d, f * d, f * e, g * e)]
    return np.stack(out, axis=1) if out else np.empty((len(weights), 0))


class Sums:
    """What is kept of a population."""

    def __init__(self, name: str, recipe: Recipe, out: Path, sums_only: bool = False) -> None:
        self.file, self.sample_file = out / f"{name}.sums.npz", out / f"{name}.sample.npy"
        network = build_for(recipe)
        self.spec, self.permutations = WeightSpec.of(network), permutation_spec(network)
        self.joint = [] if sums_only else self.spec.columns(self.spec.select(JOINT))
        self.networks, self.accuracy = 0, np.empty(0, np.float32)
        self.sums_only, self.sample = sums_only, np.empty((0, self.spec.size), np.float16)
        self.moments = ExchangeableMoments(self.spec, self.permutations, index=False)
        self.entries = Scatter(len(self.joint))
        self.filters = Scatter(filter_products(np.zeros((1, self.spec.size)), self.spec).shape[1])
        if self.file.exists():
            with np.load(self.file) as found:
                arrays = dict(found)
            if ("entries mean" in arrays) == sums_only:
                raise UsageError(f"{self.file}: was collected {'without' if sums_only else 'with'} --sums-only")
            self.networks, self.accuracy = int(arrays["networks"]), arrays["accuracy"]
            for name in (name for name in arrays if name.startswith("products ")):
                arrays[name] = _whole(arrays[name])
            self.moments = ExchangeableMoments.restored(self.spec, self.permutations, arrays)
            for name, scatter in self._scatters().items():
                scatter.n, scatter.mean = self.moments.n, arrays[f"{name} mean"]
                scatter.products = _whole(arrays[f"{name} scatter"])
            # It may be newer than the sums. A whole one does not change, and need not be carried to the next machine.
            if not sums_only and (self.networks < SAMPLE or self.sample_file.exists()):
                self.sample = np.load(self.sample_file)[: self.networks]

    def _scatters(self) -> dict[str, Scatter]:
        return {"filters": self.filters} | ({} if self.sums_only else {"entries": self.entries})

    def add(self, weights: np.ndarray, accuracy: np.ndarray, diverged: np.ndarray) -> None:
        """Take up networks (n, D)."""
        if not self.sums_only and self.networks < SAMPLE:
            self.sample = np.concatenate([self.sample, weights[: SAMPLE - self.networks].astype(np.float16)])
        self.accuracy = np.concatenate([self.accuracy, accuracy.astype(np.float32)])
        self.networks += len(weights)
        good = weights[~diverged].astype(np.float64)
        self.moments.update(good)
        self.moments.excluded += int(diverged.sum())
        if len(good):
            self.filters.add(filter_products(good, self.spec))
            self.entries.add(good[:, self.joint])

    def save(self) -> None:
        """The sample first: the sums say how many networks there are."""
        arrays = self.moments.arrays() | {"networks": np.array(self.networks), "accuracy": self.accuracy}
        for name in (name for name in arrays if name.startswith("products ")):
            arrays[name] = arrays[name][np.triu_indices(len(arrays[name]))]
        for name, found in self._scatters().items():
            half, kind = (
                found.products[np.triu_indices(len(found.mean))],
                np.float32 if name == "entries" else np.float64,
            )
            arrays |= {f"{name} mean": found.mean, f"{name} scatter": half.astype(kind)}
        files = {self.sample_file: lambda to: np.save(to, self.sample)} if len(self.sample) else {}
        for file, write in (files | {self.file: lambda to: np.savez_compressed(to, **arrays)}).items():
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
        std = np.sqrt(np.diag(self.entries.products))
        return self.entries.products / np.outer(std, std)


def _whole(half: np.ndarray) -> np.ndarray:
    """The symmetric matrix of which `half` is the upper triangle."""
    n = round((np.sqrt(8 * len(half) + 1) - 1) / 2)
    out, upper = np.zeros((n, n)), np.triu_indices(n)
    out[upper] = half
    out.T[upper] = half
    return out


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
    parser.add_argument("--sums-only", action="store_true", help="keep no networks and no covariance of single entries")
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
            sums = Sums(Path(name).stem, recipe, options.out, options.sums_only)
            if options.report:
                report(sums)
            elif not collect(sums, recipe, goal, until, data_root=options.data_root, device=options.device):
                return


if __name__ == "__main__":
    main()
