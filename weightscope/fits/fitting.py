"""`fit`: structures fitted to the weights of a population, chosen by the likelihood of held-out networks."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from weightscope._util.checks import choice
from weightscope._util.plugins import underscored
from weightscope._util.seeding import Purpose, numpy_generator
from weightscope._util.sources import is_population
from weightscope._version import __version__
from weightscope.errors import DataError, UsageError
from weightscope.fits.network_fit import NetworkFit
from weightscope.fits.population_fit import Group, PopulationFit, structure_label, varying_spec
from weightscope.fits.structure import STRUCTURES, Accumulator, Structure, structure_class
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightSamples, usable_chunks

if TYPE_CHECKING:
    from weightscope.population import Population

BLOCK = 256  # rows; fixed, so that results do not depend on the chunks of the source


class UsableNetworks:
    """The networks of a source that did not diverge and are finite in the selected tensors, numbered from 0.

    The source is read once for the attributes and again by every call of `Entries.blocks`; one of its chunks is held
    at a time.

    Args:
        source: where the vectors come from.
        spec: of the D selected entries.

    Attributes:
        n: how many there are.
        excluded: how many were left out.
        first: (D,) the first network's values, float64.
        varying: (D,) booleans, which entries differ between networks.
    """

    def __init__(self, source: WeightSamples, spec: WeightSpec) -> None:
        self._source, self._spec = source, spec
        finite, diverged = [np.empty(0, dtype=bool)], 0
        first, self.varying = None, np.zeros(spec.size, dtype=bool)
        for rows, out in usable_chunks(source, spec.names):
            keep = finite_rows(rows)
            finite.append(keep)
            diverged += out
            rows = rows if keep.all() else rows[keep]
            if len(rows):
                first = rows[0].copy() if first is None else first
                self.varying |= (rows != first).any(axis=0)
        self._finite = np.concatenate(finite)
        self.n = int(self._finite.sum())
        self.excluded = diverged + len(self._finite) - self.n
        self.first = np.zeros(spec.size) if first is None else first.astype(np.float64)

    def entries(self, name: str, part: WeightSpec) -> "Entries":
        """The varying entries of some tensors.

        Args:
            name: for messages.
            part: of the tensors, in the order of the spec.
        """
        columns = self._spec.columns(part)
        return Entries(name, part, self.first[columns], self.varying[columns], self._source, self._finite)


@dataclass(frozen=True)
class Entries:
    """The entries of some tensors that vary between the usable networks.

    Attributes:
        name: for messages.
        part: of all D entries of the tensors.
        first: (D,) the first network's values.
        varying: (D,) booleans.
    """

    name: str
    part: WeightSpec
    first: np.ndarray
    varying: np.ndarray
    _source: WeightSamples
    _finite: np.ndarray

    @property
    def spec(self) -> WeightSpec:
        """Of the D' entries that vary."""
        return self.part if self.varying.all() else varying_spec(self.part, self.varying)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Read the source again, in blocks of 256 rows.

        Yields:
            the number of the block's first network, and rows (n, D') float64, valid until the next block.

        Raises:
            DataError: if the source has another number of networks than before.
        """
        block = np.empty((BLOCK, int(self.varying.sum())))
        start = filled = seen = 0
        for rows, _ in usable_chunks(self._source, self.part.names):
            keep = self._finite[seen : seen + len(rows)]
            seen += len(rows)
            if seen > len(self._finite):
                break
            for k in range(0, len(rows), BLOCK):
                piece = rows[k : k + BLOCK][keep[k : k + BLOCK]][:, self.varying]
                while len(piece):
                    taken = piece[: BLOCK - filled]
                    block[filled : filled + len(taken)] = taken
                    piece, filled = piece[len(taken) :], filled + len(taken)
                    if filled == BLOCK:
                        yield start, block
                        start, filled = start + BLOCK, 0
        if seen != len(self._finite):
            raise DataError(
                f"the source changed while it was read: expected {len(self._finite)} networks, found {seen}; "
                "run the same command again"
            )
        if filled:
            yield start, block[:filled]

    def matrix(self) -> np.ndarray:
        """All rows (N, D') float64."""
        out = np.empty((int(self._finite.sum()), int(self.varying.sum())))
        for start, rows in self.blocks():
            out[start : start + len(rows)] = rows
        return out


def blocks_of(data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows (N, D) in memory in the blocks of `Entries.blocks`."""
    return ((start, data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))


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


Joint = Literal["tensor", "block", "all"]


def fit(
    source: WeightSamples,
    select: str | Sequence[str] = "*.mlp.fc?.weight",
    *,
    structure: str | type[Structure] | Sequence[str | type[Structure]] = "auto",
    joint: Joint = "block",
    holdout: float = 0.2,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    permutations: PermutationSpec | Mapping[str, Sequence[str | None]] | None = None,
) -> PopulationFit:
    """Fit structures to selected tensors and choose one for each group by held-out log-likelihood.

    All candidates are fitted to the same networks and scored on the same others, so differences are paired. The one
    with the highest mean is fitted again to all networks. A candidate that cannot be fitted is listed with the
    reason. Entries with one value in all networks (frozen filters) keep that value and are counted in the result; the
    density is that of the others. Diverged and non-finite networks are excluded and counted.

    Memory: structures that follow from moments (isotropic, group_means, diagonal, dense) are fitted and scored on a
    stream, in memory that does not depend on the number of networks. Those that need samples (kronecker, low_rank)
    hold one group in float64.

    Args:
        source: a `Population` or a `WeightArray`.
        select: patterns as in `WeightSpec.select`, the tensors that the initialiser will set.
        structure: `"auto"` for all structures, or one or several of: a registered name, `"package.module:Class"`, a
            `Structure` subclass.
        joint: which tensors have a joint distribution: each `"tensor"` alone, each `"block"` (tensors whose names
            agree up to the last two parts: `stages.0.blocks.0.mlp`), or `"all"`.
        holdout: share of networks to score on, between 0 and 1; or an integer number of folds >= 2, in which every
            network is scored once.
        seed: of the choice of held-out networks.
        options: of the structure, if there is one: `{"rank": 8}` for `"low_rank"`. Without options a structure's
            default candidates are compared.
        permutations: for `"exchangeable"`: a permutation specification of one's own, or tensor name -> the group of
            each axis (`PermutationSpec.from_axes`), of all tensors of the source. It is checked by function if the
            source is a population. By default that of the tensors' names.

    Raises:
        UsageError: if an argument is invalid or a pattern matches nothing.
        SpecError: if the permutation specification does not fit the tensors, or changes the network's function.
        DataError: if there are too few usable networks, or no candidate can be fitted.

    Example:
        >>> result = fit(Population("digits.pop"), "*.mlp.fc?.weight")
        >>> print(result.text())
        >>> result.save("digits-mlp.safetensors")
    """
    asked = _Request.checked(structure, options, source, permutations)
    choice("joint", joint, get_args(Joint))
    spec = source.spec.select(select)
    if empty := [t.name for t in spec.tensors if not t.size]:
        raise UsageError(f"`{empty[0]}` has no entries; select tensors with entries")
    networks = UsableNetworks(source, spec)
    tests = splits(networks.n, holdout, seed, networks.excluded)
    fewest = min(int((~test).sum()) for test in tests)
    groups, table, scores = [], [], []
    for name, part in grouped(spec, joint).items():
        entries = networks.entries(name, part)
        frozen = () if entries.varying.all() else (entries.first, entries.varying)
        if not entries.varying.any():
            groups.append(Group(name, part, None, {}, *frozen))
            continue
        candidates = asked.candidates(fewest, source.spec, entries.spec)
        fitted = _score_all(candidates, entries, tests)
        best = best_of(name, candidates)
        groups.append(Group(name, part, fitted, best.options, *frozen))
        table += rows_of(name, candidates, best)
        scores.append({c.label: c.scores for c in candidates if c.failed is None} | {CHOSEN: best.scores})
    settings = {
        "select": select if isinstance(select, str) else ",".join(select),
        "joint": joint,
        "holdout": holdout,
        "seed": seed,
        "held_out": int(sum(test.sum() for test in tests)),
    }
    table += totals(table, scores)
    return PopulationFit(
        spec, tuple(groups), tuple(table), networks.n, networks.excluded, settings, _provenance(source)
    )


def grouped(spec: WeightSpec, joint: Joint) -> dict[str, WeightSpec]:
    """The groups of tensors with a joint distribution, by name, in the spec's order."""
    if joint == "all":
        return {"all": spec}
    out: dict[str, list[str]] = {}
    for name in spec.names:
        block = ".".join(name.split(".")[:-2]) or name
        out.setdefault(name if joint == "tensor" else block, []).append(name)
    return {key: WeightSpec(spec[name] for name in names) for key, names in out.items()}


@dataclass(frozen=True)
class _Request:
    """The structures to compare.

    Attributes:
        classes: the structures.
        options: of the only one; None for the default candidates of each.
        permutations: a specification of one's own; None for that of the tensors' names.
    """

    classes: Sequence[type[Structure]]
    options: dict[str, Any] | None
    permutations: PermutationSpec | None

    @classmethod
    def checked(
        cls,
        structure: str | type[Structure] | Sequence[str | type[Structure]],
        options: Mapping[str, Any] | None,
        source: WeightSamples,
        permutations: PermutationSpec | Mapping[str, Sequence[str | None]] | None,
    ) -> Self:
        """The arguments of `fit` of the same names, resolved and checked."""
        wanted = [structure] if isinstance(structure, str | type) else list(structure)
        classes = list(STRUCTURES.values()) if wanted == ["auto"] else [structure_class(item) for item in wanted]
        names = [item.name for item in classes]
        if not classes:
            raise UsageError(f"structure: expected at least one of {', '.join(STRUCTURES)}, found none")
        if len(set(names)) < len(names):
            raise UsageError(f"structure: expected different names, found {', '.join(names)}")
        if options is not None:
            _check_options(options, classes)
        given = None if options is None else dict(options)
        if permutations is None:
            return cls(classes, given, None)
        if not any(item.uses_permutations for item in classes):
            raise UsageError(f"permutations: not used by {', '.join(names)}, only by exchangeable")
        from weightscope.anatomy.permutation_groups import permutations_of  # imports torch

        return cls(classes, given, permutations_of(source, permutations))

    def candidates(self, networks: int, whole: WeightSpec, group: WeightSpec) -> list[Candidate]:
        """Each structure with the given options, or with its default candidates.

        Args:
            networks: how many are fitted.
            whole: spec of the network.
            group: spec of the entries of the group that vary.
        """
        out = []
        given: dict[str, Any] = {} if self.permutations is None else {"permutations": self.permutations}
        for structure in self.classes:
            own = given if structure.uses_permutations else {}
            for chosen in [self.options] if self.options is not None else structure.candidates(networks, group.size):
                out.append(candidate := Candidate(structure, chosen))
                with candidate.attempt():
                    candidate.context = structure.context(whole, group, **own)
        return out


def _check_options(options: Mapping[str, Any], classes: Sequence[type[Structure]]) -> None:
    """Raise UsageError unless there is one structure, with options of these names."""
    if len(classes) != 1:
        names = ", ".join(cls.name for cls in classes)
        raise UsageError(f"options {dict(options)} need one structure by name, found {names}")
    if unknown := set(options) - set(classes[0].options):
        known = ", ".join(classes[0].options) or "none"
        raise UsageError(f"{classes[0].name} has no option {', '.join(sorted(unknown))}; its options are {known}")


def _score_all(candidates: Sequence[Candidate], part: Entries, tests: Sequence[np.ndarray]) -> Structure:
    """Score the candidates and fit the best one to all networks."""
    spec, data = part.spec, None
    if any(c.structure.needs_samples for c in candidates):
        data = part.matrix()

    def streamed() -> Iterator[tuple[int, np.ndarray]]:
        return part.blocks() if data is None else blocks_of(data)

    def whole() -> Iterator[tuple[int, np.ndarray]]:
        assert data is not None
        yield 0, data

    score([c for c in candidates if not c.structure.needs_samples], spec, streamed, tests)
    for candidate in candidates:
        if candidate.structure.needs_samples:  # one by one, since each keeps its samples
            score([candidate], spec, whole, tests)
    best = best_of(part.name, candidates)
    accumulator = best.accumulator(spec)
    for _, rows in whole() if best.structure.needs_samples else streamed():
        accumulator.update(rows)
    return accumulator.finish()


def _provenance(source: WeightSamples) -> dict[str, Any]:
    """What the source records about itself; an array records only its spec."""
    out: dict[str, Any] = {"weightscope": __version__, "network_spec": source.spec.fingerprint}
    if (path := getattr(source, "path", None)) is not None:
        out["source"] = os.path.basename(os.fspath(path))
    if (recipe := getattr(source, "recipe", None)) is not None:
        out["recipe"] = recipe.to_dict()
    return out


def fit_init(
    source: "str | Path | Population",
    structure: Any = "auto",
    *,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> PopulationFit | NetworkFit:
    """Fit an initialiser to a population (`fit`) or to one network (`fit_network`), depending on the source.

    Args:
        source: a population or its folder, or a checkpoint: a file, a model folder, `hf://org/name`.
        structure: of a population: "auto", a name in `weightscope.fits.STRUCTURES`, or a `Structure` subclass;
            of one network: "filters", "conv_schedule", "identity_product", or a function. Also
            `"package.module:name"` of either.
        options: of the structure.
        settings: of `fit` for a population: `select`, `joint`, `holdout`, `seed`.

    Raises:
        UsageError: if the structure is for the other kind of source, or `settings` are given for one network.
        DataError: as `fit` and `fit_network`.

    Example:
        >>> fit_init("efficientnet-lite0.pth", "filters", options={"kernel": 5}).save("filters.safetensors")
    """
    from weightscope.fits.one_network import NETWORK_FITS, fit_network  # torch
    from weightscope.population import Population  # h5py

    name = underscored(structure) if isinstance(structure, str) else None
    if isinstance(source, Population) or is_population(source):
        if name in NETWORK_FITS:
            known = ", ".join(("auto", *STRUCTURES))
            raise UsageError(f"structure: {name!r} is fitted to one network, and {source} is a population: {known}")
        population = source if isinstance(source, Population) else Population(source)
        return fit(population, structure=structure, options=options, **settings)
    if name == "auto" or name in STRUCTURES or isinstance(structure, type):
        known = ", ".join(NETWORK_FITS)
        shown = name or structure.__name__
        raise UsageError(f"structure: {shown!r} is fitted to a population, and {source} is one network: {known}")
    if settings:
        raise UsageError(f"{', '.join(settings)}: for populations; {structure} of one network takes options only")
    return fit_network(str(source), structure, **(options or {}))


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """Parse `name=value` texts into a dictionary; values in JSON (a number, true) are decoded.

    Raises:
        UsageError: if a text has no "=", or a name is repeated.

    Example:
        >>> parsed_options(["rank=8", "schedule=stage"])
        {'rank': 8, 'schedule': 'stage'}
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in out:
            raise UsageError(f"option: expected name=value, each name once, found {text!r}")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
