"""Small random models of real classes, one row for each family whose names `weightscope.anatomy` knows.

for family in rows("attention"):
    model = family.build()      # float32, in evaluation mode, the same weights each time
    family.call(model)          # one forward pass on a fixed input
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import shims
import torch
from torch import Tensor, nn

from weightscope.networks.sequences import Mamba, Mamba2

WIDTH, DEPTH, HEADS, HIDDEN = 48, 2, 3, 96
IMAGE, PATCH = 32, 8
HF = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """One family."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Any]  # runs the model's own forward on a fixed input
    parts: dict[str, int]  # kind -> how many parts of that kind the model has; a kind that is absent must raise
    heads: tuple[int, int] = (HEADS, HEADS)  # (heads, kv_heads) of every attention part
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model with every parameter drawn at random, biases and scales too."""
        torch.manual_seed(0)
        return scramble(self.make().eval())


@functools.cache
def built(name: str) -> nn.Module:
    """A model that tests only read."""
    return FAMILIES[name].build()


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def state_space(version: int, depth: int = 3, width: int = 16, seed: int = 0, **options: Any) -> nn.Module:
    """Our Mamba (version 1) or Mamba-2, small."""
    torch.manual_seed(seed)
    if version == 1:
        return Mamba(9, width, depth, state=4, **options)
    return Mamba2(9, width, depth, state=4, head_width=8, groups=2, **options)


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random numbers in every parameter: a bias or a position of zero would hide a mistake in its place."""
    g = seeded(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log") or not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=g) * (0.3 if p.ndim > 1 else 0.2)
            fan = p[0].numel() ** 0.5 if p.ndim > 1 else 1.0
            p.copy_(noise / fan * 3 if p.ndim > 1 else noise + ("norm" in name and name.endswith("weight")))
    return model


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _image(model: nn.Module) -> Any:
    return model(_draw(1, 3, IMAGE, IMAGE))


def _pixels(model: nn.Module) -> Any:
    return model(pixel_values=_draw(1, 3, IMAGE, IMAGE))


def _ids(n: int = 7) -> Tensor:
    return torch.randint(3, 40, (1, n), generator=torch.Generator().manual_seed(7))


def _text(model: nn.Module) -> Any:
    return model(input_ids=_ids())


def _text_at_zero(model: nn.Module) -> Any:
    """All tokens at position 0, where a rotation of queries and keys is the identity."""
    return model(input_ids=_ids(), position_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=False)


# --- torch ---------------------------------------------------------------------------------------------------------


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, DEPTH)


def _kdim() -> nn.Module:
    return nn.ModuleDict({"multihead_attn": nn.MultiheadAttention(WIDTH, HEADS, kdim=20, vdim=28, batch_first=True)})


def _call_kdim(model: nn.Module) -> Any:
    return model["multihead_attn"](_draw(1, 5, WIDTH), _draw(1, 6, 20), _draw(1, 6, 28), need_weights=False)


def _sequence(model: nn.Module) -> Any:
    return model(_draw(1, 5, WIDTH))


def _two_sequences(model: nn.Module) -> Any:
    return model(_draw(1, 5, WIDTH), _draw(1, 6, WIDTH) + 1)


# --- ours ----------------------------------------------------------------------------------------------------------


def _ours(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from weightscope import networks

        return getattr(networks, name)(*args, **options)

    return make


# --- timm and torchvision ------------------------------------------------------------------------------------------


SIZES = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}


def _timm_vit(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        shims.timm()
        layers = importlib.import_module("timm.layers")
        own = {key: getattr(layers, value) if key == "mlp_layer" else value for key, value in options.items()}
        return getattr(importlib.import_module(f"timm.models.{module}"), name)(**SIZES, num_classes=5, **own)

    return make


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return shims.timm().create_model(name, **options)

    return make


def _timm_convmixer() -> nn.Module:
    shims.timm()
    from timm.models.convmixer import ConvMixer

    return ConvMixer(16, 3, 5, 4, num_classes=4)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        shims.timm()
        models = pytest.importorskip("torchvision.models")
        if name == "vit":
            return models.VisionTransformer(IMAGE, PATCH, DEPTH, HEADS, WIDTH, HIDDEN, num_classes=4)
        from torchvision.models.convnext import CNBlockConfig

        stages = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)]
        return models.ConvNeXt(stages, num_classes=4)

    return make


# --- transformers --------------------------------------------------------------------------------------------------


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = shims.transformers()
        settings = getattr(transformers, config)(**options)
        return getattr(transformers, model)(settings)

    return make


VISION = {"image_size": IMAGE, "patch_size": PATCH}
TEXT = {"vocab_size": 50, "max_position_embeddings": 20}
LLAMA = HF | TOKENS | {"vocab_size": 50, "num_attention_heads": 4, "num_key_value_heads": 2}
WHISPER = {"vocab_size": 60, "d_model": WIDTH, "encoder_layers": DEPTH, "decoder_layers": DEPTH, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
WHISPER |= {"decoder_ffn_dim": HIDDEN, "max_source_positions": 16, "max_target_positions": 20} | TOKENS
WHISPER |= {"decoder_start_token_id": 1}
T5 = {"vocab_size": 50, "d_model": WIDTH, "d_kv": 16, "d_ff": HIDDEN, "num_layers": DEPTH, "num_heads": HEADS} | TOKENS
T5 |= {"decoder_start_token_id": 1, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
DINO = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "mlp_ratio": 2} | VISION
DISTIL = {"dim": WIDTH, "n_layers": DEPTH, "n_heads": HEADS, "hidden_dim": HIDDEN} | TEXT
GPT2 = {"vocab_size": 50, "n_positions": 20, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS} | TOKENS
MAMBA = {"vocab_size": 50, "hidden_size": 32, "state_size": 8, "num_hidden_layers": DEPTH}
MAMBA2 = MAMBA | TOKENS | {"head_dim": 16, "num_heads": 4, "n_groups": 2, "chunk_size": 4}


def _clip() -> nn.Module:
    transformers = shims.transformers()
    config = transformers.CLIPConfig(text_config={**HF, **TEXT, **TOKENS}, vision_config={**HF, **VISION})
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = "sdpa"
    return transformers.CLIPModel(config)


def _call_clip(model: nn.Module) -> Any:
    return model(input_ids=_ids(), pixel_values=_draw(1, 3, IMAGE, IMAGE))


def _call_whisper(model: nn.Module) -> Any:
    return model(input_features=_draw(1, 8, 32), decoder_input_ids=_ids(), use_cache=False)


def _call_t5(model: nn.Module) -> Any:
    return model(input_ids=_ids(9), decoder_input_ids=_ids(), use_cache=False)


_BLOCKS = {"attention": DEPTH, "mlps": DEPTH}
_TEXT = _BLOCKS | {"positions": 1}
_VIT = _TEXT | {"patch_embeddings": 1}
_TIMM_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32), "num_classes": 5}
_SSM = {"ssms": DEPTH, "depthwise": DEPTH}
_OURS = IMAGE, PATCH, WIDTH, DEPTH, HEADS, 5
_POSITIONAL = {"emulate": False, "positional": True}


def _convolutional(depthwise: int, mlps: int = 0) -> dict[str, int]:
    return {"depthwise": depthwise, "patch_embeddings": 1} | ({"mlps": mlps} if mlps else {})


_ROWS = [
    Family("ours-vit", _ours("ViT", *_OURS), _image, _VIT),
    Family("ours-vit-token", _ours("ViT", *_OURS, pool="token"), _image, _VIT),
    Family("ours-vit-gpsa", _ours("ViT", *_OURS, attention="gpsa"), _image, _VIT, extra=_POSITIONAL),
    Family(
        "ours-vit-conv-map", _ours("ViT", *_OURS, pool="token", attention="conv-map"), _image, _VIT, extra=_POSITIONAL
    ),
    Family("ours-convmixer", _ours("ConvMixer", 16, 3, 5, 4, 5), _image, _convolutional(3)),
    Family("ours-convnext", _ours("ConvNeXt", (8, 16), (2, 1)), _image, _convolutional(3, 3)),
    *(
        Family(f"timm-{name}", _timm_vit(module, cls, **options), _image, _VIT)
        for name, module, cls, options in (
            ("vit", "vision_transformer", "VisionTransformer", {}),
            ("vit-swiglu", "vision_transformer", "VisionTransformer", {"mlp_layer": "SwiGLU"}),
            ("vit-packed", "vision_transformer", "VisionTransformer", {"mlp_layer": "SwiGLUPacked"}),
            ("deit", "deit", "VisionTransformerDistilled", {}),
            ("eva", "eva", "Eva", {"qkv_fused": True, "use_rot_pos_emb": False}),
        )
    ),
    Family("timm-convnext", _timm("convnext_atto", **_TIMM_CONVNEXT), _image, _convolutional(5, 5)),
    Family("timm-convmixer", _timm_convmixer, _image, _convolutional(3)),
    Family("timm-efficientnet", _timm("efficientnet_lite0", num_classes=4), _image, {"depthwise": 16}),
    Family("torchvision-vit", _torchvision("vit"), _image, _VIT),
    Family("torchvision-convnext", _torchvision("convnext"), _image, _convolutional(4, 4)),
    Family("hf-vit", _hf("ViTModel", "ViTConfig", **HF, **VISION), _pixels, _VIT),
    Family("hf-deit", _hf("DeiTModel", "DeiTConfig", **HF, **VISION), _pixels, _VIT),
    Family("hf-dinov2", _hf("Dinov2Model", "Dinov2Config", **DINO), _pixels, _VIT),
    Family("hf-bert", _hf("BertModel", "BertConfig", **HF, **TEXT), _text, _TEXT),
    Family("hf-distilbert", _hf("DistilBertModel", "DistilBertConfig", **DISTIL), _text, _TEXT),
    Family("hf-gpt2", _hf("GPT2LMHeadModel", "GPT2Config", **GPT2), _text, _TEXT),
    Family("hf-neox", _hf("GPTNeoXModel", "GPTNeoXConfig", **HF, **TEXT, **TOKENS), _text_at_zero, _BLOCKS),
    Family("hf-llama", _hf("LlamaForCausalLM", "LlamaConfig", **LLAMA), _text_at_zero, _BLOCKS, heads=(4, 2)),
    Family("hf-phi3", _hf("Phi3ForCausalLM", "Phi3Config", **LLAMA), _text_at_zero, _BLOCKS, heads=(4, 2)),
    Family(
        *("hf-clip", _clip, _call_clip),
        {"attention": 2 * DEPTH, "mlps": 2 * DEPTH, "patch_embeddings": 1, "positions": 2},
    ),
    Family(
        *("hf-whisper", _hf("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), _call_whisper),
        {"attention": 3 * DEPTH, "mlps": 2 * DEPTH, "positions": 2},
    ),
    Family(
        *("hf-t5", _hf("T5ForConditionalGeneration", "T5Config", **T5), _call_t5),
        {"attention": 3 * DEPTH, "mlps": 2 * DEPTH},
        extra={"emulate": False},  # its relative biases are added inside a forward of its own
    ),
    Family("hf-mamba", _hf("MambaForCausalLM", "MambaConfig", **MAMBA), _text, _SSM),
    Family("hf-mamba2", _hf("Mamba2ForCausalLM", "Mamba2Config", **MAMBA2), _text, _SSM),
    Family("torch-encoder", _encoder, _sequence, _BLOCKS),
    Family("torch-decoder", _decoder, _two_sequences, {"attention": 2 * DEPTH, "mlps": DEPTH}),
    Family("torch-kdim", _kdim, _call_kdim, {"attention": 1}),
]
FAMILIES: dict[str, Family] = {family.name: family for family in _ROWS}


def rows(kind: str) -> list[Family]:
    """The families that have parts of a kind, for `pytest.mark.parametrize`."""
    return [family for family in FAMILIES.values() if kind in family.parts]
