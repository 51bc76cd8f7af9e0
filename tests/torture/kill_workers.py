"""Kill workers of a cluster at random while 64 real networks train; compare every shard with an undisturbed run's.

python tests/torture/kill_workers.py --backend dask --kills 12 --json results.json
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import clusters
import fake_training as fake
from plain_torture import options, report

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


def main():
    given = options(__doc__, backend="loky", kills=12, networks=64, epochs=60, seed=0)
    begun, total, rounds = time.monotonic(), {"kills": 0, "resumed": 0}, 0
    with tempfile.TemporaryDirectory() as folder, clusters.two_workers(given.backend) as workers:
        wanted = recipe(given.networks, given.epochs)
        collect(wanted, Path(folder) / "whole.pop", workers=1, progress=False)
        while total["kills"] < given.kills:
            path = Path(folder) / f"{rounds}.pop"
            left = given.kills - total["kills"]
            found = under_fire(given.backend, workers, path, wanted, left, given.seed + rounds)
            total = {key: total[key] + found[key] for key in total}
            rounds += 1
            Population(path).verify()
            if fake.files(path / "shards") != fake.files(Path(folder) / "whole.pop/shards"):
                raise SystemExit(f"{given.backend}: round {rounds} differs from an undisturbed run")
    name = f"kill_workers {given.backend}"
    report(given.json, name, total | {"rounds": rounds, "differences": 0}, time.monotonic() - begun)


if __name__ == "__main__":
    main()
