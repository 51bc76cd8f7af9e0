"""Limited-memory BFGS on one tensor, for small smooth problems.

`torch.optim.LBFGS` is not used because its first step imports the compiler stack, which takes seconds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_MEMORY = 20  # pairs kept
_DECREASE = 1e-4  # sufficient decrease of Armijo's rule (Nocedal and Wright 2006, Eq. 3.4)
_CURVATURE = 0.9  # of Wolfe's rule (Eq. 3.7a)
_TRIALS = 12  # steps tried on one line


def minimise(objective: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, iterations: int) -> Tensor:
    """A point with a smaller objective, after at most so many L-BFGS steps (Nocedal and Wright 2006, algorithm 7.5).

    Steps satisfy the weak Wolfe conditions, found by bisection (Lewis and Overton 2013, algorithm 2.6). Stops early
    when no step does.

    Args:
        objective: x -> (value, gradient of the shape of x).
        start: x, any shape, float64; not changed.
        iterations: most steps.
    """
    x = start.clone()
    value, gradient = objective(x)
    pairs: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(iterations):
        direction = _direction(gradient, pairs)
        step = 1.0 if pairs else min(1.0, 1.0 / max(float(gradient.abs().sum()), 1e-30))
        found = _line(objective, x, value, gradient, direction, step)
        if found is None:
            break
        moved, value, new_gradient = found
        s, y = moved - x, new_gradient - gradient
        curvature = float((s * y).sum())
        if curvature > 0:
            pairs = [*pairs[1 - _MEMORY :], (s, y, 1 / curvature)]
        x, gradient = moved, new_gradient
    return x


def _direction(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Minus the inverse Hessian estimate times the gradient, by the two-loop recursion (algorithm 7.4)."""
    q = -gradient
    weights = []
    for s, y, rho in reversed(pairs):
        weights.append(rho * float((s * q).sum()))
        q = torch.add(q, y, alpha=-weights[-1])
    if pairs:
        _, y, rho = pairs[-1]
        q = q / (rho * float((y * y).sum()))
    for (s, y, rho), weight in zip(pairs, reversed(weights), strict=True):
        q = torch.add(q, s, alpha=weight - rho * float((y * q).sum()))
    return q


def _line(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    x: Tensor,
    value: float,
    gradient: Tensor,
    direction: Tensor,
    step: float,
) -> tuple[Tensor, float, Tensor] | None:
    """A point along the direction that satisfies the weak Wolfe conditions, its value and gradient."""
    slope = float((gradient * direction).sum())
    if not slope < 0:
        return None
    low, high = 0.0, float("inf")
    best = None
    for _ in range(_TRIALS):
        trial = torch.add(x, direction, alpha=step)
        new_value, new_gradient = objective(trial)
        if not new_value <= value + _DECREASE * step * slope:
            high = step
        else:
            best = trial, new_value, new_gradient
            if float((new_gradient * direction).sum()) >= _CURVATURE * slope:
                return best
            low = step
        step = (low + high) / 2 if high < float("inf") else 2 * step
    return best
