"""Results of an audit: checks with intervals, and the report of all of them."""

import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from weightscope._util.names import listing
from weightscope._util.plugins import Registry
from weightscope._util.results import Result, text_table

K = TypeVar("K", bound=Hashable)

RATE = 1e-3  # probability with which a correct initialisation fails its audit
# An error is decided if an audit finds it with this probability. Below, its verdict is "undecidable".
DECIDED = 0.99
UNTOUCHED = "an untouched network"


def error_in(parameter: str) -> str:
    """The name of the error by which a parameter of an initialiser is off in the powers of audits."""
    return f"a 20 % error in {parameter}"


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


EXPECTATIONS: Registry[Callable[..., Any]] = Registry("audit")
"""Initialiser -> `f(tensors: NamedTensors, **parameters)`, its `Statistic`s to be compared with runs, or `Check`s.

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
        unparsed: tensors that look like parts and were not audited (with `strict=False`), and why.
        unconfirmed: packed projections whose order of rows follows from a part of an architecture's names.
    """

    checks: tuple[Check, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    everything: bool = False
    unparsed: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()

    @property
    def outcomes(self) -> dict[str, str]:
        """Initialiser -> "passed", "failed" or "undecidable"."""
        failed, unclear = {check.initialiser for check in self.failures}, self.undecidable
        names = dict.fromkeys(check.initialiser for check in self.checks)
        return {n: "failed" if n in failed else "undecidable" if unclear.get(n) else "passed" for n in names}

    @property
    def powers(self) -> dict[str, dict[str, float]]:
        """Initialiser -> error -> probability that the audit fails if all parts have the error, approximately.

        Only the most powerful statistic of each part is used, which underestimates the probability. Parts, and the
        statistic that pools all layers, are treated as independent, which overestimates it where they are not. If all
        initialisers were tried, only those that do not fail have powers.
        """
        return _joint((name, errors) for (name, _), errors in self._parts().items())

    @property
    def undecidable(self) -> dict[str, tuple[str, ...]]:
        """Initialiser -> the parts in which an untouched network would pass with a probability above 1 %."""
        out: dict[str, tuple[str, ...]] = {}
        for (name, part), errors in self._parts().items():
            if errors.get(UNTOUCHED, 1.0) < DECIDED:
                out[name] = (*out.get(name, ()), part)
        return out

    def _parts(self) -> dict[tuple[str, str], dict[str, float]]:
        """(initialiser, module) -> error -> power; heads of a module are independent, statistics of a head not.

        Tensors that are compared as a whole (part "weight") are one part, all of them together.
        """
        heads: dict[tuple[tuple[str, str], int | str | None], dict[str, float]] = {}
        for check in self.checks:
            whole = check.part == "weight"
            part, one = ("all weights", check.name) if whole else (f"{check.name} {check.part}", check.head)
            mine = heads.setdefault(((check.initialiser, part), one), {})
            mine |= {error: max(mine.get(error, 0.0), power) for error, power in check.power.items()}
        return _joint((part, errors) for (part, _), errors in heads.items())

    @property
    def passed(self) -> bool:
        """Whether the model is as expected: by every initialiser named, or by any if all were tried."""
        passed = [outcome == "passed" for outcome in self.outcomes.values()]
        return any(passed) if self.everything else bool(passed) and all(passed)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def false_alarm_rate(self) -> float | None:
        """Upper bound on the probability that correct initialisations fail this audit (union bound).

        It holds for entries without heavy tails: of those of Student's t_3, 2 % fail. None, unknown, with intervals of
        a function of one's own.
        """
        return min(1.0, RATE * len(self.outcomes)) if all(map(self._by_runs, self.outcomes)) else None

    def _by_runs(self, name: str) -> bool:
        """Whether the intervals are of an initialiser's runs, or known for a registered one."""
        return name in EXPECTATIONS or any(check.power for check in self.checks if check.initialiser == name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "outcomes": self.outcomes,
            "skipped": dict(self.skipped),
            "unparsed": list(self.unparsed),
            "unconfirmed": list(self.unconfirmed),
            "false_alarm_rate": self.false_alarm_rate,
            "powers": self.powers,
            "undecidable": {name: list(parts) for name, parts in self.undecidable.items()},
            "checks": [{key: _json(value) for key, value in row.items()} for row in self.rows()],
        }

    def rows(self) -> list[dict[str, Any]]:
        names = [key.name for key in fields(Check) if key.name != "power"]
        return [{n: getattr(check, n) for n in names} | {"passed": check.passed} for check in self.checks]

    def summary(self) -> str:
        if not self.checks:
            return "nothing to audit"
        outcomes = self.outcomes
        if self.everything:
            verdict = ", ".join(name for name, found in outcomes.items() if found == "passed") or "no initialiser fits"
        else:
            verdict = next((o for o in ("failed", "undecidable") if o in outcomes.values()), "passed")
        left = f", {len(self.unparsed)} tensors not audited" if self.unparsed else ""
        return f"{verdict}, {len(self.failures)} of {len(self.checks)} checks failed{left}"

    def text(self) -> str:
        """A table for each part: a row of expected intervals, then a row for each layer and head."""
        lines = [] if self.checks else ["nothing to audit"]
        if self.unparsed:
            lines.append(f"NOT AUDITED, look like parts and were not read: {', '.join(self.unparsed)}")
        for name, outcome in self.outcomes.items():
            mine = [check for check in self.checks if check.initialiser == name]
            bad = sum(not check.passed for check in mine)
            if self.everything and outcome == "failed":
                lines.append(f"{name}: no, {bad} of {len(mine)} checks fail")
                continue
            verdict = {
                "passed": f"passed, all {len(mine)} checks" + " of what was read" * bool(self.unparsed),
                "failed": f"FAILED, {bad} of {len(mine)} checks",
                "undecidable": f"UNDECIDABLE, all {len(mine)} checks pass",
            }[outcome]
            rate = f" (false alarms < {100 * RATE:.2g} % of audits)"
            lines.append(f"{name}: {verdict}{rate if self._by_runs(name) else ''}")
            lines += [*self._power_lines(name), *_tables(mine)]
        if self.unconfirmed:
            names = listing(self.unconfirmed, 3)
            lines.append(f"in an order of rows that follows from a part of the names of an architecture: {names}")
        reasons: dict[str, dict[str, list[str]]] = {}  # what was found -> what was expected -> initialisers
        for name, why in self.skipped.items():
            expected, _, found = why.removeprefix(f"{name}: ").partition(", found ")
            reasons.setdefault(found, {}).setdefault(expected, []).append(name)
        for found, wanted in reasons.items():
            once = bool(found) and len(wanted) > 1
            lines += [f"these do not apply, found {found}:"] * once
            for expected, who in wanted.items():
                why = f"{expected}, found {found}" if found else expected
                lines.append(f"  {', '.join(who)}: {expected}" if once else f"{', '.join(who)}: does not apply, {why}")
        return "\n".join(lines)

    def _power_lines(self, name: str) -> list[str]:
        """What the audit would have found, and what it cannot tell."""
        powers, unclear = self.powers.get(name, {}), self.undecidable.get(name, ())
        lines = {
            "would catch, if all layers have it: ": [
                f"{error} with {_percent(power)}" for error, power in powers.items() if power >= DECIDED
            ],
            "undecidable: ": [f"{error} ({_percent(p)} found)" for error, p in powers.items() if p < DECIDED],
            "not told from the default start: ": [f"{listing(unclear, 3)}; compare with the weights before"]
            * bool(unclear),
        }
        wrap = textwrap.TextWrapper(120, initial_indent="  ", subsequent_indent="    ").wrap
        return [line for head, items in lines.items() if items for line in wrap(head + ", ".join(items))]


def _joint(parts: Iterable[tuple[K, Mapping[str, float]]]) -> dict[K, dict[str, float]]:
    """Key -> error -> the probability that one of its independent parts finds the error."""
    out: dict[K, dict[str, float]] = {}
    for key, errors in parts:
        mine = out.setdefault(key, {})
        mine |= {error: 1 - (1 - mine.get(error, 0.0)) * (1 - power) for error, power in errors.items()}
    return out


def _json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _percent(power: float) -> str:
    return "> 99.9 %" if power > 0.999 else f"{100 * power:.0f} %" if power >= 0.01 else "< 1 %"


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
            body += [["", "", *limits, "expected"]] if limits != expected else []
            found = [_number(row[s].found) + " !" * (not row[s].passed) if s in row else "" for s in statistics]
            failed = "" if all(check.passed for check in row.values()) else "  FAILED"
            expected = limits
            body.append(["" if layer is None else str(layer), "" if head is None else str(head), *found, name + failed])
        header = ("layer", "head", *statistics, part)
        lines += ["", text_table(header, body, left=(len(header) - 1,))]
    return [*lines, ""]


def _interval(check: Check) -> str:
    low, high = _number(check.low), _number(check.high)
    if check.low == check.high or check.high == math.inf:
        return low if check.low == check.high else f">= {low}"
    return f"<= {high}" if check.low == -math.inf or check.low == 0 < check.high else f"{low}..{high}"


def _number(value: float) -> str:
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3g}"
