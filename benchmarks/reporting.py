"""Helpers of the benchmarks: memory, contenders in their own processes, results with their environment as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from weightscope._util.environment import environment


def memory() -> dict[str, int]:
    """Memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}


def in_own_process(script: str, *arguments: object, threads: int | None = None) -> dict[str, float]:
    """The JSON that a script prints in a process of its own, so that its peak memory is that of one contender.

    Args:
        script: its file.
        arguments: of its command line.
        threads: of BLAS and OpenMP; None for the libraries' default.
    """
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    settings = os.environ | ({} if threads is None else dict.fromkeys(variables, str(threads)))
    command = [sys.executable, script, *map(str, arguments)]
    return json.loads(subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout)


def write(path: Path | None, rows: list[dict[str, Any]], **about: Any) -> None:
    """Write rows and environment as JSON, unless the path is None; says on which processor, as every ratio does."""
    found = environment()
    print(f"on {found['processor']}, {found['cores']} cores")
    if path is not None:
        rows = [row | {"processor": found["processor"]} if "ratio" in row else row for row in rows]
        save(path, rows, **about)


def save(path: Path, rows: list[dict[str, Any]], **about: Any) -> None:
    """Write rows and environment as JSON; the file is whole whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"rows": rows, "environment": environment() | about}, indent=1) + "\n")
    new.replace(path)
