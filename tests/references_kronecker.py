"""Kronecker factorisations as one would first write them: loops, and gradient descent as the thesis used."""

import numpy as np
import torch


def rearranged(covariance, p, n):
    """R[(i, k), (j, l)] = Sigma[(i, j), (k, l)] by loops."""
    out = np.zeros((p * p, n * n))
    for i, k in np.ndindex(p, p):
        for j, l in np.ndindex(n, n):  # noqa: E741 - the formula's letter
            out[i * p + k, j * n + l] = covariance[i * n + j, k * n + l]
    return out


def gradient_descent(covariance, *, optimiser="adam", rate=0.01, steps=2000, target=0.0, seed=0):
    """A of Sigma ~ A (x) A by gradient descent on the mean squared error (thesis 3.1.1), from a random start.

    Stops after `steps`, or as soon as the relative squared error is at most `target`. Returns A, the relative squared
    error, and the number of steps.
    """
    sigma = torch.tensor(covariance)
    k, total = round(len(covariance) ** 0.5), float(np.sum(covariance**2))
    start = torch.randn(k, k, generator=torch.Generator().manual_seed(seed), dtype=sigma.dtype) / k**0.5
    a = (start * (total**0.25 / start.norm())).requires_grad_()
    if optimiser == "adam":
        method = torch.optim.Adam([a], lr=rate)
    else:
        method = torch.optim.SGD([a], lr=rate, momentum=0.9 if optimiser == "momentum" else 0.0)
    error = np.inf
    for step in range(steps):
        method.zero_grad()
        loss = (sigma - torch.kron(a, a)).square().mean()
        error = loss.item() * sigma.numel() / total
        if error <= target:
            return a.detach().numpy(), error, step
        loss.backward()
        method.step()
    with torch.no_grad():
        error = float((sigma - torch.kron(a, a)).square().sum()) / total
    return a.detach().numpy(), error, steps
