"""`products` of a Llama-shaped checkpoint of 1 GB against reading the same tensors and multiplying the factors.

    python benchmarks/products.py --json benchmarks/results/products.json

The checkpoint holds random float16 weights in one safetensors file, warm in the page cache. The peer reads the four
attention tensors of each layer with the `safetensors` package and multiplies `W_Q W_K^T` of every head and
`W_V W_O` of the layer, in float64 (as ours) or in float32, into a d x d matrix that it drops; it computes no statistic.
Ours answers with its whole table: every statistic of every head, of the values and outputs of every head, and of every
layer. Each contender runs in a process of its own with the same number of threads, in
turns for several rounds; memory is the process's peak above what it held after its imports. Ratios are ours over
peer, medians over rounds.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from reporting import in_own_process, memory, write
from safetensors.torch import save_file

from weightscope._util.environment import usable_cores
from weightscope.analysis.attention_products import products

# name -> d, heads, key/value heads, hidden units; layers follow from the size
SHAPES = {
    "multi-head, d = 2048": (2048, 16, 16, 5632),
    "grouped queries, d = 2048": (2048, 32, 4, 5632),
    "multi-head, d = 1024": (1024, 16, 16, 2816),
    "multi-head, d = 4096": (4096, 32, 32, 11008),
}


def make(folder: Path, shape: tuple[int, int, int, int], size: float) -> dict[str, Any]:
    """A checkpoint of about `size` bytes; returns its config."""
    d, heads, kv, hidden = shape
    sizes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d * kv // heads, d),
        "self_attn.v_proj": (d * kv // heads, d),
    }
    sizes |= {
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (hidden, d),
        "mlp.up_proj": (hidden, d),
        "mlp.down_proj": (d, hidden),
    }
    embedding = (min(32000, int(size / 8 / d / 2)), d)
    layer = 2 * sum(a * b for a, b in sizes.values())
    layers = max(1, round((size - 2 * embedding[0] * d) / layer))
    g = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(embedding, generator=g).half()}
    for i in range(layers):
        for name, both in sizes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = (torch.randn(both, generator=g) / d**0.5).half()
    config = {"model_type": "llama", "hidden_size": d, "num_attention_heads": heads, "num_key_value_heads": kv}
    config |= {"num_hidden_layers": layers, "rope_theta": 10000.0}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config


def ours(folder: Path) -> int:
    return len(products(folder, clip=64).records)


def peer(folder: Path, dtype: torch.dtype) -> int:
    """Read and multiply, one layer at a time; how many products."""
    config = json.loads((folder / "config.json").read_text())
    d, heads, kv = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    count = 0
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for i in range(config["num_hidden_layers"]):
            q, k, v, o = (file.get_tensor(f"model.layers.{i}.self_attn.{p}_proj.weight").to(dtype) for p in "qkvo")
            q, k = q.view(heads, -1, d), k.view(kv, -1, d)
            for head in range(heads):
                q[head].T @ k[head * kv // heads]
            v = v.view(kv, 1, -1, d).expand(kv, heads // kv, d // heads, d).reshape(-1, d)
            v.T @ o.T
            count += heads + 1
    return count


CONTENDERS: dict[str, Callable[[Path], int]] = {
    "ours": ours,
    "read and multiply, float64": lambda folder: peer(folder, torch.float64),
    "read and multiply, float32": lambda folder: peer(folder, torch.float32),
}


def worker(folder: Path, name: str, threads: int) -> None:
    """Time one contender in this process; prints seconds and memory as JSON."""
    torch.set_num_threads(threads)
    torch.linalg.svdvals(torch.linalg.qr(torch.randn(100, 50, dtype=torch.float64)).R)  # threads and libraries are up
    before = memory()["VmRSS"]
    start = time.perf_counter()
    CONTENDERS[name](folder)
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_mib": (memory()["VmHWM"] - before) / 2**20}))


def measure(folder: Path, rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in CONTENDERS:
            arguments = ("--worker", name, "--path", folder, "--threads", threads)
            for key, value in in_own_process(__file__, *arguments, threads=threads).items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


def rows_of(shape: str, config: dict[str, Any], size: int, found: dict[str, dict[str, list[float]]]) -> list[dict]:
    mine, rows = found["ours"], []
    for name in list(CONTENDERS)[1:]:
        ratios = [a / b for a, b in zip(mine["seconds"], found[name]["seconds"], strict=True)]
        rows.append(
            {
                "row": f"{shape}, {config['num_hidden_layers']} layers, {size / 1e9:.2f} GB: products, {name}",
                "ours": statistics.median(mine["seconds"]),
                "peer": statistics.median(found[name]["seconds"]),
                "unit": "seconds",
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "ours_peak_mib": max(mine["peak_mib"]),
                "peer_peak_mib": max(found[name]["peak_mib"]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=5e8, help="bytes of the checkpoint")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; repeat it")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.path, options.worker, options.threads)
        return
    rows = []
    for shape in options.shape or list(SHAPES)[:2]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = make(folder, SHAPES[shape], options.size)
            size = (folder / "model.safetensors").stat().st_size
            rows += rows_of(shape, config, size, measure(folder, options.rounds, options.threads))
        for r in rows[-2:]:
            low, high = r["ratio_range"]
            print(
                f"{r['row']:<95} {r['ours']:6.2f} s {r['peer']:6.2f} s  x{r['ratio']:.2f} ({low:.2f}-{high:.2f})  "
                f"{r['ours_peak_mib']:4.0f} {r['peer_peak_mib']:4.0f} MiB",
                flush=True,
            )
    write(options.json, rows, rounds=options.rounds, threads=options.threads, load=os.getloadavg())


if __name__ == "__main__":
    main()
