"""Expectations of initialisers that correlate the weights of two layers."""

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import NamedTensors, filter_mlps
from weightscope.anatomy.matrices import chosen_layers
from weightscope.auditing.intervals import correlation as correlation_interval
from weightscope.auditing.intervals import pooled_correlation
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, checks_of
from weightscope.errors import UsageError
from weightscope.init.across_layers import MODES, first_and_last

_SLACK = 0.005  # rounding in half precision


@EXPECTATIONS.register("mimetic_conv_mlp")
def mimetic_conv_mlp_checks(source: NamedTensors, *, correlation: float, layers: int | list[int] | None) -> list[Check]:
    """Checks of the correlation between central pixels and diag(W2 W1), in each block and pooled over blocks.

    Raises:
        AnatomyError: if there is no depthwise convolution with an MLP of as many channels in its block.
        UsageError: if there are so few channels that independent weights could have the pooled correlation.
    """
    parts = chosen_layers(filter_mlps(source), layers)
    found = [_correlation(part.diagonal(), part.centres()) for part in parts]
    sizes = [part.filters.channels for part in parts]
    limits = _decidable("mimetic_conv_mlp", "channels", correlation, sizes)
    checks = [
        Check("mimetic_conv_mlp", "filters and MLP", None, None, "all blocks", "correlation", total, *limits)
        for total in [pooled_correlation(found, sizes)]
    ]
    for part, value, size in zip(parts, found, sizes, strict=True):
        if size > 4:
            rows = [("correlation", value, correlation_interval(correlation, [size], slack=_SLACK))]
            checks += checks_of("mimetic_conv_mlp", "filters and MLP", part.layer, None, part.name, rows)
    return checks


@EXPECTATIONS.register("mimetic_first_last_mlp", variants=({}, {"mode": "rows"}))
def mimetic_first_last_mlp_checks(
    source: NamedTensors, *, correlation: float, mode: str, layers: list[int]
) -> list[Check]:
    """A check of the correlation of fc2 in the first and the last MLP, over entries or over row means.

    Raises:
        AnatomyError: if there are no two MLPs with second matrices of one shape.
        UsageError: if there are so few entries that independent weights could have the correlation.
    """
    choice("mode", mode, MODES)
    first, last = first_and_last(source, layers)
    x, y = (part.read("fc2").double().mean(1) if mode == "rows" else part.read("fc2") for part in (first, last))
    limits = _decidable("mimetic_first_last_mlp", mode, correlation, [x.numel()])
    rows = [("correlation", _correlation(x, y), limits)]
    return checks_of("mimetic_first_last_mlp", "first and last fc2", last.layer, None, last.name, rows)


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.cpu().double().flatten(), y.cpu().double().flatten()]))[0, 1])


def _decidable(name: str, what: str, correlation: float, sizes: list[int]) -> tuple[float, float]:
    """The interval of a correct initialisation, if it does not overlap with that of independent weights."""
    if sum(size > 4 for size in sizes):
        limits = correlation_interval(correlation, sizes, slack=_SLACK)
        independent = correlation_interval(0.0, sizes)
        if limits[0] > independent[1] or limits[1] < independent[0]:
            return limits
    raise UsageError(
        f"{name}: undecidable, independent weights could have the correlation {correlation:g} over "
        f"{sum(sizes)} {what}; a larger network or correlation is needed"
    )
