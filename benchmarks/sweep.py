"""A sweep of 24 cells: the plan's estimate against the measured time, and resuming after SIGKILL.

    python benchmarks/sweep.py --json benchmarks/results/sweep.json

ConvNeXts of width 8 on the digits, 3 kernel sizes x 4 numbers of images x 2 rates, 2 initialisers, 3 seeds. The plan is
made first; the sweep is killed when a third of the tiles are on disk and run again, and the tiles of before the kill
must be unchanged. Times are wall times of tiles, on the machine as busy as it is; a tile that ends as the sweep is
killed may have none, and the estimate is for as many tiles as have one. About a minute.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import write

from weightscope._util.environment import usable_cores
from weightscope.benchmarking import bench, plan_bench
from weightscope.recipe import Recipe
from weightscope.training.collection import TileResult

SECONDS = "seconds.txt"
RECIPE = {
    "network": {"type": "convnext", "width": 8, "depth": 2, "patch_size": 1},
    "data": {"name": "digits", "test": 200},
    "training": {"epochs": 6},
    "population": {"networks": 3},
}
DESIGN: dict[str, Any] = {
    "inits": ["default", "mimetic_mlp(sigma=0.3)"],
    "vary": {
        "network.kernel_size": [3, 5, 7],
        "data.train": [200, 400, 800, 1400],
        "training.learning_rate": [0.01, 0.003],
    },
}


def sweep(folder: Path, workers: int, epochs: int) -> None:
    """Run the sweep, or what is left of it; the seconds of each tile are lines of a file beside the folder."""
    recipe = Recipe.parse(RECIPE).replace({"training.epochs": epochs})
    with (folder.parent / SECONDS).open("a") as file:

        def note(tile: TileResult) -> None:
            print(tile.seconds, file=file, flush=True)

        bench(recipe, out=folder, workers=workers, device="cpu", progress=False, on_tile=note, **DESIGN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", type=Path, help="run the sweep in this folder and nothing else")
    given = parser.parse_args()
    if given.only:
        sweep(given.only, given.workers, given.epochs)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "sweep"
        recipe = Recipe.parse(RECIPE).replace({"training.epochs": given.epochs})
        plan = plan_bench(recipe, out=folder, workers=given.workers, device="cpu", **DESIGN)
        command = [sys.executable, __file__, "--only", str(folder), "--workers", str(given.workers)]
        command += ["--epochs", str(given.epochs)]
        start = time.perf_counter()
        first = subprocess.Popen(command, start_new_session=True)
        while len(list(folder.rglob("*.h5"))) < 16 and first.poll() is None:
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        killed_after = time.perf_counter() - start
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.h5")}
        subprocess.run(command, check=True)
        after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.h5")}
        repeated = sum(after[path] != before[path] for path in before)
        seconds = [float(line) for line in (folder.parent / SECONDS).read_text().splitlines()]
        estimate = sum(row["seconds"] for row in plan.cells) * len(seconds) / len(after)
        found = {"tiles": len(after), "kept": len(before), "repeated": repeated, "killed_after": killed_after}
        found |= {"estimated": estimate, "measured": sum(seconds), "timed_tiles": len(seconds)}
    print(plan.summary())
    print(f"{found['kept']} of {found['tiles']} tiles when killed, {repeated} of them repeated")
    print(f"seconds of one worker, {len(seconds)} tiles: estimated {estimate:.0f}, measured {found['measured']:.0f}")
    write(given.json, [found])


if __name__ == "__main__":
    main()
