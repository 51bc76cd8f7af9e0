"""`status` says how much of a run is trained, at what rate, and when it ends."""

import json
import os
import time

import fake_training as fake
import pytest
from click.testing import CliRunner

from weightscope.cli import cli
from weightscope.errors import DataError, UsageError
from weightscope.population import shards
from weightscope.training.status import status


def written(path, seconds_ago):
    """Let the shards of a population have been written so many seconds ago."""
    for tile, seconds in enumerate(seconds_ago):
        then = time.time() - seconds
        os.utime(shards.shard_file(path, tile), (then, then))


def test_the_rate_and_the_end_follow_from_the_times_of_the_shards(tmp_path):
    """Tiles of 8, one in ten minutes; of an earlier day's shards, only as many as are needed count."""
    path = tmp_path / "a.pop"
    fake.write_population(path, fake.recipe(networks=160), tiles=range(10))
    written(path, [90_000, *range(4800, -1, -600)])
    found = status(path)
    assert (found.trained, found.networks, found.complete) == (80, 160, False)
    assert found.per_hour == pytest.approx(48, rel=1e-3)
    assert found.hours_left == pytest.approx(80 / 48, rel=1e-3)
    assert "80 of 160 networks\nlast shard 0 s ago\n48 networks/hour; done about" in found.text()
    assert "(in 100 min)" in found.text()


def test_too_little_to_tell(tmp_path):
    for tiles in ([], [0]):
        fake.write_population(tmp_path / "a.pop", fake.recipe(), tiles=tiles)
        found = status(tmp_path / "a.pop")
        assert (found.per_hour, found.hours_left, found.complete) == (0, None, False)
        assert f"{8 * len(tiles)} of 20 networks" in found.text()


def test_a_benchmark(folder, tmp_path):
    """Two populations, of which one cannot be read."""
    bench = tmp_path / "bench" / "runs"
    bench.mkdir(parents=True)
    folder.rename(bench / "default.pop")
    found = CliRunner().invoke(cli, ["status", str(tmp_path / "bench"), "--json", str(tmp_path / "s.json")])
    assert found.exit_code == 0, found.output
    values = json.loads((tmp_path / "s.json").read_text())
    for each in (values, *values["populations"]):
        assert (each["trained"], each["complete"], each["hours_left"]) == (20, True, 0)
    with pytest.raises(UsageError, match="expected a population's folder"):
        status(tmp_path / "elsewhere")
    fake.write_population(bench / "other.pop", fake.recipe(networks=32), tiles=[0])
    found = status(tmp_path / "bench")
    assert (found.trained, found.networks, found.complete) == (28, 52, False)
    assert "other        8 of 32" in found.text()
    (bench / "broken.pop").mkdir()
    (bench / "broken.pop" / "population.json").write_text("{")
    assert "broken.pop/population.json: damaged, expected JSON" in str(status(tmp_path / "bench"))
    with pytest.raises(DataError, match="damaged"):
        status(bench / "broken.pop")
