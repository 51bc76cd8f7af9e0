"""Group means: rows, columns and the whole of each matrix share random effects, the stripes of the MLP paper."""

import itertools
from collections.abc import Sequence
from typing import Self

import numpy as np

from weightscope.fits.structure import (
    Accumulator,
    Facts,
    Structure,
    choose_mean,
    frozen,
    matrix_shapes,
    require_variation,
)
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments


class _SquaredLengths:
    """The entries' moments, and the squared lengths of their deviations in the four spaces, summed: (tensors, 4)."""

    def __init__(self, spec: WeightSpec) -> None:
        self.moments, self.squares = EntryMoments(spec.size), np.zeros((len(spec), 4))
        self.tensors = list(zip(spec.slices.values(), matrix_shapes(spec), strict=True))

    def update(self, rows: np.ndarray) -> None:
        self.squares += self.about(self.moments.update(rows))

    def __iadd__(self, other: Self) -> Self:
        self.squares += other.squares + self.about(self.moments.merge(other.moments))
        return self

    def about(self, deviations: np.ndarray) -> np.ndarray:
        """The squared lengths of deviations (n, D) or (D,) in each space, summed over n."""
        rows = np.atleast_2d(deviations)
        return np.stack([_squares(rows[:, part].reshape(-1, *shape)).sum(axis=0) for part, shape in self.tensors])


class GroupMeans(Structure):
    r"""w_ij = mean_ij + g + r_i + c_j + e_ij for each tensor as a matrix (p, n); tensors are independent.

    The covariance s_e I + s_r I (x) 11^T + s_c 11^T (x) I + s_g 11^T (x) 11^T has four eigenspaces, those of the
    two-way layout: the residual, the rows' and the columns' contrasts and the overall mean, with eigenvalues

        l_e = s_e,   l_r = s_e + n s_r,   l_c = s_e + p s_c,   l_g = s_e + n s_r + p s_c + p n s_g.

    The maximum-likelihood estimate of each is the mean square of the deviations in its space, in closed form and
    positive: the covariance is always positive definite. The *components* s need not be positive. Where s_c < 0,
    column means vary less than those of independent entries, which no additive random effect can produce; nothing is
    clipped, and the diagnostics list all components and the negative ones. A vector counts as one row.

    `eigenvalues` has (l_e, l_r, l_c, l_g) of each tensor, (tensors, 4); zero where the space has no dimension.
    """

    name = "group_means"
    stored = ("eigenvalues",)
    needs_samples = False

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        eigenvalues: np.ndarray,
        parameters: int = 0,
        diagnostics: Facts = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.eigenvalues, self._shapes = frozen(eigenvalues), matrix_shapes(spec)
        self._dimensions = _dimensions(self._shapes)

    @classmethod
    def accumulator(cls, spec: WeightSpec) -> Accumulator:
        """Accumulates the entries' moments and the squared length of the deviations in each space."""

        def made(found: _SquaredLengths) -> GroupMeans:
            moments, shapes = found.moments, [shape for _, shape in found.tensors]
            mean, parameters, kinds = choose_mean(moments, spec)
            dimensions = _dimensions(shapes)
            eigenvalues = (found.squares / moments.n + found.about(moments.mean - mean)) / np.maximum(dimensions, 1)
            require_variation(eigenvalues[dimensions > 0], "group means or residuals")
            components = {n: _components(*each) for n, *each in zip(spec.names, eigenvalues, shapes, strict=True)}
            diagnostics = {
                "mean": kinds,
                "components": components,
                "negative_components": [f"{n}: {k}" for n, c in components.items() for k, v in c.items() if v < 0],
            }
            return cls(spec, mean, eigenvalues, parameters + int((dimensions > 0).sum()), diagnostics)

        return Accumulator(_SquaredLengths(spec), made)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(p, n) for each tensor."""
        return self._shapes

    def apply_root(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Noise split into the four spaces, each scaled by the root of its eigenvalue."""
        parts = []
        for roots, z in zip(np.sqrt(self.eigenvalues), noise, strict=True):
            residual, row, column, overall = _split(z)
            part = roots[0] * residual + roots[1] * row + roots[2] * column + roots[3] * overall
            parts.append(part.reshape(len(z), -1))
        return np.concatenate(parts, axis=1)

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """See `Structure.squares`."""
        value = np.zeros(len(deviations))
        for i, (part, shape) in enumerate(zip(self.spec.slices.values(), self._shapes, strict=True)):
            there = self._dimensions[i] > 0
            lengths = _squares(deviations[:, part].reshape(-1, *shape))[:, there]
            eigenvalues, dimensions = self.eigenvalues[i, there], self._dimensions[i, there]
            value += (lengths / eigenvalues).sum(axis=1) + float(dimensions @ np.log(eigenvalues))
        return value

    def covariance(self) -> np.ndarray:
        dense = np.zeros((self.spec.size, self.spec.size))
        for i, (part, (p, n)) in enumerate(zip(self.spec.slices.values(), self._shapes, strict=True)):
            spaces = [(np.eye(m) - np.full((m, m), 1.0 / m), np.full((m, m), 1.0 / m)) for m in (p, n)]
            pairs = itertools.product(*spaces)  # contrasts or mean of the rows, and of the columns
            dense[part, part] = sum(
                value * np.kron(*pair) for value, pair in zip(self.eigenvalues[i], pairs, strict=True)
            )
        return dense


def _split(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Projections of matrices (N, p, n): residual (N, p, n), row (N, p, 1), column (N, 1, n), overall (N, 1, 1)."""
    rows, columns = z.mean(axis=2, keepdims=True), z.mean(axis=1, keepdims=True)
    overall = rows.mean(axis=1, keepdims=True)
    return z - rows - columns + overall, rows - overall, columns - overall, overall


def _squares(z: np.ndarray) -> np.ndarray:
    """Squared length of matrices (N, p, n) in each of the four spaces, (N, 4)."""
    _, p, n = z.shape
    parts = zip(_split(z), (1, n, p, p * n), strict=True)
    return np.stack([np.sum(part**2, axis=(1, 2)) * times for part, times in parts], axis=1)


def _dimensions(shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Dimensions of the four spaces, (tensors, 4)."""
    return np.array([((p - 1) * (n - 1), p - 1, n - 1, 1) for p, n in shapes])


def _components(eigenvalues: np.ndarray, shape: tuple[int, int]) -> dict[str, float]:
    """Variance components of the additive model; those that are not identifiable (one row, one column) are omitted."""
    p, n = shape
    residual, row, column, overall = (float(v) for v in eigenvalues)
    if p == 1 or n == 1:
        # One of the contrasts is the residual; the other effect is the overall mean's.
        residual = column if p == 1 else row
        return {"residual": residual, "overall": (overall - residual) / (p * n)} if p * n > 1 else {"overall": overall}
    return {
        "residual": residual,
        "row": (row - residual) / n,
        "column": (column - residual) / p,
        "overall": (overall - row - column + residual) / (p * n),
    }
