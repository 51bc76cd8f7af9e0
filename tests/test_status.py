"""`status` says what files tell of a run: what is trained, by whom, what failed, and when it ends."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import fake_training as fake
import pytest
from click.testing import CliRunner

from weightscope.cli import cli
from weightscope.errors import DataError, Resumable, UsageError
from weightscope.population import Population
from weightscope.training.collection import collect
from weightscope.training.status import RUNNING, forget, marked, status


def age(path: Path, tile: int, seconds: float):
    """Make the last heartbeat of a tile older."""
    file = path / RUNNING / f"{tile:05d}.json"
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_a_tile_in_training(tmp_path, monkeypatch):
    """Tile 0 is trained, tile 1 half way after an hour, tile 2 has lost its worker: 8 networks of 20."""
    path, seen = tmp_path / "a.pop", []

    def train_tile(recipe, tile, *, progress, **options):
        if tile == 1:
            file = path / RUNNING / "00001.json"
            mark = json.loads(file.read_text()) | {
                "begun": time.time() - 3600,
                "start": 0.1,
                "done": 0.5,
                "seconds": 3600,
            }
            file.write_text(json.dumps(mark))
            (path / RUNNING / "00002.json").write_text(json.dumps(mark | {"tile": 2}))
            age(path, 2, 120)
            seen.append(status(path))
            age(path, 2, 0)
            assert [row["state"] for row in status(path).rows()] == ["running", "running"]
            ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)
            (path / RUNNING / "00002.json").write_text(json.dumps(mark | {"tile": 2, "process": int(ended.stdout)}))
            assert [row["why"] for row in status(path).rows()] == ["its process has ended", ""]
        return fake.train_tile(recipe, tile, progress=progress, **options)

    fake.use(monkeypatch, train_tile)
    collect(fake.recipe(), path, workers=1)
    [found] = seen
    assert (found.trained, found.networks, found.complete) == (8, 20, False)
    assert [(row["tile"], row["state"], row["done"]) for row in found.rows()] == [
        (2, "silent", 0.5),
        (1, "running", 0.5),
    ]
    row = found.rows()[1]
    assert (row["step"], row["steps"]) == (5, 10)
    assert found.per_hour == pytest.approx(0.4 * 8)  # without what was done before the first step
    assert found.hours_left == pytest.approx(0.5 / 0.4 + 1 / 0.4)  # tile 2 begins when tile 1 ends
    assert found.metrics["test_accuracy"] == pytest.approx(
        Population(path).metrics["test_accuracy"][[*range(5), 6, 7], -1].mean()
    )
    assert f"{os.getpid()}" in found.text()
    assert "tiles: 1 running, 1 silent, 1 to train" in found.text()
    assert "running  5 of 10" in found.text()
    end = status(path)
    assert end.complete
    assert not end.rows()
    assert not (path / RUNNING).exists()


def test_a_tile_that_failed_says_why_until_it_is_trained(tmp_path, monkeypatch):
    def train_tile(recipe, tile, **options):
        if tile == 1:
            raise RuntimeError("no memory; " * 12)
        return fake.train_tile(recipe, tile, **options)

    fake.use(monkeypatch, train_tile)
    with pytest.raises(Resumable):
        collect(fake.recipe(), tmp_path / "a.pop", workers=1)
    found = status(tmp_path / "a.pop")
    [row] = found.rows()
    assert (row["tile"], row["state"], row["why"]) == (1, "failed", "RuntimeError: " + "no memory; " * 12)
    assert all(len(line) <= 80 for line in found.text().partition("\n\n")[2].splitlines())
    assert found.text().count("memory;") == 12
    assert found.hours_left is None
    assert "tiles: 1 failed, 1 to train" in found.text()
    fake.use(monkeypatch)
    collect(fake.recipe(), tmp_path / "a.pop", workers=1)
    assert status(tmp_path / "a.pop").complete


def test_marks_that_are_none(folder):
    """Damaged or foreign files in the folder of marks, and marks of tiles that are trained or do not exist."""
    (folder / "shards" / "00002.h5").unlink()
    marks = folder / RUNNING
    marks.mkdir()
    good = {"tile": 2, "host": "a", "process": 1, "begun": 0.0, "done": 0.5, "start": 0.0, "seconds": 1}
    texts = ["", "{", "[]", "7", json.dumps(good | {"tile": 0}), json.dumps(good | {"tile": 99}), "\0" * 100_000]
    texts += [json.dumps({key: value for key, value in good.items() if key != left}) for left in good]
    texts += [json.dumps(good | {"done": done}) for done in (float("nan"), 1e9, -1)]
    texts += [json.dumps(good | {"start": start}) for start in (1e-300, -1)]
    texts += [json.dumps(good | {"begun": begun}) for begun in (1e300, float("inf"), 10**400)]
    for i, text in enumerate([*texts, json.dumps(good)]):
        (marks / f"{i:05d}.json").write_text(text)
    os.mkfifo(marks / "00050.json")
    assert [row["tile"] for row in status(folder).rows()] == [2]


def test_another_worker_removes_the_folder_while_it_is_listed(folder, monkeypatch):
    (folder / RUNNING).mkdir()
    scan = os.scandir

    def scandir(path="."):
        if Path(path).name == RUNNING and Path(path).exists():
            Path(path).rmdir()
        return scan(path)

    for reads in (forget, status):
        monkeypatch.setattr(os, "scandir", scandir)
        reads(folder)
        assert not (folder / RUNNING).exists()
        (folder / RUNNING).mkdir()


def test_a_damaged_shard_is_named(folder):
    whole = status(folder).trained
    file = folder / "shards" / "00001.h5"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = status(folder)
    assert "00001.h5: checksum mismatch" in found.text()
    assert (found.trained, found.complete) == (whole - 8, False)  # those in it do not count


def test_a_benchmark(folder, tmp_path):
    """Two populations, of which one is half way after an hour and one cannot be read, are one run."""
    bench = tmp_path / "bench" / "runs"
    bench.mkdir(parents=True)
    folder.rename(bench / "default.pop")
    found = CliRunner().invoke(cli, ["status", str(tmp_path / "bench"), "--watch", "--json", str(tmp_path / "s.json")])
    assert found.exit_code == 0, found.output
    values = json.loads((tmp_path / "s.json").read_text())
    for each in (values, *values["populations"]):
        assert (each["trained"], each["complete"], each["hours_left"]) == (20, True, None)
    with pytest.raises(UsageError, match="expected a population's folder"):
        status(tmp_path / "elsewhere")
    fake.write_population(bench / "other.pop", fake.recipe(networks=32, training__epochs=4), tiles=[0])
    (bench / "other.pop" / RUNNING).mkdir()
    mark = {"tile": 1, "host": "a.b", "process": 1, "begun": 0.0, "done": 0.6, "start": 0.1, "seconds": 3600}
    (bench / "other.pop" / RUNNING / "00001.json").write_text(json.dumps(mark))
    found = status(tmp_path / "bench")
    assert found.hours_left == pytest.approx(0.4 / 0.5 + 2 / 0.5)
    assert (found.trained, found.networks, found.waiting) == (28, 52, 2)
    [row] = found.rows()
    assert (row["population"], row["tile"], row["worker"]) == ("other", 1, "a.b:1")
    assert "other        8 of 32" in found.text()
    (bench / "default.pop" / "shards" / "00000.h5").unlink()  # its epochs are half as long
    assert status(tmp_path / "bench").hours_left == pytest.approx(0.4 / 0.5 + 2 / 0.5 + 0.5 / 0.5)
    (bench / "broken.pop").mkdir()
    (bench / "broken.pop" / "population.json").write_text("{")
    assert "broken.pop/population.json: damaged, expected JSON" in str(status(tmp_path / "bench"))
    with pytest.raises(DataError, match="damaged"):
        status(bench / "broken.pop")


@pytest.mark.slow
def test_a_terminal_is_not_scrolled_and_shows_what_failed(tmp_path):
    """40 tiles that run and one that failed, in 80 columns and 24 lines; texts of other machines are cleaned."""
    fake.write_population(tmp_path / "a.pop", fake.recipe(networks=800), tiles=range(12))
    (tmp_path / "a.pop" / RUNNING).mkdir()
    mark = {"host": "\x1b[31mnode-3.example.org", "process": 1, "begun": 1e9, "done": 0.5, "start": 0.001, "seconds": 9}
    for tile in range(12, 53):
        failed = {"failed": "RuntimeError: a long\nmessage " + "x" * 80} if tile == 30 else {}
        (tmp_path / "a.pop" / RUNNING / f"{tile:05d}.json").write_text(json.dumps(mark | failed | {"tile": tile}))
    parent, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "weightscope", "status", str(tmp_path / "a.pop"), "--watch"]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    shown = b""
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        while shown.count(b"\x1b[H") < 2:
            shown += os.read(parent, 65536)
        process.terminate()
    screen = shown.decode().split("\x1b[H")[1].replace("\x1b[K", "").replace("\x1b[J", "").splitlines()
    assert len(screen) <= 23
    assert max(map(len, screen)) <= 80
    assert screen[6].split()[:2] == ["30", "failed"]
    assert screen[7].startswith("      RuntimeError: a long message x")
    assert "".join(screen[7:9]).count("x") == 80
    assert screen[-1].startswith("... 27 more lines")
    assert "\x1b" not in "".join(screen)


@pytest.mark.parametrize("left", ["00001.json", f".00001.json.weightscope-1-{'0' * 16}.tmp"])
def test_what_a_worker_left_that_was_killed_after_its_shard_was_there_goes_with_the_next_run(
    tmp_path, monkeypatch, left
):
    fake.use(monkeypatch)
    path = tmp_path / "a.pop"
    collect(fake.recipe(), path, workers=1)
    before = fake.files(path)
    (path / RUNNING).mkdir()
    (path / RUNNING / left).write_text("{}")
    assert fake.files(path) != before
    collect(fake.recipe(), path, workers=1)
    assert fake.files(path) == before
    assert not (path / RUNNING).exists()


def test_a_rate_is_counted_from_the_first_report_of_progress(monkeypatch, tmp_path):
    """What a worker does before, such as compiling, is done once."""
    monkeypatch.setattr("weightscope.training.status._BEAT_SECONDS", -1.0)
    with marked(tmp_path, 3, None) as progress:
        for fraction in (0.25, 0.5, 1.0):
            progress(fraction)
            mark = json.loads((tmp_path / RUNNING / "00003.json").read_bytes())
            assert (mark["start"], mark["done"]) == (0.25, fraction)
    assert not (tmp_path / RUNNING / "00003.json").exists()
