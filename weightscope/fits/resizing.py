"""Fits to a population for networks of other widths and depths."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations as permutations_of
from math import floor, prod, sqrt

import numpy as np
from scipy.linalg import cholesky

from weightscope._util.names import BLOCK, block_of, listing
from weightscope.errors import AnatomyError, SpecError
from weightscope.fits.exchangeable import Exchangeable, mean_vector
from weightscope.fits.population_fit import Group, PopulationFit
from weightscope.spec import WeightSpec
from weightscope.statistics.exchangeable import invariant_parts
from weightscope.statistics.permutations import InvariantType, PermutationSpec, View, bare, is_signed, pairs_of

_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|word_embeddings|wte)\.weight")  # default std 1 at any width


@dataclass(frozen=True)
class _Plan:
    """What the tensors of the other network are made from."""

    structure: Exchangeable
    permutations: PermutationSpec  # of the other network's tensors
    origins: dict[str, View]  # view of the other network -> view of the fitted one
    ratios: dict[str, float]  # view -> its default std over its origin's, or 1


def default_stds(network: WeightSpec) -> dict[str, float]:
    """Standard deviation of the entries of each tensor in torch's default initialisation, or 0 where it is constant.

    Weights of linear and convolutional layers and their biases are uniform in +-1 / sqrt(fan_in), of std
    1 / sqrt(3 fan_in). Norms, LayerScales, positions and tokens count as 0: what they start from does not depend on
    the width. Takes all tensors of the network, since a bias has the fan-in of its layer's weight.
    """
    out = {}
    for name in network.names:
        layer, _, kind = name.rpartition(".")
        weight = f"{layer}.weight"
        shape = network[weight].shape if kind in ("weight", "bias") and weight in network else ()
        fan_in = prod(shape[1:]) if len(shape) > 1 and not _EMBEDDING.fullmatch(name) else 0
        out[name] = 1 / sqrt(3 * fan_in) if fan_in else 0.0
    return out


def tensors_by_depth(source: WeightSpec, target: WeightSpec) -> dict[str, str]:
    """Tensor of the target -> tensor of the source with the same name, in the block of nearest relative depth.

    Block i of L' takes block i (L - 1) / (L' - 1), rounded, half up; the first takes the first.
    """
    mine, theirs = depths(source), depths(target)
    out = {}
    for name in target.names:
        found, origin = BLOCK.fullmatch(name), name
        if found and (stack := found["stack"]) in mine:
            index = floor(int(found["index"]) * (mine[stack] - 1) / max(1, theirs[stack] - 1) + 0.5)
            origin = f"{stack}{index}{found['rest']}"
        if origin in source:
            out[name] = origin
    return out


def resized(
    structure: Exchangeable, network: WeightSpec, stds: Mapping[str, float] | None = None
) -> tuple[Exchangeable | None, dict[str, str]]:
    """The structure for the tensors of another network, all of whose tensors are given.

    Correlations are kept, and n' - 1 vectors are drawn in place of n - 1. Standard deviations and means are multiplied
    by the ratio of the default stds of the two networks (`default_stds`), by 1 where these are 0. With `stds`, view ->
    root mean square of its entries in the other network, each view has that root mean square instead, and only the
    ratios between its parts come from the structure.

    Blocks take the distribution of the block of nearest relative depth. Where m blocks take the same one, their
    normalised sum has its distribution, and so has each of their contrasts, independently of everything else:

        T = U C U^T + sum_a (I - u_a u_a^T) (x) C_aa,   u_a = (1, ..., 1) / sqrt(m_a)

    which is positive definite whenever C is: covariances between blocks are divided by sqrt(m_a m_b), those between
    blocks that took the same block are zero, and the sum of the branches is as strongly correlated with the rest of
    the network as it was.

    Returns the structure of the tensors that could be resized (None if there are none), with what was rescaled, taken
    from another depth and dropped under "resized" of its diagnostics; and tensor -> why it could not be resized.
    """
    tensors = {new: old for new, old in tensors_by_depth(structure.network, network).items() if old in structure.spec}
    permutations = _permutations(structure, network, tensors)
    views = {view.name: view for view in structure.permutations.parts}
    found = {v.name: views.get(tensors[v.tensor] + v.name[len(v.tensor) :]) for v in permutations.parts}
    problems = _missing(structure, network, set(tensors.values()))
    problems |= {v.tensor: p for v in permutations.parts if (p := _problem(v, found[v.name])) is not None}
    spec = WeightSpec(tensor for tensor in network.tensors if tensor.name in tensors and tensor.name not in problems)
    if not spec.tensors:
        return None, problems
    permutations = permutations.restrict(spec.names)
    origins = {v.name: origin for v in permutations.parts if (origin := found[v.name]) is not None}
    mine, theirs = default_stds(structure.network), default_stds(network)
    ratios = {}
    for view in permutations.parts:
        if stds is not None:
            now, before = stds[view.name], _root_mean_square(structure, permutations, view, origins[view.name])
        else:
            before, now = mine[tensors[view.tensor]], theirs[view.tensor]
        ratios[view.name] = now / before if now and before else 1.0
    plan = _Plan(structure, permutations, origins, ratios)
    factors, apart = _factors(plan)
    notes = _notes(plan, kept=stds is not None)
    if apart:
        notes.append(f"no covariance between {listing(apart, 2)}, which do not share units in the fitted network")
    diagnostics = structure.diagnostics | {"resized": notes}
    made = Exchangeable(spec, _mean(plan, spec), permutations, factors, structure.parameters, diagnostics, network)
    return made, problems


def _factors(plan: _Plan) -> tuple[list[np.ndarray], list[str]]:
    """The factor of each type, and the pairs of views whose covariance the fitted network does not have."""
    old, roots = plan.structure.permutations.types, plan.structure.factors
    starts = np.cumsum([0, *map(len, roots)])
    factors, apart = [], dict[str, None]()
    for kind in plan.permutations.types:
        rows, blocks = [], []
        for view in kind.views:
            origin = plan.origins[view.name]
            at = type_of(kind, view, origin, old)
            row = np.zeros((view.multiplicity, starts[-1]))  # of different types, rows are orthogonal
            row[:, starts[at] : starts[at + 1]] = plan.ratios[view.name] * roots[at][old[at].slices[origin.name]]
            rows.append(row)
            blocks.append((block_of(view.tensor), (block_of(origin.tensor), at)))
        times = Counter(taken for _, taken in set(blocks))
        weights = np.ones((len(rows), len(rows)))  # of the covariances between views, see `resized`
        for (i, (block, taken)), (j, (other, others)) in permutations_of(enumerate(blocks), 2):
            if block != other:
                weights[i, j] = 0.0 if taken == others else 1 / sqrt(times[taken] * times[others])
            if i < j and taken[1] != others[1]:
                apart[f"{kind.views[i].name} and {kind.views[j].name}"] = None
        root, copies = np.concatenate(rows), [len(row) for row in rows]
        factors.append(cholesky(weights.repeat(copies, 0).repeat(copies, 1) * (root @ root.T), lower=True))
    return factors, list(apart)


def type_of(kind: InvariantType, view: View, origin: View, types: Sequence[InvariantType]) -> int:
    """The number of the type that `kind` is for `origin`, which has the axes of `view` in another network."""
    there = dict(zip(view.axes, origin.axes, strict=True))
    groups = {there[group] for group in kind.groups}
    return next(i for i, found in enumerate(types) if set(found.groups) == groups)


def _root_mean_square(structure: Exchangeable, permutations: PermutationSpec, view: View, origin: View) -> float:
    """Of the entries of a view that is distributed as another view, without its mean."""
    total, old = 0.0, structure.permutations.types
    for kind in permutations.types:
        if view in kind.views:
            at = type_of(kind, view, origin, old)
            total += kind.dimension * float(np.square(structure.factors[at][old[at].slices[origin.name]]).sum())
    return sqrt(total / prod(view.shape))


def _missing(structure: Exchangeable, network: WeightSpec, taken: set[str]) -> dict[str, str]:
    """The tensors of the fit that the other network lacks, other than those of blocks that its depth leaves out."""
    mine, theirs = depths(structure.network), depths(network)
    out = {}
    for name in structure.spec.names:
        found = BLOCK.fullmatch(name)
        left_out = found and mine[found["stack"]] != theirs.get(found["stack"], mine[found["stack"]])
        if name not in taken and not left_out:
            out[name] = "is missing"
    return out


def depths(network: WeightSpec) -> dict[str, int]:
    """Stack of blocks -> how many there are."""
    out: dict[str, int] = {}
    for name in network.names:
        if found := BLOCK.fullmatch(name):
            out[found["stack"]] = max(out.get(found["stack"], 0), int(found["index"]) + 1)
    return out


def _permutations(structure: Exchangeable, network: WeightSpec, tensors: Mapping[str, str]) -> PermutationSpec:
    """The specification of the other network's tensors: by its names, or with the structure's axes."""
    from weightscope.anatomy.permutation_groups import permutation_spec  # imports torch

    try:
        known = permutation_spec(structure.network).restrict(structure.spec.names).views == structure.permutations.views
    except AnatomyError:
        known = False
    if known:
        return permutation_spec(network).restrict(tensors)
    if renamed := [new for new, old in tensors.items() if new != old]:
        raise SpecError(
            f"`{renamed[0]}`: another depth needs the permutation specification of a known architecture, found one of "
            "the user's own; other widths do not"
        )
    views = []
    for view in structure.permutations.views:
        if view.tensor in tensors:
            old, new = structure.spec[view.tensor].shape, network[view.tensor].shape
            if len(new) != len(old):
                raise SpecError(f"`{view.tensor}`: expected {len(old)} axes, found {new}")
            if view.strides and new != old:
                raise SpecError(f"`{view.tensor}`: expected {old}, as its permutations were derived for, found {new}")
            share = new[0] / old[0] if new else 1.0  # a view may be some rows of its tensor
            shape = view.shape if view.strides or not new else (round(view.shape[0] * share), *new[1:])
            offset = (round(view.offset[0] * share), *view.offset[1:]) if view.offset else ()
            views.append(replace(view, shape=shape, offset=offset))
    return PermutationSpec(tuple(views), structure.permutations.heads)


def _problem(view: View, origin: View | None) -> str | None:
    """Why a view cannot be distributed as another, or None."""
    if origin is None:
        return "has no counterpart in the fit"
    fixed = [[n for n, axis in zip(v.shape, v.axes, strict=True) if axis is None] for v in (origin, view)]
    kinds = [[axis if axis is None else is_signed(axis) for axis in v.axes] for v in (origin, view)]
    if fixed[0] == fixed[1] and kinds[0] == kinds[1]:
        return None
    return f"expected axes that are not renumbered of {tuple(fixed[0])} as in {origin.shape}, found {view.shape}"


def in_blocks(names: Iterable[str]) -> list[str]:
    """The names of tensors in numbered blocks."""
    return [name for name in names if BLOCK.fullmatch(name)]


def _mean(plan: _Plan, spec: WeightSpec) -> np.ndarray:
    """The mean (D,): each fixed entry's, times the ratio of stds."""
    structure, new = plan.structure, plan.permutations.types[0]
    if new.groups:  # signed tensors only
        return np.zeros(spec.size)
    slices = structure.permutations.types[0].slices
    part = next(invariant_parts(structure.mean[None], structure.spec, structure.permutations))[0]  # (C,)
    columns = []
    for view in new.views:
        origin = plan.origins[view.name]
        growth = sqrt(view.entries / origin.entries)  # of the entries that are averaged, as copies are equal
        columns.append(part[slices[origin.name]] * plan.ratios[view.name] * growth)
    return mean_vector(np.concatenate(columns), spec, plan.permutations)


def _notes(plan: _Plan, kept: bool) -> list[str]:
    """Which axes and stds changed, and which block is distributed as which, as lines of a report."""
    sizes, ratios = dict[str, None](), dict[str, list[str]]()
    for view in plan.permutations.parts:
        ratios.setdefault("kept" if kept else f"{plan.ratios[view.name]:.3g}", []).append(view.name)
        for axis, n, before in zip(view.axes, view.shape, plan.origins[view.name].shape, strict=True):
            if axis is not None and n != before and not pairs_of(axis):
                sizes[f"{bare(axis)} {before} -> {n}"] = None
    notes = [f"resized: {listing(list(sizes), 4)}"] if sizes else []
    notes += ["each tensor keeps its std"] if ratios.pop("kept", []) else []
    same = ratios.pop("1", [])
    notes += [f"stds x {ratio} (fan-in): {listing(names)}" for ratio, names in ratios.items()]
    notes += [f"stds kept: {listing(same)}"] if same and ratios else []
    taken = {block_of(v.tensor): block_of(plan.origins[v.name].tensor) for v in plan.permutations.parts}
    taken.pop("", None)
    times = Counter(taken.values())
    left = [name for name in dict.fromkeys(map(block_of, plan.structure.spec.names)) if name and name not in times]
    if any(new != old for new, old in taken.items()):
        notes.append("blocks by relative depth: " + ", ".join(f"{new} from {old}" for new, old in taken.items()))
    if many := [f"{old} {n} times" for old, n in times.items() if n > 1]:
        notes.append(
            f"taken more than once: {', '.join(many)}; covariances across blocks are divided by the square roots of "
            "these numbers, and dropped between blocks that took the same one"
        )
    return notes + ([f"blocks left out: {', '.join(left)}"] if left else [])


def resized_fit(result: PopulationFit, network: WeightSpec, stds: Mapping[str, float] | None = None) -> PopulationFit:
    """A fit for a network of another width or depth, all of whose tensors are given; see `resized`.

    Groups with the structure `exchangeable` are resized, unless they fit already and no `stds` are given; others
    stay as they are. The result can be saved like any other fit; its `problems` and `resized` say what
    could not be resized, and what was rescaled, taken from another depth, and dropped. A SpecError if the depth differs
    and the permutation specification does not follow from the names of a known architecture.

    Example:
        >>> wide = resized_fit(load_artifact("digits.safetensors"), WeightSpec.of(network))
        >>> print(wide.resized)
    """
    groups, problems, notes = list[Group](), dict[str, str](), list[str]()
    for group in result.groups:
        structure, made = group.structure, None
        if isinstance(structure, Exchangeable) and group.varying is None:
            taken = tensors_by_depth(structure.network, network).items()
            pairs = [(new, old) for new, old in taken if old in structure.spec]
            if stds is not None or any(n != o or network[n].shape != structure.spec[o].shape for n, o in pairs):
                try:
                    made, why = resized(structure, network, stds)
                    problems |= why
                except AnatomyError as error:
                    problems |= dict.fromkeys(structure.spec.names, f"cannot be resized: {error}")
        if made is not None:
            group = replace(group, spec=made.spec, structure=made)
            notes += made.diagnostics["resized"]
        groups.append(group)
    tensors = {tensor.name: tensor for group in groups for tensor in group.spec.tensors}
    order = [name for name in network.names if name in tensors] + [name for name in tensors if name not in network]
    spec = WeightSpec(tensors[name] for name in order)
    return replace(result, spec=spec, groups=tuple(groups), problems=problems, resized=tuple(dict.fromkeys(notes)))
