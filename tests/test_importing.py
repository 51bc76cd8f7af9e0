"""Networks that were trained elsewhere, imported into a population."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightscope import Population, export, inspect, verify


class MLP(nn.Module):
    """A plain network whose tensors are named as in no shipped family."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, hidden), nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, 4)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


def example():
    return MLP(), torch.zeros(4, 8)


def states(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [MLP().state_dict() for _ in range(count)]


def saved(folder, found, suffix=".pt"):
    """The files of some state dicts, named so that their order is that of the list."""
    folder.mkdir()
    files = [folder / f"net-{k:03}{suffix}" for k in range(len(found))]
    for file, state in zip(files, found, strict=True):
        if suffix == ".npz":
            np.savez(file, **{name: value.numpy() for name, value in state.items()})
        else:
            (save_file if suffix == ".safetensors" else torch.save)(state, file)
    return files


def packed(found):
    floats = [[x.numpy().ravel() for x in state.values() if x.is_floating_point()] for state in found]
    return np.stack([np.concatenate(each) for each in floats])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
@pytest.mark.parametrize("by_reference", [False, True])
def test_files_are_copied_or_read_where_they_are(tmp_path, suffix, by_reference):
    found = states(7)
    files = saved(tmp_path / "zoo", found, suffix)
    population = Population.of(files, tmp_path / "zoo.pop", metrics={"loss": range(7)}, by_reference=by_reference)
    order = list(population.spec.names)
    expected = packed([{name: state[name] for name in order} for state in found])
    assert np.array_equal(population.weights(), expected)
    assert np.array_equal(population[2:5], expected[2:5])
    assert np.array_equal(
        population.weights("second.*"), expected[:, population.spec.columns(population.spec.select("second.*"))]
    )
    assert population.metrics["loss"].tolist() == [*range(7)]
    assert [row["source"].endswith(f"net-00{k}{suffix}") for k, row in enumerate(population.rows())] == [True] * 7
    assert not verify(population).damaged
    assert "7 of 7 networks" in inspect(population).text()
    export(population, tmp_path / "zoo.h5")
    assert inspect(tmp_path / "zoo.h5").exported.networks == 7
