"""The weights of linear and convolutional layers as matrices."""

import math
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from weightscope.errors import AnatomyError


def transposed(module: nn.Module) -> bool:
    """Whether this is transformers' `Conv1D`, a linear layer whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


_PACKED = ("qkv", "Wqkv", "to_qkv", "c_attn")
_WEIGHTED = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear or convolutional layer."""

    name: str  # of the parameter, from the root of the module
    weight: Tensor
    bias: Tensor | None
    layer: nn.Module  # of both
    is_transposed: bool  # stored (in, out)
    fused: int  # how many matrices of equal height the (out, in) matrix packs

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Views of a tensor of the weight's shape as the matrices (out, in, ...) that it packs."""
        tensor = tensor.detach()
        return list((tensor.T if self.is_transposed else tensor).chunk(self.fused))


def matrices(module: nn.Module) -> list[Matrix]:
    """The weights of linear and convolutional layers, tied ones once, without those tied to an embedding.

    A fused projection of queries, keys and values counts as three matrices, since fusing must not change what an
    initialiser draws that depends on the output width.
    """
    seen = {id(inner.weight) for inner in module.modules() if isinstance(inner, nn.Embedding)}
    out = []
    for path, inner in module.named_modules():
        for key, bias in _weights(inner):
            weight = getattr(inner, key, None)
            if weight is None or id(weight) in seen:
                continue
            seen.add(id(weight))
            rows, columns = weight.shape[:2][:: -1 if transposed(inner) else 1]
            packed = key == "in_proj_weight" or path.rpartition(".")[2] in _PACKED
            fused = 3 if packed and rows == 3 * columns else 1
            name = f"{path}.{key}".lstrip(".")
            out.append(Matrix(name, weight, bias, inner, transposed(inner), fused))
    if not out:
        raise AnatomyError(f"expected linear or convolutional layers, found none in {type(module).__name__}")
    return out


def _weights(inner: nn.Module) -> list[tuple[str, Tensor | None]]:
    if isinstance(inner, nn.MultiheadAttention):
        bias: Tensor | None = inner.in_proj_bias
        keys = ["in_proj_weight"] if inner._qkv_same_embed_dim else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        return [(key, bias if i == 0 else None) for i, key in enumerate(keys)]
    if isinstance(inner, _WEIGHTED) or transposed(inner):
        return [("weight", cast("Tensor | None", inner.bias))]
    return []


def fans(matrix: Tensor) -> tuple[int, int]:
    """(fan in, fan out) of a weight (out, in, ...), as in torch: the inputs of one output, the outputs of one input."""
    receptive = math.prod(matrix.shape[2:])
    return matrix.shape[1] * receptive, matrix.shape[0] * receptive


def default_std(matrix: Tensor) -> float:
    """1 / sqrt(3 fan_in): the standard deviation of torch's default entries, U(-1, 1) / sqrt(fan_in)."""
    if not fans(matrix)[0]:
        raise AnatomyError(f"expected a weight with inputs, found the shape {tuple(matrix.shape)}")
    return 1 / math.sqrt(3 * fans(matrix)[0])
