"""Artifacts fitted to one network as initialisers of networks of other shapes."""

import numpy as np
import torch

from weightscope._util.names import unwrapped
from weightscope.anatomy import depthwise
from weightscope.artifacts.network_fit import ConvSchedule, FilterCovariances, IdentityProduct, Portable, ProductLayer
from weightscope.init._common import M, cpu_generator
from weightscope.init._report import InitReport
from weightscope.init.attention import self_attention, write_query_key, write_value_output
from weightscope.init.convolution import conv_covariance_
from weightscope.init.covariance_transfer import TransferOptions, transfer_distributions
from weightscope.statistics.filters import FilterDistribution


class PortableInit:
    """An initialiser fitted to one network, for any network that has the part: `init(module, generator=g) -> module`.

        filters            `covariance_transfer_` with the artifact's covariances
        conv-schedule      `conv_covariance_` with the artifact's numbers
        identity-product   `mimetic_attention_` with alpha and beta interpolated linearly over the relative depth

    Args:
        result: the artifact, or a fit that was not saved.

    Attributes:
        result: as given.
        report: what the last call did; None before the first.
    """

    def __init__(self, result: Portable) -> None:
        self.result = result
        self.report: InitReport | None = None

    @torch.no_grad()
    def __call__(self, module: M, *, generator: torch.Generator | None = None) -> M:
        """Set the weights of the part in a module, in place.

        Raises:
            AnatomyError: if the module has no such part.
            UsageError: if the part is one that the structure cannot describe (filters of even size), or the generator
                is not one of the CPU.
        """
        cpu_generator(generator)
        numbers, notes = self.result.numbers, ()
        if isinstance(numbers, IdentityProduct):
            touched = _products(module, numbers, generator)
        else:
            if isinstance(numbers, ConvSchedule):
                given = {key: getattr(numbers, key) for key in ("sigma0", "v", "a", "scale", "psd", "schedule")}
                conv_covariance_(module, **given, generator=generator)
            else:
                notes = _notes(
                    transfer_distributions(module, laws_of(self.result), _options(numbers), generator), numbers.psd
                )
            touched = [name for part in depthwise(module) for name in part.parameters]
        done = set(touched)
        others = (name for name, _ in module.named_parameters() if name not in done)
        self.report = InitReport(tuple(map(unwrapped, touched)), tuple(map(unwrapped, others)), notes=notes)
        return module

    def __repr__(self) -> str:
        numbers = self.result.numbers
        return f"PortableInit({numbers.structure} of {len(numbers.layers)} layers)"


def laws_of(result: Portable) -> list[FilterDistribution]:
    """The distributions of filters that an artifact of the structure `filters` holds."""
    return [
        FilterDistribution(
            layer.name,
            layer.stage,
            layer.depth,
            layer.kernel,
            layer.count,
            np.asarray(result.arrays[f"{i}.mean"]).reshape(layer.kernel, layer.kernel),
            np.asarray(result.arrays[f"{i}.covariance"]),
        )
        for i, layer in enumerate(result.numbers.layers)
    ]


def _options(numbers: FilterCovariances) -> TransferOptions:
    return TransferOptions(numbers.kronecker, numbers.means, numbers.schedule, numbers.kernel, numbers.psd)


def _notes(negative: dict[str, float], psd: str) -> tuple[str, ...]:
    if not negative:
        return ()
    worst = max(negative, key=negative.__getitem__)
    done = "taken as their absolute values" if psd == "abs" else "set to zero"
    return (
        f"{len(negative)} covariances had negative eigenvalues, at most {negative[worst]:.1%} of the spectrum "
        f"(`{worst}`), {done}",
    )


def _products(module: torch.nn.Module, numbers: IdentityProduct, generator: torch.Generator | None) -> list[str]:
    """Write the products, layer by layer; returns the names of the tensors."""
    parts = self_attention(module)
    touched: list[str] = []
    for i, part in enumerate(parts):
        depth = i / (len(parts) - 1) if len(parts) > 1 else 0.0
        if numbers.parts != "vo":
            write_query_key(part, "svd", *_at(numbers.layers, "qk", depth), generator)
            touched += [*part.parameters["q"], *part.parameters["k"]]
        if numbers.parts != "qk":
            write_value_output(part, "svd", *_at(numbers.layers, "vo", depth), generator)
            touched += [*part.parameters["v"], *part.parameters["o"]]
    return list(dict.fromkeys(touched))


def _at(layers: tuple[ProductLayer, ...], part: str, depth: float) -> tuple[float, float]:
    """Alpha and beta of a product at a relative depth."""
    depths = [layer.depth for layer in layers]
    fits = [getattr(layer, part) for layer in layers]
    return tuple(float(np.interp(depth, depths, [getattr(fit, key) for fit in fits])) for key in ("alpha", "beta"))
