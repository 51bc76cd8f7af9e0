"""Mimetic initialisation of self-attention: products of weights near a multiple of the identity, and positions."""

import math

import torch
from torch import Tensor

from weightscope._util.checks import choice, number
from weightscope._util.threads import one_thread
from weightscope.anatomy import AttentionPart, PositionEmbedding, chosen_layers, positions, self_attention
from weightscope.anatomy.attention_part import NO_PRODUCT, chosen_heads
from weightscope.anatomy.tensors import check_separate
from weightscope.errors import UsageError
from weightscope.init.base import INITIALISERS, Generator, M, frame, normal
from weightscope.networks.layers import sinusoidal_positions

_PARTIAL = 384  # size from which some eigenvectors are found faster than all: half of the time at 768 for 64


def factors(matrix: Tensor, rank: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Balanced factors of the best approximation of a rank: `L R^T = U_r S_r V_r^T`, `L = U S^(1/2)`, `R = V S^(1/2)`.

    L (m, r) is M R, so that `L R^T = M V V^T` to rounding. Above the n columns of M (m, n), m >= n, the factors of rank
    n are spread over r columns by a random semi-orthogonal matrix.
    """
    n = matrix.shape[1]
    if rank > n:
        left, right = factors(matrix, n, generator)
        spread = frame(rank, n, generator=generator).T
        return left @ spread, right @ spread
    gram = matrix.T @ matrix
    if n < _PARTIAL or 6 * rank > n:
        vectors = torch.linalg.eigh(gram)[1][:, -rank:]
    else:
        from scipy.linalg import eigh

        with one_thread():  # of the library that the import loads
            vectors = torch.from_numpy(eigh(gram.numpy(), subset_by_index=(n - rank, n - 1))[1])
    vectors = vectors.flip(1)
    image = matrix @ vectors
    roots = image.norm(dim=0).sqrt().clamp_min(torch.finfo(matrix.dtype).tiny)
    return image / roots, vectors * roots


# (alpha_qk, beta_qk, alpha_vo, beta_vo): thesis 3.2.4 and 3.2.6
PRESETS: dict[str, tuple[float, float, float, float]] = {
    "vision": (0.7, 0.7, 0.4, 0.4),
    "language": (0.0, 0.5, 0.2, 0.2),
}
PARTS = ("both", "qk", "vo")
CONSTRUCTIONS = ("svd", "same-random")


def noisy_identity(d: int, alpha: float, beta: float, generator: Generator) -> Tensor:
    """`alpha Z + beta I` with the entries of Z from N(0, 1/d), float32 (d, d)."""
    out = normal(d, d, generator=generator).mul_(alpha / math.sqrt(d))
    out.diagonal().add_(beta)
    return out


def query_key(
    d: int, k: int, group: int, alpha: float, beta: float, generator: Generator, construction: str = "svd"
) -> tuple[Tensor, Tensor]:
    """Queries of `group` heads and the key that they share, with `Q_h K^T ~ alpha Z_h + beta I`.

    Every head has its own Z. The factors Q (group, d, k) and K (d, k), float32, are the best approximation of rank k of
    the stacked products (group d, d), for one head the reduced SVD of thesis Eq. 3.16-3.18, balanced so that
    `mean_h Q_h^T Q_h = K^T K` is diagonal. Without noise an SVD would give every head the first k coordinates; a random
    subspace is drawn.
    """
    if construction == "same-random":
        query, key = same_random(d, k, beta, generator)
        return query.expand(group, d, k), key
    if alpha == 0 and k <= d:
        basis = frame(d, k, generator=generator) * math.sqrt(abs(beta))
        return basis.mul(math.copysign(1, beta)).expand(group, d, k), basis
    stacked = torch.cat([noisy_identity(d, alpha, beta, generator) for _ in range(group)])
    left, right = factors(stacked, k, generator)
    balance = group**0.25
    return left.reshape(group, d, k) * balance, right / balance


def value_output(
    d: int,
    heads: int,
    kv_heads: int,
    k: int,
    alpha: float,
    beta: float,
    generator: Generator,
    construction: str = "svd",
) -> tuple[Tensor, Tensor]:
    """Values and output projections of one layer, with `sum_h V_g(h) O_h ~ alpha Z - beta I`.

    V (kv_heads, d, k) and O (heads, k, d), float32: `U S^(1/2)` and `S^(1/2) V^T` of one decomposition per layer (as
    `mimetic_attention_` corrects thesis Eq. 3.14 and 3.15), split into heads by columns of U. Query heads that share a
    value head have equal shares of its output, plus what independent Gaussian rows of the same sum and norm differ by:
    heads with equal queries and equal outputs would have equal gradients, and stay equal.
    """
    group = heads // kv_heads
    if construction == "same-random":
        left, right = same_random(d, kv_heads * k, -beta, generator)
    else:
        left, right = factors(noisy_identity(d, alpha, -beta, generator), kv_heads * k, generator)
    values = left.reshape(d, kv_heads, k).transpose(0, 1)
    outputs = right.reshape(d, kv_heads, k).permute(1, 2, 0)
    if group == 1:
        return values, outputs
    noise = normal(kv_heads, group, k, d, generator=generator)
    noise -= noise.mean(1, keepdim=True)
    total = outputs[:, None]  # (kv_heads, 1, k, d)
    noise *= total.norm(dim=3, keepdim=True) * math.sqrt(1 - 1 / group) / noise.norm(dim=(1, 3), keepdim=True)
    return values, (total / group + noise).flatten(0, 1)


def same_random(d: int, k: int, beta: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """A, B (d, k) with `A B^T = beta Z Z^T`, entries of Z from N(0, 1/k), whose mean is beta I (thesis 3.2.3)."""
    z = normal(d, k, generator=generator).mul_(math.sqrt(abs(beta) / k))
    return z * math.copysign(1, beta), z


@INITIALISERS.register("mimetic_attention", source="thesis 3.2; attention paper", needs="self-attention")
def mimetic_attention_(
    module: M,
    *,
    alpha_qk: float = 0.7,
    beta_qk: float = 0.7,
    alpha_vo: float = 0.4,
    beta_vo: float = 0.4,
    preset: str | None = None,
    construction: str = "svd",
    parts: str = "both",
    layers: int | list[int] | None = None,
    heads: int | list[int] | None = None,
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Make `W_Q W_K^T ~ alpha_qk Z + beta_qk I` in every head and `W_V W_proj ~ alpha_vo Z - beta_vo I` in every layer.

    Z has independent entries from N(0, 1/d), drawn for every head and layer. The factors are the best approximation of
    their rank (k for queries and keys), with the square roots of the singular values on both sides.

    Args:
        module: changed in place: query, key, value and output weights of self-attention.
        alpha_qk: scale of the noise of the query-key product, >= 0.
        beta_qk: its diagonal.
        alpha_vo: scale of the noise of the value-output product, >= 0.
        beta_vo: minus its diagonal; a negative number gives the thesis's ablation with a positive diagonal.
        preset: published numbers instead: "vision" (.7, .7, .4, .4) or "language" (0, .5, .2, .2).
        construction: "svd", or "same-random": `W_Q = W_K`, `W_V = -W_proj^T`, Gaussian; the alphas follow from the
            widths.
        parts: "both", "qk" or "vo".
        heads: which heads of each layer are set; None for all. Heads that share a key must be chosen together. The
            value-output product is the sum over the chosen heads.

    Rotated, normalised and gated attention, biases of positions and mixed heads are supported; with a nonlinear
    function between values and output (LeViT), or with outputs of another width (MViTv2), `W_V W_proj` is no map of
    the stream to itself, and only parts="qk" can be set.

    Raises:
        UsageError: if two of the matrices share a tensor (q = k, or a weight of two layers), as in other initialisers.

    Source: thesis Eq. 3.12 to 3.18; attention paper, section 4, Eq. 3 and 4. Two errors in both are corrected, so that
        the products are those of Eq. 3.12 and 3.13: the sign of beta I (Eq. 3.14), and the missing square root of S in
        W_V (Eq. 3.15).

    Example:
        >>> mimetic_attention_(vit, generator=torch.Generator().manual_seed(0))
        >>> mimetic_attention_(gpt, preset="language", layers=[0, 1])
    """
    alpha_qk, beta_qk, alpha_vo, beta_vo = numbers(preset, construction, (alpha_qk, beta_qk, alpha_vo, beta_vo))
    choice("parts", parts, PARTS)
    everything = self_attention(module, strict=strict, caller="mimetic_attention_")
    found = chosen_heads(chosen_layers(everything, layers), heads)
    check_separate((part, name) for part in found for name in {"both": "qkvo"}.get(parts, parts))
    for part in found:
        if parts != "vo":
            write_query_key(part, construction, alpha_qk, beta_qk, generator)
        if parts != "qk":
            write_value_output(part, construction, alpha_vo, beta_vo, generator)
    return module


Numbers = tuple[float, float, float, float]


def numbers(preset: str | None, construction: str, given: Numbers) -> Numbers:
    """The alphas and betas, checked, or those of the preset."""
    names = ("alpha_qk", "beta_qk", "alpha_vo", "beta_vo")
    choice("construction", construction, CONSTRUCTIONS)
    for name, value in zip(names, given, strict=True):
        number(name, value, least=0 if name.startswith("alpha") else -math.inf)
    defaults = PRESETS["vision"]
    if construction == "same-random" and given[::2] != defaults[::2]:
        raise UsageError("construction: the noise of 'same-random' follows from the widths; leave out the alphas")
    if preset is None:
        return given
    choice("preset", preset, PRESETS)
    if given != defaults:
        raise UsageError(f"preset: {preset!r} sets {', '.join(names)}; leave them out")
    return PRESETS[preset]


def write_query_key(part: AttentionPart, construction: str, alpha: float, beta: float, generator: Generator) -> None:
    """Make `W_Q W_K^T ~ alpha Z + beta I` in every head of one attention module."""
    d, k, group = part.width, part.head_width, part.heads // part.kv_heads
    pairs = [query_key(d, k, group, alpha, beta, generator, construction) for _ in range(part.kv_heads)]
    part.write("q", torch.cat([queries for queries, _ in pairs]))
    part.write("k", torch.stack([key for _, key in pairs]))


def write_value_output(part: AttentionPart, construction: str, alpha: float, beta: float, generator: Generator) -> None:
    """Make `sum_h W_V W_proj ~ alpha Z - beta I` in one attention module."""
    part.without(*NO_PRODUCT, caller="W_V W_O")
    sizes = part.width, part.heads, part.kv_heads, part.value_width
    values, outputs = value_output(*sizes, alpha, beta, generator, construction)
    part.write("v", values)
    part.write("o", outputs)


@INITIALISERS.register("sinusoidal_positions", source="attention paper, section 5.1", needs="position embeddings")
def sinusoidal_positions_(module: M, *, gamma: float = 1.0, generator: Generator = None) -> M:
    """Set every position embedding to gamma times the sinusoidal codes, 2-D for images and 1-D for sequences.

    Rows of class, distillation and register tokens are kept.

    Args:
        gamma: scale; about 2 with mimetic attention on CIFAR, 1 on ImageNet.

    Raises:
        UsageError: if the width is not a multiple of 4 (2 for a sequence).

    Source: attention paper, section 5.1 and Fig. 4; thesis 3.2.4 (gamma).

    Example:
        >>> sinusoidal_positions_(vit, gamma=2.0)
    """
    number("gamma", gamma)
    tables = positions(module)
    codes = [table_codes(table) for table in tables]
    for table, code in zip(tables, codes, strict=True):
        value = table.read()
        value[table.prefix :] = gamma * code.to(value)
        table.write(value)
    return module


def table_codes(table: PositionEmbedding) -> Tensor:
    """The unscaled sinusoidal codes of a table's ordinary tokens, float32 (tokens - prefix, d)."""
    rows, columns = table.grid or (table.tokens - table.prefix, None)
    return sinusoidal_positions(rows, columns, table.width)
