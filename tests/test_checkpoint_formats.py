"""Files of other libraries against NumPy, adapters against W + alpha / r B A, and what is refused."""

import json
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from weightscope import Checkpoint, products
from weightscope.errors import DataError, UsageError


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def equal(found, expected):
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_arrays_in_a_pickle(tmp_path, protocol):
    """As Detectron2's model zoo."""
    weights = {"conv": random(4, 3), "turned": random(3, 4).T, "count": np.arange(3)}
    state = {"model": weights, "__author__": "third_party", "matching_heuristics": True}
    (tmp_path / "model_final.pkl").write_bytes(pickle.dumps(state, protocol=protocol))
    checkpoint = Checkpoint(tmp_path / "model_final.pkl")
    assert checkpoint.names == ("conv", "turned")
    for name in checkpoint:
        equal(checkpoint[name], weights[name])


def test_npz_files_with_bfloat16_and_objects(tmp_path):
    """JAX's bfloat16 is stored as two bytes of no type."""
    value = torch.randn(3, 4).bfloat16()
    other = {"object": np.array({"a": 1}, dtype=object), "text": np.array(["a"]), "wide": np.ones((2, 2), ">f8")}
    np.savez(tmp_path / "w.npz", w=value.view(torch.int16).numpy().view("V2"), **other)
    checkpoint = Checkpoint(tmp_path / "w.npz")
    assert torch.equal(checkpoint.raw("w"), value)
    assert checkpoint["wide"].dtype == torch.float64
    assert checkpoint.skipped == {"object": "pickled objects, not read", "text": "of type <U1, not read"}


HEADS, WIDTH, KEYS = 4, 32, 8


def vision_transformer(folder):
    """Block 0 as Google stores it."""
    attention, block = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1", "Transformer/encoderblock_0"
    arrays = {f"{attention}/{name}/kernel": random(WIDTH, HEADS, KEYS, seed=i) for i, name in enumerate(NAMES)}
    arrays |= {f"{attention}/{name}/bias": random(HEADS, KEYS, seed=i) for i, name in enumerate(NAMES)}
    arrays |= {f"{attention}/out/kernel": random(HEADS, KEYS, WIDTH), f"{attention}/out/bias": random(WIDTH)}
    arrays |= {f"{block}/MlpBlock_3/Dense_0/kernel": random(WIDTH, 64), f"{block}/LayerNorm_2/scale": random(WIDTH)}
    arrays |= {"embedding/kernel": random(4, 4, 3, WIDTH), "cls": random(1, 1, WIDTH), "head/kernel": random(WIDTH, 5)}
    arrays |= {"Transformer/posembed_input/pos_embedding": random(1, 17, WIDTH)}
    np.savez(folder / "ViT-B_16.npz", **arrays)
    return attention, arrays


NAMES = ("query", "key", "value")


def test_google_s_vision_transformers_have_timm_s_names(tmp_path):
    attention, arrays = vision_transformer(tmp_path)
    checkpoint = Checkpoint(tmp_path / "ViT-B_16.npz")
    q, k, v = (arrays[f"{attention}/{name}/kernel"] for name in NAMES)
    for short, name, kernel in zip("qkv", NAMES, (q, k, v), strict=True):
        equal(checkpoint[f"blocks.0.attn.{short}_proj.weight"], kernel.reshape(WIDTH, -1).T)
        equal(checkpoint[f"blocks.0.attn.{short}_proj.bias"], arrays[f"{attention}/{name}/bias"].ravel())
    out = arrays[f"{attention}/out/kernel"]
    equal(checkpoint["blocks.0.attn.proj.weight"], out.reshape(-1, WIDTH).T)
    equal(checkpoint["patch_embed.proj.weight"], arrays["embedding/kernel"].transpose(3, 2, 0, 1))
    equal(checkpoint["blocks.0.mlp.fc1.weight"], arrays["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"].T)
    assert {"blocks.0.norm2.weight", "cls_token", "pos_embed", "head.weight"} < {*checkpoint}
    rows = {(row["part"], row["head"]): row["beta"] for row in products(checkpoint).records}
    for head in range(HEADS):
        assert np.isclose(rows["qk", head], np.trace(q[:, head] @ k[:, head].T) / WIDTH, atol=1e-6)
        assert np.isclose(rows["vo", head], np.trace(v[:, head] @ out[head]) / WIDTH, atol=1e-6)


def flax_bytes(state):
    msgpack = pytest.importorskip("msgpack")

    def extension(value):
        parts = value.shape, value.dtype.name, value.tobytes()
        return msgpack.ExtType(1, msgpack.packb(parts, use_bin_type=True))

    return msgpack.packb(state, default=extension)


def test_flax_files(tmp_path):
    layer = {name: {"kernel": random(6, 2, 3, seed=i), "bias": random(2, 3)} for i, name in enumerate(NAMES)}
    layer |= {"out": {"kernel": random(2, 3, 6)}}
    large = random(40)
    parts = {"__msgpack_chunked_array__": True, "shape": {"0": 5, "1": 8}, "chunks": {"0": large[:25], "1": large[25:]}}
    params = {"attn": layer, "conv": {"kernel": random(3, 5, 2, 4)}, "norm": {"scale": random(4)}}
    params |= {"out": {"kernel": random(3, 5, 2)}, "embed": {"embedding": parts}}
    state = {"params": params, "opt_state": {"0": {"mu": {"w": random(2, 2)}}}, "step": 3}
    (tmp_path / "state.msgpack").write_bytes(flax_bytes(state))
    (tmp_path / "model.msgpack").write_bytes(flax_bytes(params))
    for name in ("state", "model"):
        checkpoint = Checkpoint(tmp_path / f"{name}.msgpack")
        equal(checkpoint["attn.key.weight"], layer["key"]["kernel"].reshape(6, 6).T)
        equal(checkpoint["attn.key.bias"], layer["key"]["bias"].ravel())
        equal(checkpoint["attn.out.weight"], layer["out"]["kernel"].reshape(6, 6).T)
        equal(checkpoint["conv.weight"], params["conv"]["kernel"].transpose(3, 2, 0, 1))
        equal(checkpoint["out.weight"], params["out"]["kernel"].transpose(2, 1, 0))
        equal(checkpoint["norm.weight"], params["norm"]["scale"])
        equal(checkpoint["embed.weight"], large.reshape(5, 8))
        assert checkpoint.config == {"num_heads": 2}
    assert Checkpoint(tmp_path / "state.msgpack", key="opt_state.0.mu").names == ("w",)


def llama_rows(weight, heads):
    """The rows of W_Q or W_K as llama.cpp's converter puts them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def test_gguf_files(tmp_path):
    gguf = pytest.importorskip("gguf")
    weights = {"q": random(16, 16), "k": random(8, 16), "v": random(8, 16), "output": random(16, 16)}
    for architecture in ("llama", "gemma"):
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_tensor("blk.1.attn_q.weight", llama_rows(weights["q"], 4))
        writer.add_tensor("blk.1.attn_k.weight", llama_rows(weights["k"], 2).astype(np.float16))
        kinds = gguf.GGMLQuantizationType
        writer.add_tensor("blk.1.attn_v.weight", gguf.quantize(weights["v"], kinds.BF16), raw_dtype=kinds.BF16)
        writer.add_tensor("blk.1.attn_output.weight", weights["output"])
        packed = gguf.quantize(random(2, 32), kinds.Q8_0)
        writer.add_tensor("blk.1.ffn_up.weight", packed, raw_dtype=kinds.Q8_0)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
    checkpoint = Checkpoint(tmp_path / "llama.gguf")
    equal(checkpoint["model.layers.1.self_attn.q_proj.weight"], weights["q"])
    equal(checkpoint["model.layers.1.self_attn.k_proj.weight"], weights["k"].astype(np.float16))
    v = checkpoint.raw("model.layers.1.self_attn.v_proj.weight")
    assert torch.equal(v, torch.from_numpy(weights["v"]).bfloat16())
    assert "quantised (Q8_0)" in checkpoint.skipped["model.layers.1.mlp.up_proj.weight"]
    assert checkpoint.config == {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"}
    equal(Checkpoint(tmp_path / "gemma.gguf")["blk.1.attn_q.weight"], llama_rows(weights["q"], 4))


def test_parts_of_a_distributed_checkpoint_that_are_missing(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(DataError, match="`w`: a file of it is missing, truncated or damaged"):
        Checkpoint(tmp_path)["w"]
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.metadata is damaged"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("model.weights.h5", UsageError, "files of Keras are not read; save their arrays from Keras, numpy.savez"),
        ("a.msgpack", DataError, "damaged or not a file of Flax"),
        ("a.gguf", (DataError, UsageError), "not a GGUF file|pip install gguf"),
        ("a.pkl", DataError, "truncated, damaged or not a file of torch.save"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, name, kind, message):
    (tmp_path / name).write_bytes(b"hello")
    with pytest.raises(kind, match=message):
        Checkpoint(tmp_path / name)


# --- which dictionary of a file -----------------------------------------------------------------------------------


def test_other_weights_in_the_file_are_named(tmp_path, caplog):
    """Whichever command reads a file: the raw weights are taken, and one warning names the others."""
    name = "blocks.0.fc.weight"
    state = {"state_dict": {name: torch.zeros(2)}, "state_dict_ema": {f"module.{name}": torch.ones(2)}, "epoch": 3}
    torch.save(state, tmp_path / "m.pt")
    note = "read `state_dict`; `state_dict_ema` is beside it: --key state_dict_ema, in Python key='state_dict_ema'"
    assert Checkpoint(tmp_path / "m.pt").note == note
    assert caplog.messages == [f"{tmp_path / 'm.pt'}: {note}"]
    assert not Checkpoint(tmp_path / "m.pt", key="state_dict_ema").note
    torch.save(state | {"state_dict_ema": {"loss": torch.ones(())}}, tmp_path / "m.pt")
    assert not Checkpoint(tmp_path / "m.pt").note


def test_dictionaries_in_dictionaries(tmp_path):
    """As Megatron's: {"model": {"language_model": {"encoder": {...}}}}."""
    inner = {"embedding": {"weight": torch.ones(2)}, "encoder": {"layers.0.weight": torch.zeros(3)}}
    torch.save({"model": {"language_model": inner}, "iteration": torch.ones(())}, tmp_path / "m.pt")
    with pytest.raises(DataError, match=r"nested deeper; choose a dictionary with --key .*'model.language_model'"):
        Checkpoint(tmp_path / "m.pt")
    found = Checkpoint(tmp_path / "m.pt", key="model.language_model")
    assert found.names == ("embedding.weight", "encoder.layers.0.weight")
    assert Checkpoint(tmp_path / "m.pt", key="model.language_model.encoder").names == ("layers.0.weight",)


def test_empty_tensors_of_deepspeed(tmp_path):
    torch.save({"module": {"a": torch.zeros(0), "b": torch.zeros(0)}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(DataError, match=r"`a`, `b` are empty, as DeepSpeed ZeRO-3 leaves them; .*zero_to_fp32\.py"):
        Checkpoint(tmp_path / "mp_rank_00_model_states.pt")


def test_packed_weights_are_named():
    words, halves = (lambda *shape: torch.ones(shape, dtype=torch.int32)), (lambda *shape: torch.ones(shape).half())
    state = {"gptq.qweight": words(3, 24), "gptq.qzeros": words(1, 3), "gptq.scales": halves(1, 24)}
    state |= {"awq.qweight": words(24, 3), "awq.qzeros": words(1, 3), "awq.scales": halves(1, 24)}
    state |= {"ct.weight_packed": words(24, 3), "ct.weight_scale": halves(24, 1), "norm.weight": torch.ones(24)}
    state |= {"bnb.weight": torch.ones(288, 1, dtype=torch.uint8), "bnb.weight.absmax": torch.ones(9)}
    state |= {"int8.weight": torch.ones(24, 24, dtype=torch.int8), "int8.SCB": torch.ones(24)}
    checkpoint = Checkpoint(state)
    assert checkpoint.names == ("norm.weight",)
    for name in ("gptq.qweight", "awq.qweight", "ct.weight_packed", "bnb.weight", "int8.weight"):
        assert checkpoint.skipped[name].startswith("integers or quantised numbers")


# --- adapters -----------------------------------------------------------------------------------------------------


def adapter(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": torch.from_numpy(value) for name, value in tensors.items()}, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}))
    return folder


FILE = "adapter_model.safetensors"
LORA = {"model.l.0.q.lora_A.weight": random(2, 5), "model.l.0.q.lora_B.weight": random(4, 2)}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3),
        ({"use_rslora": True}, 6 / np.sqrt(2)),
        ({"fan_in_fan_out": True}, 3),
        ({"alpha_pattern": {"l.0.q": 8, "k": 2}}, 4),
        ({"lora_dropout": 0.1, "bias": "none", "init_lora_weights": "gaussian"}, 3),
    ],
)
@pytest.mark.parametrize("prefix", ["model.", "", "wrapper.model."])
def test_adapters_are_added(tmp_path, config, scale, prefix):
    """Also where the base was saved with one more name in front, or one less."""
    weight, other = random(4, 5), random(3, 3)
    if turned := "fan_in_fan_out" in config:
        weight = weight.T.copy()
    base = {f"{prefix}l.0.q.weight": torch.from_numpy(weight), f"{prefix}l.0.k.weight": torch.from_numpy(other)}
    save_file(base, tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "lora", LORA | {"model.head.weight": random(2, 2)}, **config)
    checkpoint = Checkpoint(tmp_path / "base.safetensors", adapter=folder)
    product = LORA["model.l.0.q.lora_B.weight"] @ LORA["model.l.0.q.lora_A.weight"]
    expected = weight + scale * (product.T if turned else product)
    np.testing.assert_allclose(checkpoint[f"{prefix}l.0.q.weight"].numpy(), expected, rtol=1e-5, atol=1e-6)
    equal(checkpoint[f"{prefix}l.0.k.weight"], other)
    equal(checkpoint["model.head.weight"], random(2, 2))
    again = pickle.loads(pickle.dumps(checkpoint))
    assert torch.equal(again[f"{prefix}l.0.q.weight"], checkpoint[f"{prefix}l.0.q.weight"])


def test_adapters_of_half_precision_and_of_convolutions(tmp_path):
    weights = {"c.weight": torch.randn(4, 3, 2, 2), "q.weight": torch.randn(4, 5).bfloat16()}
    first, second = random(2, 3, 2, 2), random(4, 2, 1, 1)
    tensors = {"c.lora_A.weight": first, "c.lora_B.weight": second}
    tensors |= {"q.lora_A.weight": random(2, 5), "q.lora_B.weight": random(4, 2)}
    checkpoint = Checkpoint(weights, adapter=adapter(tmp_path / "lora", tensors))
    product = np.einsum("or,rihw->oihw", second[..., 0, 0], first)
    np.testing.assert_allclose(checkpoint["c.weight"].numpy(), weights["c.weight"].numpy() + 3 * product, atol=1e-5)
    product = tensors["q.lora_B.weight"] @ tensors["q.lora_A.weight"]
    np.testing.assert_allclose(
        checkpoint["q.weight"].numpy(), weights["q.weight"].float().numpy() + 3 * product, atol=1e-5
    )


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (LORA, {"peft_type": "IA3"}, "expected LoRA, found peft_type=IA3; merge it in peft"),
        (LORA, {"use_dora": True}, "found use_dora"),
        (LORA, {"init_lora_weights": "pissa"}, "found init_lora_weights=pissa"),
        ({"model.e.lora_embedding_A": random(2, 4)}, {}, "found `model.e.lora_embedding_A`"),
        ({"model.x.lora_A.weight": random(2, 4), "model.x.lora_B.weight": random(4, 2)}, {}, "has no `model.x.weight`"),
        ({"model.l.0.q.lora_A.weight": random(2, 5)}, {}, "there is no `model.l.0.q.lora_B.weight`"),
        (
            {"model.l.0.q.lora_A.weight": random(2, 5), "model.l.0.q.lora_B.weight": random(5, 2)},
            {},
            r"`model.l.0.q.weight` of state dict is \(4, 5\), which do not fit A \(2, 5\) and B \(5, 2\)",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path, tensors, config, message):
    with pytest.raises(DataError, match=message):
        Checkpoint({"model.l.0.q.weight": torch.ones(4, 5)}, adapter=adapter(tmp_path / "lora", tensors, **config))


def test_an_adapter_alone_names_its_base(tmp_path):
    folder = adapter(tmp_path / "lora", LORA, base_model_name_or_path="org/llama")
    with pytest.raises(DataError, match="a LoRA adapter without the weights that it changes; give org/llama, and this"):
        products(folder)
