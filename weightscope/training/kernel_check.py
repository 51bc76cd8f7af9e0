"""Compiled kernels against torch's, on a recipe's own shapes.

A kernel may be wrong on a machine where it has never run. So before a population uses compiled kernels, every call that
the recipe's network makes in training, in the calibration of BatchNorm and in the evaluation, with batches of the sizes
that occur, is recorded (`functions.recorded`), repeated by both backends on random numbers of the same shapes, values
and in training gradients, and compared with torch's in float64. The step of AdamW and, on a GPU, the loading of images
are compared as well.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope import networks
from weightscope.data.augment import draws_needed
from weightscope.data.catalog import dataset_info
from weightscope.data.config import AugmentConfig
from weightscope.errors import UsageError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.training import own_networks
from weightscope.training.batched_networks import BatchedNetworks
from weightscope.training.image_task import CALIBRATION_BATCHES, EVALUATION_IMAGES, fused, load_images
from weightscope.training.kernels import functions
from weightscope.training.kernels.functions import Kernels
from weightscope.training.optimiser import BatchedAdamW

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}
"""The largest error of each value or gradient, relative to the largest entry of its network: some hundred roundings."""

_NETWORKS = 2  # so that a kernel that mixes them up is found
_SCALES = (1.0, 1 / 32)  # of their activations and vectors: eps has an effect on small variances only ...
_CANCELS = "convmixer_mixing"  # ... where almost nothing remains of the gradient of this one's bias
_TIME = 600  # seconds for a check in a process of its own
_RATES, _DECAYS, _STEPS = (0.1, 0.01), (0.1, 0.0), 3

Plan = list[list[Any]]  # [name, shapes or settings, options, with gradients], in types of JSON


class WrongKernel(UsageError):
    """A kernel that does not run, or computes something else than torch."""


def plan(recipe: Recipe, kernels: Kernels) -> Plan:
    """The distinct calls of compiled functions that training and evaluation of the recipe make, of two networks.

    Tensors are replaced by their shapes. Nothing is compiled or launched: torch computes the recorded functions.

    Raises:
        UsageError: if the batched engine cannot train the network.
    """
    if isinstance(recipe.network, OwnNetworkConfig):
        own_networks.check(recipe, "torch")
    info, data = dataset_info(recipe.images), recipe.images
    batch = min(recipe.training.batch_size, data.train or info.train or recipe.training.batch_size)
    with torch.random.fork_rng(devices=[]):
        batched = BatchedNetworks(networks.build_for(recipe), _NETWORKS, kernels=kernels)
    found: Plan = [["adamw", [_NETWORKS, batched.spec.size], {"betas": list(recipe.training.betas)}, True]]
    shape = [_NETWORKS, batch, info.channels, info.size, info.size]
    if kernels == "triton" and fused(recipe):
        augmentation = recipe.images.augment.model_dump(mode="json")
        found.append(["load_images", shape, {"augment": augmentation, "mixup": recipe.training.mixup > 0}, False])
    with torch.no_grad():
        with functions.recorded() as trained:
            batched.train()(torch.zeros(shape))
        with functions.recorded() as evaluated:
            images = min(data.train or info.train or batch, batch * CALIBRATION_BATCHES)
            batched.calibrate([torch.zeros(size, *shape[2:]) for size in _sizes(images, batch)])
            batched.eval()
            for size in _sizes(data.test or info.test or 2 * EVALUATION_IMAGES - 1, EVALUATION_IMAGES):
                batched(torch.zeros(size, *shape[2:]))
    for calls, gradients in ((trained, True), (evaluated, False)):
        for name, shapes, options in calls:
            entry = [name, shapes, options, gradients]
            if entry not in found:
                found.append(entry)
    return found


def _sizes(images: int, batch: int) -> list[int]:
    """The distinct sizes of the batches of so many images."""
    return sorted({min(images, batch), images % batch} - {0})


def check(calls: Plan, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """Compare all calls; returns one line of what was checked.

    On a GPU in a process of its own, because an invalid access to memory makes the GPU unusable for its process.

    Raises:
        WrongKernel: names the function that fails or differs.
    """
    if device.type == "cuda":
        _check_in_child(calls, kernels, device, dtype)
    else:
        check_here(calls, kernels, device, dtype)
    names = ", ".join(sorted({name for name, *_ in calls}))
    return f"{names}: equal to torch's within {TOLERANCE[dtype]:.0e}"


def check_here(calls: Plan, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """`check` in this process."""
    special: dict[str, Callable[..., None]] = {"adamw": _check_adamw, "load_images": _check_images}
    for name, shapes, options, gradients in calls:
        try:
            if name in special:
                special[name](shapes, kernels, device, dtype, **options)
            else:
                with torch.set_grad_enabled(gradients):
                    _check_function(name, shapes, options, kernels, device, dtype)
        except WrongKernel:
            raise
        except Exception as error:  # whatever a compiler, a driver or a kernel may raise
            raise WrongKernel(f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _drawn(args: Any, make: Callable[[list[int]], Tensor]) -> Any:
    """Shapes, as `functions.recorded` has them, replaced by random numbers."""
    if isinstance(args, dict):
        return make(args["shape"])
    return tuple(_drawn(item, make) for item in args) if isinstance(args, list) else args


def _check_function(
    name: str, shapes: Any, options: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    given: list[Tensor] = []

    def make(shape: list[int]) -> Tensor:
        """Activations come first, and `more` of gelu_batch_norm last; matrices and filters keep their order."""
        value = torch.randn(shape, generator=generator)
        activations = not given or (name == "gelu_batch_norm" and len(shape) > 2)
        if not activations and len(shape) > 2:
            value /= shape[-1] ** 0.5
        elif dtype != torch.bfloat16 and name != _CANCELS:
            value.view(_NETWORKS, -1).mul_(torch.tensor(_SCALES)[:, None])
        value = value.to(device, torch.float32 if kernels == "triton" and not activations else dtype)
        given.append(value.requires_grad_())
        return value

    function = getattr(functions, name)
    ours = function(*_drawn(shapes, make), kernels=kernels, **options)
    exact = [value.detach().double().requires_grad_() for value in given]
    again = iter(exact)
    theirs = function(*_drawn(shapes, lambda shape: next(again)), kernels="torch", **options)
    _compare(f"{name}, forward", ours, theirs, dtype)
    if not torch.is_grad_enabled():
        return
    direction = torch.randn(ours.shape, generator=generator).to(device, ours.dtype)
    gradients = torch.autograd.grad(ours, given, direction), torch.autograd.grad(theirs, exact, direction.double())
    for found, expected in zip(*gradients, strict=True):
        _compare(f"{name}, gradient {tuple(found.shape)}", found, expected, dtype)


def _compare(what: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        error = float("inf")
        if found.shape == expected.shape:
            difference, exact = (v.reshape(_NETWORKS, -1).abs().amax(1) for v in (found.double() - expected, expected))
            error = float((difference / exact.clamp(min=1e-6)).max())
    if not error <= TOLERANCE[dtype]:  # NaN is not
        raise WrongKernel(f"{what} differs from torch's by {error:.1e} of the largest value")


def _check_adamw(
    shape: list[int], kernels: Kernels, device: torch.device, dtype: torch.dtype, *, betas: list[float]
) -> None:
    """Three steps from random weights, of which every seventh is frozen."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(1 + _STEPS))
    trained = torch.arange(shape[1]) % 7 != 3
    results = []
    for backend, kind in ((kernels, torch.float32), ("torch", torch.float64)):
        weights, gradient = start.to(device, kind, copy=True), torch.empty(shape, dtype=kind, device=device)
        rates, decays = (torch.tensor(values, dtype=kind, device=device) for values in (_RATES, _DECAYS))
        optimiser = BatchedAdamW(
            weights,
            gradient,
            trained.to(device),
            learning_rate=rates,
            weight_decay=decays,
            betas=(betas[0], betas[1]),
            kernels=backend,
        )
        for step in range(_STEPS):
            gradient.copy_(gradients[step])
            optimiser.step(torch.tensor(optimiser.scalars(step + 1, 0.5), dtype=kind, device=device), 1.0)
        results.append((weights, optimiser.first, optimiser.second))
    for what, found, expected in zip(("weights", "first moments", "second moments"), *results, strict=True):
        _compare(f"adamw, {what}", found, expected, torch.float32)


def _check_images(
    shape: list[int],
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    *,
    augment: dict[str, Any],
    mixup: bool,
) -> None:
    count, batch, channels, size, _ = shape
    generator, config = torch.Generator().manual_seed(0), AugmentConfig.model_validate(augment)
    images = torch.randint(0, 256, (2 * batch, channels, size, size), generator=generator, dtype=torch.uint8).to(device)
    index = torch.randint(0, 2 * batch, (count, batch), generator=generator).to(device)
    needed = draws_needed(config)
    draws = torch.rand(count, batch, needed, generator=generator).to(device) if needed else None
    shares = torch.rand(count, generator=generator).to(device) if mixup else None
    mean, std = torch.rand(2, channels, generator=generator).add_(0.1).to(device)
    ours = functions.backend(kernels).load_images(images, index, draws, shares, (mean, std), config, dtype)
    theirs = load_images(images, index, draws, shares, (mean.double(), std.double()), config)
    _compare("load_images", ours, theirs.permute(0, 2, 3, 4, 1).flatten(0, 1), dtype)


def _check_in_child(calls: Plan, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    job = json.dumps({"calls": calls, "kernels": kernels, "device": str(device), "dtype": str(dtype)})
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=job,
            capture_output=True,
            text=True,
            timeout=_TIME,
            env=os.environ | {"PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WrongKernel(f"the check of the kernels did not end within {_TIME} s") from error
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["no message"]
    if done.returncode or lines[-1] != _PASSED:
        raise WrongKernel(
            lines[-1][:400] if done.returncode >= 0 else f"the check was killed by signal {-done.returncode}"
        )


_PASSED = "kernels agree"


def _main() -> None:
    job = json.load(sys.stdin)
    dtype = getattr(torch, job["dtype"].removeprefix("torch."))
    try:
        check_here(job["calls"], job["kernels"], torch.device(job["device"]), dtype)
    except WrongKernel as error:
        print(error)
        sys.exit(1)
    print(_PASSED)


if __name__ == "__main__":
    _main()
