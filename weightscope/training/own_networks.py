"""Checks of a user's own network when it is first used.

Its forward code may do anything, and code that mixes channels outside of leaf layers would train wrong networks without
an error. So the batched engine is compared with the plain modules, values and gradients in float64, and refused unless
they agree.
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
from weightscope._util import plugins
from weightscope._util.names import matching, shortened
from weightscope.errors import RecipeError, UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.batched_networks import USE_LOOP, BatchedNetworks
from weightscope.training.kernels.functions import Kernels
from weightscope.training.stacked_networks import StackedNetworks

_NETWORKS, _EXAMPLES, _TOKENS = 3, 4, 16
_TOLERANCE = 1e-7  # in float64, relative to the largest value; code that mixes networks is off by about 1
_ROUNDING = 1e-5  # in float32, relative to the largest logit
_HOST_READ = f"the forward code depends on values of activations; {USE_LOOP}"
_checked: set[tuple[Any, str]] = set()


def check(recipe: Recipe, kernels: Kernels) -> None:
    """Check that a recipe's own network can be trained by the recipe's engine; once per process and network.

    Of any other network, only what `training.frozen` leaves to be trained is checked.

    Raises:
        RecipeError: if a frozen pattern matches no tensor, or no parameter is left to be trained.
        UsageError: if the network does not return logits (B, classes) or has parameters without effect; if logits of
            sequences depend on later tokens; for the batched engine also if a layer has no batched version, the forward
            code reads values on the host, or batched and plain networks do not agree.
    """
    config = recipe.network
    if not isinstance(config, OwnNetworkConfig):
        if recipe.training.frozen:
            with torch.device("meta"):
                frozen(networks.build_for(recipe), recipe.training.frozen)
        return
    shape = [recipe.data.name, *recipe.data.input_shape(), *recipe.data.output_shape()]
    settings = [recipe.network.model_dump(), *shape, recipe.training.engine, recipe.training.frozen, kernels]
    key = (plugins.imported(config.type), json.dumps(settings))
    if key in _checked:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = [networks.build_for(recipe) for _ in range(_NETWORKS)]
    _check_plain(plain[0], recipe)
    if recipe.data.causal:
        _check_causal(plain[0], recipe, recipe.data.output_shape()[-1])
    if recipe.training.engine == "batched":
        with _float64():
            _check_batched([network.double() for network in plain], recipe, "c" if kernels == "c" else "torch")
    _checked.add(key)


def frozen(network: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that are not trained: those that match a pattern, and parameters that need no gradient.

    Raises:
        RecipeError: if a pattern matches no tensor, or no parameter is left to be trained.
    """
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
    name, expected = recipe.network.type, (_EXAMPLES, *recipe.data.output_shape())
    inputs = recipe.data.inputs(torch.Generator().manual_seed(1), _EXAMPLES)
    what = recipe.data.what
    with torch.random.fork_rng(devices=[]):
        logits = _run(
            lambda: network.train()(inputs),
            f"{name}: the forward pass failed on {what} {tuple(inputs.shape)}",
        )
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


def _check_batched(plain: list[nn.Module], recipe: Recipe, kernels: Kernels) -> None:
    name, generator = recipe.network.type, torch.Generator().manual_seed(2)
    batched: BatchedNetworks | StackedNetworks
    if recipe.data.stacked:
        batched = StackedNetworks(plain[0], len(plain))
    else:
        batched = BatchedNetworks(plain[0], len(plain), kernels=kernels)
    for network, row in zip(plain, batched.weights, strict=True):
        state = network.state_dict()
        for tensor, view in batched.spec.unpack(row).items():  # away from zeros and ones, which hide mistakes
            view.copy_(state[tensor].add_(0.1 * torch.rand(state[tensor].shape, generator=generator)))
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
        _compare(logits[first:], expected[first:], f"{name}: logits")
        _run(lambda: batched.backward((logits * direction).sum()), where, hint)  # noqa: B023
        for network, row, part in list(zip(plain, batched.gradient, expected, strict=True))[first:]:
            parameters = _trained(network, recipe)
            gradients = torch.autograd.grad((part * direction).sum(), list(parameters.values()), retain_graph=True)
            found = batched.spec.unpack(row)
            for tensor, gradient in zip(parameters, gradients, strict=True):
                _compare(found[tensor], gradient, f"{name}: the gradient of `{tensor}`")


@torch.no_grad()
def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    error = float("inf")
    if found.shape == expected.shape:
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)) if found.numel() else 0.0
    if not error <= _TOLERANCE:  # NaN is not
        raise UsageError(
            f"{what}: batched and plain networks differ (relative error {error:.2g}): the forward code mixes channels "
            f"or draws random numbers outside of the layers; {USE_LOOP}"
        )


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
