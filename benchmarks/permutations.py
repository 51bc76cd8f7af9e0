"""Which permutations are derived for models of timm, torchvision and transformers.

    python benchmarks/permutations.py --markdown benchmarks/results/derived-permutations.md

Every model has random weights. "groups" counts the sets of units that may be renumbered, "signed" those that may also
change sign, and "moved" the tensors that renumbering changes. "change" is how much the outputs change then, relative to
their size, in float64; models that compute parts in float32 reach its precision.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_table
import torch
from torch import Tensor, nn

from weightscope.anatomy.permutation_graph import derive_permutations
from weightscope.anatomy.permutation_groups import change_of_function

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shims

TORCHVISION = [
    "resnet18",
    "vgg11_bn",
    "alexnet",
    "squeezenet1_1",
    "densenet121",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "regnet_y_400mf",
    "mnasnet0_5",
    "swin_t",
]
TIMM = {
    "resnext50_32x4d": 64,
    "efficientnet_lite0": 64,
    "efficientnetv2_rw_t": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "convmixer_1024_20_ks9_p14": 28,
    "poolformer_s12": 64,
    "ghostnet_100": 64,
    "nfnet_l0": 64,
    "pvt_v2_b0": 64,
    "swin_tiny_patch4_window7_224": 56,
    "mixer_s32_224": 64,
    "resmlp_12_224": 32,
    "gmlp_ti16_224": 32,
    "vit_tiny_patch16_224": 32,
    "deit3_small_patch16_224": 32,
    "beit_base_patch16_224": 32,
    "eva02_tiny_patch14_224": 28,
    "cait_xxs24_224": 32,
    "xcit_nano_12_p16_224": 32,
}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 60,
    "pad_token_id": 0,
}
GROUPED = BERT | {"num_key_value_heads": 2}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TRANSFORMERS: dict[tuple[str, str], dict[str, Any]] = {
    ("Bert", "ForMaskedLM"): BERT,
    ("Roberta", "ForMaskedLM"): BERT,
    ("Albert", "ForMaskedLM"): BERT | {"embedding_size": 16},
    ("Electra", "ForMaskedLM"): BERT | {"embedding_size": 16},
    ("GPT2", "LMHeadModel"): {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    ("GPTNeo", "ForCausalLM"): {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "vocab_size": 60,
    },
    ("GPTNeoX", "ForCausalLM"): BERT,
    ("OPT", "ForCausalLM"): BERT | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ("Bloom", "ForCausalLM"): {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    ("Llama", "ForCausalLM"): GROUPED,
    ("Mistral", "ForCausalLM"): GROUPED,
    ("Qwen3", "ForCausalLM"): GROUPED | {"head_dim": 8},
    ("Gemma", "ForCausalLM"): GROUPED | {"head_dim": 8},
    ("Phi3", "ForCausalLM"): GROUPED,
    ("T5", "ForConditionalGeneration"): {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 60,
    },
    ("Mamba", "ForCausalLM"): {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60, "state_size": 4},
    ("ViT", "ForImageClassification"): IMAGE | {"intermediate_size": 48},
    ("Dinov2", "ForImageClassification"): IMAGE,
}


def models() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    """Name -> how to make a model, and inputs for it."""
    timm, transformers = shims.timm(), shims.transformers()
    vision = importlib.import_module("torchvision.models")
    out: dict[str, tuple[Callable[[], nn.Module], Any]] = {}
    for name in TORCHVISION:
        out[f"torchvision {name}"] = (lambda n=name: getattr(vision, n)(num_classes=7)), torch.randn(2, 3, 64, 64)
    for name, size in TIMM.items():
        fixed = {"img_size": size} if any(k in name for k in ("patch", "mixer_s", "mlp_", "cait", "xcit")) else {}
        out[f"timm {name}"] = (lambda n=name, f=fixed: timm.create_model(n, **f)), torch.randn(2, 3, size, size)
    for (name, head), options in TRANSFORMERS.items():
        kind, config = getattr(transformers, name + head), getattr(transformers, f"{name}Config")
        tokens = {"input_ids": torch.randint(0, 50, (2, 7))}
        tokens |= {"decoder_input_ids": torch.randint(0, 50, (2, 5))} if name == "T5" else {}
        inputs: Tensor | dict[str, Tensor] = torch.randn(2, 3, 32, 32) if "image_size" in options else tokens
        out[f"transformers {name}"] = (lambda k=kind, c=config, o=options: k(c(**o))), inputs
    return out


def row(model: tuple[Callable[[], nn.Module], Any]) -> list[str]:
    """What is found of one model."""
    make, inputs = model
    module = make().float().eval()
    found = derive_permutations(module, inputs)
    signed = {axis for view in found.views for axis in view.axes if axis is not None and axis.startswith("~")}
    tensors = {view.tensor for view in found.views}
    moved = {view.tensor for view in found.views if view.labels}
    change = change_of_function(module, inputs, found)[0]
    numbers = [str(len(found.sizes)), str(len(signed)), f"{len(moved)} of {len(tensors)}", f"{change:.0e}"]
    return [*numbers, "; ".join(found.notes)]


if __name__ == "__main__":
    columns = ("groups", "signed", "moved", "change", "notes")
    model_table.write(__doc__, "Derived permutations", "permutations", columns, models, row)
