"""Structured initialisers: `name_(module, *, ..., generator=None) -> module`, in place, tested on what they promise.

Every function changes only what its docstring names, computes in float32 or better, draws on the CPU (so that a
generator gives the same weights on any device), and is registered under its name without the underscore.
"""

from typing import TYPE_CHECKING, Any

from weightscope.init.attention import mimetic_attention_
from weightscope.init.convolution import (
    box_filters_,
    conv_covariance,
    conv_covariance_,
    impulse_filters_,
    random_filters_,
)
from weightscope.init.covariance_transfer import covariance_transfer_
from weightscope.init.impulse_attention import impulse_attention_
from weightscope.init.mlp import mimetic_mlp_
from weightscope.init.positions import sinusoidal_positions_
from weightscope.init.registry import REGISTRY, compose, default_, get, parameters
from weightscope.init.residual import delta_orthogonal_, layer_scale_identity_, t_fixup_, zero_init_
from weightscope.init.selection import select_weights_
from weightscope.init.ssm import mimetic_ssm_
from weightscope.init.transfer import permute_, transfer_, transfer_singular_
from weightscope.init.univariate import kaiming_uniform_, trunc_normal_, xavier_

if TYPE_CHECKING:
    from weightscope.init.from_artifact import InitReport, NetworkInit, PopulationInit, load_init

__all__ = [
    "REGISTRY",
    "InitReport",
    "NetworkInit",
    "PopulationInit",
    "box_filters_",
    "compose",
    "conv_covariance",
    "conv_covariance_",
    "covariance_transfer_",
    "default_",
    "delta_orthogonal_",
    "get",
    "impulse_attention_",
    "impulse_filters_",
    "kaiming_uniform_",
    "layer_scale_identity_",
    "load_init",
    "mimetic_attention_",
    "mimetic_mlp_",
    "mimetic_ssm_",
    "parameters",
    "permute_",
    "random_filters_",
    "select_weights_",
    "sinusoidal_positions_",
    "t_fixup_",
    "transfer_",
    "transfer_singular_",
    "trunc_normal_",
    "xavier_",
    "zero_init_",
]

# Fitted structures need SciPy, which takes a second to import.
_ARTIFACT = {"InitReport", "NetworkInit", "PopulationInit", "load_init"}


def __getattr__(name: str) -> Any:
    if name not in _ARTIFACT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightscope.init import from_artifact

    return getattr(from_artifact, name)
