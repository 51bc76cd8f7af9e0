"""Small models of timm and transformers, built from their registries, with an input for each."""

import inspect
import re
from typing import Any

import shims
import torch
from torch import nn


def words(text: str) -> list[str]:
    """The names in a text."""
    return text.split()


SIZES = words("test atto femto zepto pico nano xxxs xxs xxt xt xtiny xs ti t tiny mini xsmall s small m b base l large")


# Of these the smallest that is found by name is not the smallest, or needs what is not installed.
WHOLE = ("csatv2",)  # has one token left where the image is small
CHOSEN = {
    "levit": "levit_128s",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "pit": "pit_ti_224",
    "metaformer": "caformer_s18",
    "vision_transformer_sam": "samvit_base_patch16_224",
}


def timm_families() -> dict[str, str]:
    """Module of timm -> its smallest variant."""
    timm = shims.timm()
    from timm.models import _registry

    def size(name: str) -> tuple:
        words = [word.rstrip("0123456789") for word in name.split("_")]
        rank = min((SIZES.index(w) for w in words if w in SIZES), default=len(SIZES))
        return rank, [int(n) for n in re.findall(r"\d+", name)], name

    out = {}
    for module in sorted({_registry._model_to_module[name] for name in timm.list_models()}):
        names = sorted(timm.list_models(module=module), key=size)
        out[module] = CHOSEN.get(module, names[0])
    return out


def timm_model(name: str) -> tuple[nn.Module, Any]:
    """A model of timm and an image."""
    timm = shims.timm()
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, pretrained=False, depth=3)
    except (TypeError, ValueError, AssertionError, RuntimeError, IndexError):  # its depth is not one number
        model = timm.create_model(name, pretrained=False)
    config = model.pretrained_cfg
    side, model = config["input_size"][-1], scrambled(model)
    for smaller in (side,) if name in WHOLE else (128, 112, side):
        image = torch.randn(1, config["input_size"][0], min(smaller, side), min(smaller, side))
        try:
            with torch.no_grad():
                model(image)
        except (AssertionError, RuntimeError):
            if smaller >= side:
                raise
        else:
            break
    return model, image


@torch.no_grad()
def scrambled(model: nn.Module) -> nn.Module:
    """Noise in tensors whose numbers are all equal, but not in the gains of norms: every weight can be told."""
    torch.manual_seed(1)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        matrix = any(sum(n > 1 for n in p.shape) > 1 for p in own.values())
        for p in own.values():
            if p.is_floating_point() and p.numel() > 1 and matrix and bool((p == p.flatten()[0]).all()):
                p.add_(torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.1))
    return model.eval()


SHRUNK: dict[str, Any] = (
    dict.fromkeys(
        words(
            "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth "
            "num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers num_blocks num_attention_layers "
            "num_local_layers num_global_layers vision_layers"
        ),
        2,
    )
    | dict.fromkeys(words("hidden_size d_model n_embd decoder_hidden_size encoder_hidden_dim"), 48)
    | dict.fromkeys(
        words(
            "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
            "decoder_num_attention_heads encoder_num_attention_heads"
        ),
        4,
    )
    | dict.fromkeys(
        words(
            "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner n_inner mlp_dim dim_feedforward "
            "decoder_intermediate_size encoder_intermediate_size shared_expert_intermediate_size"
        ),
        80,
    )
    | dict.fromkeys(words("num_experts num_local_experts n_routed_experts moe_num_experts"), 4)
    | dict.fromkeys(words("num_experts_per_tok moe_top_k moe_topk"), 2)
    | dict.fromkeys(words("n_group topk_group first_k_dense_replace"), 1)
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 40,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "n_positions": 64,
        "d_kv": 16,
        "kv_lora_rank": 20,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 40,
        "num_queries": 10,
        "max_source_positions": 40,
        "max_target_positions": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "sliding_window": 8,
        "use_cache": False,
        "mamba_d_state": 8,
        "rotary_dim": 8,
    }
)


def shrunk(kind: type, level: int = 0) -> Any:
    """A small config of a class; level 1 keeps its widths, level 2 changes its layers and vocabulary only."""
    fields = getattr(kind, "__dataclass_fields__", {})
    given: dict[str, Any] = {}
    tokens = iter(range(80, 99))
    for name, one in fields.items():
        name = getattr(kind, "attribute_map", {}).get(name, name)
        value = SHRUNK.get(name)
        default = one.default
        if name in SHRUNK and not (
            default is None and name in ("head_dim", "sliding_window", "num_key_value_heads", "n_inner", "d_inner")
        ):
            small = value in (2, 99) and name not in ("num_key_value_heads", "num_experts_per_tok")
            if (
                isinstance(default, (list, tuple))
                or (level == 2 and not small)
                or (level == 1 and value in (48, 4, 80, 16))
            ):
                continue
            if (
                isinstance(default, int)
                and not isinstance(default, bool)
                and isinstance(value, int)
                and value > default
                and name != "head_dim"
            ):
                continue
            given[name] = value
        elif re.search("layer_types$|layers_block_type", name):
            continue
        elif name == "depths" and isinstance(default, (list, tuple)):
            given[name] = [min(n, 2) for n in default]
        elif re.search(r"token_(id|index)$", name) and isinstance(default, int) and default > 98:
            given[name] = next(tokens)
    inner = getattr(kind, "sub_configs", None) or {}
    usual = kind() if inner else None
    for name in inner:
        if (one := getattr(usual, name, None)) is not None and hasattr(one, "model_type"):
            given[name] = shrunk(type(one), level)
    return kind(**given)


def transformers_types() -> list[str]:
    """The model types that have a model of their own."""
    shims.transformers()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as names

    return sorted(names)


def transformers_model(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of a type, on eager attention where there is a choice, and an input."""
    shims.transformers()
    from transformers import CONFIG_MAPPING, AutoModel

    errors = []
    for level in (0, 1, 2):
        try:
            torch.manual_seed(0)
            config = shrunk(CONFIG_MAPPING[kind], level)
            model = scrambled(AutoModel.from_config(config))
            inputs = inputs_of(model)
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # noqa: BLE001 - the next level
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}")
        else:
            return model, inputs
    raise ValueError(f"cannot be built small: {'; '.join(dict.fromkeys(errors))}")


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """Made-up inputs by the names of what the model's forward pass takes."""
    torch.manual_seed(2)
    config = model.config
    names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]

    def setting(*keys: str, default: int) -> int:
        scopes = [
            config,
            *(
                getattr(config, n)
                for n in ("vision_config", "text_config", "audio_config", "backbone_config", "encoder_config")
                if getattr(config, n, None) is not None
            ),
        ]
        for key in keys:
            for scope in scopes:
                value = getattr(scope, key, None)
                if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                    value = value[0]
                if isinstance(value, int):
                    return value
        return default

    side = setting("image_size", "input_size", default=64)
    words = torch.randint(3, min(79, setting("vocab_size", default=79)), (1, 12))
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = words
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = words[:, :7]
    main = getattr(model, "main_input_name", "")
    if "pixel_values" in names and ("input_ids" not in names or main == "pixel_values" or not _language(config)):
        channels = setting("num_channels", "in_channels", default=3)
        shape = (1, channels, side, side)
        if re.search("vjepa|video|timesformer|vivit", config.model_type):
            shape = (1, setting("num_frames", "frames_per_clip", default=4), *shape[1:])
        given["pixel_values"] = torch.randn(shape)
    if "pixel_values_videos" in names and "input_ids" not in names:
        given["pixel_values_videos"] = torch.randn(
            1, setting("num_frames", "frames_per_clip", default=4), 3, side, side
        )
    if "input_features" in names and ("input_ids" not in names or main == "input_features"):
        frames = 2 * setting("max_source_positions", default=40)
        mels = setting("num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        given["input_features"] = (
            torch.randn(1, mels, frames)
            if main == "input_features" and "whisper" in config.model_type
            else torch.randn(1, frames, mels)
        )
    if "input_values" in names and "input_ids" not in names:
        given["input_values"] = torch.randn(1, 4000)
    if not given and main:
        given[main] = torch.randn(1, 12, setting("hidden_size", default=48))
    return given


def _language(config: Any) -> bool:
    return getattr(config, "text_config", None) is not None and getattr(config, "projection_dim", None) is None
