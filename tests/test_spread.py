"""Every backend gives all tiles, and outlives workers that die, stop, hang or are lost altogether."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import clusters
import fake_training as fake
import pytest

from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.training import workers
from weightscope.training.workers import (
    ATTEMPTS,
    ClusterLost,
    Ended,
    TilesFailed,
    WorkerDied,
    Workers,
    spread,
)

pytestmark = pytest.mark.filterwarnings("default")  # what clusters warn of is their own affair


@pytest.fixture(params=["loky", "dask", "ray"], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Two worker processes; clusters are skipped where their packages are missing."""
    with clusters.two_workers(request.param) as found:
        yield found


def attempts(folder: Path, tile: int) -> int:
    return len((folder / str(tile)).read_text().splitlines())


# -- every backend ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_tiles_with_their_results_and_progress(backend: Workers, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    task = partial(fake.work, tmp_path, "none")
    found = dict(spread(task, [0, 2, 3, 4], backend, lambda *event: seen.append(event)))
    assert found == {0: 0, 2: 20, 3: 30, 4: 40}
    assert {tile for tile, _ in seen} <= {0, 2, 3, 4}
    assert {done for _, done in seen} <= {0.5}


@pytest.mark.slow
def test_a_tile_that_raises_does_not_stop_the_others(backend: Workers, tmp_path: Path) -> None:
    with pytest.raises(TilesFailed) as error:
        list(spread(partial(fake.work, tmp_path, "raises"), range(4), backend))
    assert {tile: (type(e), str(e)) for tile, e in error.value.errors.items()} == {1: (RuntimeError, "no such luck")}
    assert [attempts(tmp_path, tile) for tile in range(4)] == [1, 1, 1, 1]
    with pytest.raises(TilesFailed) as error:
        list(spread(partial(fake.train_tile_or_refuse, fake.recipe()), range(3), backend))
    assert isinstance(error.value.errors[1], DataError)
    assert str(error.value.errors[1]) == "tile 1 is broken"


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["dies", "stops", "hangs"])
def test_a_worker_in_trouble_is_noticed_and_its_tile_given_to_another(
    backend: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(workers, "HANGS_SECONDS", 4.0)
    monkeypatch.setattr(workers, "SILENT_SECONDS", 15.0 if trouble == "stops" else 60.0)
    begun = time.monotonic()
    try:
        found = dict(spread(partial(fake.work, tmp_path, trouble), range(4), backend))
    finally:
        clusters.kill_stopped(tmp_path / "1")
    assert found == {0: 0, 1: 10, 2: 20, 3: 30}
    assert attempts(tmp_path, 1) >= 2
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_a_poison_tile_is_given_up_and_the_others_finish(backend: Workers, tmp_path: Path) -> None:
    found = []
    with pytest.raises(TilesFailed) as error:
        found += [0 for _ in ()]
        for tile, _ in spread(partial(fake.work, tmp_path, "poison"), range(5), backend):
            found.append(tile)
    assert sorted(found) == [0, 2, 3, 4]
    assert list(error.value.errors) == [1]
    assert isinstance(error.value.errors[1], WorkerDied)
    assert [attempts(tmp_path, tile) for tile in range(5)] == [1, ATTEMPTS, 1, 1, 1]
