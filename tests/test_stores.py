"""Populations in object stores: the same bytes as on disk, whatever the store does."""

import random
import time
import uuid
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

from weightscope import training, verify
from weightscope._util.atomic import create
from weightscope._util.sources import location
from weightscope.cli import cli, main
from weightscope.errors import DataError, RecipeError, WeightscopeError
from weightscope.population import Population, export
from weightscope.recipe import DataConfig
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
    collect(fake.recipe(), path, workers=1, networks=23)
    assert len(Population(path)) == 23
    collect(fake.recipe(), path, workers=1, networks=20)
    found = Population(path)
    assert np.array_equal(found.vector(19), fake.vector(fake.recipe(), 19))
    assert found.metrics["test_accuracy"].shape == (20, 2)
    assert (path / "population.json").read_bytes() == manifest
    assert fake.files(path).keys() == {"population.json", *(f"shards/{name}" for name in whole)}


def test_a_tile_that_fails_and_a_new_population_without_networks(folder, monkeypatch):
    path = folder / "a.pop"
    monkeypatch.setattr(training, "train_tile", fake.train_tile_or_refuse)
    with pytest.raises(DataError, match="tile 1 is broken, in tile 1 "):
        collect(fake.recipe(), path, workers=1)
    found = status(path)
    assert (found.trained, found.complete) == (12, False)
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
    with pytest.raises(DataError, match=r"the store failed.*no route to host"):
        create(path / "population.json", b"{}")


@pytest.mark.slow
def test_failures_that_pass_change_nothing(s3, tmp_path):
    """500 and 503 at every kind of request: s3fs tries again; the delay is that of a distant store."""
    path = location(f"s3://bucket/{uuid.uuid4().hex}/a.pop")
    s3.fail = {"HEAD": [500, 503], "GET": [0, 503, 500], "PUT": [503, 500, 0, 500, 500]}
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
    with pytest.raises(DataError, match=r"a\.pop.*: the store failed .*(SlowDown|request rate)"):
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
        assert "the store failed (PermissionError" in line
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for command in commands:
        assert "Unable to locate credentials" in printed(*command)
    code = 2
    for url in (f"s3://{other[0]}:{other[1]}@bucket/a.pop", f"az://bucket/a.pop?sv=1&sig={other[1]}"):
        assert "expected a URL without credentials" in printed("inspect", url)
    assert "nonsense" in printed("inspect", "nonsense://bucket/a.pop")
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
        assert not verify(path).damaged
        crash.finish(path, crash.RECIPE, "small", environment=environment)
        assert fake.files(path) == fake.files(tmp_path / "a.pop")
