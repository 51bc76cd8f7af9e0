"""Fit the layers of those networks of a population that copy: `fit.py POPULATION -o copiers.safetensors`."""

import argparse
from pathlib import Path

import numpy as np

import weightscope as ws
from weightscope.artifacts.population_fit import PopulationFit
from weightscope.statistics.samples import WeightArray

LEAST = 0.9  # accuracy at the training length of a network that copies


def fitted(population: ws.Population, least: float = LEAST) -> PopulationFit:
    """An exchangeable distribution of all tensors of the state-space layers of the networks that copy."""
    copiers = population.metrics["test_accuracy"] >= least
    weights = WeightArray(np.asarray(population)[copiers], population.spec)
    return ws.fit(weights, "*.mixer.*", structure="exchangeable", joint="all")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("population", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("copiers.safetensors"))
    parser.add_argument("--least", type=float, default=LEAST, help="accuracy of a network that copies")
    options = parser.parse_args(arguments)
    population = ws.Population(options.population)
    result = fitted(population, options.least)
    print(result.text())
    result.save(options.out)


if __name__ == "__main__":
    main()
