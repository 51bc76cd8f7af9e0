"""A further kind of task is one file, as this one: a section that is registered, its source, and its batches."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weightscope import Population, Recipe
from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.benchmarking import bench
from weightscope.data.metrics import LOSS
from weightscope.data.task import SECTIONS, Task
from weightscope.errors import RecipeError, UsageError
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")


class LineConfig(Task):
    """Noisy values of a linear function of vectors; mean squared error."""

    what: ClassVar[str] = "vectors"
    input_axes: ClassVar[int] = 1
    source: ClassVar[str] = f"{__name__}:LineSource.of"
    batches: ClassVar[str] = f"{__name__}:LineBatches"

    size: int
    train: int = 64

    @property
    def metrics(self):
        return (LOSS,)

    def sizes(self):
        return {"inputs": self.size}

    def input_shape(self):
        return (self.size,)

    def output_shape(self):
        return (1,)


@dataclass(frozen=True)
class LineSource:
    inputs: Tensor  # (n, size)
    targets: Tensor  # (n, 1)
    examples: int
    nbytes: int = 0

    @classmethod
    def of(cls, section, root=None):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(section.train + 32, section.size, generator=generator)
        return cls(inputs, inputs.sum(1, keepdim=True), section.train)

    @cached_property
    def fingerprint(self):
        return hashlib.sha256(self.inputs.numpy().data).hexdigest()[:16]

    def shortened(self, train):
        return replace(self, examples=train)


class LineBatches:
    reported = ("train_loss",)
    evaluated = ("test_loss",)

    def __init__(self, recipe, ids, data, device, nets):
        self.nets, self.data = nets, data
        self.batch = min(recipe.training.batch_size, data.examples)
        self.steps = data.examples // self.batch
        self.streams = [numpy_generator(recipe.population.seed, k, Purpose.ORDER) for k in ids]

    def draw(self):
        orders = [stream.permutation(self.data.examples)[: self.steps * self.batch] for stream in self.streams]
        order = np.stack(orders).reshape(len(orders), self.steps, self.batch)
        return {"order": torch.from_numpy(order.swapaxes(0, 1).copy())}

    def losses(self, numbers):
        order = numbers["order"]  # (T, B)
        return ((self.nets(self.data.inputs[order]) - self.data.targets[order]).square().mean((1, 2)),)

    @torch.no_grad()
    def evaluate(self):
        self.nets.eval()
        held_out = slice(self.data.examples, None)
        found = self.nets(self.data.inputs[held_out])  # the same for all networks
        return {"test_loss": (found - self.data.targets[held_out]).square().mean((1, 2))}


def two_layers(inputs, width=8):
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, 1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SECTIONS, "line", LineConfig)


PLAIN = {
    "network": {"type": two_layers, "width": 8},
    "data": {"name": "line", "size": 3},
    "training": {"epochs": 20, "batch_size": 16, "learning_rate": 0.03},
    "population": {"networks": 5, "tile": 4, "seed": 1},
}


def recipe(**training):
    return Recipe.parse({**PLAIN, "training": PLAIN["training"] | training})


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_a_population_of_another_kind_of_task(engine, tmp_path):
    plan = recipe(engine=engine, kernels="torch")
    population = collect(plan, tmp_path / "a.pop", workers=1, device="cpu", progress=False)
    start = population.metrics["train_loss_per_epoch"][:, 0]
    assert (population.metrics["test_loss"] < 0.1 * start).all()
    assert not population.metrics["diverged"].any()
    assert population.spec.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    again = Population(tmp_path / "a.pop", trust=True)
    assert again.recipe == plan
    assert isinstance(again.recipe.data, LineConfig)
    inputs = torch.randn(7, 3)
    assert again.network(4)(inputs).shape == (7, 1)


def test_initialisers_are_compared_by_its_metric(tmp_path):
    inits = ["default", "kaiming_uniform"]
    result = bench(recipe(), inits, tmp_path / "bench", seeds=3, workers=1, device="cpu", progress=False)
    assert result.metric == LOSS
    assert [row["n"] for row in result.arms] == [3, 3]


def test_what_goes_with_other_tasks_only_is_refused():
    with pytest.raises(RecipeError, match=r"network.type: vit takes images, line has vectors; expected .*:function"):
        recipe().replace({"network": {"type": "vit", "width": 8, "depth": 1, "heads": 2}})
    with pytest.raises(RecipeError, match=r"data.sise: unknown key, did you mean 'size'"):
        recipe().replace({"data": {"name": "line", "sise": 3}})
    with pytest.raises(UsageError, match="expected images, found line, which has vectors"):
        _ = recipe().images
