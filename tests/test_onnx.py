"""ONNX models and CTranslate2's: recognised by content, named by the graph, bounded, refused in one line."""

import struct
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import weightscope
from weightscope import Checkpoint
from weightscope.anatomy import attention, depthwise, mlps
from weightscope.errors import DataError, UsageError
from weightscope.networks import ViT

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def saved(path, nodes, tensors, **others):
    """A model of nodes and of name -> array (or TensorProto)."""
    stored = [v if isinstance(v, TensorProto) else numpy_helper.from_array(v, n) for n, v in tensors.items()]
    graph = helper.make_graph(nodes, "g", [], [], stored)
    path.write_bytes(helper.make_model(graph, **others).SerializeToString())
    return path


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return ViT(image_size=16, patch_size=4, width=24, depth=2, heads=3, num_classes=10).eval()


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
def test_an_exported_transformer_has_its_parameters_again(vit, tmp_path, dynamo):
    if dynamo:
        pytest.importorskip("onnxscript")
    path = tmp_path / "vit.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        torch.onnx.export(vit, (torch.randn(1, 3, 16, 16),), str(path), dynamo=dynamo, verbose=False)
    assert (tmp_path / "vit.onnx.data").exists() == dynamo, "the newer exporter writes external data"
    checkpoint, state = Checkpoint(path), vit.state_dict()
    linear = [f"{name}.weight" for name, module in vit.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 9
    for name in (*linear, "patch_embed.proj.weight", "blocks.1.attn.qkv.bias"):
        assert torch.equal(checkpoint[name], state[name]), name
    assert checkpoint.metadata["onnx blocks.0.attn.qkv.weight"] in ("onnx::MatMul_193", "val_7")
    for mine, other in zip(attention(checkpoint, {"num_heads": 3}), attention(vit), strict=True):
        assert torch.equal(mine.read("q"), other.read("q"))
        assert torch.equal(mine.read("o"), other.read("o"))
    for mine, other in zip(mlps(checkpoint), mlps(vit), strict=True):
        assert torch.equal(mine.read("fc2"), other.read("fc2"))
    assert "blocks.0.attn.qkv.weight" in weightscope.inspect(path).text()


def test_the_group_of_a_convolution_decides_what_is_depthwise(tmp_path):
    """A first layer for grey images has the shape of depthwise filters; names say nothing."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], "/one/Conv", group=1, strides=[2, 2]),
        helper.make_node("Conv", ["a", "onnx::Conv_7"], ["b"], "/blocks/blocks.0/dw/Conv", group=8),
        helper.make_node("ConvTranspose", ["b", "up.weight"], ["c"], "/up/ConvTranspose", group=1),
    ]
    tensors = {"first": array(8, 1, 3, 3), "onnx::Conv_7": array(8, 1, 5, 5), "up.weight": array(8, 1, 2, 2)}
    checkpoint = Checkpoint(saved(tmp_path / "m.onnx", nodes, tensors))
    (part,) = depthwise(checkpoint)
    assert (part.name, part.kernel) == ("blocks.0.dw", (5, 5))
    np.testing.assert_array_equal(part.read().numpy(), tensors["onnx::Conv_7"][:, 0])
    assert checkpoint.attributes["one"] == {"groups": 1, "transposed": False, "stride": (2, 2)}


def test_names_that_paddle_exported(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "conv2d_0.w_0"], ["a"], "Conv.0", group=1),
        helper.make_node("Conv", ["a", "conv2d_1.w_0"], ["b"], "p2o.Conv.2", group=6),
        helper.make_node(
            "BatchNormalization", ["b", *(f"batch_norm2d_1.{x}" for x in ("w_0", "b_0", "w_1", "w_2"))], ["c"]
        ),
        helper.make_node("MatMul", ["c", "linear_0.w_0"], ["d"], "p2o.MatMul.0"),
        helper.make_node("Add", ["d", "linear_0.b_0"], ["e"], "p2o.Add.0"),
    ]
    tensors = {"conv2d_0.w_0": array(6, 3, 3, 3), "conv2d_1.w_0": array(6, 1, 3, 3), "linear_0.w_0": array(6, 10)}
    tensors |= {f"batch_norm2d_1.{x}": array(6) for x in ("w_0", "b_0", "w_1", "w_2")} | {"linear_0.b_0": array(10)}
    checkpoint = Checkpoint(saved(tmp_path / "inference.onnx", nodes, tensors))
    assert set(checkpoint) == {
        *("conv2d_0.weight", "conv2d_1.weight", "linear_0.weight", "linear_0.bias"),
        *(f"batch_norm2d_1.{x}" for x in ("weight", "bias", "running_mean", "running_var")),
    }
    np.testing.assert_array_equal(checkpoint["linear_0.weight"].numpy(), tensors["linear_0.w_0"].T)
    statistics = [t.name for t in checkpoint.spec if t.role == "statistic"]
    assert sorted(statistics) == ["batch_norm2d_1.running_mean", "batch_norm2d_1.running_var"]
    assert [part.name for part in depthwise(checkpoint)] == ["conv2d_1"]


def test_names_that_are_not_certain_are_left_alone(tmp_path):
    """Two products in one module have no name of their own; a parameter that kept its name keeps its orientation."""
    nodes = [
        helper.make_node("MatMul", ["x", "val_1"], ["a"], "/mixer/MatMul"),
        helper.make_node("MatMul", ["a", "val_2"], ["b"], "/mixer/MatMul"),
        helper.make_node("Gemm", ["b", "h.0.attn.c_attn.weight"], ["c"], "/h.0/attn/c_attn/Gemm"),
        helper.make_node("MatMul", ["c", "val_3"], ["d"], "node_MatMul_3"),
    ]
    tensors = {
        "val_1": array(4, 5),
        "val_2": array(5, 4),
        "h.0.attn.c_attn.weight": array(4, 12),
        "val_3": array(12, 2),
    }
    checkpoint = Checkpoint(saved(tmp_path / "m.onnx", nodes, tensors))
    assert {name: checkpoint.shape(name) for name in checkpoint} == {n: v.shape for n, v in tensors.items()}
    assert checkpoint.metadata == {}


def test_subgraphs_constants_and_types(tmp_path):
    inner = helper.make_graph([], "then", [], [], [numpy_helper.from_array(array(3, 2), "inner.weight")])
    half = helper.make_tensor("half", TensorProto.BFLOAT16, [2], [1.5, -2.0])
    typed = helper.make_tensor("typed", TensorProto.FLOAT, [2, 1], [0.25, 3.0])
    nodes = [
        helper.make_node("If", ["c"], ["x"], then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(array(2, 2), "")),
    ]
    nibbles = helper.make_tensor("nibbles", 22, [2], [1, 2])
    tensors = {"half": half, "typed": typed, "ints": np.arange(3), "nibbles": nibbles}
    checkpoint = Checkpoint(saved(tmp_path / "m.onnx", nodes, tensors))
    assert set(checkpoint) == {"inner.weight", "k", "half", "typed"}
    assert checkpoint["half"].tolist() == [1.5, -2.0]
    assert checkpoint.dtype("half") == torch.bfloat16
    assert checkpoint["typed"].tolist() == [[0.25], [3.0]]
    assert "INT4" in checkpoint.skipped["nibbles"]
    assert "integers" in checkpoint.skipped["ints"]


def test_onnx_is_known_by_its_suffix(tmp_path):
    saved(tmp_path / "model.onnx", [], {"a.weight": array(3, 4)}, producer_name="test")
    for source in (tmp_path, tmp_path / "model.onnx"):
        np.testing.assert_array_equal(Checkpoint(source)["a.weight"].numpy(), array(3, 4))
    with pytest.raises(UsageError, match="omit key="):
        Checkpoint(tmp_path / "model.onnx", key="ema")


def test_a_file_of_another_program_asks_for_the_original(tmp_path):
    (tmp_path / "model.bin").write_bytes(struct.pack("IH", 6, 12) + b"WhisperSpec\0" + bytes(100))
    with pytest.raises(DataError, match="CTranslate2 or another program, open the original"):
        Checkpoint(tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    saved(tmp_path / "m.onnx", [], {"a": array(2)})
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r'pip install "\.\[onnx\]"'):
        Checkpoint(tmp_path / "m.onnx")


def external(name="a", dims=(2, 3), **entries):
    tensor = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_external_data_is_read_at_its_place(tmp_path):
    (tmp_path / "m.data").write_bytes(b"\0" * 8 + array(2, 3).tobytes())
    path = saved(tmp_path / "m.onnx", [], {"a": external(location="m.data", offset=8, length=24)})
    np.testing.assert_array_equal(Checkpoint(path)["a"].numpy(), array(2, 3))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (external(location="../secret"), "expected the plain name of a file of external data"),
        (external(location="/etc/passwd"), "expected the plain name"),
        (external(location="gone.data"), "expected the plain name"),
        (external(), "expected the plain name"),
        (external(location="m.data", offset=16), r"bytes 16-40 are outside m.data of 24 bytes"),
        (external(location="m.data", offset=-8), "expected 24 bytes of external data"),
        (external(location="m.data", length=16), "expected 24 bytes of external data"),
        (external(location="m.data", length="9" * 30), "expected 24 bytes of external data"),
        (external(location="m.data", dims=(1 << 40, 1 << 40)), "overflows"),
        (external(location="m.data", dims=(-1, 3)), "integers >= 0"),
        (TensorProto(name="a", dims=(1 << 30,), data_type=1, raw_data=b"abcd"), "expected 4,294,967,296 bytes"),
        (TensorProto(name="a", dims=(1 << 30,), data_type=1, float_data=[1.0]), "damaged: 'cannot reshape"),
        (TensorProto(name="a\x1b[2J", dims=(1,), data_type=1, float_data=[1.0]), "not printable"),
    ],
)
def test_what_a_model_claims_is_bounded(tmp_path, tensor, message):
    (tmp_path / "m.data").write_bytes(b"\0" * 24)
    path = saved(tmp_path / "m.onnx", [], {"a": tensor})
    with pytest.raises(DataError, match=message) as error:
        Checkpoint(path)
    assert "\n" not in str(error.value)


def test_mutated_models_are_read_or_refused(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "/a/Conv", group=4)]
    path = saved(tmp_path / "m.onnx", nodes, {"w": array(4, 1, 3, 3), "v": external("v", location="m.data", length=24)})
    (tmp_path / "m.data").write_bytes(b"\0" * 24)
    raw, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        damaged = bytearray(raw)
        for place in rng.integers(0, len(raw), rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(raw))] if rng.random() < 0.2 else damaged)
        try:
            checkpoint = Checkpoint(path)
            for name in checkpoint:
                checkpoint[name]
        except (DataError, UsageError) as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += 1
    assert 40 < refused < 400
