"""The mixers of Mamba and Mamba-2, with transformers' names and shapes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope.errors import UsageError
from weightscope.networks.sequences.blockwise import block_scan
from weightscope.networks.sequences.segmented import selective_scan

TAPS = 4  # of the causal convolution, in all published models
STEPS = (0.001, 0.1)  # range of the initial softplus(b_Delta), log-uniform (Gu and Dao 2023, section 3.6)


class Selected(NamedTuple):
    """What a mixer computes from its input X (B, n, d), for channels p and states N.

    Attributes:
        x: inputs of the scan, (B, n, p).
        delta: steps, (B, n, p).
        a: rates, (p, N).
        b: input maps of each channel's group, (B, n, G, N); channel c belongs to group `c // (p / G)`.
        c: output maps, (B, n, G, N).
        skip: D, (p,).
        gate: before its SiLU, (B, n, p).
    """

    x: Tensor
    delta: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor
    gate: Tensor


class CausalConv1d(nn.Conv1d):
    """A depthwise convolution of tokens, (B, n, p) to (B, n, p), whose last tap is the present token.

    Args:
        channels: p.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, TAPS, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, n, p)."""
        return super().forward(F.pad(x.transpose(1, 2), (TAPS - 1, 0))).transpose(1, 2)


def initial_steps(heads: int) -> Tensor:
    """Initial b_Delta (H,): softplus(b_Delta) is log-uniform in `STEPS`."""
    low, high = (math.log(step) for step in STEPS)
    steps = torch.exp(low + (high - low) * torch.rand(heads))
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus


class StepProjection(nn.Linear):
    """`dt_proj`: rank -> channels, with weights U(-1, 1) / sqrt(rank) and biases of `initial_steps`."""

    def reset_parameters(self) -> None:
        """Set the initial weights and biases."""
        nn.init.uniform_(self.weight, -(self.in_features**-0.5), self.in_features**-0.5)
        with torch.no_grad():
            self.bias.copy_(initial_steps(self.out_features))


class MambaMixer(nn.Module):
    """Mamba's mixer, W3{SSM[SiLU(DWConv1d(W1 x))] * SiLU(W2 x)}: tokens (B, n, d) to (B, n, d).

    `in_proj` stacks W1 and W2, `x_proj` the low-rank step, W_B and W_C. Initial weights are those of `mamba_ssm`:
    A_log = log(1 .. N) in each channel (S4D), D = 1, steps in [0.001, 0.1], torch's defaults elsewhere.

    Args:
        width: d.
        state: N.
        expansion: p / d.

    Source: Gu and Dao 2023, sections 3.4 and 3.6; thesis Eq. 3.35.
    """

    def __init__(self, width: int, state: int = 16, expansion: int = 2) -> None:
        super().__init__()
        channels, self.rank, self.state = expansion * width, math.ceil(width / 16), state
        self.A_log = nn.Parameter(torch.empty(channels, state))
        self.D = nn.Parameter(torch.empty(channels))
        self.in_proj = nn.Linear(width, 2 * channels, bias=False)
        self.conv1d = CausalConv1d(channels)
        self.x_proj = nn.Linear(channels, self.rank + 2 * state, bias=False)
        self.dt_proj = StepProjection(self.rank, channels)
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set A_log and D to their initial values (layers have their own resets)."""
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.state + 1).log().expand_as(self.A_log))
            self.D.fill_(1)

    def select(self, x: Tensor) -> Selected:
        """The scan's inputs and operators for tokens (B, n, d)."""
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = F.silu(self.conv1d(inner))
        low, b, c = self.x_proj(inner).split([self.rank, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(low))
        return Selected(inner, delta, -self.A_log.exp(), b.unsqueeze(2), c.unsqueeze(2), self.D, gate)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and project the scan's output, (B, n, p) to (B, n, d)."""
        return self.out_proj(y * F.silu(gate))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        s = self.select(x)
        y = selective_scan(s.x, s.delta, s.a, s.b.squeeze(2), s.c.squeeze(2))
        return self.finish(y + s.x * s.skip, s.gate)


class GatedRMSNorm(nn.Module):
    """RMSNorm of `x SiLU(gate)` in each of G groups of channels, and one gain per channel.

    Args:
        width: channels.
        groups: G, divides the channels.
        eps: added to the mean square.
    """

    def __init__(self, width: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """Set the gain to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise (..., width)."""
        x = (x * F.silu(gate)).unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps).flatten(-2)


class Mamba2Mixer(nn.Module):
    """Mamba-2's mixer: heads with one rate and one step each; tokens (B, n, d) to (B, n, d).

    The rows of `in_proj` are [W2 | W1 | W_B | W_C | W_Delta], of widths [p, p, G N, G N, H]; the convolution covers the
    middle three. Initial weights are those of transformers: A_log = log(1 .. H), D = 1, steps in [0.001, 0.1], torch's
    defaults elsewhere.

    Args:
        width: d.
        state: N.
        head_width: k of the heads, divides p.
        groups: G, heads of one group share B and C; divides the heads.
        expansion: p / d.

    Raises:
        UsageError: if the sizes do not divide as required.

    Source: Dao and Gu 2024, section 7.
    """

    def __init__(self, width: int, state: int = 128, head_width: int = 64, groups: int = 1, expansion: int = 2) -> None:
        super().__init__()
        channels = expansion * width
        heads, rest = divmod(channels, head_width)
        if rest or heads % groups:
            raise UsageError(
                f"head_width must divide the {channels} inner channels, and groups the heads; "
                f"found head_width {head_width} and groups {groups}"
            )
        self.heads, self.n_groups, self.state_size = heads, groups, state  # by these names the anatomy finds them
        shared = 2 * groups * state
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.in_proj = nn.Linear(width, 2 * channels + shared + heads, bias=False)
        self.conv1d = CausalConv1d(channels + shared)
        self.norm = GatedRMSNorm(channels, groups)
        self.out_proj = nn.Linear(channels, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set dt_bias, A_log and D to their initial values (layers have their own resets)."""
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.heads + 1).log())
            self.D.fill_(1)
            self.dt_bias.copy_(initial_steps(self.heads))

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs (B, n, H, k), steps (B, n, H), B and C (B, n, G, N), gate (B, n, p)."""
        channels, shared = self.out_proj.in_features, self.n_groups * self.state_size
        gate, inner, step = self.in_proj(x).split([channels, channels + 2 * shared, self.heads], dim=-1)
        inner, b, c = F.silu(self.conv1d(inner)).split([channels, shared, shared], dim=-1)
        b, c = (value.unflatten(-1, (self.n_groups, self.state_size)) for value in (b, c))
        return inner.unflatten(-1, (self.heads, -1)), F.softplus(step + self.dt_bias), b, c, gate

    def select(self, x: Tensor) -> Selected:
        """The scan's inputs and operators for tokens (B, n, d), each head's rate and step in all of its channels."""
        inner, delta, b, c, gate = self._select(x)
        k = inner.shape[-1]
        a, skip = (
            (-self.A_log.exp()).repeat_interleave(k)[:, None].expand(-1, self.state_size),
            self.D.repeat_interleave(k),
        )
        return Selected(inner.flatten(2), delta.repeat_interleave(k, dim=-1), a, b, c, skip, gate)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gate, normalise and project the scan's output, (B, n, p) to (B, n, d)."""
        return self.out_proj(self.norm(y, gate))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, n, d) to (B, n, d)."""
        inner, delta, b, c, gate = self._select(x)
        y = block_scan(inner, delta, -self.A_log.exp(), b, c) + inner * self.D[:, None]
        return self.finish(y.flatten(2), gate)
