"""What populations of 10^3 to 10^8 networks take, as a table, from one plan of `collect`.

    weightscope collect digits-convnext -o digits.pop -n 1000 --plan --price 0.05 --json plan.json
    python benchmarks/plan_table.py plan.json

Files, bytes, hours and cost are proportional to the tiles (arithmetic). Measured are the plan itself, and here the
listing of the files of 10^6 networks.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from weightscope._util.results import duration

SIZES = [10**k for k in range(3, 9)]
WORKERS = (2, 64, 1000)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    each = plan["tile_seconds"]
    print(f"| networks | files | GB | core-hours | cost | {' | '.join(f'{w} workers' for w in WORKERS)} |")
    print(f"|{'---:|' * (5 + len(WORKERS))}")
    for networks in SIZES:
        tiles = -(-networks // plan["tile"])
        hours, size = tiles * each / 3600, networks * plan["bytes_on_disk"] / plan["networks"] / 1e9
        times = " | ".join(duration(-(-tiles // workers) * each) for workers in WORKERS)
        left = f"{hours:,.3g} | {plan['price'] * hours:,.2f} | {times}"
        print(f"| {networks:,} | {2 * tiles + 1:,} | {size:,.3g} | {left} |")
    with tempfile.TemporaryDirectory() as folder:
        for k in range(2 * 10**6 // plan["tile"]):
            Path(folder, f"{k:07}.h5").touch()
        begun = time.perf_counter()
        found = sum(1 for _ in Path(folder).iterdir())
        print(f"listing {found:,} files: {time.perf_counter() - begun:.2f} s")


if __name__ == "__main__":
    main()
