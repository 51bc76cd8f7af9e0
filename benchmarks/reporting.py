"""Helpers of the benchmarks: memory, contenders in their own processes, results with their environment as JSON.

    python benchmarks/reporting.py benchmarks/results FOLDER

lists the rows of the second folder that are slower than in the first by more than a tenth, each as a ratio to its peer
in the same run; exits with 1 if there are any, or rows that only the first folder has.
"""

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


def speeds(folder: Path) -> dict[str, float]:
    """How many times as fast as its peer each row of a folder of results is."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        for row in json.loads(file.read_text()).get("rows", []):
            peer = row.get("peer", row.get("bare"))
            if peer is not None and "ours" in row and "unit" in row:
                name = row["row"].partition("the best loop (")[0]  # whichever it is
                ratio = row["ours"] / peer
                found[f"{file.name}: {name}"] = ratio if "per second" in row["unit"] else 1 / ratio
    return found


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("expected two folders of results")
    old, new = (speeds(Path(name)) for name in sys.argv[1:])
    slower = {name: new[name] / old[name] for name in old.keys() & new.keys() if new[name] < 0.9 * old[name]}
    for name, ratio in sorted(slower.items(), key=lambda item: item[1]):
        print(f"x{ratio:.2f}  {name}")
    missing = sorted(old.keys() - new.keys())
    print(*(f"missing  {name}" for name in missing), sep="\n", end="\n" * bool(missing))
    print(f"{len(old.keys() & new.keys())} rows compared, {len(slower)} slower by more than a tenth")
    raise SystemExit(bool(slower or missing))


if __name__ == "__main__":
    main()
