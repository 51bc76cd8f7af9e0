"""The best approximation of given rank of a dense random matrix, faster than by a full decomposition.

The matrices of mimetic initialisation have a smooth, flat spectrum that is nearly the same for every draw. So the
part of it to suppress is known in advance, and a Chebyshev filter on a block of vectors (Zhou et al. 2006) finds the
leading singular vectors with matrix products alone.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

from weightscope.init._common import frame

_SAMPLE = 256  # size of the matrix whose spectrum is used for all sizes
_DECAY = math.log(2e5)  # damping of the suppressed part; leaves a relative error of about 5e-4 in the product
_RESIDUAL = 2e-3  # largest ||M^T M v - s^2 v|| / ||s^2|| that is accepted; typically 3e-4
_STEPS = 30  # more filter steps than this cost more than the full decomposition
_SMALL = 384  # below this size the full decomposition is cheap


@functools.lru_cache(maxsize=64)
def spectrum(alpha: float, beta: float, group: int = 1) -> tuple[float, ...]:
    """Squared singular values, largest first, of a small sample of `group` stacked matrices `alpha Z + beta I`.

    Their distribution does not depend on the size and hardly on the draw, so one fixed small sample represents it.
    Only the speed of `factors` depends on it.
    """
    g = torch.Generator().manual_seed(0)
    blocks = [torch.randn(_SAMPLE, _SAMPLE, generator=g) * (alpha / math.sqrt(_SAMPLE)) for _ in range(group)]
    for block in blocks:
        block.diagonal().add_(beta)
    return tuple(torch.linalg.svdvals(torch.cat(blocks)).square().tolist())


def factors(
    matrix: Tensor, rank: int, generator: torch.Generator | None, spectrum: tuple[float, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Balanced factors of the best approximation of a rank: `L R^T = U_r S_r V_r^T`, `L = U S^(1/2)`, `R = V S^(1/2)`.

    L is computed from M R, so that `L R^T = M V V^T` to rounding, however small a singular value is.

    Args:
        matrix: M (m, n), float32, m >= n.
        rank: r. Above n, the factors of rank n are spread over r columns by a random semi-orthogonal matrix.
        generator: draws that matrix.
        spectrum: squared singular values of a matrix like M, see `spectrum`; None decomposes in full. It only
            affects speed, apart from a relative error below 1e-3 in L R^T.

    Returns:
        L (m, r) and R (n, r).
    """
    n = matrix.shape[1]
    if rank > n:
        left, right = factors(matrix, n, generator)
        spread = frame(rank, n, generator=generator).T
        return left @ spread, right @ spread
    vectors = _filtered(matrix, rank, spectrum) if spectrum is not None else None
    if vectors is None:
        vectors = torch.linalg.eigh(_gram(matrix))[1][:, -rank:].flip(1)
    image = matrix @ vectors
    roots = image.norm(dim=0).sqrt().clamp_min(torch.finfo(matrix.dtype).tiny)
    return image / roots, vectors * roots


def _gram(matrix: Tensor) -> Tensor:
    """`M^T M` (n, n) from the products on and above its block diagonal, five eighths of the work."""
    n = matrix.shape[1]
    edges = [n * i // 4 for i in range(5)]
    out = matrix.new_empty(n, n)
    for start, end in itertools.pairwise(edges):
        out[start:end, start:] = matrix[:, start:end].T @ matrix[:, start:]
        out[end:, start:end] = out[start:end, end:].T
    return out


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis (n, b) of the span of columns (n, b): Cholesky QR twice (Yamamoto et al. 2015).

    Half the time of Householder's QR, which remains for columns that are too nearly dependent.
    """
    basis = columns
    for dtype in (torch.float64, torch.float32):
        wide = basis.to(dtype)
        root, failed = torch.linalg.cholesky_ex(wide.T @ wide)
        if failed:
            return torch.linalg.qr(columns)[0]
        basis = torch.linalg.solve_triangular(root, wide.T, upper=False).T.float()
    return basis


def _filtered(matrix: Tensor, rank: int, spectrum: tuple[float, ...]) -> Tensor | None:
    """Leading right singular vectors (n, rank), largest first, by a Chebyshev filter; None if that would be slower.

    With G = M^T M, block X and T_j the Chebyshev polynomial on the suppressed interval, Rayleigh-Ritz on the span
    of T_m(G) X and T_(m-1)(G) X. The distribution of `alpha Z + beta I` is invariant under orthogonal
    conjugation, so the first coordinates are as good a start as random vectors.
    """
    n = matrix.shape[1]
    if n < _SMALL or 6 * rank > n:
        return None
    kept, low, high = (spectrum[round(f * (len(spectrum) - 1))] for f in (rank / n, 1.0, 2 * rank / n))
    centre, half = (high + low) / 2, (high - low) / 2
    if half <= 0 or kept <= high:
        return None
    steps = math.ceil(_DECAY / math.acosh((kept - centre) / half))
    if steps > _STEPS:
        return None

    gram = _gram(matrix)
    step = gram.mul_(2 / half)  # 2 (G - centre I) / half, in place of G
    step.diagonal().sub_(2 * centre / half)
    before = torch.eye(rank, n)  # vectors are rows here, which makes the products faster
    block = step[:rank] / 2
    for _ in range(steps - 1):
        before, block = block, before.addmm_(block, step, beta=-1)
    scale = block.norm()  # the polynomials grow by many orders of magnitude
    basis = _orthonormal(torch.cat([block, before]).div_(scale).T)
    image = (step @ basis).mul_(half / 2).add_(basis, alpha=centre)  # G basis
    values, vectors = torch.linalg.eigh(basis.T @ image)
    vectors = vectors[:, -rank:].flip(1)
    out = basis @ vectors
    residual = image @ vectors - out * values[-rank:].flip(0)
    return out if residual.norm() <= _RESIDUAL * values[-rank:].norm() else None
