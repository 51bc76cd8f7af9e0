"""Files that people have: architectures without code, partial files, several towers; each number right or refused."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shims
import torch
from programs import run
from safetensors.torch import save_file
from torch import Tensor

from weightscope import anatomy
from weightscope.analysis.attention_products import products
from weightscope.anatomy.architectures import tables
from weightscope.anatomy.attention_modules import LAYOUTS
from weightscope.errors import AnatomyError, UsageError
from weightscope.fits.identity_product import fit_identity_product

Matrices = dict[str, Tensor]
State = dict[str, Tensor]


def matrices(heads: int = 4, groups: int | None = None, d: int = 32, k: int = 8, values: int | None = None) -> Matrices:
    """Known q (H, d, k), k and v (G, d, k), o (H, k, d)."""
    noise = torch.Generator().manual_seed(0)
    g, v = groups or heads, values or k
    shapes = {"q": (heads, d, k), "k": (g, d, k), "v": (g, d, v), "o": (heads, v, d)}
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


def rows(m: Tensor) -> Tensor:
    """(H, d, k) as torch stores it, (H k, d)."""
    return m.mT.flatten(0, 1).clone()


def separate(m: Matrices, path: str, names: tuple[str, ...]) -> State:
    out = {f"{path}.{name}.weight": rows(m[part]) for part, name in zip("qkv", names, strict=False)}
    return out | {f"{path}.{names[3]}.weight": m["o"].flatten(0, 1).T.clone()}


def packed(m: Matrices, path: str, order: str, name: str, out: str) -> State:
    """The three packed as an order of rows says, written out row by row."""
    (heads, _, k), groups, v = m["q"].shape, len(m["k"]), m["v"].shape[2]
    each = heads // groups
    line = {
        (part, h, i): m[part][h, :, i] for part in "qkv" for h in range(len(m[part])) for i in range(m[part].shape[2])
    }
    if order == "blocks":
        keys = list(line)
    elif order in ("heads", "groups"):
        keys = []
        for g in range(groups):
            keys += [("q", g * each + j, i) for j in range(each) for i in range(k)]
            keys += [("k", g, i) for i in range(k)] + [("v", g, i) for i in range(v)]
    elif order == "codegen":
        flat = {part: [key for key in line if key[0] == part] for part in "qkv"}
        size = heads * k // 4
        keys = [key for b in range(4) for part in "qvk" for key in flat[part][b * size : (b + 1) * size]]
    else:
        keys = [(part, h, i) for h in range(heads) for i in range(k) for part in "qkv"]
    stack = torch.stack([line[key] for key in keys])
    return {f"{path}.{name}.weight": stack, f"{path}.{out}.weight": m["o"].flatten(0, 1).T.clone()}


def equal(part: anatomy.AttentionPart, m: Matrices) -> None:
    for name in "qkvo":
        assert torch.equal(part.read(name), m[name]), name


def like(model_type: str, heads: int = 4, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "num_attention_heads": heads} | more


TIMM = {"num_attention_heads": 4}
# Architecture -> matrices, path, order of rows, names of the packed weight and of the output, config.
PACKED: dict[str, tuple[Matrices, str, str, str, str, dict[str, Any]]] = {
    "CodeGen": (matrices(), "transformer.h.0.attn", "codegen", "qkv_proj", "out_proj", like("codegen")),
    "Phi-3": (
        matrices(4, 2),
        "model.layers.0.self_attn",
        "blocks",
        "qkv_proj",
        "o_proj",
        like("phi3", num_key_value_heads=2),
    ),
    "GPT-NeoX": (matrices(), "gpt_neox.layers.0.attention", "heads", "query_key_value", "dense", like("gpt_neox")),
    "BLOOM": (matrices(), "h.0.self_attention", "heads", "query_key_value", "dense", like("bloom")),
    "ChatGLM2": (
        *(matrices(4, 2), "transformer.encoder.layers.0.self_attention", "blocks", "query_key_value", "dense"),
        like("chatglm", multi_query_group_num=2),
    ),
    "ChatGLM": (matrices(), "transformer.layers.0.attention", "heads", "query_key_value", "dense", like("chatglm")),
    "GLM": (matrices(), "transformer.layers.0.attention", "blocks", "query_key_value", "dense", like("glm")),
    "Falcon-40B": (
        *(matrices(4, 2), "transformer.h.0.self_attention", "groups", "query_key_value", "dense"),
        like("falcon", num_kv_heads=2, new_decoder_architecture=True, multi_query=True),
    ),
    "Falcon-7B": (
        *(matrices(4, 1), "transformer.h.0.self_attention", "blocks", "query_key_value", "dense"),
        like("falcon", num_kv_heads=4, new_decoder_architecture=False, multi_query=True),
    ),
    "Falcon-RW": (
        *(matrices(), "transformer.h.0.self_attention", "heads", "query_key_value", "dense"),
        like("falcon", new_decoder_architecture=False, multi_query=False),
    ),
    "StarCoder": (
        matrices(4, 1),
        "transformer.h.0.attn",
        "blocks",
        "c_attn",
        "c_proj",
        like("gpt_bigcode", multi_query=True),
    ),
    "GPT-BigCode": (
        matrices(),
        "transformer.h.0.attn",
        "heads",
        "c_attn",
        "c_proj",
        like("gpt_bigcode", multi_query=False),
    ),
    "nanoGPT": (
        *(matrices(), "transformer.h.0.attn", "blocks", "c_attn", "c_proj"),
        {"n_head": 4, "n_embd": 32, "block_size": 64},
    ),
    "InternLM2": (
        matrices(4, 2),
        "model.layers.0.attention",
        "groups",
        "wqkv",
        "wo",
        like("internlm2", num_key_value_heads=2),
    ),
    "Megatron": (matrices(4, 2), "decoder.layers.0.self_attention", "groups", "linear_qkv", "linear_proj", TIMM),
    "MPT": (matrices(), "transformer.blocks.0.attn", "blocks", "Wqkv", "out_proj", like("mpt")),
    "flash-attn": (matrices(), "transformer.layers.0.mixer", "blocks", "Wqkv", "out_proj", TIMM),
    "timm ViT": (matrices(), "blocks.0.attn", "blocks", "qkv", "proj", TIMM | {"architecture": "vit_tiny_patch16_224"}),
    "TinyViT": (
        matrices(),
        "stages.1.blocks.0.attn",
        "heads",
        "qkv",
        "proj",
        TIMM | {"architecture": "tiny_vit_5m_224"},
    ),
    "EfficientFormer": (
        *(matrices(4, None, 32, 4, 16), "stages.3.blocks.4.token_mixer", "heads", "qkv", "proj"),
        TIMM | {"architecture": "efficientformer_l1"},
    ),
    "CoAtNet": (
        matrices(),
        "stages.2.blocks.1.attn",
        "heads",
        "qkv",
        "proj",
        TIMM | {"architecture": "coatnet_nano_rw_224"},
    ),
    "MaxViT of TensorFlow": (
        *(matrices(), "stages.2.blocks.1.attn_grid.attn", "blocks", "qkv", "proj"),
        TIMM | {"architecture": "maxvit_tiny_tf_224"},
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_those_of_the_architecture(name: str) -> None:
    m, path, order, weight, out, config = PACKED[name]
    state = packed(m, path, order, weight, out)
    (part,) = anatomy.attention(state, config)
    equal(part, m)
    for layout in LAYOUTS:  # and --layout counts before it
        try:
            (other,) = anatomy.attention(state, config | {"layout": layout})
        except AnatomyError:
            continue
        assert all(torch.equal(other.read(n), m[n]) for n in "qkvo") == (layout == order or _same(m, order, layout))


def _same(m: Matrices, one: str, other: str) -> bool:
    """Whether two orders are one: of as many keys as queries, or of one key for all queries."""
    alike = m["q"].shape == m["k"].shape == m["v"].shape
    return ({one, other} == {"heads", "groups"} and alike) or (
        {one, other} == {"blocks", "groups"} and len(m["k"]) == 1
    )


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize(
    ("path", "weight", "out"),
    [
        ("transformer.h.0.attn", "c_attn", "c_proj"),
        ("model.layers.0.self_attn", "qkv_proj", "o_proj"),
        ("encoder.layers.0.attention", "query_key_value", "dense"),
        ("stages.1.blocks.0.attn", "qkv", "proj"),
    ],
)
@pytest.mark.parametrize("config", [{}, {"model_type": "own", "auto_map": {"AutoModel": "own.Model"}}])
def test_packed_rows_of_an_unknown_architecture_are_refused_with_the_orders_that_fit(
    order: str, path: str, weight: str, out: str, config: dict[str, Any]
) -> None:
    m = matrices()
    state = packed(m, path, order, weight, out)
    with pytest.raises(
        AnatomyError, match=r"order of the 96 rows .* blocks or heads or groups or codegen or strided fit"
    ):
        anatomy.attention(state, config | {"num_heads": 4})
    (part,) = anatomy.attention(state, config | {"num_heads": 4, "layout": order})
    equal(part, m)


BLOCK = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")


def test_timm_s_block_is_known_by_its_names_and_not_with_others_beside() -> None:
    m = matrices()
    state = packed(m, "blocks.0.attn", "blocks", "qkv", "proj")
    state |= {f"blocks.0.{name}.weight": torch.ones(32) for name in BLOCK}
    for more in ({}, {"blocks.0.ls1.gamma": torch.ones(32)}, {"blocks.0.attn.qkv.bias": torch.zeros(96)}):
        (part,) = anatomy.attention(state | more, {"num_heads": 4, "model_type": "own"})
        equal(part, m)
    for name in ("attn.attention_biases", "attn.rel_pos.weight", "attn_layer_norm.weight", "conv.weight"):
        with pytest.raises(AnatomyError, match="order of the 96 rows"):
            anatomy.attention(state | {f"blocks.0.{name}": torch.ones(7)}, {"num_heads": 4})
    some = {name: value for name, value in state.items() if "attn" in name}
    equal(anatomy.attention(some, {"num_heads": 4})[0], m)
    with pytest.raises(AnatomyError, match="found the architecture 'own'"):  # a part of the names, and another type
        anatomy.attention(some, {"num_heads": 4, "model_type": "own"})
    with pytest.raises(AnatomyError, match="mixes the logits of heads"):
        anatomy.attention(state | {"blocks.0.attn.proj_l.weight": torch.eye(4)}, {"num_heads": 4})


def test_deberta_s_projections() -> None:
    m = matrices()
    path = "deberta.encoder.layer.0.attention.self"
    state = packed(m, path, "heads", "in_proj", "out") | {f"{path}.q_bias": torch.zeros(32)}
    state["deberta.encoder.layer.0.attention.output.dense.weight"] = state.pop(f"{path}.out.weight")
    (part,) = anatomy.attention(state, like("deberta"))
    equal(part, m)
    equal(part.only([1, 3]), {name: value[[1, 3]] for name, value in m.items()})


def test_a_gate_beside_the_queries_is_named() -> None:
    m = matrices(4, 2)
    state = separate(m, "model.layers.0.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"))
    state["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 32)
    with pytest.raises(AnatomyError, match="packs a gate of the output"):
        anatomy.attention(state, like("qwen3_next", head_dim=8, num_key_value_heads=2))


# --- heads -----------------------------------------------------------------------------------------------------------

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj")
VISION, TEXT = matrices(4, d=48, k=12), matrices(8, 2, d=32, k=4)


def towers(vision: str, text: str) -> State:
    return separate(VISION, f"{vision}.layers.0.self_attn", LLAMA) | separate(TEXT, f"{text}.layers.0.self_attn", LLAMA)


NESTED = {"vision_config": {"num_heads": 4, "hidden_size": 48}, "text_config": {"num_attention_heads": 8}}


@pytest.mark.parametrize(
    ("vision", "text", "config"),
    [
        ("vision_tower.vision_model.encoder", "language_model.model", {"model_type": "llava"} | NESTED),
        ("model.visual", "model.language_model", {"model_type": "qwen2_5_vl"} | NESTED),
        ("visual", "model", {"num_attention_heads": 8, "hidden_size": 32, "vision_config": {"num_heads": 4}}),
        (
            "visual",
            "transformer",
            {"model_cfg": {"vision_cfg": {"width": 48, "head_width": 12}, "text_cfg": {"heads": 8}}},
        ),
        (
            "model.pixel_level_module.encoder",
            "decoder",
            {"num_attention_heads": 8, "backbone_config": {"num_heads": [4]}},
        ),
        ("thinker.visual", "thinker.model", {"thinker_config": NESTED}),
        ("visual", "model", {"heads": {"vision": 4, "text": 8}, "model_type": "own", "num_attention_heads": 2}),
        ("visual", "model", {"heads": {"visual.layers.0": 4, "model": 8}}),
    ],
)
def test_heads_are_those_of_the_part_that_the_tensors_are_in(vision: str, text: str, config: dict[str, Any]) -> None:
    parts = {part.width: part for part in anatomy.attention(towers(vision, text), config)}
    equal(parts[48], VISION)
    equal(parts[32], TEXT)


def test_heads_of_another_part_are_not_used() -> None:
    state = towers("model.vision_tower", "model.language_model")
    for config in ({"model_type": "own", "num_attention_heads": 8}, {"text_config": {"num_attention_heads": 8}}):
        found = anatomy.attention(state, config, strict=None)
        assert [part.width for part in found] == [32]
        assert [unread.path for unread in found.unread] == ["model.vision_tower.layers.0.self_attn"]
        assert "--heads H (PART=H,PART=H)" in found.unread[0].why
    with pytest.raises(AnatomyError, match="one number of heads is stated for layers of widths 32, 48"):
        anatomy.attention(state, {"num_attention_heads": 4})
    with pytest.raises(UsageError, match="heads: expected parts of paths of attention modules, found 'audio'"):
        anatomy.attention(state, {"heads": {"vision": 4, "text": 8, "audio": 2}})
    with pytest.raises(UsageError, match="layout='blocks': the model has no packed"):
        anatomy.attention(state, {"heads": {"vision": 4, "text": 8}, "layout": "blocks"})


def test_configs_of_open_clip_and_of_llama_as_published(tmp_path: Path) -> None:
    vision, text = matrices(2, d=128, k=64), matrices(8, d=32, k=4)
    state: State = {}
    for path, m in (("visual.transformer", vision), ("transformer", text)):
        parts = packed(m, f"{path}.resblocks.0.attn", "blocks", "in_proj", "out_proj")
        state |= {name.replace("in_proj.weight", "in_proj_weight"): value for name, value in parts.items()}
    torch.save(state, tmp_path / "open_clip_pytorch_model.bin")
    clip = {"model_cfg": {"vision_cfg": {"layers": 1, "width": 128}, "text_cfg": {"width": 32, "heads": 8}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(clip))
    found = {part.width: part for part in anatomy.attention(tmp_path)}
    equal(found[128], vision)  # heads of 64, the default
    equal(found[32], text)
    llama = tmp_path / "llama"
    llama.mkdir()
    torch.save(separate(TEXT, "layers.0.attention", ("wq", "wk", "wv", "wo")), llama / "consolidated.00.pth")
    (llama / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 8}))
    equal(anatomy.attention(llama)[0], TEXT)


def test_heads_of_the_file_s_own_tables() -> None:
    state: State = {}
    for stage, m in enumerate((matrices(2, d=16), matrices(4))):
        path = f"layers.{stage}.blocks.0.attn"
        state |= packed(m, path, "blocks", "qkv", "proj") | {
            f"{path}.relative_position_bias_table": torch.zeros(9, len(m["q"]))
        }
    assert [part.heads for part in anatomy.attention(state)] == [2, 4]
    found = anatomy.attention(state, {"num_heads": 2}, strict=None)
    assert [part.heads for part in found] == [2]
    assert "expected 4 as of `relative_position_bias_table`" in found.unread[0].why


def test_attention_head_dim_is_the_number_of_heads_of_stable_diffusion_and_attn2_is_cross() -> None:
    m, names = matrices(8, d=32, k=4), ("to_q", "to_k", "to_v", "to_out.0")
    path = "down_blocks.1.attentions.0.transformer_blocks.0"
    state = separate(m, f"{path}.attn1", names) | separate(m, f"{path}.attn2", names)
    for number in (8, [5, 8, 20]):
        parts = anatomy.attention(state, {"_class_name": "UNet2DConditionModel", "attention_head_dim": number})
        assert [(part.kind, part.heads) for part in parts] == [("self", 8), ("cross", 8)]
    parts = anatomy.attention(state, {"_class_name": "PixArtTransformer2DModel", "attention_head_dim": 4})
    assert [part.heads for part in parts] == [8, 8]


@pytest.mark.parametrize(
    ("config", "notes", "scale"),
    [
        (like("gemma3n_text", head_dim=8), {"activated"}, 1.0),  # values are normalised without a weight
        (like("gemma4_text", head_dim=4, global_head_dim=8), {"activated"}, 1.0),
        (like("afmoe", head_dim=8), {"gated"}, 8**-0.5),
        (like("gemma2", query_pre_attn_scalar=256), set(), 1 / 16),
        (like("granite", attention_multiplier=0.015625), set(), 1 / 64),
        (like("llama", head_dim=8), set(), 8**-0.5),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_an_architecture_does_to_values_and_logits(config: dict[str, Any], notes: set[str], scale: float) -> None:
    state = separate(matrices(), "model.layers.0.self_attn", LLAMA)
    (part,) = anatomy.attention(state, config)
    assert (part.notes, part.scale) == (notes, pytest.approx(scale))
    (seen,) = anatomy.attention(separate(matrices(), "vision_tower.layers.0.self_attn", LLAMA), config)
    assert "gated" not in seen.notes
    assert bool(products(state, config=config).select("vo")) == ("activated" not in notes)


@pytest.mark.parametrize(("heads", "fits"), [(4, True), (8, False), (2, False)])
def test_heads_and_their_width_are_those_of_the_matrices(heads: int, fits: bool) -> None:
    """Of Inkling's and Laguna's layers, some have other heads than `num_attention_heads`."""
    state = separate(matrices(), "model.layers.0.self_attn", LLAMA)
    config = {"num_attention_heads": heads, "head_dim": 8}
    if fits:
        assert anatomy.attention(state, config)[0].heads == heads
    else:
        with pytest.raises(AnatomyError, match=f"found 32 query rows, and the config states {heads} heads of width 8"):
            anatomy.attention(state, config)


def test_reduced_keys_and_assignments_are_no_self_attention() -> None:
    names = ("query", "key", "value", "out_proj")
    state = separate(matrices(), "encoder.0.attention", names) | separate(matrices(), "pre_assign_attn.attn", LLAMA)
    state["encoder.0.attention.spatial_reduction.weight"] = torch.zeros(32, 32, 2, 2)  # PVTv2, GroupViT
    assert {part.kind for part in anatomy.attention(state, {"num_attention_heads": 4})} == {"cross"}


# --- norms and scales ------------------------------------------------------------------------------------------------


def folded(norm: str, config: dict[str, Any], path: str = "model.decoder.layers.0.self_attn") -> Tensor:
    names = LLAMA if "decoder" not in path else ("q_proj", "k_proj", "v_proj", "out_proj")
    state = separate(matrices(), path, names) | {f"{path.rpartition('.')[0]}.{norm}.weight": torch.full((32,), 0.5)}
    (part,) = anatomy.attention(state, {"num_attention_heads": 4} | config)
    return part.norm_gain()


BEFORE = [
    ("self_attn_layer_norm", {"model_type": "opt", "do_layer_norm_before": True}, 0.5),
    ("self_attn_layer_norm", {"model_type": "whisper"}, 0.5),
    ("self_attn_layer_norm", {"model_type": "own", "norm_first": True, "norm_offset": 0}, 0.5),
    ("input_layernorm", {"model_type": "llama"}, 0.5),
    ("input_layernorm", {"model_type": "gemma3_text"}, 1.5),
    ("input_layernorm", {"model_type": "llama", "norm_offset": 1}, 1.5),
    ("layer_norm1", {"model_type": "siglip_vision_model"}, 0.5),
]
NOT_BEFORE = [
    ("self_attn_layer_norm", {"model_type": "opt", "do_layer_norm_before": False}, "normalises after"),
    ("self_attn_layer_norm", {"model_type": "opt"}, "whether .* acts before"),
    *(
        ("self_attn_layer_norm", {"model_type": kind}, "normalises after")
        for kind in ("bart", "detr", "plbart", "trocr")
    ),
    ("self_attn_layer_norm", {}, "whether .* acts before"),
    ("post_attention_layernorm", {"model_type": "olmo2"}, "normalises after"),
    ("norm1", {}, "'norm_first'"),
    ("input_layernorm", {"model_type": "chameleon", "swin_norm": True}, "normalises after"),
    ("own_norm", {"model_type": "llama"}, "no norm before it"),
]


@pytest.mark.parametrize(("norm", "config", "gain"), BEFORE)
def test_a_norm_that_acts_before_is_folded(norm: str, config: dict[str, Any], gain: float) -> None:
    assert set(folded(norm, config).tolist()) == {gain}


@pytest.mark.parametrize(("norm", "config", "message"), NOT_BEFORE)
def test_a_norm_that_may_act_after_is_not(norm: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(AnatomyError, match=f"`model.decoder.layers.0.self_attn`.*{message}.*without fold_norms"):
        folded(norm, config)


def test_timm_s_norms() -> None:
    state = packed(matrices(), "blocks.0.attn", "blocks", "qkv", "proj") | {"blocks.0.norm1.weight": torch.ones(32)}
    named = {"num_heads": 4, "architecture": "vit_small_patch16_224"}
    assert anatomy.attention(state, named)[0].norm_gain().tolist() == [1.0] * 32
    for config in ({"num_heads": 4}, named | {"architecture": "vit_base_patch16_rpn_224"}):
        with pytest.raises(AnatomyError, match=r"acts before|normalises after"):
            products(state, config=config, fold_norms=True)
    token = state | {"cls_token": torch.zeros(1, 1, 32)}  # which residual post-norm does not have
    assert products(token, config={"num_heads": 4}, fold_norms=True).records


@pytest.mark.parametrize(
    "name",
    ["ls1.gamma", "ls1.weight", "attn.gamma1.weight", "gamma_1", "layer_scale_1.lambda1", "layer_scale1.lambda1"],
)
def test_layer_scale_under_its_names(name: str) -> None:
    m = matrices()
    state = packed(m, "blocks.0.attn", "blocks", "qkv", "proj") | {f"blocks.0.{name}": torch.arange(32.0)}
    (part,) = anatomy.attention(state, {"num_heads": 4, "layout": "blocks"})
    assert torch.equal(part.layer_scale_factors(), torch.arange(32.0).double())


@pytest.mark.parametrize("command", [products, fit_identity_product])
def test_a_scale_that_is_asked_for_and_not_there_is_an_error(command: Callable[..., Any]) -> None:
    state = packed(matrices(), "blocks.0.attn", "blocks", "qkv", "proj") | {"blocks.0.own_scale": torch.ones(32)}
    with pytest.raises(AnatomyError, match=r"`blocks.0.attn`: no LayerScale"):
        command(state, config={"num_heads": 4, "layout": "blocks"}, fold_scales=True)


# --- what is not read ------------------------------------------------------------------------------------------------


def test_what_is_not_read_is_listed_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = separate(matrices(), "layers.0.self_attn", LLAMA) | packed(
        matrices(), "layers.1.self_attn", "heads", "qkv_proj", "o_proj"
    )
    state |= {
        "single_blocks.0.norm.query_norm.scale": torch.ones(8),
        "single_blocks.0.linear1.weight": torch.zeros(224, 32),
    }
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(like("own")))
    commands = {
        "products": [],
        "inspect": [],
        "audit": ["--init", "mimetic_attention", "--no-strict"],
        "fit-init": ["--structure", "identity_product", "-o", "fit.safetensors"],
    }
    for command, more in commands.items():
        code, out, err = run(command, tmp_path, *more, "--json", f"{command}.json", capsys=capsys)
        assert code in (0, 1), err
        written = (tmp_path / f"{command}.json").read_text()
        for name, why in (
            ("layers.1.self_attn", "order of the 96 rows"),
            ("single_blocks.0", "norms queries and keys"),
        ):
            for text in (out + err, written):
                assert name in text, command
                assert why in " ".join(text.split()), command


@pytest.mark.parametrize("name", ["conv1", "encoder.stages.0.0.convs.0.conv"])
def test_a_lone_convolution_of_one_channel_may_be_the_first_of_a_network(name: str) -> None:
    state = {f"{name}.weight": torch.zeros(8, 1, 3, 3), "fc.weight": torch.zeros(4, 8)}
    with pytest.raises(AnatomyError, match="or the first convolution of a network for grey images"):
        anatomy.depthwise(state)
    deeper = state | {f"body.{i}.dw.weight": torch.zeros(8, 1, 3, 3) for i in range(2)}
    assert [part.name for part in anatomy.depthwise(deeper, strict=None)] == ["body.0.dw", "body.1.dw"]
    colour = deeper | {"stem.weight": torch.zeros(8, 3, 3, 3)}
    assert len(anatomy.depthwise(colour)) == 3


@pytest.mark.parametrize("key", ["ngroups", "n_groups", "mamba_n_groups", "mamba_ngroups"])
def test_groups_of_a_state_space_layer(key: str) -> None:
    shapes = {"in_proj.weight": (132, 16), "conv1d.weight": (96, 1, 4), "out_proj.weight": (16, 32)}
    state = {f"layers.0.mixer.{n}": torch.zeros(s) for n, s in (shapes | {"A_log": (4,), "dt_bias": (4,)}).items()}
    for config in ({key: 4}, {"ssm_cfg": {key: 4}}):
        (part,) = anatomy.ssms(state, config)
        assert (part.groups, part.state) == (4, 8)
    with pytest.raises(AnatomyError, match="number of groups"):
        anatomy.ssms(state)


# --- the tables ------------------------------------------------------------------------------------------------------


def _order(function: ast.FunctionDef) -> list[str]:
    """The attributes of `self` that a function calls, in the order in which they run."""
    out: list[str] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            visit(child)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            out.extend([node.func.attr] * (isinstance(node.func.value, ast.Name) and node.func.value.id == "self"))

    visit(function)
    return out


ATTENTION, NORM = re.compile(r"attn|attention", re.IGNORECASE), re.compile("norm|ln_")


@pytest.mark.slow
def test_where_norms_act_is_what_the_source_of_transformers_says() -> None:
    """In every layer of every type in a table that calls a norm of the table and an attention, in their order."""
    folder = Path(shims.transformers().__file__).parent / "models"
    checked = 0
    for one in tables()[1]:
        kinds = {"openai_gpt": "openai"}
        for kind in one.types if one.norm and not one.config else ():
            for file in (folder / kinds.get(kind, kind)).glob("modeling_*.py"):
                for layer in (c for c in ast.parse(file.read_text()).body if isinstance(c, ast.ClassDef)):
                    forward = next(
                        (f for f in layer.body if isinstance(f, ast.FunctionDef) and f.name == "forward"), None
                    )
                    calls = [] if forward is None else _order(forward)
                    norm = next((i for i, name in enumerate(calls) if name in one.norm), None)
                    read = next(
                        (i for i, name in enumerate(calls) if ATTENTION.search(name) and not NORM.search(name)), None
                    )
                    if norm is None or read is None or not re.search(one.path, f".{calls[read]}"):
                        continue
                    if not calls[read].startswith(("_", "get")):
                        assert (norm > read) == one.after, (one.name, kind, layer.name, calls)
                        checked += 1
    assert checked > 250
