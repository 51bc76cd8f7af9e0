"""Expectations of initialisers that correlate the weights of two layers."""

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import NamedTensors, filter_mlps
from weightscope.anatomy.matrices import chosen_layers
from weightscope.auditing.intervals import UNTOUCHED, Interval, error_in, outside_correlation, pooled_correlation
from weightscope.auditing.intervals import correlation as correlation_interval
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.errors import UsageError
from weightscope.init.mlp import MODES, first_and_last

_SLACK = 0.005  # rounding in half precision


@EXPECTATIONS.register("mimetic_conv_mlp")
def mimetic_conv_mlp_checks(source: NamedTensors, *, correlation: float, layers: int | list[int] | None) -> list[Check]:
    """Checks of the correlation between central pixels and diag(W2 W1), in each block and pooled over blocks.

    Only the pooled correlation decides between right and untouched networks; one block alone has too few channels.

    Raises:
        AnatomyError: if there is no depthwise convolution with an MLP of as many channels in its block.
        UsageError: if no block has more than 4 channels.
    """
    parts = chosen_layers(filter_mlps(source), layers)
    found = [_correlation(part.diagonal(), part.centres()) for part in parts]
    sizes = [part.filters.channels for part in parts]
    limits, power = _expected("mimetic_conv_mlp", "channels", correlation, sizes)
    pooled: Row = ("correlation", pooled_correlation(found, sizes), limits, power)
    checks = checks_of("mimetic_conv_mlp", "filters and MLP", None, None, "all blocks", [pooled])
    for part, value, size in zip(parts, found, sizes, strict=True):
        if size > 4:
            rows: list[Row] = [("correlation", value, correlation_interval(correlation, [size], slack=_SLACK))]
            checks += checks_of("mimetic_conv_mlp", "filters and MLP", part.layer, None, part.name, rows)
    return checks


@EXPECTATIONS.register("mimetic_first_last_mlp", variants=({}, {"mode": "rows"}))
def mimetic_first_last_mlp_checks(
    source: NamedTensors, *, correlation: float, mode: str, layers: list[int]
) -> list[Check]:
    """A check of the correlation of fc2 in the first and the last MLP, over entries or over row means.

    Raises:
        AnatomyError: if there are no two MLPs with second matrices of one shape.
        UsageError: if there are 4 entries or fewer.
    """
    choice("mode", mode, MODES)
    first, last = first_and_last(source, layers)
    x, y = (part.read("fc2").double().mean(1) if mode == "rows" else part.read("fc2") for part in (first, last))
    limits, power = _expected("mimetic_first_last_mlp", mode, correlation, [x.numel()])
    rows: list[Row] = [("correlation", _correlation(x, y), limits, power)]
    return checks_of("mimetic_first_last_mlp", "first and last fc2", last.layer, None, last.name, rows)


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.cpu().double().flatten(), y.cpu().double().flatten()]))[0, 1])


def _expected(name: str, what: str, correlation: float, sizes: list[int]) -> tuple[Interval, dict[str, float]]:
    """The interval of a correct initialisation, and the power of the check.

    The wrong correlation is 1.2 times the right one, or 0.8 times where 1.2 would be beyond +-1.
    """
    if max(sizes) <= 4:
        raise UsageError(f"{name}: expected more than 4 {what} to correlate, found {max(sizes)}; use a larger network")
    limits = correlation_interval(correlation, sizes, slack=_SLACK)
    wrong = (1.2 if abs(correlation) <= 1 / 1.2 else 0.8) * correlation
    power = {
        UNTOUCHED: outside_correlation(limits, 0.0, sizes),
        error_in("correlation"): outside_correlation(limits, wrong, sizes),
    }
    return limits, power
