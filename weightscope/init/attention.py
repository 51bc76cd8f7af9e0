"""Mimetic initialisation of self-attention: products of weights near a multiple of the identity."""

import math

import torch
from torch import Tensor

from weightscope._util.checks import choice, number
from weightscope.anatomy import AttentionPart, self_attention
from weightscope.anatomy.attention_modules import chosen_heads
from weightscope.anatomy.matrices import chosen_layers
from weightscope.anatomy.strictness import reads
from weightscope.errors import UsageError
from weightscope.init._common import M, cpu_generator, frame, normal
from weightscope.init._topk import factors, spectrum
from weightscope.init.registry import INITIALISERS

# (alpha_qk, beta_qk, alpha_vo, beta_vo): thesis 3.2.4 and 3.2.6
PRESETS: dict[str, tuple[float, float, float, float]] = {
    "vision": (0.7, 0.7, 0.4, 0.4),
    "language": (0.0, 0.5, 0.2, 0.2),
}
PARTS = ("both", "qk", "vo")
CONSTRUCTIONS = ("svd", "same-random")


def noisy_identity(d: int, alpha: float, beta: float, generator: torch.Generator | None) -> Tensor:
    """`alpha Z + beta I` with the entries of Z from N(0, 1/d), float32 (d, d)."""
    out = torch.empty(d, d).normal_(std=alpha / math.sqrt(d), generator=cpu_generator(generator))
    out.diagonal().add_(beta)
    return out


def query_key(
    d: int, k: int, group: int, alpha: float, beta: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Queries of `group` heads and the key that they share, with `Q_h K^T ~ alpha Z_h + beta I`.

    Every head has its own Z. The target products, stacked, form one (group d, d) matrix, whose best approximation of
    rank k gives the stacked factors; for one head this is the reduced SVD of thesis Eq. 3.16-3.18. The factors are
    balanced: `mean_h Q_h^T Q_h = K^T K`, a diagonal matrix.

    Without noise (alpha = 0) every k-dimensional subspace approximates `beta I` equally well. A uniformly random one
    is drawn, because an SVD routine would give every head the first k coordinates.

    Returns:
        Q (group, d, k) and K (d, k), float32, in the row-vector convention X @ Q.
    """
    if alpha == 0 and k <= d:
        basis = frame(d, k, generator=generator) * math.sqrt(abs(beta))
        return basis.mul(math.copysign(1, beta)).expand(group, d, k), basis
    stacked = torch.cat([noisy_identity(d, alpha, beta, generator) for _ in range(group)])
    left, right = factors(stacked, k, generator, spectrum=spectrum(alpha, beta, group))
    balance = group**0.25
    return left.reshape(group, d, k) * balance, right / balance


def value_output(
    d: int, heads: int, kv_heads: int, k: int, alpha: float, beta: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Values and output projections of one layer, with `sum_h V_g(h) O_h ~ alpha Z - beta I`.

    `W_V = U S^(1/2)` and `W_proj = S^(1/2) V^T` of one singular value decomposition per layer (thesis Eq. 3.13
    to 3.15), split into heads by columns of U; the best approximation if all heads together have fewer than d
    columns. Query heads that share a value head have equal shares of its output.

    Returns:
        V (kv_heads, d, k) and O (heads, k, d), float32.
    """
    group = heads // kv_heads
    left, right = factors(noisy_identity(d, alpha, -beta, generator), kv_heads * k, generator)
    values = left.reshape(d, kv_heads, k).transpose(0, 1)
    outputs = right.reshape(d, kv_heads, k).permute(1, 2, 0)
    balance = group**0.25  # so that V and all the O of its group together have equal norms
    return values / balance, outputs.repeat_interleave(group, dim=0) * (balance / group)


def same_random(d: int, k: int, beta: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Two factors A, B (d, k) with `A B^T = beta Z Z^T`, entries of Z from N(0, 1/k), so that its mean is beta I.

    Source: thesis 3.2.3, "set the two matrices in the product to the same random normal matrix".
    """
    z = normal(d, k, generator=generator).mul_(math.sqrt(abs(beta) / k))
    return z * math.copysign(1, beta), z


@INITIALISERS.register("mimetic_attention", source="thesis 3.2; attention paper", needs="self-attention")
@reads(("attention modules",))
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
    generator: torch.Generator | None = None,
) -> M:
    """Make `W_Q W_K^T ~ alpha_qk Z + beta_qk I` in every head and `W_V W_proj ~ alpha_vo Z - beta_vo I` in every layer.

    Z has independent entries from N(0, 1/d), drawn for every head and layer. The factors are the best approximation of
    their rank (k for queries and keys), by singular value decomposition, with the square roots of the singular values
    on both sides.

    Args:
        module: changed in place: query, key, value and output weights of self-attention. Biases, positions and
            cross-attention stay as they are.
        alpha_qk: scale of the noise of the query-key product, >= 0.
        beta_qk: its diagonal.
        alpha_vo: scale of the noise of the value-output product, >= 0.
        beta_vo: minus its diagonal; a negative number gives the thesis's ablation with a positive diagonal.
        preset: published numbers instead: "vision" (.7, .7, .4, .4) or "language" (0, .5, .2, .2).
        construction: "svd", or "same-random": `W_Q = W_K`, `W_V = -W_proj^T`, a scaled Gaussian matrix, whose
            noise follows from the widths, so that the alphas must keep their defaults.
        parts: "both", "qk" or "vo".
        layers: which layers, counted from 0; None for all.
        heads: which heads of each layer; None for all. The chosen heads alone have the value-output product, whose
            rank is theirs; of heads that share a key all or none are chosen.
        strict: whether tensors that look like attention and cannot be read are an error; if not, a warning
            lists them and they stay as they are.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no attention.
        UsageError: if an argument is invalid, or there is only cross-attention.

    Source: thesis Eq. 3.12-3.18; attention paper, section 4 (both with the signs and roots of the text, see the
    docstrings of `query_key` and `value_output`).

    Example:
        >>> mimetic_attention_(vit, generator=torch.Generator().manual_seed(0))
        >>> mimetic_attention_(gpt, preset="language", layers=[0, 1])
    """
    given = alpha_qk, beta_qk, alpha_vo, beta_vo
    alpha_qk, beta_qk, alpha_vo, beta_vo = _numbers(preset, construction, given)
    choice("parts", parts, PARTS)
    for part in chosen_heads(chosen_layers(self_attention(module), layers), heads):
        if parts != "vo":
            write_query_key(part, construction, alpha_qk, beta_qk, generator)
        if parts != "qk":
            write_value_output(part, construction, alpha_vo, beta_vo, generator)
    return module


Numbers = tuple[float, float, float, float]


def _numbers(preset: str | None, construction: str, given: Numbers) -> Numbers:
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


def write_query_key(
    part: AttentionPart, construction: str, alpha: float, beta: float, generator: torch.Generator | None
) -> None:
    """Make `W_Q W_K^T ~ alpha Z + beta I` in every head of one attention module."""
    d, k, group = part.width, part.head_width, part.heads // part.kv_heads
    queries, keys = [], []
    for _ in range(part.kv_heads):
        if construction == "svd":
            q, key = query_key(d, k, group, alpha, beta, generator)
        else:
            one, key = same_random(d, k, beta, generator)
            q = one.expand(group, d, k)
        queries.append(q)
        keys.append(key)
    part.write("q", torch.cat(queries))
    part.write("k", torch.stack(keys))


def write_value_output(
    part: AttentionPart, construction: str, alpha: float, beta: float, generator: torch.Generator | None
) -> None:
    """Make `sum_h W_V W_proj ~ alpha Z - beta I` in one attention module."""
    d, k, group = part.width, part.value_width, part.heads // part.kv_heads
    if construction == "svd":
        values, outputs = value_output(d, part.heads, part.kv_heads, k, alpha, beta, generator)
    else:
        left, right = same_random(d, part.kv_heads * k, -beta, generator)
        values = left.reshape(d, part.kv_heads, k).transpose(0, 1)
        outputs = right.reshape(d, part.kv_heads, k).permute(1, 2, 0).repeat_interleave(group, dim=0) / group
    part.write("v", values)
    part.write("o", outputs)
