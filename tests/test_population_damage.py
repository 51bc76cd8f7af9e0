"""Shards and manifests that are damaged, old or of another recipe are refused with one line."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_training as fake
import h5py
import numpy as np
import pytest

from weightscope._util import atomic
from weightscope.errors import DataError, RecipeError, UsageError, WeightscopeError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe
from weightscope.training.request import input_hashes

MANIFEST = manifests.Manifest(fake.recipe(), fake.SPEC, {}, 20)


def rewrite(file: Path, change: Callable[..., object] | None) -> None:
    """Change a shard with HDF5 and give it a fitting hash, as somebody else's writer would."""
    if change:
        with h5py.File(file, "r+") as h5:
            change(h5)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name(file.name + ".sha256").write_text(f"{digest}  {file.name}\n")


def one_line(error: "pytest.ExceptionInfo[WeightscopeError]", *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
    assert error.value.exit_code == 3


def test_a_manifest_that_plans_millions_of_networks_is_read_at_once(folder: Path) -> None:
    fake.write_population(folder, fake.recipe(networks=24))
    manifest = manifests.read(folder)
    huge = replace(manifest, made=manifest.recipe.replace({"population.networks": 10_000_000}), networks=10_000_000)
    (folder / "population.json").write_bytes(huge.to_bytes())
    began = time.process_time()
    population = Population(folder, partial=True)
    assert len(population) == 24
    assert len(population.missing) == 1_250_000 - 3
    with pytest.raises(DataError, match=r"expected 10000000 networks, found .* and 12499.. more tiles"):
        Population(folder)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("where", [0, 100, 2000, -1, None])
def test_a_flipped_bit_or_a_zeroed_row_is_found_on_reading(folder: Path, where: int | None) -> None:
    file = folder / "shards/00001.h5"
    if where is None:  # the file keeps its size and remains valid HDF5; only the hash can tell
        with h5py.File(file, "r+", libver="v110") as h5:
            h5["weights"][0] = 0
    else:
        data = bytearray(file.read_bytes())
        data[where] ^= 1
        file.write_bytes(data)
    for read in (lambda p: p.weights(), lambda p: list(p.chunks()), lambda p: p.vector(9), lambda p: p.hits):
        with pytest.raises(DataError) as error:
            read(Population(folder))
        one_line(error, "00001.h5", "checksum mismatch", "expected sha256", "found", "weightscope collect")
    assert not shards.is_done(folder, manifests.read(folder), 1)


@pytest.mark.parametrize("length", [None, 0, 1, 1000])
def test_a_truncated_shard_is_found_and_one_that_vanishes_named(folder: Path, length: int | None) -> None:
    population, file = Population(folder), folder / "shards/00001.h5"
    file.unlink() if length is None else os.truncate(file, length)
    with pytest.raises(DataError) as error:
        population.weights()
    one_line(error, "00001.h5", "the file has disappeared" if length is None else "checksum mismatch")
    with pytest.raises(DataError):
        _ = population.metrics


@pytest.mark.parametrize("text", [None, ""])
def test_a_shard_without_its_hash_is_damaged(folder: Path, text: "str | None") -> None:
    beside = folder / "shards/00001.h5.sha256"
    beside.unlink() if text is None else beside.write_text(text)
    with pytest.raises(DataError) as error:
        Population(folder).weights()
    one_line(error, "00001.h5", "expected its sha256", "found none")


def test_a_shard_that_somebody_else_has_open_is_read(folder: Path) -> None:
    file, expected = folder / "shards/00001.h5", Population(folder).weights().tobytes()
    with h5py.File(file, "r", locking=False):
        assert Population(folder).weights().tobytes() == expected
    assert Population(folder).weights().tobytes() == expected


@pytest.mark.parametrize(
    ("other", "order"),
    [
        (fake.recipe(training__epochs=1), 1),
        (fake.recipe(population__seed=8), 1),
        (fake.recipe(), -1),
    ],
)
def test_a_shard_of_another_recipe_or_spec_is_foreign(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Recipe, order: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fake, "SPEC", fake.WeightSpec(fake.SPEC.tensors[::order]))
        fake.write_population(tmp_path / "other.pop", other)
    for end in ("", ".sha256"):
        (tmp_path / f"other.pop/shards/00001.h5{end}").rename(folder / f"shards/00001.h5{end}")
    with pytest.raises(DataError) as error:
        Population(folder).weights()
    one_line(error, "00001.h5", "foreign", "expected recipe")
    with pytest.raises(DataError, match="foreign"):
        shards.is_done(folder, manifests.read(folder), 1)


def test_shards_beyond_the_end_are_left_alone(folder: Path) -> None:
    before = Population(folder).weights()
    (folder / "shards/00003.h5").write_bytes(b"of a growth that was not finished")
    np.testing.assert_array_equal(Population(folder).weights(), before)
    assert Population(folder, partial=True).missing == ()


def test_metrics_that_differ_between_shards_are_refused(folder: Path) -> None:
    rewrite(folder / "shards/00001.h5", lambda h5: h5["metrics"].pop("init"))
    with pytest.raises(DataError, match=r"cannot read the metrics of tile 1: .*init"):
        _ = Population(folder).metrics


def test_a_folder_that_is_no_population(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, found in (("none", "no such folder"), ("empty", "a folder without"), ("file", "a folder without")):
        with pytest.raises(DataError, match=f"found {found}"):
            Population(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: "{", "damaged, expected JSON"),
        (lambda v: [], "found another file"),
        (lambda v: v | {"schema": 4}, "expected schema version 3, found 4, of another version of weightscope"),
        (lambda v: {k: x for k, x in v.items() if k != "spec"}, "'spec' is missing"),
        (lambda v: v | {"spec": [["a", [-1], "parameter"]]}, "damaged"),
        (lambda v: v | {"recipe": v["recipe"] | {"more": 1}}, "more: unknown key"),
        (lambda v: v | {"spec": 3}, "damaged"),
    ],
)
def test_a_damaged_manifest(folder: Path, change: Callable[..., object], message: str) -> None:
    file = folder / "population.json"
    values = change(json.loads(file.read_text()))
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(DataError) as error:
        Population(folder)
    one_line(error, "population.json", message)


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds thesis.tex but no population.json"):
        manifests.create_or_match(tmp_path, MANIFEST, resize=True)
    with pytest.raises(UsageError, match="is a file"):
        manifests.create_or_match(tmp_path / "thesis.tex", MANIFEST, resize=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]


def test_of_two_recipes_that_race_for_one_folder_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no manifest; the one that writes later must not replace the other's."""
    path, make_folder = tmp_path / "a.pop", atomic.make_folder

    def interrupted(folder: Path) -> None:
        monkeypatch.setattr(atomic, "make_folder", make_folder)
        fake.write_population(path, fake.recipe(), [0])
        make_folder(folder)

    monkeypatch.setattr(atomic, "make_folder", interrupted)
    other = fake.recipe(population__seed=8)
    with pytest.raises(RecipeError, match=r"population.seed: 7 -> 8"):
        manifests.create_or_match(path, manifests.Manifest(other, fake.SPEC, {}, 20), resize=True)
    assert Population(path, partial=True).recipe == fake.recipe()
    assert sorted(p.name for p in path.iterdir()) == ["population.json", "shards"]


def test_a_changed_artifact_is_another_recipe(tmp_path: Path) -> None:
    artifact = tmp_path / "init.safetensors"
    artifact.write_bytes(b"one")
    recipe = fake.recipe(init=[{"name": "artifact", "artifact": str(artifact)}])
    path = tmp_path / "a.pop"

    def wanted() -> manifests.Manifest:
        return manifests.Manifest(recipe, fake.SPEC, {}, 20, input_hashes(recipe))

    manifests.create_or_match(path, wanted(), resize=True)
    manifests.create_or_match(path, wanted(), resize=True)
    artifact.write_bytes(b"two")
    with pytest.raises(DataError, match=r"collected with another init .*: expected hash \w{16}, found"):
        manifests.create_or_match(path, wanted(), resize=True)
    artifact.unlink()
    with pytest.raises(DataError, match=r"init.artifact: cannot read"):
        wanted()
