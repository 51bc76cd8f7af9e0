"""Queries and keys whose attention map is an impulse: every token attends to the one at a fixed offset.

The map of a head depends on its offset only, so each offset is solved once. Three facts make that fast. Position
codes are smooth: all but a few of their singular values vanish, so the problem has about 20 dimensions instead of d.
Sinusoidal codes turn a shift into a rotation: with R the linear map that shifts codes, `(R Q_0, K_0)` attends to the
offset where `(Q_0, K_0)` attends to the token itself. And (Q R', K R') has the same logits for every orthogonal R',
so heads with one offset share a solution without sharing weights.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from weightscope._util.threads import single_threaded
from weightscope.anatomy.embedding import Offset, TokenGrid
from weightscope.errors import UsageError

_CUT = 1e-4  # singular values of the codes below this fraction of the largest are left out
_RIDGE = 0.1  # on the least squares problem of the shift, against codes of squared norm d
PENALTY = 1e-7  # on ||Q||^2 + ||K||^2, against the mean squared error of the map
ADAM_RATE = 1e-4  # impulse paper, section 4.2
_MEMORY = 20  # correction pairs of L-BFGS-B
_START_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def impulse_matrix(tokens: TokenGrid, offset: Offset) -> Tensor:
    """The target attention map H (N, N): row i is 1 at the token `offset` away, and zero if that is outside."""
    index = tokens.targets(offset)
    out = torch.zeros(tokens.total, tokens.total)
    rows = (index >= 0).nonzero()[:, 0]
    out[rows, index[rows]] = 1
    return out


def attention_map(codes: Tensor, query: Tensor, key: Tensor, scale: float, causal: bool = False) -> Tensor:
    """`softmax(scale X Q K^T X^T)` for codes X (N, d), Q and K (..., d, k): (..., N, N), rows sum to one."""
    logits = (codes @ query) @ (codes @ key).mT * scale
    return torch.softmax(_masked(logits) if causal else logits, dim=-1)


def normalised(codes: Tensor) -> Tensor:
    """Codes (N, d) after LayerNorm: rows of mean 0 and variance 1, float64; zero rows stay zero."""
    return torch.nn.functional.layer_norm(codes.double(), codes.shape[-1:], eps=1e-6)


def solve(
    codes: Tensor,
    tokens: TokenGrid,
    offsets: Sequence[Offset],
    head_width: int,
    *,
    scale: float | None = None,
    iterations: int = 100,
    shared_key: bool = False,
) -> dict[Offset, tuple[Tensor, Tensor]]:
    """Q and K for each offset, minimising `||softmax(scale X Q K^T X^T) - H||^2 / N^2 + 1e-7 (||Q||^2 + ||K||^2)`.

    The offset (0, 0) is solved from a multiple of the identity in the space of the codes, every other one from its
    solution, shifted; both by L-BFGS-B in one thread. The penalty keeps the norms below those that Adam ends with.
    Rows whose target is outside the image have no impulse: their best map is a flat one.

    Args:
        codes: X (N, d), the input of attention: position codes after LayerNorm, or another pseudo input.
        tokens: the grid of the N tokens.
        offsets: (dy, dx); token (y, x) attends to (y + dy, x + dx).
        head_width: k.
        scale: factor on the logits; None for `1 / sqrt(k)`.
        iterations: of L-BFGS-B per offset.
        shared_key: solve for Q only and give every offset the K of (0, 0), for heads that share a key.

    Returns:
        Offset -> (Q, K), each float64 (d, k), in the row-vector convention X @ Q. Columns beyond the rank of the
        codes are zero: rotate them (`Q @ R`, `K @ R`) before use.

    Raises:
        UsageError: if the codes do not match the tokens, or are all zero.

    Source: impulse paper, Eq. 8 and Algorithm 1, which takes 10,000 steps of Adam for every head.

    Example:
        >>> x = normalised(sinusoidal_positions(16, 16, 192))
        >>> q, k = solve(x, TokenGrid(16, 16), [(0, 1)], head_width=64)[0, 1]
    """
    if codes.ndim != 2 or len(codes) != tokens.total:
        raise UsageError(f"codes: expected one row for each of {tokens.total} tokens, found {tuple(codes.shape)}")
    import scipy.optimize  # noqa: F401 - half a second; loaded before the limit, which affects loaded libraries only

    with single_threaded():
        return _solved(codes.double(), tokens, offsets, head_width, scale, shared_key, iterations)


def span(codes: Tensor) -> Tensor:
    """Orthonormal directions V (r, d) of the codes X (N, d) that `solve` keeps; the others hardly occur in X.

    They are the right singular vectors with singular values above 1e-4 of the largest. `V^T V` projects on them.

    Raises:
        UsageError: if the codes are all zero.
    """
    return _coordinates(codes.double())[1]


def _coordinates(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The codes in the directions kept (N, r), and these directions (r, d)."""
    left, values, directions = torch.linalg.svd(codes, full_matrices=False)
    rank = int((values > _CUT * values[0]).sum())
    if rank == 0:
        raise UsageError("codes: expected position codes that differ from each other, found zeros")
    return left[:, :rank] * values[:rank], directions[:rank]


def by_adam(
    codes: Tensor, targets: Tensor, query: Tensor, key: Tensor, *, steps: int, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 as published: Adam at rate 1e-4 on `||softmax(scale X Q K^T X^T) - H||^2 / N^2`, without a penalty.

    Heads are independent problems that run side by side, except where they share a key, which then descends the sum
    of their errors. In one thread, so that the result does not depend on the machine's load.

    Args:
        codes: X (N, d).
        targets: H of each head (H, N, N), from `impulse_matrix`.
        query: Q of each head at the start (H, d, k).
        key: K at the start (G, d, k); heads h H/G to (h + 1) H/G - 1 share key h.
        steps: of Adam; 10,000 in the paper.
        scale: factor on the logits.
        causal: whether later tokens are masked.

    Returns:
        Q (H, d, k) and K (G, d, k), float32.

    Source: impulse paper, Eq. 8 and Algorithm 1.
    """
    x, wanted, group = codes.float(), targets.float(), len(query) // len(key)
    q, k = (value.detach().float().clone().requires_grad_() for value in (query, key))
    adam = torch.optim.Adam([q, k], lr=ADAM_RATE)
    with single_threaded(), torch.enable_grad():
        for _ in range(steps):
            found = attention_map(x, q, k.repeat_interleave(group, 0), scale, causal)
            loss = (found - wanted).square().mean((1, 2)).sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return q.detach(), k.detach()


def _solved(
    codes: Tensor,
    tokens: TokenGrid,
    offsets: Sequence[Offset],
    head_width: int,
    scale: float | None,
    shared_key: bool,
    iterations: int,
) -> dict[Offset, tuple[Tensor, Tensor]]:
    coordinates, directions = _coordinates(codes)
    problem = _Problem(coordinates, tokens, scale or 1 / math.sqrt(head_width), iterations)
    found = {}
    start = problem.start(min(len(directions), head_width))
    home = problem.polish((0, 0), start, start)
    for offset in dict.fromkeys(offsets):
        a, b = home
        if offset != (0, 0):
            a, b = problem.polish(offset, problem.shift(offset) @ a, b, move_key=not shared_key)
        found[offset] = _outer(a, directions, head_width), _outer(b, directions, head_width)
    return found


def _outer(factor: Tensor, directions: Tensor, head_width: int) -> Tensor:
    """A factor (r, k') in the space of the codes as a weight (d, k)."""
    weight = directions.T @ factor
    return torch.nn.functional.pad(weight, (0, head_width - weight.shape[1]))


def _balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (r, k) with the product a b^T and the smallest norms: U S^(1/2) and V S^(1/2)."""
    u, s, vh = torch.linalg.svd(a @ b.T)
    k = min(a.shape)
    roots, missing = s[:k].sqrt(), a.shape[1] - k
    left, right = (torch.nn.functional.pad(f[:, :k] * roots, (0, missing)) for f in (u, vh.T))
    return left, right


def _minimised(objective: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, iterations: int) -> Tensor:
    """A point with a smaller objective, after at most so many iterations of SciPy's L-BFGS-B.

    Args:
        objective: x -> (value, gradient of the shape of x).
        start: x, any shape, float64.
        iterations: most iterations; fewer when the objective no longer decreases.
    """
    from scipy.optimize import minimize

    def flat(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(torch.from_numpy(x).reshape(start.shape))
        return value, gradient.reshape(-1).numpy()

    found = minimize(
        flat,
        start.reshape(-1).numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxcor": _MEMORY, "ftol": 0.0, "gtol": 0.0},
    )
    return torch.from_numpy(found.x).reshape(start.shape)


def _masked(logits: Tensor) -> Tensor:
    n = logits.shape[-1]
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool, device=logits.device).triu(1), -math.inf)


class _Problem:
    """The fit of one attention map in coordinates Y (N, r) of the codes: logits `scale Y A B^T Y^T`."""

    def __init__(self, coordinates: Tensor, tokens: TokenGrid, scale: float, iterations: int) -> None:
        self.y, self.tokens, self.scale, self.iterations = coordinates, tokens, scale, iterations

    def start(self, k: int) -> Tensor:
        """A multiple of the identity (r, k) on the leading directions, the best of a few for the offset (0, 0)."""
        eye = torch.eye(self.y.shape[1], k, dtype=self.y.dtype)
        peak = (self.y[:, :k].square().sum(1).mean() * self.scale).item()
        index = self.tokens.targets((0, 0))
        trials = [eye * math.sqrt(s / peak) for s in _START_SCALES]
        losses = [self._evaluate(index, trial, trial)[0] for trial in trials]
        return trials[min(range(len(trials)), key=losses.__getitem__)]

    def shift(self, offset: Offset) -> Tensor:
        """The linear map (r, r) that takes codes nearest to those at the offset: ridge least squares.

        Tokens whose target is outside are mapped to zero, so that they attend to all tokens alike. Left out, they
        would end up at the code of some token near the edge, where the softmax is too steep to leave it.
        """
        index = self.tokens.targets(offset)
        there = self.y[index.clamp_min(0)] * (index >= 0)[:, None]
        ridge = _RIDGE * torch.eye(self.y.shape[1], dtype=self.y.dtype)
        return torch.linalg.solve(self.y.T @ self.y + ridge, self.y.T @ there)

    def polish(self, offset: Offset, a: Tensor, b: Tensor, move_key: bool = True) -> tuple[Tensor, Tensor]:
        """Minimise the objective by L-BFGS-B from (a, b)."""
        index = self.tokens.targets(offset)

        def both(x: Tensor) -> tuple[float, Tensor]:
            loss, *gradients = self._evaluate(index, x[0], x[1])
            return loss, torch.stack(gradients)

        def queries(x: Tensor) -> tuple[float, Tensor]:
            return self._evaluate(index, x, b)[:2]

        if move_key:
            return _balanced(*_minimised(both, torch.stack(_balanced(a, b)), self.iterations))
        return _minimised(queries, a, self.iterations), b

    def _evaluate(self, index: Tensor, a: Tensor, b: Tensor) -> tuple[float, Tensor, Tensor]:
        """Objective, in units where the uniform map scores about 1, and its gradients, in closed form."""
        n = len(index)
        unit = float(n)  # the uniform map has a mean squared error of 1/N
        u, v = self.y @ a, self.y @ b
        logits = (u @ v.T).mul_(self.scale)
        p = torch.softmax(_masked(logits) if self.tokens.causal else logits, dim=1)
        rows = (index >= 0).nonzero()[:, 0]
        error = p.clone()
        error[rows, index[rows]] -= 1
        penalty = PENALTY * unit
        loss = (error.square().sum() * (unit / n**2) + penalty * (a.square().sum() + b.square().sum())).item()
        error.mul_(p)
        error.sub_(p * error.sum(1, keepdim=True)).mul_(2 * unit / n**2 * self.scale)
        return loss, self.y.T @ (error @ v) + 2 * penalty * a, self.y.T @ (error.T @ u) + 2 * penalty * b
