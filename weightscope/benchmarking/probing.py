"""`linear_probe`: how good are the features of an initialised network, before any training?"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util import atomic
from weightscope._util.environment import environment
from weightscope._util.torch_random import seeded
from weightscope.benchmarking.design import default_folder
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import PROBES, RUNS, Design
from weightscope.data import Dataset
from weightscope.data.augment import normalise
from weightscope.errors import UsageError
from weightscope.init.named import Init
from weightscope.networks import build_for
from weightscope.population import recipe_of
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training.devices import current, one_thread, resolve_device
from weightscope.training.distillation import head_of
from weightscope.training.initial_weights import initial_weights
from weightscope.training.request import input_hashes

_IMAGES = 250
_ITERATIONS = 10_000  # of L-BFGS, at most


def linear_probe(
    recipe: Recipe | str | Path,
    inits: Sequence[Init] | Mapping[str, Init] = (),
    out: str | Path | None = None,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    **given: Any,
) -> BenchResult:
    """Compare initialisers by linear classifiers on the features of the networks as they are initialised.

    Features are the inputs of the network's classifier, with the network in evaluation mode and images that are not
    augmented. Each has mean 0 and variance 1 over the training images, and the classifier is scikit-learn's
    `LogisticRegression` with its default penalty, |W|^2 / 2 for a sum of losses over images. Network k of every arm has
    the same default start.

    The arguments are those of `bench`, without what is about workers. Of the recipe, data and network are used, not the
    training: its fields cannot vary, and are left out of the recipe's [bench] table; `epochs` of the results are 0.
    Each network's result is stored when it is there, and calling again resumes.

    Source: selection paper, section 5, Table 8, after He et al., Masked autoencoders are scalable vision learners,
    2021, who train the classifier for 90 epochs on augmented images.

    Example:
        >>> large = 'select_weights(teacher="large.safetensors")'
        >>> print(linear_probe("digits-vit", ["default", large], seeds=8))
    """
    for name in ("frozen", "epochs"):
        if given.pop(name, None) not in (None, (), []):
            raise UsageError(f"{name}: a linear probe trains no tensor of the network; leave it out")
    if trained := [name for name in given.get("vary") or {} if _is_trained(name)]:
        raise UsageError(f"{trained[0]}: a linear probe does not train the network, so it would change nothing")
    if out is not None and (Path(out) / RUNS).exists():
        raise UsageError(f"{out}: holds a benchmark of trained networks; give the probe another folder (-o)")
    if out is None:
        out = f"{str(default_folder(recipe)).removesuffix('-bench')}-probe"
    recipe = recipe_of(recipe)
    if recipe.data.what != "images":
        raise UsageError(
            f"data.name: expected images for a linear probe, found {recipe.data.name}; to train only what is around "
            "the blocks of a network for sequences, use `bench --frozen` with a pattern of the blocks' tensors"
        )
    if recipe.bench is not None:
        kept = {name: values for name, values in recipe.bench.vary.items() if not _is_trained(name)}
        table = recipe.bench.model_copy(update={"vary": kept, "epochs": (), "frozen": None})
        recipe = recipe.model_copy(update={"bench": table})
    design = Design.of(recipe, inits, out, data=data, probe=True, **given)
    design.check()
    where = resolve_device(device)
    folders = [(design.folder / PROBES / arm.folder).with_suffix("") for arm in design.arms]
    found = (_probed(arm.recipe, folder, data, where) for arm, folder in zip(design.arms, folders, strict=True))
    return design.result((metrics, environment(str(where)), metrics["hits"]) for metrics in found)


def _is_trained(names: str) -> bool:
    return any(name.strip().startswith(("training.", "distillation.")) for name in names.split(","))


def _probed(recipe: Recipe, folder: Path, data: str | Path | None, device: torch.device) -> dict[str, np.ndarray]:
    """The metrics of the networks of one arm, each kept in a file that is named by a hash of all inputs."""
    images = recipe.images.load(data).to(device)
    values = recipe.to_dict()
    inputs = {name: values[name] for name in values if name not in ("training", "distillation", "population")}
    inputs |= {"seed": recipe.population.seed, "images": images.fingerprint}
    inputs |= input_hashes(recipe.model_copy(update={"distillation": None}))
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    atomic.make_folder(folder)
    with seeded(0):
        network = build_for(recipe).to(device)
    rows = []
    for k in range(recipe.population.networks):
        file = folder / f"{k}-{digest}.json"
        if not file.exists():
            (weights,) = initial_weights(recipe, [k], lambda: build_for(recipe))
            with one_thread(), current(device):
                parts = (images.train_images, images.test_images)
                train, test = (features(network, weights, part, images) for part in parts)
            labels = (images.train_labels.cpu().numpy(), images.test_labels.cpu().numpy())
            atomic.write(file, json.dumps(_classified(train, labels[0], test, labels[1])).encode())
        rows.append(json.loads(file.read_text()))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _classified(train: np.ndarray, labels: np.ndarray, test: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """The metrics of a linear classifier of features (n, d), and which of the test images it classifies rightly."""
    from sklearn.linear_model import LogisticRegression  # a second
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not (np.isfinite(train).all() and np.isfinite(test).all()):
        nothing = dict.fromkeys(("test_accuracy", "test_loss"), np.nan)
        return nothing | {"diverged": True, "hits": [False] * len(test)}
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS)).fit(train, labels)
    scores = np.full((len(test), max(labels.max(), wanted.max()) + 1), -np.inf)  # of classes without training images
    scores[:, classifier.classes_] = classifier.predict_log_proba(test)
    right = scores.argmax(1) == wanted
    loss = -float(scores[np.arange(len(test)), wanted].mean())
    return {"test_accuracy": float(right.mean()), "test_loss": loss, "diverged": False, "hits": right.tolist()}


@torch.no_grad()
def features(network: nn.Module, weights: np.ndarray, images: Tensor, data: Dataset) -> np.ndarray:
    """The inputs (n, d) of the classifier of the network with weights (D,), in evaluation mode, float64."""
    tensors = {name: torch.from_numpy(value) for name, value in WeightSpec.of(network).unpack(weights).items()}
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
    return torch.cat(found).double().cpu().numpy()
