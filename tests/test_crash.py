"""`collect` is killed at random moments; running it again gives the very bytes of an uninterrupted run.

Processes start with everything imported, so that a run lasts as long as its work and the moments fall inside it. The
fakes of `fake_training` leave almost nothing to do but writing.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import time

import clusters
import fake_training as fake
import pytest
from programs import FORKSERVER

from weightscope import verify
from weightscope.population import Population, shards

_LONGEST = 120.0


def start(path, recipe, trainer, workers=1, environment=()):
    process = FORKSERVER.Process(target=fake.collect_in_process, args=(path, recipe, trainer, workers, environment))
    process.start()
    return process


def finish(path, recipe, trainer, environment=()):
    """Run to the end; returns the seconds that it took once it had begun."""
    process = start(path, recipe, trainer, environment=environment)
    wait_until_begun(path, recipe, process)
    begun = time.monotonic()
    process.join(_LONGEST)
    assert process.exitcode == 0
    return time.monotonic() - begun


def wait_until_begun(path, recipe, process):
    wanted = f" {recipe.population.networks}\n ]".encode()
    wait_for(lambda: wanted in (path / "population.json").read_bytes(), process)


def wait_for(happened, process):
    while process.is_alive():
        with contextlib.suppress(FileNotFoundError):
            if happened():
                return
        time.sleep(0.001)


def kill_group(process):
    """SIGKILL for `collect` and all its workers, as when a machine goes down."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, or has no group of its own yet
        process.kill()
    process.join(_LONGEST)


RECIPE = fake.recipe(networks=60)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of an uninterrupted run with large tiles, and its seconds; the first start of processes is longer."""
    path = tmp_path_factory.mktemp("whole") / "whole.pop"
    finish(path.with_name("first.pop"), fake.recipe(networks=20), "large")
    return path, finish(path, RECIPE, "large")


@pytest.mark.slow
def test_killed_at_random_moments_the_shards_are_those_of_an_uninterrupted_run(whole, tmp_path):
    """A new population and, every other time, one that grows."""
    (wanted, seconds), moments = whole, random.Random(1)
    finish(tmp_path / "smaller.pop", fake.recipe(networks=20), "large")
    for i in range(200 if clusters.TORTURE else 6):
        path = tmp_path / f"{i}.pop"
        if i % 2:
            shutil.copytree(tmp_path / "smaller.pop", path)
        process = start(path, RECIPE, "large")
        wait_until_begun(path, RECIPE, process)
        time.sleep(moments.uniform(0, seconds))
        kill_group(process)
        # Whatever there is, is valid already.
        assert not verify(path).damaged
        finish(path, RECIPE, "large")
        got, expected = fake.files(path), fake.files(wanted)
        assert {k: v for k, v in got.items() if "shards" in k} == {k: v for k, v in expected.items() if "shards" in k}
        assert got.keys() == expected.keys()  # nothing is left behind


@pytest.mark.slow
def test_two_at_once_on_one_folder_are_harmless(whole, tmp_path):
    for i in range(3):
        path = tmp_path / f"{i}.pop"
        processes = [start(path, RECIPE, "large") for _ in range(3)]
        for process in processes:
            process.join(_LONGEST)
            assert process.exitcode == 0, path.with_suffix(".log").read_text()
        assert fake.files(path) == fake.files(whole[0])


@pytest.mark.slow
def test_workers_killed_with_their_parent(tmp_path):
    finish(tmp_path / "whole.pop", RECIPE, "small")
    path, moments = tmp_path / "a.pop", random.Random(3)
    for _ in range(2):
        process = start(path, RECIPE, "slow", workers=2)
        wait_for((path / "shards/00001.h5").exists, process)
        time.sleep(moments.uniform(0, 0.5))
        kill_group(process)
    assert not verify(path).damaged
    finish(path, RECIPE, "small")
    assert fake.files(path) == fake.files(tmp_path / "whole.pop")


@pytest.mark.slow
def test_control_c_in_a_terminal_ends_workers_and_parent_in_order(tmp_path):
    """The terminal sends SIGINT to every process of the group."""
    path = tmp_path / "a.pop"
    process = start(path, RECIPE, "slow", workers=2)
    wait_for((path / "shards/00002.h5").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    process.join(_LONGEST)
    assert process.exitcode == 4
    printed = path.with_suffix(".log").read_text()
    assert printed.count("\n") == 1
    assert "of 60 networks are kept" in printed
    assert not verify(path).damaged
    finish(path, RECIPE, "small")
    assert len(Population(path)) == 60


def at_every_prefix(path, parts):
    """Save a tile in a process for each size, which the kernel kills with SIGXFSZ once a file has that many bytes."""
    recipe = fake.recipe(networks=8)
    whole = path.with_name("whole.pop")
    fake.write_population(whole, recipe)
    wanted = shards.shard_file(whole, 0).read_bytes()
    manifest = fake.write_population(path, recipe, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for size in [*range(0, 100, 9), *range(100, len(wanted) - 1, max(1, len(wanted) // parts)), len(wanted) - 1]:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            shards.save(path, manifest, fake.train_tile(recipe, 0), "cpu")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ
        assert not shards.is_done(path, manifest, 0), size
        assert Population(path, partial=True).missing == (0,), size
    shards.save(path, manifest, fake.train_tile(recipe, 0), "cpu")
    assert shards.shard_file(path, 0).read_bytes() == wanted
    assert len(list(path.rglob("*"))) == len(list(whole.rglob("*"))), "a temporary file was left"
    path.with_name("finished").touch()


@pytest.mark.slow
def test_killed_at_every_prefix_of_a_write_no_shard_is_bad(tmp_path):
    process = FORKSERVER.Process(target=at_every_prefix, args=(tmp_path / "a.pop", 40 if clusters.TORTURE else 10))
    process.start()
    process.join(_LONGEST)
    assert process.exitcode == 0
    assert (tmp_path / "finished").exists()
