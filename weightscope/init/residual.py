"""Baselines for residual networks: branches that start small, at the identity, or as isometries."""

import math
import re

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice, flag, number, positive
from weightscope._util.names import matching
from weightscope.anatomy import attention, mlps
from weightscope.errors import AnatomyError, UsageError
from weightscope.init._common import M, frame, matrices, normal, put, uniform
from weightscope.init.attention import self_attention


def zero_matrix(rows: int, columns: int) -> Tensor:
    """The P x Q matrix of ZerO, float32: zeros and ones up to one factor.

        P = Q    I
        P < Q    I*, the first P rows of I
        P > Q    c I* H_m I*,  m = ceil(log2 P), c = 2^(-(m-1)/2), H_m the Hadamard matrix of size 2^m

    Source: Zhao et al. 2022, Algorithm 1.
    """
    if rows <= columns:
        return torch.eye(rows, columns)
    m = math.ceil(math.log2(rows))
    signs = torch.ones(1, 1)
    for _ in range(m):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs[:rows, :columns] * 2 ** (-(m - 1) / 2)


def zero_init_(module: M, *, parts: str = "attention", generator: torch.Generator | None = None) -> M:
    """ZerO: identities in front, zeros at the end of every residual branch; nothing is random.

    Queries, keys, values and first layers of MLPs become `zero_matrix`, output projections and second layers
    zero, their biases zero. So every branch adds nothing at first.

    Args:
        module: changed in place: the named parts' weights and biases.
        parts: "attention" (all that the attention paper compares with), "mlp" or "both".
        generator: not used.

    Raises:
        AnatomyError: if the module has no such part.
        UsageError: if an argument cannot be meant.

    Source: Zhao et al. 2022, Algorithm 1; attention paper, section 5.1 and Table 5.

    Example:
        >>> zero_init_(vit)
    """
    choice("parts", parts, ("attention", "mlp", "both"))
    if parts != "mlp":
        for part in attention(module):
            for name in ("q", "k", "v"):
                old = part.read(name)  # (heads, d, k)
                heads, d, k = old.shape
                part.write(name, zero_matrix(heads * k, d).reshape(heads, k, d).mT)
            part.write("o", torch.zeros_like(part.read("o")))
            for name in part.bias_parameters:
                part.write_bias(name, torch.zeros_like(part.read_bias(name)))
    if parts != "attention":
        for part in mlps(module):
            for name in part.names:
                old = part.read(name)
                part.write(name, torch.zeros_like(old) if name == "fc2" else zero_matrix(*old.shape))
            for name in part.bias_names:
                part.write_bias(name, torch.zeros_like(part.read_bias(name)))
    return module


def t_fixup_(
    module: M,
    *,
    kind: str = "encoder",
    embeddings: bool = False,
    generator: torch.Generator | None = None,
) -> M:
    """T-Fixup: Xavier matrices, with those along the residual branches scaled down by the number of layers N.

        encoder   V, O, W1, W2 times 0.67 N^(-1/4)
        decoder   V, O, W1, W2 times (9 N)^(-1/4)
        embeddings   N(0, 1/d), times (9 N)^(-1/4)

    Queries and keys are plain Xavier-uniform. The paper also takes normalisation layers away; that is not an
    initialisation, and they stay. An encoder-decoder is done in two calls, on its two halves.

    Args:
        module: changed in place: the weights of attention and MLPs (and of `nn.Embedding`).
        kind: "encoder" or "decoder".
        embeddings: also set token embeddings.
        generator: of the CPU; None for torch's global one.

    Raises:
        AnatomyError: if the module has no attention or no MLP.
        UsageError: if an argument cannot be meant, or there is no embedding where it is asked for.

    Source: Huang et al. 2020, section 3.2; attention paper, Table 5 (applied to attention and MLPs).

    Example:
        >>> t_fixup_(vit, generator=torch.Generator().manual_seed(0))
    """
    choice("kind", kind, ("encoder", "decoder"))
    flag("embeddings", embeddings)
    layers = len({part.layer for part in self_attention(module)})
    small = (9 * layers) ** -0.25
    scale = small if kind == "decoder" else 0.67 * layers**-0.25
    for part in attention(module):
        for name in ("q", "k", "v", "o"):
            old = part.read(name)  # (heads, in, out), or (heads, in of a head, out)
            widths = (
                (old.shape[0] * old.shape[1], old.shape[2])
                if name == "o"
                else (old.shape[1], old.shape[0] * old.shape[2])
            )
            draws = uniform(*old.shape, bound=math.sqrt(6 / sum(widths)), generator=generator)
            part.write(name, draws * (scale if name in "vo" else 1.0))
    for part in mlps(module):
        for name in part.names:
            shape = part.read(name).shape
            part.write(name, uniform(*shape, bound=math.sqrt(6 / sum(shape)), generator=generator) * scale)
    if embeddings:
        tables = [inner for inner in module.modules() if isinstance(inner, nn.Embedding)]
        if not tables:
            raise UsageError("embeddings: expected token embeddings (nn.Embedding), found none")
        for table in tables:
            draws = normal(*table.weight.shape, generator=generator)
            put(table.weight, draws * (small / math.sqrt(table.embedding_dim)))
    return module


def delta_orthogonal_(
    module: M, *, gain: float = 1.0, select: str = "*", generator: torch.Generator | None = None
) -> M:
    """Every convolution is a random orthogonal matrix at its centre tap and zero elsewhere: an isometry of images.

    With fewer outputs than inputs the rows are orthonormal instead of the columns. Each group of a grouped
    convolution has a matrix of its own, which for depthwise filters is a sign. The centre of an even filter is
    tap k/2.

    Args:
        module: changed in place: the weights of convolutions; biases become zero.
        gain: factor on the orthogonal matrices, > 0.
        select: shell patterns of weight names, separated by commas.
        generator: of the CPU; None for torch's global one.

    Raises:
        AnatomyError: if the module has no convolution.
        UsageError: if an argument cannot be meant.

    Source: Xiao et al. 2018, Algorithm 1 and section 3.

    Example:
        >>> delta_orthogonal_(convmixer, generator=torch.Generator().manual_seed(0))
    """
    positive("gain", gain)
    found = [matrix for matrix in matrices(module) if isinstance(matrix.layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if not found:
        raise AnatomyError(f"expected convolutions, found none in {type(module).__name__}")
    wanted = set(matching(select, (matrix.name for matrix in found)))
    for matrix in found:
        if matrix.name not in wanted:
            continue
        kernel = torch.zeros(matrix.weight.shape)
        groups, inputs = matrix.layer.groups, kernel.shape[1]
        outputs = kernel.shape[0] // groups
        blocks = frame(groups, max(outputs, inputs), min(outputs, inputs), generator=generator)
        centre = (blocks if outputs >= inputs else blocks.mT).reshape(groups * outputs, inputs)
        kernel[(slice(None), slice(None), *(n // 2 for n in kernel.shape[2:]))] = gain * centre
        put(matrix.weight, kernel)
        if matrix.bias is not None:
            put(matrix.bias, torch.zeros(matrix.bias.shape))
    return module


# timm and ours, DINOv2 and DeiT-III, transformers' ConvNeXt, torchvision's ConvNeXt, CaiT and BEiT
_FACTOR = re.compile(r"(^|\.)(ls\d?\.gamma|gamma(_\d)?|lambda(_)?\d|layer_scale(_parameter|_\d)?|layer_scale\w*\.\w+)$")


def layer_scale_identity_(
    module: M, *, value: float = 0.1, where: str = "auto", generator: torch.Generator | None = None
) -> M:
    """Scale the output of every residual branch by a small number, `x + value f(x)`: blocks start near the identity.

    A network with LayerScale has a trained factor for each channel, which is set. In one without, the same function
    results from scaling the last matrix and bias of each branch as they are.

    Args:
        module: changed in place: LayerScale's factors, or weights and biases of attention's output projections and
            MLPs' second layers.
        value: > 0; published are 0.1 for up to 18 layers, 1e-5 for up to 24, 1e-6 beyond.
        where: "factors", "matrices", or "auto" for factors where there are any.
        generator: not used.

    Raises:
        AnatomyError: if the module has neither, or none of the wanted kind.
        UsageError: if an argument cannot be meant.

    Source: Touvron et al. 2021 (CaiT), section 2; attention paper, Eq. 9 and Table 5.

    Example:
        >>> layer_scale_identity_(vit, value=1e-5)
    """
    number("value", value)
    positive("value", value)
    choice("where", where, ("auto", "factors", "matrices"))
    factors = [parameter for name, parameter in module.named_parameters() if _FACTOR.search(name)]
    if where == "factors" and not factors:
        raise AnatomyError(
            "expected LayerScale factors, found none; where='matrices' scales the branches' last matrices"
        )
    if factors and where != "matrices":
        for factor in factors:
            put(factor, torch.full(factor.shape, float(value)))
        return module
    found = 0
    for finder, last in ((attention, "o"), (mlps, "fc2")):
        try:
            parts = finder(module)
        except AnatomyError:
            continue
        for part in parts:
            part.write(last, part.read(last) * value)
            bias = part.read_bias(last)
            if bias is not None:
                part.write_bias(last, bias * value)
        found += len(parts)
    if not found:
        raise AnatomyError("expected residual branches (attention or MLPs), found none")
    return module
