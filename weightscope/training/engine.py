"""`train_tile`: train one tile of T networks on one device, from seeds to weights and metrics.

Everything that differs between networks (initial weights, batch order, augmentation, rates, initialiser) comes from
random streams that depend on (root seed, k) only, and a tile is always computed as a whole, padding included, by one
thread on a CPU. So network k has the same bits in any population, on any worker and after any interruption (same build
of torch, same device, and same kernels: torch's, or the same build of compiled ones).
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from weightscope import networks
from weightscope._util.names import matching
from weightscope._util.plugins import is_reference, member
from weightscope._util.seeding import Purpose, numpy_generator
from weightscope._util.torch_random import seeded
from weightscope.data.metrics import PER_EPOCH
from weightscope.data.registry import FOLDER
from weightscope.data.sequence_config import TEXT
from weightscope.data.task import DataSource, Task
from weightscope.errors import DataError
from weightscope.population.shards import TrainedTile
from weightscope.recipe import OwnNetworkConfig, Range, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.devices import DEFAULT_TILE, current, one_thread, resolve_device
from weightscope.training.distillation import Distillation
from weightscope.training.initial_weights import initial_weights
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import networks_for
from weightscope.training.network_check import choose_kernels, frozen
from weightscope.training.optimiser import BatchedAdamW, Plateau, schedule_factor


class Batches(Protocol):
    """What the engine needs of the data: the batches of T networks.

    `hits`, (T, m) booleans of m test images after `evaluate`, are stored if there are any; `speeds` are the images per
    second of each evaluation.
    """

    batch: int
    steps: int
    reported: tuple[str, ...]
    evaluated: tuple[str, ...]

    def draw(self) -> dict[str, Tensor]:
        """The numbers of the next epoch, a row for each step, from each network's own streams."""

    def losses(self, numbers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Losses (T,), with a graph, and what else is reported of the step whose row of numbers is given, (T,) each."""

    def evaluate(self) -> dict[str, Tensor]:
        """Metrics of held-out data, each (T,); `test_loss` is one of them."""


def spec_of(recipe: Recipe) -> WeightSpec:
    """The `WeightSpec` of the recipe's network."""
    return WeightSpec.of(_template(recipe))


def _template(recipe: Recipe) -> torch.nn.Module:
    """A network of the recipe whose weights are not used; on the meta device if nothing else of it is used either."""
    constants = recipe.data.stacked  # such as position codes
    used = isinstance(recipe.network, OwnNetworkConfig) or recipe.training.engine == "loop" or constants
    with seeded(0), torch.device("cpu" if used else "meta"):
        return networks.build_for(recipe)


def train_tile(
    recipe: Recipe,
    tile: int,
    *,
    data_root: str | Path | None = None,
    device: str = "auto",
    kernels: Kernels | None = None,
    data_hash: str | None = None,
) -> TrainedTile:
    """Train the T networks `tile * T, ..., tile * T + T - 1` of a population, as `collect` does.

    Args:
        recipe: the population's recipe.
        tile: index of the tile, counted from 0.
        data_root: the first folder to look for the data set in.
        device: "auto", "cpu" or "cuda".
        kernels: those that were chosen and compared with torch's; by default they are, and the network is checked.
        data_hash: of the data when `collect` was called; DataError if they are others here.
    """
    where = resolve_device(device)
    with one_thread(), current(where):
        if kernels is None:
            kernels = choose_kernels(recipe, where).kernels
        # a reference may be bound to another function later, and files of a folder may change
        changes = is_reference(recipe.data.name) or recipe.data.name in (FOLDER, TEXT)
        data = recipe.data.load(data_root) if changes else _loaded(recipe.data, data_root)
        if data_hash not in (None, data.fingerprint):
            hint = "did they change, or is it another copy?"
            if is_reference(recipe.data.name):
                hint = "if it draws random numbers, give it a fixed seed"
            difference = f"expected data of hash {data_hash} in each worker, found {data.fingerprint}"
            raise DataError(f"{recipe.data.name}: {difference}; {hint}")
        return TileRun(recipe, tile, data, where, kernels).train()


_loaded = lru_cache(maxsize=2)(Task.load)


def swept(value: Any, root: int, k: int, position: int) -> float:
    """The hyperparameter of network k: a number, entry k mod length of a list, or a log-uniform draw from a range."""
    if isinstance(value, Range):
        draw = numpy_generator(root, k, Purpose.SWEEP).random(position + 1)[position]
        return float(value.low * (value.high / value.low) ** draw)
    return float(value[k % len(value)] if isinstance(value, list) else value)


class TileRun:
    """The training of one tile: `train` runs all of it, `epoch` one pass over the data."""

    def __init__(self, recipe: Recipe, tile: int, data: DataSource, device: torch.device, kernels: Kernels) -> None:
        self.recipe, self.tile, self.device = recipe, tile, device
        training, population = recipe.training, recipe.population
        count = population.tile or DEFAULT_TILE
        self.ids = range(tile * count, (tile + 1) * count)
        template = _template(recipe)
        left_out = frozen(template, training.frozen)
        stored, distillation = WeightSpec.of(template), Distillation.of(recipe, device)
        if distillation is not None:
            template = distillation.extended(template, recipe.data.output_shape()[-1])
        self.nets = networks_for(recipe, template, self.ids, device, kernels)
        start = initial_weights(recipe, self.ids, lambda: networks.build_for(recipe))
        self.stored = self.nets.spec.columns(stored)  # without what only distillation needs
        self.nets.weights[:, self.stored] = torch.from_numpy(start).to(device)
        if distillation is not None:
            distillation.attach(self.nets, population.seed, self.ids)
        self.nets.freeze(left_out)
        self.rates, self.decays = (
            np.array([swept(value, population.seed, k, position) for k in self.ids])
            for position, value in enumerate((training.learning_rate, training.weight_decay))
        )
        decayed, names = torch.zeros(self.nets.spec.size, dtype=torch.bool), self.nets.spec.names
        exempt = {*left_out, *(matching(training.decay_exclude, names) if training.decay_exclude else ())}
        for tensor in self.nets.spec.tensors:
            decayed[self.nets.spec.slices[tensor.name]] = tensor.role == "parameter" and tensor.name not in exempt
        each = (torch.from_numpy(values).to(device, torch.float32) for values in (self.rates, self.decays))
        self.optimiser = BatchedAdamW(
            self.nets.weights, self.nets.gradient, decayed.to(device), *each, betas=training.betas, kernels=kernels
        )
        follows = training.schedule == "plateau"
        self.plateau = Plateau(self.rates, training.factor, training.patience) if follows else None
        teacher = {} if distillation is None else {"distillation": distillation}
        self.batches: Batches = member(recipe.data.batches)(recipe, self.ids, data, device, self.nets, **teacher)
        self.batch, self.steps_per_epoch = self.batches.batch, self.batches.steps
        self.average = self.nets.weights.clone() if training.ema else None  # (T, D)
        unit = self.steps_per_epoch if recipe.data.snapshot_unit == "epoch" else 1
        self.snapshot_steps = [unit * count for count in population.snapshots or ()]
        self.snapshots: list[np.ndarray] = []  # (T, D) each
        self.now = torch.zeros(1, dtype=torch.int64, device=device)  # the step within the epoch
        self.numbers: dict[str, Tensor] = {}  # random numbers of the epoch, one row per step
        self.ready: dict[str, Tensor] | None = None  # those of the next epoch, still on the host
        self.sums = torch.zeros(len(self.batches.reported), count, device=device)  # of each, over the steps
        if kernels == "inductor":  # or a CUDA graph would copy the images at each step, and could not change weights
            for tensor in [*vars(self.batches).values(), *vars(self.optimiser).values()]:
                if isinstance(tensor, Tensor):
                    torch._dynamo.mark_static_address(tensor)
        self.losses = by_kernels(self.batches.losses, kernels)
        self.update = by_kernels(self.optimiser.step, kernels)

    def train(self) -> TrainedTile:
        """Train all epochs; returns the weights and metrics of the tile."""
        training = self.recipe.training
        history: dict[str, list[np.ndarray]] = {}
        self._keep(0)
        for epoch in range(training.epochs):
            found = self.epoch(epoch)
            if training.evaluate == "epoch" or epoch == training.epochs - 1:
                found |= self.evaluate()
                if self.plateau is not None:
                    found["learning_rate"] = self.plateau.rates
                    rates = self.plateau.step(found.get("validation_loss", found["test_loss"]))
                    self.optimiser.rate.copy_(torch.from_numpy(rates))  # in place, as a compiled step needs
            else:
                found |= {name: np.full(len(self.ids), np.nan) for name in self.batches.evaluated}
            for name, values in found.items():
                history.setdefault(name, []).append(values)
        weights = self._weights()
        metrics = {name: values[-1] for name, values in history.items()}
        metrics |= {f"{name}{PER_EPOCH}": np.stack(values, axis=1) for name, values in history.items()}
        losses = np.stack([metrics["train_loss"], metrics["test_loss"]])
        finite = np.isfinite(weights).all(axis=1) & np.isfinite(losses).all(axis=0)
        metrics |= {"diverged": ~finite, "learning_rate": self.rates, "weight_decay": self.decays}
        metrics["init"] = np.array([k % len(self.recipe.init) for k in self.ids])
        snapshots = np.stack(self.snapshots, axis=1) if self.snapshot_steps else None
        hits = getattr(self.batches, "hits", None)
        hits = None if hits is None else hits.cpu().numpy()
        later = getattr(self.batches, "speeds", [])[1:]  # the first evaluation allocates, and may compile
        speed = float(np.median(later)) if later else None
        return TrainedTile(self.tile, weights, metrics, snapshots, hits=hits, speed=speed)

    def _weights(self) -> np.ndarray:
        """What is stored of the weights, (T, D): of the average, if there is one."""
        kept = self.nets.weights if self.average is None else self.average
        return np.take(kept.cpu().numpy(), self.stored, axis=1)

    def _keep(self, steps: int) -> None:
        """Keep the weights after this number of steps if they are those of a snapshot."""
        if steps in self.snapshot_steps:
            if any(tensor.role == "statistic" for tensor in self.nets.spec):
                self.evaluate()  # which sets them
                self.nets.train()
            self.snapshots.append(self._weights())

    def epoch(self, epoch: int) -> dict[str, np.ndarray]:
        """One pass over the training data; returns the running `train_loss` and `train_accuracy`, or what the task has.

        All random numbers are uploaded before the first step; only snapshots are read back before the last. While a GPU
        works on the steps, the host draws the random numbers of the next epoch.
        """
        training = self.recipe.training
        self.nets.train()
        for name, values in ((self.ready or self.batches.draw()) | self._scalars(epoch)).items():
            if name in self.numbers:
                self.numbers[name].copy_(values)  # a CUDA graph reads them at this address
            else:
                self.numbers[name] = values.to(self.device)
        self.now.zero_()
        self.sums.zero_()
        for done in range(self.steps_per_epoch * epoch, self.steps_per_epoch * (epoch + 1)):
            self._step()
            self._keep(done + 1)
        self.ready = self.batches.draw() if epoch + 1 < training.epochs else None
        means = (self.sums / self.steps_per_epoch).cpu().numpy().astype(np.float64)
        return dict(zip(self.batches.reported, means, strict=True))

    def _step(self) -> None:
        """One step of all networks.

        It may be compiled, and replayed as a CUDA graph, so everything that changes from step to step is a tensor on
        the device: `now` selects the rows of `numbers`, and the metrics are added up in `sums`.
        """
        training = self.recipe.training
        if self.nets.kernels == "inductor":
            torch.compiler.cudagraph_mark_step_begin()
        numbers = {name: values.index_select(0, self.now)[0] for name, values in self.numbers.items()}
        found = self.losses(numbers)
        self.nets.backward(found[0].sum())  # the gradient of each row of weights is that of its own loss
        self.update(numbers["scalars"], training.clip_norm)
        if self.average is not None:
            self.average.lerp_(self.nets.weights, numbers["new"])
        for total, values in zip(self.sums, found, strict=True):
            total += values.detach()
        self.now += 1

    def _scalars(self, epoch: int) -> dict[str, Tensor]:
        """Of each step, the optimiser's arguments (steps, 3), and the weight (steps,) of new weights in an average."""
        training, steps = self.recipe.training, self.steps_per_epoch
        rows = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            factor = schedule_factor(training.schedule, step, training.epochs * steps, training.warmup)
            rows.append(self.optimiser.scalars(step + 1, factor))
        found = {"scalars": torch.tensor(rows, dtype=torch.float32)}
        if self.average is not None:
            found["new"] = torch.full((steps,), 1 - training.ema)
            if epoch == 0:
                found["new"][0] = 1
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, np.ndarray]:
        """Return the metrics of held-out data, each (T,); of the averaged weights, if there are any."""
        if self.average is not None:
            trained = self.nets.weights.clone()
            self.nets.weights.copy_(self.average)
        found = {name: values.cpu().numpy().astype(np.float64) for name, values in self.batches.evaluate().items()}
        if self.average is not None:
            self.average.copy_(self.nets.weights)  # with the statistics of BatchNorm
            self.nets.weights.copy_(trained)
        return found
