"""`fit`: structures fitted to the weights of a population, chosen by the likelihood of networks held out."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from weightscope._util.seeding import Purpose, numpy_generator
from weightscope._version import __version__
from weightscope.artifacts.population_fit import FitResult, Group, labelled, load_artifact, varying_spec
from weightscope.artifacts.standalone import write_standalone
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.samples import WeightSamples, usable_chunks
from weightscope.structures import STRUCTURES, Structure, named

__all__ = ["FitResult", "Group", "Joint", "fit", "load_artifact", "write_standalone"]

Joint = Literal["tensor", "block", "all"]
# (structure, options, its held-out log-likelihoods (n,) or why it has none, parameters)
_Candidate = tuple[type[Structure], dict[str, Any], np.ndarray | str, int]
_CHOSEN = "chosen in each group"
_Split = tuple[np.ndarray, np.ndarray]


def fit(
    source: WeightSamples,
    select: str | Sequence[str] = "*.mlp.fc?.weight",
    *,
    structure: str | Sequence[str] = "auto",
    joint: Joint = "block",
    holdout: float = 0.2,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit structures to selected tensors and choose one for each group by held-out log-likelihood.

    Every candidate is fitted to the same networks and scored on the same others, so differences are paired. The
    best mean wins and is fitted again to all networks. A candidate that cannot be fitted stands in the table with
    the reason. Which tensors the initialiser will touch is what `select` says and nothing else. Entries that
    have one value in all networks (frozen filters) keep that value and are counted in the result; the density
    is that of the others. Diverged and non-finite networks are left out and counted. Memory: the selected
    weights in float32, and one group in float64.

    Args:
        source: a `Population` or an `WeightArray`.
        select: patterns as in `WeightSpec.select`.
        structure: `"auto"` for all of them, one name, or several.
        joint: what has one distribution together: each `"tensor"`, each `"block"` (tensors whose names agree
            up to the last two parts: `stages.0.blocks.0.mlp`), or `"all"`.
        holdout: share of networks to score on, between 0 and 1; or a whole number >= 2 of folds, and then
            every network is scored once.
        seed: which networks are held out.
        options: of the structure, if one is named: `{"rank": 8}` for `"low_rank"`. Without options a
            structure's usual ones are compared.

    Raises:
        UsageError: if an argument makes no sense or a pattern matches nothing.
        DataError: if there are too few usable networks, or no candidate can be fitted.

    Example:
        >>> result = fit(Population("digits.pop"), "*.mlp.fc?.weight")
        >>> print(result.text())
        >>> result.save("digits-mlp.safetensors")
    """
    structures, options = _asked(structure, options)
    if joint not in get_args(Joint):
        raise UsageError(f"joint must be one of {', '.join(get_args(Joint))}, found {joint!r}")
    spec = source.spec.select(select)
    if empty := [t.name for t in spec.tensors if not t.size]:
        raise UsageError(f"`{empty[0]}` has no entries; select tensors that have some")
    weights, excluded = _read(source, spec)
    splits = _splits(len(weights), holdout, seed, excluded)
    groups, table, scores = [], [], []
    for name, part in grouped(spec, joint).items():
        data = weights[:, spec.columns(part)].astype(np.float64)
        group, rows, values = _fit_group(name, part, data, structures, options, splits)
        groups.append(group)
        table += rows
        scores.append(values)
    settings = {
        "select": select if isinstance(select, str) else ",".join(select),
        "joint": joint,
        "holdout": holdout,
        "seed": seed,
        "held_out": sum(len(test) for _, test in splits),
    }
    table += _totals(table, [s for s in scores if s])
    return FitResult(spec, tuple(groups), tuple(table), len(weights), excluded, settings, _provenance(source))


def grouped(spec: WeightSpec, joint: Joint) -> dict[str, WeightSpec]:
    """The groups of tensors that have one distribution together, by name, in the spec's order."""
    if joint == "all":
        return {"all": spec}
    out: dict[str, list[str]] = {}
    for name in spec.names:
        block = ".".join(name.split(".")[:-2]) or name
        out.setdefault(name if joint == "tensor" else block, []).append(name)
    return {key: WeightSpec(spec[name] for name in names) for key, names in out.items()}


def _asked(
    structure: str | Sequence[str], options: Mapping[str, Any] | None
) -> tuple[list[type[Structure]], dict[str, Any] | None]:
    names = [structure] if isinstance(structure, str) else list(structure)
    classes = list(STRUCTURES.values()) if names == ["auto"] else [named(name) for name in names]
    if not classes:
        raise UsageError(f"no structure to fit; there are {', '.join(STRUCTURES)}")
    if options is None:
        return classes, None
    if len(classes) != 1:
        raise UsageError(f"options {dict(options)} need one structure by name, found {', '.join(names)}")
    if unknown := set(options) - set(classes[0].options):
        known = ", ".join(classes[0].options) or "none"
        raise UsageError(f"{classes[0].name} has no option {', '.join(sorted(unknown))}; its options are {known}")
    return classes, dict(options)


def _read(source: WeightSamples, spec: WeightSpec) -> tuple[np.ndarray, int]:
    """The usable networks (N, D) and how many were left out."""
    parts, excluded = [], 0
    for rows, diverged in usable_chunks(source, spec.names):
        finite = finite_rows(rows)
        excluded += diverged + int((~finite).sum())
        parts.append(rows if finite.all() else rows[finite])
    return np.concatenate(parts) if parts else np.empty((0, spec.size)), excluded


def _splits(n: int, holdout: float, seed: int, excluded: int) -> list[_Split]:
    """Pairs of (networks to fit to, networks to score on)."""
    folds = int(holdout) if holdout >= 2 and holdout == int(holdout) else None
    if folds is None and not 0 < holdout < 1:
        raise UsageError(f"holdout: expected a share between 0 and 1, or a whole number of folds >= 2, found {holdout}")
    scored = n if folds else round(n * holdout)
    least = n - -(-n // folds) if folds else n - scored
    if least < 2 or scored < 2:
        raise DataError(
            f"too few networks to choose a structure by: {n} usable ({excluded} excluded), of which {max(least, 0)} "
            f"would be fitted to and {scored} held out; both need at least 2"
        )
    order = numpy_generator(seed, 0, Purpose.STRUCTURE).permutation(n)
    tests = np.array_split(order, folds) if folds else [order[:scored]]
    everything = np.arange(n)
    return [(np.setdiff1d(everything, test), np.sort(test)) for test in tests]


def _fit_group(
    name: str,
    spec: WeightSpec,
    data: np.ndarray,
    structures: Sequence[type[Structure]],
    options: dict[str, Any] | None,
    splits: Sequence[_Split],
) -> tuple[Group, list[dict[str, Any]], dict[str, np.ndarray]]:
    varying = np.ptp(data, axis=0) > 0
    some_fixed = not varying.all()
    values, flags = (data[0], varying) if some_fixed else (None, None)
    if not varying.any():
        return Group(name, spec, None, {}, values, flags), [], {}
    inner = varying_spec(spec, varying) if some_fixed else spec
    data = data[:, varying] if some_fixed else data
    smallest = min(len(train) for train, _ in splits)
    candidates = [
        _score(cls, chosen, data, inner, splits)
        for cls in structures
        for chosen in ([options] if options is not None else cls.candidates(smallest, inner.size))
    ]
    best = _best(name, candidates)
    structure = best[0].fit(data, inner, **best[1])
    table = [_row(name, candidate, best) for candidate in candidates]
    scores = {labelled(c[0].name, c[1]): c[2] for c in candidates if not isinstance(c[2], str)}
    return Group(name, spec, structure, best[1], values, flags), table, scores | {_CHOSEN: best[2]}


def _score(
    cls: type[Structure], options: dict[str, Any], data: np.ndarray, spec: WeightSpec, splits: Sequence[_Split]
) -> _Candidate:
    scores, parameters = [], 0
    try:
        for train, test in splits:
            fitted = cls.fit(data[train], spec, **options)
            parameters = fitted.parameters
            scores.append(fitted.log_prob(data[test]))
    except (UsageError, DataError) as error:
        return cls, options, str(error), 0
    joined = np.concatenate(scores)
    if not np.isfinite(joined).all():
        return cls, options, "a held-out network has no finite log-likelihood", parameters
    return cls, options, joined, parameters


def _best(group: str, candidates: Sequence[_Candidate]) -> _Candidate:
    fitted = [c for c in candidates if not isinstance(c[2], str)]
    if not fitted:
        reasons = "; ".join(f"{labelled(c[0].name, c[1])}: {c[2]}" for c in candidates)
        raise DataError(f"`{group}`: no structure can be fitted: {reasons}")
    # Of equal ones the first, which has the fewest parameters.
    return max(fitted, key=lambda c: c[2].mean())


def _row(group: str, candidate: _Candidate, best: _Candidate) -> dict[str, Any]:
    cls, options, scores, parameters = candidate
    row = {"group": group, "structure": labelled(cls.name, options), "parameters": parameters}
    if isinstance(scores, str):
        empty = dict.fromkeys(("log_prob", "log_prob_se", "difference", "difference_se"))
        return row | empty | {"chosen": False, "failed": scores}
    return row | _compared(scores, best[2]) | {"chosen": candidate is best, "failed": None}


def _compared(scores: np.ndarray, best: np.ndarray) -> dict[str, float]:
    difference, root = scores - best, np.sqrt(len(scores))
    return {
        "log_prob": float(scores.mean()),
        "log_prob_se": float(scores.std(ddof=1) / root),
        "difference": float(difference.mean()),
        "difference_se": float(difference.std(ddof=1) / root),
    }


def _totals(table: Sequence[Mapping[str, Any]], scores: Sequence[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Rows that add the groups up, for the candidates that could be fitted in all of them."""
    if len(scores) < 2:
        return []
    sums = {label: sum(s[label] for s in scores) for label in scores[0] if all(label in s for s in scores)}
    best = max(sums.values(), key=np.mean)
    rows = []
    for label, values in sums.items():
        chosen = label == _CHOSEN
        counts = (r["parameters"] for r in table if (r["chosen"] if chosen else r["structure"] == label))
        row = {"group": "(all)", "structure": label, "parameters": sum(counts), **_compared(values, best)}
        rows.append(row | {"chosen": chosen, "failed": None})
    return rows


def _provenance(source: WeightSamples) -> dict[str, Any]:
    """What the source tells about itself; a plain array tells only its spec."""
    out: dict[str, Any] = {"weightscope": __version__, "network_spec": source.spec.fingerprint}
    if (path := getattr(source, "path", None)) is not None:
        out["source"] = os.path.basename(os.fspath(path))
    if (recipe := getattr(source, "recipe", None)) is not None:
        out["recipe"] = recipe.to_dict()
    return out
