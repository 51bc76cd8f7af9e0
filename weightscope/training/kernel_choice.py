"""The choice of kernels: C on a CPU and `torch.compile` on a GPU where they agree with torch's, or torch's.

A kernel may be wrong on a machine where it has never run. So every call of a function in C that the recipe's network
makes in training, in the calibration of BatchNorm and in the evaluation, with batches of the sizes that occur, is
repeated with random numbers of the same shapes and compared with torch's in float64, values and in training gradients;
rounding of a whole network in float32 would hide an error in one of them. What `torch.compile` makes is compared as a
whole. So is the step of AdamW.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from weightscope import networks
from weightscope._util import plugins
from weightscope._util.torch_random import seeded
from weightscope.data.image_section import dataset_info
from weightscope.errors import UsageError
from weightscope.recipe import Recipe
from weightscope.training.image_task import CALIBRATION_BATCHES, EVALUATION_IMAGES
from weightscope.training.kernels import build, functions
from weightscope.training.kernels.build import NotSupported
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import Networks, networks_for
from weightscope.training.network_check import check_network, largest_error, set_weights
from weightscope.training.optimiser import BatchedAdamW

_log = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest error of each value or gradient, relative to the largest entry of its network: some hundred roundings."""

_LONGEST = 240  # characters; a shard's texts have at most 256
_SCALES = (1.0, 1 / 32)  # of two networks' activations and vectors: eps has an effect on small variances only ...
_CANCELS = "convmixer_mixing"  # ... where almost nothing remains of the gradient of this one's bias
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
    check_network(recipe, kernels)
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
    """Compare compiled kernels with torch's on what the recipe computes; returns one line of what was compared."""
    dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
    with seeded(0):
        template = networks.build_for(recipe)
    nets = networks_for(recipe, template, range(len(_SCALES)), device, kernels)
    info, data = dataset_info(recipe.images), recipe.images
    images = data.train or info.train or recipe.training.batch_size
    batch = min(recipe.training.batch_size, images)
    _named("adamw", lambda: check_adamw(nets.weights.shape, kernels, device, recipe.training.betas))
    compared = {"adamw"}
    if kernels == "inductor":
        set_weights(nets, [template] * nets.count, torch.Generator().manual_seed(2))
        _named("torch.compile", lambda: _check_compiled(nets, recipe, batch, dtype))
        compared.add("the network")
    else:
        calibration = min(images, batch * CALIBRATION_BATCHES)
        tests = data.test or info.test or 2 * EVALUATION_IMAGES - 1
        sizes = batch, _sizes(calibration, batch), _sizes(tests, EVALUATION_IMAGES)
        compared |= _check_calls(nets, (info.channels, info.size, info.size), *sizes)
    return f"{', '.join(sorted(compared))}: equal to torch's within {TOLERANCE[dtype]:.0e}"


def _sizes(images: int, batch: int) -> list[int]:
    """The distinct sizes of the batches of so many images."""
    return sorted({min(images, batch), images % batch} - {0})


def _check_calls(
    nets: Networks, shape: tuple[int, ...], batch: int, calibration: list[int], evaluation: list[int]
) -> set[str]:
    """Compare every distinct call of a function in C with batches of these sizes; returns the functions' names."""
    seen: dict[str, str] = {}

    def compare(function: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        gradients = nets.training and not calibrating
        key = json.dumps([function.__name__, _replaced(args, lambda x: list(x.shape)), options, gradients])
        if key not in seen:
            seen[key] = function.__name__
            _named(function.__name__, lambda: _check_call(function, args, options, gradients))

    calibrating = False
    with torch.no_grad(), functions.observed(compare):
        nets.train()(torch.zeros(nets.count, batch, *shape))
        calibrating = True
        nets.calibrate([torch.zeros(size, *shape) for size in calibration])
        nets.eval()
        for size in evaluation:
            nets(torch.zeros(size, *shape))
    return set(seen.values())


def _named(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except WrongKernel:
        raise
    except Exception as error:  # whatever a compiler, a driver or a kernel may raise
        raise WrongKernel(f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _replaced(args: Any, make: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with another value in place of each tensor."""
    if isinstance(args, Tensor):
        return make(args)
    return tuple(_replaced(item, make) for item in args) if isinstance(args, tuple) else args


def _check_call(function: Callable[..., Tensor], args: Any, options: dict[str, Any], gradients: bool) -> None:
    """Compare one call, with random numbers of the same shapes in place of its tensors."""
    name, generator = function.__name__, torch.Generator().manual_seed(0)
    given: list[Tensor] = []

    def make(like: Tensor) -> Tensor:
        """Activations come first; matrices and filters keep their order of magnitude."""
        value = torch.randn(like.shape, generator=generator)
        if given and value.ndim > 2:
            value /= value.shape[-1] ** 0.5
        elif name != _CANCELS:
            value.view(len(_SCALES), -1).mul_(torch.tensor(_SCALES)[:, None])
        given.append(value.requires_grad_())
        return value

    with torch.set_grad_enabled(gradients):
        ours = function(*_replaced(args, make), kernels="c", **options)
        exact = [value.detach().double().requires_grad_() for value in given]
        again = iter(exact)
        theirs = function(*_replaced(args, lambda _: next(again)), kernels="torch", **options)
    _agree(f"{name}, forward", ours, theirs)
    if gradients:
        direction = torch.randn(ours.shape, generator=generator)
        found = torch.autograd.grad(ours, given, direction)
        for a, b in zip(found, torch.autograd.grad(theirs, exact, direction.double()), strict=True):
            _agree(f"{name}, gradient {tuple(a.shape)}", a, b)


def _agree(what: str, found: Tensor, expected: Tensor, tolerance: float = TOLERANCE[torch.float32]) -> None:
    """Compare values of all networks, which are the outermost part of the first axis."""
    error = largest_error(found.reshape(len(_SCALES), -1), expected.reshape(len(_SCALES), -1), 1e-6)
    if not error <= tolerance:  # NaN is not
        raise WrongKernel(f"{what} differs from torch's by {error:.1e} of the largest value")


def _check_compiled(nets: Networks, recipe: Recipe, batch: int, dtype: torch.dtype) -> None:
    """Compare logits and gradients of networks that torch has compiled with those of torch's operations."""
    generator = torch.Generator().manual_seed(1)
    images = recipe.data.inputs(generator, nets.count, batch).to(nets.weights.device, dtype)
    direction = torch.randn(recipe.data.output_shape(), generator=generator).to(images)
    found = []
    for forward in (by_kernels(nets.train().forward, nets.kernels), nets.forward):
        logits = forward(images).clone()
        nets.backward((logits * direction).sum())
        found.append((logits.float(), nets.gradient.clone()))
    for what, ours, theirs in zip(("logits", "gradient"), *found, strict=True):
        _agree(f"torch.compile, {what}", ours, theirs, TOLERANCE[dtype])


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
        results.append((weights, optimiser.first, optimiser.second))
    for what, found, expected in zip(("weights", "first moments", "second moments"), *results, strict=True):
        _agree(f"adamw, {what}", found, expected)
