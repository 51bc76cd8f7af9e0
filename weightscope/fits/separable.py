"""Gaussians whose covariance is a Kronecker product for each array of tensors: matrix normal, tensor normal."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import ClassVar, NamedTuple, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import UsageError
from weightscope.fits.structure import (
    Facts,
    Standalone,
    Structure,
    checked_data,
    checked_names,
    checked_root,
    fit_mean,
    matrix_shapes,
    require_variation,
)
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.kronecker import along, tensor_normal


class Array(NamedTuple):
    """Entries of a weight vector that form one array."""

    name: str  # its first tensor's
    shape: tuple[int, ...]  # (d_1, ..., d_K)
    columns: np.ndarray  # of weight vectors (N, D), in row-major order

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The array of each of the vectors (N, D): (N, d_1, ..., d_K)."""
        return rows[:, self.columns].reshape(-1, *self.shape)


class Separable(Structure):
    """x = mean + (L_1 (x) ... (x) L_K) z for each array of tensors; arrays are independent of each other.

    A subclass says which arrays there are, and names their axes, outermost first. `factors` are L_1, ..., L_K
    (d_k, d_k), lower triangular, each for all arrays; `roots` has them array by array. Fitted by maximum likelihood
    (`weightscope.statistics.kronecker.tensor_normal`, which says how many networks are necessary).
    """

    axes: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        *factors: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Facts = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.arrays = self.arrays_of(spec)
        self.roots = tuple(
            tuple(
                checked_root(root, f"{axis}.{i}", d)
                for axis, root, d in zip(self.axes, roots, array.shape, strict=True)
            )
            for i, (array, roots) in enumerate(zip(self.arrays, zip(*factors, strict=True), strict=True))
        )

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """The arrays that the tensors form; a UsageError if the structure is not for these tensors."""
        raise NotImplementedError

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec) -> Self:
        """Fit to (N, D)."""
        arrays = cls.arrays_of(spec)
        data = checked_data(data, spec)
        mean, parameters, kinds = fit_mean(data, spec)
        deviations, steps = data - mean, {}
        require_variation(np.mean(deviations**2, axis=0))
        factors: list[list[np.ndarray]] = [[] for _ in cls.axes]
        for array in arrays:
            fit = tensor_normal(array.read(deviations))
            for known, factor in zip(factors, fit.factors, strict=True):
                known.append(cholesky(factor, lower=True))
            parameters += sum(d * (d + 1) // 2 for d in array.shape) - len(array.shape) + 1
            steps[array.name] = fit.iterations if fit.converged else f"not converged after {fit.iterations}"
        notes = {"mean": kinds, "iterations": steps}
        return cls(spec, mean, *factors, parameters=parameters, diagnostics=notes)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(d_1, ..., d_K) for each array."""
        return tuple(array.shape for array in self.arrays)

    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """The factors times the noise, array by array."""
        out = np.empty((len(noise[0]), self.spec.size))
        for array, roots, z in zip(self.arrays, self.roots, noise, strict=True):
            for axis, root in enumerate(roots, 1):
                z = along(root.__matmul__, z, axis)
            out[:, array.columns] = z.reshape(len(out), -1)
        return out

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """See `Structure.squares`."""
        value = np.zeros(len(deviations))
        for array, roots in zip(self.arrays, self.roots, strict=True):
            white = array.read(deviations)
            for axis, root in enumerate(roots, 1):
                white = along(partial(solve_triangular, root, lower=True), white, axis)
            value += np.square(white.reshape(len(value), -1)).sum(axis=1)
            value += sum(2 * math.prod(array.shape) // len(root) * np.log(np.diag(root)).sum() for root in roots)
        return value

    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""
        dense = np.zeros((self.spec.size, self.spec.size))
        for array, roots in zip(self.arrays, self.roots, strict=True):
            dense[np.ix_(array.columns, array.columns)] = reduce(np.kron, [root @ root.T for root in roots])
        return dense

    def _arrays(self) -> dict[str, np.ndarray]:
        columns = zip(self.axes, zip(*self.roots, strict=True), strict=True)
        return {f"{axis}.{i}": root for axis, roots in columns for i, root in enumerate(roots)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], spec: WeightSpec, parameters: int = 0, diagnostics: Facts = None
    ) -> Self:
        """The inverse of `to_tensors`."""
        keys = [[f"{axis}.{i}" for i in range(len(cls.arrays_of(spec)))] for axis in cls.axes]
        checked_names(tensors, ["mean", *(key for names in keys for key in names)])
        factors = ([tensors[key] for key in names] for names in keys)
        return cls(spec, tensors["mean"], *factors, parameters=parameters, diagnostics=diagnostics)


class Kronecker(Separable):
    """W = M + A Z B^T for each tensor as a matrix (p, n): Cov(vec W) = A A^T (x) B B^T, row-major vec.

    A tensor with more than two axes counts as (first axis, all others): the covariance between a convolution's
    filters (x) that between pixels (thesis 3.1.1). Several tensors are independent of each other; one with fewer than
    two axes is a UsageError.
    """

    name = "kronecker"
    form = "kronecker"
    axes = ("rows", "columns")

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """Each tensor as a matrix."""
        if flat := [t.name for t in spec.tensors if len(t.shape) < 2 or 0 in t.shape]:
            raise UsageError(f"a Kronecker structure is for tensors of two or more axes, found `{flat[0]}`")
        columns = (np.r_[part] for part in spec.slices.values())
        return tuple(map(Array, spec.names, matrix_shapes(spec), columns))


_STANDALONE = '''

def _layers(group, a, randn):
    """One sample of a group: the same tensor of several layers as an array (L, p, n), noise times three factors."""
    x, stacks, start = a["mean"].clone(), {}, 0
    for name, shape, _ in group["spec"]:
        stacks.setdefault((re.sub(r"\\d+", "*", name), tuple(shape)), []).append(start)
        start += prod(shape)
    for j, places in enumerate(stacks.values()):
        layers, rows, columns = (a[f"{key}.{j}"] for key in ("layers", "rows", "columns"))
        z = rows @ randn(len(layers), len(rows), len(columns)) @ columns.T
        for start, part in zip(places, torch.tensordot(layers, z, 1).flatten(1)):
            x[start : start + len(part)] += part
    return x
'''


class TensorNormal(Separable):
    """Cov(vec X) = R_L (x) R_p (x) R_n for the tensors of one role and shape, stacked: X (L, p, n), row-major vec.

    The same tensor of several blocks (`blocks.0.mlp.fc2.weight`, `blocks.1.mlp.fc2.weight`, ...) has L layers; each as
    a matrix (p, n): first axis by all others, a vector as one row. R_L is the covariance between layers, R_p between
    rows, R_n between columns: a tensor normal of order three, a matrix normal where L = 1. Stacks are independent of
    each other; where no two tensors have one role and shape, there are none, a UsageError.

    Entries of the same place in two layers have the correlation of R_L. Hidden units of two blocks can be renumbered
    apart, so that in a population only means over them can be correlated; the structure `exchangeable` has these.
    """

    name = "tensor_normal"
    form = "tensor_normal"
    summary = "layers of one shape: covariance between layers (x) between rows (x) between columns"
    axes = ("layers", "rows", "columns")
    standalone = Standalone("import re\n", "_layers", _STANDALONE)

    @classmethod
    def arrays_of(cls, spec: WeightSpec) -> tuple[Array, ...]:
        """Tensors whose names differ in numbers only and whose shapes agree, in the spec's order."""
        stacks: dict[tuple[str, tuple[int, ...]], list[TensorSpec]] = {}
        for tensor in spec.tensors:
            stacks.setdefault((re.sub(r"\d+", "*", tensor.name), tensor.shape), []).append(tensor)
        if all(len(layers) < 2 for layers in stacks.values()):
            raise UsageError(
                "a tensor normal is for tensors of one name and shape in several layers, found no two of them "
                f"among {len(spec)} tensors"
            )
        specs = [WeightSpec(layers) for layers in stacks.values()]
        return tuple(Array(s.names[0], (len(s), *matrix_shapes(s)[0]), spec.columns(s)) for s in specs)
