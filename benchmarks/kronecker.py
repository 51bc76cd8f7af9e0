"""Kronecker factorisation `Sigma ~ A (x) A` of filters' covariances: exact against gradient descent, in one run.

    python benchmarks/kronecker.py --json benchmarks/results/kronecker.json

The peer is what the thesis describes (section 3.1.1): gradient descent on the mean squared error, with torch, float64,
one thread. It prints neither step size nor number of steps, so the peer gets several chances, from slow to fast:

- plain descent at the best of the rates 0.01, 0.1 and 1, until the loss stops falling (relative change over 100 steps
  below 1e-9);
- Adam at torch's default rate, until the loss stops falling;
- Adam at the best of several rates for this very matrix, likewise;
- plain descent at the best of several rates in units of D^2 / |Sigma|_F (it then is power iteration), likewise;
- the fastest of all these and momentum, stopped by an oracle that knows the optimum as soon as its squared error is
  within one part in a million of it;
- L-BFGS with line search until it stops by itself.

The search for rates is not counted. The first two are the method as one would use it, and the claim; the others say
what is left of it against peers that the thesis does not mention or that were tuned for this very matrix.

Ours is one call of `nearest_kronecker(sigma, same=True)`, checks included. Covariances (81, 81): of 256 filters of
9 x 9 drawn from the closed-form covariance for three depths of a network (thesis Eq. 3.10), with sample noise as
trained filters have, and that covariance itself, which is not positive semi-definite. In each round everything runs in
turn. Residuals are |Sigma - A (x) A|_F / |Sigma|_F.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import write

from weightscope.init import conv_covariance
from weightscope.init.convolution import PRESETS, covariance_root
from weightscope.statistics.kronecker import nearest_kronecker

RATES = {
    "plain descent": (0.01, 0.1, 1.0),
    "Adam": (0.01, 0.03, 0.1),
    # In units of D^2 / |Sigma|_F, which makes the largest of them just unstable.
    "scaled descent": (0.015, 0.03, 0.06, 0.12, 0.25),
    "momentum": (0.015, 0.03, 0.06, 0.12, 0.25),
}
ORACLE = 1e-6  # of the optimal squared error
PLATEAU, WINDOW = 1e-9, 100


def covariances(k: int, filters: int) -> dict[str, np.ndarray]:
    """Name -> (k^2, k^2)."""
    rng = np.random.default_rng(0)
    found = {}
    for depth in (0.0, 0.5, 1.0):
        exact = conv_covariance(k, PRESETS["cifar-patch2"](depth))
        root = np.asarray(covariance_root(exact))
        found[f"{filters} filters, depth {depth:g}"] = np.cov(
            rng.standard_normal((filters, k * k)) @ root.T, rowvar=False
        )
    found["closed form, depth 1"] = exact
    return found


def residual(sigma: np.ndarray, a: np.ndarray) -> float:
    if not np.isfinite(a).all() or np.abs(a).max() > 1e6:  # it diverged
        return math.inf
    return float(np.linalg.norm(sigma - np.kron(a, a)) / np.linalg.norm(sigma))


def descend(
    sigma: np.ndarray, method: str, rate: float, steps: int, stop: Callable[[list[float]], bool]
) -> tuple[np.ndarray, int]:
    """A by gradient descent from a random start of the right norm, and the steps it took."""
    target = torch.from_numpy(sigma)
    k = math.isqrt(len(sigma))
    start = torch.randn(k, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (start * (target.norm().sqrt() / start.norm())).requires_grad_()
    if method == "Adam":
        optimiser: torch.optim.Optimizer = torch.optim.Adam([a], lr=rate)
    else:
        rate *= 1.0 if method == "plain descent" else target.numel() / float(target.norm())
        optimiser = torch.optim.SGD([a], lr=rate, momentum=0.9 if method == "momentum" else 0.0)
    losses: list[float] = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (target - torch.kron(a, a)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if stop(losses):
            break
        optimiser.step()
    return a.detach().numpy(), len(losses)


def lbfgs(sigma: np.ndarray) -> tuple[np.ndarray, int]:
    """A by torch's L-BFGS with line search, from the same start."""
    target = torch.from_numpy(sigma)
    k = math.isqrt(len(sigma))
    start = torch.randn(k, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (start * (target.norm().sqrt() / start.norm())).requires_grad_()
    options: dict[str, Any] = {"tolerance_grad": 1e-10, "tolerance_change": 1e-14, "line_search_fn": "strong_wolfe"}
    optimiser = torch.optim.LBFGS([a], max_iter=500, **options)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (target - torch.kron(a, a)).square().mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    return a.detach().numpy(), int(optimiser.state[a]["func_evals"])


def plateau(losses: list[float]) -> bool:
    if not math.isfinite(losses[-1]):
        return True
    return len(losses) > WINDOW and losses[-1 - WINDOW] - losses[-1] <= PLATEAU * losses[-1]


def oracle(sigma: np.ndarray) -> Callable[[list[float]], bool]:
    fit = nearest_kronecker(sigma, same=True)
    limit = float(np.sum(sigma**2)) * (1 - fit.explained) / sigma.size * (1 + ORACLE)
    return lambda losses: losses[-1] <= limit or not math.isfinite(losses[-1])


def peers(sigma: np.ndarray, steps: int) -> dict[str, Callable[[], tuple[np.ndarray, int]]]:
    """Name -> a run; rates are chosen here, once, and not timed."""

    def fewest(stop: Callable[[list[float]], bool], methods: Sequence[str]) -> tuple[str, float]:
        trials = {}
        for method in methods:
            for rate in RATES[method]:
                a, taken = descend(sigma, method, rate, steps, stop)
                trials[method, rate] = (round(residual(sigma, a), 6), taken)
        return min(trials, key=trials.__getitem__)

    plain, adam, scaled = (fewest(plateau, [method]) for method in ("plain descent", "Adam", "scaled descent"))
    stop = oracle(sigma)
    lucky = fewest(stop, ["Adam", "scaled descent", "momentum"])
    return {
        f"plain descent, rate {plain[1]:g}, to the plateau": lambda: descend(sigma, *plain, steps, plateau),
        "Adam, default rate, to the plateau": lambda: descend(sigma, "Adam", 1e-3, steps, plateau),
        f"Adam, tuned rate {adam[1]:g}, to the plateau": lambda: descend(sigma, *adam, steps, plateau),
        f"scaled descent, tuned rate {scaled[1]:g}, to the plateau": lambda: descend(sigma, *scaled, steps, plateau),
        f"{lucky[0]}, tuned rate {lucky[1]:g}, stopped by an oracle": lambda: descend(sigma, *lucky, steps, stop),
        "L-BFGS": lambda: lbfgs(sigma),
    }


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(name: str, sigma: np.ndarray, rounds: int, steps: int) -> list[dict[str, Any]]:
    contenders = peers(sigma, steps)
    exact = lambda: nearest_kronecker(sigma, same=True)  # noqa: E731
    exact()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer: [] for peer in contenders}
    found: dict[str, tuple[np.ndarray, int]] = {}
    for _ in range(rounds):
        ours.append(statistics.median(seconds(exact)[0] for _ in range(100)))
        for peer, work in contenders.items():
            taken, found[peer] = seconds(work)
            theirs[peer].append(taken)
    a = exact().rows
    rows = []
    for peer, times in theirs.items():
        ratios = [t / o for t, o in zip(times, ours, strict=True)]
        rows.append(
            {
                "row": f"{name}: exact, {peer}",
                "ours": statistics.median(ours),
                "peer": statistics.median(times),
                "unit": "seconds",
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "ours_residual": residual(sigma, a),
                "peer_residual": residual(sigma, found[peer][0]),
                "peer_steps": found[peer][1],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20_000, help="most steps of gradient descent")
    parser.add_argument("--size", type=int, default=9, help="k of k x k filters")
    parser.add_argument("--filters", type=int, default=256)
    parser.add_argument("--cases", type=int, default=1, help="only the first so many covariances")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, sigma in list(covariances(options.size, options.filters).items())[: options.cases]:
        for row in measure(f"({options.size**2}, {options.size**2}) {name}", sigma, options.rounds, options.steps):
            rows.append(row)
            low, high = row["ratio_range"]
            print(
                f"{row['row']:<85} {1e6 * row['ours']:5.0f} us {row['peer']:8.4f} s  x{row['ratio']:<8,.0f} "
                f"({low:,.0f}-{high:,.0f})  residual {row['ours_residual']:.7f} {row['peer_residual']:.7f}  "
                f"{row['peer_steps']} steps",
                flush=True,
            )
    write(options.json, rows, rounds=options.rounds, threads=1, load=os.getloadavg())


if __name__ == "__main__":
    main()
