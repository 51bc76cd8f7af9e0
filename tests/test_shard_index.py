"""`shards.npz` saves reading shards that have not changed, and hides none that has."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest

from weightscope._util.sources import open_regular
from weightscope.errors import DataError
from weightscope.population import Population, shards
from weightscope.population import manifest as manifests


@pytest.fixture
def indexed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A population whose shards have been scanned, and have an index although they are three."""
    monkeypatch.setattr(shards, "_INDEXED", 1)
    assert kinds(folder) == ["done"] * 3
    assert (folder / shards.INDEX).exists()
    return folder


def kinds(folder: Path) -> list[str]:
    return [state.kind for _, state in sorted(shards.states(folder, manifests.read(folder)).items())]


def flip(file: Path, where: int = 2000) -> None:
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(data)


def test_nothing_is_opened_that_has_not_changed(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Population(indexed)
    (indexed / shards.INDEX).rename(indexed / "aside")
    monkeypatch.setattr(shards, "_INDEXED", 100)
    read = Population(indexed)
    np.testing.assert_array_equal(found.seeds, read.seeds)
    assert found.provenance() == read.provenance()
    assert found.metrics.keys() == read.metrics.keys()
    (indexed / "aside").rename(indexed / shards.INDEX)
    opened: list[str] = []
    monkeypatch.setattr(shards, "open_regular", lambda file: opened.append(file.name) or open_regular(file))
    again = Population(indexed)
    for name, values in read.metrics.items():
        np.testing.assert_array_equal(again.metrics[name], values, strict=True)
    assert kinds(indexed) == ["done"] * 3
    assert opened == [shards.INDEX] * 2
    os.utime(indexed / "shards/00001.h5")
    assert kinds(indexed) == ["done"] * 3
    assert opened[2:] == [shards.INDEX, "00001.h5", "00001.h5.sha256"]


CHANGES = {
    "a flipped bit": lambda file: flip(file),
    "truncated": lambda file: os.truncate(file, 1000),
    "replaced, with its old times": lambda file: (
        shutil.copy2(file, file.with_name("x")),
        flip(file.with_name("x")),
        shutil.copystat(file, file.with_name("x")),
        file.with_name("x").replace(file),
    ),
    "without its hash": lambda file: file.with_name(file.name + ".sha256").unlink(),
    "another hash": lambda file: file.with_name(file.name + ".sha256").write_text("0" * 64 + f"  {file.name}\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_was_changed_is_damaged(indexed: Path, change: str) -> None:
    CHANGES[change](indexed / "shards/00001.h5")
    assert kinds(indexed) == ["done", "damaged", "done"]
    with pytest.raises(DataError, match=r"00001\.h5"):
        _ = Population(indexed).metrics


def moved(values: dict[str, np.ndarray]) -> None:
    values["rows"][:2] -= 1, -1


def of_another_type(values: dict[str, np.ndarray]) -> None:
    table = values["table"]
    values["table"] = table.astype(
        [(name, "f8" if name == "diverged" else table.dtype[name]) for name in table.dtype.names]
    )


def unprintable(values: dict[str, np.ndarray]) -> None:
    values["made"] = np.array([b"\xff\x1b[2J"] * len(values["made"]))


def negative(values: dict[str, np.ndarray]) -> None:
    values["rows"][0] *= -1


@pytest.mark.parametrize("change", [negative, moved, of_another_type, unprintable])
def test_an_index_of_wrong_content_changes_no_metric(indexed: Path, change: Callable[..., None]) -> None:
    with np.load(indexed / shards.INDEX) as stored:
        values = dict(stored)
    expected = Population(indexed).diverged
    change(values)
    np.savez(indexed / shards.INDEX, **values)
    found = Population(indexed)
    np.testing.assert_array_equal(found.diverged, expected, strict=True)
    assert "".join(found.provenance()).isprintable()


def test_a_foreign_pair_of_shard_and_hash_is_refused(indexed: Path, tmp_path: Path) -> None:
    fake.write_population(tmp_path / "other.pop", fake.recipe(population__seed=8))
    for end in ("", ".sha256"):
        (tmp_path / f"other.pop/shards/00001.h5{end}").rename(indexed / f"shards/00001.h5{end}")
    with pytest.raises(DataError, match="foreign"):
        kinds(indexed)
    shutil.copy(indexed / shards.INDEX, tmp_path / "other.pop" / shards.INDEX)
    assert kinds(tmp_path / "other.pop") == ["done"] * 2  # of the other two


def test_bits_that_change_without_a_trace_are_found_by_reading_and_then_by_scans(indexed: Path) -> None:
    """What a failing disk does: size and times stay. A scan cannot see it, reading can."""
    file = indexed / "shards/00001.h5"
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kinds(indexed) == ["done"] * 3
    with pytest.raises(DataError, match="checksum mismatch"):
        Population(indexed).weights()
    assert kinds(indexed) == ["done", "damaged", "done"]


@pytest.mark.parametrize("part", range(8))
def test_a_damaged_index_is_as_none(indexed: Path, part: int) -> None:
    file, metrics = indexed / shards.INDEX, Population(indexed).metrics
    data = file.read_bytes()
    if part % 2:
        file.write_bytes(data[: len(data) * part // 8])
    else:
        flip(file, len(data) * part // 8)
    assert kinds(indexed) == ["done"] * 3
    for name, values in Population(indexed).metrics.items():
        np.testing.assert_array_equal(values, metrics[name], strict=True)


def test_a_population_that_grows_has_its_short_tile_read_again(indexed: Path) -> None:
    manifest = manifests.read(indexed).resized(24)
    states = shards.states(indexed, manifest)
    assert [states[tile].kind for tile in range(3)] == ["done", "done", "short"]
    fake.write_population(indexed, fake.recipe(networks=24))
    manifests.record_size(indexed, manifest)
    assert kinds(indexed) == ["done"] * 3
    assert len(Population(indexed).seeds) == 24


def test_a_scan_that_is_stopped_keeps_what_it_has_read(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (indexed / shards.INDEX).unlink()
    manifest, opened = manifests.read(indexed), shards.open_shard

    def stopped(file: Path, *rest: object, **options: object) -> object:
        if file.name == "00002.h5":
            raise KeyboardInterrupt
        return opened(file, *rest, **options)

    monkeypatch.setattr(shards, "open_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        shards.states(indexed, manifest)
    monkeypatch.setattr(shards, "open_shard", lambda file, *rest: seen.append(file.name) or opened(file, *rest))
    seen: list[str] = []
    assert kinds(indexed) == ["done"] * 3
    assert seen == ["00002.h5"]


@pytest.mark.parametrize("turn", ["written", "replaced"])
def test_shards_that_others_write_during_a_scan_are_read_again(
    indexed: Path, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    """What is kept has the signature from before the shard was opened, so it may be too old, and never too new."""
    (indexed / shards.INDEX).unlink()
    manifest, opened = manifests.read(indexed), shards.open_shard
    file = shards.shard_file(indexed, 1)

    def meanwhile(there: Path, *rest: object, **options: object) -> object:
        if there == file and turn == "written":  # before it is opened
            shutil.copy2(file, file.with_name("x"))
            file.with_name("x").replace(file)
        if there.name == "00002.h5" and turn == "replaced":  # after it was read
            flip(file)
        return opened(there, *rest, **options)

    monkeypatch.setattr(shards, "open_shard", meanwhile)
    shards.states(indexed, manifest)
    monkeypatch.setattr(shards, "open_shard", lambda there, *rest: seen.append(there.name) or opened(there, *rest))
    seen: list[str] = []
    assert kinds(indexed) == ["done", "damaged" if turn == "replaced" else "done", "done"]
    assert seen == ["00001.h5"]


def test_of_two_runs_that_record_their_size_the_larger_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller one reads, waits, and writes last, unless the other waits for it."""
    first, read = manifests.read(folder), manifests.read
    small, large = (first.resized(first.networks + n) for n in (1, 2))
    threads = [threading.Thread(target=manifests.record_size, args=(folder, size)) for size in (small, large)]

    def slowly(path: Path) -> manifests.Manifest:
        found = read(path)
        if threading.current_thread() is threads[0]:
            threads[1].start()
            threads[1].join(0.5)
        return found

    monkeypatch.setattr(manifests, "read", slowly)
    threads[0].start()
    threads[0].join()
    threads[1].join()
    assert read(folder).networks == large.networks
