"""Kill workers of a cluster at random while 64 real networks train; compare every shard with an undisturbed run's.

python tests/torture/kill_workers.py --backend dask --kills 12 --json results.json
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import clusters
import fake_training as fake
from plain_torture import report

from weightscope.errors import Resumable
from weightscope.population import Population
from weightscope.training.collection import collect


def recipe(networks, epochs):
    """Tiles of 4, each of which takes about a second and a half."""
    return fake.recipe(networks=networks, tile=4, training__epochs=epochs)


def under_fire(backend, workers, path, wanted, kills, seed):
    """Collect with killed workers, resuming where a tile lost too many; returns how many kills and resumptions."""
    resumed = 0
    with clusters.killing(backend, kills, pause=(0.2, 3.0), seed=seed) as killed:
        while True:
            try:
                collect(
                    wanted, path, workers=workers.count, backend=backend, scheduler=workers.scheduler, progress=False
                )
                return {"kills": len(killed), "resumed": resumed}
            except Resumable:
                resumed += 1


def shards_of(path):
    """Name -> bytes of every file in a population's folder of shards."""
    return {file.name: file.read_bytes() for file in sorted((path / "shards").iterdir())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["loky", "dask", "ray"], default="loky")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--networks", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun, total, rounds = time.monotonic(), {"kills": 0, "resumed": 0}, 0
    with tempfile.TemporaryDirectory() as folder, clusters.two_workers(options.backend) as workers:
        wanted = recipe(options.networks, options.epochs)
        collect(wanted, Path(folder) / "whole.pop", workers=1, progress=False)
        while total["kills"] < options.kills:
            path = Path(folder) / f"{rounds}.pop"
            left = options.kills - total["kills"]
            found = under_fire(options.backend, workers, path, wanted, left, options.seed + rounds)
            total = {key: total[key] + found[key] for key in total}
            rounds += 1
            Population(path).verify()
            if shards_of(path) != shards_of(Path(folder) / "whole.pop"):
                raise SystemExit(f"{options.backend}: round {rounds} differs from an undisturbed run")
    name = f"kill_workers {options.backend}"
    report(options.json, name, total | {"rounds": rounds, "differences": 0}, time.monotonic() - begun)


if __name__ == "__main__":
    main()
