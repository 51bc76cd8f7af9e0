"""Structured initialisers: `name_(module, *, ..., generator=None) -> module`, in place, as in `torch.nn.init`.

Every function changes only what its docstring names, computes in float32 or better, draws on the CPU (so that a
generator gives the same weights on any device), and is registered in `INITIALISERS` under its name without the
underscore. `get` and `compose` also take functions of your own, or references to them, `"package.module:function"`.

Parameters that many have:

- `generator`: a CPU generator, or an integer, the seed of a new one; None for torch's global one. Not used where
  nothing is random.
- `strict`: whether tensors that look like the parts and cannot be set are an error; if not, a warning lists them.
- `layers`: which ones, counted from 0, negative numbers from the end; None for all.
- `select`: shell patterns of tensor names, comma-separated. `bias`: "uniform" in +-1/sqrt(fan_in), "zero", or "keep".
- `components`: "all", or some of "embedding", "attention", "mlp", "convolution", "norm", "head", "other".
- `source`: a module, a mapping of tensors, a `Checkpoint`, a path, `hf://org/name`, or network k of a population,
  `"PATH.pop::k"`.

Errors come before the first write: AnatomyError if the module (or source) has no such part or, if strict, one that
cannot be read, UsageError if an argument is invalid or selects nothing, SpecError if a source does not fit.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightscope.init.attention import mimetic_attention_ as mimetic_attention_
from weightscope.init.attention import sinusoidal_positions_ as sinusoidal_positions_
from weightscope.init.base import INITIALISERS as INITIALISERS
from weightscope.init.base import compose as compose
from weightscope.init.base import get as get
from weightscope.init.base import parameters as parameters
from weightscope.init.baselines import default_ as default_
from weightscope.init.baselines import delta_orthogonal_ as delta_orthogonal_
from weightscope.init.baselines import kaiming_uniform_ as kaiming_uniform_
from weightscope.init.baselines import layer_scale_identity_ as layer_scale_identity_
from weightscope.init.baselines import t_fixup_ as t_fixup_
from weightscope.init.baselines import trunc_normal_ as trunc_normal_
from weightscope.init.baselines import xavier_ as xavier_
from weightscope.init.baselines import zero_init_ as zero_init_
from weightscope.init.convolution import box_filters_ as box_filters_
from weightscope.init.convolution import conv_covariance as conv_covariance
from weightscope.init.convolution import conv_covariance_ as conv_covariance_
from weightscope.init.convolution import covariance_transfer_ as covariance_transfer_
from weightscope.init.convolution import impulse_filters_ as impulse_filters_
from weightscope.init.convolution import random_filters_ as random_filters_
from weightscope.init.growth import grow_ as grow_
from weightscope.init.impulse_attention import impulse_attention_ as impulse_attention_
from weightscope.init.mlp import constant_mlp_bias_ as constant_mlp_bias_

# `as`: exported to type checkers, which cannot follow an `__all__` that is computed from the registry.
from weightscope.init.mlp import mimetic_conv_mlp_ as mimetic_conv_mlp_
from weightscope.init.mlp import mimetic_first_last_mlp_ as mimetic_first_last_mlp_
from weightscope.init.mlp import mimetic_mlp_ as mimetic_mlp_
from weightscope.init.selection import select_weights_ as select_weights_
from weightscope.init.ssm import mimetic_ssm_ as mimetic_ssm_
from weightscope.init.ssm import repeat_layer_ as repeat_layer_
from weightscope.init.ssm import ssm_from_attention_ as ssm_from_attention_
from weightscope.init.transfer import permute_ as permute_
from weightscope.init.transfer import transfer_ as transfer_
from weightscope.init.transfer import transfer_singular_ as transfer_singular_

if TYPE_CHECKING:
    from weightscope.init.from_artifact import InitReport as InitReport
    from weightscope.init.from_artifact import NetworkInit as NetworkInit
    from weightscope.init.from_artifact import PopulationInit as PopulationInit
    from weightscope.init.from_artifact import load_init as load_init
    from weightscope.init.terms import from_terms_ as from_terms_

# Fitted structures need SciPy, which takes a second to import.
_FITTED = dict.fromkeys(("InitReport", "NetworkInit", "PopulationInit", "load_init"), "from_artifact")
_FITTED["from_terms_"] = "terms"

__all__ = [
    *("INITIALISERS", "compose", "conv_covariance", "get", "parameters"),
    *(name for name in _FITTED if not name.endswith("_")),
    *(f"{name}_" for name in INITIALISERS),
]


def __getattr__(name: str) -> Any:
    if name not in _FITTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"weightscope.init.{_FITTED[name]}"), name)
