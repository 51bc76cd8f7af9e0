"""Structures compared by the log-likelihood of networks that they were not fitted to."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.artifacts.population_fit import structure_label
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.structures import Accumulator, Structure

CHOSEN = "chosen in each group"
# Yields the number of the first network of a block, and rows (n, D).
Blocks = Callable[[], Iterator[tuple[int, np.ndarray]]]


@dataclass
class Candidate:
    """A structure with options, and its score in one group.

    Attributes:
        structure: the class.
        options: of its fit.
        context: further arguments that follow from the network.
        scores: (held-out networks,) log-likelihoods in nats.
        parameters: the number of fitted numbers.
        failed: why it could not be fitted or scored, or None.
    """

    structure: type[Structure]
    options: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))
    parameters: int = 0
    failed: str | None = None

    @property
    def label(self) -> str:
        """Name and options."""
        return structure_label(self.structure.name, self.options)

    def accumulator(self, spec: WeightSpec) -> Accumulator[Structure]:
        """A new accumulator of the structure."""
        return self.structure.accumulator(spec, **self.options, **self.context)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Record an expected error of the block as the reason of failure."""
        try:
            yield
        except (UsageError, DataError) as error:
            self.failed = self.failed or str(error)


@dataclass
class _Run:
    """One candidate in one split; `test` (N,) marks the held-out networks."""

    candidate: Candidate
    test: np.ndarray
    accumulator: Accumulator[Structure]
    fitted: Structure | None = None


def splits(n: int, holdout: float, seed: int, excluded: int) -> list[np.ndarray]:
    """Booleans (N,) for each split, which networks are held out.

    Raises:
        UsageError: if `holdout` is invalid.
        DataError: if a side has fewer than two networks.
    """
    folds = int(holdout) if holdout >= 2 and holdout == int(holdout) else None
    if folds is None and not 0 < holdout < 1:
        raise UsageError(f"holdout: expected a share between 0 and 1, or an integer number of folds >= 2: {holdout}")
    scored = n if folds else round(n * holdout)
    fewest = n - -(-n // folds) if folds else n - scored
    if fewest < 2 or scored < 2:
        raise DataError(
            f"too few networks to compare structures: {n} usable ({excluded} excluded), of which {max(fewest, 0)} "
            f"would be fitted and {scored} held out; both need at least 2"
        )
    order = numpy_generator(seed, 0, Purpose.STRUCTURE).permutation(n)
    return [np.isin(np.arange(n), test) for test in (np.array_split(order, folds) if folds else [order[:scored]])]


def score(candidates: Sequence[Candidate], spec: WeightSpec, blocks: Blocks, tests: Sequence[np.ndarray]) -> None:
    """Fit candidates to the other networks of each split and score them on the held-out ones, in two passes."""
    candidates = [candidate for candidate in candidates if candidate.failed is None]
    if not candidates:
        return
    runs: list[_Run] = []
    for candidate in candidates:
        for test in tests:
            with candidate.attempt():
                runs.append(_Run(candidate, test, candidate.accumulator(spec)))
    for start, rows in blocks():
        for run in _alive(runs):
            train = rows[~run.test[start : start + len(rows)]]
            with run.candidate.attempt():
                if len(train):
                    run.accumulator.update(train)
    for run in _alive(runs):
        with run.candidate.attempt():
            run.fitted = run.accumulator.finish()
            run.candidate.parameters = run.fitted.parameters
    held_out = np.any(tests, axis=0)
    scores = {id(candidate): np.zeros(len(held_out)) for candidate in candidates}
    for start, rows in blocks():
        for run in _alive(runs):
            test = run.test[start : start + len(rows)]
            with run.candidate.attempt():
                if test.any() and run.fitted is not None:
                    scores[id(run.candidate)][start : start + len(rows)][test] = run.fitted.log_prob(rows[test])
    for candidate in candidates:
        candidate.scores = scores[id(candidate)][held_out]
        if candidate.failed is None and not np.isfinite(candidate.scores).all():
            candidate.failed = "a held-out network has no finite log-likelihood"


def _alive(runs: Sequence[_Run]) -> Iterator[_Run]:
    return (run for run in runs if run.candidate.failed is None)


def best_of(group: str, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the highest mean score; of equal ones the first.

    Raises:
        DataError: if all failed; gives the reasons.
    """
    fitted = [c for c in candidates if c.failed is None]
    if not fitted:
        reasons = "; ".join(f"{c.label}: {c.failed}" for c in candidates)
        raise DataError(f"`{group}`: no structure can be fitted: {reasons}")
    return max(fitted, key=lambda c: c.scores.mean())


def rows_of(group: str, candidates: Sequence[Candidate], best: Candidate) -> list[dict[str, Any]]:
    """The rows of the table for one group."""
    out = []
    for c in candidates:
        row = {"group": group, "structure": c.label, "parameters": 0 if c.failed else c.parameters}
        if c.failed is None:
            out.append(row | _compared(c.scores, best.scores) | {"chosen": c is best, "failed": None})
        else:
            empty = dict.fromkeys(("log_prob", "log_prob_se", "difference", "difference_se"))
            out.append(row | empty | {"chosen": False, "failed": c.failed})
    return out


def totals(table: Sequence[Mapping[str, Any]], scores: Sequence[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows that add the groups up, for the candidates that could be fitted in all of them.

    Args:
        table: the rows of all groups.
        scores: for each group, label -> scores; `CHOSEN` for the best one's.
    """
    if len(scores) < 2:
        return []
    sums = {label: np.sum([s[label] for s in scores], axis=0) for label in scores[0] if all(label in s for s in scores)}
    best = max(sums.values(), key=np.mean)
    rows = []
    for label, values in sums.items():
        chosen = label == CHOSEN
        counts = (r["parameters"] for r in table if (r["chosen"] if chosen else r["structure"] == label))
        row = {"group": "(all)", "structure": label, "parameters": sum(counts), **_compared(values, best)}
        rows.append(row | {"chosen": chosen, "failed": None})
    return rows


def _compared(scores: np.ndarray, best: np.ndarray) -> dict[str, float]:
    difference, root = scores - best, np.sqrt(len(scores))
    return {
        "log_prob": float(scores.mean()),
        "log_prob_se": float(scores.std(ddof=1) / root),
        "difference": float(difference.mean()),
        "difference_se": float(difference.std(ddof=1) / root),
    }
