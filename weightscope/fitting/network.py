"""`fit_network`: numbers of closed-form initialisers, fitted to one network.

filters            the covariance of the filters of every depthwise layer
conv-schedule      sigma0, v, a and scale of `conv_covariance_`
identity-product   alpha and beta of `mimetic_attention_`, layer by layer
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightscope._version import __version__
from weightscope.anatomy import opened
from weightscope.artifacts.network_fit import Portable
from weightscope.errors import UsageError
from weightscope.fitting.filters import fit_conv_schedule, fit_filters
from weightscope.fitting.identity_product import fit_identity_product

__all__ = ["STRUCTURES", "fit_conv_schedule", "fit_filters", "fit_identity_product", "fit_network"]

STRUCTURES: Mapping[str, Callable[..., Portable]] = {
    "filters": fit_filters,
    "conv-schedule": fit_conv_schedule,
    "identity-product": fit_identity_product,
}


def fit_network(source: Any, structure: str, **options: Any) -> Portable:
    """Fit the numbers of an initialiser to one network; they fit networks of any width, depth and head count.

    Args:
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`.
        structure: "filters", "conv-schedule" or "identity-product".
        options: named parameters of `fit_filters`, `fit_conv_schedule` or `fit_identity_product`.

    Returns:
        The artifact: `.text()`, `.to_dict()`, `.save(path)`; `load_init(path)` makes an initialiser of it.

    Raises:
        UsageError: if the structure or an option is unknown.
        AnatomyError: if the network has no such part.
        DataError: if a weight is not finite, the source cannot be read, or nothing can be fitted.

    Example:
        >>> fit_network("hf://timm/convnext_atto.d2_in1k", "conv-schedule").save("schedule.safetensors")
    """
    if structure not in STRUCTURES:
        raise UsageError(f"structure: one network can be fitted by {', '.join(STRUCTURES)}, found {structure!r}")
    fit = STRUCTURES[structure]
    known = list(inspect.signature(fit).parameters)[1:]
    if unknown := [key for key in options if key not in known]:
        raise UsageError(f"{structure} has no option {unknown[0]!r}; its options are {', '.join(known)}")
    source = opened(source)
    with torch.no_grad():
        found = fit(source, **options)
    return Portable(found.numbers, found.arrays, {"weightscope": __version__, **_origin(source)})


def _origin(source: Any) -> dict[str, Any]:
    if isinstance(source, nn.Module):
        return {"source": type(source).__name__}
    out = {key: value for key in ("source", "commit") if isinstance(value := getattr(source, key, None), str)}
    if "source" in out and "://" not in out["source"]:
        out["source"] = Path(out["source"]).name
    return out
