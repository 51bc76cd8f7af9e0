"""Baselines: the constructor's weights, independent entries, and residual branches that start at zero or small."""

import functools
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice, flag, number, positive
from weightscope.anatomy import NamedTensors, attention, mlps, named_tensors, no_self_attention, parts_of
from weightscope.anatomy.attention_part import PartName
from weightscope.anatomy.matrices import Matrix, fans
from weightscope.anatomy.tensors import check_separate
from weightscope.errors import AnatomyError, UsageError
from weightscope.init.base import INITIALISERS, Generator, M, each_matrix, frame, normal, put, selected, uniform


@INITIALISERS.register("default", source="the module's constructor", needs="nothing")
def default_(module: M, *, generator: Generator = None) -> M:
    """Leave the module as its constructor made it; the baseline of every comparison.

    Example:
        >>> default_(vit)
    """
    return module


@INITIALISERS.register("kaiming_uniform", source="He et al. 2015", needs="linear or convolutional layers")
def kaiming_uniform_(
    module: M, *, slope: float = math.sqrt(5), bias: str = "uniform", select: str = "*", generator: Generator = None
) -> M:
    """He initialisation, uniform: `W ~ U(-b, b)` with `b = sqrt(6 / ((1 + slope^2) fan_in))`.

    The default slope gives `b = 1 / sqrt(fan_in)`, torch's default for linear and convolutional layers, which the
    papers call Kaiming-uniform; `slope=0` is for ReLU.

    Args:
        slope: of the leaky ReLU, >= 0.

    Source: He et al. 2015, section 2.2; MLP paper, section 3.

    Example:
        >>> kaiming_uniform_(vit, select="*mlp*", generator=torch.Generator().manual_seed(0))
    """
    gain = math.sqrt(6 / (1 + number("slope", slope, least=0) ** 2))

    def fill(block: Tensor) -> Tensor:
        return uniform(*block.shape, bound=gain / math.sqrt(fans(block)[0]), generator=generator)

    return each_matrix(module, select, fill, bias, generator)


@INITIALISERS.register("xavier", source="Glorot and Bengio 2010", needs="linear or convolutional layers")
def xavier_(
    module: M,
    *,
    gain: float = 1.0,
    distribution: str = "uniform",
    bias: str = "zero",
    select: str = "*",
    generator: Generator = None,
) -> M:
    """Glorot initialisation: variance `gain^2 * 2 / (fan_in + fan_out)`.

    A fused projection of queries, keys and values is treated as three matrices.

    Args:
        gain: factor on the standard deviation, > 0.
        distribution: "uniform" or "normal".

    Source: Glorot and Bengio 2010, Eq. 12 and 16.

    Example:
        >>> xavier_(vit, distribution="normal", generator=torch.Generator().manual_seed(0))
    """
    positive("gain", gain)
    choice("distribution", distribution, ("uniform", "normal"))

    def fill(block: Tensor) -> Tensor:
        std = gain * math.sqrt(2 / sum(fans(block)))
        if distribution == "normal":
            return normal(*block.shape, generator=generator).mul_(std)
        return uniform(*block.shape, bound=math.sqrt(3) * std, generator=generator)

    return each_matrix(module, select, fill, bias, generator)


@INITIALISERS.register("trunc_normal", source="default of timm's vision models", needs="linear or convolutional layers")
def trunc_normal_(
    module: M,
    *,
    std: float = 0.02,
    cut: float = 2.0,
    bias: str = "zero",
    select: str = "*",
    generator: Generator = None,
) -> M:
    """Truncated normal entries: `W = std * z`, z standard normal given `|z| <= cut / std`.

    As in timm, the cut is absolute, so that std 0.02 and cut 2 truncate practically nothing. Timm initialises ConvNeXts
    so. Its vision transformers keep torch's default in the patch embedding (`select="blocks.*,head.*"`), and have a
    class token of standard deviation 1e-6, where `networks.ViT` has 0.02.

    Args:
        std: standard deviation before truncation, > 0.
        cut: largest absolute value, at least std.

    Source: the default of timm's vision models (selection paper, section 4.1; impulse paper, section 5.1).

    Example:
        >>> trunc_normal_(vit, generator=torch.Generator().manual_seed(0))
    """
    positive("std", std)
    number("cut", cut, least=std)
    draw = functools.partial(truncated, std=std, cut=cut, generator=generator)
    return each_matrix(module, select, lambda block: draw(*block.shape), bias, generator)


def truncated(*shape: int, std: float, cut: float, generator: Generator) -> Tensor:
    """Normal numbers of standard deviation `std` given that they are in [-cut, cut], by the inverse error function."""
    edge = math.erf(cut / std / math.sqrt(2))
    # 1 - 2^-24 is the largest float32 below 1; the inverse is infinite at 1 itself.
    draws = uniform(*shape, bound=min(edge, 1 - 2**-24), generator=generator)
    return draws.erfinv_().mul_(std * math.sqrt(2)).clamp_(-cut, cut)


QKVO: tuple[PartName, ...] = ("q", "k", "v", "o")
ZERO = ("q", "o", "fc2")  # what ZerO sets to zero


def zero_matrix(rows: int, columns: int) -> Tensor:
    """The P x Q matrix of ZerO (Zhao et al. 2022, Algorithm 1): rows of I for P <= Q, else c I* H_m I*, float32.

    m = ceil(log2 P), c = 2^(-(m-1)/2), H_m the Hadamard matrix of size 2^m
    """
    if rows <= columns:
        return torch.eye(rows, columns)
    m = math.ceil(math.log2(rows))
    signs = torch.ones(1, 1)
    for _ in range(m):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs[:rows, :columns] * 2 ** (-(m - 1) / 2)


@INITIALISERS.register("zero_init", source="Zhao et al. 2022", needs="self-attention or MLPs")
def zero_init_(module: M, *, parts: str = "attention", strict: bool = True, generator: Generator = None) -> M:
    """ZerO: the first matrices of every residual branch are identities, the last ones zero; nothing is random.

    Keys, values and first layers of MLPs become `zero_matrix`, queries, output projections and second layers zero,
    their biases zero. So every branch is zero at first, and attention is uniform (W_Q W_K^T = 0).

    Args:
        parts: "attention" (as compared with in the attention paper), "mlp" or "both".

    Source: Zhao et al. 2022, Algorithm 1; attention paper, section 2 (queries and keys) and Table 5.

    Example:
        >>> zero_init_(vit)
    """
    choice("parts", parts, ("attention", "mlp", "both"))
    found = branches(module, parts, strict=strict, caller="zero_init_")
    check_separate(found)
    for part, name in found:
        value = part.read(name)
        if name in ZERO:
            first = torch.zeros_like(value)
        else:
            first = zero_matrix(*as_matrix(name, value).shape)
            first = first if value.ndim == 2 else first.reshape(*value.mT.shape).mT
        part.write(name, first)
        if (bias := part.read_bias(name)) is not None:
            part.write_bias(name, torch.zeros_like(bias))
    return module


@INITIALISERS.register("t_fixup", source="Huang et al. 2020", needs="self-attention and MLPs")
def t_fixup_(
    module: M, *, kind: str = "encoder", embeddings: bool = False, strict: bool = True, generator: Generator = None
) -> M:
    """T-Fixup: Xavier-uniform matrices, those in the residual branches scaled down with the number of layers N.

        encoder   V, O, W1, W2 times 0.67 N^(-1/4)
        decoder   V, O, W1, W2 times (9 N)^(-1/4)
        embeddings   N(0, 1/d), times (9 N)^(-1/4)

    Queries and keys are not scaled. Normalisation layers, which the paper removes, stay. For an encoder-decoder, call
    it on each of the two.

    Args:
        kind: "encoder" or "decoder".
        embeddings: also initialise token embeddings.

    Source: Huang et al. 2020, section 3.2; attention paper, Table 5 (applied to attention and MLPs).

    Example:
        >>> t_fixup_(vit, generator=torch.Generator().manual_seed(0))
    """
    choice("kind", kind, ("encoder", "decoder"))
    flag("embeddings", embeddings)
    found = branches(module, "both", strict=strict, caller="t_fixup_")
    check_separate(found)
    scale = fixup_scale(found, kind)
    for part, name in found:
        before = part.read(name)
        bound = math.sqrt(6 / sum(as_matrix(name, before).shape))
        draws = uniform(*before.shape, bound=bound, generator=generator)
        part.write(name, draws if name in ("q", "k") else draws * scale)
    if embeddings:
        inner = getattr(named_tensors(module), "module", nn.Module())
        tables = [layer for layer in inner.modules() if isinstance(layer, nn.Embedding)]
        if not tables:
            raise UsageError("embeddings: expected token embeddings (nn.Embedding), found none")
        for table in tables:
            draws = normal(*table.weight.shape, generator=generator)
            put(table.weight, draws * (fixup_scale(found, "decoder") / math.sqrt(table.embedding_dim)))
    return module


def fixup_scale(found: list[tuple[Any, str]], kind: str) -> float:
    """The factor of T-Fixup on the matrices in the residual branches."""
    layers = len({part.layer for part, name in found if name == "q" and part.kind == "self"})
    if not layers:
        raise UsageError(no_self_attention([part for part, name in found if name == "q"]))
    return (9 * layers) ** -0.25 if kind == "decoder" else 0.67 * layers**-0.25


def branches(
    source: nn.Module | NamedTensors, parts: str, *, strict: bool | None, caller: str
) -> list[tuple[Any, str]]:
    """Each projection of attention and each matrix of MLPs, as a part and a name."""
    tensors = named_tensors(source)
    every = attention(tensors, strict=strict, caller=caller) if parts != "mlp" else []
    hidden = mlps(tensors, strict=strict, caller=caller) if parts != "attention" else []
    found: list[tuple[Any, str]] = [(part, name) for part in every for name in QKVO]
    return found + [(part, name) for part in hidden for name in ("fc1", "fc2", *["gate"] * (part.kind == "gated"))]


def as_matrix(name: str, weights: Tensor) -> Tensor:
    """The weights of a part as one matrix (out, in), (in, out) for the output projections of all heads."""
    return weights if weights.ndim == 2 else (weights if name == "o" else weights.mT).flatten(0, 1)


@INITIALISERS.register("delta_orthogonal", source="Xiao et al. 2018", needs="convolutions")
def delta_orthogonal_(module: M, *, gain: float = 1.0, select: str = "*", generator: Generator = None) -> M:
    """Set every convolution to a random orthogonal matrix at its centre tap and zero elsewhere: an isometry of images.

    With fewer outputs than inputs the rows are orthonormal instead of the columns. Each group of a grouped convolution
    gets a matrix, which is a sign for depthwise filters. The centre of a filter of even size is tap k/2. Biases
    become zero.

    Args:
        gain: factor on the orthogonal matrices, > 0.

    Source: Xiao et al. 2018, Algorithm 1 and section 3.

    Example:
        >>> delta_orthogonal_(convmixer, generator=torch.Generator().manual_seed(0))
    """
    positive("gain", gain)
    for matrix, layer in convolutions(module, select):
        kernel = torch.zeros(matrix.weight.shape)
        groups, inputs = layer.groups, kernel.shape[1]
        outputs = kernel.shape[0] // groups
        blocks = frame(groups, max(outputs, inputs), min(outputs, inputs), generator=generator)
        centre = (blocks if outputs >= inputs else blocks.mT).reshape(groups * outputs, inputs)
        centre_tap(kernel).copy_(gain * centre)
        put(matrix.weight, kernel)
        if matrix.bias is not None:
            put(matrix.bias, torch.zeros(matrix.bias.shape))
    return module


def convolutions(module: nn.Module, select: str) -> list[tuple[Matrix, Any]]:
    """The weights of convolutions whose names match the patterns, with their layers."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = [(matrix, matrix.layer) for matrix in selected(module, select) if isinstance(matrix.layer, kinds)]
    if not found:
        raise AnatomyError(f"expected convolutions, found none in {type(module).__name__}")
    return found


def centre_tap(kernel: Tensor) -> Tensor:
    """The view (out, in) of the centre tap of a convolution's weight (out, in, ...); tap n // 2 along each axis."""
    for size in kernel.shape[2:]:
        kernel = kernel.select(2, size // 2)
    return kernel


# timm and ours, DINOv2 and DeiT-III, transformers' ConvNeXt, torchvision's ConvNeXt, CaiT and BEiT
FACTOR = re.compile(r"(^|\.)(ls\d?\.gamma|gamma(_\d)?|lambda(_)?\d|layer_scale(_parameter|_\d)?|layer_scale\w*\.\w+)$")


@INITIALISERS.register("layer_scale_identity", source="Touvron et al. 2021", needs="residual branches")
def layer_scale_identity_(module: M, *, value: float = 0.1, generator: Generator = None) -> M:
    """Scale the output of every residual branch by a small number, `x + value f(x)`: blocks start near the identity.

    In a network with LayerScale, its factors are set. In one without, the last matrix and bias of each branch are
    multiplied by `value`, which gives the same function.

    Args:
        value: > 0; published are 0.1 for up to 18 layers, 1e-5 for up to 24, 1e-6 beyond.

    Source: Touvron et al. 2021 (CaiT), section 2; attention paper, Eq. 9 and Table 5.

    Example:
        >>> layer_scale_identity_(vit, value=1e-5)
    """
    positive("value", value)
    named = named_tensors(module)
    factors = [named.get(name) for name in named.names if FACTOR.search(name)]
    if factors:
        for factor in factors:
            put(factor, torch.full(factor.shape, float(value)))
        return module
    heads, hidden = parts_of("attention modules", named), parts_of("MLPs", named)
    if not heads and not hidden:
        raise AnatomyError("expected residual branches (attention or MLPs), found none")
    ends: list[tuple[Any, str]] = [*((part, "o") for part in heads), *((mlp, "fc2") for mlp in hidden)]
    check_separate(ends)
    for part, name in ends:
        part.write(name, part.read(name) * value)
        if (bias := part.read_bias(name)) is not None:
            part.write_bias(name, bias * value)
    return module
