"""Vision transformer (Dosovitskiy et al. 2021) with the positions and pooling of the attention paper.

Its attention may have a part that depends on the positions of the tokens only: gates and convolutions.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.errors import UsageError
from weightscope.networks.layers import (
    Attention,
    LayerScale,
    Mlp,
    TokenPool,
    drop_paths,
    patchify,
    sinusoidal_positions,
)

EMBEDDING_STD = 0.02  # of learned positions, as in BERT, DeiT and timm, and the class token, as in DeiT
AttentionKind = Literal["softmax", "gpsa", "conv-logits", "conv-map", "conv-softmax-map"]
KINDS: tuple[str, ...] = get_args(AttentionKind)
CONVOLUTIONAL = KINDS[2:]


class Terms(NamedTuple):
    """How positions enter attention, `(kept * softmax(Q K^T / sqrt(k) + logits) + added) V`; None where absent."""

    logits: Tensor | None = None  # (..., H, N, N)
    kept: Tensor | None = None  # (..., H, N, 1), shares of the rows
    added: Tensor | None = None  # (..., H, N, N)


class PositionalAttention(Attention):
    """The base of attention with positional terms, on a square grid of tokens after `prefix` special ones."""

    def __init__(self, width: int, heads: int, grid: int, *, prefix: int = 0, qkv_bias: bool = True) -> None:
        super().__init__(width, heads, qkv_bias=qkv_bias)
        self.grid, self.prefix = grid, prefix

    def terms(self, own: Mapping[str, Tensor]) -> Terms:
        """The positional terms for values of the layer's own parameters, with any leading axes."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, k)
        terms = self.terms(dict(self.named_parameters(recurse=False)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=terms.logits)
        y = y if terms.kept is None else terms.kept * y
        y = y if terms.added is None else y + terms.added @ v
        return self.proj(y.transpose(1, 2).flatten(2))

    def _padded(self, values: Tensor) -> Tensor:
        """(..., g^2, g^2) to (..., N, N), zero in the rows and columns of special tokens."""
        return F.pad(values, (self.prefix, 0, self.prefix, 0)) if self.prefix else values


class GatedAttention(PositionalAttention):
    """Gated positional self-attention (GPSA): `((1 - s(l_h)) softmax(Q K^T / sqrt(k)) + s(l_h) softmax(v_h . r_ij)) V`.

    s is the logistic function and `r_ij = (|D|^2, D_x, D_y)` for the displacement D from token i to token j. The class
    token has no position: its row is the softmax of Q K^T alone, and the positional map gives it no weight.

    The local initialisation sets `v_h = -(1, -2 c_x, -2 c_y)`, so that head h attends around the displacement
    c_h: the pixels of a 2 x 2 filter for 4 heads, of a 3 x 3 filter for 9. With a number of heads H that is no square,
    such as 8, the first floor(sqrt(H))^2 heads are set, and the others keep torch's default of a linear layer of three
    inputs, as in ConViT's published code. All gates start at l_h = 1, and W_V is the identity.

    Source: d'Ascoli et al. 2021 (ConViT), Eq. 6 to 8; attention paper, section 5.1 (GPSA comparison).
    """

    def __init__(self, width: int, heads: int, grid: int, *, prefix: int = 0, qkv_bias: bool = True) -> None:
        super().__init__(width, heads, grid, prefix=prefix, qkv_bias=qkv_bias)
        self.position_vectors = nn.Parameter(torch.empty(heads, 3))
        self.gating_param = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The local initialisation, with an identity for the values (other weights are of layers of their own)."""
        nn.init.uniform_(self.position_vectors, -1 / math.sqrt(3), 1 / math.sqrt(3))
        side = math.isqrt(self.heads)
        y, x = torch.meshgrid(*[torch.arange(side) - (side - 1) / 2] * 2, indexing="ij")
        local = torch.stack([-torch.ones(side * side), 2 * x.flatten(), 2 * y.flatten()], 1)
        self.position_vectors[: side * side] = local.to(self.position_vectors)
        nn.init.ones_(self.gating_param)
        width = self.proj.in_features
        nn.init.eye_(self.qkv.weight[2 * width :])
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias[2 * width :])

    def terms(self, own: Mapping[str, Tensor]) -> Terms:
        vectors, gate = own["position_vectors"], torch.sigmoid(own["gating_param"])[..., None, None]
        logits = torch.einsum("...hc,cij->...hij", vectors, _displacements(self.grid, vectors.device).to(vectors))
        kept = F.pad((1 - gate).expand(*gate.shape[:-2], self.grid**2, 1), (0, 0, self.prefix, 0), value=1.0)
        return Terms(kept=kept, added=self._padded(gate * torch.softmax(logits, -1)))


class ConvolutionalAttention(PositionalAttention):
    """Self-attention with a learned convolution of the grid in each head; C is its matrix, c a learned scale.

        conv-logits         softmax(Q K^T / sqrt(k) + c C)
        conv-map            softmax(Q K^T / sqrt(k)) + c C
        conv-softmax-map    softmax(Q K^T / sqrt(k)) + softmax(c C)

    C (N, N) is doubly block-circulant: `C_ij = filter[j - i]` with displacements that wrap around at the edges of the
    grid; it is zero in rows and columns of the class token.

    With `pool = "token"` only the class token of the last block is read, whose row of C is zero, so by construction the
    filters and the scale of that block get no gradient and stay as they are initialised (weight decay shrinks them).

    Source: attention paper, Eq. 14 and 15, which leave open the size and that each head has a filter of its own.
    """

    def __init__(
        self, kind: str, filter_size: int, width: int, heads: int, grid: int, *, prefix: int = 0, qkv_bias: bool = True
    ) -> None:
        super().__init__(width, heads, grid, prefix=prefix, qkv_bias=qkv_bias)
        if filter_size % 2 == 0 or not 0 < filter_size <= grid:
            raise UsageError(
                f"filter_size: expected an odd number of at most {grid}, the tokens per side, found {filter_size}"
            )
        self.kind, self.filter_size = kind, filter_size
        self.filters = nn.Parameter(torch.empty(heads, filter_size, filter_size))
        self.filter_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.filters, -1 / self.filter_size, 1 / self.filter_size)
        nn.init.ones_(self.filter_scale)

    def terms(self, own: Mapping[str, Tensor]) -> Terms:
        filters = own["filters"] * own["filter_scale"][..., None, None]
        shifts = _shifts(self.grid, self.filter_size, filters.device).to(filters)
        matrix = self._padded(torch.einsum("...huv,uvij->...hij", filters, shifts))
        if self.kind == "conv-logits":
            return Terms(logits=matrix)
        return Terms(added=matrix if self.kind == "conv-map" else torch.softmax(matrix, -1))


def attention_layer(
    kind: str, width: int, heads: int, grid: int, *, prefix: int, qkv_bias: bool, filter_size: int | None
) -> Attention:
    """The attention layer of a kind for N = prefix + grid^2 tokens."""
    choice("attention", kind, KINDS)
    if kind in CONVOLUTIONAL:
        size = min(3, grid - (grid % 2 == 0)) if filter_size is None else filter_size
        return ConvolutionalAttention(kind, size, width, heads, grid, prefix=prefix, qkv_bias=qkv_bias)
    if filter_size is not None:
        raise UsageError(f"filter_size is of {', '.join(map(repr, CONVOLUTIONAL))}; leave it out for {kind!r}")
    if kind == "gpsa":
        return GatedAttention(width, heads, grid, prefix=prefix, qkv_bias=qkv_bias)
    return Attention(width, heads, qkv_bias=qkv_bias)


@lru_cache(maxsize=8)
def _displacements(grid: int, device: torch.device) -> Tensor:
    """(|D|^2, D_x, D_y) of D from token i to token j: (3, g^2, g^2); cached, since training is captured as a graph."""
    with torch.inference_mode(False):
        y, x = _steps(grid, device)
        return torch.stack([x.square() + y.square(), x, y])


@lru_cache(maxsize=8)
def _shifts(grid: int, size: int, device: torch.device) -> Tensor:
    """The matrices of the cyclic shifts of a grid by the displacements of an f x f filter: (f, f, g^2, g^2)."""
    with torch.inference_mode(False):
        y, x = _steps(grid, device)
        reach = torch.arange(size, device=device) - size // 2
        rows, columns = ((step % grid == (reach % grid)[:, None, None]).float() for step in (y, x))
        return rows[:, None] * columns[None]


def _steps(grid: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Vertical and horizontal distances from token i to token j, each float32 (g^2, g^2)."""
    index = torch.arange(grid * grid, device=device)
    y, x = index // grid, index % grid
    return (y - y[:, None]).float(), (x - x[:, None]).float()


# --- the network ------------------------------------------------------------------------------------------------------


class PatchEmbed(nn.Module):
    """Patches as tokens: images (B, c, S, S) to (B, (S/p)^2, d), row by row."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = patchify(in_channels, width, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block on tokens (B, N, d): attention, then MLP, each added to its input.

    `x <- skip x + drop_path1(ls1(attn(norm1(x))))`, then `x <- x + drop_path2(ls2(mlp(norm2(x))))`.
    """

    skip_scale: nn.Parameter | None

    def __init__(
        self,
        attn: Attention,
        width: int,
        hidden: int,
        layer_scale: float | None,
        layer_scale_on: str,
        drop_paths: tuple[nn.Module, nn.Module],
        learned_sum: float | None,
    ) -> None:
        super().__init__()
        scaled = {"both": ("ls1", "ls2"), "attention": ("ls1",), "skip": ("skip",)}[layer_scale_on]
        first, second = (
            LayerScale(width, layer_scale) if layer_scale is not None and name in scaled else nn.Identity()
            for name in ("ls1", "ls2")
        )
        self.layer_scale = layer_scale
        skip = layer_scale is not None and "skip" in scaled
        self.register_parameter("skip_scale", nn.Parameter(torch.empty(width)) if skip else None)
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = attn
        self.ls1 = first
        self.drop_path1 = drop_paths[0]
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden, learned_sum)
        self.ls2 = second
        self.drop_path2 = drop_paths[1]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.skip_scale is not None and self.layer_scale is not None:
            nn.init.constant_(self.skip_scale, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.skip_scale is None else x * self.skip_scale
        x = skip + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ViT(nn.Module):
    """Vision transformer. Images (B, c, S, S) to logits (B, n).

    Names and shapes are those of `timm.models.vision_transformer.VisionTransformer`: with `pool="token"` of
    timm's `global_pool="token"`, with `pool="average"` of `global_pool="avg", class_token=False`.
    Weights and biases start from torch's defaults (Kaiming-uniform), not from a truncated normal (MLP paper,
    section 3); the class token and learned positions from a normal of standard deviation 0.02. Timm's class token has
    1e-6.

    Args:
        image_size: S.
        patch_size: p, divides S.
        width: d; a multiple of 4 for sinusoidal positions.
        depth: L, blocks.
        heads: H, divides d.
        num_classes: n.
        positions: initial value of `pos_embed` (1, N, d), which is trained either way. Sinusoidal is
            `position_scale` times `sinusoidal_positions`, and zero for the class token.
        pool: average the tokens, or read the class token.
        in_channels: c.
        expansion: the MLP's hidden units per channel.
        position_scale: gamma of the attention paper (thesis 3.2), the scale of sinusoidal positions.
        layer_scale: initial value of LayerScale's diagonal matrices D; None for no LayerScale.
        layer_scale_on: "both" branches, `X + D SA(X)` and the same with the MLP; "attention" alone; or the "skip"
            connection of attention alone, `D X + SA(X)` (attention paper, Eq. 9 and Table 5).
        attention: "softmax"; "gpsa", see `GatedAttention`; "conv-logits", "conv-map" or "conv-softmax-map", see
            `ConvolutionalAttention`.
        filter_size: f of the convolutions in attention, odd; None for 3.
        qkv_bias: whether queries, keys and values have a bias.
        drop_path: rate of stochastic depth of both branches of the last block, in [0, 1); it rises linearly from 0
            in the first.
        learned_sum: initial value of the learned number b in each `fc1(x) + b sum(x)`, a baseline of the MLP paper
            (section 3, Fig. 4); None for none.

    Source: Dosovitskiy et al. 2021; attention paper.

    Example:
        >>> ViT(image_size=32, patch_size=2, width=192, depth=12, heads=3, num_classes=10, pool="token")
    """

    cls_token: nn.Parameter | None

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        num_classes: int,
        positions: Literal["sinusoidal", "learned"] = "sinusoidal",
        pool: Literal["average", "token"] = "average",
        *,
        in_channels: int = 3,
        expansion: int = 4,
        position_scale: float = 1.0,
        layer_scale: float | None = None,
        layer_scale_on: Literal["both", "attention", "skip"] = "both",
        attention: AttentionKind = "softmax",
        filter_size: int | None = None,
        qkv_bias: bool = True,
        drop_path: float = 0.0,
        learned_sum: float | None = None,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise UsageError(f"patch_size must divide the image's {image_size} pixels, found {patch_size}")
        choice("positions", positions, ("sinusoidal", "learned"))
        choice("pool", pool, ("average", "token"))
        choice("layer_scale_on", layer_scale_on, ("both", "attention", "skip"))
        self.grid = image_size // patch_size
        self.positions, self.position_scale = positions, position_scale
        self.register_parameter("cls_token", nn.Parameter(torch.empty(1, 1, width)) if pool == "token" else None)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid**2 + (pool == "token"), width))
        self.patch_embed = PatchEmbed(in_channels, width, patch_size)
        options: dict[str, Any] = {"prefix": int(pool == "token"), "qkv_bias": qkv_bias, "filter_size": filter_size}
        layers = (attention_layer(attention, width, heads, self.grid, **options) for _ in range(depth))
        paths = zip(drop_paths(drop_path, depth), drop_paths(drop_path, depth), strict=True)
        self.blocks = nn.Sequential(
            *(
                Block(layer, width, expansion * width, layer_scale, layer_scale_on, pair, learned_sum)
                for layer, pair in zip(layers, paths, strict=True)
            )
        )
        # timm normalises before picking the class token but after averaging, and names the two differently
        self.pooling = TokenPool(first=pool == "token")
        self.norm = nn.LayerNorm(width, eps=1e-6) if pool == "token" else nn.Identity()
        self.fc_norm = nn.LayerNorm(width, eps=1e-6) if pool == "average" else nn.Identity()
        self.head = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.pos_embed.is_meta:  # where torch would import its compiler, which takes a second
            return
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=EMBEDDING_STD)
        if self.positions == "learned":
            nn.init.normal_(self.pos_embed, std=EMBEDDING_STD)
            return
        codes = sinusoidal_positions(self.grid, self.grid, self.pos_embed.shape[-1])
        with torch.no_grad():
            self.pos_embed.zero_()
            self.pos_embed[0, -len(codes) :] = self.position_scale * codes

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return self.head(self.fc_norm(self.pooling(x)))
