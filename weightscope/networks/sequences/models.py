"""Language models of blocks `x + mixer(norm(x))`: Mamba, Mamba-2, hybrids with attention, and the Transformer."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice
from weightscope.errors import UsageError
from weightscope.networks.layers import Mlp
from weightscope.networks.positions import sinusoidal_positions
from weightscope.networks.registry import NETWORKS
from weightscope.networks.sequences.attention import CausalAttention, LinearAttention
from weightscope.networks.sequences.mamba import Mamba2Mixer, MambaMixer

EMBEDDING_STD = 0.02  # of mamba_ssm and GPT-2
LayerKind = Literal["default", "attention", "linear_attention"]
LAYER_KINDS = ("default", "attention", "linear_attention")


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Refuse tokens outside of 0 to `vocabulary` - 1; on a GPU, for which the check would wait, and on meta, all pass.

    Raises:
        UsageError: naming the token.
    """
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(value) for value in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise UsageError(f"tokens: expected numbers from 0 to {vocabulary - 1}, found {wrong}")


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, initially normal with standard deviation 0.02. Tokens outside the vocabulary are an error.

    In training, the whole vector of a token is 0 with probability r, wherever the token is in the batch, and divided by
    1 - r otherwise.

    Attributes:
        checks: whether `forward` checks its tokens; not where `torch.vmap` runs it, and its caller does.
        draws: uniform numbers (v,) in [0, 1), one for each token; it is dropped below r. None: from torch's global
            generator. Whoever trains sets them before a forward pass.

    Args:
        vocabulary: v.
        width: d.
        dropout: r.

    Raises:
        UsageError: if r is not in [0, 1); in `forward`, naming the token outside the vocabulary.

    Source: Gal and Ghahramani 2016, section 4.2, with one mask for a batch as in Merity et al. 2018, section 4.3.
    """

    checks = True
    draws: Tensor | None

    def __init__(self, vocabulary: int, width: int, dropout: float = 0.0) -> None:
        super().__init__(vocabulary, width)
        if not 0 <= dropout < 1:
            raise UsageError(f"embedding_dropout: expected a rate in [0, 1), found {dropout}")
        self.dropout = dropout
        self.register_buffer("draws", None, persistent=False)  # a buffer, so that `functional_call` can replace it

    def reset_parameters(self) -> None:
        """Draw the initial vectors."""
        nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, n) to (B, n, d)."""
        if self.checks:
            check_tokens(tokens, self.num_embeddings)
        vectors = super().forward(tokens)
        if not (self.training and self.dropout):
            return vectors
        draws = torch.rand(self.num_embeddings, device=tokens.device) if self.draws is None else self.draws
        factors = (draws >= self.dropout).to(vectors.dtype) / (1 - self.dropout)
        return vectors * factors[tokens].unsqueeze(-1)


class Block(nn.Module):
    """`x + mixer(norm(x))` on tokens (B, n, d), with transformers' names of Mamba's blocks."""

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    """Embedding, blocks and a final RMSNorm: tokens (B, n) to (B, n, d)."""

    def __init__(self, vocabulary: int, width: int, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embeddings = TokenEmbedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, mixer) for mixer in mixers)
        self.norm_f = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, n) to (B, n, d)."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


def _hybrid(
    default: Callable[[], nn.Module], width: int, depth: int, layers: Sequence[LayerKind] | None, key_width: int | None
) -> list[nn.Module]:
    kinds = ("default",) * depth if layers is None else tuple(layers)
    if len(kinds) != depth:
        raise UsageError(f"layers: expected {depth} names, one for each layer, found {len(kinds)}")
    made = {
        "default": default,
        "attention": lambda: CausalAttention(width, key_width=key_width),
        "linear_attention": lambda: LinearAttention(width, key_width),
    }
    return [made[choice("layers", kind, LAYER_KINDS)]() for kind in kinds]


class TiedHead(nn.Linear):
    """Logits of tokens, computed by the embedding's own weight."""

    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)
        self.weight = embeddings.weight

    def reset_parameters(self) -> None:
        """Leave the weight, which the embedding resets."""


def _head(embeddings: nn.Embedding, tied: bool) -> nn.Linear:
    return TiedHead(embeddings) if tied else nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)


@NETWORKS.register("mamba", source="Gu and Dao 2023; thesis Eq. 3.35")
class Mamba(nn.Module):
    """Mamba. Tokens (B, n) to logits (B, n, v).

    Names and shapes are those of `transformers.MambaForCausalLM`. Any layer may be attention of one head in place
    of the state-space model, without positions, as in the thesis's hybrids.

    Args:
        vocabulary: v.
        width: d.
        depth: L, blocks.
        state: N.
        expansion: inner channels per channel.
        tied: the output projection is the embedding.
        layers: "default", "attention" or "linear_attention" for each layer; None for "default" in all.
        key_width: of the queries and keys of attention layers; d if None.

    Raises:
        UsageError: if `layers` is not one known name for each layer.

    Source: Gu and Dao 2023; thesis Eq. 3.35, and Fig. 3.25 for hybrids.

    Example:
        >>> Mamba(64, 128, 8, state=32, layers=["default"] * 3 + ["attention"] + ["default"] * 4)
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        *,
        state: int = 16,
        expansion: int = 2,
        tied: bool = True,
        layers: Sequence[LayerKind] | None = None,
        key_width: int | None = None,
    ) -> None:
        super().__init__()
        mixers = _hybrid(lambda: MambaMixer(width, state, expansion), width, depth, layers, key_width)
        self.backbone = Backbone(vocabulary, width, mixers)
        self.lm_head = _head(self.backbone.embeddings, tied)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, n) to logits (B, n, v)."""
        return self.lm_head(self.backbone(tokens))


@NETWORKS.register("mamba2", source="Dao and Gu 2024")
class Mamba2(nn.Module):
    """Mamba-2. Tokens (B, n) to logits (B, n, v).

    Names and shapes are those of `transformers.Mamba2ForCausalLM`; hybrids as for `Mamba`.

    Args:
        vocabulary: v.
        width: d.
        depth: L, blocks.
        state: N.
        head_width: k of the state-space heads, divides the inner channels.
        groups: G, heads of one group share B and C.
        expansion: inner channels per channel.
        tied: the output projection is the embedding.
        layers: "default", "attention" or "linear_attention" for each layer; None for "default" in all.
        key_width: of the queries and keys of attention layers; d if None.

    Raises:
        UsageError: if `layers` is not one known name for each layer, or sizes do not divide as required.

    Source: Dao and Gu 2024.

    Example:
        >>> Mamba2(64, 128, 4, state=128, head_width=64)
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        *,
        state: int = 128,
        head_width: int = 64,
        groups: int = 1,
        expansion: int = 2,
        tied: bool = False,
        layers: Sequence[LayerKind] | None = None,
        key_width: int | None = None,
    ) -> None:
        super().__init__()
        mixers = _hybrid(
            lambda: Mamba2Mixer(width, state, head_width, groups, expansion), width, depth, layers, key_width
        )
        self.backbone = Backbone(vocabulary, width, mixers)
        self.lm_head = _head(self.backbone.embeddings, tied)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, n) to logits (B, n, v)."""
        return self.lm_head(self.backbone(tokens))


class TransformerBlock(nn.Module):
    """Pre-norm block on tokens (B, n, d): causal attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, rotary=rotary)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@NETWORKS.register("transformer", source="Vaswani et al. 2017; thesis 3.2.6")
class CausalTransformer(nn.Module):
    """Transformer decoder. Tokens (B, n) to logits (B, n, v), which the tied embedding computes.

    Args:
        vocabulary: v.
        width: d.
        depth: L, blocks.
        heads: H, divides d.
        positions: "sinusoidal" codes added to the embedding, scaled to its initial deviation, or "rotary".
        context: the largest n with sinusoidal positions, which are computed up to there.
        expansion: the MLP's hidden units per channel.
        embedding_dropout: probability that the vector of a token is dropped in training, see `TokenEmbedding`.

    Raises:
        UsageError: if sizes do not divide as required or an argument is invalid; in `forward`, if a sequence is longer
            than `context`.

    Source: Vaswani et al. 2017; thesis 3.2.6.

    Example:
        >>> CausalTransformer(64, 128, 4, heads=4, positions="rotary")
    """

    codes: Tensor

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        *,
        positions: Literal["sinusoidal", "rotary"] = "sinusoidal",
        context: int = 1024,
        expansion: int = 4,
        embedding_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        choice("positions", positions, ("sinusoidal", "rotary"))
        self.context = context if positions == "sinusoidal" else None
        if self.context is not None:
            scale = EMBEDDING_STD * 2**0.5  # codes have the mean square 1/2
            self.register_buffer("codes", scale * sinusoidal_positions(context, None, width), persistent=False)
        self.embeddings = TokenEmbedding(vocabulary, width, embedding_dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, expansion * width, positions == "rotary") for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = TiedHead(self.embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (B, n) to logits (B, n, v)."""
        x = self.embeddings(tokens)
        if self.context is not None:
            if tokens.shape[1] > self.context:
                raise UsageError(
                    f"tokens: expected at most {self.context} in a sequence, the positions of this network, found "
                    f"{tokens.shape[1]}; build it with a larger `context` or rotary positions"
                )
            x = x + self.codes[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
