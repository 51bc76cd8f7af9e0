"""Kronecker factorisations of covariances: one product, sums of products, and a test of separability."""

from weightscope.statistics.kronecker.factorisation import (
    MatrixNormal,
    TensorNormal,
    matrix_normal,
    nearest_kronecker,
    tensor_normal,
)
from weightscope.statistics.kronecker.separability import SeparabilityTest, separability_test
from weightscope.statistics.kronecker.sums import KroneckerSum, explained_variance, kronecker_sum

__all__ = [
    "KroneckerSum",
    "MatrixNormal",
    "SeparabilityTest",
    "TensorNormal",
    "explained_variance",
    "kronecker_sum",
    "matrix_normal",
    "nearest_kronecker",
    "separability_test",
    "tensor_normal",
]
