"""The checks of a recipe's network before the first tile, and the choice of kernels.

The forward code of a user's own network may do anything, and code that mixes channels outside of leaf layers would
train wrong networks without an error. So the batched engine is compared with the plain modules, values and gradients
in float64.

Kernels are C on a CPU and `torch.compile` on a GPU where they agree with torch's, or torch's. A kernel may be wrong on
a machine where it has never run. So the recipe's network is run in training, in the calibration of BatchNorm and in the
evaluation, and its logits and the gradient of each tensor are compared with those of torch's operations in float64; so
are steps of AdamW.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton

from weightscope import networks
from weightscope._util import plugins
from weightscope._util.names import matching, shortened
from weightscope._util.torch_random import seeded
from weightscope.data.image_section import dataset_info
from weightscope.errors import RecipeError, UsageError, WeightscopeError
from weightscope.recipe import OwnNetworkConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.image_task import CALIBRATION_BATCHES, EVALUATION_IMAGES
from weightscope.training.kernels import build
from weightscope.training.kernels.build import NotSupported
from weightscope.training.kernels.functions import Kernels, by_kernels
from weightscope.training.many_networks import USE_LOOP, Networks, copied, networks_for
from weightscope.training.optimiser import BatchedAdamW

_log = logging.getLogger(__name__)

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
        plain = [networks.build_for(recipe) for _ in range(_NETWORKS)]
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
        state = torch.get_rng_state()
        with _Restricted(), _NoConversions():
            logits = _run(lambda: batched.train(case != "evaluation")(inputs), where, hint)  # noqa: B023 - called at once
        if not torch.equal(torch.get_rng_state(), state):  # the same numbers for all networks
            raise UsageError(f"{where}: {_DRAWS}")
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
    """Refuses branches on results that the host reads, which would be the same for all networks."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"):
            raise UsageError(_HOST_READ)
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


# --- kernels ----------------------------------------------------------------------------------------------------------

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
        made = build.library("float")[1] if kernels == "c" else f"triton {version('triton')}"
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
