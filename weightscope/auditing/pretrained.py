"""Expectations of a fit to networks: the correlations between the parts of a model's matrices are those of the fit."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from weightscope.anatomy import NamedTensors
from weightscope.anatomy.places import Source
from weightscope.auditing.report import DECIDED, UNTOUCHED, Check, error_in
from weightscope.auditing.runs import DRAWS, Draws, Statistic, checked, gathered
from weightscope.errors import UsageError
from weightscope.fits import Exchangeable, load_artifact
from weightscope.fits.population_fit import PopulationFit
from weightscope.fits.pretrained import placed
from weightscope.statistics.exchangeable import invariant_parts
from weightscope.statistics.permutations import InvariantType


def expectations_of(artifact: str) -> Callable[[NamedTensors], list[Check]]:
    """The checks of a model by the artifact of `fit_pretrained`.

    For each kind of type, such as "channels x ~qk" of all blocks, the slope of the model's correlations r on those of
    the fit, rho, weighted by the type's dimension d,

        b = sum d rho r / sum d rho^2

    is 1 for what the artifact draws and 0 for independent entries; its interval is that of simulated networks. Kinds
    that are too small in the model to tell the two apart are left out, unless all are.
    """
    fit, name = load_artifact(artifact), Path(artifact).stem
    if not isinstance(fit, PopulationFit) or fit.scale is None:
        raise UsageError(f"audit: {artifact}: expected an exchangeable fit to checkpoints, found another fit")

    def checks(tensors: NamedTensors) -> list[Check]:
        model = Source({key: tensors.get(key) for key in tensors.names}, tensors)
        (structure,) = (group.structure for group in placed(fit, model).groups)
        assert isinstance(structure, Exchangeable)
        types, rho = structure.permutations.types, structure.correlations
        weights = structure.spec.pack(model.folded(structure.spec.names), np.float64)[None]
        parts = invariant_parts(weights, structure.spec, structure.permutations)
        flat = [x.reshape(-1, kind.multiplicity) for kind, x in zip(types, parts, strict=True)]
        found, rng = _slopes(types, rho, [x.T @ x for x in flat]), np.random.default_rng(0)

        def draw(share: float) -> dict[str, float]:
            """The slopes of a network whose correlations are a share of the fit's."""
            roots = [np.linalg.cholesky(share * r + (1 - share) * np.eye(len(r))) for r in rho]
            drawn = [_products(root, kind.dimension, rng) for root, kind in zip(roots, types, strict=True)]
            return _slopes(types, rho, drawn)

        def draws(share: float, runs: int) -> Draws:
            return gathered(one for _ in range(runs) for one in rows(draw(share)))

        def rows(slopes: Mapping[str, float]) -> list[Statistic]:
            return [Statistic("correlations", None, None, label, "slope", x, like=label) for label, x in slopes.items()]

        wrong = {UNTOUCHED: draws(0.0, DRAWS // 4), error_in("gain"): draws(0.8, DRAWS // 4)}
        out = checked(name, rows(found), draws(1.0, DRAWS), wrong)
        if not out:
            raise UsageError(f"audit: {artifact}: this fit has no correlations that a model could be tested for")
        return [check for check in out if check.power[UNTOUCHED] >= DECIDED] or out

    checks.__name__ = name
    return checks


def _slopes(
    types: Sequence[InvariantType], rho: Sequence[np.ndarray], products: Sequence[np.ndarray]
) -> dict[str, float]:
    """Kind of type -> the slope of correlations, from the products (C, C) of each type's parts."""
    sums: dict[str, np.ndarray] = {}
    for kind, wanted, product in zip(types, rho, products, strict=True):
        label = " x ".join(sorted(re.sub(r"\.\d+", "", group) for group in kind.groups))
        upper, scale = np.triu_indices(kind.multiplicity, 1), np.sqrt(product.diagonal())
        with np.errstate(invalid="ignore", divide="ignore"):  # a part without variation fails its check
            r = product / np.outer(scale, scale)
        both = wanted[upper] @ r[upper], wanted[upper] @ wanted[upper]
        sums[label] = sums.get(label, np.zeros(2)) + kind.dimension * np.array(both)
    return {label: float(above / below) for label, (above, below) in sums.items() if below > 0}


def _products(root: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """X^T X of samples X of N(0, root root^T): a Wishart matrix (Bartlett 1933), or drawn where these are few."""
    c = len(root)
    if samples <= c:
        drawn = root @ rng.standard_normal((c, samples))
    else:
        lengths = np.sqrt(rng.chisquare(samples - np.arange(c)))
        drawn = root @ (np.tril(rng.standard_normal((c, c)), -1) + np.diag(lengths))
    return drawn @ drawn.T
