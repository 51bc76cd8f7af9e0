"""What every initialiser uses: the registry, random numbers drawn on the CPU, and writing weights in place."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice, count
from weightscope._util.names import matching, split_initialisers
from weightscope._util.plugins import Registry, Signature, distribute, name_of
from weightscope._util.threads import one_thread
from weightscope.anatomy.effective import all_or_nothing, keep, writable
from weightscope.anatomy.matrices import Matrix, fans, matrices
from weightscope.anatomy.tensors import cast, foreign_code, read_once
from weightscope.errors import DataError, UsageError, WeightscopeError

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])
Generator: TypeAlias = torch.Generator | int | None


Initialiser: TypeAlias = Callable[..., nn.Module]
"""`init(module, *, generator=None)`: sets weights of a module in place and returns the module."""


def opened(generator: Generator) -> torch.Generator | None:
    """The generator, or a new one of an integer seed; on the CPU, so that a seed gives the same weights everywhere."""
    if isinstance(generator, int):
        return torch.Generator().manual_seed(count("generator", generator, least=0))
    if not isinstance(generator, torch.Generator | None):
        raise UsageError(f"generator: expected a torch.Generator, a seed or None, found {type(generator).__name__}")
    if generator is not None and generator.device.type != "cpu":
        raise UsageError(f"generator: expected a CPU generator (torch.Generator()), found one on {generator.device}")
    return generator


def normal(*shape: int, generator: Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers on the CPU."""
    return torch.randn(*shape, generator=opened(generator), dtype=dtype)


def uniform(*shape: int, bound: float, generator: Generator) -> Tensor:
    """Uniform numbers in [-bound, bound) on the CPU, float32."""
    return torch.rand(*shape, generator=opened(generator), dtype=torch.float32).mul_(2 * bound).sub_(bound)


def integers(below: int, shape: Sequence[int], generator: Generator) -> Tensor:
    """Uniform integers from 0 to `below` - 1 on the CPU."""
    return torch.randint(below, shape, generator=opened(generator))


def permutation(n: int, generator: Generator) -> Tensor:
    """The numbers 0 to n - 1 in a random order, on the CPU."""
    return torch.randperm(n, generator=opened(generator))


def frame(*shape: int, generator: Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal columns, uniform (Haar) among all such frames, (..., rows, columns) with columns <= rows.

    QR of a Gaussian matrix, with the signs that make it unique (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(normal(*shape, generator=generator, dtype=dtype))
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(dtype)
    return q * signs.unsqueeze(-2)


RUNNING: ContextVar[str | None] = ContextVar("initialiser", default=None)


@contextmanager
def running(name: str) -> Iterator[None]:
    """Attribute writes within the block to an initialiser, unless another one called it, for `auditing.track`."""
    token = RUNNING.set(RUNNING.get() or name)
    try:
        yield
    finally:
        RUNNING.reset(token)


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a parameter in place, cast to its data type and device."""
    where = f"a weight of shape {tuple(tensor.shape)}"
    if value.numel() and not all(map(math.isfinite, value.aminmax())):  # either is NaN if an entry is
        raise DataError(f"{where}: expected finite values, found NaN or infinity")
    keep(tensor)
    tensor.copy_(cast(where, value, tensor))


def selected(module: nn.Module, select: str) -> list[Matrix]:
    """The weights of linear and convolutional layers whose names match the patterns."""
    found = matrices(module)
    wanted = set(matching(select, (matrix.name for matrix in found)))
    return [matrix for matrix in found if matrix.name in wanted]


def each_matrix(module: M, select: str, fill: Callable[[Tensor], Tensor], bias: str, generator: Generator) -> M:
    """Fill every selected weight, matrix by matrix (out, in, ...), and set its bias by a rule."""
    choice("bias", bias, ("uniform", "zero", "keep"))
    for matrix in selected(module, select):
        blocks = matrix.split(matrix.weight)
        for block in blocks:
            put(block, fill(block))
        if matrix.bias is not None and bias != "keep":
            bound = 1 / math.sqrt(fans(blocks[0])[0])
            zero = bias == "zero"
            draws = torch.zeros(()) if zero else uniform(*matrix.bias.shape, bound=bound, generator=generator)
            put(matrix.bias.detach(), draws)
    return module


class _Initialisers(Registry[F]):
    """Initialisers by name; each is given the module with its effective weights, and refused if they cannot be set."""

    def register(self, name: str, **details: Any) -> Callable[[F], F]:
        """As `Registry.register`; details are the "source", what it "needs", and if so that it "may_set_nothing"."""

        def decorate(function: F) -> F:
            @functools.wraps(function)
            def initialise(module: Any, *args: Any, **parameters: Any) -> Any:
                name = function.__name__
                # Without the caller's autocast, which would round what is computed.
                with one_thread(), running(name), torch.autocast("cpu", enabled=False):
                    parameters["generator"] = opened(parameters.get("generator"))
                    if details.get("needs") == "nothing" or not isinstance(module, nn.Module):
                        return function(module, *args, **parameters)
                    with writable(module, name, idle=details.get("may_set_nothing", False)) as inner:
                        function(inner, *args, **parameters)
                    return module

            return register(initialise)  # type: ignore[arg-type]

        register = super().register(name, **details)
        return decorate


INITIALISERS: _Initialisers[Callable[..., Any]] = _Initialisers("initialiser")
"""The registered initialisers by name; `.details[name]` has their "source" and what they "need" of a module."""


def _of_user(
    name: str, function: Callable[..., Any], module: nn.Module, /, *, generator: Generator = None, **parameters: Any
) -> nn.Module:
    """Run an unregistered initialiser, and check that it returns the module."""
    generator = opened(generator)
    try:
        with one_thread(), running(name), all_or_nothing(), foreign_code():
            found = function(module, **parameters, generator=generator)
    except WeightscopeError:
        raise
    except Exception as error:
        raise UsageError(f"{name}: the initialiser raised {type(error).__name__}: {error}") from error
    if found is not module:
        what = "another module" if isinstance(found, nn.Module) else repr(found)
        raise UsageError(f"{name}: expected an initialiser to change the module in place and return it, found {what}")
    return module


def parameters(init: str | Callable[..., Any]) -> dict[str, Any]:
    """The named parameters of an initialiser and their defaults (`inspect.Parameter.empty` for required ones).

    Example:
        >>> parameters("box_filters")
        {'value': 1.0, 'sign': 'positive'}
    """
    return _signature(init).defaults


def get(init: str | Callable[..., Any], **numbers: Any) -> Initialiser:
    """An initialiser with its named parameters bound, ready for `init(module, generator=g)`.

    `init` is a registered name, a reference `"package.module:function"`, or a function
    `f(module, *, generator, **numbers) -> module`. Several names or references are joined by "+":
    `"mimetic_attention+mimetic_mlp"`; each parameter then goes to the one initialiser that has it.

    Example:
        >>> get("mimetic_attention", alpha_qk=0.6)(vit, generator=torch.Generator().manual_seed(0))
        >>> get("my_package.inits:orthogonal_heads", gain=0.5)(vit)
    """
    found = [step for _, step in steps(init, **numbers)]
    return found[0] if len(found) == 1 else compose(*found)


def steps(init: str | Callable[..., Any], **numbers: Any) -> list[tuple[str, Initialiser]]:
    """The initialisers that `get` composes, with their names."""
    names: list[Any] = [part.strip() for part in split_initialisers(init)] if isinstance(init, str) else [init]
    signatures = [_signature(name) for name in names]
    bound: list[tuple[str, Initialiser]] = []
    for name, signature, given in zip(names, signatures, distribute(signatures, numbers), strict=True):
        signature.require(given)
        function = INITIALISERS.find(name)
        registered = getattr(function, "func", function) in (*INITIALISERS.values(), _of_user)  # or bound
        run = function if registered else functools.partial(_of_user, signature.name, function)
        bound.append((signature.name, functools.partial(run, **given)))
    return bound


def compose(*initialisers: str | Callable[..., Any]) -> Initialiser:
    """Several initialisers (names, references or functions), one after the other, drawing from one generator.

    Example:
        >>> compose("sinusoidal_positions", get("mimetic_attention", beta_qk=0.5), mimetic_mlp_)(vit)
    """
    if not initialisers:
        raise UsageError("compose: expected at least one initialiser, found none")
    found = [get(one) for one in initialisers]

    @all_or_nothing()
    def composed(module: nn.Module, *, generator: Generator = None) -> nn.Module:
        generator = opened(generator)
        with read_once(module):
            for step in found:
                module = step(module, generator=generator)
        return module

    return composed


def for_alike(init: Initialiser) -> Initialiser:
    """An initialiser of networks with the same code, the first of which is traced for all."""
    reading: list[Any] = []

    def run(module: nn.Module, **parameters: Any) -> nn.Module:
        with read_once(module, reading):
            return init(module, **parameters)

    return run


def _signature(init: Any) -> Signature:
    """An initialiser's signature without its generator."""
    function = INITIALISERS.find(init)
    if not callable(function):
        raise UsageError(
            f"expected the name of an initialiser, 'package.module:function' or a function, found {init!r}"
        )
    found = Signature.of(function, name_of(init))
    if not found.positional or not (found.open or "generator" in found.defaults):
        raise UsageError(
            f"{found.name}: expected an initialiser `f(module, *, generator)`, found `f({found.text})`; "
            "`generator` is a torch.Generator (or None) to draw from"
        )
    found.defaults.pop("generator", None)
    return found
