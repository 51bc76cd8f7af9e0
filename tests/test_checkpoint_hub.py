"""Checkpoints at a hub: bytes fetched, pinning, cache, offline mode, tokens, and everything that can go wrong."""

import hashlib
import io
import json
import re

import pytest
import torch
from hub_server import COMMIT, REPOSITORY, Hub, connect, go_offline, header_bytes, isolate, serving
from safetensors.torch import save

from weightscope.analysis.attention_products import products
from weightscope.anatomy import attention
from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint import hub as hub_module
from weightscope.errors import DataError

SOURCE = f"hf://{REPOSITORY}"
CONFIG = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 64}
LAYERS = 3


def tensors(layers=LAYERS, width=64):
    generator = torch.Generator().manual_seed(0)
    out = {"model.embed_tokens.weight": torch.randn(100, width, generator=generator)}
    for i in range(layers):
        for part in "qkvo":
            name = f"model.layers.{i}.self_attn.{part}_proj.weight"
            out[name] = torch.randn(width, width, generator=generator).to(torch.float16)
        out[f"model.layers.{i}.mlp.up_proj.weight"] = torch.randn(4 * width, width, generator=generator)
    return out


TENSORS = tensors()
EMBEDDING = "model.embed_tokens.weight"


def sharded(state=TENSORS):
    """Two shards with an index and a config."""
    names = list(state)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files, table = {"config.json": json.dumps(CONFIG).encode()}, {}
    for i, half in enumerate(halves, 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        files[shard] = save({name: state[name] for name in half})
        table |= dict.fromkeys(half, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": table}).encode()
    return files


def statuses(checkpoint):
    return [found.status for found in checkpoint.check(download=True)]


def single(state=TENSORS):
    return {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(state)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    isolate(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch):
    with serving(Hub(sharded())) as hub:
        connect(monkeypatch, hub.url)
        yield hub


def test_one_layer_costs_the_bytes_of_its_tensors_and_the_headers(hub):
    checkpoint = Checkpoint(SOURCE)
    overhead = hub.sent
    assert overhead <= 1.05 * header_bytes(hub.files)
    wanted = [name for name in checkpoint if "layers.1.self_attn" in name]
    assert len(wanted) == 4
    for name in wanted:
        assert torch.equal(checkpoint[name], TENSORS[name].float())
    assert hub.sent - overhead == sum(TENSORS[name].nbytes for name in wanted)
    assert checkpoint.bytes_read == hub.sent
    assert [part.heads for part in attention(checkpoint)] == [4] * LAYERS
    assert {row["layer"] for row in products(SOURCE, layers=[1]).records} == {1}
    assert len(hub.ranges()) == len(set(hub.ranges())), "no range is fetched twice"


def test_it_works_offline_afterwards(hub, monkeypatch):
    first = Checkpoint(SOURCE)
    name = first.names[3]
    value = first[name]
    count = len(hub.requests)
    assert Checkpoint(f"{SOURCE}@{COMMIT}").commit == COMMIT
    assert len(hub.requests) == count, "a commit that is cached needs no request"
    assert Checkpoint(f"{SOURCE}@v1").commit == COMMIT
    count = len(hub.requests)
    go_offline(monkeypatch)
    again = Checkpoint(SOURCE)
    assert torch.equal(again[name], value)
    assert again.bytes_read == 0
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE forbids"):
        again[first.names[4]]
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids"):
        Checkpoint("hf://org/unknown")
    assert len(hub.requests) == count


def test_the_cache_is_used_when_the_hub_is_down(monkeypatch, caplog):
    with serving(Hub(sharded())) as hub:
        connect(monkeypatch, hub.url)
        value = Checkpoint(SOURCE)["model.embed_tokens.weight"]
    again = Checkpoint(SOURCE)
    assert torch.equal(again["model.embed_tokens.weight"], value)
    assert "from the cache" in caplog.text


def test_the_token_goes_to_the_endpoint_and_nowhere_else(hub, monkeypatch):
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(Hub(hub.files)) as storage:
        hub.storage = storage.url
        checkpoint = Checkpoint(SOURCE)
        assert torch.equal(checkpoint["model.embed_tokens.weight"], TENSORS["model.embed_tokens.weight"])
        assert storage.ranges()
        assert not any(authorised for *_, authorised in storage.requests)
        # The address of the storage is used again, without asking the hub for each range.
        before = len(hub.requests)
        checkpoint[checkpoint.names[5]]
        assert len(hub.requests) == before
        # When its signature has run out, the hub is asked again.
        storage.fail = {name: [403] for name in hub.files}
        checkpoint[checkpoint.names[6]]
        assert len(hub.requests) == before + 1
    assert all(authorised for *_, authorised in hub.requests)


def test_passing_trouble_is_waited_for(hub, monkeypatch):
    hub.fail = {"api": [503, 500], "model.safetensors.index.json": [429]}
    checkpoint = Checkpoint(SOURCE)
    assert len(checkpoint) == len(TENSORS)
    first, second = checkpoint.names[:2]
    hub.drop = 2
    assert torch.equal(checkpoint[first], TENSORS[first].float())
    assert hub.drop == 0
    hub.fail = {name: [503] * 9 for name in hub.files}
    with pytest.raises(DataError, match=r"503.*try again later"):
        checkpoint[second]
    hub.fail = {name: [503] * 2 for name in hub.files}
    assert torch.equal(checkpoint[second], TENSORS[second].float())
    monkeypatch.setattr(hub_module, "_RANGE", 5000)
    third, before = checkpoint.names[4], len(hub.ranges())
    assert torch.equal(checkpoint[third], TENSORS[third].float())
    assert len(hub.ranges()) - before == -(-TENSORS[third].nbytes // 5000)


BAD = {
    "gated": ("token", "x", "GatedRepo.*gated"),
    "no model": ("fail", {"api": [404]}, "404.*check the name"),
    "dropped forever": ("drop", 1000, "no answer from the hub"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", BAD)
def test_every_failure_is_one_line(hub, row):
    setting, value, message = BAD[row]
    setattr(hub, setting, value)
    with pytest.raises(DataError, match=message) as error:
        Checkpoint(SOURCE)["model.embed_tokens.weight"]
    assert "\n" not in str(error.value)
    assert len(hub.requests) < 20


def test_a_download_that_does_not_match_its_hash_is_refused_and_removed(hub):
    hub.files = single()
    hub.corrupt = True
    with pytest.raises(DataError, match=r"expected sha256.*it was removed"):
        Checkpoint(SOURCE).check(download=True)
    hub.corrupt = False
    assert statuses(Checkpoint(SOURCE)) == ["verified"] * 2  # config.json, too


def test_a_damaged_cache_is_fetched_again(hub, cache):
    name = "model.embed_tokens.weight"
    Checkpoint(SOURCE)[name]
    for path in cache.rglob("*"):
        if path.is_file() and "hub" not in path.parts:
            path.write_bytes(b"{" if path.suffix == ".json" else path.read_bytes()[:-1])
    assert torch.equal(Checkpoint(SOURCE)[name], TENSORS[name])


def pickled(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_a_model_of_pickles_is_fetched_whole_and_its_hash_checked(hub, monkeypatch):
    hub.files = {"pytorch_model.bin": pickled(TENSORS)}
    checkpoint = Checkpoint(SOURCE)
    for name in TENSORS:
        assert torch.equal(checkpoint[name], TENSORS[name].float())
    assert checkpoint.bytes_read == hub.sent
    assert hub.sent <= 1.05 * len(hub.files["pytorch_model.bin"])
    go_offline(monkeypatch)
    assert len(Checkpoint(SOURCE)) == len(TENSORS)


def downloaded(files, root, commit=COMMIT):
    """Files as huggingface_hub caches them: blobs by hash, and a snapshot of links to them."""
    folder = root / f"models--{REPOSITORY.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    for name, raw in files.items():
        blob = hashlib.sha256(raw).hexdigest()
        (folder / "blobs" / blob).write_bytes(raw)
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob}")
    return folder


@pytest.mark.parametrize("count", [2, 4])
def test_of_a_download_only_the_rest_is_fetched(hub, tmp_path, count):
    """Some of the files were downloaded before, or all of them."""
    first = sorted(hub.files, key=lambda name: name == "config.json")[:count]
    downloaded({name: hub.files[name] for name in first}, tmp_path / "cache/hub")
    checkpoint = Checkpoint(SOURCE)
    for name in checkpoint:
        assert torch.equal(checkpoint[name], TENSORS[name].float())
    assert checkpoint.config == CONFIG
    assert not any(path.endswith(tuple(first)) for _, path, *_ in hub.requests)
    assert len(hub.ranges()) == len(set(hub.ranges()))
    assert (hub.sent == 0) == (count == 4)
    assert checkpoint.bytes_read == hub.sent
    assert statuses(checkpoint) == ["verified"] * 4


def test_another_commit_that_was_downloaded_is_not_used(hub, tmp_path):
    hub.files = single()
    downloaded(single({"other": torch.ones(1)}), tmp_path / "cache/hub", commit="0" * 40)
    assert set(Checkpoint(SOURCE)) == set(TENSORS)


@pytest.mark.parametrize("gone", ["offline", "dead"])
def test_a_download_is_enough_without_the_hub(tmp_path, monkeypatch, gone):
    connect(monkeypatch, "http://127.0.0.1:9")
    if gone == "offline":
        go_offline(monkeypatch)
    downloaded(single(), tmp_path / "cache/hub")
    for source in (SOURCE, f"{SOURCE}@{COMMIT}"):
        checkpoint = Checkpoint(source)
        assert checkpoint.commit == COMMIT
        assert torch.equal(checkpoint[EMBEDDING], TENSORS[EMBEDDING])


def test_a_damaged_download_fails_verification(hub, tmp_path):
    hub.files = single()
    folder = downloaded(hub.files, tmp_path / "cache/hub")
    blob = (folder / "snapshots" / COMMIT / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    found = {check.name: check for check in Checkpoint(SOURCE).check(download=True)}["model.safetensors"]
    assert found.status == "damaged"
    assert re.search(r"checksum mismatch.*delete ", found.detail)
    assert blob.exists()
