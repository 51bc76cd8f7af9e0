"""Populations in object stores: the same bytes as on disk, whatever the store does."""

import random
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import clusters
import fake_training as fake
import fsspec
import numpy as np
import pytest
import stores
import test_crash as crash
import torch
from click.testing import CliRunner

from weightscope import training
from weightscope._util import atomic
from weightscope._util.sources import is_population, location, population_member, read_regular
from weightscope.analysis.across_networks import covariance_across
from weightscope.cli import cli, main
from weightscope.errors import DataError, RecipeError, UsageError, WeightscopeError
from weightscope.population import Population, export, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import DataConfig
from weightscope.statistics import samples
from weightscope.training.collection import collect
from weightscope.training.status import status

pytestmark = pytest.mark.filterwarnings("default")  # what the packages of stores warn of is their own affair


@pytest.fixture(scope="module")
def server():
    with stores.s3_server() as found:
        yield found


@pytest.fixture
def s3(server, monkeypatch):
    import s3fs

    for name, value in stores.environment(server.url).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    server.settle()


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request, tmp_path):
    """A new folder on disk and in stores."""
    if request.param == "local":
        return tmp_path
    if request.param == "s3":
        request.getfixturevalue("s3")
    return location(f"{request.param}://bucket/{uuid.uuid4().hex}")


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    fake.use(monkeypatch)
    monkeypatch.setattr(DataConfig, "load", lambda *_: SimpleNamespace(fingerprint="0" * 16, examples=64))


# --- what a folder of a population does -------------------------------------------------------------------------------


def test_a_place_does_what_a_folder_does(folder):
    shards, one = folder / "shards", folder / "shards" / "00001.h5"
    assert (one.name, one.stem, one.suffix, one.parent) == ("00001.h5", "00001", ".h5", shards)
    assert len({one, shards / "00001.h5"}) == 1
    assert (one.exists(), shards.exists()) == (False, False)
    assert list(shards.glob("*")) == []
    with pytest.raises(FileNotFoundError):
        list(shards.iterdir())
    with pytest.raises(FileNotFoundError):
        read_regular(one, 10)
    atomic.make_folder(shards)
    atomic.check_writable(one)
    assert atomic.create(one, b"first")
    assert not atomic.create(one, b"second")
    assert read_regular(one, 5) == b"first"
    atomic.write(one, b"longer, the third")
    atomic.write(shards / "00000.h5", b"")
    with pytest.raises(OSError, match="expected at most 10 bytes"):
        read_regular(one, 10)
    assert read_regular(shards / "00000.h5", 10) == b""
    assert (one.exists(), one.is_file(), one.is_dir()) == (True, True, False)
    assert (shards.exists(), shards.is_file(), shards.is_dir()) == (True, False, True)
    assert sorted(shards.iterdir()) == sorted(shards.glob("*.h5")) == [shards / "00000.h5", one]
    assert [(p, p.stat().st_size) for p in folder.rglob("00001*")] == [(one, 17)]
    assert list(folder.glob("*")) == [shards]
    one.unlink()
    one.unlink(missing_ok=True)
    atomic.remove_folder(shards)
    assert not shards.exists()


def test_what_is_a_population():
    assert is_population("s3://b/x.pop")
    assert population_member("s3://b/x.pop::3") == (location("s3://b/x.pop"), 3)
    assert not is_population("hf://org/x.pop")
    assert str(location("file:///data/x.pop")) == "/data/x.pop"
    assert location(Path("s3://b/x.pop")) == location("s3://b/x.pop")  # pathlib drops a slash
    assert location("S3://b/x.pop") == location(Path("S3://b/x.pop")) == location("s3://b/x.pop")
    assert str(location("FILE:///data/x.pop")) == "/data/x.pop"
    with pytest.raises(UsageError, match="Protocol not known: simplecache::s3"):
        location("simplecache::s3://b/x.pop").exists()
    with pytest.raises(UsageError, match="found an address of the hub"):
        collect(fake.recipe(), "hf://org/x.pop")


# --- populations ------------------------------------------------------------------------------------------------------


def test_collect_resume_grow_and_shrink(folder, tmp_path, caplog):
    """Missing, damaged and half-described shards are trained again, byte by byte those of an undisturbed run."""
    path = folder / "a.pop"
    collect(fake.recipe(), tmp_path / "whole.pop", workers=1)
    whole = fake.files(tmp_path / "whole.pop/shards")
    assert len(collect(fake.recipe(), path, workers=1)) == 20
    assert fake.files(path / "shards") == whole
    manifest = (path / "population.json").read_bytes()
    shards = path / "shards"
    (shards / "00000.h5").unlink()
    (shards / "00001.h5").write_bytes(b"x" + (shards / "00001.h5").read_bytes()[1:])
    (shards / "00002.h5.sha256").unlink()
    with pytest.raises(DataError, match=r"00001\.h5: checksum mismatch"):
        Population(path, partial=True).weights()
    collect(fake.recipe(), str(path), workers=1)
    assert caplog.text.count("its tile is trained again") == 2
    assert fake.files(shards) == whole
    collect(fake.recipe(), path, workers=1, networks=23)  # the last shard is replaced by a longer one
    assert len(Population(path)) == 23
    collect(fake.recipe(), path, workers=1, networks=20)
    found = Population(path)
    assert np.array_equal(found.vector(19), fake.vector(fake.recipe(), 19))
    assert found.metrics["test_accuracy"].shape == (20, 2)
    assert (path / "population.json").read_bytes() == manifest
    assert fake.files(path).keys() == {"population.json", *(f"shards/{name}" for name in whole)}  # no marks are left


def test_a_tile_that_fails_and_a_new_population_without_networks(folder, monkeypatch):
    path = folder / "a.pop"
    monkeypatch.setattr(training, "train_tile", fake.train_tile_or_refuse)
    with pytest.raises(DataError, match="tile 1 is broken, in tile 1 "):
        collect(fake.recipe(), path, workers=1)
    found = status(path)
    assert (found.trained, [row["state"] for row in found.rows()]) == (12, ["failed"])
    assert [each.trained for each in status(folder).populations] == [12]
    monkeypatch.setattr(training, "train_tile", lambda *_, **__: 1 / 0)
    with pytest.raises(WeightscopeError, match="ZeroDivisionError"):
        collect(fake.recipe(), folder / "b.pop", workers=1)
    assert not (folder / "b.pop").exists()
    with pytest.raises(RecipeError, match=r"training\.epochs: 2 -> 3"):
        collect(fake.recipe(training__epochs=3), path, workers=1)


def test_import_export_and_commands(folder, tmp_path):
    path, networks = str(folder / "a.pop"), [{"mlp.fc1.weight": torch.full((4, 2), float(k))} for k in range(9)]
    with pytest.raises(DataError, match="1 of 10 networks do not fit"):
        Population.of([*networks, {"other": torch.zeros(1)}], path)
    assert not location(path).exists()
    found = Population.of(networks, path)
    assert np.array_equal(Population.of(networks, path).weights(), found.weights())
    with pytest.raises(DataError, match="differ from what was imported"):
        Population.of([networks[1], *networks[1:]], path)
    export(found, tmp_path / "a.h5")
    assert len(np.asarray(found)) == 9
    fake_path = str(folder / "b.pop")
    np.savez(tmp_path / "c.npz", **{"fc.weight": np.ones((2, 3), np.float32)})
    collect(fake.recipe(networks=40), fake_path, workers=1)
    for command in (
        f"inspect {fake_path}",
        f"inspect {path}::3",
        f"verify {fake_path}",
        f"status {fake_path}",
        f"export {fake_path} -o {tmp_path}/b.h5",
        f"covariance {fake_path} -o {tmp_path}/b.png",
        f"fit-init {fake_path} -o {tmp_path}/b.safetensors",
        f"import {tmp_path}/c.npz -o {folder}/c.pop",
    ):
        found = CliRunner().invoke(cli, command.split())
        assert found.exit_code == 0, f"{command}: {found.output} {found.exception}"


# --- stores that fail -------------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_not_an_empty_one(monkeypatch):
    """fsspec's own `exists` and `isdir` say False whatever `info` raises."""

    def info(*_, **__):
        raise OSError("no route to host")

    path = location(f"memory://bucket/{uuid.uuid4().hex}/a.pop")
    collect(fake.recipe(), path, workers=1)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", info)
    for asked in (path.exists, path.is_dir, path.is_file):
        with pytest.raises(DataError, match=r"the store failed.*no route to host"):
            asked()


def test_status_of_a_shard_that_is_removed_meanwhile(folder, monkeypatch):
    path = folder / "a.pop"
    collect(fake.recipe(), path, workers=1)
    (path / "shards/00001.h5").unlink()
    monkeypatch.setattr(shards, "tiles_on_disk", lambda *_: [0, 1, 2])
    found = status(path)
    assert (found.trained, found.waiting) == (12, 1)
    assert "00001.h5: has disappeared" in found.damaged[0]


def test_one_of_several_creates_an_object(s3):
    place = location(f"s3://bucket/{uuid.uuid4().hex}/population.json")
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda k: atomic.create(place, str(k).encode()), range(8)))
    assert created.count(True) == 1
    assert place.read_bytes() == str(created.index(True)).encode()


class Unconditional(fsspec.get_filesystem_class("memory")):
    """A store without conditional writes, in which the first two writers have not seen each other's object."""

    protocol, store, pseudo_dirs, both, writers = "unconditional", {}, [""], threading.Barrier(2), []

    def pipe_file(self, path, value, mode="overwrite", **_):
        self.writers.append(mode == "create")
        together = sum(self.writers) <= 2 and mode == "create"
        if together:
            self.both.wait(60)
        super().pipe_file(path, value)
        if together:
            self.both.wait(60)


@pytest.mark.parametrize("store", [False, True])
def test_one_of_two_equal_runs_fails(store, tmp_path, monkeypatch):
    """It removes the new population, of which the other trains a tile; in the store both believe to have made it."""
    fsspec.register_implementation("unconditional", Unconditional, clobber=True)
    path = location("unconditional://bucket/a.pop") if store else tmp_path / "a.pop"
    first, began, ended, made = threading.Event(), threading.Event(), threading.Event(), []
    create, name = manifests.create_or_match, lambda: threading.current_thread().name

    def train_tile(recipe, tile, **options):
        if name().endswith("_0"):
            first.set()
            assert began.wait(60)
            raise ZeroDivisionError
        began.set()
        assert ended.wait(60)
        return fake.train_tile(recipe, tile, **options)

    def collected():
        try:
            collect(fake.recipe(), path, workers=1)
        finally:
            ended.set()

    monkeypatch.setattr(training, "train_tile", train_tile)
    monkeypatch.setattr(manifests, "create_or_match", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(collected)]
        assert store or first.wait(60)
        runs += [pool.submit(collected)]
        with pytest.raises(WeightscopeError, match="ZeroDivisionError"):
            runs[0].result()
        runs[1].result()
    assert sum(new for _, new in made) == (2 if store else 1)
    Population(path).verify()


def test_a_listing_is_not_a_request_for_each_shard(s3):
    """1,100 shards with their hashes are three pages of a listing, and their sizes are in it."""
    from moto.s3.models import s3_backends

    path = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
    backend = s3_backends["123456789012"]["aws"]
    key = str(path).removeprefix("s3://bucket/")
    wanted = manifests.Manifest(fake.recipe(networks=8_800), fake.SPEC, {}, (8_800,))
    manifest, _ = manifests.create_or_match(path, wanted, resize=True)
    for tile in range(1_100):
        for suffix in (".h5", ".h5.sha256"):
            backend.put_object("bucket", f"{key}/shards/{tile:05d}{suffix}", b"12345")
    s3.requests.clear()
    assert len(shards.tiles_on_disk(path, manifest)) == 1_100
    assert len(s3.requests) == 3
    s3.requests.clear()
    assert sum(file.stat().st_size for file in path.glob("shards")[0].iterdir()) == 11_000
    assert len(Population(path)) == 8_800
    assert len(s3.requests) < 12


@pytest.mark.slow
def test_workers_read_each_shard_of_a_store_once(s3, tmp_path, monkeypatch):
    """They give the bits of one process that reads a folder."""
    monkeypatch.setattr(samples, "LEAF", 16)
    url = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
    for path in (url, tmp_path / "a.pop"):
        fake.write_population(path, fake.recipe(networks=64))
    options = {"select": "*fc1.weight", "stripes": False}
    expected = covariance_across(Population(tmp_path / "a.pop"), workers=1, **options)
    s3.requests.clear()
    found = covariance_across(Population(url), workers=2, **options)
    np.testing.assert_array_equal(found.matrix, expected.matrix)
    asked = Counter(Path(name).name for method, name in s3.requests if method == "GET" and name.endswith(".h5"))
    assert asked == {f"{tile:05d}.h5": 1 for tile in range(8)}


@pytest.mark.slow
def test_failures_that_pass_change_nothing(s3, tmp_path):
    """500 and 503 at every kind of request: s3fs tries again; the delay is that of a distant store."""
    path = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
    s3.fail = {"HEAD": [500, 503], "GET": [0, 503, 500], "PUT": [503, 500, 0, 500, 500], "DELETE": [503, 500]}
    s3.delay = 0.02
    collect(fake.recipe(), path, workers=1)
    assert not any(s3.fail.values())
    collect(fake.recipe(), tmp_path / "a.pop", workers=1)
    assert fake.files(path / "shards") == fake.files(tmp_path / "a.pop/shards")


@pytest.mark.slow
def test_a_store_that_stays_down_is_one_line_and_the_run_resumes(s3, monkeypatch):
    path = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # s3fs tries again all the same

    def train_tile(recipe, tile, **options):
        s3.always = 503 if tile == 1 else 0
        return fake.train_tile(recipe, tile, **options)

    monkeypatch.setattr(training, "train_tile", train_tile)
    with pytest.raises(DataError, match=r"a\.pop.*: the store failed, also when tried again .*(SlowDown|request rate)"):
        collect(fake.recipe(), path, workers=1)
    s3.always = 0
    assert len(Population(path, partial=True)) >= 8
    monkeypatch.setattr(training, "train_tile", fake.train_tile)
    assert len(collect(fake.recipe(), path, workers=1)) == 20


def test_credentials_that_are_missing_or_wrong_are_one_line(s3, monkeypatch, capfd):
    """On reading and on writing; the line has none of them, neither from the environment nor from a URL."""

    def printed(*arguments):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (code, "", 1), (out, err)
        assert not any(text in err for text in (*other, stores.KEY, stores.SECRET))
        return err

    other, code = ("AKIAXXXXXXXXXXXXXXXX", "another/secret"), 3
    commands = ("inspect", "s3://bucket/a.pop"), ("collect", "digits-convnext", "-o", "s3://bucket/a.pop", "-n", "2")
    for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), other, strict=True):
        monkeypatch.setenv(name, value)
    for command in commands:
        assert "s3://bucket/a.pop" in (line := printed(*command))
        assert "denies access" in line
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for command in commands:
        assert "Unable to locate credentials" in printed(*command)
    code = 2
    for url in (f"s3://{other[0]}:{other[1]}@bucket/a.pop", f"az://bucket/a.pop?sv=1&sig={other[1]}"):
        assert "expected a URL without credentials" in printed("inspect", url)
    assert "Protocol not known: nonsense" in printed("inspect", "nonsense://bucket/a.pop")
    assert "only populations may be in a store" in printed("bench", "digits-convnext", "-o", "s3://bucket/results")


@pytest.mark.slow
def test_killed_and_resumed(s3, tmp_path):
    environment, moments = stores.environment(s3.url), random.Random(0)
    crash.finish(tmp_path / "a.pop", crash.RECIPE, "small")
    for _ in range(20 if clusters.TORTURE else 1):
        path = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
        process = crash.start(path, crash.RECIPE, "slow", workers=2, environment=environment)
        crash.wait_for((path / "shards/00001.h5").exists, process)
        time.sleep(moments.uniform(0, 0.5))
        crash.kill_group(process)
        Population(path, partial=True).verify()
        crash.finish(path, crash.RECIPE, "small", environment=environment)
        assert fake.files(path) == fake.files(tmp_path / "a.pop")
