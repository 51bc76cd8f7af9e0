"""Statistics of a benchmark: means with intervals inside their range, paired t-tests, Holm's correction, chance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from weightscope._util.arms import CONTROLS, FROZEN, epochs_text, point_text
from weightscope._util.names import joined, unknown
from weightscope.data.metrics import ACCURACY, Metric, same_differences
from weightscope.errors import UsageError
from weightscope.statistics.index_effects import holm

LEVEL = 0.05  # of adjusted p-values, from which on a difference counts
_FEWEST_EQUAL = 6  # equal differences of one sign have 2^(1 - n) < 0.05 by the sign test
Runs = Sequence[dict[str, Any]]
Place = tuple[str, int, str]
"""The cell (`cell_key`), training length and initialiser of an arm."""
Hits = Mapping[Place, np.ndarray]
"""Of arms, which images each network classifies rightly, (n, m) bool; row k is that of seed k."""
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

    A network that diverged counts with the metric that it reached. Where that is not finite, it has the worst rank in
    the tests and is left out of means and intervals: `n` is the number of the others, `networks` that of all, `pairs`
    the number of seeds that a difference is over, those with a finite value of both arms. Differences keep their sign,
    whichever direction is better. The reference of an arm is the first initialiser in its cell at its length, that of a
    frozen arm the first frozen one. An arm is also compared with its controls: `beyond_scale` is the mean paired
    difference from the arm in `control`, the scale control, and `correlations` that from the arm in `uncorrelated`; a
    control's own `difference` is what its moments do. For the intervals see `mean_interval` and `paired`.

    p-values are two-sided; `p_holm` and `beyond_scale_p_holm` control the family-wise error rate of the whole table
    (Holm 1979). `difference_ci_holm` and `beyond_scale_ci_holm` are intervals at the `level` of each test in that
    procedure: they exclude 0 exactly where the adjusted p-value is below 0.05, if all networks are finite. `chances`
    maps cells (`cell_key`) to chance levels; rows then have `chance` and `chance_p`, see `above_chance`. With `hits` of
    both arms, `difference_ci_images` and `beyond_scale_ci_images` are `over_images` at the same `level`, else None.
    """
    groups, rows, tests = by_arm(runs), list[dict[str, Any]](), list[_Test]()
    controls = {(*key[:2], *found): key for key in groups if (found := control_of(key[2]))}
    for (cell, epochs, init), group in groups.items():
        arm = cell, epochs, init
        first = _reference(groups, arm)
        row: dict[str, Any] = {"init": init, "cell": group[0].get("cell", {}), "numbers": group[0].get("numbers", {})}
        finite = np.array([value for value in values_of(group, metric).values() if np.isfinite(value)])
        row |= {"epochs": epochs, **mean_interval(finite, metric)}
        row["loss"], row["seconds"] = (_mean([run.get(key) for run in group]) for key in ("loss", "seconds"))
        row |= {"diverged": sum(run["diverged"] for run in group), "networks": len(group)}
        row["reference"] = first[2] if first != arm else None
        _compare(row, "difference", groups, (arm, first if first != arm else None), metric, tests)
        for kind, control in CONTROLS.items():
            place = controls.get((cell, epochs, init, kind))
            row[control.arm] = place and place[2]
            _compare(row, control.key, groups, (arm, place), metric, tests)
        if (level := (chances or {}).get(cell)) is not None:
            p = above_chance(finite, level) if len(finite) else None
            row |= {"chance": level[0], "chance_p": p}
        rows.append(row)
    _adjust(tests, metric, hits or {})
    return rows


def by_arm(runs: Runs) -> dict[Place, Runs]:
    """(cell, epochs, initialiser) -> its runs, in order."""
    groups: dict[Place, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((cell_key(run), run["epochs"], run["init"]), []).append(run)
    return groups  # type: ignore[return-value]


def _reference(groups: Mapping[Place, Runs], arm: Place) -> Place:
    """The first arm of the cell at the length, of a frozen arm the first frozen one."""
    return next(key for key in groups if (*key[:2], key[2].endswith(FROZEN)) == (*arm[:2], arm[2].endswith(FROZEN)))


def values_of(runs: Runs, metric: Metric) -> dict[int, float]:
    """Seed -> value, NaN for runs without a finite one."""
    return {run["seed"]: np.nan if run.get(metric.key) is None else run[metric.key] for run in runs}


_Test = tuple[dict[str, Any], str, np.ndarray, np.ndarray, dict[Place, float], list[int]]
"""A row, what it compares, the values on the seeds that both arms have, the weights of the arms, and these seeds."""


def _compare(
    row: dict[str, Any],
    key: str,
    groups: Mapping[Any, Runs],
    arms: tuple[Any, Any],
    metric: Metric,
    tests: list[_Test],
) -> bool:
    """Write `paired` and `pairs`, the number of seeds that both have, into the row; None, and False, without any."""
    values, base = (values_of(groups.get(arm, ()), metric) for arm in arms)
    shared, p = [k for k in values if k in base], "" if key == "difference" else f"{key}_"
    mine, others = (np.array([each[k] for k in shared]) for each in (values, base))
    pairs = int(np.isfinite(mine - others).sum())
    found = paired(mine, others, metric) if pairs else dict.fromkeys(("difference", "difference_ci95", "p"))
    row |= {key: found["difference"], f"{key}_ci95": found["difference_ci95"], f"{p}p": found["p"]}
    row |= {f"{p}pairs": pairs or None, f"{p}p_holm": None, f"{p}level": None, f"{key}_ci_holm": None}
    row[f"{key}_ci_images"] = None
    if pairs:
        tests.append((row, key, mine, others, dict(zip(arms, (1.0, -1.0), strict=True)), shared))
    return bool(pairs)


def _adjust(tests: Sequence[_Test], metric: Metric, hits: Hits) -> None:
    """Write adjusted p-values and intervals into the rows of all tests of a table."""
    p_values = [row["p" if key == "difference" else f"{key}_p"] for row, key, *_ in tests]
    found = zip(tests, holm(p_values), holm_levels(p_values), strict=True)
    for (row, key, values, base, weights, seeds), adjusted, level in found:
        p, interval = "" if key == "difference" else f"{key}_", paired(values, base, metric, level)["difference_ci95"]
        row |= {f"{p}p_holm": adjusted, f"{p}level": level, f"{key}_ci_holm": interval}
        finite = np.isfinite(values - base)
        row[f"{key}_ci_images"] = crossed(weights, hits, np.array(seeds)[finite], interval, level)


def between_cells(runs: Runs, field: str, metric: Metric = ACCURACY, hits: Hits | None = None) -> list[dict[str, Any]]:
    """Paired t-tests of each arm against the same arm at the first value of a field of the recipe.

    Network k of both has the same streams of random numbers: the same batches and augmentation and, where the shapes
    of the tensors are the same, the same default weights. `p_holm` is adjusted over these rows.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.get("cell", {})))
    if field not in known:
        raise UsageError(unknown("field", field, known))
    first, groups, rows, tests = runs[0]["cell"][field], by_arm(runs), [], list[_Test]()
    for cell, epochs, init in groups:
        place = json.loads(cell)
        arms = (cell, epochs, init), (cell_key({"cell": {**place, field: first}}), epochs, init)
        row = {"init": init, "cell": place, "epochs": epochs, "reference": {field: first}}
        if place[field] != first and _compare(row, "difference", groups, arms, metric, tests):
            rows.append(row)
    _adjust(tests, metric, hits or {})
    return rows


def seed_differences(runs: Runs, metric: Metric = ACCURACY) -> list[dict[str, Any]]:
    """The differences of each arm of one cell from its reference on each seed, for `plots.paired_differences`.

    For each arm at each length that has seeds of its reference, see `summarise`: `init`, `epochs`, `reference`,
    `differences` (n,), `diverged` (n,), whether one of the two did, the adjusted `interval` of their mean (None if they
    are equal up to rounding), and `left_out`, the number of networks without a finite value (of the reference, too, in
    its first row). A difference that is not finite is a DataError.
    """
    groups, rows = by_arm(runs), []
    compared = {(cell_key(row), row["epochs"], row["init"]): row for row in summarise(runs, metric)}
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
        row["interval"] = None if same_differences(values, others) else compared[place]["difference_ci_holm"]
        rows.append(row | {"left_out": lost[place] + lost.pop(first, 0)})
    return rows


def mean_curves(runs: Runs, metric: Metric = ACCURACY, chance: float | None = None) -> list[dict[str, Any]]:
    """The mean of the metric after each epoch, for `plots.metric_curves`, of runs of one cell and one length.

    For each initialiser: `init`, `mean` (E,) over its `n` networks with a finite last value, of `networks`, and `band`
    (2, E), the interval of the difference from the first one on the seeds of both, at the arm's level in the table of
    `summarise`, drawn around its mean and inside the metric's bounds; None for the first one and for a single seed.
    Several cells or lengths, or an initialiser without a `curve` on a seed of the first, are a UsageError.
    """
    groups, levels = by_arm(runs), {row["init"]: row["level"] for row in summarise(runs, metric)}
    places = {key[:2] for key in groups}
    if len(places) != 1:
        raise UsageError(f"curves: expected runs of one cell and one training length, found {len(places)}")
    found: dict[str, dict[int, np.ndarray]] = {}
    for (_, _, init), group in groups.items():
        curves = {run["seed"]: np.array([np.nan if v is None else v for v in run.get("curve") or []]) for run in group}
        found[init] = {seed: curve for seed, curve in curves.items() if curve.size and np.isfinite(curve[-1])}
    first = next(iter(found.values()))
    if not all(set(mine) & set(first) for mine in found.values()):
        raise UsageError('curves: expected a value after each epoch (training.evaluate = "epoch"), found none')
    rows = []
    for (key, group), mine in zip(groups.items(), found.values(), strict=True):
        shared, mean, band = [k for k in mine if k in first], np.mean(list(mine.values()), axis=0), None
        if mine is not first and len(shared) > 1:
            differences = np.array([mine[k] - first[k] for k in shared])  # (n, E)
            half = stats.t.ppf(1 - levels[key[2]] / 2, len(shared) - 1) * stats.sem(differences, axis=0)
            band = np.clip(np.array([mean - half, mean + half]), *metric.bounds)
        row = {"init": key[2], "mean": mean, "band": band, "n": len(mine), "networks": len(group)}
        rows.append(row | {"chance": chance})
    return rows


def cell_key(row: dict[str, Any]) -> str:
    """The cell of a run or an arm as text, equal for equal cells."""
    return json.dumps(row.get("cell", {}), sort_keys=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


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
    else:
        ends = low + (mean - low) * np.exp(t * error / (mean - low))
    return {"n": n, "mean": mean, "ci95": np.clip(ends, low, high).tolist()}


def paired(values: np.ndarray, base: np.ndarray, metric: Metric = ACCURACY, level: float = LEVEL) -> dict[str, Any]:
    """The mean of the paired differences `values - base`, its interval, and the p-value of the paired t-test.

        t = mean sqrt(n) / s,   p = P(|T| > |t|) for Student's T with n - 1 degrees of freedom

    The interval is Student's, of confidence 1 - level, intersected with the possible range, [-1, 1] for accuracies,
    which does not change how often it covers the true difference.

    Differences that are equal up to rounding have no s. Their p is that of the sign test, 2^(1 - n), and 1 if they are
    zero; the interval has no width where 2^(1 - n) is below the level, and is the possible range otherwise (None
    without an upper bound), as for a single difference.

    Pairs of which one is not finite, because the network diverged, are left out of the mean and the interval, not of
    the test: p is then that of Wilcoxon's signed ranks over all pairs, in which the network without a finite value is
    worse than all others, and two of them are equal (worst-rank scores, Lachin 1999).
    """
    finite = np.isfinite(values - base)
    if not finite.all():
        return paired(values[finite], base[finite], metric, level) | {"p": _worst_ranks(values, base, metric)}
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
    images, b < e, is 0. The result holds `interval`, that of `paired` at the same level for the images that were used:
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
    weights: Mapping[Place, float], hits: Hits, seeds: np.ndarray, interval: Sequence[float] | None, level: float
) -> list[float] | None:
    """`over_images` of a sum of arms with weights that add up to zero; None unless all have hits of as many images."""
    known = [hits[arm] for arm in weights if arm in hits]
    if interval is None or len(known) < len(weights) or len({each.shape[1] for each in known}) > 1:
        return None
    differences = np.sum([weight * hits[arm][seeds] for arm, weight in weights.items()], axis=0)
    return over_images(differences, interval, level, sum(map(abs, weights.values())) / 2)


def other_examples(p: float, q: float, m: int) -> float:
    """The largest standard error that the choice of m test examples adds to a difference of accuracies p - q.

        sqrt((p (1 - p) + q (1 - q)) / m)

    That is around the difference on all such examples, and for two arms, not for a difference of differences. Of p_i in
    [0, 1], the share of an arm's networks that are right on example i, with mean p, the variance is at most p (1 - p),
    since p_i^2 <= p_i; that of p_i - q_i is at most the sum of both, if what is hard for one arm is not easier for the
    other (a covariance >= 0); and the mean of m independent examples has 1 / m of it. For results whose hits are not
    known, which `crossed` needs.

    Source: Bhatia and Davis, A better bound on the variance, 2000.
    """
    return float(np.sqrt((p * (1 - p) + q * (1 - q)) / m))


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
    named = joined(dict.fromkeys(_placed(arm) if arm["init"] in elsewhere else arm["init"] for arm in found), 4)
    levels = " or ".join(f"{100 * level:.3g} %" for level in dict.fromkeys(arm["chance"] for arm in found))
    return f"not distinguishable from chance ({levels}): {named} (one-sided t-test at {100 * LEVEL:g} %)"


def _placed(arm: dict[str, Any]) -> str:
    """The initialiser of an arm with its cell and training length."""
    cell = point_text(arm.get("cell", {}))
    return f"{arm['init']} ({cell + ', ' if cell else ''}{epochs_text(arm['epochs'])})"
