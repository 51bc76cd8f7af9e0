"""Results of an audit: checks with intervals, and the report of all of them."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from weightscope._util.results import Result
from weightscope._util.tables import text_table
from weightscope.auditing.intervals import LEVEL, Interval


@dataclass(frozen=True)
class Check:
    """A statistic of a part of a model, and the interval that is expected.

    Attributes:
        initialiser: name of the initialiser or of the function that expects it.
        part: what was measured: "qk", "vo", "filters", "fc1", "ssm", "map", "positions", "weight", or any other word;
            a report has one table for each.
        layer: number of the layer, from 0; None where parts are not numbered.
        head: number of the head; None for statistics of a whole layer.
        name: path of the module or tensor.
        statistic: name of the statistic, a column of the table.
        found: its value.
        low: lower end of the interval, -inf for none.
        high: upper end of the interval, inf for none.

    Example:
        >>> w = tensors.get("head.weight").float()
        >>> Check("small_head", "weight", None, None, "head.weight", "std", float(w.std()), 0.0, 0.01).passed
        True
    """

    initialiser: str
    part: str
    layer: int | None
    head: int | None
    name: str
    statistic: str
    found: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether the value is finite and in the interval."""
        return math.isfinite(self.found) and self.low <= self.found <= self.high


Row = tuple[str, float, Interval]
"""A statistic, its value and the expected interval."""


def checks_of(
    initialiser: str, part: str, layer: int | None, head: int | None, name: str, rows: Iterable[Row]
) -> list[Check]:
    """The checks of several statistics of one part; arguments as the attributes of `Check`."""
    return [Check(initialiser, part, layer, head, name, what, found, *limits) for what, found, limits in rows]


@dataclass(frozen=True, repr=False)
class AuditReport(Result):
    """The checks of an audit.

    Attributes:
        checks: in the order of the model.
        skipped: initialiser -> why it does not apply, if all initialisers were tried.
        everything: whether all initialisers were tried, so that one that fits is enough.
        level: probability that a check of a correctly initialised model fails.
    """

    checks: tuple[Check, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    everything: bool = False
    level: float = LEVEL

    @property
    def verdicts(self) -> dict[str, bool]:
        """Initialiser -> whether all of its checks passed."""
        out: dict[str, bool] = {}
        for check in self.checks:
            out[check.initialiser] = out.get(check.initialiser, True) and check.passed
        return out

    @property
    def passed(self) -> bool:
        """Whether the model is as expected: by every initialiser named, or by any if all were tried."""
        verdicts = self.verdicts.values()
        return any(verdicts) if self.everything else bool(self.checks) and all(verdicts)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def false_alarm_rate(self) -> float:
        """Upper bound on the probability that a correct initialisation fails this audit (union bound)."""
        return min(1.0, self.level * len(self.checks))

    def to_dict(self) -> dict[str, Any]:
        """JSON types: the verdicts, the false-alarm rate and every check."""
        return {
            "passed": self.passed,
            "verdicts": self.verdicts,
            "skipped": dict(self.skipped),
            "false_alarm_rate": self.false_alarm_rate,
            "checks": [_finite(row) for row in self.rows()],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record for each check."""
        return [asdict(check) | {"passed": check.passed} for check in self.checks]

    def summary(self) -> str:
        """The verdict in one line."""
        if not self.checks:
            return "nothing to audit"
        fitting = [name for name, passed in self.verdicts.items() if passed]
        verdict = ", ".join(fitting) if self.everything and fitting else "passed" if self.passed else "failed"
        return f"{verdict}, {len(self.failures)} of {len(self.checks)} checks failed"

    def text(self) -> str:
        """A table for each part: a row of expected intervals, then a row for each layer and head."""
        if not self.checks:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            return f"nothing to audit: {reasons}"
        lines = []
        for name, passed in self.verdicts.items():
            mine = [check for check in self.checks if check.initialiser == name]
            bad = sum(not check.passed for check in mine)
            if self.everything and not passed:
                lines.append(f"{name}: no, {bad} of {len(mine)} checks fail")
                continue
            verdict = f"passed, all {len(mine)} checks" if passed else f"FAILED, {bad} of {len(mine)} checks"
            lines += [f"{name}: {verdict} (false alarms < {self.level * len(mine):.1e} per audit)", *_tables(mine)]
        return "\n".join([*lines, *(f"{name}: does not apply, {why}" for name, why in self.skipped.items())])


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Infinities and NaN as text, which JSON lacks."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _tables(checks: list[Check]) -> list[str]:
    lines = []
    for part in dict.fromkeys(check.part for check in checks):
        mine = [check for check in checks if check.part == part]
        statistics = list(dict.fromkeys(check.statistic for check in mine))
        rows: dict[tuple[int | None, int | None, str], dict[str, Check]] = {}
        for check in mine:
            rows.setdefault((check.layer, check.head, check.name), {})[check.statistic] = check
        body: list[list[str]] = []
        expected: list[str] = []
        for (layer, head, name), row in rows.items():
            limits = [_interval(row[s]) if s in row else "" for s in statistics]
            if limits != expected:
                expected = limits
                body.append(["", "", *limits, "expected"])
            found = [_number(row[s].found) + ("" if row[s].passed else " !") if s in row else "" for s in statistics]
            numbers = ["" if n is None else str(n) for n in (layer, head)]
            failed = "" if all(check.passed for check in row.values()) else "  FAILED"
            body.append([*numbers, *found, name + failed])
        header = ("layer", "head", *statistics, part)
        lines += ["", text_table(header, body, left=(len(header) - 1,))]
    return [*lines, ""]


def _interval(check: Check) -> str:
    if check.low == check.high:
        return _number(check.low)
    if check.high == math.inf:
        return f">= {_number(check.low)}"
    if check.low == -math.inf or (check.low == 0 and check.high > 0):
        return f"<= {_number(check.high)}"
    return f"{_number(check.low)}..{_number(check.high)}"


def _number(value: float) -> str:
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3g}"
