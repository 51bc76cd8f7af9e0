"""Checks before the first tile: a user's own network, and compiled kernels, against plain networks and torch's kernels.

The forward code of a user's network may do anything, and code that mixes channels outside of leaf layers would train
wrong networks without an error. So the batched engine is compared with the plain modules, values and gradients in
float64.

A kernel may be wrong on a machine where it has never run. So every call of a function in C that the recipe's network
makes in training, in the calibration of BatchNorm and in the evaluation, with batches of the sizes that occur, is
repeated with random numbers of the same shapes and compared with torch's in float64, values and in training gradients;
rounding of a whole network in float32 would hide an error in one of them. What `torch.compile` makes is compared as a
whole. So is the step of AdamW.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weightscope import networks
from weightscope._util.names import matching, shortened
from weightscope.data.image_section import dataset_info
from weightscope.errors import RecipeError, UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.image_task import CALIBRATION_BATCHES, EVALUATION_IMAGES
from weightscope.training.kernels import functions
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import USE_LOOP, Networks, networks_for
from weightscope.training.optimiser import BatchedAdamW

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest error of each value or gradient, relative to the largest entry of its network: some hundred roundings."""

_NETWORKS, _EXAMPLES = 3, 4
_EXACT = 1e-7  # in float64, relative to the largest value; code that mixes networks is off by about 1
_ROUNDING = 1e-5  # in float32, relative to the largest logit
_HOST_READ = f"the forward code depends on values of activations; {USE_LOOP}"

_SCALES = (1.0, 1 / 32)  # of two networks' activations and vectors: eps has an effect on small variances only ...
_CANCELS = "convmixer_mixing"  # ... where almost nothing remains of the gradient of this one's bias
_RATES, _DECAYS, _STEPS = (0.1, 0.01), (0.1, 0.0), 3


class WrongKernel(UsageError):
    """A kernel that does not run, or computes something else than torch."""


def check_network(recipe: Recipe, kernels: Kernels = "torch") -> None:
    """Check that a recipe's own network can be trained by the recipe's engine.

    Of any other network, only what `training.frozen` leaves to be trained is checked.
    """
    if not isinstance(recipe.network, OwnNetworkConfig):
        if recipe.training.frozen:
            with torch.device("meta"):
                frozen(networks.build_for(recipe), recipe.training.frozen)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = [networks.build_for(recipe) for _ in range(_NETWORKS)]
    _check_plain(plain[0], recipe)
    if recipe.data.causal:
        _check_causal(plain[0], recipe, recipe.data.output_shape()[-1])
    if recipe.training.engine == "batched":
        with _float64():
            _check_batched([network.double() for network in plain], recipe, kernels)


def frozen(network: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that are not trained: those that match a pattern, and parameters that need no gradient."""
    parameters = dict(network.named_parameters())
    try:
        names = matching(patterns, WeightSpec.of(network).names, "training.frozen") if patterns else []
    except UsageError as error:
        raise RecipeError(str(error)) from None
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
    with torch.random.fork_rng(devices=[]):
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same random numbers in both
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


def _with_weights(nets: Networks, plain: list[nn.Module], generator: torch.Generator) -> None:
    """The same weights in both, away from zeros and ones, which hide mistakes."""
    for network, row in zip(plain, nets.weights, strict=True):
        state = network.state_dict()
        for tensor, view in nets.spec.unpack(row).items():
            view.copy_(state[tensor].add_(0.1 * torch.rand(state[tensor].shape, generator=generator)))


def _check_batched(plain: list[nn.Module], recipe: Recipe, kernels: Kernels) -> None:
    """Compare the batched engine with plain networks in evaluation, in training, and beside one that has diverged."""
    name, generator = recipe.network.type, torch.Generator().manual_seed(2)
    batched = networks_for(recipe, plain[0], range(len(plain)), kernels=kernels)
    _with_weights(batched, plain, generator)
    batched.freeze(frozen(plain[0], recipe.training.frozen))
    where, hint = f"{name}: the forward code does not run on the channels of many networks", f"; {USE_LOOP}"
    for case in ("evaluation", "training", "one diverged"):
        training, first = case != "evaluation", 0
        inputs = recipe.data.inputs(generator, len(plain), _EXAMPLES)
        direction = torch.randn(_EXAMPLES, *recipe.data.output_shape(), generator=generator)
        if case == "one diverged":  # NaN also reveals code that mixes networks rarely, such as clipping by a norm
            batched.weights[0], first = float("nan"), 1
            if inputs.is_floating_point():
                inputs[0] = float("nan")
        with _no_random_numbers(name), _NoHostReads(), _NoConversions():
            logits = _run(lambda: batched.train(training)(inputs), where, hint)  # noqa: B023 - called at once
        expected = torch.stack([n.train(training)(part) for n, part in zip(plain, inputs, strict=True)])
        _same(logits[first:], expected[first:], f"{name}: logits")
        _run(lambda: batched.backward((logits * direction).sum()), where, hint)  # noqa: B023
        for network, row, part in list(zip(plain, batched.gradient, expected, strict=True))[first:]:
            parameters = _trained(network, recipe)
            gradients = torch.autograd.grad((part * direction).sum(), list(parameters.values()), retain_graph=True)
            found = batched.spec.unpack(row)
            for tensor, gradient in zip(parameters, gradients, strict=True):
                _same(found[tensor][None], gradient[None], f"{name}: the gradient of `{tensor}`")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    error = _error(found, expected, 1e-3)
    if not error <= _EXACT:  # NaN is not
        raise UsageError(
            f"{what}: batched and plain networks differ (relative error {error:.2g}): the forward code mixes channels "
            f"or draws random numbers outside of the layers; {USE_LOOP}"
        )


@torch.no_grad()
def _error(found: Tensor, expected: Tensor, smallest: float) -> float:
    """The largest error, relative to the largest entry of its network, of values whose first axis has the networks."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    exact = expected.reshape(len(expected), -1)
    difference = (found.reshape(exact.shape).to(exact.dtype) - exact).abs().amax(1)
    return float((difference / exact.abs().amax(1).clamp(min=smallest)).max())


def _run(work: Callable[[], Any], what: str, hint: str = "") -> Any:
    try:
        return work()
    except Exception as error:
        why = str(error) if isinstance(error, WeightscopeError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{what}: {why}" + ("" if USE_LOOP in why else hint)) from error


class _NoHostReads(TorchDispatchMode):
    """Refuses operations whose result the host reads: a branch on it would be taken for all networks at once."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"):
            raise UsageError(_HOST_READ)
        return function(*args, **(kwargs or {}))


class _NoConversions(TorchFunctionMode):
    """Refuses conversions to NumPy and lists, which are no operations of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise UsageError(_HOST_READ)
        return function(*args, **(kwargs or {}))


@contextmanager
def _no_random_numbers(name: str) -> Iterator[None]:
    """Refuse a forward pass that draws from a global generator: the same numbers would be used for all networks."""

    def states() -> tuple[Any, ...]:
        numpys = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - the global one
        return torch.get_rng_state().numpy().tobytes(), numpys["key"].tobytes(), numpys["pos"], random.getstate()

    before = states()
    yield
    if states() != before:
        raise UsageError(f"{name}: the forward code draws random numbers outside of the layers; {USE_LOOP}")


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_kernels(recipe: Recipe, kernels: Kernels, device: torch.device) -> str:
    """Compare compiled kernels with torch's on what the recipe computes; returns one line of what was compared."""
    dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = [networks.build_for(recipe) for _ in _SCALES]
    nets = networks_for(recipe, plain[0], range(len(plain)), device, kernels)
    info, data = dataset_info(recipe.images), recipe.images
    batch = min(recipe.training.batch_size, data.train or info.train or recipe.training.batch_size)
    _named("adamw", lambda: check_adamw(nets.weights.shape, kernels, device, recipe.training.betas))
    compared = {"adamw"}
    if kernels == "inductor":
        _with_weights(nets, plain, torch.Generator().manual_seed(2))
        _named("torch.compile", lambda: _check_compiled(nets, recipe, batch, dtype))
        compared.add("the network")
    else:
        compared |= _check_calls(nets, recipe, batch)
    return f"{', '.join(sorted(compared))}: equal to torch's within {TOLERANCE[dtype]:.0e}"


def _check_calls(nets: Networks, recipe: Recipe, batch: int) -> set[str]:
    """Compare every distinct call of a function in C; returns their names."""
    info, data = dataset_info(recipe.images), recipe.images
    seen: dict[str, str] = {}

    def compare(function: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        gradients = nets.training and not calibrating
        key = json.dumps([function.__name__, _replaced(args, lambda x: list(x.shape)), options, gradients])
        if key not in seen:
            seen[key] = function.__name__
            _named(function.__name__, lambda: _check_call(function, args, options, gradients))

    shape, calibrating = (info.channels, info.size, info.size), False
    with torch.no_grad(), functions.observed(compare):
        nets.train()(torch.zeros(nets.count, batch, *shape))
        calibrating = True
        images = min(data.train or info.train or batch, batch * CALIBRATION_BATCHES)
        nets.calibrate([torch.zeros(size, *shape) for size in _sizes(images, batch)])
        nets.eval()
        for size in _sizes(data.test or info.test or 2 * EVALUATION_IMAGES - 1, EVALUATION_IMAGES):
            nets(torch.zeros(size, *shape))
    return set(seen.values())


def _sizes(images: int, batch: int) -> list[int]:
    """The distinct sizes of the batches of so many images."""
    return sorted({min(images, batch), images % batch} - {0})


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
    error = float("inf")
    if found.shape == expected.shape:
        error = _error(found.reshape(len(_SCALES), -1), expected.reshape(len(_SCALES), -1), 1e-6)
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
        found.append((logits, nets.gradient.clone()))
    for what, ours, theirs in zip(("logits", "gradient"), *found, strict=True):
        _agree(f"torch.compile, {what}", ours.float(), theirs.float(), TOLERANCE[dtype])


def check_adamw(
    shape: tuple[int, int] | torch.Size, kernels: Kernels, device: torch.device, betas: tuple[float, float]
) -> None:
    """Three steps from random weights, of which every seventh is frozen."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(*shape, generator=generator) for _ in range(1 + _STEPS))
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
            betas=betas,
            kernels=backend,
        )
        update = by_kernels(optimiser.step, backend)
        for step in range(_STEPS):
            gradient.copy_(gradients[step])
            update(torch.tensor(optimiser.scalars(step + 1, 0.5), dtype=kind, device=device), 1.0)
        results.append((weights, optimiser.first, optimiser.second))
    for what, found, expected in zip(("weights", "first moments", "second moments"), *results, strict=True):
        _agree(f"adamw, {what}", found, expected)
