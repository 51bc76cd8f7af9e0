"""What a linear mixture of filtered channels can reach: Proposition 1 of the impulse paper, by least squares."""

from dataclasses import dataclass

import numpy as np

from weightscope.errors import UsageError


@dataclass(frozen=True)
class Reach:
    """How well mixtures of filtered channels give arbitrary filters of the inputs.

    Attributes:
        residual: relative, `||Y - Y_fitted||_F / ||Y||_F`; zero where every filter can be reached.
        rank: of the coefficients (k f^2, D), the dimension of what can be reached.
        needed: k f^2, the dimension of all f x f filters of k images.
    """

    residual: float
    rank: int
    needed: int


def channel_mixing(images: np.ndarray, mixing: np.ndarray, filters: np.ndarray, targets: np.ndarray) -> Reach:
    """Fit `sum_j G_j z_j`, arbitrary filters G_j of k images, by channel weights w of filtered channels.

        min_w || sum_i w_i H_i x_i - sum_j G_j z_j ||,   x_i = sum_j a_ji z_j

    Each channel contributes a_ji h_i to the filter of image j, so what can be reached is the column space of the
    matrix (k f^2, D) of these coefficients: everything for D >= k f^2 generic filters, and at most k dimensions if
    all channels have one filter.

    Args:
        images: z (k, S, S), a basis of the inputs X.
        mixing: a (k, D), coordinates of the D channels in this basis.
        filters: h (D, f, f), f odd; the borders are padded with zeros.
        targets: g (m, k, f, f), filters to reach.

    Raises:
        UsageError: if shapes do not fit.

    Source: impulse paper, Eq. 1 to 3 and Proposition 1.

    Example:
        >>> channel_mixing(z, a, np.ones((36, 3, 3)), g).residual > 0.5  # box filters
        True
    """
    k, f = len(images), filters.shape[-1]
    if images.ndim != 3 or mixing.shape != (k, len(filters)) or filters.shape[1:] != (f, f) or f % 2 == 0:
        raise UsageError(
            "expected images (k, S, S), mixing (k, D) and filters (D, f, f) with f odd, found "
            f"{images.shape}, {mixing.shape} and {filters.shape}"
        )
    if targets.shape[1:] != (k, f, f):
        raise UsageError(f"targets: expected (m, {k}, {f}, {f}), found {targets.shape}")
    coefficients = (mixing[:, None, :] * filters.reshape(len(filters), -1).T[None]).reshape(k * f * f, -1)
    basis = _shifted(images, f).T  # (S^2, k f^2)
    wanted = basis @ targets.reshape(len(targets), -1).T
    channels = basis @ coefficients
    weights = np.linalg.lstsq(channels, wanted, rcond=None)[0]
    residual = float(np.linalg.norm(wanted - channels @ weights) / np.linalg.norm(wanted))
    return Reach(residual, int(np.linalg.matrix_rank(coefficients)), k * f * f)


def _shifted(images: np.ndarray, f: int) -> np.ndarray:
    """The images moved by each offset of an f x f filter, zeros from outside: (k f^2, S^2)."""
    r, size = f // 2, images.shape[1:]
    padded = np.pad(images, ((0, 0), (r, r), (r, r)))
    moved = [padded[:, y : y + size[0], x : x + size[1]] for y in range(f) for x in range(f)]
    return np.stack(moved, axis=1).reshape(len(images) * f * f, -1)
