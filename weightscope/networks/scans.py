"""Scans of state-space models: Mamba's over segments of the sequence at once, Mamba-2's in blocks of tokens."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weightscope._util.checks import divided
from weightscope.errors import UsageError

Kernel = tuple[Callable[..., Tensor], Callable[..., Any]]
"""The scans (T, B, n, p) of u = delta x, delta, A, B and C of T networks, and the gradients of those given dL/dy."""

_AT_ONCE = 65_536  # states of one vector operation: enough to hide its call, few enough for the cache (measured)


def selective_scan(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: int | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Run a diagonal state-space model whose step, input and output maps depend on the token.

        h_i[d, n] = exp(delta_i[d] A[d, n]) h_{i-1}[d, n] + delta_i[d] B_i[n] x_i[d],      h_0 = 0
        y_i[d]    = sum_n C_i[n] h_i[d, n]

    The sequence is cut into segments that are run side by side, from zero; then each is run again from the state in
    which the one before ends. States are kept for the backward pass, which runs the adjoint recurrence in the same way.
    `torch.vmap` runs the scans of many networks, each with its own rates, as one.

    Inputs x and y (B, n, p): batch, tokens, channels; steps (B, n, p) >= 0; rates A (p, N), < 0 for states that decay;
    maps B and C (B, n, N). `segments`, how many are run at once, affects speed only, except for rounding; None for a
    number that fits the processor's cache. Differentiable once with respect to all five tensors. A `kernel` takes the
    place of torch's operations.

    UsageError if shapes do not fit each other; nothing is broadcast.

    Source: Gu and Dao 2023, Algorithm 2 and Eq. 2a; thesis Eq. 3.30-3.33.

    Example:
        >>> selective_scan(x, F.softplus(step), -torch.exp(a_log), b, c).shape == x.shape
        True
    """
    _check_shapes("(B, n, p), (B, n, p), (p, N), (B, n, N), (B, n, N)", x, delta, a, b, c)
    y, _ = _Scan.apply(*(value.unsqueeze(0) for value in (delta * x, delta, a, b, c)), segments, kernel)
    return y.squeeze(0)


def _check_shapes(layout: str, *values: Tensor) -> None:
    """Refuse x, delta, A, B and C in which a letter of the layout has two lengths."""
    sizes: dict[str, int] = {}
    for letters, value in zip(layout.strip("()").split("), ("), values, strict=True):
        axes = letters.strip(",").split(", ")
        if len(axes) != value.ndim or any(
            sizes.setdefault(*axis) != axis[1] for axis in zip(axes, value.shape, strict=True)
        ):
            found = ", ".join(str(tuple(value.shape)) for value in values)
            raise UsageError(f"x, delta, A, B, C: expected the shapes {layout}, found {found}")


def _folded(value: Tensor, segments: int) -> Tensor:
    """(T, B, n, w) -> (steps, T, S B, w), padded to S equal segments by tokens without a step, which change nothing."""
    networks, batch, tokens, width = value.shape
    value = F.pad(value, (0, 0, 0, -tokens % segments)).reshape(networks, batch, segments, -1, width)
    return value.permute(3, 0, 2, 1, 4).reshape(-1, networks, segments * batch, width)


def _unfolded(value: Tensor, segments: int, tokens: int) -> Tensor:
    """The inverse of `_folded`."""
    steps, networks, both, width = value.shape
    value = value.reshape(steps, networks, segments, -1, width).permute(1, 3, 2, 0, 4)
    return value.reshape(networks, both // segments, -1, width)[:, :, :tokens]


class _Scan(torch.autograd.Function):
    """The scans of T networks' inputs u = delta x; the state of one step is (T, S B, N, p), channels innermost."""

    @staticmethod
    def forward(
        u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, segments: int | None, kernel: Kernel | None
    ) -> tuple[Tensor, Tensor]:
        """Map (T, B, n, p) to (T, B, n, p), and to all states (steps + 1, T, S B, N, p); a kernel keeps none."""
        if kernel is not None:
            return kernel[0](u, delta, a, b, c), u.new_empty(0)
        networks, batch, tokens, channels = u.shape
        if segments is None:
            segments = max(1, _AT_ONCE // (networks * batch * channels * a.shape[-1]))
        segments = min(segments, tokens)
        us, deltas, bs, cs = (_folded(value, segments) for value in (u, delta, b, c))
        states = us.new_empty(len(us) + 1, networks, segments * batch, a.shape[-1], channels)
        y = torch.empty_like(us)
        for part in _parts(states):
            _run(us[:, part], deltas[:, part], a[part], bs[:, part], cs[:, part], states[:, part], y[:, part], segments)
        return _unfolded(y, segments, tokens), states

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *values, _, ctx.kernel = inputs
        _, states = output
        ctx.save_for_backward(*values, states)
        ctx.mark_non_differentiable(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Run the adjoint recurrence of each network."""
        *values, states = ctx.saved_tensors
        if ctx.kernel is not None:
            return *ctx.kernel[1](grad, *values), None, None
        u, delta, a, b, c = values
        segments, tokens = states.shape[2] // u.shape[1], u.shape[2]
        us, deltas, bs, cs, grads = (_folded(value, segments) for value in (u, delta, b, c, grad))
        found = [torch.empty_like(value) for value in (us, deltas, bs, cs)]
        d_a = torch.empty_like(a)
        for part in _parts(states):
            inputs = us[:, part], deltas[:, part], a[part], bs[:, part], cs[:, part]
            d_a[part] = _run_back(
                *inputs, states[:, part], grads[:, part], tuple(value[:, part] for value in found), segments
            )
        d_u, d_delta, d_b, d_c = (_unfolded(value, segments, tokens) for value in found)
        return d_u, d_delta, d_a, d_b, d_c, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, None]]:
        """Fold the axis that is mapped into that of the networks."""
        *values, segments, kernel = inputs
        folded = []
        for value, dim in zip(values, in_dims, strict=False):
            value = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            folded.append(value.flatten(0, 1))
        y, states = _Scan.apply(*folded, segments, kernel)
        return (y.unflatten(0, (info.batch_size, -1)), states), (0, None)


def _parts(states: Tensor) -> list[slice]:
    """Networks that are run together, so that the states of one step fit the processor's cache."""
    networks, each = states.shape[1], states[0, 0].numel()
    size = max(1, _AT_ONCE // each)
    return [slice(start, start + size) for start in range(0, networks, size)]


def _run(
    us: Tensor, deltas: Tensor, a: Tensor, bs: Tensor, cs: Tensor, states: Tensor, y: Tensor, segments: int
) -> None:
    """Fill `states` and `y`, from inputs (steps, T, S B, .) and rates (T, p, N)."""
    rates = a.mT.contiguous().unsqueeze(1)  # (T, 1, N, p)
    decay, inflow = torch.empty_like(states[0]), torch.empty_like(states[0])

    def step(i: int, before: Tensor, after: Tensor) -> None:
        torch.mul(deltas[i].unsqueeze(2), rates, out=decay).exp_()
        torch.mul(bs[i].unsqueeze(3), us[i].unsqueeze(2), out=inflow)
        torch.addcmul(inflow, decay, before, out=after)

    states[0] = 0
    if segments > 1:
        end = torch.zeros_like(decay)
        for i in range(len(us)):
            step(i, end, end)
        states[0] = _carried(end, _decay_of(deltas, rates), segments)
    for i in range(len(us)):
        step(i, states[i], states[i + 1])
        torch.sum(torch.mul(states[i + 1], cs[i].unsqueeze(3), out=inflow), 2, out=y[i])


def _run_back(
    us: Tensor,
    deltas: Tensor,
    a: Tensor,
    bs: Tensor,
    cs: Tensor,
    states: Tensor,
    grads: Tensor,
    found: tuple[Tensor, ...],
    segments: int,
) -> Tensor:
    """Fill the gradients `found` of u, delta, B, C; returns that of A, (T, p, N)."""
    # The gradient of the state is G_i = C_i dL/dy_i^T + decay_{i+1} G_{i+1}, from the last token on.
    rates = a.mT.contiguous().unsqueeze(1)
    decay, flow = torch.empty_like(states[0]), torch.zeros_like(states[0])
    order = list(reversed(range(len(us))))
    if segments > 1:
        for i in order:
            torch.mul(deltas[i].unsqueeze(2), rates, out=decay).exp_()
            flow.addcmul_(cs[i].unsqueeze(3), grads[i].unsqueeze(2)).mul_(decay)
        flow = _carried(flow, _decay_of(deltas, rates), segments, backwards=True)
    d_u, d_delta, d_b, d_c = found
    d_rates, product = torch.zeros_like(flow), torch.empty_like(flow)
    for i in order:
        torch.mul(deltas[i].unsqueeze(2), rates, out=decay).exp_()
        torch.sum(torch.mul(states[i + 1], grads[i].unsqueeze(2), out=product), 3, out=d_c[i])
        flow.addcmul_(cs[i].unsqueeze(3), grads[i].unsqueeze(2))
        torch.sum(torch.mul(flow, us[i].unsqueeze(2), out=product), 3, out=d_b[i])
        torch.sum(torch.mul(flow, bs[i].unsqueeze(3), out=product), 2, out=d_u[i])
        torch.mul(flow.mul_(decay), states[i], out=product)  # the gradient of delta A
        d_rates.addcmul_(product, deltas[i].unsqueeze(2))
        torch.sum(product.mul_(rates), 2, out=d_delta[i])
    return d_rates.sum(1).mT


def _decay_of(deltas: Tensor, rates: Tensor) -> Tensor:
    """exp(A sum of delta), the decay over each segment, (T, S B, N, p)."""
    return torch.exp(deltas.sum(0).unsqueeze(2) * rates)


def _carried(ends: Tensor, decay: Tensor, segments: int, backwards: bool = False) -> Tensor:
    """The state in which each segment starts, given where each ends from zero; from the last one if `backwards`."""
    ends, decay = (value.unflatten(1, (segments, -1)).transpose(0, 1) for value in (ends, decay))
    starts = torch.zeros_like(ends)
    order = list(reversed(range(segments))) if backwards else list(range(segments))
    for before, after in itertools.pairwise(order):
        starts[after] = torch.addcmul(ends[before], decay[before], starts[before])
    return starts.transpose(0, 1).flatten(1, 2)


# --- blocks: attention within a block of tokens, a recurrence between blocks ------------------------------------------


def block_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *, block: int = 64) -> Tensor:
    """Run a state-space model with one rate for each head by the block decomposition of its matrix.

        h_i = exp(delta_i A) h_{i-1} + delta_i B_i x_i^T,      y_i = h_i^T C_i      in each head, h_i (N, k)

    Within a block, `y = (L * C B^T) (delta x)` with `L[i, j] = exp(A sum_{j < m <= i} delta_m)` for i >= j; the state
    at the end of each block is handed to the next. With A = 0 and delta = 1 this is linear attention with queries C,
    keys B and values x.

    Inputs x and y (B, n, H, k): batch, tokens, heads, width of a head; steps (B, n, H) >= 0; rates A (H,) <= 0; maps B
    and C (B, n, G, N), head h belongs to group `h // (H / G)`. `block`, tokens in a block, affects speed and memory
    only, except for rounding. UsageError if shapes do not fit each other or G does not divide H.

    Source: Dao and Gu 2024, section 6 and Listing 1; thesis 3.3.1.

    Example:
        >>> block_scan(values, torch.ones(2, 50, 1), torch.zeros(1), keys, queries)  # linear attention
    """
    _check_shapes("(B, n, H, k), (B, n, H), (H,), (B, n, G, N), (B, n, G, N)", x, delta, a, b, c)
    tokens, groups = x.shape[1], b.shape[2]
    divided("heads", x.shape[2], "groups", groups)
    block = min(block, tokens)
    short = -tokens % block
    # (B, blocks, block, ...), padded by tokens without a step, which leave the state as it is
    x, b, c = (F.pad(value, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, block)) for value in (x, b, c))
    delta = F.pad(delta, (0, 0, 0, short)).unflatten(1, (-1, block)).unflatten(-1, (groups, -1))
    u = x.unflatten(3, (groups, -1)) * delta.unsqueeze(-1)  # (B, blocks, block, G, H/G, k)
    log = (delta * a.view(groups, -1)).permute(0, 1, 3, 4, 2).cumsum(-1)  # (B, blocks, G, H/G, block)
    within = _decays(log) * torch.einsum("bmign,bmjgn->bmgij", c, b).unsqueeze(3)
    y = torch.einsum("bmgrij,bmjgrk->bmigrk", within, u)
    remaining = torch.exp(log[..., -1:] - log)
    ends = torch.einsum("bmjgn,bmgrj,bmjgrk->bmgrnk", b, remaining, u)
    decay, starts = log[..., -1, None, None].exp(), [torch.zeros_like(ends[:, 0])]  # where each block starts
    for m in range(ends.shape[1] - 1):
        starts.append(decay[:, m] * starts[-1] + ends[:, m])
    y = y + torch.einsum("bmign,bmgri,bmgrnk->bmigrk", c, log.exp(), torch.stack(starts, 1))
    return y.flatten(3, 4).flatten(1, 2)[:, :tokens]


def _decays(log: Tensor) -> Tensor:
    """L (..., block, block) of cumulated logarithms (..., block)."""
    size = log.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log.device).triu(1)
    return (log.unsqueeze(-1) - log.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
