"""Vision transformer (Dosovitskiy et al. 2021) with the positions and pooling of the attention paper."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.errors import UsageError
from weightscope.networks.layers import Attention, LayerScale, Mlp, TokenPool, drop_paths, patchify
from weightscope.networks.positional_attention import AttentionKind, attention_layer
from weightscope.networks.positions import sinusoidal_positions
from weightscope.networks.registry import NETWORKS

EMBEDDING_STD = 0.02  # of learned positions and the class token, as in BERT, DeiT and timm


class PatchEmbed(nn.Module):
    """Patches as tokens: images (B, c, S, S) to (B, (S/p)^2, d), row by row."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = patchify(in_channels, width, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Embed images."""
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block on tokens (B, N, d): attention, then MLP, each added to its input.

    `x <- skip x + drop_path1(ls1(attn(norm1(x))))`, then `x <- x + drop_path2(ls2(mlp(norm2(x))))`.

    Args:
        attn: the attention layer.
        width: d.
        hidden: p of the MLP.
        layer_scale: initial value of LayerScale; None for none.
        layer_scale_on: which terms are scaled, see `ViT`.
        drop_paths: the layers of stochastic depth of attention and of the MLP, or identities.
        learned_sum: initial value of the learned number of fc1; None for none, see `SumLinear`.
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
        """Set `skip_scale` to its initial value."""
        if self.skip_scale is not None and self.layer_scale is not None:
            nn.init.constant_(self.skip_scale, self.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, d) to (B, N, d)."""
        skip = x if self.skip_scale is None else x * self.skip_scale
        x = skip + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@NETWORKS.register("vit", source="Dosovitskiy et al. 2021; attention paper")
class ViT(nn.Module):
    """Vision transformer. Images (B, c, S, S) to logits (B, n).

    Names and shapes are those of `timm.models.vision_transformer.VisionTransformer`: with `pool="token"` of
    timm's `global_pool="token"`, with `pool="average"` of `global_pool="avg", class_token=False`.
    Weights and biases start from torch's defaults (Kaiming-uniform), not from a truncated normal (MLP paper,
    section 3); the class token and learned positions from a normal of standard deviation 0.02.

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

    Raises:
        UsageError: if sizes do not divide as required, a choice is invalid, or `drop_path` is not a rate.

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
        """Set `cls_token` and `pos_embed` to their initial values (layers have their own resets)."""
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
        """Map images (B, c, S, S) to logits (B, n)."""
        x = self.patch_embed(x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return self.head(self.fc_norm(self.pooling(x)))
