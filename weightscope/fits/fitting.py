"""`fit`: structures fitted to the weights of a population, chosen by the likelihood of held-out networks."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from weightscope._util.checks import choice
from weightscope._util.names import listing
from weightscope._util.plugins import underscored
from weightscope._util.seeding import Purpose, numpy_generator
from weightscope._util.sources import is_population
from weightscope._util.trust import trusting
from weightscope._version import __version__
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.fits.artifact import NetworkFit
from weightscope.fits.population_fit import Group, PopulationFit, structure_label, varying_spec
from weightscope.fits.structure import STRUCTURES, Structure, structure_class
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightSamples, literal, usable_chunks

if TYPE_CHECKING:
    from weightscope.population import Population

Joint = Literal["tensor", "block", "all"]
Blocks = Iterator[tuple[int, np.ndarray]]  # the number of the first network of a block, and rows (n, D)

HELD = 1 << 28  # bytes of selected weights that are kept in memory, so that a source is read once
_BLOCK = 256  # rows; fixed, so that results do not depend on the chunks of the source
_CHOSEN = "chosen in each group"
_MLP = "*.mlp.fc?.weight"
_log = logging.getLogger(__name__)


def fit(
    source: WeightSamples,
    select: str | Sequence[str] | None = None,
    *,
    structure: str | type[Structure] | Sequence[str | type[Structure]] = "auto",
    joint: Joint = "block",
    holdout: float = 0.2,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    permutations: PermutationSpec | Mapping[str, Sequence[str | None]] | str | Path | None = None,
) -> PopulationFit:
    """Fit structures to selected tensors and choose one for each group by held-out log-likelihood.

    All candidates are fitted to the same networks and scored on the same others, so differences are paired. The one
    with the highest mean is fitted again to all networks. A candidate that cannot be fitted is listed with the
    reason. Entries with one value in all networks (frozen filters) keep that value and are counted in the result; the
    density is that of the others. Diverged and non-finite networks are excluded and counted.

    Memory: structures that follow from moments (isotropic, group_means, diagonal, dense) are fitted and scored on a
    stream. Selected weights of up to 256 MiB are held and read once; more are read again for each pass, in memory that
    does not depend on the number of networks. Structures that need samples (kronecker, low_rank) hold one group in
    float64.

    Args:
        source: a `Population` or a `WeightArray`.
        select: patterns as in `WeightSpec.select`, the tensors that the initialiser will set; by default the matrices
            of MLPs (`*.mlp.fc?.weight`), or of a network without such names all tensors with two axes or more.
        structure: `"auto"` for all structures, or one or several: registered names, `"package.module:Class"`, classes.
        joint: which tensors have a joint distribution: each `"tensor"` alone, each `"block"` (tensors whose names
            agree up to the last two parts: `stages.0.blocks.0.mlp`), or `"all"`.
        holdout: share of networks to score on, between 0 and 1; or a number of folds >= 2, which score every network.
        seed: selects the held-out networks.
        options: of the structure, if there is one: `{"rank": 8}`. By default its candidates are compared.
        permutations: for `"exchangeable"`: a permutation specification of one's own, or tensor name -> the group of
            each axis (`PermutationSpec.from_axes`), or a TOML file of rules, of all tensors of the source. It is
            checked by function if the source is a population. By default that of the tensors' names.

    Raises:
        UsageError: if an argument is invalid or a pattern matches nothing.
        SpecError: if the permutation specification does not fit the tensors, or changes the network's function.
        DataError: if there are too few usable networks, or no candidate can be fitted.

    Example:
        >>> result = fit(Population("digits.pop"), "*.mlp.fc?.weight")
        >>> result.save("digits-mlp.safetensors")
    """
    classes = _classes(structure, options)
    own = {}
    if any(item.uses_permutations for item in classes):
        from weightscope.anatomy.permutation_groups import permutations_of  # imports torch

        with contextlib.suppress(AnatomyError):  # the structure says why it cannot be fitted
            own["permutations"] = permutations_of(source, permutations)
    elif permutations is not None:
        names = ", ".join(item.name for item in classes)
        raise UsageError(f"permutations: not used by {names}, only by exchangeable")
    choice("joint", joint, get_args(Joint))
    select = _default_select(source.spec) if select is None else select
    spec = source.spec.select(select)
    if empty := [t.name for t in spec.tensors if not t.size]:
        raise UsageError(f"`{empty[0]}` has no entries; select tensors with entries")
    networks = _UsableNetworks(source, spec)
    tests = _splits(networks.n, holdout, seed, networks.excluded)
    fewest = min(int((~test).sum()) for test in tests)
    groups, table, scores = [], [], []
    for name, part in grouped(spec, joint).items():
        columns = spec.columns(part)
        varying = networks.varying[columns]
        frozen = () if varying.all() else (networks.first[columns].astype(np.float64), varying)
        if not varying.any():
            groups.append(Group(name, part, None, {}, *frozen))
            continue
        inner = part if varying.all() else varying_spec(part, varying)
        candidates = []
        for cls in classes:
            for given in [dict(options)] if options is not None else cls.candidates(fewest, inner.size):
                candidates.append(candidate := _Candidate(cls, given))
                with candidate.attempt():
                    candidate.context = cls.context(source.spec, inner, **(own if cls.uses_permutations else {}))
        compared = _compared(candidates, inner, networks, part, tests)
        if compared is None:
            reasons = "; ".join(f"{c.label}: {c.failed}" for c in candidates)
            raise DataError(f"`{name}`: no structure can be fitted: {reasons}")
        best, fitted = compared
        groups.append(Group(name, part, fitted, best.options, *frozen))
        table += [c.row(name, best) for c in candidates]
        scores.append({c.label: c.scores for c in candidates if c.failed is None} | {_CHOSEN: best.scores})
    settings = {
        "select": select if isinstance(select, str) else ",".join(select),
        "joint": joint,
        "holdout": holdout,
        "seed": seed,
        "held_out": int(sum(test.sum() for test in tests)),
    }
    table += _totals(table, scores)
    facts = networks.n, networks.excluded, settings, _provenance(source)
    return PopulationFit(spec, tuple(groups), tuple(table), *facts)


def _default_select(spec: WeightSpec) -> str | list[str]:
    """The matrices of MLPs, or all matrices and filters of a network whose tensors have other names."""
    if any(fnmatchcase(name, _MLP) for name in spec.names):
        return _MLP
    matrices = [tensor.name for tensor in spec if len(tensor.shape) > 1]
    _log.warning("no tensor is named %s: fitting all %d with two axes or more (--select)", _MLP, len(matrices))
    return literal(matrices)


def grouped(spec: WeightSpec, joint: Joint) -> dict[str, WeightSpec]:
    """The groups of tensors with a joint distribution, by name, in the spec's order."""
    if joint == "all":
        return {"all": spec}
    out: dict[str, list[str]] = {}
    for name in spec.names:
        block = ".".join(name.split(".")[:-2]) or name
        out.setdefault(name if joint == "tensor" else block, []).append(name)
    return {key: WeightSpec(spec[name] for name in names) for key, names in out.items()}


def _classes(
    structure: str | type[Structure] | Sequence[str | type[Structure]], options: Mapping[str, Any] | None
) -> list[type[Structure]]:
    """The structures to compare; options need a single one that has them."""
    wanted = [structure] if isinstance(structure, str | type) else list(structure)
    classes = list(STRUCTURES.values()) if wanted == ["auto"] else [structure_class(item) for item in wanted]
    names = [item.name for item in classes]
    if not classes:
        raise UsageError(f"structure: expected at least one of {', '.join(STRUCTURES)}, found none")
    if len(set(names)) < len(names):
        raise UsageError(f"structure: expected different names, found {', '.join(names)}")
    if options is not None:
        if len(classes) != 1:
            raise UsageError(f"options {dict(options)} need one structure by name, found {', '.join(names)}")
        if unknown := set(options) - set(classes[0].options):
            known = ", ".join(classes[0].options) or "none"
            raise UsageError(f"{names[0]} has no option {', '.join(sorted(unknown))}; its options are {known}")
    return classes


def _provenance(source: WeightSamples) -> dict[str, Any]:
    """What the source records about itself; an array records only its spec."""
    out: dict[str, Any] = {"weightscope": __version__, "network_spec": source.spec.fingerprint}
    if (path := getattr(source, "path", None)) is not None:
        out["source"] = os.path.basename(str(path))
    if (recipe := getattr(source, "recipe", None)) is not None:
        out["recipe"] = recipe.to_dict()
    if (moment := getattr(source, "moment", None)) is not None:  # of training; without, its end
        out["moment"] = moment
    return out


class _UsableNetworks:
    """The networks of a source that did not diverge and are finite in the selected tensors, numbered from 0.

    The source is read once; again by each call of `blocks`, one chunk at a time, if its weights are more than `HELD`
    bytes. `first` (D,) are the first network's values, `varying` (D,) tells which entries differ between networks.
    """

    def __init__(self, source: WeightSamples, spec: WeightSpec) -> None:
        self._source, self._spec = source, spec
        self._held: list[np.ndarray] | None = []
        self.first, self.varying = np.zeros(spec.size), np.zeros(spec.size, dtype=bool)
        self.n = self.excluded = size = 0
        finite = [np.empty(0, dtype=bool)]
        for rows, diverged in usable_chunks(source, spec.names):
            finite.append(finite_rows(rows))
            rows = rows if finite[-1].all() else rows[finite[-1]]
            self.excluded += diverged + len(finite[-1]) - len(rows)
            size += rows.nbytes
            self._held = None if self._held is None or size > HELD else [*self._held, rows.copy()]
            if len(rows):
                self.first = self.first if self.n else rows[0].copy()
                self.varying |= (rows != self.first).any(axis=0)
            self.n += len(rows)
        self._finite = np.concatenate(finite)

    def blocks(self, part: WeightSpec) -> Blocks:
        """The varying entries of some tensors in blocks of 256: number of the first network, rows (n, D') float64."""
        varying, start = self.varying[self._spec.columns(part)], 0
        left = np.empty((0, int(varying.sum())), dtype=np.float32)
        for rows in self._rows(part):
            left = np.concatenate([left, rows[:, varying]])
            while len(left) >= _BLOCK:
                yield start, left[:_BLOCK].astype(np.float64)
                start, left = start + _BLOCK, left[_BLOCK:]
        if len(left):
            yield start, left.astype(np.float64)

    def _rows(self, part: WeightSpec) -> Iterator[np.ndarray]:
        """Rows (n, D) of the usable networks, from memory or read again."""
        if self._held is not None:
            columns = self._spec.columns(part)
            yield from (rows[:, columns] for rows in self._held)
            return
        seen = 0
        for rows, _ in usable_chunks(self._source, part.names):
            keep = self._finite[seen : seen + len(rows)]
            seen += len(rows)
            if seen > len(self._finite):
                break
            yield rows if keep.all() else rows[keep]
        if seen != len(self._finite):
            raise DataError(
                f"the source changed while it was read: expected {len(self._finite)} networks, found {seen}; "
                "run the same command again"
            )

    def matrix(self, part: WeightSpec) -> np.ndarray:
        """The varying entries of some tensors, (N, D') float64."""
        out = np.empty((self.n, int(self.varying[self._spec.columns(part)].sum())))
        for start, rows in self.blocks(part):
            out[start : start + len(rows)] = rows
        return out


@dataclass(eq=False)
class _Candidate:
    """A structure with options, and its score in one group."""

    structure: type[Structure]
    options: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)  # further arguments that follow from the network
    fits: list[Any] = field(default_factory=list)  # for each split its accumulator, then the fitted structure
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))  # (held-out networks,), nats
    parameters: int = 0  # the number of fitted numbers
    failed: str | None = None  # why it could not be fitted or scored

    @property
    def label(self) -> str:
        return structure_label(self.structure.name, self.options)

    def accumulator(self, spec: WeightSpec) -> Any:
        return self.structure.accumulator(spec, **self.options, **self.context)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Record an expected error of the block as the reason of failure."""
        try:
            yield
        except (UsageError, DataError) as error:
            self.failed = self.failed or str(error)

    def row(self, group: str, best: "_Candidate") -> dict[str, Any]:
        """The row of the table for one group."""
        differences: dict[str, Any] = dict.fromkeys(("log_prob", "log_prob_se", "difference", "difference_se"))
        if self.failed is None:
            differences = _differences(self.scores, best.scores)
        row = {"group": group, "structure": self.label, "parameters": 0 if self.failed else self.parameters}
        return row | differences | {"chosen": self is best, "failed": self.failed}


def _splits(n: int, holdout: float, seed: int, excluded: int) -> list[np.ndarray]:
    """Booleans (N,) for each split, which networks are held out."""
    folds = int(holdout) if holdout >= 2 and holdout == int(holdout) else None
    if folds is not None and folds > n:
        raise UsageError(f"holdout: expected at most {n:,} folds, one for each network, found {folds:,}")
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


def _compared(
    candidates: Sequence[_Candidate],
    spec: WeightSpec,
    networks: _UsableNetworks,
    part: WeightSpec,
    tests: Sequence[np.ndarray],
) -> tuple[_Candidate, Structure] | None:
    """The first candidate with the highest mean score, and its fit to all networks; None if all fail."""
    sampled = [c for c in candidates if c.structure.needs_samples]
    data = networks.matrix(part) if sampled else None

    def blocks(size: int) -> Blocks:
        if data is None:
            return networks.blocks(part)
        return ((start, data[start : start + size]) for start in range(0, len(data), size))

    _score([c for c in candidates if c not in sampled], spec, lambda: blocks(_BLOCK), tests)
    for candidate in sampled:  # one by one, since each keeps its samples
        _score([candidate], spec, lambda: blocks(networks.n), tests)
    best = max((c for c in candidates if c.failed is None), key=lambda c: c.scores.mean(), default=None)
    if best is None:
        return None
    accumulator = best.accumulator(spec)
    for _, rows in blocks(networks.n if best in sampled else _BLOCK):
        accumulator.update(rows)
    return best, accumulator.finish()


def _score(
    candidates: Sequence[_Candidate], spec: WeightSpec, blocks: Callable[[], Blocks], tests: Sequence[np.ndarray]
) -> None:
    """Fit candidates to the other networks of each split and score them on the held-out ones, in two passes."""

    def alive() -> list[_Candidate]:
        return [c for c in candidates if c.failed is None]

    for c in alive():
        with c.attempt():
            c.fits = [c.accumulator(spec) for _ in tests]
    for start, rows in blocks() if alive() else ():
        for split, test in enumerate(tests):
            train = rows[~test[start : start + len(rows)]]
            for c in alive() if len(train) else ():
                with c.attempt():
                    c.fits[split].update(train)
    for c in alive():
        with c.attempt():
            c.fits = [accumulator.finish() for accumulator in c.fits]
            c.parameters, c.scores = c.fits[-1].parameters, np.zeros(len(tests[0]))
    for start, rows in blocks() if alive() else ():
        for split, test in enumerate(tests):
            here = np.flatnonzero(test[start : start + len(rows)])
            for c in alive() if len(here) else ():
                with c.attempt():
                    c.scores[start + here] = c.fits[split].log_prob(rows[here])
    for c in candidates:
        c.fits = []
        if c.failed is None:
            c.scores = c.scores[np.any(tests, axis=0)]
            if not np.isfinite(c.scores).all():
                c.failed = "a held-out network has no finite log-likelihood"


def _totals(table: Sequence[Mapping[str, Any]], scores: Sequence[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows that add the groups up, for candidates fitted in all of them; `scores` of each group by label."""
    if len(scores) < 2:
        return []
    sums = {label: np.sum([s[label] for s in scores], axis=0) for label in scores[0] if all(label in s for s in scores)}
    best = max(sums.values(), key=np.mean)
    rows = []
    for label, values in sums.items():
        chosen = label == _CHOSEN
        counts = (r["parameters"] for r in table if (r["chosen"] if chosen else r["structure"] == label))
        row = {"group": "(all)", "structure": label, "parameters": sum(counts), **_differences(values, best)}
        rows.append(row | {"chosen": chosen, "failed": None})
    return rows


def _differences(scores: np.ndarray, best: np.ndarray) -> dict[str, float]:
    """Means over networks, and their standard errors."""
    means = {"log_prob": scores, "difference": scores - best}
    out = {key: float(values.mean()) for key, values in means.items()}
    return out | {f"{key}_se": float(values.std(ddof=1) / np.sqrt(len(values))) for key, values in means.items()}


def fit_init(
    source: "str | Path | Population | Sequence[str | Path]",
    structure: Any = "auto",
    *,
    options: dict[str, Any] | None = None,
    trust: bool = False,
    **settings: Any,
) -> PopulationFit | NetworkFit:
    """Fit an initialiser to a population (`fit`) or to networks (`fit_network`, `fit_pretrained`).

    Args:
        source: a population or its folder, or a checkpoint: a file, a model folder, `hf://org/name`; for the structure
            "exchangeable" also a list of checkpoints.
        structure: as in `fit` or `fit_network`.
        options: the structure's.
        trust: run the code of one's own that `structure`, or the recipe of a population, names by a text
            (docs/what-runs-when.md).
        settings: of `fit`: `select`, `joint`, `holdout`, `seed`, `permutations`; or of `fit_pretrained`: `select`,
            `scale`.

    Raises:
        UsageError: if the structure is for the other kind of source, or `settings` are given for one network.
        DataError: as `fit` and `fit_network`.

    Example:
        >>> fit_init("efficientnet-lite0.pth", "filters", options={"kernel": 5}).save("filters.safetensors")
    """
    from weightscope.fits.one_network import NETWORK_FITS, fit_network  # torch
    from weightscope.population import Population, open_source  # h5py

    with trusting(trust):
        name = underscored(structure) if isinstance(structure, str) else None
        if isinstance(source, list | tuple) and len(source) == 1:
            (source,) = source
        if isinstance(source, Population) or is_population(source):
            population = open_source(source)
            source = f"{population.path}::0" if len(population) == 1 else population
        if isinstance(source, Population):
            if "scale" in settings:
                raise UsageError(f"scale: for checkpoints, and {source} is a population, whose scale is always kept")
            if name in NETWORK_FITS:
                known = ", ".join(("auto", *STRUCTURES))
                raise UsageError(f"structure: {name!r} is fitted to one network, and {source} is a population: {known}")
            return fit(source, structure=structure, options=options, **settings)
        if name == "exchangeable":
            from weightscope.fits.pretrained import fit_pretrained

            if odd := settings.keys() - {"select", "scale"}:
                raise UsageError(f"{listing(sorted(odd))}: for populations; networks take select and scale")
            _classes("exchangeable", options)
            return fit_pretrained(source, **settings, **(options or {}))
        if isinstance(source, list | tuple):
            raise UsageError(
                f"{structure}: expected one source, found {len(source)}; exchangeable takes several networks"
            )
        if name == "auto" or name in STRUCTURES or isinstance(structure, type):
            shown, known = name or structure.__name__, ", ".join((*NETWORK_FITS, "exchangeable"))
            raise UsageError(f"structure: {shown!r} needs a population (`import`), {source} is one network: {known}")
        if settings:
            raise UsageError(f"{', '.join(settings)}: for populations; {structure} of one network takes options only")
        return fit_network(source, structure, **(options or {}))


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """Texts `name=value`, each name once, as a dictionary; values in JSON (a number, true) are decoded."""
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
