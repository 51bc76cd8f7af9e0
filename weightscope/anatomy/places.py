"""Places of tensors in one scheme of names, timm's, for the models of timm and transformers and for ours.

Canonical weights of a model are its matrices at their places, with what scales them multiplied in: gains of norms,
LayerScales, gains of the norms of queries and keys.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from weightscope._util.names import unwrapped
from weightscope.anatomy.architectures import offset_of, stated
from weightscope.anatomy.effective import plain
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, named_tensors
from weightscope.errors import DataError, UsageError


class Place(NamedTuple):
    """A tensor, or rows of one that packs queries, keys and values."""

    name: str  # in timm's scheme
    part: int | None = None  # 0, 1 or 2 of separate queries, keys and values; None for a whole tensor


_PREFIX = re.compile(r"^(vit|deit|dinov2|convnext|convnextv2)\.(?=(embeddings|encoder|layers|layernorm)\.)")
_BEFORE = re.compile(r"(?:\w+\.)*?(?=(?:blocks|stages)\.\d)")
_VIT = (
    (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)
_CONVNEXT = (
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.stages\.(\d+)\.downsampling_layer\.", r"stages.\1.downsample."),
    (r"^encoder\.stages\.(\d+)\.layers\.", r"stages.\1.blocks."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.layernorm\.", ".norm."),
    (r"\.pwconv(\d)\.", r".mlp.fc\1."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"^layernorm\.", "head.norm."),
    (r"^classifier\.", "head.fc."),
)
_CLIP = (
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+\.)self_attn\.out_proj\.", r"\1attn.proj."),
    (r"^(blocks\.\d+\.)layer_norm(\d)\.", r"\1norm\2."),
)
_PACKED = re.compile(r"\.(?:attention|self_attn)\.(?:attention\.)?(q_proj|query|k_proj|key|v_proj|value)\.")


_QKV = ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.q", "attn.k", "attn.v")
_SEPARATE, _GATED = tuple(f"self_attn.{x}_proj" for x in "qkv"), ("mlp.gate_proj", "mlp.up_proj")
# Gain, the maps that it scales, on which axis (1 before, 0 after them), and which third of a packed one.
_GAINS: tuple[tuple[str, tuple[str, ...], int, int | None], ...] = (
    (r"(blocks\.\d+\.)norm1\.weight", _QKV, 1, None),
    (r"(blocks\.\d+\.)norm2\.weight", ("mlp.fc1",), 1, None),
    (r"(blocks\.\d+\.)(?:ls1\.gamma|gamma_1)", ("attn.proj",), 0, None),
    (r"(blocks\.\d+\.)(?:ls2\.gamma|gamma_2)", ("mlp.fc2",), 0, None),
    (r"(blocks\.\d+\.)attn\.q_norm\.weight", ("attn.qkv",), 0, 0),
    (r"(blocks\.\d+\.)attn\.k_norm\.weight", ("attn.qkv",), 0, 1),
    (r"(stages\.\d+\.blocks\.\d+\.)norm\.weight", ("mlp.fc1",), 1, None),
    (r"(stages\.\d+\.blocks\.\d+\.)gamma", ("mlp.fc2",), 0, None),
    (r"(.*layers\.\d+\.)input_layernorm\.weight", _SEPARATE, 1, None),
    (r"(.*layers\.\d+\.)(?:post_attention|pre_feedforward)_layernorm\.weight", _GATED, 1, None),
    (r"(.*layers\.\d+\.)self_attn\.q_norm\.weight", ("self_attn.q_proj",), 0, None),
    (r"(.*layers\.\d+\.)self_attn\.k_norm\.weight", ("self_attn.k_proj",), 0, None),
)
_OF_HEADS = re.compile(r"[qk]_norm\.weight$")  # one gain for all heads


def unit_offset(tensors: NamedTensors, name: str) -> int:
    """1 if the norm of this weight multiplies by 1 + weight, as Gemma's do, and 0 if by the weight.

    A module is run, a config has `norm_offset` or the model's type. A DataError if a type that runs code of its own is
    unknown, or that of a decoder, whose names both kinds of norms share.
    """
    norm, _, key = name.rpartition(".")
    if isinstance(tensors, ModuleTensors):
        return _measured_offset(tensors.module.get_submodule(norm), key, norm)
    if (given := tensors.hint(norm, ("norm_offset",), (bool, int, float, str, list, dict))) in (0, 1):
        return int(given)
    kind = stated(tensors, norm)[0]
    offset = offset_of(kind, norm.rpartition(".")[2])
    unknown = "auto_map" in tensors.config or re.search(r"layers\.\d+\.(\w+_layernorm|self_attn\.[qk]_norm)$", norm)
    if given is not None or (unknown and offset is None):
        found = f"the unknown model type {kind!r}" if kind else "none"
        found = found if given is None else f"norm_offset {given!r}"
        raise DataError(
            f"`{name}`: expected a config that tells whether this norm multiplies by its weight or by 1 + weight, "
            f"found {found}; give the module, or 'norm_offset': 0 or 1 in config.json or config="
        )
    return offset or 0


def _measured_offset(norm: nn.Module, key: str, path: str) -> int:
    """C of a norm that multiplies by c + weight, from what it gives with weights of 0 and of 1, without a shift."""
    copied = copy.deepcopy(norm).eval()
    zeros = {name: torch.zeros_like(value) for name, value in copied.named_parameters()}
    x = torch.randn(1, len(zeros[key]), generator=torch.Generator().manual_seed(0)).to(zeros[key])
    failed: Exception | None = None
    for given in (x, x[..., None, None]):  # of tokens, of images
        try:
            with torch.no_grad():
                zero, one = (functional_call(copied, zeros | {key: zeros[key] + c}, given).flatten() for c in (0, 1))
        except Exception as error:  # noqa: BLE001 - a layer that takes something else
            failed = error
            continue
        ratio = (zero.double() / (one - zero).double()).median()
        if found := [c for c in (0, 1) if abs(ratio - c) < 0.05]:
            return found[0]
    raise DataError(
        f"`{path}`: expected a norm that multiplies by its weight or by 1 + weight, found another layer"
    ) from failed


def places(names: Iterable[str]) -> dict[str, Place]:
    """Name of each tensor of a model -> its place in timm's scheme.

    The norm after the average over tokens (`fc_norm`) counts as the last norm (`norm`) where a model has only one.
    """
    plain_names = {name: unwrapped(name) for name in names}
    other = any("embeddings.patch_embeddings." in text for text in plain_names.values())  # transformers' names
    before = {found[0] for text in plain_names.values() if not other and (found := _BEFORE.match(text))}
    inside = before.pop() if len(before) == 1 else ""  # one network within another module
    bare = {name: _PREFIX.sub("", text.removeprefix(inside)) for name, text in plain_names.items()}
    known = set(bare.values())
    rules: tuple[tuple[str, str], ...] = ()
    if any(name.startswith("embeddings.patch_embeddings.projection.") for name in known):
        rules = _VIT
    elif any(name.startswith("embeddings.patch_embeddings.") for name in known):
        rules = _CONVNEXT
    elif known & {"embeddings.class_embedding", "vision_model.embeddings.class_embedding"}:
        rules = _CLIP
    one_norm = not any(name.startswith("norm.") for name in known)
    out = {}
    for name, text in bare.items():
        part = None
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text)
        if rules in (_VIT, _CLIP) and (found := _PACKED.search(text)):
            part = "qkv".index(found[1][0])
            text = _PACKED.sub(".attn.qkv.", text)
        out[name] = Place(re.sub(r"^fc_norm\.", "norm.", text) if one_norm else text, part)
    return out


def tensors_of(model: Any) -> Mapping[str, Any]:
    """Named tensors of a module, a state dict or a checkpoint."""
    if isinstance(model, nn.Module):
        return plain(model)[0].state_dict()
    if isinstance(model, Mapping):
        return model
    raise UsageError(f"expected a module, a mapping of tensors, or a path, found {type(model).__name__}")


class Source:
    """The tensors of a model by their places, packed or cut as they are wanted."""

    def __init__(self, tensors: Mapping[str, Any], model: Any = None) -> None:
        self.tensors, self._model = tensors, tensors if model is None else model
        self.places = places(tensors)
        self.names: dict[str, dict[int | None, str]] = {}
        for name, place in self.places.items():
            self.names.setdefault(place.name, {})[place.part] = name

    def has(self, place: Place) -> bool:
        """Whether the tensor is there, by itself, packed with others, or in three parts."""
        there = self.names.get(place.name, {})
        return place.part in there or None in there or (place.part is None and len(there) == 3)

    def read(self, place: Place, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the CPU; as the kernel of a 1 x 1 convolution or a matrix, whichever has `shape`'s axes."""
        there = self.names[place.name]
        if place.part in there or None in there:
            value = self._tensor(there.get(place.part, there.get(None, "")))
            if place.part not in there:
                value = value.chunk(3)[place.part or 0]
        else:
            value = torch.cat([self._tensor(there[part]) for part in range(3)])
        if value.ndim == 2 and len(shape) == 4 and shape[2:] == (1, 1):
            return value[:, :, None, None]
        return value.flatten(1) if value.ndim == 4 and len(shape) == 2 and value.shape[2:] == (1, 1) else value

    def _tensor(self, name: str) -> Tensor:
        value = torch.as_tensor(self.tensors[name]).detach()
        if value.is_meta:
            raise DataError(f"`{name}` is on the meta device and holds no numbers; materialise the model first")
        return value.cpu()

    def complete(self, name: str) -> bool:
        """Whether the floating-point tensor of a place, or all parts of it, are there."""
        first = self.tensors[next(iter(self.names[name].values()))]
        return self.has(Place(name)) and torch.as_tensor(first).is_floating_point()

    def whole(self, name: str) -> Tensor:
        """The tensor of a place, packed if it is stored in three parts; 1 x 1 convolutions as matrices."""
        value = self.read(Place(name), ())
        return value.flatten(1) if value.ndim == 4 and value.shape[2:] == (1, 1) else value

    def split(self, name: str, value: Any) -> dict[str, Any]:
        """The inverse of `whole`: the model's own names -> arrays of their own shapes."""
        parts = self.names[name].items()
        cut = {own: value if part is None else np.split(value, 3)[part] for part, own in parts}
        return {own: part.reshape(tuple(self.tensors[own].shape)) for own, part in cut.items()}

    def gains(self) -> dict[str, tuple[tuple[str, int, int | None], ...]]:
        """Place of each gain that acts right before or after linear maps -> (the map's place, its axis, its part)."""
        out = {}
        for name in self.names:
            for pattern, layers, axis, part in _GAINS:
                # where there is a norm after the MLP, that of `post_attention` is after the attention
                after = "post_attention" in name and name.replace("attention", "feedforward") in self.names
                if (found := re.fullmatch(pattern, name)) and not after:
                    maps = (f"{found[1]}{layer}.weight" for layer in layers)
                    out[name] = tuple((one, axis, part) for one in maps if one in self.names)
        return out

    def offset(self, gain: str) -> int:
        """What is added to the stored numbers of a gain, at its place: see `unit_offset`."""
        return unit_offset(named_tensors(self._model), next(iter(self.names[gain].values()))) if "norm" in gain else 0

    def folded(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The tensors of some places in float64 with the gains before and after them multiplied in.

            W <- diag(after) W diag(before)

        `before` is the gain of a norm, `after` that of a LayerScale, or that of the norm of queries or keys, repeated
        for each head. The model's function stays if these gains become one; shifts of norms are left to the biases.
        """
        out = {name: self.whole(name).double().numpy().copy() for name in names}
        for gain, maps in self.gains().items():
            for name, axis, part in maps:
                if name in out:
                    value = out[name] if part is None else np.split(out[name], 3)[part]  # views
                    factor = self.whole(gain).double().numpy().reshape(-1) + self.offset(gain)
                    units = value.shape[axis]
                    if len(factor) != units and (not _OF_HEADS.search(gain) or not len(factor) or units % len(factor)):
                        found = f"axis {axis} of `{name}`, found {len(factor)}"
                        raise DataError(f"`{gain}`: expected {units} entries, as {found}")
                    factor = np.tile(factor, units // len(factor))
                    value *= factor.reshape([-1 if i == axis else 1 for i in range(value.ndim)])
        return out
