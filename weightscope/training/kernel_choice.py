"""The choice of kernels: C on a CPU and `torch.compile` on a GPU where they agree with torch's, or torch's.

A kernel may be wrong on a machine where it has never run. So the recipe's network is run in training, in the
calibration of BatchNorm and in the evaluation, and its logits and the gradient of each tensor are compared with those
of torch's operations in float64; so are steps of AdamW.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from weightscope import networks
from weightscope._util import plugins
from weightscope._util.torch_random import seeded
from weightscope.data.image_section import dataset_info
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.spec import WeightSpec
from weightscope.training.image_task import CALIBRATION_BATCHES, EVALUATION_IMAGES
from weightscope.training.kernels import build
from weightscope.training.kernels.build import NotSupported
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import copied, networks_for
from weightscope.training.network_check import Float64, check_network, errors, frozen, set_weights
from weightscope.training.optimiser import BatchedAdamW

_log = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest error of each value or gradient, relative to the largest entry of its network."""

_NOISE = 30.0  # times the error of torch's operations of the same type
_CANCELS = 1e-2  # of the network's largest value, below which a tensor's gradient may be what is left of larger ones
_LONGEST = 240  # characters; a shard's texts have at most 256
_SCALES = (1.0, 1 / 32)  # of two networks' weights: eps has an effect on small variances only
_IMAGES = 32  # a multiple of the numbers in a vector register
_RATES, _DECAYS, _STEPS = (0.1, 0.01), (0.1, 0.0), 3


class WrongKernel(UsageError):
    """A kernel that does not run, or computes something else than torch."""


@dataclass(frozen=True)
class Choice:
    """The kernels that train a recipe on a device."""

    kernels: Kernels
    build: str = ""  # what else their results depend on: the build of kernels in C or the version of Triton
    checked: str = ""  # what was compared with torch's kernels, or why compiled kernels are not used


_choices: dict[tuple[Any, ...], Choice] = {}  # a benchmark has many recipes that differ in nothing here


def choose_kernels(recipe: Recipe, device: torch.device) -> Choice:
    """The kernels that train the recipe on a device; its network and compiled kernels are checked on first use.

    With "auto", torch's are taken for sequences and where there is no C compiler or no Triton, and with a warning where
    compiled kernels cannot be built or launched, or do not agree; with "compiled", these are errors.
    """
    network = plugins.imported(recipe.network.type) if plugins.is_reference(recipe.network.type) else None
    key = network, str(device), os.environ.get("CC"), json.dumps(settings(recipe))
    if key not in _choices:
        _choices[key] = _choose(recipe, device)
    return _choices[key]


def settings(recipe: Recipe) -> list[Any]:
    """What of a recipe the choice depends on."""
    found = [recipe.network.model_dump(mode="json"), recipe.data.model_dump(mode="json")]
    names = ("batch_size", "betas", "precision", "engine", "frozen", "kernels")
    return [*found, *(getattr(recipe.training, name) for name in names)]


def _choose(recipe: Recipe, device: torch.device) -> Choice:
    training = recipe.training
    check_network(recipe)
    if training.kernels == "torch" or training.engine == "loop" or recipe.data.stacked:
        return Choice("torch")
    kernels: Kernels = "inductor" if device.type == "cuda" else "c"
    try:
        _refuse(recipe, device)
        made = build.build_id() if kernels == "c" else f"triton {version('triton')}"
        choice = Choice(kernels, made, check_kernels(recipe, kernels, device))
    except UsageError as error:
        if training.kernels != "auto":
            raise
        # in one line of ASCII, as a shard's header can hold it
        why = " ".join(str(error).split()).encode("ascii", "replace").decode()
        why = why if len(why) <= _LONGEST else f"{why[: _LONGEST - 3]}..."
        if not isinstance(error, NotSupported):
            _log.warning("compiled kernels are not used, torch's are: %s", why)
        return Choice("torch", checked=why)
    return choice


def _refuse(recipe: Recipe, device: torch.device) -> None:
    """Raise NotSupported for what compiled kernels cannot do, and where there is no compiler."""
    if device.type not in ("cpu", "cuda"):
        raise NotSupported(f"kernels 'compiled' are for a CPU or CUDA, found device {device}; use kernels 'torch'")
    if device.type == "cuda" and not has_triton():
        raise NotSupported(
            "kernels = 'compiled' need Triton on a GPU; `pip install triton` (part of torch for CUDA on Linux), or "
            "use kernels = 'torch'"
        )
    if device.type == "cpu" and recipe.training.precision != "float32":
        raise NotSupported(
            f"kernels 'compiled' compute in float32 on a CPU, found precision {recipe.training.precision!r}; "
            "use kernels 'torch' or float32"
        )
    if device.type == "cpu":
        build.compiler()


def check_kernels(recipe: Recipe, kernels: Kernels, device: torch.device) -> str:
    """Compare compiled kernels with torch's on what the recipe computes; returns one line of what was compared.

    Two networks run in three ways: by the compiled kernels, by torch's operations in the same type, and by these in
    float64. Refused is an error above `TOLERANCE` and `_NOISE` times that of torch's operations.
    """
    dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
    with seeded(0):
        template = networks.build_for(recipe)
    try:
        found, rounded = (_computed(recipe, template, kind, device, dtype) for kind in (kernels, "torch"))
        with Float64():
            expected = _computed(recipe, copied(template).double(), "torch", device, torch.float64)
        _agree(found, expected, dtype, rounded)
        check_adamw((len(_SCALES), WeightSpec.of(template).size), kernels, device, recipe.training.betas)
    except WrongKernel:
        raise
    except Exception as error:  # whatever a compiler, a driver or a kernel may raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise WrongKernel(f"compiled kernels fail: {why}") from error
    what = "a training step and AdamW" if kernels == "inductor" else "a training step, evaluation and AdamW"
    return f"{what}: equal to torch's within {TOLERANCE[dtype]:.0e}"


def _computed(
    recipe: Recipe, template: nn.Module, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Logits and gradients of a batch in training, and logits of evaluations."""
    generator, data, info = torch.Generator().manual_seed(1), recipe.data, dataset_info(recipe.images)
    nets = networks_for(recipe, template, range(len(_SCALES)), device, kernels)
    set_weights(nets, [template] * nets.count, torch.Generator().manual_seed(2))
    nets.weights.mul_(torch.tensor(_SCALES, dtype=nets.weights.dtype, device=device)[:, None])
    nets.freeze(frozen(template, recipe.training.frozen))
    images = recipe.images.train or info.train or recipe.training.batch_size
    batch = min(recipe.training.batch_size, images)
    (trained, *_), calibrated = _sizes(batch, batch), _sizes(min(images, batch * CALIBRATION_BATCHES), batch)

    def drawn(*shape: int) -> Tensor:
        return data.inputs(generator, *shape).to(device, dtype)

    logits = by_kernels(nets.train().forward, nets.kernels)(drawn(nets.count, trained)).clone()
    direction = torch.randn(logits.shape, generator=generator)
    nets.backward((logits * direction.to(logits)).sum())
    gradients = nets.spec.unpack(nets.gradient.clone())
    found = {"logits": logits.detach()} | {f"the gradient of `{name}`": value for name, value in gradients.items()}
    with torch.no_grad():
        nets.calibrate([drawn(size) for size in calibrated])
        nets.eval()
        tests = recipe.images.test or info.test or 2 * EVALUATION_IMAGES - 1
        for size in _sizes(tests, EVALUATION_IMAGES):
            found[f"the logits of an evaluation of {size} images"] = nets(drawn(size))
    return found


def _sizes(images: int, batch: int) -> list[int]:
    """The sizes of the batches of so many images; of long ones, shorter ones that leave the same part of a vector."""
    return [
        size if size < 2 * _IMAGES else _IMAGES + size % _IMAGES
        for size in (min(images, batch), images % batch)
        if size
    ]


def _agree(
    found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, rounded: dict[str, Tensor] | None = None
) -> None:
    """Compare values of all networks (T, ...); `rounded` are what torch's operations give in the same type."""
    smallest = _CANCELS * torch.stack([errors(value, value)[1] for value in exact.values()]).amax(0)  # (T,)
    for name, value in exact.items():
        error, largest = errors(found[name], value)
        noise = 0 if rounded is None else errors(rounded[name], value)[0]
        if not (error <= TOLERANCE[dtype] * largest.maximum(smallest) + _NOISE * noise).all():  # NaN is not
            wrong = float((error / largest).max())
            raise WrongKernel(f"{name} differs from torch's by {wrong:.1e} of the largest value")


def check_adamw(shape: Sequence[int], kernels: Kernels, device: torch.device, betas: tuple[float, float]) -> None:
    """Compare three steps from random weights, of which some are frozen and some do not decay."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(*shape, generator=generator) for _ in range(1 + _STEPS))
    trained = (torch.arange(shape[1]) % 7 != 3).to(device)
    decayed = trained & (torch.arange(shape[1]) % 5 != 1).to(device)
    results = []
    for backend, kind in ((kernels, torch.float32), ("torch", torch.float64)):
        weights, gradient = start.to(device, kind, copy=True), torch.empty(*shape, dtype=kind, device=device)
        rates, decays = (torch.tensor(values, dtype=kind, device=device) for values in (_RATES, _DECAYS))
        optimiser = BatchedAdamW(weights, gradient, decayed, rates, decays, betas=betas, kernels=backend)
        update = by_kernels(optimiser.step, backend)
        for step in range(_STEPS):
            gradient.copy_(gradients[step].to(device) * trained)
            update(torch.tensor(optimiser.scalars(step + 1, 0.5), dtype=kind, device=device), 1.0)
        moments = {"first moments": optimiser.first, "second moments": optimiser.second}
        results.append({f"AdamW, {name}": value for name, value in ({"weights": weights} | moments).items()})
    _agree(results[0], results[1], torch.float32)
