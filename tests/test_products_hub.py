"""`products` of a model at a hub: only the attention's tensors travel, once, and never again."""

import json

import pytest
import torch
from hub_server import REPOSITORY, Hub, connect, go_offline, header_bytes, isolate, serving
from safetensors.torch import save

from weightscope.analysis.attention_products import products
from weightscope.errors import DataError

SOURCE = f"hf://{REPOSITORY}"
WIDTH, LAYERS = 256, 3


def sharded() -> dict[str, bytes]:
    g = torch.Generator().manual_seed(0)
    names = {f"model.layers.{i}.self_attn.{p}_proj.weight": (WIDTH, WIDTH) for i in range(LAYERS) for p in "qkvo"}
    names |= {f"model.layers.{i}.mlp.up_proj.weight": (4 * WIDTH, WIDTH) for i in range(LAYERS)}
    state = {name: torch.randn(shape, generator=g).half() for name, shape in sorted(names.items())}
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": WIDTH}
    files, table, half = {"config.json": json.dumps(config).encode()}, {}, len(state) // 2
    for i, part in enumerate((list(state)[:half], list(state)[half:]), 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        files[shard] = save({name: state[name] for name in part})
        table |= dict.fromkeys(part, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": table}).encode()
    return files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    isolate(monkeypatch, tmp_path / "cache")
    with serving(Hub(sharded())) as hub:
        connect(monkeypatch, hub.url)
        yield hub


@pytest.mark.parametrize("layers", [[1], None])
def test_what_travels_is_the_attention_and_the_headers(hub, layers):
    found = products(SOURCE, layers=layers)
    tensors = (len(layers) if layers else LAYERS) * 4 * WIDTH * WIDTH * 2
    assert tensors < hub.sent <= 1.05 * tensors + header_bytes(hub.files)
    assert found.sources[0].bytes_read == hub.sent
    assert len(hub.ranges()) == len(set(hub.ranges()))
    assert found.sources[0].commit is not None


def test_nothing_travels_twice_and_it_works_offline_afterwards(hub, monkeypatch):
    first = products(SOURCE, layers=[0])
    everything = products(SOURCE)
    assert len(hub.ranges()) == len(set(hub.ranges()))
    count = len(hub.requests)
    go_offline(monkeypatch)
    again = products(SOURCE, biases=True, fold_norms=False)
    assert again.sources[0].bytes_read == 0
    assert len(hub.requests) == count
    assert [r["beta"] for r in again.records] == [r["beta"] for r in everything.records]
    assert first.records == [r for r in everything.records if r["layer"] == 0]


def test_a_layer_that_is_not_in_the_cache_is_said_to_be_missing_offline(hub, monkeypatch):
    products(SOURCE, layers=[0])
    go_offline(monkeypatch)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids"):
        products(SOURCE, layers=[2])
