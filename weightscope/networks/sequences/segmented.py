"""The selective scan of Mamba: a recurrence over tokens, run over many segments of the sequence at once."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weightscope.errors import UsageError

_AT_ONCE = 65_536  # states of one vector operation: enough to hide its call, few enough for the cache (measured)


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *, segments: int | None = None) -> Tensor:
    """Run a diagonal state-space model whose step, input and output maps depend on the token.

        h_i[d, n] = exp(delta_i[d] A[d, n]) h_{i-1}[d, n] + delta_i[d] B_i[n] x_i[d],      h_0 = 0
        y_i[d]    = sum_n C_i[n] h_i[d, n]

    The sequence is cut into segments that are run side by side, from zero; then each is run again from the state in
    which the one before ends. States are kept for the backward pass, which runs the adjoint recurrence in the same way.

    Args:
        x: inputs (B, n, p): batch, tokens, channels.
        delta: steps (B, n, p), >= 0.
        a: rates A (p, N), < 0 for states that decay.
        b: input maps (B, n, N).
        c: output maps (B, n, N).
        segments: how many are run at once; affects speed only, except for rounding. None for a number that fits the
            processor's cache.

    Returns:
        y (B, n, p), differentiable once with respect to all five tensors.

    Raises:
        UsageError: if the shapes do not fit together.

    Source: Gu and Dao 2023, Algorithm 2 and Eq. 2a; thesis Eq. 3.30-3.33.

    Example:
        >>> selective_scan(x, F.softplus(step), -torch.exp(a_log), b, c).shape == x.shape
        True
    """
    (batch, tokens, channels), states = x.shape, a.shape[-1]
    expected = (x.shape, (channels, states), (batch, tokens, states), (batch, tokens, states))
    found = tuple(tuple(value.shape) for value in (delta, a, b, c))
    if found != tuple(map(tuple, expected)):
        raise UsageError(
            f"selective_scan: expected delta, A, B, C of {list(map(tuple, expected))}, found {list(found)}"
        )
    if segments is None:
        segments = max(1, _AT_ONCE // (batch * channels * states))
    segments = min(segments, tokens)
    short = -tokens % segments
    if short:  # tokens without a step leave the state as it is
        x, delta, b, c = (F.pad(value, (0, 0, 0, short)) for value in (x, delta, b, c))
    y: Tensor = _Scan.apply(delta * x, delta, a, b, c, segments)
    return y[:, :tokens] if short else y


def _folded(value: Tensor, segments: int) -> Tensor:
    """(B, n, w) -> (n / S, S B, w): step, then segment and batch."""
    batch, _, width = value.shape
    return value.reshape(batch, segments, -1, width).permute(2, 1, 0, 3).reshape(-1, segments * batch, width)


def _unfolded(value: Tensor, segments: int) -> Tensor:
    """The inverse of `_folded`."""
    steps, both, width = value.shape
    return value.reshape(steps, segments, -1, width).permute(2, 1, 0, 3).reshape(both // segments, -1, width)


class _Scan(torch.autograd.Function):
    """The scan of inputs u = delta x; the state of one step is (S B, N, p), channels innermost."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, segments: int) -> Tensor:
        """Map (B, n, p) to (B, n, p)."""
        us, deltas, bs, cs = (_folded(value, segments) for value in (u, delta, b, c))
        rates = a.T.contiguous()  # (N, p)
        steps, both, width = us.shape
        states = us.new_empty(steps + 1, both, len(rates), width)
        decay, inflow = torch.empty_like(states[0]), torch.empty_like(states[0])

        def step(i: int, before: Tensor, after: Tensor) -> None:
            torch.mul(deltas[i].unsqueeze(1), rates, out=decay).exp_()
            torch.mul(bs[i].unsqueeze(2), us[i].unsqueeze(1), out=inflow)
            torch.addcmul(inflow, decay, before, out=after)

        start = torch.zeros_like(decay)
        if segments > 1:
            end = torch.zeros_like(decay)
            for i in range(steps):
                step(i, end, end)
            start = _carried(end, _decay_of(deltas, rates), segments)
        states[0] = start
        y = torch.empty_like(us)
        for i in range(steps):
            step(i, states[i], states[i + 1])
            torch.sum(torch.mul(states[i + 1], cs[i].unsqueeze(2), out=inflow), 1, out=y[i])
        ctx.save_for_backward(us, deltas, rates, bs, cs, states)
        ctx.segments = segments
        return _unfolded(y, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Run the gradient of the state, G_i = C_i dL/dy_i^T + decay_{i+1} G_{i+1}, from the last token on."""
        us, deltas, rates, bs, cs, states = ctx.saved_tensors
        segments, steps = ctx.segments, len(us)
        grads = _folded(grad, segments)
        decay, flow = torch.empty_like(states[0]), torch.zeros_like(states[0])
        if segments > 1:
            for i in reversed(range(steps)):
                torch.mul(deltas[i].unsqueeze(1), rates, out=decay).exp_()
                flow.addcmul_(cs[i].unsqueeze(2), grads[i].unsqueeze(1)).mul_(decay)
            flow = _carried(flow, _decay_of(deltas, rates), segments, backwards=True)
        d_u, d_delta, d_b, d_c = (torch.empty_like(value) for value in (us, deltas, bs, cs))
        d_rates, product = torch.zeros_like(flow), torch.empty_like(flow)
        for i in reversed(range(steps)):
            torch.mul(deltas[i].unsqueeze(1), rates, out=decay).exp_()
            torch.sum(torch.mul(states[i + 1], grads[i].unsqueeze(1), out=product), 2, out=d_c[i])
            flow.addcmul_(cs[i].unsqueeze(2), grads[i].unsqueeze(1))
            torch.sum(torch.mul(flow, us[i].unsqueeze(1), out=product), 2, out=d_b[i])
            torch.sum(torch.mul(flow, bs[i].unsqueeze(2), out=product), 1, out=d_u[i])
            torch.mul(flow.mul_(decay), states[i], out=product)  # the gradient of delta A
            d_rates.addcmul_(product, deltas[i].unsqueeze(1))
            torch.sum(product.mul_(rates), 1, out=d_delta[i])
        d_u, d_delta, d_b, d_c = (_unfolded(value, segments) for value in (d_u, d_delta, d_b, d_c))
        return d_u, d_delta, d_rates.sum(0).T, d_b, d_c, None


def _decay_of(deltas: Tensor, rates: Tensor) -> Tensor:
    """exp(A sum of delta), the decay over each segment, (S B, N, p)."""
    return torch.exp(deltas.sum(0).unsqueeze(1) * rates)


def _carried(ends: Tensor, decay: Tensor, segments: int, backwards: bool = False) -> Tensor:
    """The state in which each segment starts, given where each ends from zero; from the last one if `backwards`."""
    ends, decay = (value.unflatten(0, (segments, -1)) for value in (ends, decay))
    starts = torch.zeros_like(ends)
    order = list(reversed(range(segments))) if backwards else list(range(segments))
    for before, after in itertools.pairwise(order):
        torch.addcmul(ends[before], decay[before], starts[before], out=starts[after])
    return starts.flatten(0, 1)
