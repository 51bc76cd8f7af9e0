"""Damage between writing and reading: a hub's files, cached downloads, artifacts, torch files, populations."""

import hashlib
import json

import numpy as np
import pytest
import torch
from fake_training import recipe, write_population
from hub_server import REPOSITORY, Hub, connect, isolate, serving
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save
from torch import nn

from weightscope import Checkpoint, verify
from weightscope.analysis import inspection
from weightscope.cli import main
from weightscope.errors import DataError
from weightscope.fits import load_artifact
from weightscope.fits.artifact import digest
from weightscope.fits.fitting import fit
from weightscope.fits.one_network import fit_network
from weightscope.init import load_init
from weightscope.spec import WeightSpec
from weightscope.statistics.samples import WeightArray

SOURCE = f"hf://{REPOSITORY}"
STATE = {
    f"layers.{i}.self_attn.{p}_proj.weight": torch.randn(16, 16, generator=torch.Generator().manual_seed(i))
    for i in range(2)
    for p in "qkvo"
}
NAME = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    isolate(monkeypatch, tmp_path / "cache")
    files = {"config.json": b'{"num_attention_heads": 2}', "model.safetensors": save(STATE)}
    with serving(Hub(files)) as hub:
        connect(monkeypatch, hub.url)
        yield hub


def flip(path, place, bit=1):
    raw = bytearray(path.read_bytes())
    raw[place] ^= bit
    path.write_bytes(raw)


@pytest.mark.slow
def test_verify_of_a_model_at_the_hub(hub, capsys):
    """By the hashes that name the files in huggingface_hub's cache: SHA-256, and git's SHA-1 of small files."""
    checkpoint = Checkpoint(SOURCE)
    found = verify(SOURCE)
    assert [row["status"] for row in found.files] == ["verified"] * 2
    assert {row["compared"] for row in found.files} == {"sha256", "sha1"}
    flip(next(file for file in checkpoint._files.opened if file.suffix == ".safetensors"), -1)
    with pytest.raises(SystemExit) as error:
        main(["verify", SOURCE])
    assert error.value.code == 3
    assert "checksum mismatch" in capsys.readouterr().err


def artifact(tmp_path, kind):
    path = tmp_path / f"{kind}.safetensors"
    if kind == "network":
        return fit_network(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)), "filters").save(path)
    spec = WeightSpec.of(nn.Linear(4, 3))
    weights = np.random.default_rng(0).standard_normal((30, spec.size))
    return fit(WeightArray(weights, spec), "*", structure="dense").save(path)


@pytest.mark.parametrize("kind", ["network", "population"])
def test_one_flipped_bit_of_an_artifact_is_refused(tmp_path, kind, capsys):
    path = artifact(tmp_path, kind)
    load_artifact(path)
    assert verify(path).files == ({"name": path.name, "status": "verified", "compared": "sha256", "detail": ""},)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    places = np.random.default_rng(1).integers(8 + length, len(raw), 20).tolist()
    places += [raw.index(b"1", raw.index(b"version"))]
    for place in places:
        flip(path, place, 0x40 if place >= 8 + length else 1)
        with pytest.raises(DataError, match=r"checksum mismatch|version"):
            load_artifact(path)
        with pytest.raises(DataError):
            load_init(path)
        path.write_bytes(raw)
    flip(path, -1, 0x40)
    with pytest.raises(SystemExit) as error:
        main(["verify", str(path)])
    assert error.value.code == 3
    assert "checksum mismatch: expected sha256" in capsys.readouterr().err


def test_an_artifact_of_huge_numbers_writes_no_infinity(tmp_path):
    path = artifact(tmp_path, "population")
    with safe_open(path, "numpy") as file:
        header = file.metadata()["weightscope"]
    arrays = load_file(path)
    arrays["0.mean"][3] = 1e300
    save_file(arrays, path, metadata={"weightscope": header})
    with pytest.raises(DataError, match="checksum mismatch"):  # without its checksum
        load_init(path)
    save_file(arrays, path, metadata={"weightscope": header, "sha256": digest(header, arrays)})
    net = nn.Linear(4, 3)
    kept = net.weight.clone()
    with pytest.raises(DataError, match=r"beyond the range of torch.float32.*nothing was changed"):
        load_init(path)(net)
    assert torch.equal(net.weight, kept)


def test_records_of_a_torch_file_are_compared_with_their_crc(tmp_path):
    path, base = tmp_path / "m.pt", torch.randn(2000)
    torch.save({"a": base}, path)
    assert verify(path).files[0]["compared"] == "crc32"
    flip(path, path.read_bytes().index(base[1000:1010].numpy().tobytes()))
    (damaged,) = verify(path).damaged
    assert "checksum mismatch of its record m/data/0" in damaged


def test_torch_files_without_crc_are_read_and_unverified(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(5)}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(Checkpoint(tmp_path / "m.pt")["a"], torch.ones(5))
    assert verify(tmp_path / "m.pt").files[0]["status"] == "unverified"


def test_a_file_of_a_download_cache_is_compared_with_its_name(tmp_path):
    raw = save(STATE)
    digest = hashlib.sha256(raw).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest).write_bytes(raw)
    (tmp_path / "model.safetensors").symlink_to(f"blobs/{digest}")
    assert verify(tmp_path / "model.safetensors").files[0]["status"] == "verified"
    flip(tmp_path / "blobs" / digest, -1)
    assert "checksum mismatch" in verify(tmp_path / "model.safetensors").damaged[0]


def test_verify_of_a_population_names_every_damaged_shard(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.pop"
    write_population(path, recipe())
    found = verify(path)
    assert {row["status"] for row in found.files} == {"verified"}
    shard = sorted((path / "shards").glob("*.h5"))[-1]
    flip(shard, -20)
    found = verify(path)
    assert [row["name"] for row in found.files if row["status"] == "damaged"] == [shard.name]
    monkeypatch.setattr(inspection, "_PART", 0)
    assert verify(path, workers=2) == found
    with pytest.raises(SystemExit) as error:
        main(["verify", str(path), "--json", str(tmp_path / "v.json")])
    assert error.value.code == 3
    assert shard.name in capsys.readouterr().err
    assert json.loads((tmp_path / "v.json").read_text())["files"][-1]["status"] == "damaged"


def test_shards_that_are_not_there_are_listed(tmp_path):
    write_population(tmp_path / "a.pop", recipe(), tiles=[0, 1])
    assert [row["status"] for row in verify(tmp_path / "a.pop").rows()] == ["verified", "verified", "missing"]
    (tmp_path / "a.pop" / "shards" / "00001.h5").unlink()
    assert verify(tmp_path / "a.pop").summary().endswith("1 verified, 2 missing")
