"""Which initialisers set models of timm and transformers right, and which they refuse.

    python benchmarks/foreign_models.py --markdown benchmarks/results/foreign-models.md

Every model has random weights. "right": the initialiser ran, and an audit finds its structure (or cannot decide);
"refused": it stopped with one line and changed nothing; "-": the model has no such part. Anything else is "WRONG".
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import model_table
import torch
from torch import nn

import weightscope.init as wi
from weightscope.auditing import audit
from weightscope.errors import AnatomyError, WeightscopeError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shims

INITS = ("mimetic_attention", "zero_init", "mimetic_mlp", "t_fixup", "random_filters", "sinusoidal_positions")
TIMM = [
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_relpos_small_patch16_224",
    "vit_small_patch16_dinov3",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224",
    "pvt_v2_b0",
    "twins_svt_small",
    "crossvit_tiny_240",
    "visformer_tiny",
    "volo_d1_224",
    "pit_ti_224",
    "mobilevit_xxs",
    "fastvit_sa12",
    "caformer_s18",
    "vitamin_small_224",
    "cait_xxs24_224",
    "maxvit_rmlp_pico_rw_256",
    "efficientformer_l1",
    "hiera_tiny_224",
    "coatnet_nano_rw_224",
    "levit_128s",
    "nest_tiny",
    "davit_tiny",
    "mvitv2_tiny",
    "tiny_vit_5m_224",
    "xcit_nano_12_p16_224",
    "convit_tiny",
    "mixer_s16_224",
]
HF = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
TEXT = HF | {"vocab_size": 50, "max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = HF | {"image_size": 32, "patch_size": 8}
LLAMA = TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
TRANSFORMERS = {
    "Bert": TEXT,
    "Electra": TEXT | {"embedding_size": 48},
    "Albert": TEXT | {"embedding_size": 48},
    "DebertaV2": TEXT,
    "GPT2": {"vocab_size": 50, "n_positions": 20, "n_embd": 48, "n_layer": 2, "n_head": 3},
    "GPTNeoX": TEXT,
    "OPT": TEXT | {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "Bloom": {"vocab_size": 50, "hidden_size": 48, "n_layer": 2, "n_head": 3},
    "Falcon": TEXT,
    "Llama": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 12},
    "Gemma2": LLAMA | {"head_dim": 12},
    "Phi3": LLAMA,
    "T5": {"vocab_size": 50, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 3},
    "ViT": IMAGE,
    "Dinov2": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "mlp_ratio": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "Swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "Segformer": {"depths": [1] * 4, "hidden_sizes": [16, 32, 40, 64], "num_attention_heads": [1, 2, 5, 8]},
}


def models() -> dict[str, Callable[[], nn.Module]]:
    """Name -> how to make a model."""
    timm, transformers = shims.timm(), shims.transformers()
    out: dict[str, Callable[[], nn.Module]] = {name: lambda n=name: timm.create_model(n) for name in TIMM}
    for name, options in TRANSFORMERS.items():
        kind, config = (getattr(transformers, f"{name}{end}") for end in ("Model", "Config"))
        out[f"transformers {name}"] = lambda k=kind, c=config, o=options: k(c(**o))
    return out


def outcome(model: nn.Module, name: str) -> str:
    """What an initialiser does to a copy of a model."""
    changed = copy.deepcopy(model)
    try:
        wi.get(name)(changed, generator=torch.Generator().manual_seed(0))
    except WeightscopeError as error:
        same = all(
            torch.equal(a, b) for a, b in zip(changed.state_dict().values(), model.state_dict().values(), strict=True)
        )
        absent = isinstance(error, AnatomyError) and "look like them" not in str(error)
        return "-" if absent else "refused" if same else f"WRONG: changed, then {error}"
    report = audit(changed, name)
    return "WRONG: the audit fails" if report.failures else "right"


def row(make: Callable[[], nn.Module]) -> list[str]:
    """What each initialiser does to one model."""
    model = make()
    return [outcome(model, init) for init in INITS]


if __name__ == "__main__":
    model_table.write(__doc__, "Foreign models", "foreign_models", INITS, models, row)
