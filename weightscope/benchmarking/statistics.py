"""Statistics of a benchmark: means with intervals inside their range, paired t-tests, Holm's correction, chance,
and contrasts, sums of means of arms that are declared beforehand.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from weightscope._util.arms import CONTROLS, FROZEN, epochs_text, point_text, value_text
from weightscope._util.names import joined, unknown
from weightscope.data.metrics import ACCURACY, Metric, same_differences
from weightscope.errors import UsageError
from weightscope.statistics.index_effects import holm

LEVEL = 0.05  # of adjusted p-values, from which on a difference counts
_FEWEST_EQUAL = 6  # equal differences of one sign have 2^(1 - n) < 0.05 by the sign test
Runs = Sequence[dict[str, Any]]
ArmKey = tuple[str, int, str]
"""The cell (`cell_key`), training length and initialiser of an arm."""
Hits = Mapping[ArmKey, np.ndarray]
"""Arm -> which images each network classifies rightly, (n, m) bool; row k belongs to seed k."""
Chance = tuple[float, int]
"""The chance level of an accuracy and the number of examples that it is taken over; see `Task.chance`."""


def above_chance(values: np.ndarray, chance: Chance) -> float:
    """The one-sided p-value of a mean accuracy above chance c over m examples, not corrected for the number of arms.

        a = c (1 - c) / m,   b = s^2 / n,   t = (mean - c - 1 / (2 m)) / sqrt(a + b),   p = P(T > t)

    for Student's T with (n - 1) (a + b)^2 / b^2 degrees of freedom (Satterthwaite 1946), normal for one network. a is
    the variance due to the test examples, which all networks share, and 1 / (2 m) the correction for continuity.
    Networks at chance level have p < 0.05 in at most about 5 % of cases, and in up to 7 % where m c < 10.
    """
    n, (c, examples) = len(values), chance
    shared, own = c * (1 - c) / examples, float(values.var(ddof=1)) / n if n > 1 else 0.0
    freedom = (n - 1) * (shared + own) ** 2 / own**2 if own > 0 else np.inf
    excess = float(values.mean()) - c - 0.5 / examples
    return float(stats.t.sf(excess / np.sqrt(shared + own), freedom))


def summarise(
    runs: Runs, metric: Metric = ACCURACY, chances: Mapping[str, Chance] | None = None, hits: Hits | None = None
) -> list[dict[str, Any]]:
    """Means, their intervals and paired t-tests of the rows of `BenchResult.runs`.

    A network that diverged counts with the metric that it reached. If its metric is not finite, it has the worst rank
    in the tests and is left out of means, and differences have no interval. `n` is the number of networks with a finite
    value, `networks` the number of all, and `pairs` the number of seeds with finite values in both arms. Without pairs,
    `difference` is None, and there is a p. Differences are arm minus reference, whichever direction is better. The
    reference is the first initialiser of the same cell and length, for frozen arms the first frozen one. An arm is also
    compared with its controls: `beyond_scale` is the mean paired difference from the scale control (`control`), and
    `correlations` that from the uncorrelated control (`uncorrelated`). The `difference` of a control is the effect of
    its means and variances. For the intervals see `mean_interval` and `paired`.

    p-values are two-sided; `p_holm` and `beyond_scale_p_holm` control the family-wise error rate of the whole table
    (Holm 1979). `difference_ci_holm` and `beyond_scale_ci_holm` are intervals at the `level` of each test in that
    procedure: they exclude 0 exactly where the adjusted p-value is below 0.05. Each covers in 95 % of cases, all of a
    table with 18 in 88 to 95 %. `chances` maps cells (`cell_key`) to chance levels; rows then have `chance` and
    `chance_p`, see `above_chance`. With `hits` of both arms, `difference_ci_images` and `beyond_scale_ci_images` are
    `over_images` at the same `level`, else None.
    """
    groups, rows, asked = by_arm(runs), list[dict[str, Any]](), list[_Question]()
    controls = {(*key[:2], *found): key for key in groups if (found := control_of(key[2]))}
    for (cell, epochs, init), group in groups.items():
        arm = cell, epochs, init
        first = _reference(groups, arm)
        row: dict[str, Any] = {"init": init, "cell": group[0].get("cell", {}), "numbers": group[0].get("numbers", {})}
        finite = np.array([value for value in values_of(group, metric).values() if np.isfinite(value)])
        row |= {"epochs": epochs, **mean_interval(finite, metric)}
        losses = [run["loss"] for run in group if run.get("loss") is not None]
        row["loss"] = float(np.mean(losses)) if losses else None
        row |= {"diverged": sum(run["diverged"] for run in group), "networks": len(group)}
        row["reference"] = first[2] if first != arm else None
        row |= _columns("difference", {})
        asked += [(row, "difference", {arm: 1.0, first: -1.0})] if first != arm else []
        for kind, control in CONTROLS.items():
            place = controls.get((cell, epochs, init, kind))
            row[control.arm] = place and place[2]
            row |= _columns(control.key, {})
            asked += [(row, control.key, {arm: 1.0, place: -1.0})] if place is not None else []
        if (level := (chances or {}).get(cell)) is not None:
            p = above_chance(finite, level) if len(finite) else None
            row |= {"chance": level[0], "chance_p": p}
        rows.append(row)
    for (row, key, _), test in zip(asked, _tested([sums for *_, sums in asked], groups, metric, hits), strict=True):
        row |= _columns(key, test)
    return rows


def by_arm(runs: Runs) -> dict[ArmKey, Runs]:
    """(cell, epochs, initialiser) -> its runs, in order."""
    groups: dict[ArmKey, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(arm_key(run), []).append(run)
    return groups  # type: ignore[return-value]


def _reference(groups: Mapping[ArmKey, Runs], arm: ArmKey) -> ArmKey:
    """The first arm of the cell at the length, of a frozen arm the first frozen one."""
    return next(key for key in groups if (*key[:2], key[2].endswith(FROZEN)) == (*arm[:2], arm[2].endswith(FROZEN)))


def values_of(runs: Runs, metric: Metric) -> dict[int, float]:
    """Seed -> value, NaN for runs without a finite one."""
    return {run["seed"]: np.nan if run.get(metric.key) is None else run[metric.key] for run in runs}


_Question = tuple[dict[str, Any], str, Mapping[ArmKey, float]]
"""A row, what it compares, and the weights of the arms."""
_FOUND = ("difference", "ci95", "p", "pairs", "p_holm", "level", "ci_holm", "ci_images")


def _columns(key: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of what `_tested` found, None if nothing; names of the difference from the reference are shorter."""
    p = "" if key == "difference" else f"{key}_"
    names = (key, f"{key}_ci95", f"{p}p", f"{p}pairs", f"{p}p_holm", f"{p}level", f"{key}_ci_holm", f"{key}_ci_images")
    return {name: found.get(known) for name, known in zip(names, _FOUND, strict=True)}


def _tested(
    sums: Sequence[Mapping[ArmKey, float]], groups: Mapping[ArmKey, Runs], metric: Metric, hits: Hits | None
) -> list[dict[str, Any]]:
    """Paired tests of sums of arms, adjusted for one another; the weights of each sum add up to zero.

        c_k = sum over arms of weight x value of network k,   mean(c) +- t s / sqrt(n)

    Each has `seeds`, the number of seeds that all of its arms have, and `_FOUND` unless no network has a finite value:
    `pairs` is the number of finite c_k, `p` comes from `paired`, `ci_holm` is the interval at the `level` of the test
    in Holm's procedure, and `ci_images` is `crossed` at this level.
    """
    values = {arm: values_of(group, metric) for arm, group in groups.items()}
    out, known = list[dict[str, Any]](), []
    for weights in sums:
        seeds = np.array(sorted(set.intersection(*(set(values.get(arm, ())) for arm in weights))), dtype=int)
        size = sum(weight for weight in weights.values() if weight > 0)
        a, b = (
            np.array([sum(abs(w) * values[arm][k] for arm, w in weights.items() if w * sign > 0) / size for k in seeds])
            for sign in (1, -1)
        )
        out.append({"seeds": len(seeds)})
        if np.isfinite([a, b]).any():
            known.append((out[-1], weights, size, seeds, a, b))
    tests = [paired(a, b, metric) for *_, a, b in known]
    p_values = [test["p"] for test in tests]
    found = zip(known, tests, holm(p_values), holm_levels(p_values), strict=True)
    for (row, weights, size, seeds, a, b), test, adjusted, level in found:
        row["difference"] = None if test["difference"] is None else size * test["difference"]
        row |= {"p": test["p"], "pairs": int(np.isfinite(a - b).sum()), "p_holm": adjusted, "level": level}
        plain = test["difference_ci95"]
        strict = None if row["pairs"] < len(seeds) else paired(a, b, metric, level)["difference_ci95"]
        for name, interval in (("ci95", plain), ("ci_holm", strict)):
            row[name] = interval and [size * end for end in interval]
        row["ci_images"] = crossed(weights, hits or {}, seeds, row["ci_holm"], level)
    return out


def between_cells(runs: Runs, field: str, metric: Metric = ACCURACY, hits: Hits | None = None) -> list[dict[str, Any]]:
    """Paired t-tests of each arm against the same arm at the first value of a field of the recipe.

    Network k of both has the same streams of random numbers: the same batches and augmentation and, where the shapes
    of the tensors are the same, the same default weights. `p_holm` is adjusted over these rows.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.get("cell", {})))
    if field not in known:
        raise UsageError(unknown("field", field, known))
    first, groups, rows, asked = runs[0]["cell"][field], by_arm(runs), [], []
    for cell, epochs, init in groups:
        place = json.loads(cell)
        if place[field] != first:
            rows.append({"init": init, "cell": place, "epochs": epochs, "reference": {field: first}})
            base = cell_key({"cell": {**place, field: first}}), epochs, init
            asked.append({(cell, epochs, init): 1.0, base: -1.0})
    found = zip(rows, _tested(asked, groups, metric, hits), strict=True)
    return [row | _columns("difference", test) for row, test in found if "p" in test]


def seed_differences(runs: Runs, metric: Metric = ACCURACY) -> list[dict[str, Any]]:
    """The differences of each arm of one cell from its reference on each seed, for `plots.paired_differences`.

    For each arm at each length that has seeds of its reference, see `summarise`: `init`, `epochs`, `reference`,
    `differences` (n,), `diverged` (n,), whether one of the two did, the adjusted `interval` of their mean or None and
    then `why`, and `left_out`, the number of networks without a finite value (of the reference, too, in its first row).
    A difference that is not finite is a DataError.
    """
    groups, rows = by_arm(runs), []
    compared = {arm_key(row): row for row in summarise(runs, metric)}
    lost = {place: sum(run.get(metric.key) is None for run in group) for place, group in groups.items()}
    for place, group in groups.items():
        first, (_, epochs, init) = _reference(groups, place), place
        base = {run["seed"]: run for run in groups[first] if run.get(metric.key) is not None}
        pairs = [(run, base[run["seed"]]) for run in group if run["seed"] in base and run.get(metric.key) is not None]
        if first == place or not pairs:
            continue
        values, others = np.array([[run[metric.key] for run in pair] for pair in pairs], dtype=float).T
        row = {"init": init, "epochs": epochs, "reference": first[2], "differences": values - others}
        row["diverged"] = np.array([bool(a.get("diverged") or b.get("diverged")) for a, b in pairs])
        row["interval"] = None if (equal := same_differences(values, others)) else compared[place]["difference_ci_holm"]
        row["why"] = "all equal" if equal else "networks diverged"
        rows.append(row | {"left_out": lost[place] + lost.pop(first, 0)})
    return rows


def cell_key(row: Mapping[str, Any]) -> str:
    """The cell of a run or an arm as text, equal for equal cells."""
    return json.dumps(row.get("cell", {}), sort_keys=True)


def arm_key(row: Mapping[str, Any]) -> ArmKey:
    """The arm of a run or of a row of arms."""
    return cell_key(row), row["epochs"], row["init"]


def control_of(init: str) -> tuple[str, str] | None:
    """The label of the initialiser that a control arm is the control of, and which; None for other arms."""
    bare = init.removesuffix(FROZEN)
    for kind, control in CONTROLS.items():
        if bare.endswith(control.suffix):
            return bare.removesuffix(control.suffix) + init[len(bare) :], kind
    return None


def mean_interval(values: np.ndarray, metric: Metric = ACCURACY) -> dict[str, Any]:
    """`n`, `mean` m, and the 95 % interval `ci95` of the mean of values (n,), inside the metric's bounds.

        logit m +- t(0.975, n - 1) s / (sqrt(n) m (1 - m)),   mapped back, for values in [0, 1]
        log (m - low) +- t(0.975, n - 1) s / (sqrt(n) (m - low)),   mapped back, for values >= low
        m +- t(0.975, n - 1) s / sqrt(n),   for other values

    Student's t on the log-odds or the logarithm, with the standard error by the delta method: an interval on the
    values' own scale reaches beyond 100 % where few networks are close to it. Six or more values that are equal up to
    rounding give an interval of no width (of the smallest to the largest value, which holds the median with probability
    1 - 2^(1 - n)); fewer, which say nothing of the spread, give all that is possible: [0, 1], and None where there is
    no upper bound. No value has the mean None.

    Source: Lumley, Complex Surveys (2010), section 2.2.4 (method "logit" of `svyciprop`).
    """
    n, (low, high) = len(values), metric.bounds
    if n == 0:
        return {"n": 0, "mean": None, "ci95": None}
    mean = float(values.mean())
    if same_differences(values):
        possible = [low, high] if np.isfinite(high) else None
        return {"n": n, "mean": mean, "ci95": possible if n < _FEWEST_EQUAL else [mean, mean]}
    error = float(values.std(ddof=1)) / np.sqrt(n)
    t = stats.t.ppf(0.975, n - 1) * np.array([-1, 1])
    if np.isfinite(high):
        share, width = (mean - low) / (high - low), high - low
        ends = low + width * special.expit(special.logit(share) + t * error / (width * share * (1 - share)))
    elif np.isfinite(low):
        ends = low + (mean - low) * np.exp(t * error / (mean - low))
    else:
        ends = mean + t * error
    return {"n": n, "mean": mean, "ci95": np.clip(ends, low, high).tolist()}


def paired(values: np.ndarray, base: np.ndarray, metric: Metric = ACCURACY, level: float = LEVEL) -> dict[str, Any]:
    """The mean of the paired differences `values - base`, its interval, and the p-value of the paired t-test.

        t = mean sqrt(n) / s,   p = P(|T| > |t|) for Student's T with n - 1 degrees of freedom

    The interval is Student's, of confidence 1 - level, intersected with the possible range, [-1, 1] for accuracies,
    which does not change how often it covers the true difference. At 3 to 8 seeds it covers in 95 % of cases
    if differences are normal, in 94 % or more if they have heavy tails or ties, but in 82 % if they are skewed
    (log-normal). Where one arm diverges to a finite value in 10 % of its networks, most sets of so few seeds have none
    of these, and it covers in 29 to 57 %.

    Differences that are equal up to rounding have no s. Their p comes from the sign test, 2^(1 - n), and is 1 if they
    are zero; the interval has no width where 2^(1 - n) is below the level, and is the possible range otherwise (None
    without an upper bound), as for a single difference.

    Where one of a pair is not finite, because the network diverged, p comes from Wilcoxon's signed ranks over all
    pairs, in which the network without a finite value is worse than all others, and two of them are equal (worst-rank
    scores, Lachin 1999). The mean is taken over the other pairs, or None. It has no interval, since one over the
    networks that are left may contradict the test.
    """
    finite = np.isfinite(values - base)
    if not finite.all():
        left = float((values - base)[finite].mean()) if finite.any() else None
        return {"difference": left, "difference_ci95": None, "p": _worst_ranks(values, base, metric)}
    differences = values - base
    n, mean = len(differences), float(differences.mean())
    if same_differences(values, base):
        # a difference of zero beside them is the same only if they are zero
        p = 1.0 if same_differences(np.append(values, 0.0), np.append(base, 0.0)) else 2.0 ** (1 - n)
        half = 0.0 if 2.0 ** (1 - n) < level else np.inf
    else:
        error = float(differences.std(ddof=1)) / np.sqrt(n)
        p, half = float(2 * stats.t.sf(abs(mean) / error, n - 1)), float(stats.t.ppf(1 - level / 2, n - 1) * error)
    most = metric.bounds[1] - metric.bounds[0]
    ends = [max(-most, mean - half), min(most, mean + half)]
    return {"difference": mean, "difference_ci95": ends if np.isfinite(ends).all() else None, "p": p}


def over_images(d: np.ndarray, interval: Sequence[float], level: float = LEVEL, most: float = 1.0) -> list[float]:
    """The interval over networks and images of the mean of differences d (n, m), of n networks on m images.

        mean +- t sqrt(V),   V = a + b - e,   nu = V^2 / (a^2 / (n - 1) + b^2 / (m - 1) + e^2 / ((n - 1) (m - 1)))

    a, b and e are the mean squares of networks, of images and of their interaction, over n m, of two-way crossed random
    effects, and t is the quantile 1 - level / 2 of Student's T with nu degrees of freedom. A negative component of
    images, b < e, is 0. The result holds `interval`, from `paired` at the same level for the images that were used:
    with few networks, the formula may give less, as nu > n - 1. It is cut to differences of at most `most`, which is
    all that is known from one network or one image.

    Source: Cornfield and Tukey 1956; Satterthwaite 1946; bootstrapped by Owen, The pigeonhole bootstrap, 2007.
    """
    n, m = d.shape
    if min(n, m) < 2:
        return [-most, most]
    rows, columns, mean = d.mean(1), d.mean(0), float(d.mean())
    a, b = rows.var(ddof=1) / n, columns.var(ddof=1) / m
    e = np.square(d - rows[:, None] - columns + mean).sum() / ((n - 1) * (m - 1) * n * m)
    half = 0.0
    if b > e:
        freedom = (a + b - e) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1) + e**2 / ((n - 1) * (m - 1)))
        half = float(stats.t.ppf(1 - level / 2, freedom) * np.sqrt(a + b - e))
    return [max(-most, min(interval[0], mean - half)), min(most, max(interval[1], mean + half))]


def crossed(
    weights: Mapping[ArmKey, float], hits: Hits, seeds: np.ndarray, interval: Sequence[float] | None, level: float
) -> list[float] | None:
    """`over_images` of a sum of arms with weights that add up to zero; None unless all have hits of as many images."""
    known = [hits[arm] for arm in weights if arm in hits]
    if interval is None or len(known) < len(weights) or len({each.shape[1] for each in known}) > 1:
        return None
    differences = np.sum([weight * hits[arm][seeds] for arm, weight in weights.items()], axis=0)
    return over_images(differences, interval, level, sum(map(abs, weights.values())) / 2)


def _worst_ranks(values: np.ndarray, base: np.ndarray, metric: Metric) -> float:
    """The p-value of Wilcoxon's signed ranks, with what is not finite worse than all else."""
    differences = values - base
    lost = ~np.isfinite(differences)
    worst = 1.0 + 2 * np.abs(differences[~lost]).max(initial=0.0)
    differences[lost] = metric.sign * worst * (1.0 * np.isfinite(values[lost]) - np.isfinite(base[lost]))
    return float(stats.wilcoxon(differences, zero_method="zsplit").pvalue) if differences.any() else 1.0


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """What Holm's procedure compares m p-values with: 0.05 / (m - rank), up to the first that is not below it."""
    ranks, m = np.argsort(np.argsort(p_values, kind="stable")), len(p_values)
    rejected = sum(p < LEVEL for p in holm(p_values))
    return [LEVEL / (m - min(int(rank), rejected)) for rank in ranks]


def chance_note(arms: list[dict[str, Any]]) -> str:
    """One line that names the arms at chance level; empty if there are none."""
    found = [arm for arm in arms if (arm.get("chance_p") or 0.0) >= LEVEL]
    if not found:
        return ""
    elsewhere = {arm["init"] for arm in arms if arm not in found}  # in other cells, or after other lengths, it is not
    names = dict[str, None]()
    for arm in found:
        place = ", ".join(filter(None, [point_text(arm.get("cell", {})), epochs_text(arm["epochs"])]))
        names[f"{arm['init']} ({place})" if arm["init"] in elsewhere else arm["init"]] = None
    named = joined(names, 4)
    levels = " or ".join(f"{100 * level:.3g} %" for level in dict.fromkeys(arm["chance"] for arm in found))
    return f"not distinguishable from chance ({levels}): {named} (one-sided t-test at {100 * LEVEL:g} %)"


# --- contrasts --------------------------------------------------------------------------------------------------------

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Contrast:
    """A sum of means of arms whose weights add up to zero."""

    text: str  # as tables show it: `mean(mimetic_mlp) - mean(default)`
    weights: Mapping[ArmKey, float]

    @classmethod
    def of(cls, terms: Sequence[Mapping[str, Any]], arms: Sequence[tuple[Mapping[str, Any], int, str]]) -> "Contrast":
        """The contrast of some terms; arms are (cell, training length, initialiser).

        A term `{"init": name, "weight": w, FIELD: value, ...}` is w times the mean over all cells and training lengths
        of the arm in which the fields have these values. The weight is 1 unless given; `init` may be several names, or
        absent for all; fields have their names in the recipe, with or without their sections, and `epochs` is the
        training length. UsageError if a term has no arm, or the weights do not add up to zero.

        Example:
            >>> Contrast.of([{"init": "a", "width": 24}, {"init": "default", "width": 24, "weight": -1}], arms).text
            'mean(a, width=24) - mean(default, width=24)'
        """
        text, weights = "", dict[ArmKey, float]()
        for term in terms:
            weight, chosen = float(term.get("weight", 1)), _arms_of(term, arms)
            for arm in chosen:
                weights[arm] = weights.get(arm, 0.0) + weight / len(chosen)
            sign = "-" if weight < 0 else "+"
            text += (f" {sign} " if text else "-" * (weight < 0)) + _term_text(term, abs(weight))
        weights = {arm: weight for arm, weight in weights.items() if abs(weight) > _TOLERANCE}
        if not weights or abs(math.fsum(weights.values())) > _TOLERANCE:
            found = f"a sum of {math.fsum(weights.values()):g}" if weights else "none that is not zero"
            raise UsageError(f"contrasts: {text}: expected weights of means that add up to zero, found {found}")
        return cls(text, weights)


def _names_of(term: Mapping[str, Any]) -> list[str]:
    inits = term.get("init", [])
    return [inits] if isinstance(inits, str) else list(inits)


def _arms_of(term: Mapping[str, Any], arms: Sequence[tuple[Mapping[str, Any], int, str]]) -> list[ArmKey]:
    """The arms of a term, which have equal weights."""
    names, fields = _names_of(term), {key: value for key, value in term.items() if key not in ("init", "weight")}
    for name in names:
        if name not in (known := list(dict.fromkeys(init for _, _, init in arms))):
            raise UsageError(f"contrasts: {unknown('arm', name, known)}")
    chosen = [
        (cell_key({"cell": dict(cell)}), epochs, init)
        for cell, epochs, init in arms
        if (not names or init in names) and has_fields(cell, epochs, fields)
    ]
    if not chosen:
        known = list(dict.fromkeys(point_text({**cell, "epochs": epochs}) for cell, epochs, _ in arms))
        raise UsageError(f"contrasts: expected {_term_text(term)} among the cells {joined(known, 8)}; found none")
    return chosen


def has_fields(cell: Mapping[str, Any], epochs: int, fields: Mapping[str, Any]) -> bool:
    """Whether the fields, with or without their sections, have these values in a cell; `epochs` is the length."""
    here = {**cell, "epochs": epochs}
    texts = {key: value_text(here[name], name) for name in here for key in (name, name.rpartition(".")[2])}
    return all(texts.get(field) == value_text(wanted, field) for field, wanted in fields.items())


def _term_text(term: Mapping[str, Any], weight: float = 1.0) -> str:
    """`mean(a, width=24) / 2`: names that are no Python names are in quotes."""
    fields = {key.rpartition(".")[2]: value for key, value in term.items() if key not in ("init", "weight")}
    names = [*map(_quoted, _names_of(term)), *(f"{key}={_quoted(value)}" for key, value in fields.items())]
    share = 1 / weight if weight else 0.0
    factor = "" if weight == 1 else f" / {share:g}" if share > 1 and share == round(share) else f" * {weight:g}"
    return f"mean({', '.join(names)}){factor}"


def _quoted(value: Any) -> str:
    text = value_text(value)
    return repr(text) if isinstance(value, str) and not text.isidentifier() else text


def contrast_tests(
    contrasts: Sequence[Contrast],
    runs: Runs,
    metric: Metric = ACCURACY,
    declared: Sequence[bool] = (),
    hits: Hits | None = None,
) -> list[dict[str, Any]]:
    """The paired t-test of each contrast over seeds, see `_tested`.

    Arms of all cells on one seed are one observation, so differences that all cells share are not counted twice. `p`
    is not adjusted, and `ci` is at the 5 % level where there is one contrast; of several, `p_holm` and the intervals
    follow Holm's procedure over the contrasts alone. `declared` says of each whether it was given before its
    results were there. With `hits` of all arms, `ci_images` is `over_images` at the same level, otherwise None. See
    `paired` for networks without a finite value.
    """
    rows = []
    tests = _tested([contrast.weights for contrast in contrasts], by_arm(runs), metric, hits)
    for contrast, told, found in zip(contrasts, declared or [False] * len(tests), tests, strict=True):
        row = {"contrast": contrast.text, "declared": told, "difference": found.get("difference")}
        row |= {"ci": found.get("ci_holm"), **{key: found.get(key) for key in ("level", "ci_images", "p", "p_holm")}}
        rows.append(row | {"pairs": found.get("pairs", 0), "seeds": found["seeds"]})
    return rows
