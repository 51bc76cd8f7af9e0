"""Populations in object stores: the same bytes as on disk, whatever the store does."""

import uuid
from pathlib import Path
from types import SimpleNamespace

import fake_training as fake
import numpy as np
import pytest
import stores
import torch
from click.testing import CliRunner

from weightscope import training
from weightscope._util import atomic
from weightscope._util.sources import is_population, location, population_member, read_regular
from weightscope.cli import cli
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
    monkeypatch.setattr(training, "train_tile", fake.train_tile)
    monkeypatch.setattr(training, "spec_of", fake.spec_of)
    monkeypatch.setattr(DataConfig, "load", lambda *_: SimpleNamespace(fingerprint="0" * 16, examples=64))


def files(path):
    """The content of every object below a place."""
    return {str(p)[len(str(path)) :]: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


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
    assert str(location("file:///tmp/x.pop")) == "/tmp/x.pop"
    assert location(Path("s3://b/x.pop")) == location("s3://b/x.pop")  # pathlib drops a slash


# --- populations ------------------------------------------------------------------------------------------------------


def test_collect_resume_grow_and_shrink(folder, tmp_path, caplog):
    """Missing, damaged and half-described shards are trained again, byte by byte those of an undisturbed run."""
    path = folder / "a.pop"
    collect(fake.recipe(), tmp_path / "whole.pop", workers=1)
    whole = files(tmp_path / "whole.pop/shards")
    assert len(collect(fake.recipe(), path, workers=1)) == 20
    assert files(path / "shards") == whole
    manifest = (path / "population.json").read_bytes()
    shards = path / "shards"
    (shards / "00000.h5").unlink()
    (shards / "00001.h5").write_bytes(b"x" + (shards / "00001.h5").read_bytes()[1:])
    (shards / "00002.h5.sha256").unlink()
    with pytest.raises(DataError, match=r"00001\.h5: checksum mismatch"):
        Population(path, partial=True).weights()
    collect(fake.recipe(), str(path), workers=1)
    assert caplog.text.count("its tile is trained again") == 2
    assert files(shards) == whole
    collect(fake.recipe(), path, workers=1, networks=23)  # the last shard is replaced by a longer one
    assert len(Population(path)) == 23
    collect(fake.recipe(), path, workers=1, networks=20)
    found = Population(path)
    assert np.array_equal(found.vector(19), fake.vector(fake.recipe(), 19))
    assert found.metrics["test_accuracy"].shape == (20, 2)
    assert (path / "population.json").read_bytes() == manifest
    assert files(path).keys() == {"/population.json", *(f"/shards{name}" for name in whole)}  # no marks are left


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
