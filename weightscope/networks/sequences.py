"""Networks for sequences of tokens: Mamba, Mamba-2, hybrids with attention, and the Transformer.

The language models are made of blocks `x + mixer(norm(x))`; mixers have transformers' names and shapes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope._util.checks import choice, divided
from weightscope.errors import UsageError
from weightscope.networks.layers import TEMPERATURE, Mlp, sinusoidal_positions
from weightscope.networks.scans import Kernel, block_scan, selective_scan
from weightscope.recipe.networks import LayerKind

EMBEDDING_STD = 0.02  # of mamba_ssm and GPT-2
TAPS = 4  # of the causal convolution, in all published models
STEPS = (0.001, 0.1)  # range of the initial softplus(b_Delta), log-uniform (Gu and Dao 2023, section 3.6)


# --- causal attention, with softmax or linear, and rotary positions ---------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Rotate each pair of channels (i, i + k/2) of (..., n, k) by the angle t w_i, t = 0 .. n - 1.

    Products of two rotated vectors depend on the difference of their positions; w_i = 10,000^(-2 i / k).

    Source: Su et al. 2021, section 3.2, with the pairs of Llama.
    """
    tokens, width = x.shape[-2:]
    half = width // 2
    frequencies = TEMPERATURE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(tokens, dtype=torch.float64, device=x.device)[:, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class CausalAttention(nn.Module):
    """Multi-head self-attention to the present and past tokens, (B, n, d) to (B, n, d).

        softmax(mask(Q K^T / sqrt(k))) V in each head, then `o_proj`

    k is `key_width`, or d / H. With `rotary`, queries and keys are rotated by their position, which needs an even k.
    """

    is_causal = True

    def __init__(self, width: int, heads: int = 1, key_width: int | None = None, rotary: bool = False) -> None:
        super().__init__()
        head_width = divided("width", width, "heads", heads)
        key_width = head_width if key_width is None else key_width
        if rotary and key_width % 2:
            raise UsageError(f"rotary positions: expected queries and keys of even width, found {key_width}")
        self.num_heads, self.rope = heads, True if rotary else None  # by these names the anatomy finds them
        self.q_proj = nn.Linear(width, heads * key_width, bias=False)
        self.k_proj = nn.Linear(width, heads * key_width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in layers)  # (B, H, n, .)
        if self.rope:
            q, k = rotated(q), rotated(k)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Causal attention of one head without a softmax, (B, n, d) to (B, n, d), in time linear in n.

        mask(Q K^T / sqrt(k)) V, then `o_proj`

    k is `key_width`, the size of the state as N is in Mamba, or d.

    Source: Katharopoulos et al. 2020, section 3.2, without a kernel and a denominator; thesis Eq. 3.38 and Fig. 3.28.
    """

    def __init__(self, width: int, key_width: int | None = None) -> None:
        super().__init__()
        key_width = width if key_width is None else key_width
        self.q_proj = nn.Linear(width, key_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(2) for layer in (self.q_proj, self.k_proj, self.v_proj))  # (B, n, 1, .)
        step, rate = v.new_ones(v.shape[:3]), v.new_zeros(1)
        return self.o_proj(block_scan(v, step, rate, k, q / k.shape[-1] ** 0.5).squeeze(2))


# --- the mixers of Mamba and Mamba-2 ----------------------------------------------------------------------------------


class Selected(NamedTuple):
    """What a mixer computes from its input X (B, n, d), for channels p and states N."""

    x: Tensor  # inputs of the scan, (B, n, p)
    delta: Tensor  # steps, (B, n, p)
    a: Tensor  # rates, (p, N)
    b: Tensor  # input maps of each channel's group, (B, n, G, N); channel c belongs to group `c // (p / G)`
    c: Tensor  # output maps, (B, n, G, N)
    skip: Tensor  # D, (p,)
    gate: Tensor  # before its SiLU, (B, n, p)


def causal_convolution(layer: nn.Conv1d, x: Tensor) -> Tensor:
    """A depthwise convolution of tokens, (B, n, p) to (B, n, p), whose last tap is the present token."""
    return layer(F.pad(x.transpose(1, 2), (TAPS - 1, 0))).transpose(1, 2)


def initial_steps(heads: int) -> Tensor:
    """Initial b_Delta (H,): softplus(b_Delta) is log-uniform in `STEPS`."""
    low, high = (math.log(step) for step in STEPS)
    steps = torch.exp(low + (high - low) * torch.rand(heads))
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus


class StepProjection(nn.Linear):
    """`dt_proj`: rank -> channels, with weights U(-1, 1) / sqrt(rank) and biases of `initial_steps`."""

    def reset_parameters(self) -> None:
        if self.bias.is_meta:  # as in `ViT.reset_parameters`
            return
        nn.init.uniform_(self.weight, -(self.in_features**-0.5), self.in_features**-0.5)
        with torch.no_grad():
            self.bias.copy_(initial_steps(self.out_features))


class MambaMixer(nn.Module):
    """Mamba's mixer, W3{SSM[SiLU(DWConv1d(W1 x))] * SiLU(W2 x)}: tokens (B, n, d) to (B, n, d).

    N is `state`, p / d `expansion`. `in_proj` stacks W1 and W2, `x_proj` the low-rank step, W_B and W_C. Initial
    weights are those of `mamba_ssm`: A_log = log(1 .. N), D = 1, steps in [0.001, 0.1], torch's defaults elsewhere.

    Source: Gu and Dao 2023, sections 3.4 and 3.6; thesis Eq. 3.35.
    """

    kernel: Kernel | None = None  # of the scan; torch's operations by default

    def __init__(self, width: int, state: int = 16, expansion: int = 2) -> None:
        super().__init__()
        channels, self.rank, self.state = expansion * width, math.ceil(width / 16), state
        self.A_log = nn.Parameter(torch.empty(channels, state))
        self.D = nn.Parameter(torch.empty(channels))
        self.in_proj = nn.Linear(width, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels)
        self.x_proj = nn.Linear(channels, self.rank + 2 * state, bias=False)
        self.dt_proj = StepProjection(self.rank, channels)
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.state + 1).log().expand_as(self.A_log))
            self.D.fill_(1)

    def select(self, x: Tensor) -> Selected:
        """The scan's inputs and operators for tokens (B, n, d)."""
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = F.silu(causal_convolution(self.conv1d, inner))
        low, b, c = self.x_proj(inner).split([self.rank, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(low))
        return Selected(inner, delta, -self.A_log.exp(), b.unsqueeze(2), c.unsqueeze(2), self.D, gate)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and project the scan's output, (B, n, p) to (B, n, d)."""
        return self.out_proj(y * F.silu(gate))

    def forward(self, x: Tensor) -> Tensor:
        s = self.select(x)
        y = selective_scan(s.x, s.delta, s.a, s.b.squeeze(2), s.c.squeeze(2), kernel=self.kernel)
        return self.finish(y + s.x * s.skip, s.gate)


class GatedRMSNorm(nn.Module):
    """RMSNorm of `x SiLU(gate)` in each of G groups of channels, and one gain per channel."""

    def __init__(self, width: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = (x * F.silu(gate)).unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps).flatten(-2)


class Mamba2Mixer(nn.Module):
    """Mamba-2's mixer: heads with one rate and one step each; tokens (B, n, d) to (B, n, d).

    The rows of `in_proj` are [W2 | W1 | W_B | W_C | W_Delta], of widths [p, p, G N, G N, H]; the convolution covers the
    middle three. N is `state`, p / d `expansion`; heads of one of the G groups share B and C. Initial weights are those
    of transformers: A_log = log(1 .. H), D = 1, steps in [0.001, 0.1], torch's defaults elsewhere.

    Source: Dao and Gu 2024, section 7.
    """

    def __init__(self, width: int, state: int = 128, head_width: int = 64, groups: int = 1, expansion: int = 2) -> None:
        super().__init__()
        channels = expansion * width
        heads = divided("expansion * width", channels, "head_width", head_width)
        divided("heads", heads, "groups", groups)
        self.heads, self.n_groups, self.state_size = heads, groups, state  # by these names the anatomy finds them
        shared = 2 * groups * state
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.in_proj = nn.Linear(width, 2 * channels + shared + heads, bias=False)
        self.conv1d = nn.Conv1d(channels + shared, channels + shared, TAPS, groups=channels + shared)
        self.norm = GatedRMSNorm(channels, groups)
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.A_log.is_meta:
            return
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.heads + 1).log())
            self.D.fill_(1)
            self.dt_bias.copy_(initial_steps(self.heads))

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs (B, n, H, k), steps (B, n, H), B and C (B, n, G, N), gate (B, n, p)."""
        channels, shared = self.out_proj.in_features, self.n_groups * self.state_size
        gate, inner, step = self.in_proj(x).split([channels, channels + 2 * shared, self.heads], dim=-1)
        inner, b, c = F.silu(causal_convolution(self.conv1d, inner)).split([channels, shared, shared], dim=-1)
        b, c = (value.unflatten(-1, (self.n_groups, self.state_size)) for value in (b, c))
        return inner.unflatten(-1, (self.heads, -1)), F.softplus(step + self.dt_bias), b, c, gate

    def select(self, x: Tensor) -> Selected:
        """The scan's inputs and operators for tokens (B, n, d), each head's rate and step in all of its channels."""
        inner, delta, b, c, gate = self._select(x)
        k = inner.shape[-1]
        a = (-self.A_log.exp()).repeat_interleave(k)[:, None].expand(-1, self.state_size)
        delta = delta.repeat_interleave(k, dim=-1)
        return Selected(inner.flatten(2), delta, a, b, c, self.D.repeat_interleave(k), gate)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate, normalise and project the scan's output, (B, n, p) to (B, n, d)."""
        return self.out_proj(self.norm(y, gate))

    def forward(self, x: Tensor) -> Tensor:
        inner, delta, b, c, gate = self._select(x)
        y = block_scan(inner, delta, -self.A_log.exp(), b, c) + inner * self.D[:, None]
        return self.finish(y.flatten(2), gate)


# --- language models --------------------------------------------------------------------------------------------------


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, initially normal with standard deviation 0.02.

    On a CPU, tokens outside the vocabulary are an error; not where `torch.vmap` runs many networks (`checks`), whose
    tokens are those of a recipe's source.

    In training, the whole vector of a token is 0 with probability r, wherever the token is in the batch, and divided by
    1 - r otherwise.

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
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.checks and tokens.device.type == "cpu" and tokens.numel():  # a GPU would wait for the numbers
            low, high = (int(value) for value in tokens.aminmax())
            if low < 0 or high >= self.num_embeddings:
                wrong = low if low < 0 else high
                raise UsageError(f"tokens: expected numbers from 0 to {self.num_embeddings - 1}, found {wrong}")
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
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    """Embedding, blocks and a final RMSNorm: tokens (B, n) to (B, n, d)."""

    def __init__(self, vocabulary: int, width: int, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embeddings = TokenEmbedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, mixer) for mixer in mixers)
        self.norm_f = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x)


class TiedHead(nn.Linear):
    """Logits of tokens, computed by the embedding's own weight."""

    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)
        self.weight = embeddings.weight

    def reset_parameters(self) -> None:
        """Leave the weight, which the embedding resets."""


class Hybrid(nn.Module):
    """Blocks of a default mixer, any of which may be attention of one head without positions, as in the thesis."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        default: Callable[[], nn.Module],
        layers: Sequence[LayerKind] | None,
        key_width: int | None,
        tied: bool,
    ) -> None:
        super().__init__()
        kinds = ("default",) * depth if layers is None else tuple(layers)
        if len(kinds) != depth:
            raise UsageError(f"layers: expected {depth} names, one for each layer, found {len(kinds)}")
        made = {
            "default": default,
            "attention": lambda: CausalAttention(width, key_width=key_width),
            "linear_attention": lambda: LinearAttention(width, key_width),
        }
        mixers = [made[choice("layers", kind, made)]() for kind in kinds]
        self.backbone = Backbone(vocabulary, width, mixers)
        embeddings = self.backbone.embeddings
        self.lm_head = TiedHead(embeddings) if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.backbone(tokens))


class Mamba(Hybrid):
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
        mixer = partial(MambaMixer, width, state, expansion)
        super().__init__(vocabulary, width, depth, mixer, layers, key_width, tied)


class Mamba2(Hybrid):
    """Mamba-2. Tokens (B, n) to logits (B, n, v).

    Names and shapes are those of `transformers.Mamba2ForCausalLM`; arguments and hybrids as for `Mamba`.

    Args:
        head_width: k of the state-space heads, divides the inner channels.
        groups: G, heads of one group share B and C.

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
        mixer = partial(Mamba2Mixer, width, state, head_width, groups, expansion)
        super().__init__(vocabulary, width, depth, mixer, layers, key_width, tied)


class TransformerBlock(nn.Module):
    """Pre-norm block on tokens (B, n, d): causal attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, rotary=rotary)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CausalTransformer(nn.Module):
    """Transformer decoder. Tokens (B, n) to logits (B, n, v), which the tied embedding computes.

    Args:
        vocabulary: v.
        width: d.
        depth: L, blocks.
        heads: H, divides d.
        positions: "sinusoidal" codes added to the embedding, scaled to its initial std, or "rotary".
        context: the largest n with sinusoidal positions, which are computed up to there.
        expansion: the MLP's hidden units per channel.
        embedding_dropout: probability that the vector of a token is dropped in training, see `TokenEmbedding`.

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
