"""Helpers of the benchmarks: memory of the process, and results with their environment as JSON."""

import json
from pathlib import Path
from typing import Any

from weightscope._util.environment import environment


def memory() -> dict[str, int]:
    """Memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}


def write(path: Path | None, rows: list[dict[str, Any]], **about: Any) -> None:
    """Write rows and environment as JSON, unless the path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, "environment": environment() | about}, indent=1) + "\n")
