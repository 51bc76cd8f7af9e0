"""Ways to make weak learned correlations stronger, compared in short trainings with the same seeds.

    python analyses/one_structure/alternatives.py --work one-structure --workers 2

threshold       correlations beyond 4 standard errors times a gain, as in `run.py`
eigenvalues     correlations without the eigenvalues that noise explains (Laloux et al. 1999), times a gain
extrapolation   correlations of start + g (trained - start), with the start of each network drawn again from its seed

All have the variances and the mean of the trained networks. Gains are not chosen here: every one is reported.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import run

from weightscope.benchmarking import bench
from weightscope.fits import Exchangeable
from weightscope.fits.fitting import fit
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import InitConfig
from weightscope.training.initial_weights import initial_weights

GAINS = {"threshold": (1.0, 3.0, 10.0, 30.0), "eigenvalues": (1.0, 3.0, 10.0), "extrapolation": (1.0, 3.0, 10.0)}


def extrapolated(population: Population, select: str, gain: float) -> Any:
    """A fit whose correlations are those of start + gain (trained - start) and whose variances are the trained ones."""
    base = fit(population, select.split(","), structure="exchangeable", joint="all")
    (group,) = base.groups
    structure = group.structure
    columns = population.spec.columns(structure.spec)
    start = initial_weights(population.recipe, range(len(population)), partial(build_for, population.recipe))
    trained, start = population.weights()[:, columns].astype(np.float64), start[:, columns].astype(np.float64)
    rows = start + gain * (trained - start)
    moved = Exchangeable.fit(rows, structure.spec, permutations=structure.permutations)
    factors = []
    for factor, other in zip(structure.factors, moved.factors, strict=True):
        wanted, found = (np.sqrt(np.square(f).sum(1)) for f in (factor, other))
        factors.append(other * (wanted / found)[:, None])
    changed = Exchangeable(
        structure.spec, structure.mean, structure.permutations, factors, structure.parameters, network=structure.network
    )
    return replace(base, groups=(replace(group, structure=changed),))


def artifacts(population: Population, select: str, folder: Path) -> Iterator[Path]:
    """One artifact for each way and gain."""
    folder.mkdir(parents=True, exist_ok=True)
    for way, gains in GAINS.items():
        for gain in gains:
            file = folder / f"{way}-{gain:g}.safetensors"
            if not file.exists():
                if way == "extrapolation":
                    result = extrapolated(population, select, gain)
                else:
                    options = {"gain": gain, "denoise": way}
                    result = fit(population, select.split(","), structure="exchangeable", joint="all", options=options)
                result.save(file)
            yield file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("one-structure"))
    parser.add_argument("--out", type=Path, default=run.HERE)
    parser.add_argument("--only", choices=run.CASES, action="append")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=32)
    options = parser.parse_args()
    for name in options.only or ("convnext", "vit"):
        case, folder = run.CASES[name], options.work / name
        files = [str(file) for file in artifacts(Population(folder / "population.pop"), case.select, folder / "ways")]
        arms = ["default", InitConfig(artifact=files[0], control="scale"), *files]
        recipe = case.recipe.replace({"training.epochs": case.short})
        found = bench(
            recipe,
            arms,
            folder / "alternatives",
            seeds=options.seeds,
            seed=run.BENCH_SEED,
            workers=options.workers,
            device="cpu",
        )
        run.merge(options.out / "alternatives.json", name, {"arms": found.arms})
        print(found.text(), flush=True)


if __name__ == "__main__":
    main()
