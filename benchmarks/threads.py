"""Processor time of calls at the default number of threads, beside busy processes, against one thread.

    python benchmarks/threads.py --json benchmarks/results/threads.json

Each call runs in a process of its own, on a ViT-T, with and without `OMP_NUM_THREADS=1` in turns. Seconds are user and
system time of the call, first use of libraries included. Without a limit small problems wait for the slowest of several
threads, many times as long when other processes use the cores: `products` took 7 seconds in place of 0.7.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from reporting import write

CALLS = ("products", "audit", "impulse_attention")
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def call(name: str, depth: int) -> float:
    """Processor seconds of a call in this process."""
    import torch

    import weightscope
    from weightscope.init import impulse_attention_
    from weightscope.networks import ViT

    torch.manual_seed(0)
    model = ViT(image_size=224, patch_size=16, width=192, depth=depth, heads=3, num_classes=1000)
    before = resource.getrusage(resource.RUSAGE_SELF)
    if name == "products":
        weightscope.products(model)
    elif name == "audit":
        weightscope.audit(model, "mimetic_attention")
    else:
        impulse_attention_(model)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(name: str, depth: int, one_thread: bool) -> float:
    """Processor seconds of a call in a new process."""
    settings = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    settings |= dict.fromkeys(VARIABLES, "1") if one_thread else {}
    command = [sys.executable, __file__, "--call", name, "--depth", str(depth)]
    return float(json.loads(subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout))


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many processes beside the block that use a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, nargs="+", default=[2], help="numbers of busy processes")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--call", choices=CALLS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        print(call(args.call, args.depth))
        return
    rows = []
    for processes in args.busy:
        with busy(processes):
            for name in args.calls:
                pairs = [[measured(name, args.depth, one) for one in (False, True)] for _ in range(args.repeats)]
                ours, peer = map(list, zip(*pairs, strict=True))
                row = {"row": f"{name} beside {processes} busy processes", "unit": "processor seconds"}
                row |= {"ours": statistics.median(ours), "ours_range": [min(ours), max(ours)]}
                row |= {"peer": statistics.median(peer), "peer_range": [min(peer), max(peer)]}
                row |= {"ratio": row["ours"] / row["peer"]}
                print(f"{row['row']}: {row['ours']:.2f} s, one thread {row['peer']:.2f} s, ratio {row['ratio']:.2f}")
                rows.append(row)
    write(args.json, rows, depth=args.depth, repeats=args.repeats)


if __name__ == "__main__":
    main()
