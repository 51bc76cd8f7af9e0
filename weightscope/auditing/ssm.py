"""Expectations of `mimetic_ssm_`: slow decay, unit steps, correlated W_B and W_C, an identity convolution."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from weightscope.anatomy import NamedTensors, SSMPart, chosen_layers, ssms
from weightscope.auditing.intervals import LEVEL, UNTOUCHED, Interval, error_in, normal, outside
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of

NORMAL = normal(0.0, 1.0, level=LEVEL)[1]  # half the width of an interval, in standard deviations
# Mean and standard deviation of log U for U uniform in [1, 16], from which mamba_ssm draws A in Mamba-2.
_A_RANGE = 16.0
_LOG_MEAN = (_A_RANGE * math.log(_A_RANGE) - _A_RANGE + 1) / (_A_RANGE - 1)
_LOG_SQUARE = (_A_RANGE * (math.log(_A_RANGE) ** 2 - 2 * math.log(_A_RANGE) + 2) - 2) / (_A_RANGE - 1)
_LOG_STD = math.sqrt(_LOG_SQUARE - _LOG_MEAN**2)


@EXPECTATIONS.register("mimetic_ssm", variants=tuple({"c": c} for c in (2.0, 4.0, 8.0)))
def mimetic_ssm_checks(
    source: NamedTensors,
    *,
    c: float,
    a: bool,
    delta: bool,
    cb: bool,
    convolution: bool | None,
    layers: int | list[int] | None,
) -> list[Check]:
    """Checks of every state-space layer.

    - decay factor: c such that A_log = -c log(A_0), with A_0 of Mamba's own initialisation (1 .. N, 1 .. H, or
      U(1, 16));
    - slowest, fastest: the range of A = -exp(A_log);
    - W_Delta, Delta: the largest entry of W_Delta, and the softplus(b_Delta) farthest from 1;
    - C on B: slope of W_C on W_B, 1/2, and their correlation, 1/sqrt(2);
    - current tap, other taps: of the convolution.

    Raises:
        AnatomyError: if there is no state-space layer.
    """
    checks: list[Check] = []
    for part in chosen_layers(ssms(source), layers):
        rows = _decay(part, c) if a else []
        rows += _step(part) if delta else []
        rows += _correlation(part) if cb else []
        rows += _taps(part) if (part.version == 2 if convolution is None else convolution) else []
        checks += checks_of("mimetic_ssm", "ssm", part.layer, None, part.name, rows)
    return checks


def _decay(part: SSMPart, c: float) -> list[Row]:
    a_log = part.read("A_log").cpu().double()
    rate = a_log.exp()
    floor = float(_A_RANGE) if part.version == 2 else float(part.state)
    top = max(floor, float(part.heads)) if part.version == 2 else floor
    factor, limits = _factor(part, a_log, c)
    # -A is between the largest initial value to the power -c, and 1.
    spread = (limits[1] - limits[0]) / 2 / NORMAL if part.version == 2 else 0.0
    power = {UNTOUCHED: outside(limits, -1.0, spread / c), error_in("c"): outside(limits, 1.2 * c, 1.2 * spread)}
    return [
        ("decay factor", factor, limits, power),
        ("slowest -A", float(rate.min()), (0.98 * top**-c, 1.02)),
        ("fastest -A", float(rate.max()), (0.98 * top**-c, 1.02)),
    ]


def _factor(part: SSMPart, a_log: Tensor, c: float) -> tuple[float, Interval]:
    """The c estimated from A_log, and its interval, given how A was initialised."""
    count = part.state if part.version == 1 else part.heads
    counted = torch.arange(1, count + 1, dtype=torch.float64).log()
    if count > 1:
        slope = -float((a_log * counted).sum() / (counted.square().sum() * (a_log.numel() / count)))
        error = float((a_log + slope * counted).abs().max())
        if part.version == 1 or error < 0.01 * c * float(counted[-1]):
            proportional = error <= 0.02 * c * float(counted[-1])  # otherwise A_log has no factor at all
            return (slope if proportional else math.nan), (0.99 * c, 1.01 * c)
    mean = -float(a_log.mean()) / _LOG_MEAN
    return mean, normal(c, c * _LOG_STD / (_LOG_MEAN * math.sqrt(count)), slack=0.01 * c)


def _step(part: SSMPart) -> list[Row]:
    step = F.softplus(part.read("dt_bias").cpu().double())
    return [
        ("W_Delta", float(part.read("dt_weight").cpu().abs().max()), (0.0, 0.0)),
        ("Delta", float(step[(step - 1).abs().argmax()]), (0.99, 1.01)),
    ]


def _correlation(part: SSMPart) -> list[Row]:
    write, read = part.read("B").cpu().double().flatten(), part.read("C").cpu().double().flatten()
    write, read = write - write.mean(), read - read.mean()
    slope = float((write * read).sum() / write.square().sum())
    rest = float((read - slope * write).square().mean())
    error = math.sqrt(rest / float(write.square().sum())) if float(write.square().sum()) else math.inf
    r = float((write * read).sum() / (write.norm() * read.norm()).clamp_min(1e-300))
    limits = normal(math.sqrt(0.5), 0.5 / math.sqrt(len(write)), slack=0.01)
    power = {UNTOUCHED: outside(limits, 0.0, 1 / math.sqrt(len(write)))}
    # d r = (1 - r^2) / sqrt(n) for normal entries; uniform ones fluctuate less.
    return [
        ("C on B", slope, normal(0.5, error, slack=0.005)),
        ("C-B correlation", r, limits, power),
    ]


def _taps(part: SSMPart) -> list[Row]:
    taps = part.read("conv_weight").cpu()
    current = taps[:, -1]
    others = torch.cat(
        [taps[:, :-1].flatten(), part.read("conv_bias").cpu() if "conv_bias" in part.parts else taps[:0, 0]]
    )
    return [
        ("current tap", float(current[(current - 1).abs().argmax()]), (0.999, 1.001)),
        ("other taps and bias", float(others.abs().max()) if len(others) else 0.0, (0.0, 1e-6)),
    ]
