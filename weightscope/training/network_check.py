"""The checks of a recipe's network before the first tile, and the choice of kernels.

Kernels are C on a CPU and `torch.compile` on a GPU where they agree with torch's, or torch's. A kernel may be wrong on
a machine where it has never run, and the forward code of a user's own network may mix the channels of networks that run
as one. So one step and one evaluation are compared with plain networks in float64.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._triton import has_triton

from weightscope import networks
from weightscope._util import plugins
from weightscope._util.names import matching, shortened
from weightscope._util.torch_random import seeded
from weightscope.data.image_section import dataset_info
from weightscope.errors import RecipeError, UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.image_task import EVALUATION_IMAGES
from weightscope.training.kernels import build
from weightscope.training.kernels.build import NotSupported
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import USE_LOOP, copied, networks_for
from weightscope.training.optimiser import BatchedAdamW

_log = logging.getLogger(__name__)

_EXAMPLES = 4
_ROUNDING = 1e-5  # in float32, relative to the largest logit


def check_network(recipe: Recipe) -> None:
    """Check that a recipe's own network can be trained by the recipe's engine.

    Of any other network, only the names in `training.frozen` and `training.decay_exclude` are checked.
    """
    own, excluded = isinstance(recipe.network, OwnNetworkConfig), recipe.training.decay_exclude
    if not (own or recipe.training.frozen or excluded):
        return
    with seeded(0), torch.device("cpu" if own else "meta"):
        network = networks.build_for(recipe)
    if own:
        _check_plain(network, recipe)
    frozen(network, recipe.training.frozen)
    if excluded:
        matching(excluded, WeightSpec.of(network).names, "training.decay_exclude")
    if not own:
        return
    if recipe.data.causal:
        _check_causal(network, recipe, recipe.data.output_shape()[-1])
    if recipe.training.engine == "batched":
        try:
            compare(recipe, "torch", torch.device("cpu"))
        except WrongKernel as error:
            raise UsageError(
                f"{recipe.network.type}: batched and plain networks differ: {error}; the forward code mixes channels, "
                f"depends on values of activations, or draws random numbers outside of the layers; {USE_LOOP}"
            ) from error


def frozen(network: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that are not trained: those that match a pattern, and parameters that need no gradient."""
    parameters = dict(network.named_parameters())
    names = matching(patterns, WeightSpec.of(network).names, "training.frozen") if patterns else []
    names += [name for name, p in parameters.items() if not p.requires_grad and name not in names]
    if parameters and not parameters.keys() - set(names):
        given = f" by {shortened(', '.join(map(repr, patterns)))}" if patterns else ""
        raise RecipeError(
            f"training.frozen: expected at least one parameter that is trained, found all {len(parameters)} "
            f"frozen{given}"
        )
    return tuple(names)


def _trained(network: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    left_out = frozen(network, recipe.training.frozen)
    return {name: p for name, p in network.named_parameters() if name not in left_out}


def _check_plain(network: nn.Module, recipe: Recipe) -> None:
    """Refuse a network that fails, or has logits of another shape or parameters without effect."""
    name, expected = recipe.network.type, (_EXAMPLES, *recipe.data.output_shape())
    inputs = recipe.data.inputs(torch.Generator().manual_seed(1), _EXAMPLES)
    where = f"{name}: the forward pass failed on {recipe.data.what} {tuple(inputs.shape)}"
    with seeded(0):
        logits = _run(lambda: network.train()(inputs), where)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(f"{name}: expected logits {expected} from the network, found {found}")
    parameters = _trained(network, recipe)
    gradients = torch.autograd.grad(logits.sum(), list(parameters.values()), allow_unused=True)
    unused = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    if unused:
        raise UsageError(f"{name}: `{unused[0]}` does not affect the logits; freeze it (training.frozen) or remove it")


@torch.no_grad()
def _check_causal(network: nn.Module, recipe: Recipe, vocabulary: int) -> None:
    """Refuse a network whose logits before the last token depend on it; it could read the token that it predicts."""
    generator = torch.Generator().manual_seed(3)
    for parameter in _trained(network, recipe).values():  # away from zeros, behind which a dependence does not show
        parameter.add_(0.1 * torch.rand(parameter.shape, generator=generator))
    tokens = recipe.data.inputs(generator, _EXAMPLES)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary
    found = []
    for inputs in (tokens, changed):
        with seeded(0):  # the same random numbers in both
            where = f"{recipe.network.type}: the forward pass failed in evaluation"
            found.append(_run(lambda: network.eval()(inputs), where))  # noqa: B023 - called at once
    size = float(found[0].nan_to_num(0, 0, 0).abs().max())
    before, after = (logits[:, :-1] for logits in found)
    if not torch.allclose(before, after, rtol=0, atol=_ROUNDING * size, equal_nan=True):
        raise UsageError(
            f"{recipe.network.type}: expected logits that depend on their own and earlier tokens only, found that "
            f"another last token changes those before it, by up to {float((before - after).abs().max()):.2g}; mask "
            "later tokens in the forward code"
        )


def _run(work: Callable[[], Any], what: str) -> Any:
    try:
        return work()
    except Exception as error:
        why = str(error) if isinstance(error, WeightscopeError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{what}: {why}") from error


# --- kernels ----------------------------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest error of each value or gradient, relative to the largest entry of its network."""

_CANCELS = 1e-2  # of the network's largest value, below which a tensor's gradient may be what is left of larger ones
_LONGEST = 240  # characters; a shard's texts have at most 256
_SCALES = (float("nan"), 1.0, 1 / 32)  # of the weights: one network has diverged; eps affects small variances only
_IMAGES = 32  # a multiple of the numbers in a vector register
_RATES, _DECAYS, _STEPS = (0.1, 0.01), (0.1, 0.0), 3


class WrongKernel(UsageError):
    """A kernel that does not run, or computes something else than torch."""


@dataclass(frozen=True)
class Choice:
    """The kernels that train a recipe on a device."""

    kernels: Kernels
    build: str = ""  # what else their results depend on: the build of kernels in C or the version of Triton
    comparison: str = ""  # what was compared with torch's kernels, or why compiled kernels are not used


_choices: dict[tuple[Any, ...], Choice] = {}  # a benchmark has many recipes that differ in nothing here


def choose_kernels(recipe: Recipe, device: torch.device) -> Choice:
    """The kernels that train the recipe on a device; its network and compiled kernels are checked on first use.

    With "auto", torch's are taken where there is no C compiler or no Triton and for sequences on a GPU, and with a
    warning where compiled kernels cannot be built or launched, or do not agree; with "compiled", these are errors.
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
    if training.kernels == "torch" or training.engine == "loop":
        return Choice("torch")
    kernels: Kernels = "inductor" if device.type == "cuda" else "c"
    try:
        _refuse(recipe, device)
        made = build.library("float")[1] if kernels == "c" else f"triton {version('triton')}"
        choice = Choice(kernels, made, compare(recipe, kernels, device))
    except UsageError as error:
        if training.kernels != "auto":
            raise
        # in one line of ASCII, as a shard's header can hold it
        why = shortened(" ".join(str(error).split()).encode("ascii", "replace").decode(), _LONGEST)
        if not isinstance(error, NotSupported):
            _log.warning("compiled kernels are not used, torch's are: %s", why)
        return Choice("torch", comparison=why)
    return choice


def _refuse(recipe: Recipe, device: torch.device) -> None:
    """Raise NotSupported for what compiled kernels cannot do, and where there is no compiler."""
    if device.type not in ("cpu", "cuda"):
        raise NotSupported(f"kernels 'compiled' are for a CPU or CUDA, found device {device}; use kernels 'torch'")
    if device.type == "cuda" and recipe.data.stacked:
        raise NotSupported("kernels = 'compiled' on a GPU are for images, found sequences; use kernels 'torch'")
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


def compare(recipe: Recipe, kernels: Kernels, device: torch.device) -> str:
    """Compare a training step of the recipe's networks with plain networks in float64; returns what was compared.

    Three networks run as one: logits and gradients in training, logits in evaluation, and AdamW. One of them has
    diverged, which must not affect the others. WrongKernel if an error is above `TOLERANCE`.
    """
    dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
    with seeded(0):
        template = networks.build_for(recipe)
    try:
        found = _computed(recipe, template, kernels, device, dtype)
        with Float64():
            changes = {"training.engine": "loop", "training.kernels": "torch", "training.precision": "float32"}
            expected = _computed(recipe.replace(changes), copied(template).double(), "torch", device, torch.float64)
        _agree(found, expected, dtype)
        check_adamw((2, WeightSpec.of(template).size), kernels, device, recipe.training.betas)
    except WrongKernel:
        raise
    except Exception as error:  # whatever a compiler, a driver, a kernel or a user's network may raise
        raise WrongKernel(f"they fail: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return f"a training step, evaluation and AdamW: equal to torch's within {TOLERANCE[dtype]:.0e}"


def _computed(
    recipe: Recipe, template: nn.Module, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Logits and gradients of a batch in training, and logits of an evaluation, of the networks that have not diverged.

    Weights are moved away from zeros and ones, which hide mistakes.
    """
    generator, data = torch.Generator().manual_seed(1), recipe.data
    nets = networks_for(recipe, template, range(len(_SCALES)), device, kernels)
    state = template.state_dict()
    for scale, row in zip(_SCALES, nets.weights, strict=True):
        for tensor, view in nets.spec.unpack(row).items():
            view.copy_(scale * (state[tensor] + 0.1 * torch.rand(view.shape, generator=generator)).float())
    nets.freeze(frozen(template, recipe.training.frozen))

    def drawn(*shape: int) -> Tensor:
        inputs = data.inputs(generator, *shape).to(device)
        return inputs.to(dtype) if inputs.is_floating_point() else inputs

    trained, evaluated = (_EXAMPLES, _EXAMPLES) if data.stacked else _sizes(recipe)
    inputs = drawn(nets.count, trained)
    if nets.drop_paths:
        nets.drop(torch.rand(nets.count, trained, nets.drop_paths, generator=generator).to(device))
    logits = by_kernels(nets.train().forward, nets.kernels)(inputs).clone()
    direction = torch.randn(logits.shape, generator=generator)
    nets.backward((logits * direction.to(logits)).sum())
    gradients = nets.spec.unpack(nets.gradient.clone())
    found = {"logits": logits.detach()} | {f"the gradient of `{name}`": value for name, value in gradients.items()}
    with torch.no_grad():
        nets.calibrate([drawn(trained)])
        found[f"the logits of an evaluation of {evaluated} examples"] = nets.eval()(drawn(evaluated))
    return {name: values[1:] for name, values in found.items()}


def _sizes(recipe: Recipe) -> tuple[int, int]:
    """The sizes of a batch and of the last one of an evaluation; of long ones, the same part of a vector is left."""
    info = dataset_info(recipe.images)
    batch = min(recipe.training.batch_size, recipe.images.train or info.train or recipe.training.batch_size)
    tests = recipe.images.test or info.test or 2 * EVALUATION_IMAGES - 1
    last = tests % EVALUATION_IMAGES or EVALUATION_IMAGES
    trained, evaluated = (size if size < 2 * _IMAGES else _IMAGES + size % _IMAGES for size in (batch, last))
    return trained, evaluated


def _agree(found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare values of all networks (T, ...)."""
    smallest = _CANCELS * torch.stack([errors(value, value)[1] for value in exact.values()]).amax(0)  # (T,)
    for name, value in exact.items():
        error, largest = errors(found[name], value)
        if not (error <= TOLERANCE[dtype] * largest.maximum(smallest)).all():  # NaN is not
            wrong = float((error / largest.clamp(min=1e-30)).max())
            raise WrongKernel(f"{name} differs from torch's by {wrong:.1e} of the largest value")


@torch.no_grad()
def errors(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error and the largest value of each network, (T,) each, of values (T, ...)."""
    exact = F.pad(exact.reshape(len(exact), -1), (0, 1))  # a tensor may be empty
    found = F.pad(found.reshape(len(found), -1), (0, 1)).to(exact.dtype)
    return (found - exact).abs().amax(1), exact.abs().amax(1)


class Float64(TorchFunctionMode):
    """New tensors have float64 where they would have float32; torch's own default is that of all threads."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        made = function in _device_constructors() and (kwargs or {}).get("dtype") is None
        return found.double() if made and found.dtype == torch.float32 else found


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
