"""`linear_probe`: how good are the features of an initialised network, before any training?"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util import atomic
from weightscope._util.environment import environment
from weightscope._util.seeding import Purpose, numpy_generator, torch_seed
from weightscope._util.sources import read_regular
from weightscope._util.torch_random import seeded
from weightscope.benchmarking.design import Axis, Init, axes_of, default_folder
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import PROBES, RUNS, Design
from weightscope.data import Dataset
from weightscope.data.augment import normalise
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.population import recipe_of
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training.devices import current, one_thread, resolve_device
from weightscope.training.distillation import head_of
from weightscope.training.image_task import hits
from weightscope.training.initial_weights import initial_weights
from weightscope.training.optimiser import schedule_factor
from weightscope.training.request import input_hashes

_LARGEST = 16 * 2**20
_log = logging.getLogger(__name__)

EPOCHS = 90
_RATE, _REFERENCE_BATCH, _WARMUP = 0.1, 256, 1 / 9  # He et al. 2021, Table 10: 10 of 90 epochs of warm-up
_MOMENTUM, _TRUST = 0.9, 0.001
_HEAD_STD = 0.01
_EPS = 1e-6  # of BatchNorm
_GROUP = 8  # networks whose heads are trained together
_IMAGES = 250
_METRICS = ("test_accuracy", "test_accuracy_per_epoch", "test_loss", "diverged", "hits")  # hits: by image


def linear_probe(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] | Mapping[str, Init] = (),
    out: str | Path | None = None,
    *,
    epochs: Sequence[int] = (EPOCHS,),
    data: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    progress: bool = True,
    **given: Any,
) -> BenchResult:
    """Compare initialisers by linear classifiers on the features of the networks as they are initialised.

        features -> BatchNorm without weight and bias -> linear classifier

    Features are the inputs of the network's classifier, with the network in evaluation mode and images that are not
    augmented. The new classifier is trained by LARS with rate 0.1 batch / 256, momentum 0.9 and no weight decay; the
    rate rises linearly over the first ninth of the steps and then follows half a cosine to 0. Its weights start from a
    truncated normal distribution of standard deviation 0.01, its biases from 0. Network k of every arm has the same
    default start, classifier and batches.

    One step changes the classifier's matrix by about 4e-6 batch of its norm. Published numbers are for 50,000 images or
    more; a thousand need some hundred epochs.

    The arguments are those of `bench`; `workers` and `progress` have no effect. Of the recipe, data, network and batch
    size are used, not the training: fields of the training, which would change nothing, may have one value in `vary`,
    and are left out of the recipe's [bench] table. `epochs` are the classifier's. Each network's result is stored when
    it is there, and calling again resumes.

    Source: selection paper, section 5, Table 8, after He et al., Masked autoencoders are scalable vision learners,
    2021, Table 10 (which augments images by random resized crops and flips).

    Example:
        >>> large = 'select_weights(teacher="large.safetensors")'
        >>> print(linear_probe("digits-vit", ["default", large], seeds=8))
    """
    if given.get("frozen") is not None:
        raise UsageError("frozen: a linear probe trains no tensor of the network; leave it out")
    for axis in axes_of(given.get("vary") or ()):
        if (name := _ignored(axis)) is not None and len(axis.points) > 1:
            raise UsageError(f"{name}: a linear probe does not train the network, so it would change nothing")
    if out is not None and (Path(out) / RUNS).exists():
        raise UsageError(f"{out}: holds a benchmark of trained networks; give the probe another folder (-o)")
    if out is None:
        out = f"{str(default_folder(recipe)).removesuffix('-bench')}-probe"
    recipe = _without_training(recipe_of(recipe))
    if recipe.data.what != "images":
        raise UsageError(
            f"data.name: expected images for a linear probe, found {recipe.data.name}; to train only what is around "
            "the blocks of a network for sequences, use `bench --frozen` with a pattern of the blocks' tensors"
        )
    design = Design.of(recipe, inits, out, epochs=tuple(epochs) or (EPOCHS,), data=data, **given)
    design.check()
    where = resolve_device(device)
    folders = [(design.folder / PROBES / arm.folder).with_suffix("") for arm in design.arms]
    found = (_probed(arm.recipe, folder, data, where) for arm, folder in zip(design.arms, folders, strict=True))
    return design.result((metrics, environment(str(where)), None, metrics["hits"]) for metrics in found)


def _ignored(axis: Axis) -> str | None:
    """The field of an axis that is of the network's training; None if there is none."""
    fields = [name for name in axis.names if name.startswith(("training.", "distillation."))]
    return next((name for name in fields if name != "training.batch_size"), None)


def _without_training(recipe: Recipe) -> Recipe:
    """The recipe without the axes of its [bench] table that a probe ignores."""
    if recipe.bench is None:
        return recipe
    kept = {name: values for name, values in recipe.bench.vary.items() if _ignored(Axis.of(name, values)) is None}
    return recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"vary": kept})})


def _probed(recipe: Recipe, folder: Path, data: str | Path | None, device: torch.device) -> dict[str, np.ndarray]:
    """The metrics of the networks of one arm, each kept in a file that is named by a hash of all inputs."""
    images = recipe.images.load(data).to(device)
    text = json.dumps({**_identity(recipe), "images": images.fingerprint, "metrics": _METRICS}, sort_keys=True)
    digest, count = hashlib.sha256(text.encode()).hexdigest()[:16], recipe.population.networks
    files = [folder / f"{k}-{digest}.json" for k in range(count)]
    atomic.make_folder(folder)
    atomic.sweep(folder)
    found = {k: metrics for k, file in enumerate(files) if (metrics := _stored(file)) is not None}
    with one_thread(), current(device):
        for start in range(0, count, _GROUP):
            ids = [k for k in range(start, min(start + _GROUP, count)) if k not in found]
            metrics = _heads(recipe, ids, images, device) if ids else {}
            for slot, k in enumerate(ids):
                found[k] = {name: values[slot] for name, values in metrics.items()}
                text = json.dumps({name: value.tolist() for name, value in found[k].items()})
                atomic.write(files[k], text.encode() + b"\n")
    return {name: np.stack([found[k][name] for k in range(count)]) for name in _METRICS}


def _stored(path: Path) -> dict[str, np.ndarray] | None:
    """The metrics of one network; None if there are none, or they are damaged."""
    try:
        if not path.exists():
            return None
        values = json.loads(read_regular(path, _LARGEST))
        return {name: np.array(values[name], bool if name in ("diverged", "hits") else float) for name in _METRICS}
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        _log.warning("%s: damaged; the network is probed again", path)
        return None


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What a network's result depends on, by name; the number of networks, training and teacher are no part of it."""
    values = recipe.to_dict()
    values.pop("distillation", None)
    training, population = values["training"], values["population"]
    values["training"] = {name: training[name] for name in ("epochs", "batch_size")}
    values["population"] = {"seed": population["seed"]}
    return values | input_hashes(recipe.model_copy(update={"distillation": None}))


def _heads(recipe: Recipe, ids: Sequence[int], data: Dataset, device: torch.device) -> dict[str, np.ndarray]:
    """Train the classifiers of some networks; returns `_METRICS`: (T,), by epoch (T, E), by test image (T, n)."""
    weights = initial_weights(recipe, ids, lambda: build_for(recipe))
    with seeded(0):
        network = build_for(recipe).to(device)
    images = (data.train_images, data.test_images)
    train, test = (torch.stack([_features(network, row, part, data) for row in weights]) for part in images)
    root, epochs = recipe.population.seed, recipe.training.epochs
    batch = min(recipe.training.batch_size, train.shape[1])
    probe = Probe(train.shape[2], data.info.classes, [torch_seed(root, k, Purpose.PROBE) for k in ids], device)
    steps, rate = train.shape[1] // batch, _RATE * batch / _REFERENCE_BATCH
    orders = [numpy_generator(root, k, Purpose.ORDER) for k in ids]
    slot, curve = torch.arange(len(ids), device=device)[:, None], []
    for epoch in range(epochs):
        order = np.stack([stream.permutation(train.shape[1])[: steps * batch] for stream in orders])
        for step, index in enumerate(torch.from_numpy(order).to(device).split(batch, dim=1)):
            factor = schedule_factor("cosine", epoch * steps + step, epochs * steps, _WARMUP)
            probe.step(train[slot, index], data.train_labels[index], rate * factor)
        loss, right = probe.evaluate(test, data.test_labels)
        curve.append(right.mean(1))
    return dict(zip(_METRICS, (curve[-1], np.stack(curve, axis=1), loss, ~np.isfinite(loss), right), strict=True))


@torch.no_grad()
def _features(network: nn.Module, row: np.ndarray, images: Tensor, data: Dataset) -> Tensor:
    """The inputs (n, d) of the classifier of the network with weights (D,), in evaluation mode."""
    tensors = {name: torch.from_numpy(value) for name, value in WeightSpec.of(network).unpack(row).items()}
    network.load_state_dict(tensors, strict=False)  # integer buffers are not in the spec
    network.eval()
    found: list[Tensor] = []
    head = network.get_submodule(head_of(network, data.info.classes))
    handle = head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        for part in images.split(_IMAGES):
            network(normalise(part, data.mean, data.std))
    finally:
        handle.remove()
    return torch.cat(found)


class Probe:
    """Linear classifiers of T networks behind BatchNorm without weight and bias, trained by LARS.

        w <- w - rate m,   m <- 0.9 m + q g,   q = 0.001 |w| / |g| for the matrix of a network (1 if either is 0)

    and q = 1 for biases.

    Source: You, Gitman and Ginsburg, Large batch training of convolutional networks, 2017, Algorithm 1; that biases
    are not adapted is the variant of He et al. 2021.
    """

    def __init__(self, width: int, classes: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        start = torch.empty(len(seeds), classes, width)
        for matrix, seed in zip(start, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            nn.init.trunc_normal_(matrix, std=_HEAD_STD, a=-2.0, b=2.0, generator=generator)
        self.weights = start.to(device).requires_grad_()  # (T, K, d)
        self.biases = torch.zeros(len(seeds), classes, device=device, requires_grad=True)
        self.momenta = [torch.zeros_like(self.weights), torch.zeros_like(self.biases)]
        self.mean = torch.zeros(len(seeds) * width, device=device)
        self.variance = torch.ones_like(self.mean)

    def logits(self, features: Tensor, *, training: bool = False) -> Tensor:
        """(T, B, K) of features (T, B, d)."""
        networks, batch, width = features.shape
        stacked = features.transpose(0, 1).reshape(batch, networks * width)
        normal = F.batch_norm(stacked, self.mean, self.variance, training=training, eps=_EPS)
        rows = normal.view(batch, networks, width).transpose(0, 1)
        return torch.baddbmm(self.biases[:, None], rows, self.weights.mT)

    def step(self, features: Tensor, labels: Tensor, rate: float) -> None:
        """One step on features (T, B, d) with labels (T, B)."""
        logits = self.logits(features, training=True)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
        gradients = torch.autograd.grad(losses.sum(), [self.weights, self.biases])
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(tensor, dim=(1, 2)) for tensor in (self.weights, gradients[0])]
            share = torch.where((norms[0] > 0) & (norms[1] > 0), _TRUST * norms[0] / norms[1], 1.0)
            scaled = (gradients[0] * share[:, None, None], gradients[1])
            for value, momentum, step in zip((self.weights, self.biases), self.momenta, scaled, strict=True):
                value.sub_(momentum.mul_(_MOMENTUM).add_(step), alpha=rate)

    @torch.no_grad()
    def evaluate(self, features: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Loss (T,) and whether each prediction is right (T, n), on features (T, n, d) with labels (n,)."""
        logits = self.logits(features)
        loss = -F.log_softmax(logits, dim=2)[:, torch.arange(len(labels), device=labels.device), labels].mean(1)
        return loss.double().cpu().numpy(), hits(logits, labels).bool().cpu().numpy()
