"""Populations on disk: what is written is read back, grown, and exported."""

import hashlib
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import fake_training as fake
import h5py
import numpy as np
import pytest

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.population import Population, export, open_source, shards
from weightscope.population import manifest as manifests
from weightscope.recipe import Recipe


def expected(recipe: Recipe, numbers: "range | list[int]") -> np.ndarray:
    rows = np.stack([fake.vector(recipe, k) for k in numbers])
    rows[[k % 9 == 5 for k in numbers]] = np.nan
    return rows


def test_weights_are_what_was_trained_bit_for_bit(folder: Path) -> None:
    population = Population(folder)
    assert len(population) == 20
    assert population.spec == fake.SPEC
    assert population.recipe == fake.recipe()
    assert population.environment == {"python": "3"}
    np.testing.assert_array_equal(population.weights(), expected(fake.recipe(), range(20)))
    np.testing.assert_array_equal(population.indices, np.arange(20))
    assert population.missing == ()


@pytest.mark.parametrize("select", ["*fc1.weight", "*fc1*", "scale", "*fc2.weight,*fc1.bias", ["norm*", "scale"]])
def test_a_selection_is_the_columns_of_the_whole(folder: Path, select: "str | list[str]") -> None:
    population = Population(folder)
    columns = fake.SPEC.columns(fake.SPEC.select(select))
    np.testing.assert_array_equal(population.weights(select), population.weights()[:, columns])


@pytest.mark.parametrize("size", [None, 1, 3, 8, 13, 20, 1000])
def test_chunk_size_changes_no_row(folder: Path, size: "int | None") -> None:
    population = Population(folder)
    blocks = list(population.chunks("*fc*", size))
    if size is not None:
        assert [len(b) for b in blocks] == [size] * (20 // size) + ([20 % size] if 20 % size else [])
    assert all(b.dtype == np.float32 for b in blocks)
    np.testing.assert_array_equal(np.concatenate(blocks), population.weights("*fc*"))
    marked = list(Population(folder).marked_chunks("*fc*", size))
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in marked]), population.weights("*fc*"))
    assert population.diverged.any()
    np.testing.assert_array_equal(np.concatenate([bad for _, bad in marked]), population.diverged)


def test_a_snapshot_is_read_like_the_end(tmp_path: Path) -> None:
    """The trainer's weights after epoch m are m times those of the end."""
    recipe = fake.recipe(population__snapshots=[0, 1, 3])
    fake.write_population(tmp_path / "a.pop", recipe)
    population = Population(tmp_path / "a.pop")
    view = population.at(3)
    np.testing.assert_array_equal(view.weights(), 3 * population.weights())
    np.testing.assert_array_equal(view.weights("*fc2*,scale"), 3 * population.weights("*fc2*,scale"))
    np.testing.assert_array_equal(np.concatenate([*population.at(1).chunks("norm*", 7)]), population.weights("norm*"))
    np.testing.assert_array_equal(view.vector(19), 3 * population.vector(19))
    np.testing.assert_array_equal(view.at(0)[:2], 0 * population[:2])
    assert population.snapshots == (0, 1, 3)
    assert "D=77, after epoch 3" in view.summary()
    with pytest.raises(UsageError, match="expected a snapshot after epoch 2; there are 0, 1, 3"):
        population.at(2)
    with h5py.File(tmp_path / "a.pop/shards/00000.h5") as h5:
        assert h5["snapshots"].chunks == (8, 1, fake.SPEC.size)


def test_bad_selections_and_sizes_are_refused_before_reading(folder: Path) -> None:
    population = Population(folder)
    with pytest.raises(UsageError, match="no tensor matches 'nothing'"):
        population.weights("nothing")
    with pytest.raises(UsageError, match="no tensor matches 'nothing'"):
        population.chunks("nothing")
    with pytest.raises(UsageError, match="expected a positive number of rows, found 0"):
        population.chunks(size=0)


def test_seeds_metrics_and_divergence(folder: Path) -> None:
    population = Population(folder)
    recipe = fake.recipe()
    tiles = [fake.train_tile(recipe, t) for t in range(3)]
    np.testing.assert_array_equal(population.seeds, [torch_seed(7, k, Purpose.INIT) for k in range(20)])
    assert set(population.metrics) == set(tiles[0].metrics)
    for name, values in population.metrics.items():
        np.testing.assert_array_equal(values, np.concatenate([t.metrics[name] for t in tiles])[:20])
        assert values.dtype == tiles[0].metrics[name].dtype
    assert population.metrics["test_accuracy"].shape == (20, 2)
    with pytest.raises(KeyError, match="no metric 'acc'; there are "):
        population.metrics["acc"]
    assert list(np.flatnonzero(population.diverged)) == [5, 14]


def test_shards_are_the_same_bytes_whenever_handles_of_arrays_are_closed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that look at stack frames, such as the profiler of a Dask worker, keep handles."""
    create, kept = h5py.Group.create_dataset, []

    def keeping(*args: Any, **options: Any) -> h5py.Dataset:
        kept.append(create(*args, **options))
        return kept[-1]

    monkeypatch.setattr(h5py.Group, "create_dataset", keeping)
    fake.write_population(tmp_path / "b.pop", fake.recipe())
    assert len(kept) >= 6
    assert fake.files(tmp_path / "b.pop") == fake.files(folder)
    shard_names = {f"shards/0000{t}.h5{end}" for t in range(3) for end in ("", ".sha256")}
    assert set(fake.files(folder)) == {"population.json"} | shard_names


def test_a_shard_is_what_the_format_says(folder: Path) -> None:
    with h5py.File(folder / "shards/00000.h5", "r") as h5:
        weights = h5["weights"]  # in chunks of about 250 rows and 1000 columns
        assert (weights.shape, weights.dtype, weights.compression) == ((8, fake.SPEC.size), np.dtype("<f4"), None)
        assert weights.chunks is not None
        assert np.isnan(weights.fillvalue)
        assert set(h5) == {"weights", "seed", "metrics"}
    with h5py.File(folder / "shards/00002.h5", "r") as h5:
        assert h5["weights"].shape == (8, fake.SPEC.size)  # the last tile is whole, though only 4 networks are used


def test_hashes_are_those_of_sha256sum_and_the_manifest_holds_what_the_format_says(folder: Path) -> None:
    for file in (folder / "shards").glob("*.h5"):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert file.with_name(f"{file.name}.sha256").read_text() == f"{digest}  {file.name}\n"
    values = json.loads((folder / "population.json").read_text())
    wanted = {"schema": 3, "networks": 20, "seed": 7, "tile": 8, "environment": {"python": "3"}}
    assert {key: values[key] for key in wanted} == wanted
    assert Recipe.parse(values["recipe"]) == Recipe.parse(values["recipe_toml"]) == fake.recipe()


PARTS = itertools.product(("train", "test"), ("accuracy", "loss"), ("", "_per_epoch"))
METRICS = [*(f"{split}_{what}{over}" for split, what, over in PARTS), "weight_decay"]  # those of the trainer


@pytest.mark.parametrize(
    ("networks", "tile", "size", "snapshots"), [(20, 8, 60, None), (100, 64, 2500, [0, 1, 2]), (300, 300, 1001, None)]
)
def test_the_expected_size_is_near_the_true_one(
    networks: int, tile: int, size: int, snapshots: "list[int] | None", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last recipe has tiles of more than a chunk's rows, of which HDF5 stores whole ones."""
    monkeypatch.setattr(fake, "SPEC", fake.WeightSpec([fake.TensorSpec("w", (size,))]))
    recipe = fake.recipe(networks, tile, population__snapshots=snapshots)
    manifest = manifests.Manifest(recipe, fake.SPEC, {}, networks)
    found = 0
    for t in range(manifest.tiles):
        trained = fake.train_tile(recipe, t)
        trained.metrics |= {name: np.zeros((tile, 2) if "per_epoch" in name else tile) for name in METRICS}
        found += len(shards.encode(manifest, trained, "cpu"))
    assert shards.expected_bytes(manifest) == pytest.approx(found, rel=0.1)


def test_an_incomplete_population_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.pop"
    fake.write_population(path, fake.recipe(), tiles=[0, 2])
    with pytest.raises(DataError, match=r"expected 20 networks, found 12; missing tile 1 \(networks 8 to 15\); run"):
        Population(path)
    population = Population(path, partial=True)
    assert len(population) == 12
    assert population.missing == (1,)
    numbers = [*range(8), *range(16, 20)]
    np.testing.assert_array_equal(population.indices, numbers)
    np.testing.assert_array_equal(population.weights(), expected(fake.recipe(), numbers))
    np.testing.assert_array_equal(np.concatenate(list(population.chunks(size=5))), population.weights())
    for k in (0, 7, 17, 19):
        np.testing.assert_array_equal(population.vector(k), population.weights()[numbers.index(k)])
    np.testing.assert_array_equal(population[8:9][0], population.vector(16))
    np.testing.assert_array_equal(population[6:10], population.weights()[6:10])
    for k in (-1, 9, 20):
        with pytest.raises(UsageError, match=f"no network {k}"):
            population.vector(k)


@pytest.mark.parametrize("networks", [22, 24, 40, 10])
def test_a_population_that_grows_or_shrinks_keeps_its_shards(folder: Path, networks: int) -> None:
    """Within the last tile, to its end, by more tiles, and to fewer; and back again."""
    before, old = fake.files(folder / "shards"), Population(folder).weights()
    recipe = fake.recipe(networks=networks)
    manifest, _ = manifests.create_or_match(folder, manifests.Manifest(recipe, fake.SPEC, {}, networks), resize=True)
    assert manifest.networks == networks
    np.testing.assert_array_equal(Population(folder).weights(), old[:networks])
    missing = [tile for tile in range(manifest.tiles) if not shards.is_done(folder, manifest, tile)]
    assert missing == [tile for tile in (3, 4) if networks == 40]
    for tile in missing:
        shards.save(folder, manifest, fake.train_tile(recipe, tile), "cpu")
    manifests.record_size(folder, manifest)
    np.testing.assert_array_equal(Population(folder).weights(), expected(recipe, range(networks)))
    assert fake.files(folder / "shards").items() >= before.items()
    again, _ = manifests.create_or_match(folder, manifests.Manifest(fake.recipe(), fake.SPEC, {}, 20), resize=True)
    manifests.record_size(folder, again)
    np.testing.assert_array_equal(Population(folder).weights(), old)


@pytest.fixture
def real(tmp_path: Path) -> Population:
    """Five networks that the recipe builds, in two tiles."""
    from weightscope.networks import build
    from weightscope.spec import WeightSpec

    recipe = fake.recipe(networks=5, tile=3)
    module = build(recipe.network, in_channels=1, image_size=8, num_classes=10)
    path = tmp_path / "real.pop"
    wanted = manifests.Manifest(recipe, WeightSpec.of(module), {"python": "3"}, 5)
    manifest, _ = manifests.create_or_match(path, wanted, resize=True)
    for tile in range(manifest.tiles):
        trained = fake.train_tile(recipe, tile)
        trained.weights = np.stack([fake.vector(recipe, 3 * tile + i, manifest.spec.size) for i in range(3)])
        shards.save(path, manifest, trained, "cpu")
    return Population(path)


def test_a_population_is_a_sequence_of_networks(real: Population) -> None:
    whole = real.weights()
    assert len(real) == 5
    packed = [real.spec.pack(module.state_dict()) for module in real]
    np.testing.assert_array_equal(packed, whole)
    for k in (0, 4, -1, -5, np.int64(2)):
        np.testing.assert_array_equal(real.spec.pack(real[k].state_dict()), whole[k])
        assert not real[k].training
    for k in (5, -6):
        with pytest.raises(IndexError):
            real[k]


@pytest.mark.parametrize(
    "part", [np.s_[:], np.s_[1:4], np.s_[-2:], np.s_[::-1], np.s_[4:0:-2], np.s_[3:3], np.s_[2:100], np.s_[-1:]]
)
def test_a_slice_is_a_slice_of_the_weights(real: Population, part: slice) -> None:
    np.testing.assert_array_equal(real[part], real.weights()[part])
    assert real[part].dtype == np.float32


def test_arrays_tensors_and_tables(folder: Path) -> None:
    population = Population(folder)
    np.testing.assert_array_equal(np.asarray(population), population.weights())
    assert np.asarray(population, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="found False"):
        population.__array__(copy=False)
    table = population.to_pandas()
    assert list(table.columns) == ["network", "seed", "diverged", "init", "learning_rate", "test_accuracy"]
    assert table["network"].tolist() == list(range(20))
    assert table["seed"].tolist() == population.seeds.tolist()
    np.testing.assert_array_equal(table["test_accuracy"].to_numpy(), population.metrics["test_accuracy"][:, -1])
    curves = population.curves()
    values = population.metrics["test_accuracy"]
    assert list(curves.columns) == ["network", "epoch", "test_accuracy"]
    assert curves["epoch"].tolist() == list(range(1, values.shape[1] + 1)) * 20
    np.testing.assert_array_equal(curves.pivot(index="network", columns="epoch", values="test_accuracy"), values)
    for call in (lambda: population.vector(1.5), lambda: population.weights(3)):
        with pytest.raises(UsageError, match=r"no network 1\.5|found 3"):
            call()


def test_the_repr_is_one_line(folder: Path) -> None:
    population = Population(folder)
    assert repr(population) == f"<Population: {folder}: 20 networks (convnext, digits), D={fake.SPEC.size}>"
    (folder / "shards" / "00001.h5").unlink()  # its hash stays
    partial = Population(folder, partial=True)
    assert partial.missing == (1,)
    assert not shards.is_done(folder, manifests.read(folder), 1)
    assert "12 of 20 networks" in repr(partial)
    assert str(partial).splitlines()[1].startswith("1 diverged; mean test_accuracy ")


@pytest.mark.parametrize("tiles", [[0, 2], []])
def test_export_of_a_partial_and_of_an_empty_population(tmp_path: Path, tiles: list[int]) -> None:
    fake.write_population(tmp_path / "a.pop", fake.recipe(), tiles=tiles)
    population = Population(tmp_path / "a.pop", partial=True)
    assert len(population) == sum(map(len, population.chunks())) == len(population.diverged) == 6 * len(tiles)
    assert population.weights().shape == (len(population), fake.SPEC.size)
    with h5py.File(export(population, tmp_path / "one.h5"), "r") as h5:
        np.testing.assert_array_equal(h5["network"][:], population.indices)
        np.testing.assert_array_equal(h5["weights"][:], population.weights())


@pytest.mark.parametrize("select", ["*", "*fc1*"])
def test_export_is_one_matrix_with_its_spec(folder: Path, tmp_path: Path, select: str) -> None:
    population = Population(folder)
    file = export(population, tmp_path / "one.h5", select)
    with h5py.File(file, "r") as h5:
        np.testing.assert_array_equal(h5["weights"][:], population.weights(select))
        assert h5["weights"].dtype == np.dtype("<f4")
        np.testing.assert_array_equal(h5["seed"][:], population.seeds)
        np.testing.assert_array_equal(h5["network"][:], np.arange(20))
        for name, values in population.metrics.items():
            np.testing.assert_array_equal(h5["metrics"][name][:], values)
        assert fake.WeightSpec.from_json(h5["spec"][()].decode()) == fake.SPEC.select(select)
        assert Recipe.parse(h5["recipe"][()].decode()) == population.recipe
        assert json.loads(h5["environment"][()]) == population.environment
    with pytest.raises(UsageError, match="expected the name of a file, found a folder"):
        export(population, folder)
    first = file.read_bytes()
    assert export(population, tmp_path / "two.h5", select).read_bytes() == first


def test_an_exported_file_is_a_population(tmp_path: Path) -> None:
    """Also of a selection, and of a population of which a tile is missing; parts are cut at the same networks."""
    fake.write_population(tmp_path / "a.pop", fake.recipe(population__snapshots=[0, 2]), tiles=[0, 2])
    population = Population(tmp_path / "a.pop", partial=True)
    found = Population(export(population, tmp_path / "a.h5", "mlp*"))
    assert repr(found.spec) == repr(population.spec.select("mlp*"))
    assert found.recipe.training == population.recipe.training
    np.testing.assert_array_equal(found.indices, population.indices)
    np.testing.assert_array_equal(found.weights(), population.weights("mlp*"))
    np.testing.assert_array_equal(found[5:11], population.weights("mlp*")[5:11])
    np.testing.assert_array_equal(np.concatenate([*found.chunks("*fc1*", 5)]), population.weights("*fc1*"))
    np.testing.assert_array_equal(found.vector(17), population.weights("mlp*")[9])
    with pytest.raises(UsageError, match="no network 9; found 12"):
        found.vector(9)
    for part, other in zip(found.parts(8), population.parts(8), strict=True):
        np.testing.assert_array_equal(part.weights(), other.weights("mlp*"))
        np.testing.assert_array_equal(part.diverged, other.diverged)
    for name, values in population.metrics.items():
        np.testing.assert_array_equal(found.metrics[name], values)
    np.testing.assert_array_equal(found.seeds, population.seeds)
    with pytest.raises(UsageError, match="expected a snapshot after epoch 2; there are none"):
        found.at(2)
    assert open_source(tmp_path / "a.h5").rows()[0]["network"] == 0
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[3000] ^= 1
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.h5: checksum mismatch, expected sha256"):
        Population(tmp_path / "a.h5")


@pytest.mark.parametrize("share", [0.05, 0.9])
def test_export_onto_a_full_disk_leaves_the_old_file_and_the_interpreter(
    folder: Path, tmp_path: Path, share: float
) -> None:
    """Whether the space ends among HDF5's headers, the weights or the texts."""
    target, population = tmp_path / "one.h5", Population(folder)
    limit = int(share * export(population, target).stat().st_size)
    target.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(WeightscopeError, match=r"cannot write .*File too large") as error:
            export(population, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pop", "one.h5"]


@pytest.mark.parametrize(("name", "fingerprint"), [
    ("digits-convnext", "ca1f16a916d25b04"),
    ("digits-vit", "5d24bc59ee1e3d4e"),
    ("copying-mamba-two-cores", "a6b316bf37d678f6"),
])  # fmt: skip
def test_populations_made_before_a_field_was_added_have_their_fingerprint(name: str, fingerprint: str) -> None:
    """Another one here means that every population of today is refused: name new fields in `Section.added`."""
    assert manifests.Manifest(Recipe.load(name), fake.SPEC, {}, 1).fingerprint == fingerprint
