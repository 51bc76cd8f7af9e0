"""What an audit answers: checks with intervals, and a report that prints and serialises them."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One number of one part of a model, held against what an initialiser promises.

    Attributes:
        initialiser: its registered name.
        part: what was measured: "qk", "vo", "filters", "fc1", "ssm", "map", "positions", "weight".
        layer: number of the layer, from 0; None where parts have none.
        head: number of the head; None for statistics of a whole layer.
        name: path of the module or tensor.
        statistic: what the number is.
        found: the number.
        low: the lower end of the promised interval.
        high: the upper end.
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
        """Whether the number is finite and in the interval."""
        return math.isfinite(self.found) and self.low <= self.found <= self.high


@dataclass(frozen=True)
class AuditReport:
    """Every check of an audit, and the verdict.

    Attributes:
        checks: in the order of the model.
        skipped: initialiser -> why it does not apply, when every initialiser was asked for.
        everything: whether every initialiser was asked for, so that one that fits is enough.
        level: probability that one check of a correctly initialised model fails.
    """

    checks: tuple[Check, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    everything: bool = False
    level: float = 1e-6

    @property
    def verdicts(self) -> dict[str, bool]:
        """Initialiser -> whether all of its checks passed."""
        out: dict[str, bool] = {}
        for check in self.checks:
            out[check.initialiser] = out.get(check.initialiser, True) and check.passed
        return out

    @property
    def passed(self) -> bool:
        """Whether the model has the promised structure: of every initialiser named, or of any when none was named."""
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
            "checks": [_finite(asdict(check) | {"passed": check.passed}) for check in self.checks],
        }

    def __str__(self) -> str:
        """A table for each part: a line of promised intervals, then what each layer and head has."""
        if not self.checks:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            return f"nothing to audit: {reasons}"
        lines = []
        for name, passed in self.verdicts.items():
            mine = [check for check in self.checks if check.initialiser == name]
            bad = sum(not check.passed for check in mine)
            verdict = f"passed, all {len(mine)} checks" if passed else f"FAILED, {bad} of {len(mine)} checks"
            if self.everything and not passed:
                lines.append(f"{name}: no, {bad} of {len(mine)} checks fail")
                continue
            lines += [f"{name}: {verdict} (false alarms < {self.level * len(mine):.1e} per audit)", *_tables(mine)]
        return "\n".join([*lines, *(f"{name}: does not apply, {why}" for name, why in self.skipped.items())])


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Infinities and NaN as text: JSON has no word for them."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _tables(checks: list[Check]) -> list[str]:
    lines = []
    for part in dict.fromkeys(check.part for check in checks):
        mine = [check for check in checks if check.part == part]
        columns = list(dict.fromkeys(check.statistic for check in mine))
        rows: dict[tuple, dict[str, Check]] = {}
        for check in mine:
            rows.setdefault((check.layer, check.head, check.name), {})[check.statistic] = check
        body, promised = [["layer", "head", *columns, part]], None
        for (layer, head, name), row in rows.items():
            limits = [_interval(row[c]) if c in row else "" for c in columns]
            if limits != promised:
                promised = limits
                body.append(["", "", *limits, "promised"])
            found = [_number(row[c].found) + ("" if row[c].passed else " !") if c in row else "" for c in columns]
            verdict = "" if all(check.passed for check in row.values()) else "  FAILED"
            body.append(
                ["" if layer is None else str(layer), "" if head is None else str(head), *found, name + verdict]
            )
        lines += ["", *_aligned(body)]
    return [*lines, ""]


def _aligned(body: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in body
    ]


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


def tally(checks: Iterable[Check]) -> dict[str, tuple[int, int]]:
    """Statistic -> (how many passed, how many there are)."""
    out: dict[str, tuple[int, int]] = {}
    for check in checks:
        passed, total = out.get(check.statistic, (0, 0))
        out[check.statistic] = (passed + check.passed, total + 1)
    return out
