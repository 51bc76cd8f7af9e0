"""A trainer that obeys the tile rule and takes no time, for tests of what happens to tiles afterwards."""

import contextlib
import os
import pickle
import signal
import time
from concurrent.futures import BrokenExecutor, Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from weightscope import training
from weightscope._util import workers
from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.errors import DataError
from weightscope.population import manifest as manifests
from weightscope.population import shards
from weightscope.recipe import DataConfig, Recipe
from weightscope.spec import TensorSpec, WeightSpec

SPEC = WeightSpec(
    [
        TensorSpec("mlp.fc1.weight", (8, 4)),
        TensorSpec("mlp.fc1.bias", (8,)),
        TensorSpec("norm.running_mean", (4,), "statistic"),
        TensorSpec("mlp.fc2.weight", (4, 8)),
        TensorSpec("scale", ()),
    ]
)


def recipe(networks=20, tile=8, **changes):
    """The smallest sensible recipe; `training__epochs=3` changes a field."""
    plain = {
        "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3},
        "data": {"name": "digits", "train": 64, "test": 32},
        "training": {"epochs": 2, "batch_size": 32, "kernels": "torch"},
        "population": {"networks": networks, "tile": tile, "seed": 7},
    }
    return Recipe.parse(plain).replace({key.replace("__", "."): value for key, value in changes.items()})


def spec_of(_recipe):
    return SPEC


def vector(recipe, k, size=SPEC.size):
    """What network k's weights are, whatever was trained with it."""
    return numpy_generator(recipe.population.seed, k, Purpose.INIT).standard_normal(size).astype(np.float32)


def train_tile(recipe, tile, *, data_root=None, device="auto", kernels="torch", data_hash=None):
    size, epochs = recipe.population.tile, recipe.training.epochs
    numbers = range(tile * size, tile * size + size)
    spec = spec_of(recipe)
    weights = np.stack([vector(recipe, k, spec.size) for k in numbers])
    diverged = np.array([k % 9 == 5 for k in numbers])
    weights[diverged] = np.nan
    kept = recipe.population.snapshots
    accuracy = np.array([[k / 1000 + e for e in range(epochs)] for k in numbers], dtype=np.float32)
    return SimpleNamespace(
        index=tile,
        hits=None,
        speed=None,
        weights=weights,
        snapshots=None if kept is None else weights[:, None] * np.array(kept, np.float32)[:, None],
        metrics={
            "test_accuracy": accuracy,
            "learning_rate": np.full(size, 0.01),
            "init": np.zeros(size, dtype=np.int64),
            "diverged": diverged,
        },
    )


PROCESSES = workers.ENGINES["loky"]


@contextlib.contextmanager
def in_this_process(task, _workers, _running):
    """An engine without processes, for tests of what happens to tiles."""

    def submit(tile):
        future = Future()
        try:
            future.set_result(pickle.dumps((task(tile), None)))
        except Exception as error:  # noqa: BLE001 - as a worker
            future.set_result(pickle.dumps((None, error)))
        except SystemExit:
            future.set_exception(BrokenExecutor())
        return future

    yield submit


def use(monkeypatch, train_tile=train_tile, *, processes=False):
    """Put a trainer in place of the real one, in this process unless it is to run in others."""
    monkeypatch.setattr(training, "train_tile", train_tile)
    monkeypatch.setattr(training, "spec_of", spec_of)
    monkeypatch.setitem(workers.ENGINES, "loky", PROCESSES if processes else in_this_process)


def train_tile_and_die(recipe, tile, **options):
    """As a process that ends, in tile 1."""
    if tile == 1:
        raise SystemExit
    return train_tile(recipe, tile)


def write_population(path, recipe, tiles=None):
    """A population on disk without `collect`; only some of its tiles when they are given."""
    wanted = manifests.Manifest(recipe, SPEC, {"python": "3"}, recipe.population.networks)
    manifest, _ = manifests.create_or_match(path, wanted, resize=True)
    for tile in range(manifest.tiles) if tiles is None else tiles:
        shards.save(path, manifest, train_tile(recipe, tile), "cpu")
    return manifest


def files(path: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(p)[len(str(path)) + 1 :]: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


LARGE = WeightSpec([TensorSpec("w", (100_000,))])


def large_spec_of(_recipe):
    return LARGE


def train_large_tile(recipe, tile, **options):
    """A tile of a few megabytes, made faster than it is written."""
    trained = train_tile(recipe, tile)
    trained.weights = np.resize(trained.weights, (recipe.population.tile, LARGE.size))
    return trained


def collect_in_process(path, recipe, trainer="small", count=1, environment=()):
    """`collect` in a process group of its own, for tests that kill it. Exits as the command line does.

    With a count of 1, tiles are trained in this process.

    What it and its workers print goes to a file beside the population, unless it is in an object store.
    """
    from weightscope.errors import WeightscopeError
    from weightscope.training.collection import collect

    os.setpgid(0, 0)
    os.environ.update(environment)
    with open(path.with_suffix(".log") if isinstance(path, Path) else os.devnull, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    DataConfig.load = lambda *_: SimpleNamespace(fingerprint="0" * 16, examples=64)
    training.train_tile = {"small": train_tile, "large": train_large_tile, "slow": train_slowly}[trainer]
    if count == 1:
        workers.ENGINES["loky"] = in_this_process
    training.spec_of = large_spec_of if trainer == "large" else spec_of
    try:
        collect(recipe, path, workers=count)
    except WeightscopeError as error:
        print(error, flush=True)
        raise SystemExit(error.exit_code) from None


def train_slowly(recipe, tile, **options):
    time.sleep(0.3)
    return train_tile(recipe, tile)


def train_tile_or_refuse(recipe, tile, **options):
    if tile == 1:
        raise DataError("tile 1 is broken")
    return train_tile(recipe, tile)


def work(folder, trouble, tile):
    """A task that is in trouble at its first attempt at tile 1, or at every one if the trouble is "poison"."""
    with open(folder / str(tile), "a") as attempts:
        attempts.write(f"{os.getpid()}\n")
    if tile == 1 and (trouble == "poison" or len((folder / "1").read_text().splitlines()) == 1):
        if trouble == "raises":
            raise RuntimeError("no such luck")
        if trouble == "lasts":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * tile


def train_tile_or_raise(recipe, tile, **options):
    if tile % 2:
        raise RuntimeError("odd")
    return train_tile(recipe, tile)


def last(folder):
    """Give two workers something to do without end."""
    list(workers.spread(partial(work, Path(folder), "lasts"), [1, 2], workers.Workers("loky", 2)))
