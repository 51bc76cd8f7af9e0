"""The check of a user's own network before the first tile, against plain networks.

Its forward code may do anything, and code that mixes channels outside of leaf layers would train wrong networks without
an error. So the batched engine is compared with the plain modules, values and gradients in float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from weightscope import networks
from weightscope._util.names import matching, shortened
from weightscope._util.torch_random import draws, repeatable, seeded
from weightscope.errors import RecipeError, UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.many_networks import USE_LOOP, Networks, networks_for

_NETWORKS, _EXAMPLES = 3, 4
_EXACT = 1e-7  # in float64, relative to the largest value; code that mixes networks is off by about 1
_ROUNDING = 1e-5  # in float32, relative to the largest logit
_HOST_READ = f"the forward code depends on values of activations; {USE_LOOP}"
_DRAWS = f"the forward code draws random numbers outside of the layers; {USE_LOOP}"


def check_network(recipe: Recipe) -> None:
    """Check that a recipe's own network can be trained by the recipe's engine.

    Of any other network, only the names in `training.frozen` and `training.decay_exclude` are checked.
    """
    if not isinstance(recipe.network, OwnNetworkConfig):
        if recipe.training.frozen or recipe.training.decay_exclude:
            with torch.device("meta"):
                network = networks.build_for(recipe)
            frozen(network, recipe.training.frozen)
            _matching(network, recipe.training.decay_exclude, "training.decay_exclude")
        return
    with seeded(0):
        plain = [repeatable(lambda: networks.build_for(recipe), recipe.network.type) for _ in range(_NETWORKS)]
    _check_plain(plain[0], recipe)
    _matching(plain[0], recipe.training.decay_exclude, "training.decay_exclude")
    if recipe.data.causal:
        _check_causal(plain[0], recipe, recipe.data.output_shape()[-1])
    if recipe.training.engine == "batched":
        with Float64():
            _check_batched([network.double() for network in plain], recipe)


def frozen(network: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors that are not trained: those that match a pattern, and parameters that need no gradient."""
    parameters = dict(network.named_parameters())
    names = _matching(network, patterns, "training.frozen")
    names += [name for name, p in parameters.items() if not p.requires_grad and name not in names]
    if parameters and not parameters.keys() - set(names):
        given = f" by {shortened(', '.join(map(repr, patterns)))}" if patterns else ""
        raise RecipeError(
            f"training.frozen: expected at least one parameter that is trained, found all {len(parameters)} "
            f"frozen{given}"
        )
    return tuple(names)


def _matching(network: nn.Module, patterns: tuple[str, ...], setting: str) -> list[str]:
    try:
        return matching(patterns, WeightSpec.of(network).names, setting) if patterns else []
    except UsageError as error:
        raise RecipeError(str(error)) from None


def _trained(network: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    left_out = frozen(network, recipe.training.frozen)
    return {name: p for name, p in network.named_parameters() if name not in left_out}


def _check_plain(network: nn.Module, recipe: Recipe) -> None:
    """Refuse a network that fails, or has logits of another shape or parameters without effect."""
    name, expected = recipe.network.type, (_EXAMPLES, *recipe.data.output_shape())
    inputs = recipe.data.inputs(torch.Generator().manual_seed(1), _EXAMPLES)
    where = f"{name}: the forward pass failed on {recipe.data.what} {tuple(inputs.shape)}"
    with seeded(0):
        logits = repeatable(lambda: _run(lambda: network.train()(inputs), where), name)
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


def set_weights(nets: Networks, plain: Sequence[nn.Module], generator: torch.Generator) -> None:
    """The weights of plain networks, moved away from zeros and ones, which hide mistakes."""
    for network, row in zip(plain, nets.weights, strict=True):
        state = network.state_dict()
        for tensor, view in nets.spec.unpack(row).items():
            view.copy_((state[tensor] + 0.1 * torch.rand(view.shape, generator=generator)).float())


def _check_batched(plain: list[nn.Module], recipe: Recipe) -> None:
    """Compare the batched engine with plain networks in evaluation, in training, and beside one that has diverged."""
    name, generator = recipe.network.type, torch.Generator().manual_seed(2)
    batched = networks_for(recipe, plain[0], range(_NETWORKS))
    loop = networks_for(recipe.replace({"training.engine": "loop"}), plain[0], range(_NETWORKS))
    set_weights(batched, plain, generator)
    loop.weights.copy_(batched.weights)
    for nets in (batched, loop):
        nets.freeze(frozen(plain[0], recipe.training.frozen))
    where, hint = f"{name}: the forward code does not run on the channels of many networks", f"; {USE_LOOP}"
    for case in ("evaluation", "training", "one diverged"):
        first = 0
        inputs = recipe.data.inputs(generator, _NETWORKS, _EXAMPLES)
        direction = torch.randn(_EXAMPLES, *recipe.data.output_shape(), generator=generator)
        if case == "one diverged":  # NaN also reveals code that mixes networks rarely, such as clipping by a norm
            batched.weights[0] = loop.weights[0] = float("nan")
            first = 1
            if inputs.is_floating_point():
                inputs[0] = float("nan")
        with _Restricted(), _NoConversions():
            logits = _run(lambda: batched.train(case != "evaluation")(inputs), where, hint)  # noqa: B023 - called at once
        expected = loop.train(case != "evaluation")(inputs)
        _same(logits[first:], expected[first:], f"{name}: logits")
        _run(lambda: batched.backward((logits * direction).sum()), where, hint)  # noqa: B023
        loop.backward((expected * direction).sum())
        found = batched.spec.unpack(batched.gradient[first:])
        for tensor, gradient in loop.spec.unpack(loop.gradient[first:]).items():
            _same(found[tensor], gradient, f"{name}: the gradient of `{tensor}`")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    error = float("inf")
    if found.shape == expected.shape:
        wrong, largest = errors(found, expected)
        error = float((wrong / largest.clamp(min=1e-3)).max())
    if not error <= _EXACT:  # NaN is not
        raise UsageError(
            f"{what}: batched and plain networks differ (relative error {error:.2g}): the forward code mixes channels "
            f"or draws random numbers outside of the layers; {USE_LOOP}"
        )


@torch.no_grad()
def errors(found: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error and the largest value of each network, (T,) each, of values (T, ...)."""
    exact = F.pad(exact.reshape(len(exact), -1), (0, 1))  # a tensor may be empty
    found = F.pad(found.reshape(len(exact), -1), (0, 1)).to(exact.dtype)
    return (found - exact).abs().amax(1), exact.abs().amax(1)


def _run(work: Callable[[], Any], what: str, hint: str = "") -> Any:
    try:
        return work()
    except Exception as error:
        why = str(error) if isinstance(error, WeightscopeError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{what}: {why}" + ("" if USE_LOOP in why else hint)) from error


class _Restricted(TorchDispatchMode):
    """Refuses what would be the same for all networks: random numbers, and branches on results that the host reads."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"):
            raise UsageError(_HOST_READ)
        if draws(function, args, kwargs or {}):
            raise UsageError(_DRAWS)
        return function(*args, **(kwargs or {}))


class Float64(TorchFunctionMode):
    """New tensors have float64 where they would have float32; torch's own default is that of all threads."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        made = function in _device_constructors() and (kwargs or {}).get("dtype") is None
        return found.double() if made and found.dtype == torch.float32 else found


class _NoConversions(TorchFunctionMode):
    """Refuses conversions to NumPy and lists, which are no operations of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise UsageError(_HOST_READ)
        return function(*args, **(kwargs or {}))
