"""Results of an audit: checks with intervals, and the report of all of them."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weightscope._util.plugins import Registry
from weightscope._util.results import Result, text_table
from weightscope.auditing.intervals import DECIDED, LEVEL, UNTOUCHED, Row


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
        power: error -> probability that this check fails if the part has that error, such as
            `{"an untouched network": 0.98, "a 20 % error in sigma": 0.03}`; not a field of the records.

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
    power: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def passed(self) -> bool:
        """Whether the value is finite and in the interval."""
        return math.isfinite(self.found) and self.low <= self.found <= self.high


def checks_of(
    initialiser: str, part: str, layer: int | None, head: int | None, name: str, rows: Iterable[Row]
) -> list[Check]:
    """The checks of several statistics of one part; arguments as the attributes of `Check`."""
    return [
        Check(initialiser, part, layer, head, name, what, found, *limits, *power)
        for what, found, limits, *power in rows
    ]


EXPECTATIONS: Registry[Callable[..., list[Check]]] = Registry("audit")
"""Initialiser -> `f(tensors: NamedTensors, **parameters) -> list[Check]`.

`.details[name]["variants"]` are the parameters that `audit(model)` tries, if not only the defaults.
"""


@dataclass(frozen=True, repr=False)
class AuditReport(Result):
    """The checks of an audit.

    An initialiser's outcome is "failed" if a check fails. Otherwise it is "passed" if the checks would have failed
    for an untouched network with a probability of at least 99 % in every part, else "undecidable": the network may
    be initialised or not, since the default start is in the expected intervals, too.

    Attributes:
        checks: in the order of the model.
        skipped: initialiser -> why it does not apply, if all initialisers were tried.
        everything: whether all initialisers were tried, so that one that fits is enough.
        level: probability that a check of a correctly initialised model fails.
        unparsed: tensors that look like parts and were not audited (with `strict=False`).
    """

    checks: tuple[Check, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    everything: bool = False
    level: float = LEVEL
    unparsed: tuple[str, ...] = ()

    @property
    def outcomes(self) -> dict[str, str]:
        """Initialiser -> "passed", "failed" or "undecidable"."""
        failed = {check.initialiser for check in self.failures}
        unclear = self.undecidable
        names = dict.fromkeys(check.initialiser for check in self.checks)
        return {n: "failed" if n in failed else "undecidable" if unclear.get(n) else "passed" for n in names}

    @property
    def verdicts(self) -> dict[str, bool]:
        """Initialiser -> whether its outcome is "passed"."""
        return {name: outcome == "passed" for name, outcome in self.outcomes.items()}

    @property
    def powers(self) -> dict[str, dict[str, float]]:
        """Initialiser -> error -> probability that the audit fails if all parts have the error, approximately.

        Only the most powerful statistic of each part is used, which underestimates the probability. Parts, and the
        statistic that pools all layers, are treated as independent, which overestimates it where they are not.
        """
        out: dict[str, dict[str, float]] = {}
        for (name, _), errors in self._parts().items():
            mine = out.setdefault(name, {})
            for error, power in errors.items():
                mine[error] = 1 - (1 - mine.get(error, 0.0)) * (1 - power)
        return out

    @property
    def undecidable(self) -> dict[str, tuple[str, ...]]:
        """Initialiser -> the parts in which an untouched network would pass with a probability above 1 %.

        For initialisers of which the default start is one instance (`kaiming_uniform`), the error is in their scale,
        and counts for all parts together.
        """
        out: dict[str, tuple[str, ...]] = {}
        powers = self.powers
        for (name, part), errors in self._parts().items():
            if errors.get(UNTOUCHED, 1.0) < DECIDED:
                out[name] = (*out.get(name, ()), part)
        for name, errors in powers.items():
            if errors and UNTOUCHED not in errors and max(errors.values()) < DECIDED:
                out[name] = ("all",)
        return out

    def _same_as_default(self) -> set[str]:
        """The parts whose checks an untouched network passes for certain, whatever their size."""
        return {part for (_, part), errors in self._parts().items() if errors.get(UNTOUCHED) == 0}

    def _parts(self) -> dict[tuple[str, str], dict[str, float]]:
        """(initialiser, module) -> error -> power; heads of a module are independent, statistics of a head not."""
        heads: dict[tuple[str, str, int | None], dict[str, float]] = {}
        for check in self.checks:
            mine = heads.setdefault((check.initialiser, f"{check.name} {check.part}", check.head), {})
            for error, power in check.power.items():
                mine[error] = max(mine.get(error, 0.0), power)
        out: dict[tuple[str, str], dict[str, float]] = {}
        for (name, part, _), errors in heads.items():
            joint = out.setdefault((name, part), {})
            for error, power in errors.items():
                joint[error] = 1 - (1 - joint.get(error, 0.0)) * (1 - power)
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
        """JSON types: the outcomes, the false-alarm rate, the powers and every check."""
        return {
            "passed": self.passed,
            "verdicts": self.verdicts,
            "outcomes": self.outcomes,
            "skipped": dict(self.skipped),
            "unparsed": list(self.unparsed),
            "false_alarm_rate": self.false_alarm_rate,
            "powers": self.powers,
            "undecidable": {name: list(parts) for name, parts in self.undecidable.items()},
            "checks": [_finite(row) for row in self.rows()],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record for each check."""
        return [_record(check) for check in self.checks]

    def summary(self) -> str:
        """The verdict in one line."""
        if not self.checks:
            return "nothing to audit"
        outcomes = self.outcomes
        fitting = [name for name, outcome in outcomes.items() if outcome == "passed"]
        if self.everything:
            verdict = ", ".join(fitting) or "no initialiser fits"
        else:
            verdict = next((o for o in ("failed", "undecidable") if o in outcomes.values()), "passed")
        return f"{verdict}, {len(self.failures)} of {len(self.checks)} checks failed"

    def text(self) -> str:
        """A table for each part: a row of expected intervals, then a row for each layer and head."""
        if not self.checks:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
            return f"nothing to audit: {reasons}"
        lines = []
        powers, unclear, same = self.powers, self.undecidable, self._same_as_default()
        for name, outcome in self.outcomes.items():
            mine = [check for check in self.checks if check.initialiser == name]
            bad = sum(not check.passed for check in mine)
            if self.everything and outcome == "failed":
                lines.append(f"{name}: no, {bad} of {len(mine)} checks fail")
                continue
            verdict = {
                "passed": f"passed, all {len(mine)} checks",
                "failed": f"FAILED, {bad} of {len(mine)} checks",
                "undecidable": f"UNDECIDABLE, all {len(mine)} checks pass",
            }[outcome]
            lines.append(f"{name}: {verdict} (false alarms < {self.level * len(mine):.1e} per audit)")
            lines += [*_power_lines(powers.get(name, {}), unclear.get(name, ()), same), *_tables(mine)]
        if self.unparsed:
            lines.append(f"not audited, look like parts and were not read: {', '.join(self.unparsed)}")
        return "\n".join([*lines, *(f"{name}: does not apply, {why}" for name, why in self.skipped.items())])


def _record(check: Check) -> dict[str, Any]:
    values = {key.name: getattr(check, key.name) for key in fields(check) if key.name != "power"}
    return values | {"passed": check.passed}


def _power_lines(powers: Mapping[str, float], unclear: tuple[str, ...], same: set[str]) -> list[str]:
    """What the audit would have found, and what it cannot tell."""
    found = [f"{error} with {_percent(power)}" for error, power in powers.items() if power >= DECIDED]
    other = [f"{error} ({_percent(power)} found)" for error, power in powers.items() if power < DECIDED]
    lines = [f"would catch, if all layers have it: {', '.join(found)}"] if found else []
    lines += [f"undecidable: {', '.join(other)}"] if other else []
    if equal := [part for part in unclear if part in same]:
        lines.append(f"the network's default start may be the same: {_first(equal)}; compare with the weights before")
    if small := [part for part in unclear if part not in same]:
        lines.append(
            f"too small to tell from the default start: {_first(small)}; compare with the weights before, or widen it"
        )
    return [text for line in lines for text in textwrap.wrap(line, 120, initial_indent="  ", subsequent_indent="    ")]


def _first(parts: list[str]) -> str:
    return f"{', '.join(parts[:3])}{f' and {len(parts) - 3} more' if len(parts) > 3 else ''}"


def _percent(power: float) -> str:
    return "> 99.9 %" if power > 0.999 else f"{100 * power:.0f} %" if power >= 0.01 else "< 1 %"


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
