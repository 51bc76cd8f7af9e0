"""Checkpoints at a hub: pinning, cache, offline mode, tokens, and what can go wrong."""

import io
import json

import pytest
import torch
from hub_server import COMMIT, REPOSITORY, Hub, connect, go_offline, isolate, serving
from safetensors.torch import save

from weightscope.analysis.attention_products import products
from weightscope.anatomy import attention
from weightscope.checkpoint import Checkpoint
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
NAME = "model.embed_tokens.weight"


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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    isolate(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch):
    with serving(Hub(sharded())) as hub:
        connect(monkeypatch, hub.url)
        yield hub


def files_asked(hub):
    return {path.rpartition("/")[2] for method, path, *_ in hub.requests if method == "GET" and "/resolve/" in path}


def test_a_sharded_model_is_downloaded_once(hub):
    hub.files["other.bin"] = b"not asked for"
    checkpoint = Checkpoint(SOURCE)
    assert checkpoint.commit == COMMIT
    assert files_asked(hub) == hub.files.keys() - {"other.bin"}
    for name in checkpoint:
        assert torch.equal(checkpoint[name], TENSORS[name].float())
    assert [part.heads for part in attention(checkpoint)] == [4] * LAYERS
    before = hub.sent
    assert {row["layer"] for row in products(SOURCE).records} == {*range(LAYERS)}
    assert {found.status for found in checkpoint.check()} == {"verified"}
    assert hub.sent == before


@pytest.mark.parametrize("source", [SOURCE, f"{SOURCE}@{COMMIT}"])
def test_it_works_offline_afterwards(hub, monkeypatch, source, caplog):
    value = Checkpoint(SOURCE)[NAME]
    go_offline(monkeypatch)
    count = len(hub.requests)
    again = Checkpoint(source)
    assert again.commit == COMMIT
    assert torch.equal(again[NAME], value)
    assert "from the cache" in caplog.text
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids downloads"):
        Checkpoint("hf://org/unknown")
    assert len(hub.requests) == count


def test_the_cache_is_used_when_the_hub_is_down(monkeypatch, caplog):
    with serving(Hub(sharded())) as hub:
        connect(monkeypatch, hub.url)
        value = Checkpoint(SOURCE)[NAME]
    assert torch.equal(Checkpoint(SOURCE)[NAME], value)
    assert "from the cache" in caplog.text


def test_a_gated_model_needs_its_token(hub, monkeypatch):
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert torch.equal(Checkpoint(f"{SOURCE}@v1")[NAME], TENSORS[NAME])


BAD = {
    "gated": ("token", "x", r"401 \(gated\): it is gated: ask for access"),
    "no model": ("fail", {"api": [404]}, "404: no such model, revision or file"),
}


@pytest.mark.parametrize("row", BAD)
def test_every_failure_is_one_line(hub, row):
    setting, value, message = BAD[row]
    setattr(hub, setting, value)
    with pytest.raises(DataError, match=message) as error:
        Checkpoint(SOURCE)
    assert "\n" not in str(error.value)


def test_a_model_of_pickles(hub):
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    hub.files = {"pytorch_model.bin": buffer.getvalue()}
    checkpoint = Checkpoint(SOURCE)
    for name in TENSORS:
        assert torch.equal(checkpoint[name], TENSORS[name].float())
