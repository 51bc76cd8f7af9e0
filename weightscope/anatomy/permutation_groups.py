"""Permutation specifications: by the names of tensors, or derived from the forward pass; and the check by function."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from weightscope._util.names import listing, unwrapped
from weightscope.anatomy.operations import Recorder, call, tensors_in
from weightscope.anatomy.permutation_graph import derive_permutations
from weightscope.errors import AnatomyError, SpecError, UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutations import PermutationSpec, View

Axes = tuple[str | None, ...]
_C = "channels"


@dataclass(frozen=True)
class Rule:
    """Names that match `pattern` have these axes; a fused projection has one row of axes for each of its parts."""

    pattern: str  # a regular expression of the whole name; its named groups may be used in the axes
    axes: Axes = ()  # one label per axis; trailing axes of length one (1x1 convolutions) need none
    parts: tuple[tuple[str, Axes], ...] = ()  # of the first axis: (label in brackets, axes)
    # the tensor and its network's spec -> the length of each part, None if they do not fit; by default equal shares
    sizes: Callable[[TensorSpec, WeightSpec], tuple[int, ...] | None] | None = None

    def rows(self, tensor: TensorSpec, spec: WeightSpec) -> tuple[int, ...] | None:
        """The length of each part of a tensor; None if they do not fit."""
        if self.sizes is None:
            share, rest = divmod(tensor.shape[0], len(self.parts))
            return None if rest else (share,) * len(self.parts)
        found = self.sizes(tensor, spec)
        return found if found and min(found) > 0 and sum(found) == tensor.shape[0] else None


# A bias has the first axis of its weight.
_WB = r"\.(weight|bias)"
_VIT_BLOCK = r"blocks\.(?P<b>\d+)\."
_VIT = (
    Rule(r"(cls_token|pos_embed|reg_token|dist_token)", (None, None, _C)),
    Rule(r"patch_embed\.proj" + _WB, (_C, None, None, None)),
    Rule(r"(fc_norm|norm|norm_pre)" + _WB, (_C,)),
    Rule(_VIT_BLOCK + r"(norm[12]\.(weight|bias)|ls[12]\.gamma|gamma_[12]|skip_scale)", (_C,)),
    Rule(
        _VIT_BLOCK + r"attn\.qkv" + _WB,
        parts=(("q", ("~qk.{b}", _C)), ("k", ("~qk.{b}", _C)), ("v", ("~vo.{b}", _C))),
    ),
    Rule(_VIT_BLOCK + r"attn\.[qk](_proj)?" + _WB, ("~qk.{b}", _C)),
    Rule(_VIT_BLOCK + r"attn\.v(_proj)?" + _WB, ("~vo.{b}", _C)),
    Rule(_VIT_BLOCK + r"attn\.proj" + _WB, (_C, "~vo.{b}")),
    Rule(_VIT_BLOCK + r"attn\.gating_param", ("head.{b}",)),
    Rule(_VIT_BLOCK + r"attn\.position_vectors", ("head.{b}", None)),
    Rule(_VIT_BLOCK + r"attn\.filters", ("head.{b}", None, None)),
    Rule(_VIT_BLOCK + r"(attn\.filter_scale|mlp\.fc1\.sum_weight)", (None,)),
    Rule(_VIT_BLOCK + r"mlp\.fc1" + _WB, ("hidden.{b}", _C)),
    Rule(_VIT_BLOCK + r"mlp\.fc2" + _WB, (_C, "hidden.{b}")),
    Rule(r"(head|head_dist)" + _WB, (None, _C)),
)
_HF = r"(vit\.|dinov2\.|deit\.)?"
_HF_LAYER = _HF + r"(encoder\.layer|layers)\.(?P<b>\d+)\."
_HF_VIT = (
    Rule(_HF + r"embeddings\.(cls_token|position_embeddings|distillation_token|register_tokens)", (None, None, _C)),
    Rule(_HF + r"embeddings\.mask_token", (None, _C)),
    Rule(_HF + r"embeddings\.patch_embeddings\.projection" + _WB, (_C, None, None, None)),
    Rule(_HF + r"layernorm" + _WB, (_C,)),
    Rule(_HF_LAYER + r"((norm[12]|layernorm_before|layernorm_after)\.(weight|bias)|layer_scale[12]\.lambda1)", (_C,)),
    Rule(_HF_LAYER + r"attention\.(attention\.(query|key)|[qk]_proj)" + _WB, ("~qk.{b}", _C)),
    Rule(_HF_LAYER + r"attention\.(attention\.value|v_proj)" + _WB, ("~vo.{b}", _C)),
    Rule(_HF_LAYER + r"attention\.(output\.dense|o_proj)" + _WB, (_C, "~vo.{b}")),
    Rule(_HF_LAYER + r"(mlp\.fc1|intermediate\.dense)" + _WB, ("hidden.{b}", _C)),
    Rule(_HF_LAYER + r"(mlp\.fc2|output\.dense)" + _WB, (_C, "hidden.{b}")),
    Rule(_HF + r"(pooler\.dense|classifier)" + _WB, (None, _C)),
)
_STAGE = r"stages\.(?P<s>\d+)\."
_STAGE_BLOCK = _STAGE + r"blocks\.(?P<b>\d+)\."
_CONVNEXT = (
    Rule(r"stem\.0" + _WB, ("channels.0", None, None, None)),
    Rule(r"stem\.1" + _WB, ("channels.0",)),
    Rule(_STAGE + r"downsample\.0" + _WB, ("channels.{before}",)),
    Rule(_STAGE + r"downsample\.1" + _WB, ("channels.{s}", "channels.{before}", None, None)),
    Rule(_STAGE_BLOCK + r"(gamma|norm\.(weight|bias))", ("channels.{s}",)),
    Rule(_STAGE_BLOCK + r"conv_dw" + _WB, ("channels.{s}", None, None, None)),
    Rule(_STAGE_BLOCK + r"mlp\.fc1" + _WB, ("hidden.{s}.{b}", "channels.{s}")),
    Rule(_STAGE_BLOCK + r"mlp\.fc1\.sum_weight", (None,)),
    Rule(_STAGE_BLOCK + r"mlp\.fc2" + _WB, ("channels.{s}", "hidden.{s}.{b}")),
    Rule(r"(norm_pre|head\.norm)" + _WB, ("channels.{last}",)),
    Rule(r"head\.fc" + _WB, (None, "channels.{last}")),
)
_BATCH_NORM = r"(weight|bias|running_mean|running_var)"
_CONVMIXER = (
    Rule(r"stem\.0" + _WB, ("channels.0", None, None, None)),
    Rule(r"stem\.2\." + _BATCH_NORM, ("channels.0",)),
    Rule(r"blocks\.(?P<b>\d+)\.0\.fn\.0" + _WB, ("channels.{b}", None, None, None)),
    Rule(r"blocks\.(?P<b>\d+)\.0\.fn\.2\." + _BATCH_NORM, ("channels.{b}",)),
    Rule(r"blocks\.(?P<b>\d+)\.1" + _WB, ("channels.{next}", "channels.{b}")),
    Rule(r"blocks\.(?P<b>\d+)\.3\." + _BATCH_NORM, ("channels.{next}",)),
    Rule(r"head" + _WB, (None, "channels.{last}")),
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
    Rule(_MAMBA_MIXER + r"D", ("inner.{b}",)),
    Rule(_MAMBA_MIXER + r"conv1d" + _WB, ("inner.{b}", None, None)),
    Rule(_MAMBA_MIXER + r"x_proj\.weight", (None, "inner.{b}")),
    Rule(_MAMBA_MIXER + r"(dt_proj\.(weight|bias)|A_log)", ("inner.{b}", None)),
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
        _MAMBA_MIXER + r"conv1d" + _WB,
        parts=(("x", (_INNER, None, None)), ("B", (_STATE, None, None)), ("C", (_STATE, None, None))),
        sizes=_mamba2_rows,
    ),
    Rule(_MAMBA_MIXER + r"(A_log|D|dt_bias)", (None,)),
    Rule(_MAMBA_MIXER + r"norm\.weight", (_INNER,)),
    Rule(_MAMBA_MIXER + r"out_proj\.weight", ("~channels", _INNER)),
    *_HYBRID,
)
_MLP = (
    Rule(r"(.*\.)?fc1" + _WB, ("hidden", None)),
    Rule(r"(.*\.)?fc2" + _WB, (None, "hidden")),
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


def permutation_spec(network: WeightSpec | nn.Module, example_inputs: Any = None) -> PermutationSpec:
    """The permutation specification of a network: which units may be renumbered without changing what it computes.

    With example inputs, that of any module, from the operations of its forward pass: see
    `weightscope.anatomy.permutation_graph`. Without, that of a network whose tensors have known names: a module, which
    also tells which units are of one head, or a spec, of all tensors or some.

    Renumbering keeps the function. Whether it also keeps the distribution of trained weights depends on their initial
    values: sinusoidal positions tell channels apart, GPSA's position vectors tell heads apart, and its W_V = 1 ties
    coordinates to channels.

    Args:
        network: a module, or the spec of its tensors.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, as for the module. A batch of
            two or more, and lengths that differ from the numbers of units, are best.

    Raises:
        AnatomyError: if names are not recognised; with example inputs, if renumbering changes the outputs. Write
            `PermutationSpec.from_axes` of your own then.
        UsageError: if example inputs are given for a spec.

    Example:
        >>> permutation_spec(population.spec).sizes
        {'channels.0': 16, 'hidden.0.0': 32, ...}
        >>> permutation_spec(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64)).sizes
        {'conv1': 64, 'layer1.0.conv1': 64, ...}
    """
    if example_inputs is not None:
        if not isinstance(network, nn.Module):
            raise UsageError(f"example_inputs: expected a module to run on them, found a {type(network).__name__}")
        return derived(network, example_inputs)
    spec, heads = (WeightSpec.of(network), _heads(network)) if isinstance(network, nn.Module) else (network, {})
    nearest: tuple[str, list[str]] = ("", list(spec.names))
    for name, rules in ARCHITECTURES.items():
        found = [_views(tensor, rules, spec) for tensor in spec.tensors]
        strangers = [t.name for t, views in zip(spec.tensors, found, strict=True) if views is None]
        if not strangers:
            views = tuple(view for part in found if part is not None for view in part)
            return PermutationSpec(views, _heads_of(views) | heads)
        if len(strangers) < len(nearest[1]):
            nearest = name, strangers
    like = f"nearest is {nearest[0]}, without " if nearest[0] else "this network: "
    raise AnatomyError(
        f"no permutation specification for this network, there are those of {', '.join(ARCHITECTURES)}: "
        f"{like}{listing(nearest[1], 4)}; derive it from the module, permutation_spec(module, example_inputs), or give "
        "your own, PermutationSpec.from_axes(spec, {name: (group, ...)})"
    )


def derived(module: nn.Module, inputs: Any) -> PermutationSpec:
    """The specification that the module's forward pass shows, checked by function in float64."""
    found = derive_permutations(module, inputs)
    change, tolerance = change_of_function(module, inputs, found)
    if not change < tolerance:
        raise AnatomyError(
            f"expected renumbering to leave the network's outputs unchanged, found them to change by {change:.1g} of "
            "their size with the permutations that its operations show; give your own, "
            "PermutationSpec.from_axes(spec, {name: (group, ...)})"
        )
    return found


_HEADS = ("num_heads", "heads", "num_attention_heads")


def _heads_of(views: Sequence[View]) -> dict[str, tuple[str | None, int]]:
    """Group -> (name of the block's heads, H) of the blocks that have a tensor with an axis of heads."""
    out: dict[str, tuple[str | None, int]] = {}
    for view in views:
        for axis, n in zip(view.axes, view.shape, strict=True):
            if axis is not None and axis.startswith("head."):
                block = axis.removeprefix("head.")
                out |= {f"{kind}.{block}": (f"heads.{block}", n) for kind in ("qk", "vo", "head")}
    return out


def _heads(module: nn.Module) -> dict[str, tuple[str | None, int]]:
    """Group -> (name of the block's heads, H) for the queries and keys, values and outputs of each block.

    The inner channels of Mamba-2's heads and the states of its groups have no name: their heads and groups stay.
    """
    out: dict[str, tuple[str | None, int]] = {}
    for name, inner in module.named_modules():
        if mixer := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.mixer", unwrapped(name)):
            heads, groups = (getattr(inner, key, None) for key in ("heads", "n_groups"))
            heads = getattr(inner, "num_heads", None) if heads is None else heads
            if isinstance(heads, int) and isinstance(groups, int):
                out |= {f"inner.{mixer[1]}": (None, heads), f"state.{mixer[1]}": (None, groups)}
        match = re.fullmatch(r"blocks\.(\d+)\.attn|.*layers?\.(\d+)\.attention(?:\.attention)?", unwrapped(name))
        heads = next((getattr(inner, key) for key in _HEADS if hasattr(inner, key)), None)
        if match and isinstance(heads, int):
            out |= {f"{kind}.{match[1] or match[2]}": (f"heads.{match[1] or match[2]}", heads) for kind in ("qk", "vo")}
    return out


def _extra(spec: WeightSpec) -> dict[str, int]:
    """The last stage or, in networks without stages, one more than the last block."""
    stages = [int(m[1]) for name in spec.names if (m := re.match(r"stages\.(\d+)\.", unwrapped(name)))]
    blocks = [int(m[1]) for name in spec.names if (m := re.match(r"blocks\.(\d+)\.", unwrapped(name)))]
    return {"last": max(stages) if stages else max(blocks, default=-1) + 1}


def _views(tensor: TensorSpec, rules: Sequence[Rule], spec: WeightSpec) -> tuple[View, ...] | None:
    extra = _extra(spec)
    for rule in rules:
        match = re.fullmatch(rule.pattern, unwrapped(tensor.name))
        if match is None:
            continue
        values = {**extra, **match.groupdict()}
        values |= {"before": int(values.get("s") or 0) - 1, "next": int(values.get("b") or 0) + 1}
        if not rule.parts:
            axes = _filled(rule.axes, values, tensor)
            return None if axes is None else (View(tensor.name, tensor.name, tensor.shape, axes),)
        rows = rule.rows(tensor, spec)
        if rows is None:
            return None
        out, start = [], 0
        for (label, named), count in zip(rule.parts, rows, strict=True):
            axes = _filled(named, values, tensor)
            if axes is None:
                return None
            offset = (start, *(0 for _ in tensor.shape[1:]))
            out.append(View(f"{tensor.name}[{label}]", tensor.name, (count, *tensor.shape[1:]), axes, offset))
            start += count
        return tuple(out)
    return None


def _filled(axes: Axes, values: Mapping[str, object], tensor: TensorSpec) -> Axes | None:
    """The axes with names filled in, and None for trailing axes of length one; None if the number does not fit."""
    axes = axes[:1] if tensor.name.endswith("bias") else axes
    missing = len(tensor.shape) - len(axes)
    if missing < 0 or any(n != 1 for n in tensor.shape[len(axes) :]):
        return None
    return tuple(axis if axis is None else axis.format(**values) for axis in axes) + (None,) * missing


@torch.no_grad()
def apply_permutation(
    module: nn.Module, permutations: PermutationSpec | None = None, *, rng: np.random.Generator
) -> nn.Module:
    """Renumber a network's units at random, in place, such that its function stays the same.

    The joint permutation of hidden units that thesis 4.1 asks for as a control: it changes where weights are, not what
    the network does. By default by the specification of its names; returns the module.
    """
    permutations = permutations or permutation_spec(module)
    state = module.state_dict()
    if absent := [view.tensor for view in permutations.views if view.tensor not in state]:
        raise SpecError(f"the permutation specification names tensors that the network lacks: {listing(absent)}")
    named = {view.tensor: state[view.tensor].detach().cpu().numpy() for view in permutations.views}
    moved = permutations.apply(named, permutations.random(rng))
    for name, array in moved.items():
        state[name].copy_(torch.from_numpy(array))
    return module


@torch.no_grad()
def check_permutations(
    module: nn.Module, inputs: Any, permutations: PermutationSpec | None = None, *, seed: int = 0
) -> float:
    """How much a network's outputs change, at most, when its units are renumbered at random; its weights are put back.

    The largest absolute difference over the largest absolute value: in float64 and evaluation mode about 1e-15 for a
    right specification, of the order of 1 for a wrong one. `inputs` are as for `permutation_spec`.
    """
    before = [output.clone() for output in tensors_in(call(module, inputs))]
    state = module.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    try:
        apply_permutation(module, permutations, rng=np.random.default_rng(seed))
        after = tensors_in(call(module, inputs))
    finally:
        for name, value in kept.items():
            state[name].copy_(value)
    return max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True))


OwnPermutations = PermutationSpec | Mapping[str, Sequence[str | None]]


def permutations_of(source: Any, given: OwnPermutations | None = None) -> PermutationSpec:
    """The permutation specification of the tensors of a source: that of their names, derived, or one's own, checked.

    Where the names are not known it is derived from the network of a population that has its code. One's own may be
    tensor name -> the group of each axis (`PermutationSpec.from_axes`), for all tensors. It is checked by function if
    the source is such a population: its network with random weights in all its tensors must have the same outputs
    after renumbering; a SpecError if not.
    """
    spec: WeightSpec = source.spec
    if given is None:
        try:
            return permutation_spec(spec)
        except AnatomyError as error:
            if not hasattr(source, "template"):
                raise
            template = source.template()
            if template is None or template[1] is None:
                raise AnatomyError(
                    f"{error}; import the networks with --network MODULE:FUNCTION that returns the network and example "
                    "inputs, to derive it"
                ) from None
        return derived(*template)
    found = given if isinstance(given, PermutationSpec) else PermutationSpec.from_axes(spec, given)
    described = {view.tensor for view in found.views}
    if missing := [name for name in spec.names if name not in described]:
        raise SpecError(f"permutations: no axes for {listing(missing)}; give each axis a group or None")
    template = source.template() if hasattr(source, "template") else None
    if template is not None and template[1] is not None:
        module, inputs = template
        change, tolerance = change_of_function(module, inputs, found)
        if not change < tolerance:
            raise SpecError(
                "permutations: expected renumbering to leave the network's outputs unchanged, found them to change by "
                f"{change:.1g} of their size; axes of units that belong together need one group, and units of "
                "attention heads `PermutationSpec.from_axes(spec, axes, heads)`"
            )
    return found


@torch.no_grad()
def change_of_function(module: nn.Module, inputs: Any, permutations: PermutationSpec) -> tuple[float, float]:
    """`check_permutations` of a copy in float64 whose tensors all differ between units, and the tolerance for it.

    Networks that compute parts in float32, as transformers' softmax and RMSNorm, are compared to its precision.
    """
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(module).double().eval()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_floating_point():
            noise = 0.2 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(value * noise.exp() if name.endswith("running_var") else value + noise)
    double = tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    with Recorder() as recorder:
        call(module, double)
    tolerance = 1e-9 if recorder.dtypes <= {torch.float64} else 1e-4
    return check_permutations(module, double, permutations), tolerance
