"""The permutation groups of known architectures, as rules for the names of their tensors.

A rule is a pattern of names with the group of each axis. Groups may use what the pattern captured: `hidden.{block}`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weightscope.spec import TensorSpec, WeightSpec

Axes = tuple[str | None, ...]
_C = "channels"


@dataclass(frozen=True)
class Rule:
    """Names that match `pattern` have these axes; a fused projection has one row of axes for each of its parts.

    Attributes:
        pattern: a regular expression of the whole name; its named groups may be used in the axes.
        axes: one label per axis; trailing axes of length one (1x1 convolutions) need none.
        parts: of the first axis: (label in brackets, axes).
        sizes: the tensor and its network's spec -> the length of each part, None if they do not fit; by default parts
            have equal shares.
    """

    pattern: str
    axes: Axes = ()
    parts: tuple[tuple[str, Axes], ...] = ()
    sizes: Callable[[TensorSpec, WeightSpec], tuple[int, ...] | None] | None = None

    def rows(self, tensor: TensorSpec, spec: WeightSpec) -> tuple[int, ...] | None:
        """The length of each part of a tensor; None if they do not fit."""
        if self.sizes is None:
            share, rest = divmod(tensor.shape[0], len(self.parts))
            return None if rest else (share,) * len(self.parts)
        found = self.sizes(tensor, spec)
        return found if found and min(found) > 0 and sum(found) == tensor.shape[0] else None


_VIT_BLOCK = r"blocks\.(?P<b>\d+)\."
_VIT = (
    Rule(r"(cls_token|pos_embed|reg_token|dist_token)", (None, None, _C)),
    Rule(r"patch_embed\.proj\.weight", (_C, None, None, None)),
    Rule(r"patch_embed\.proj\.bias|(fc_norm|norm|norm_pre)\.(weight|bias)", (_C,)),
    Rule(_VIT_BLOCK + r"(norm[12]\.(weight|bias)|attn\.proj\.bias|mlp\.fc2\.bias)", (_C,)),
    Rule(_VIT_BLOCK + r"(ls[12]\.gamma|gamma_[12]|skip_scale)", (_C,)),
    Rule(
        _VIT_BLOCK + r"attn\.qkv\.weight",
        parts=(("q", ("~qk.{b}", _C)), ("k", ("~qk.{b}", _C)), ("v", ("~vo.{b}", _C))),
    ),
    Rule(_VIT_BLOCK + r"attn\.qkv\.bias", parts=(("q", ("~qk.{b}",)), ("k", ("~qk.{b}",)), ("v", ("~vo.{b}",)))),
    Rule(_VIT_BLOCK + r"attn\.[qk](_proj)?\.weight", ("~qk.{b}", _C)),
    Rule(_VIT_BLOCK + r"attn\.[qk](_proj)?\.bias", ("~qk.{b}",)),
    Rule(_VIT_BLOCK + r"attn\.v(_proj)?\.weight", ("~vo.{b}", _C)),
    Rule(_VIT_BLOCK + r"attn\.v(_proj)?\.bias", ("~vo.{b}",)),
    Rule(_VIT_BLOCK + r"attn\.proj\.weight", (_C, "~vo.{b}")),
    Rule(_VIT_BLOCK + r"attn\.gating_param", ("head.{b}",)),
    Rule(_VIT_BLOCK + r"attn\.position_vectors", ("head.{b}", None)),
    Rule(_VIT_BLOCK + r"attn\.filters", ("head.{b}", None, None)),
    Rule(_VIT_BLOCK + r"attn\.filter_scale", (None,)),
    Rule(_VIT_BLOCK + r"mlp\.fc1\.weight", ("hidden.{b}", _C)),
    Rule(_VIT_BLOCK + r"mlp\.fc1\.bias", ("hidden.{b}",)),
    Rule(_VIT_BLOCK + r"mlp\.fc1\.sum_weight", (None,)),
    Rule(_VIT_BLOCK + r"mlp\.fc2\.weight", (_C, "hidden.{b}")),
    Rule(r"(head|head_dist)\.weight", (None, _C)),
    Rule(r"(head|head_dist)\.bias", (None,)),
)
_HF = r"(vit\.|dinov2\.|deit\.)?"
_HF_LAYER = _HF + r"(encoder\.layer|layers)\.(?P<b>\d+)\."
_QUERY_KEY = r"attention\.(attention\.(query|key)|[qk]_proj)\."
_VALUE = r"attention\.(attention\.value|v_proj)\."
_OUTPUT = r"attention\.(output\.dense|o_proj)\."
_HF_VIT = (
    Rule(_HF + r"embeddings\.(cls_token|position_embeddings|distillation_token|register_tokens)", (None, None, _C)),
    Rule(_HF + r"embeddings\.mask_token", (None, _C)),
    Rule(_HF + r"embeddings\.patch_embeddings\.projection\.weight", (_C, None, None, None)),
    Rule(_HF + r"(embeddings\.patch_embeddings\.projection\.bias|layernorm\.(weight|bias))", (_C,)),
    Rule(_HF_LAYER + r"(norm[12]|layernorm_before|layernorm_after)\.(weight|bias)", (_C,)),
    Rule(_HF_LAYER + "(" + _OUTPUT + r"bias|layer_scale[12]\.lambda1)", (_C,)),
    Rule(_HF_LAYER + r"(mlp\.fc2|output\.dense)\.bias", (_C,)),
    Rule(_HF_LAYER + _QUERY_KEY + "weight", ("~qk.{b}", _C)),
    Rule(_HF_LAYER + _QUERY_KEY + "bias", ("~qk.{b}",)),
    Rule(_HF_LAYER + _VALUE + "weight", ("~vo.{b}", _C)),
    Rule(_HF_LAYER + _VALUE + "bias", ("~vo.{b}",)),
    Rule(_HF_LAYER + _OUTPUT + "weight", (_C, "~vo.{b}")),
    Rule(_HF_LAYER + r"(mlp\.fc1|intermediate\.dense)\.weight", ("hidden.{b}", _C)),
    Rule(_HF_LAYER + r"(mlp\.fc1|intermediate\.dense)\.bias", ("hidden.{b}",)),
    Rule(_HF_LAYER + r"(mlp\.fc2|output\.dense)\.weight", (_C, "hidden.{b}")),
    Rule(_HF + r"(pooler\.dense|classifier)\.weight", (None, _C)),
    Rule(_HF + r"(pooler\.dense|classifier)\.bias", (None,)),
)
_STAGE = r"stages\.(?P<s>\d+)\."
_STAGE_BLOCK = _STAGE + r"blocks\.(?P<b>\d+)\."
_CONVNEXT = (
    Rule(r"stem\.0\.weight", ("channels.0", None, None, None)),
    Rule(r"stem\.(0\.bias|1\.(weight|bias))", ("channels.0",)),
    Rule(_STAGE + r"downsample\.0\.(weight|bias)", ("channels.{before}",)),
    Rule(_STAGE + r"downsample\.1\.weight", ("channels.{s}", "channels.{before}", None, None)),
    Rule(_STAGE + r"downsample\.1\.bias", ("channels.{s}",)),
    Rule(_STAGE_BLOCK + r"(gamma|conv_dw\.bias|norm\.(weight|bias)|mlp\.fc2\.bias)", ("channels.{s}",)),
    Rule(_STAGE_BLOCK + r"conv_dw\.weight", ("channels.{s}", None, None, None)),
    Rule(_STAGE_BLOCK + r"mlp\.fc1\.weight", ("hidden.{s}.{b}", "channels.{s}")),
    Rule(_STAGE_BLOCK + r"mlp\.fc1\.bias", ("hidden.{s}.{b}",)),
    Rule(_STAGE_BLOCK + r"mlp\.fc1\.sum_weight", (None,)),
    Rule(_STAGE_BLOCK + r"mlp\.fc2\.weight", ("channels.{s}", "hidden.{s}.{b}")),
    Rule(r"(norm_pre|head\.norm)\.(weight|bias)", ("channels.{last}",)),
    Rule(r"head\.fc\.weight", (None, "channels.{last}")),
    Rule(r"head\.fc\.bias", (None,)),
)
_BATCH_NORM = r"(weight|bias|running_mean|running_var)"
_CONVMIXER = (
    Rule(r"stem\.0\.weight", ("channels.0", None, None, None)),
    Rule(r"stem\.(0\.bias|2\." + _BATCH_NORM + ")", ("channels.0",)),
    Rule(r"blocks\.(?P<b>\d+)\.0\.fn\.0\.weight", ("channels.{b}", None, None, None)),
    Rule(r"blocks\.(?P<b>\d+)\.0\.fn\.(0\.bias|2\." + _BATCH_NORM + ")", ("channels.{b}",)),
    Rule(r"blocks\.(?P<b>\d+)\.1\.weight", ("channels.{next}", "channels.{b}")),
    Rule(r"blocks\.(?P<b>\d+)\.(1\.bias|3\." + _BATCH_NORM + ")", ("channels.{next}",)),
    Rule(r"head\.weight", (None, "channels.{last}")),
    Rule(r"head\.bias", (None,)),
)
_LLAMA_BLOCK = r"(model\.)?layers\.(?P<b>\d+)\."
# Rotary positions tie the coordinates of queries and keys to each other, so these are fixed; values are free.
_RMS_GATED = (
    Rule(r"(model\.)?embed_tokens\.weight", (None, "~channels")),
    Rule(_LLAMA_BLOCK + r"(input|post_attention)_layernorm\.weight|(model\.)?norm\.weight", (_C,)),
    Rule(_LLAMA_BLOCK + r"self_attn\.[qkv]_proj\.weight", (None, "~channels")),
    Rule(_LLAMA_BLOCK + r"self_attn\.o_proj\.weight", ("~channels", None)),
    Rule(_LLAMA_BLOCK + r"mlp\.up_proj\.weight", ("~hidden.{b}", "~channels")),
    Rule(_LLAMA_BLOCK + r"mlp\.gate_proj\.weight", ("hidden.{b}", "~channels")),
    Rule(_LLAMA_BLOCK + r"mlp\.down_proj\.weight", ("~channels", "~hidden.{b}")),
    Rule(r"lm_head\.weight", (None, "~channels")),
)
_MAMBA_MIXER = r"backbone\.layers\.(?P<b>\d+)\.mixer\."
_MAMBA_ENDS = (
    Rule(r"(backbone\.embeddings|lm_head)\.weight", (None, "~channels")),
    Rule(r"backbone\.(layers\.\d+\.norm|norm_f)\.weight", (_C,)),
)
_HYBRID = (  # attention of one head
    Rule(_MAMBA_MIXER + r"[qk]_proj\.weight", ("~qk.{b}", "~channels")),
    Rule(_MAMBA_MIXER + r"v_proj\.weight", ("~vo.{b}", "~channels")),
    Rule(_MAMBA_MIXER + r"o_proj\.weight", ("~channels", "~vo.{b}")),
)
# Inner channels only: states start at different rates (S4D), and rows of the low-rank step are not renumbered.
_MAMBA = (
    *_MAMBA_ENDS,
    Rule(
        _MAMBA_MIXER + r"in_proj\.weight", parts=(("x", ("inner.{b}", "~channels")), ("z", ("inner.{b}", "~channels")))
    ),
    Rule(_MAMBA_MIXER + r"(conv1d\.bias|dt_proj\.bias|D)", ("inner.{b}",)),
    Rule(_MAMBA_MIXER + r"conv1d\.weight", ("inner.{b}", None, None)),
    Rule(_MAMBA_MIXER + r"x_proj\.weight", (None, "inner.{b}")),
    Rule(_MAMBA_MIXER + r"(dt_proj\.weight|A_log)", ("inner.{b}", None)),
    Rule(_MAMBA_MIXER + r"out_proj\.weight", ("~channels", "inner.{b}")),
    *_HYBRID,
)


def _rows_of(spec: WeightSpec, name: str) -> int:
    return spec[name].shape[0]


def _mamba2_rows(tensor: TensorSpec, spec: WeightSpec) -> tuple[int, ...] | None:
    """Rows of `in_proj`, [z, x, B, C, Delta], or of the convolution, [x, B, C]."""
    mixer = tensor.name[: tensor.name.rindex(".mixer.") + len(".mixer.")]
    if any(mixer + name not in spec.names for name in ("A_log", "norm.weight", "in_proj.weight")):
        return None
    heads, channels = _rows_of(spec, mixer + "A_log"), _rows_of(spec, mixer + "norm.weight")
    states = (_rows_of(spec, mixer + "in_proj.weight") - 2 * channels - heads) // 2
    rows = (channels, channels, states, states, heads)
    return rows if tensor.name.endswith("in_proj.weight") else rows[1:4]


_INNER, _STATE = "inner.{b}", "state.{b}"
# Within heads and groups of states; heads start at different rates, as the states of Mamba do.
_MAMBA_2 = (
    *_MAMBA_ENDS,
    Rule(
        _MAMBA_MIXER + r"in_proj\.weight",
        parts=(
            ("z", (_INNER, "~channels")),
            ("x", (_INNER, "~channels")),
            ("B", (_STATE, "~channels")),
            ("C", (_STATE, "~channels")),
            ("Delta", (None, "~channels")),
        ),
        sizes=_mamba2_rows,
    ),
    Rule(
        _MAMBA_MIXER + r"conv1d\.weight",
        parts=(("x", (_INNER, None, None)), ("B", (_STATE, None, None)), ("C", (_STATE, None, None))),
        sizes=_mamba2_rows,
    ),
    Rule(
        _MAMBA_MIXER + r"conv1d\.bias", parts=(("x", (_INNER,)), ("B", (_STATE,)), ("C", (_STATE,))), sizes=_mamba2_rows
    ),
    Rule(_MAMBA_MIXER + r"(A_log|D|dt_bias)", (None,)),
    Rule(_MAMBA_MIXER + r"norm\.weight", (_INNER,)),
    Rule(_MAMBA_MIXER + r"out_proj\.weight", ("~channels", _INNER)),
    *_HYBRID,
)
_MLP = (
    Rule(r"(.*\.)?fc1\.weight", ("hidden", None)),
    Rule(r"(.*\.)?fc1\.bias", ("hidden",)),
    Rule(r"(.*\.)?fc2\.weight", (None, "hidden")),
    Rule(r"(.*\.)?fc2\.bias", (None,)),
)
ARCHITECTURES: Mapping[str, Sequence[Rule]] = {
    "ConvNeXt": _CONVNEXT,
    "ConvMixer": _CONVMIXER,
    "ViT": _VIT,
    "transformers' ViT": _HF_VIT,
    "RMSNorm with gated MLPs": _RMS_GATED,
    "Mamba": _MAMBA,
    "Mamba-2": _MAMBA_2,
    "MLP": _MLP,
}
