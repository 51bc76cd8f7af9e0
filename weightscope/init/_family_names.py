"""One name for each tensor of a family: those of timm, for models with the names of Hugging Face's transformers.

Vision transformers (ViT, DeiT, DINOv2) and ConvNeXts. Other names, ours and timm's among them, stay as they are.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightscope._util.names import unwrapped


class Place(NamedTuple):
    """A tensor, or rows of one that packs queries, keys and values.

    Attributes:
        name: in timm's scheme.
        part: 0, 1 or 2 for queries, keys and values that are tensors of their own; None for a whole tensor.
    """

    name: str
    part: int | None = None


_PREFIX = re.compile(r"^(vit|deit|dinov2|convnext|convnextv2)\.(?=(embeddings|encoder|layers|layernorm)\.)")
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
_PACKED = re.compile(r"\.attention\.(?:attention\.)?(q_proj|query|k_proj|key|v_proj|value)\.")


def places(names: Iterable[str]) -> dict[str, Place]:
    """Name of each tensor of a model -> its place in timm's scheme.

    The norm after the average over tokens (`fc_norm`) counts as the last norm (`norm`) where a model has only one.
    """
    bare = {name: _PREFIX.sub("", unwrapped(name)) for name in names}
    known = set(bare.values())
    rules: tuple[tuple[str, str], ...] = ()
    if any(name.startswith("embeddings.patch_embeddings.projection.") for name in known):
        rules = _VIT
    elif any(name.startswith("embeddings.patch_embeddings.") for name in known):
        rules = _CONVNEXT
    one_norm = not any(name.startswith("norm.") for name in known)
    out = {}
    for name, text in bare.items():
        part = None
        if rules is _VIT and (found := _PACKED.search(text)):
            part = "qkv".index(found[1][0])
            text = _PACKED.sub(".attn.qkv.", text)
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text)
        out[name] = Place(re.sub(r"^fc_norm\.", "norm.", text) if one_norm else text, part)
    return out


class Source:
    """The tensors of a model by their places, packed or cut as they are wanted.

    Args:
        tensors: name -> tensor, read when asked for.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
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
        return torch.as_tensor(self.tensors[name]).detach().cpu()
