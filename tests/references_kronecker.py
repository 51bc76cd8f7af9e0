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


def gradient_descent(covariance, *, rate, steps, seed):
    """A of Sigma ~ A (x) A by Adam on the squared error (thesis 3.1.1), from a random start; its relative error."""
    sigma = torch.tensor(covariance)
    k, total = round(len(covariance) ** 0.5), float(np.sum(covariance**2))
    start = torch.randn(k, k, generator=torch.Generator().manual_seed(seed), dtype=sigma.dtype) / k**0.5
    a = (start * (total**0.25 / start.norm())).requires_grad_()
    method = torch.optim.Adam([a], lr=rate)
    for _ in range(steps):
        method.zero_grad()
        (sigma - torch.kron(a, a)).square().mean().backward()
        method.step()
    with torch.no_grad():
        return a.numpy(), float((sigma - torch.kron(a, a)).square().sum()) / total
