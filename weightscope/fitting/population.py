"""`fit`: structures fitted to the weights of a population, chosen by the likelihood of held-out networks."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np

from weightscope._util.checks import choice
from weightscope._version import __version__
from weightscope.artifacts.population_fit import Group, PopulationFit
from weightscope.errors import UsageError
from weightscope.fitting.held_out import CHOSEN, Candidate, best_of, rows_of, score, splits, totals
from weightscope.fitting.usable_networks import Entries, UsableNetworks, blocks_of
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightSamples
from weightscope.structures import STRUCTURES, Structure, structure_class

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
