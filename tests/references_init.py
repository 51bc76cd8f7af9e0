"""Naive versions of what weightscope.init computes fast."""

import math

import numpy as np
import torch


def gauss(k, mx, my, s):
    """Fig. A.3: an unnormalised bump of variance s at column mx and row my of a k x k ring, entry by entry."""
    out = np.zeros((k, k))
    for i in range(k):
        for j in range(k):
            cx, cy = (j - mx - k // 2 - 1) % k, (i - my - k // 2 - 1) % k
            out[i, j] = np.exp(-0.5 * ((cx - k // 2) ** 2 + (cy - k // 2) ** 2) / s)
    return out


def conv_covariance(k, s):
    """Fig. A.3 in block form, then the rearrangement of Fig. A.4."""
    c = np.zeros((k * k, k * k))
    for i in range(k):
        for j in range(k):
            c[k * i : k * i + k, k * j : k * j + k] = gauss(k, j, i, s)
    z, ones = gauss(k, k // 2, k // 2, s), np.ones((k, k))
    static, mask = np.kron(ones, z), np.kron(z, ones)
    blocks = 0.5 * (mask * (c - static) + c * static)
    return blocks.reshape(k, k, k, k).transpose(0, 2, 1, 3).reshape(k * k, k * k)


def wrapped_bumps(k, s):
    """C alone, in matrix form: block (i, j) peaks at pixel (i, j)."""
    out = np.zeros((k * k, k * k))
    for i in range(k):
        for j in range(k):
            out[k * i + j] = gauss(k, j, i, s).reshape(-1)
    return out


def low_rank_product(matrix, rank):
    """The best approximation of a rank, by a full decomposition in float64."""
    u, s, vh = torch.linalg.svd(matrix.double())
    rank = min(rank, len(s))
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def product_statistics(product):
    """Diagonal mean and deviation, and the off-diagonal Frobenius norm over sqrt(d), of a (d, d) product."""
    diagonal = product.diagonal()
    rest = product - torch.diag(diagonal)
    return diagonal.mean().item(), diagonal.std().item(), (rest.norm() / math.sqrt(len(diagonal))).item()


def impulse_map(rows, columns, dy, dx):
    """Attention map whose token (y, x) looks at (y + dy, x + dx); rows whose target is outside are zero."""
    out = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
    for y in range(rows):
        for x in range(columns):
            if 0 <= y + dy < rows and 0 <= x + dx < columns:
                out[y * columns + x, (y + dy) * columns + x + dx] = 1
    return out


def impulse_adam(codes, target, k, steps, rate, start):
    """Algorithm 1 of the impulse paper: Adam on Q and K (d, k) for one head, from a start. Returns Q, K."""
    x = torch.nn.functional.layer_norm(codes.float(), codes.shape[1:])
    q, key = (value.clone().requires_grad_() for value in start)
    adam = torch.optim.Adam([q, key], lr=rate)
    for _ in range(steps):
        found = torch.softmax((x @ q) @ (x @ key).T / math.sqrt(k), dim=-1)
        adam.zero_grad()
        torch.nn.functional.mse_loss(found, target.float()).backward()
        adam.step()
    return q.detach(), key.detach()


def select_uniform(teacher, shape):
    """Algorithm 1 of the selection paper: evenly spaced slices along every axis."""
    out = teacher.clone()
    for axis, (s, t) in enumerate(zip(shape, teacher.shape, strict=True)):
        indices = torch.tensor([math.floor(i * t / s) for i in range(s)])
        out = out.index_select(axis, indices)
    return out


def resized(covariance, k, size):
    """Thesis 3.1.1, block by block and entry by entry: mean-pad or clip, bilinear over blocks, symmetric part."""
    blocks = {}
    for i in range(k):
        for j in range(k):
            picture = np.array([[covariance[k * i + j, k * l + m] for m in range(k)] for l in range(k)])  # noqa: E741
            out = np.full((size, size), picture.mean())
            shift = size // 2 - k // 2
            for y in range(size):
                for x in range(size):
                    if 0 <= y - shift < k and 0 <= x - shift < k:
                        out[y, x] = picture[y - shift, x - shift]
            blocks[i, j] = out
    matrix = np.zeros((size * size, size * size))
    for a in range(size):
        for b in range(size):
            y, x = (c * (k - 1) / (size - 1) if size > 1 else (k - 1) / 2 for c in (a, b))
            i, j = min(int(y), max(k - 2, 0)), min(int(x), max(k - 2, 0))
            up, left = min(i + 1, k - 1), min(j + 1, k - 1)
            u, v = y - i, x - j
            block = (1 - u) * (1 - v) * blocks[i, j] + (1 - u) * v * blocks[i, left]
            block = block + u * (1 - v) * blocks[up, j] + u * v * blocks[up, left]
            matrix[size * a + b] = block.reshape(-1)
    return (matrix + matrix.T) / 2
