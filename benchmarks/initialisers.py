"""Initialisers against how they are published, in one run.

    python benchmarks/initialisers.py --json benchmarks/results/initialisers.json

Four rows:

- mimetic attention on a ViT-B/16 (12 layers, width 768, 12 heads), against one full singular value decomposition
  per head (queries and keys) and per layer (values and output). Contenders alternate layer by layer, so that a busy
  machine slows both; the statistics of both products are reported side by side.
- impulse attention for a ViT-T (12 layers, 3 heads, 256 tokens, width 192), against Algorithm 1 of the impulse paper:
  10,000 Adam steps at rate 1e-4 for every head. The peer's time is that of `--peer-heads` heads, scaled to 36, which
  the row says; errors are mean squared errors of the attention maps.
- the convolution covariance on ConvNeXt-Tiny's 18 depthwise layers, against the published loops and NumPy's
  `multivariate_normal`.
- `import weightscope.init` in fresh processes, on top of `import torch`.

Medians and ranges over rounds. Importing is always timed by the wall clock.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
import torch
from reporting import write
from torch import Tensor, nn

import weightscope.init as wi
from weightscope._util.environment import usable_cores
from weightscope._util.threads import one_thread
from weightscope.anatomy import attention, positions
from weightscope.anatomy.embedding import TokenGrid
from weightscope.init.attention import query_key, value_output
from weightscope.init.impulse_attention import attention_map, filter_offsets, impulse_matrix, normalised, solve
from weightscope.networks import ViT
from weightscope.networks.layers import sinusoidal_positions

HEADS, WIDTH, LAYERS = 12, 768, 12  # ViT-B/16
CONVNEXT_TINY = [(96, 3), (192, 3), (384, 9), (768, 3)]  # (channels, depthwise layers), 7 x 7 filters


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = clock()
    out = work()
    return clock() - start, out


def row(name: str, ours: list[float], peer: list[float], **more: Any) -> dict[str, Any]:
    """One row of the results: medians, ranges, and the median of the rounds' ratios."""
    ratios = [p / o for o, p in zip(ours, peer, strict=True)]
    return {
        "row": name,
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "ratio": statistics.median(ratios),
        "ours_range": [min(ours), max(ours)],
        "peer_range": [min(peer), max(peer)],
        "rounds": len(ours),
        "unit": "s",
        **more,
    }


# --- mimetic attention ------------------------------------------------------------------------------------------------


def published_pair(d: int, k: int, alpha: float, beta: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """One full decomposition, cut to k: the two factors (d, k) of thesis Eq. 3.14-3.18."""
    u, s, vh = torch.linalg.svd(torch.randn(d, d, generator=g) * (alpha / math.sqrt(d)) + beta * torch.eye(d))
    root = s[:k].sqrt()
    return u[:, :k] * root, vh[:k].T * root


Pair = tuple[Tensor, Tensor]


def published_layer(g: torch.Generator) -> tuple[list[Pair], Pair]:
    qk = [published_pair(WIDTH, WIDTH // HEADS, 0.7, 0.7, g) for _ in range(HEADS)]
    return qk, published_pair(WIDTH, WIDTH, 0.4, -0.4, g)


@one_thread()
def our_layer(g: torch.Generator) -> tuple[list[Pair], Pair]:
    k = WIDTH // HEADS
    qk = [query_key(WIDTH, k, 1, 0.7, 0.7, g) for _ in range(HEADS)]
    v, o = value_output(WIDTH, HEADS, HEADS, k, 0.4, 0.4, g)
    return [(q[0], key) for q, key in qk], (v.transpose(0, 1).reshape(WIDTH, WIDTH), o.reshape(WIDTH, WIDTH).T)


def products(layer: tuple[list[Pair], Pair]) -> dict[str, list[float]]:
    def of(product: Tensor) -> list[float]:
        diagonal = product.diagonal()
        rest = product - torch.diag(diagonal)
        return [diagonal.mean().item(), diagonal.std().item(), (rest.norm() / math.sqrt(len(diagonal))).item()]

    qk, (v, o) = layer
    return {"qk": np.mean([of(q @ key.T) for q, key in qk], axis=0).tolist(), "vo": of(v @ o.T)}


def mimetic_attention(rounds: int, layers: int) -> dict[str, Any]:
    ours, peer = [], []
    our_stats: list[dict[str, list[float]]] = []
    peer_stats: list[dict[str, list[float]]] = []
    g = torch.Generator().manual_seed(0)
    our_layer(g)
    published_layer(g)
    for _ in range(rounds):
        spent = [0.0, 0.0]
        for _ in range(layers):
            for i, (build, stats) in enumerate(((our_layer, our_stats), (published_layer, peer_stats))):
                seconds, layer = timed(lambda build=build: build(g))
                spent[i] += seconds
                stats.append(products(layer))
        ours.append(spent[0] * LAYERS / layers)
        peer.append(spent[1] * LAYERS / layers)

    def mean(stats: list[dict[str, list[float]]]) -> dict[str, list[float]]:
        return {part: np.mean([s[part] for s in stats], axis=0).tolist() for part in ("qk", "vo")}

    return row(
        "mimetic attention, ViT-B/16",
        ours,
        peer,
        statistics_of="diagonal mean, diagonal std, off-diagonal norm / sqrt(d)",
        ours_statistics=mean(our_stats),
        peer_statistics=mean(peer_stats),
        note=f"{layers} of {LAYERS} layers timed in each round and scaled",
    )


# --- impulse attention ------------------------------------------------------------------------------------------------


def algorithm_1(x: Tensor, target: Tensor, k: int, steps: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """The impulse paper's Algorithm 1 for one head."""
    d = x.shape[1]
    q, key = (torch.empty(d, k).uniform_(-1 / math.sqrt(d), 1 / math.sqrt(d), generator=g) for _ in range(2))
    q.requires_grad_()
    key.requires_grad_()
    adam = torch.optim.Adam([q, key], lr=1e-4)
    for _ in range(steps):
        found = torch.softmax((x @ q) @ (x @ key).T / math.sqrt(k), dim=-1)
        loss = nn.functional.mse_loss(found, target)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return q.detach(), key.detach()


def map_error(x: Tensor, q: Tensor, k: Tensor, target: Tensor) -> float:
    return (attention_map(x, q.to(x), k.to(x), k.shape[1] ** -0.5) - target).square().mean().item()


def impulse_attention(rounds: int, peer_heads: int, steps: int) -> dict[str, Any]:
    vit = ViT(image_size=32, patch_size=2, width=192, depth=12, heads=3, num_classes=10)
    tokens = TokenGrid(16, 16)
    x = normalised(positions(vit)[0].read())
    targets = {offset: impulse_matrix(tokens, offset).double() for offset in filter_offsets(3, True)}
    ours, errors, norms = [], [], []
    for seed in range(rounds):
        g = torch.Generator().manual_seed(seed)
        seconds, _ = timed(lambda g=g: wi.impulse_attention_(vit, generator=g))
        ours.append(seconds)
        for part in attention(vit):
            for q, k in zip(part.read("q").double(), part.read("k").double(), strict=True):
                errors.append(min(map_error(x, q, k, target) for target in targets.values()))
                norms.append(q.norm().item())
    heads, peer_errors, peer_norms = [], [], []
    offsets = [(0, 1), (1, 1), (-1, 0), (0, 0)][:peer_heads]
    algorithm_1(x.float(), targets[0, 0].float(), 64, 3, torch.Generator().manual_seed(0))  # imports torch's compiler
    for offset in offsets:
        work = (x.float(), targets[offset].float(), 64, steps, torch.Generator().manual_seed(0))
        seconds, (q, k) = timed(lambda work=work: algorithm_1(*work))
        heads.append(seconds * 10_000 / steps * 36)
        peer_errors.append(map_error(x, q, k, targets[offset]))
        peer_norms.append(q.norm().item())
    out = row("impulse attention, ViT-T/2 on 32 x 32", [statistics.median(ours)] * len(heads), heads)
    return out | {
        "ours_range": [min(ours), max(ours)],
        "rounds": len(ours),
        "ours_mse": {"median": statistics.median(errors), "max": max(errors)},
        "peer_mse": {"median": statistics.median(peer_errors), "max": max(peer_errors)},
        "ours_norm": statistics.median(norms),
        "peer_norm": statistics.median(peer_norms),
        "note": f"peer: {len(heads)} heads of {steps} steps timed, scaled to 36 heads of 10,000 steps",
    }


def offsets_5(rounds: int) -> dict[str, Any]:
    """What 5 x 5 offsets cost: all 25 of them, with no peer."""
    x = normalised(sinusoidal_positions(16, 16, 192))
    tokens, offsets = TokenGrid(16, 16), filter_offsets(5, True)
    times, errors = [], []
    for _ in range(rounds):
        seconds, solved = timed(lambda: solve(x, tokens, offsets, 64))
        times.append(seconds)
        errors = [map_error(x, *solved[o], impulse_matrix(tokens, o).double()) for o in offsets]
    out = row("impulse attention, all 25 offsets of 5 x 5", times, times, ours_mse={"max": max(errors)})
    return out | {"peer": None, "ratio": None, "peer_range": None}


# --- convolutions -----------------------------------------------------------------------------------------------------


def published_bump(k: int, mx: int, my: int, s: float) -> np.ndarray:
    out = np.zeros((k, k))
    for i, j in np.ndindex(k, k):
        x, y = (j - mx - k // 2 - 1) % k - k // 2, (i - my - k // 2 - 1) % k - k // 2
        out[i, j] = np.exp(-0.5 * (x**2 + y**2) / s)
    return out


def published_covariance(k: int, s: float) -> np.ndarray:
    c = np.zeros((k**2, k**2))
    for i, j in np.ndindex(k, k):
        c[k * i : k * i + k, k * j : k * j + k] = published_bump(k, j, i, s)
    z, ones = published_bump(k, k // 2, k // 2, s), np.ones((k, k))
    static, mask = np.kron(ones, z), np.kron(z, ones)
    blocks = 0.5 * (mask * (c - static) + c * static)
    return blocks.reshape((k,) * 4).transpose(0, 2, 1, 3).reshape((k**2,) * 2)


def published_filters(layers: list[nn.Conv2d], rng: np.random.RandomState) -> None:
    for i, conv in enumerate(layers):
        c, _, k, _ = conv.weight.shape
        d = i / (len(layers) - 1)
        cov = published_covariance(k, 0.15 + 0.25 * d + 0.5 * d**2)
        # the covariance is not positive semi-definite, which NumPy would warn of
        draws = rng.multivariate_normal(np.zeros(k**2), cov, size=c, check_valid="ignore")
        conv.weight.data = torch.tensor(draws.reshape(c, 1, k, k), dtype=conv.weight.dtype)


def convolutions(rounds: int) -> dict[str, Any]:
    layers = [nn.Conv2d(c, c, 7, groups=c, padding=3) for c, n in CONVNEXT_TINY for _ in range(n)]
    net = nn.Sequential(*layers)
    g, rng = torch.Generator().manual_seed(0), np.random.RandomState(0)
    wi.conv_covariance_(net, preset="imagenet-thawed", generator=g)
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(timed(lambda: wi.conv_covariance_(net, preset="imagenet-thawed", generator=g))[0])
        peer.append(timed(lambda: published_filters(layers, rng))[0])
    worst = max(np.abs(wi.conv_covariance(7, s) - published_covariance(7, s)).max() for s in (0.15, 0.5, 0.9))
    return row("conv covariance, ConvNeXt-Tiny", ours, peer, largest_difference=float(worst))


# --- import -----------------------------------------------------------------------------------------------------------


def importing(rounds: int) -> dict[str, Any]:
    code = "import time, torch; s = time.perf_counter(); import weightscope.init; print(time.perf_counter() - s)"
    times = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(rounds + 1)][1:]
    return row("import weightscope.init after torch", times, times) | {"peer": None, "ratio": None, "peer_range": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows and the environment to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3, help="layers of the ViT-B timed in each round, scaled to 12")
    parser.add_argument("--peer-heads", type=int, default=3, help="heads that Algorithm 1 solves, at most 4")
    parser.add_argument("--peer-steps", type=int, default=1_000, help="Adam steps for each, scaled to 10,000")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: seconds of this process, for a busy machine, with --threads 1",
    )
    args = parser.parse_args()
    global clock
    clock = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    threadpoolctl.threadpool_limits(args.threads, user_api="blas")
    results = [
        importing(args.rounds),
        convolutions(args.rounds),
        mimetic_attention(args.rounds, args.layers),
        impulse_attention(args.rounds, args.peer_heads, args.peer_steps),
        offsets_5(min(args.rounds, 3)),
    ]
    for r in results:
        peer = f"peer {r['peer']:10.4f} s   ratio {r['ratio']:8.1f}" if r["peer"] is not None else ""
        print(f"{r['row']:45s} ours {r['ours']:8.4f} s   {peer}")
    write(args.json, results, threads=args.threads, clock=args.clock)


if __name__ == "__main__":
    main()
