"""`Checkpoint`: one contract for every kind of source, and what it makes of odd numbers."""

import argparse
import json
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import nn

from weightscope import Checkpoint
from weightscope.checkpoint.checkpoint import MissingTensor
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, groups=4)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 6).half()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
        self.wide = nn.Linear(2, 2).double()
        self.empty = nn.Parameter(torch.zeros(0, 3))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network()


def sharded(state, folder):
    folder.mkdir()
    table = {}
    for i, names in enumerate((list(state)[0::2], list(state)[1::2]), 1):
        shard = f"model-0000{i}-of-00002.safetensors"
        save_file({name: state[name] for name in names}, folder / shard)
        table |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (folder / "config.json").write_text('{"num_attention_heads": 2}')
    return folder


def plain(state, path):
    save_file(dict(state), path)
    return path


def pickled(state, path, **options):
    torch.save(state, path, **options)
    return path


def distributed(state, path):
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        torch.distributed.checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return path


def folder_of(state, folder):
    folder.mkdir()
    return plain(state, folder / "model.safetensors").parent


SOURCES = {
    "safetensors": lambda m, p: plain(m.state_dict(), p / "m.safetensors"),
    "folder": lambda m, p: folder_of(m.state_dict(), p / "model"),
    "sharded folder": lambda m, p: sharded(m.state_dict(), p / "model"),
    "index": lambda m, p: sharded(m.state_dict(), p / "model") / "model.safetensors.index.json",
    "torch zip": lambda m, p: pickled(m.state_dict(), p / "m.pt"),
    "torch stream": lambda m, p: pickled(m.state_dict(), p / "m.pth", _use_new_zipfile_serialization=False),
    "parameters": lambda m, p: pickled(dict(m.state_dict(keep_vars=True)), p / "m.bin"),
    "protocol 4": lambda m, p: pickled(dict(m.state_dict()), p / "m.bin", pickle_protocol=4),
    "training": lambda m, p: pickled({"epoch": 3, "state_dict": m.state_dict(), "best": 0.5}, p / "m.pt"),
    "pth.tar": lambda m, p: pickled({"arch": "vit", "state_dict": m.state_dict()}, p / "model_best.pth.tar"),
    "distributed": lambda m, p: distributed({"model": m.state_dict(), "epoch": 3}, p / "step-100"),
    "text path": lambda m, p: str(plain(m.state_dict(), p / "m.safetensors")),
    "module": lambda m, p: m,
    "state dict": lambda m, p: m.state_dict(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_keeps_the_contract(network, tmp_path, kind):
    source = SOURCES[kind](network, tmp_path)
    checkpoint = Checkpoint(source)
    state = network.state_dict()
    weights = [name for name, value in state.items() if value.is_floating_point()]
    assert sorted(checkpoint) == sorted(checkpoint.names) == sorted(weights)
    assert len(checkpoint) == len(weights)
    assert "norm.num_batches_tracked" in checkpoint.skipped
    assert "norm.num_batches_tracked" not in checkpoint
    for name in weights:
        assert checkpoint.shape(name) == tuple(state[name].shape)
        assert checkpoint.dtype(name) == state[name].dtype
    for name in weights:
        for _ in range(2):  # a copy each time
            value = checkpoint[name]
            assert value.dtype == (torch.float64 if state[name].dtype == torch.float64 else torch.float32)
            assert torch.equal(value, state[name].to(value.dtype))
            assert not value.requires_grad
            value.zero_()
        raw = checkpoint.raw(name)
        assert torch.equal(raw, state[name])
        assert raw.dtype == state[name].dtype
        raw.zero_()
    assert network.conv.weight.any()
    assert torch.equal(checkpoint.raw("norm.num_batches_tracked"), state["norm.num_batches_tracked"])
    roles = {t.name: (t.shape, t.role) for t in checkpoint.spec.tensors}
    assert roles == {t.name: (t.shape, t.role) for t in WeightSpec.of(network).tensors}
    assert checkpoint.nonfinite == {}


@pytest.mark.parametrize("save", ["m.pt", "stream"])
def test_views_ties_and_strides_of_torch_files(tmp_path, save):
    base = torch.randn(6, 8, dtype=torch.float64)
    state = {
        "base": base,
        "tied": base,
        "transposed": base.T,
        "rows": base[2:4],
        "column": base[:, 3],
        "steps": base[::2, ::3],
        "expanded": torch.ones(1).expand(5),
        "scalar": base[1, 1],
    }
    torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=save == "m.pt")
    checkpoint = Checkpoint(tmp_path / "m.pt")
    assert not checkpoint.skipped
    for name in state:
        assert torch.equal(checkpoint[name], state[name])
        assert checkpoint[name].is_contiguous()
    assert checkpoint.spec.names == ("base", "transposed", "rows", "column", "steps", "expanded", "scalar")


def test_a_file_saved_on_a_gpu_needs_none(tmp_path):
    torch.save({"w": torch.arange(3.0)}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(raw.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))
    assert Checkpoint(tmp_path / "m.pt")["w"].tolist() == [0, 1, 2]


def test_objects_beside_the_weights_are_inert(tmp_path):
    beside = {"args": argparse.Namespace(lr=0.1), "best": np.float64(0.5), "folder": Path("out"), "epochs": {1, 2}}
    beside |= {"optimiser": torch.optim.AdamW([torch.zeros(2)]).state_dict(), "order": np.arange(3)}
    for new in (True, False):
        torch.save({"model": {"w": torch.ones(2)}} | beside, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
        assert Checkpoint(tmp_path / "m.pt")["w"].tolist() == [1, 1]


class OfAUser(torch.Tensor):
    """As fastai's TensorBase; its class is not imported."""


def test_tensors_with_attributes_or_of_another_class_are_read(tmp_path):
    state = {"user": torch.ones(2).as_subclass(OfAUser), "buffer": nn.Buffer(torch.ones(2)), "marked": torch.ones(2)}
    state["marked"].source = Path("out")
    for new in (True, False):
        torch.save({"model": state}, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
        checkpoint = Checkpoint(tmp_path / "m.pt")
        assert checkpoint.names == ("user", "buffer", "marked")
        assert all(type(value) is torch.Tensor and value.tolist() == [1, 1] for value in checkpoint.values())


@pytest.mark.parametrize("beside", [{"acc": torch.ones(())}, {"ema": {"w": torch.ones(2)}}])
def test_an_object_where_the_weights_should_be_is_no_reason_to_read_other_tensors(tmp_path, beside):
    for model in (nn.Linear(2, 2), argparse.Namespace(w=torch.ones(2)), defaultdict(list, w=torch.zeros(2))):
        torch.save({"model": model, **beside}, tmp_path / "m.pt")
        with pytest.raises(DataError, match="expected a dictionary of tensors under 'model', found an object of"):
            Checkpoint(tmp_path / "m.pt")
        if "ema" in beside:
            assert Checkpoint(tmp_path / "m.pt", key="ema")["w"].tolist() == [1, 1]
        weights = {"w": torch.ones(2), "b": torch.ones(2)}
        torch.save({"model": model, "state_dict": weights, **beside}, tmp_path / "m.pt")
        assert Checkpoint(tmp_path / "m.pt")["w"].tolist() == [1, 1]
        torch.save({"model": "ViT", **weights, **beside}, tmp_path / "m.pt")
        assert {"w", "b"} <= {*Checkpoint(tmp_path / "m.pt")}


def test_training_checkpoints_list_what_is_skipped(tmp_path):
    first, second = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    beside = {"loss": torch.ones(()), "b": 3}  # `b` is a weight inside, too
    torch.save({"model": first | {"b": torch.zeros(1)}, "ema": second, **beside}, tmp_path / "m.pt")
    checkpoint = Checkpoint(tmp_path / "m.pt")
    assert not checkpoint["w"].any()
    assert checkpoint.names == ("w", "b")
    assert "outside the dictionary of weights, 'model'" in checkpoint.skipped["ema"]
    assert Checkpoint(tmp_path / "m.pt", key="ema")["w"].all()
    with pytest.raises(UsageError, match="no dictionary of tensors 'x'; expected one of 'model', 'ema'"):
        Checkpoint(tmp_path / "m.pt", key="x")
    torch.save({"a": first, "b": second}, tmp_path / "m.pt")
    with pytest.raises(DataError, match=r"several dictionaries.*--key .*: 'a', 'b'"):
        Checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("loose", [0, 1, 2, 3])
@pytest.mark.parametrize("key", ["state_dict", "layer._extra_state"])
def test_tensors_beside_a_dictionary_of_two(tmp_path, loose, key):
    """Whichever is taken, the other is named; as many beside a dictionary that could be the weights are refused."""
    state = {f"t{i}": torch.ones(()) for i in range(loose)} | {key: {"a": torch.zeros(2), "b": torch.zeros(2)}}
    torch.save(state, tmp_path / "m.pt")
    for source in (tmp_path / "m.pt", state):
        if key == "state_dict" and loose >= 2:
            with pytest.raises(DataError, match=f"{loose} tensors beside the dictionary 'state_dict' of 2"):
                Checkpoint(source)
            assert Checkpoint(source, key=key).names == ("a", "b")
            continue
        found = Checkpoint(source)
        assert len(found) == (2 if loose < 2 else loose)
        others = [name for name in state if name not in found and name != key] + [key] * (loose >= 2)
        assert [name for name in others if found.skipped[name].startswith("outside")] == others


def test_quarter_precision_and_quantised_tensors(tmp_path):
    state = {
        "a": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "b": torch.randn(4, 4).to(torch.float8_e5m2),
        "c.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "c.weight_scale": torch.ones(()),
        "d.qweight": torch.ones(2, dtype=torch.int32),
        "d.scales": torch.ones(2).half(),
        "e.weight": torch.ones(2, dtype=torch.uint8),
        "e.weight.absmax": torch.ones(2),
        "f": torch.ones(2, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
    }
    # The oldest safetensors writes no complex numbers: the same bytes are written as F64, and their type is renamed.
    path = plain(state | {"f": state["f"].view(torch.float64)}, tmp_path / "m.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"C64"'))
    checkpoint = Checkpoint(path)
    assert checkpoint.dtype("f") == torch.complex64
    assert set(checkpoint) == {"a", "b"}
    for name in checkpoint:
        assert torch.equal(checkpoint[name], state[name].float())
    assert "scales in `c.weight_scale`" in checkpoint.skipped["c.weight"]
    assert "belongs to the quantised `d.qweight`" in checkpoint.skipped["d.scales"]
    assert "belongs to the quantised `e.weight`" in checkpoint.skipped["e.weight.absmax"]
    for name, value in state.items():
        assert torch.equal(checkpoint.raw(name).flatten().view(torch.uint8), value.flatten().view(torch.uint8))
    with pytest.raises(MissingTensor, match="skipped: integers"):
        checkpoint["d.qweight"]
    with pytest.raises(KeyError, match="no tensor"):
        checkpoint["x\n"]
    assert checkpoint.get("x") is None


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_odd_tensors_are_skipped_with_a_reason(tmp_path):
    state = {"w": torch.ones(2), "s": torch.eye(3).to_sparse(), "n": 3}
    state["q"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save(state, tmp_path / "m.pt")
    skipped = {"q": "a quantised tensor", "s": "a sparse tensor"}
    for source in (tmp_path / "m.pt", state):
        assert Checkpoint(source).skipped == skipped | {"n": "a int, no tensor"}


def test_numbers_that_are_none_are_reported(tmp_path):
    value = torch.ones(3000, 3001)  # converted in pieces
    value[3, 4], value[2005, 6] = float("nan"), float("inf")
    state = {"a": value.half(), "b": torch.full((10,), 3e38), "c": torch.ones(3)}
    checkpoint = Checkpoint(plain(state, tmp_path / "m.safetensors"))
    assert torch.equal(checkpoint["a"].nan_to_num(5), value.nan_to_num(5))
    assert all(checkpoint[name] is not None for name in "bc")
    assert checkpoint.nonfinite == {"a": 2}


def test_modules_on_the_meta_device_and_with_tied_tensors():
    checkpoint = Checkpoint(nn.Linear(2, 2, device="meta"))
    assert checkpoint.shape("weight") == (2, 2)
    with pytest.raises(DataError, match="meta device"):
        checkpoint["weight"]
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    assert Checkpoint(module).spec == WeightSpec.of(module)


def test_invalid_sources(tmp_path):
    (tmp_path / "a.txt").touch()
    for source, kind, message in (
        (3, UsageError, "found int"),
        ("https://example.com/model.safetensors", UsageError, "found 'https:"),
        ("", UsageError, "expected a path or hf"),
        (tmp_path / "a.txt", UsageError, r"expected a .safetensors file"),
        (tmp_path / "b.safetensors", DataError, "no such file"),
        (tmp_path, DataError, r"found a.txt"),
        ({"a": 3}, DataError, "found none"),
        *(
            (f"hf://{name}", UsageError, "expected hf://org/name")
            for name in ("", "a/b/c", "../b", "a/..", "org/..", "a b/c", "org/na me")
        ),
    ):
        with pytest.raises(kind, match=message):
            Checkpoint(source)
    for name in "ab":
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DataError, match="found 2 checkpoints; name one"):
        Checkpoint(tmp_path)


def test_a_checkpoint_as_text_and_table(tmp_path):
    state = {"blocks.0.weight": torch.zeros(3, 4).half(), "steps": torch.zeros((), dtype=torch.int64)}
    checkpoint = Checkpoint(plain(state, tmp_path / "m.safetensors"))
    frame = checkpoint.to_pandas().set_index("name")
    assert frame.loc["blocks.0.weight"].tolist()[:3] == ["3x4", "F16", 24]
    assert "integers" in frame.loc["steps", "skipped"]
    assert "3x4" in str(checkpoint)
    assert "a\\nb  2" in str(Checkpoint({"a\nb": torch.zeros(2)}))
    many = {f"blocks.{i}.weight": torch.zeros(1) for i in range(1000)}
    assert repr(Checkpoint(many)) == "<Checkpoint: state dict, 1000 weights of 1,000 numbers>"
