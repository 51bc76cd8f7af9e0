"""The adapters of attention modules as data: the names that a family gives to its projections, and their packing."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scheme:
    """How one family names and packs its projections, relative to the attention module.

    Attributes:
        q: name of the query weight; equal names denote packed rows, in the order q, k, v.
        k: of the key weight.
        v: of the value weight.
        interleaved: packed rows are ordered by head (q, k, v of head 0, then of head 1, ...).
        conv1d: the tensors may be those of transformers' Conv1D, stored (in, out), to be seen from the packed shape.
        bias: names of the three biases; None derives them from the weights' names.
    """

    q: str
    k: str
    v: str
    interleaved: bool = False
    conv1d: bool = False
    bias: tuple[str, str, str] | None = None


def _packed(name: str, **options: Any) -> Scheme:
    return Scheme(name, name, name, **options)


def _separate(q: str, k: str, v: str) -> Scheme:
    return Scheme(f"{q}.weight", f"{k}.weight", f"{v}.weight")


_IN_PROJ_BIAS = ("in_proj_bias", "in_proj_bias", "in_proj_bias")

SCHEMES: tuple[Scheme, ...] = (
    _packed("qkv.weight"),  # timm, ours, SAM
    _packed("Wqkv.weight"),  # ModernBERT, MPT
    _packed("to_qkv.weight"),  # lucidrains
    _packed("qkv_proj.weight"),  # Phi-3: rows q, k, v with fewer k and v
    _packed("in_proj_weight", bias=_IN_PROJ_BIAS),  # nn.MultiheadAttention
    Scheme("q_proj_weight", "k_proj_weight", "v_proj_weight", bias=_IN_PROJ_BIAS),  # the same with kdim or vdim
    Scheme("q_attn.weight", "c_attn.weight", "c_attn.weight", conv1d=True),  # GPT-2's cross-attention
    _packed("c_attn.weight", conv1d=True),  # GPT-2; nanoGPT keeps it as Linear
    _packed("query_key_value.weight", interleaved=True),  # GPT-NeoX, BLOOM
    _separate("q_proj", "k_proj", "v_proj"),  # Llama, CLIP, Whisper, transformers' ViT from 5.0
    _separate("query", "key", "value"),  # BERT, transformers' ViT before 5.0
    _separate("query_proj", "key_proj", "value_proj"),  # DeBERTa
    _separate("q_lin", "k_lin", "v_lin"),  # DistilBERT
    _separate("to_q", "to_k", "to_v"),  # diffusers
    _separate("wq", "wk", "wv"),  # Llama as published
    _separate("q", "k", "v"),  # T5, CaiT
    Scheme("q.weight", "kv.weight", "kv.weight"),  # PVT, Segformer, timm's attention pooling
    Scheme("to_q.weight", "to_kv.weight", "to_kv.weight"),
)

# The output projection, relative to the attention module; ^ denotes its parent.
OUTPUTS = (
    *(f"{n}.weight" for n in ("proj", "out_proj", "o_proj", "to_out.0", "to_out", "Wo", "wo", "dense", "c_proj")),
    *(f"{n}.weight" for n in ("o", "out_lin", "out", "^output.dense", "^dense")),
)

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_attn_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_kv", "key_value_proj_dim", "dim_head", "head_width")
