"""Expectations of the baselines: independent entries with a scale that depends on the layer's widths."""

import math
from collections.abc import Callable

from torch import Tensor

from weightscope._util.names import matching
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.anatomy.matrices import Matrix, fans, matrices
from weightscope.auditing.intervals import error_in, normal, outside
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.errors import DataError, UsageError

# Standardised moments 4, 6, 8.
_UNIFORM = (9 / 5, 27 / 7, 9.0)
_NORMAL = (3.0, 15.0, 105.0)
DEFAULT = "the default start of torch's layers"


@EXPECTATIONS.register("kaiming_uniform")
def kaiming_uniform_checks(source: NamedTensors, *, slope: float, bias: str, select: str) -> list[Check]:
    """Checks of entries `U(-b, b)`, `b = sqrt(6 / ((1 + slope^2) fan_in))`."""
    gain = math.sqrt(6 / (1 + slope**2))
    return _each(source, "kaiming_uniform", select, bias, lambda w: uniform_entries(w, gain / math.sqrt(fans(w)[0])))


@EXPECTATIONS.register("xavier")
def xavier_checks(source: NamedTensors, *, gain: float, distribution: str, bias: str, select: str) -> list[Check]:
    """Checks of entries with variance `gain^2 * 2 / (fan_in + fan_out)`, uniform or normal."""

    def rows(w: Tensor) -> list[Row]:
        std = gain * math.sqrt(2 / sum(fans(w)))
        return uniform_entries(w, math.sqrt(3) * std) if distribution == "uniform" else entries(w, std, _NORMAL)

    return _each(source, "xavier", select, bias, rows)


@EXPECTATIONS.register("trunc_normal")
def trunc_normal_checks(source: NamedTensors, *, std: float, cut: float, bias: str, select: str) -> list[Check]:
    """Checks of normal entries of standard deviation `std` given that they are in [-cut, cut]."""
    edge = cut / std
    # m_k = E z^2k given |z| <= edge, by parts: m_k = (2 k - 1) m_(k-1) - edge^(2k-1) 2 phi(edge) / P(|z| <= edge).
    inside = math.erf(edge / math.sqrt(2))
    tail = 2 * math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) / inside
    raw = [1.0]
    for k in range(1, 5):
        raw.append((2 * k - 1) * raw[-1] - edge ** (2 * k - 1) * tail)
    moments = raw[2] / raw[1] ** 2, raw[3] / raw[1] ** 3, raw[4] / raw[1] ** 4
    return _each(source, "trunc_normal", select, bias, lambda w: entries(w, std * math.sqrt(raw[1]), moments, cut))


def selected(source: NamedTensors, name: str, select: str) -> list[Matrix]:
    """The weights of linear and convolutional layers whose names match the patterns.

    Raises:
        AnatomyError: if there are none.
        UsageError: if the source is not a module, or a pattern matches nothing.
    """
    if not isinstance(source, ModuleTensors):
        raise UsageError(f"{name}: needs a module, since fan-in and fan-out depend on the layer of a tensor")
    found = matrices(source.module)
    wanted = set(matching(select, (matrix.name for matrix in found)))
    return [matrix for matrix in found if matrix.name in wanted]


def _each(source: NamedTensors, name: str, select: str, bias: str, rows: Callable[[Tensor], list[Row]]) -> list[Check]:
    checks = []
    for i, matrix in enumerate(selected(source, name, select)):
        blocks = matrix.split(matrix.weight.cpu())
        for number, block in enumerate(blocks):
            part = None if len(blocks) == 1 else number
            checks += checks_of(name, "weight", i, part, matrix.name, _against_default(rows(block.float()), block))
        if matrix.bias is not None and bias != "keep":
            limit = 0.0 if bias == "zero" else 1.004 / math.sqrt(fans(blocks[0])[0])
            largest = float(matrix.bias.detach().abs().max())
            checks.append(Check(name, "weight", i, None, matrix.name, "largest bias", largest, 0.0, limit))
    return checks


def _against_default(rows: list[Row], w: Tensor) -> list[Row]:
    """The rows with the power of the variance's check against the entries of torch's layers, U(-1, 1) / sqrt(fan_in).

    `kaiming_uniform` gives the same entries, and passes; that an untouched layer passes, too, is said by this power.
    """
    (_, found, limits, power) = next(row for row in rows if row[0] == "variance" and len(row) == 4)
    ratio = found / float(w.double().square().mean().clamp_min(1e-300)) / (3 * fans(w)[0])
    more = {**power, DEFAULT: outside(limits, ratio, ratio * math.sqrt(0.8 / w.numel()))}
    return [("variance", found, limits, more) if row[0] == "variance" else row for row in rows]


def uniform_entries(w: Tensor, bound: float) -> list[Row]:
    """`entries` for `U(-bound, bound)`."""
    return entries(w, bound / math.sqrt(3), _UNIFORM, bound)


def entries(w: Tensor, std: float, moments: tuple[float, float, float], largest: float = math.inf) -> list[Row]:
    """Mean, variance and kurtosis of entries relative to the expected standard deviation, with their intervals.

    Args:
        w: the weight.
        std: expected standard deviation.
        moments: expected standardised moments 4, 6 and 8.
        largest: largest possible absolute value.

    Raises:
        DataError: if the weight has no entries.
    """
    n = w.numel()
    if n == 0:
        raise DataError(f"expected a weight with entries, found the shape {tuple(w.shape)}; it has nothing to audit")
    m4, m6, m8 = moments
    squares = w.square()
    square = float(squares.mean())
    sd = math.sqrt((m4 - 1) / n)
    limits = normal(1.0, sd, slack=2e-3)
    rows: list[Row] = [
        ("mean", float(w.mean()) / std, normal(0.0, 1 / math.sqrt(n))),
        ("variance", square / std**2, limits, {error_in("the standard deviation"): outside(limits, 1.44, 1.44 * sd)}),
    ]
    if n >= 1000:  # below, the sample kurtosis is far from normal
        error = math.sqrt((m8 - m4**2 - 4 * m4 * (m6 - m4) + 4 * m4**2 * (m4 - 1)) / n)
        rows.append(
            ("kurtosis", float(squares.square().mean()) / max(square**2, 1e-300), normal(m4, error, slack=0.02))
        )
    if largest < math.inf:
        rows.append(("largest", max(map(abs, map(float, w.aminmax()))) / largest, (0.0, 1.004)))
    return rows
