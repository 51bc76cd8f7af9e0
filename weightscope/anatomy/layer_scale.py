"""The LayerScale after an attention module."""

import math

from weightscope.anatomy.attention_part import AttentionPart
from weightscope.anatomy.tensors import NamedTensors

_NAMES = (
    *("ls1.gamma", "layer_scale1.lambda1", "layer_scale_1.lambda1", "layer_scale1.gamma", "layer_scale_1.gamma"),
    *("ls_1.gamma", "ls1", "self_attn_layer_scale.scale"),
    *("gamma_1", "gamma1", "lambda_1", "layer_scale_1"),
)


def layer_scale(tensors: NamedTensors, part: AttentionPart) -> str | None:
    """The name of the tensor that scales the output of an attention module (LayerScale); None if the model has none.

    It has one number for each of the d channels. Half of them are often negative, so that the sign of the diagonal of
    W_V W_O alone is not that of the module.
    """
    block = part.name.rpartition(".")[0]
    for parent in (block, block.rpartition(".")[0]):
        for candidate in _NAMES:
            name = f"{parent}.{candidate}" if parent else candidate
            if (
                name in tensors
                and tensors.shape(name)[-1:] == (part.width,)
                and math.prod(tensors.shape(name)) == part.width
            ):
                return name
    return None
