"""`audit`: does a model have the structure that an initialiser promises?

It looks at effective operators (products of queries and keys, covariances of filters, attention maps), not at code
or at whether weights changed. A correct initialisation fails an audit with probability below 1e-6 per check; the
report states the bound. Public copies of these initialisers swap factors, forget a 1/sqrt(d) or take a root
twice, and frameworks overwrite what was initialised: all of that fails.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from weightscope.anatomy import named_tensors
from weightscope.anatomy.tensors import NamedTensors
from weightscope.auditing.attention import mimetic_attention
from weightscope.auditing.filters import (
    box_filters_promise,
    conv_covariance_promise,
    impulse_filters_promise,
    random_filters_promise,
)
from weightscope.auditing.intervals import LEVEL
from weightscope.auditing.mlp import mimetic_mlp
from weightscope.auditing.overwritten import track
from weightscope.auditing.positions import impulse_attention, sinusoidal_positions
from weightscope.auditing.report import AuditReport, Check
from weightscope.auditing.residual import delta_orthogonal, layer_scale_identity, t_fixup, zero_init
from weightscope.auditing.ssm import mimetic_ssm
from weightscope.auditing.univariate import kaiming_uniform, trunc_normal, xavier
from weightscope.errors import AnatomyError, UsageError
from weightscope.init import parameters as init_parameters
from weightscope.init.convolution import PRESETS as CONV_PRESETS

__all__ = ["PROMISES", "AuditReport", "Check", "audit", "track"]

PROMISES: Mapping[str, Callable[..., list[Check]]] = {
    "mimetic_attention": mimetic_attention,
    "impulse_attention": impulse_attention,
    "sinusoidal_positions": sinusoidal_positions,
    "conv_covariance": conv_covariance_promise,
    "random_filters": random_filters_promise,
    "impulse_filters": impulse_filters_promise,
    "box_filters": box_filters_promise,
    "mimetic_mlp": mimetic_mlp,
    "mimetic_ssm": mimetic_ssm,
    "kaiming_uniform": kaiming_uniform,
    "xavier": xavier,
    "trunc_normal": trunc_normal,
    "zero_init": zero_init,
    "t_fixup": t_fixup,
    "delta_orthogonal": delta_orthogonal,
    "layer_scale_identity": layer_scale_identity,
}

# What `audit(model)` tries, besides every initialiser with its defaults: the published presets.
_VARIANTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "mimetic_attention": ({"preset": "vision"}, {"preset": "language"}),
    "conv_covariance": tuple({"preset": name} for name in CONV_PRESETS),
    "mimetic_mlp": ({}, {"mode": "rows"}, {"mode": "anticorrelated"}),
    "mimetic_ssm": tuple({"c": c} for c in (2.0, 4.0, 8.0)),
}


def audit(
    model: Any, init: str | None = None, *, config: Mapping[str, Any] | None = None, **parameters: Any
) -> AuditReport:
    """Hold a model against what an initialiser promises, layer by layer and head by head.

    Args:
        model: a module, a mapping name -> tensor (a state dict, a checkpoint), or a `NamedTensors`.
        init: the initialiser's registered name, or several joined by "+"; None tries every one with its published
            presets and tells which of them the model has.
        config: the model's config, for a mapping.
        parameters: the initialiser's named parameters where they are not its defaults.

    Returns:
        A report: `.passed`, `.checks`, `.failures`, `.to_dict()`, and a table when printed. `.false_alarm_rate`
        bounds the probability that a correct initialisation fails.

    Raises:
        AnatomyError: if the model has no part that the initialiser is about.
        UsageError: if the name or a parameter is unknown; lists those that there are.

    Example:
        >>> print(audit(mimetic_attention_(vit), "mimetic_attention"))
        >>> audit(vit, "mimetic_attention", preset="language").passed
        False
    """
    source = named_tensors(model, config)
    if init is None:
        if parameters:
            raise UsageError(f"audit: the parameters {', '.join(parameters)} need the name of an initialiser")
        return _everything(source)
    names = [name.strip() for name in init.split("+")]
    shares = _shares(names, parameters)
    checks = [check for name in names for check in _promise(source, name, shares[name])]
    return AuditReport(tuple(checks), level=LEVEL)


def _shares(names: list[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Which parameter goes to which of the named initialisers."""
    for name in names:
        if name not in PROMISES:
            raise UsageError(f"no audit for {name!r}; there are {', '.join(PROMISES)}")
    known = {name: init_parameters(name) for name in names}
    out: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in given.items():
        owners = [name for name in names if key in known[name]]
        if len(owners) != 1:
            each = "; ".join(f"{name}: {', '.join(known[name])}" for name in names)
            what = f"could be meant for {' or '.join(owners)}" if owners else "is no parameter"
            raise UsageError(f"{'+'.join(names)}: {key!r} {what}; the named parameters are {each}")
        out[owners[0]][key] = value
    return out


def _promise(source: NamedTensors, name: str, given: Mapping[str, Any]) -> list[Check]:
    promise = PROMISES[name]
    values = {**init_parameters(name), **given}
    wanted = list(inspect.signature(promise).parameters)[1:]
    missing = [key for key in wanted if values.get(key) is inspect.Parameter.empty]
    if missing:
        raise UsageError(f"{name}: needs {', '.join(missing)}")
    return promise(source, **{key: values[key] for key in wanted})


def _everything(source: NamedTensors) -> AuditReport:
    """Every initialiser, with its presets; of the variants of one, the best is reported."""
    checks: list[Check] = []
    skipped: dict[str, str] = {}
    for name in PROMISES:
        best: list[Check] | None = None
        for variant in _VARIANTS.get(name, ({},)):
            try:
                found = _promise(source, name, variant)
            except (AnatomyError, UsageError) as error:
                skipped[name] = str(error)
                continue
            if best is None or _failed(found) < _failed(best):
                best = found
        if best is not None:
            skipped.pop(name, None)
            checks += best
    return AuditReport(tuple(checks), skipped, everything=True, level=LEVEL)


def _failed(checks: list[Check]) -> float:
    return sum(not check.passed for check in checks) / len(checks)
