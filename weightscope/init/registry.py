"""Initialisers by name, with named numbers; and several of them one after the other."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weightscope._util.plugins import imported, is_reference
from weightscope.errors import UsageError
from weightscope.init._common import Initialiser, M
from weightscope.init.attention import mimetic_attention_
from weightscope.init.convolution import box_filters_, conv_covariance_, impulse_filters_, random_filters_
from weightscope.init.covariance_transfer import covariance_transfer_
from weightscope.init.impulse_attention import impulse_attention_
from weightscope.init.mlp import mimetic_mlp_
from weightscope.init.positions import sinusoidal_positions_
from weightscope.init.residual import delta_orthogonal_, layer_scale_identity_, t_fixup_, zero_init_
from weightscope.init.selection import select_weights_
from weightscope.init.ssm import mimetic_ssm_
from weightscope.init.transfer import permute_, transfer_, transfer_singular_
from weightscope.init.univariate import kaiming_uniform_, trunc_normal_, xavier_


def default_(module: M, *, generator: torch.Generator | None = None) -> M:
    """Leave the module as its constructor made it; the baseline of every comparison.

    Args:
        module: returned untouched.
        generator: not used.

    Example:
        >>> default_(vit)
    """
    return module


REGISTRY: Mapping[str, Callable[..., Any]] = {
    "default": default_,
    "kaiming_uniform": kaiming_uniform_,
    "xavier": xavier_,
    "trunc_normal": trunc_normal_,
    "conv_covariance": conv_covariance_,
    "covariance_transfer": covariance_transfer_,
    "random_filters": random_filters_,
    "impulse_filters": impulse_filters_,
    "box_filters": box_filters_,
    "mimetic_attention": mimetic_attention_,
    "impulse_attention": impulse_attention_,
    "sinusoidal_positions": sinusoidal_positions_,
    "mimetic_mlp": mimetic_mlp_,
    "mimetic_ssm": mimetic_ssm_,
    "zero_init": zero_init_,
    "t_fixup": t_fixup_,
    "delta_orthogonal": delta_orthogonal_,
    "layer_scale_identity": layer_scale_identity_,
    "select_weights": select_weights_,
    "transfer": transfer_,
    "transfer_singular": transfer_singular_,
    "permute": permute_,
}


def parameters(name: str) -> dict[str, Any]:
    """The named parameters of a registered initialiser and their defaults (`inspect.Parameter.empty` for none).

    Raises:
        UsageError: if there is no such initialiser; lists those that there are.
    """
    if name not in REGISTRY:
        known = "; ".join(f"{n}({', '.join(parameters(n))})" for n in REGISTRY)
        raise UsageError(f"no initialiser {name!r}; there are {known}. Join several by '+'")
    signature = inspect.signature(REGISTRY[name]).parameters
    return {p.name: p.default for p in signature.values() if p.name not in ("module", "generator")}


def get(name: str, **numbers: Any) -> Initialiser:
    """A registered initialiser with its named parameters bound, ready for `init(module, generator=g)`.

    Args:
        name: a name, or several joined by "+": `"mimetic_attention+mimetic_mlp"`. Then every parameter goes to
            the one initialiser that has it.
        numbers: named parameters.

    Raises:
        UsageError: if a name is unknown, or a parameter is, or belongs to more than one of the joined
            initialisers; lists what there is.

    Example:
        >>> get("mimetic_attention", alpha_qk=0.6)(vit, generator=torch.Generator().manual_seed(0))
    """
    if is_reference(name) or callable(name):
        return functools.partial(imported(name) if isinstance(name, str) else name, **numbers)
    names = [part.strip() for part in name.split("+")] if isinstance(name, str) else []
    if not names:
        raise UsageError(f"an initialiser is given by its name, found {name!r}")
    owners = {n: parameters(n) for n in names}
    shares: dict[str, dict[str, Any]] = {n: {} for n in names}
    for key, value in numbers.items():
        having = [n for n in owners if key in owners[n]]
        if not having:
            each = "; ".join(f"{n}: {', '.join(owners[n]) or 'none'}" for n in owners)
            raise UsageError(f"{name}: no parameter {key!r}; the named parameters are {each}")
        if len(having) > 1:
            raise UsageError(f"{name}: {key!r} could be meant for {' or '.join(having)}; build them one by one")
        shares[having[0]][key] = value
    for n in names:
        missing = [k for k, v in owners[n].items() if v is inspect.Parameter.empty and k not in shares[n]]
        if missing:
            raise UsageError(f"{n}: needs {', '.join(missing)}")
    bound = [functools.partial(REGISTRY[n], **shares[n]) for n in names]
    return bound[0] if len(bound) == 1 else compose(*bound)


def compose(*initialisers: str | Initialiser) -> Initialiser:
    """Several initialisers, one after the other on one module, drawing from one generator.

    Args:
        initialisers: registered names, or functions `init(module, generator=g)`.

    Raises:
        UsageError: if there is none, or a name is unknown.

    Example:
        >>> compose("sinusoidal_positions", get("mimetic_attention", beta_qk=0.5), mimetic_mlp_)(vit)
    """
    if not initialisers:
        raise UsageError("compose: expected at least one initialiser, found none")
    steps = [get(step) if isinstance(step, str) else step for step in initialisers]
    if not all(map(callable, steps)):
        raise UsageError(f"compose: expected names or functions, found {initialisers!r}")

    def composed(module: nn.Module, *, generator: torch.Generator | None = None) -> nn.Module:
        for step in steps:
            module = step(module, generator=generator)
        return module

    return composed
