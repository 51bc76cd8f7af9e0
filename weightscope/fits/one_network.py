"""`fit_network`: numbers of closed-form initialisers, fitted to one network.

filters            the distribution of the filters of every depthwise layer
conv_schedule      sigma0, v, a and scale of `conv_covariance_`
identity_product   alpha and beta of `mimetic_attention_`, layer by layer
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weightscope._util.plugins import Registry, underscored
from weightscope._util.threads import one_thread
from weightscope._version import __version__
from weightscope.errors import UsageError
from weightscope.fits.artifact import NetworkFit
from weightscope.fits.filters import FilterFit, ScheduleFit, fit_conv_schedule, fit_filters
from weightscope.fits.identity_product import ProductFit, fit_identity_product
from weightscope.fits.structure import STRUCTURES, checked_options
from weightscope.population import open_network

# Functions `f(source, *, ...options) -> NetworkFit`.
NETWORK_FITS: Registry[Callable[..., NetworkFit]] = Registry("network structure")
NETWORK_FITS.register("filters", source="thesis 3.1.1")(fit_filters)
NETWORK_FITS.register("conv_schedule", source="thesis Eq. 3.10-3.11")(fit_conv_schedule)
NETWORK_FITS.register("identity_product", source="thesis Eq. 3.12-3.18")(fit_identity_product)


@one_thread()
def fit_network(source: Any, structure: str | Callable[..., NetworkFit], **options: Any) -> NetworkFit:
    """Fit the numbers of an initialiser to one network; they apply to networks of any width, depth and head count.

    Args:
        source: a module, a mapping of tensors, a `Checkpoint`, a path, `"PATH.pop::k"`, or `hf://org/name`.
        structure: "filters", "conv_schedule" or "identity_product"; or a function
            `f(source, **options) -> NetworkFit` of your own, itself or as `"package.module:function"`.
        options: named parameters of `fit_filters`, `fit_conv_schedule` or `fit_identity_product`.

    Raises:
        UsageError: if the structure or an option is unknown.
        AnatomyError: if the network has no such part.
        DataError: if a weight is not finite, the source cannot be read, or nothing can be fitted.

    Example:
        >>> fit_network("hf://timm/convnext_atto.d2_in1k", "conv_schedule").save("schedule.safetensors")
    """
    name = underscored(structure)
    if name in ("auto", *STRUCTURES):
        known = ", ".join((*NETWORK_FITS, "exchangeable"))
        raise UsageError(f"structure: {name!r} needs a population (`import`); for one network ({source}): {known}")
    fit = NETWORK_FITS.find(name)
    _, *parameters = inspect.signature(fit).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        checked_options(name, options, [parameter.name for parameter in parameters])
    source = open_network(source)
    with torch.no_grad():
        found = fit(source, **options)
    return found.model_copy(update={"provenance": {"weightscope": __version__, **origin(source)}})


def origin(source: Any) -> dict[str, Any]:
    """What a network records about where it came from."""
    if isinstance(source, nn.Module):
        return {"source": type(source).__name__}
    facts = ("source", "commit", "key", "adapter")
    out = {key: value for key in facts if isinstance(value := getattr(source, key, None), str)}
    if "source" in out and "://" not in out["source"]:
        out["source"] = Path(out["source"]).name
    return out


def network_fit_of(header: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> NetworkFit:
    """The fit that a header and arrays describe."""
    numbers = header["numbers"]
    kinds = {"filters": FilterFit, "conv_schedule": ScheduleFit, "identity_product": ProductFit}
    kind: Any = kinds[numbers["structure"]]
    for name, array in arrays.items():  # `i.mean` and `i.covariance` of filters
        i, key = name.split(".")
        layer = numbers["layers"][int(i)]
        layer[key] = array.reshape(layer["kernel"], -1) if key == "mean" else array
    return kind.model_validate(numbers | {"provenance": header["provenance"]})
