"""The LayerScale after an attention module."""

import math

from weightscope.anatomy.attention import AttentionPart
from weightscope.anatomy.tensors import NamedTensors

_NAMES = (
    *("ls1.gamma", "layer_scale1.lambda1", "layer_scale_1.lambda1", "layer_scale1.gamma", "layer_scale_1.gamma"),
    *("ls_1.gamma", "ls1", "self_attn_layer_scale.scale"),
    *("gamma_1", "gamma1", "lambda_1", "layer_scale_1"),
)


def layer_scale(source: NamedTensors, part: AttentionPart) -> str | None:
    """The tensor of the LayerScale that multiplies what an attention module adds to the residual stream; None if none.

    One number for each of the d channels, often negative for half of them: then it, and not W_V W_O alone, decides
    the sign of what a channel passes on to itself.
    """
    block = part.name.rpartition(".")[0]
    for parent in (block, block.rpartition(".")[0]):
        for candidate in _NAMES:
            name = f"{parent}.{candidate}" if parent else candidate
            if (
                name in source
                and source.shape(name)[-1:] == (part.width,)
                and math.prod(source.shape(name)) == part.width
            ):
                return name
    return None
