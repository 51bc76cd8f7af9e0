"""Maps of state-space layers from a network, or a checkpoint, and tokens."""

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weightscope.analysis.state_space_maps.rebuilding import rebuilt
from weightscope.analysis.state_space_maps.result import StateSpaceLayer, StateSpaceMaps
from weightscope.errors import DataError, UsageError
from weightscope.networks.sequences import Mamba2Mixer, MambaMixer, Selected

_AT_ONCE = 1 << 22  # entries of the maps of a few channels: 32 MB
_MOST = 1 << 26  # entries of the maps of one channel: 512 MiB for each of a few copies
_TOLERANCE = 1e-6  # of the output that maps give, relative to the largest output


def state_space_maps(model: Any, tokens: Any, *, config: Mapping[str, Any] | None = None) -> StateSpaceMaps:
    """Mean maps and masks of every Mamba or Mamba-2 layer on sequences of tokens (thesis Fig. 3.24 and 3.34).

    Of every channel d, for i >= j,

        M_d[i, j] = sum_n C[i, n] prod_{k=j+1..i} exp(Delta[k, d] A[d, n]) Delta[j, d] B[j, n],

    so that `M_d x_d + D_d x_d`, gated and projected, is the layer's output; this is checked. (The thesis prints the
    mask of its equation as i <= j.) The network runs in float64.

    Args:
        model: a network with mixers of `weightscope.networks.sequences`; or, for transformers' and mamba_ssm's, a
            module, a mapping of tensors, a `Checkpoint`, a path or `hf://org/name`, which is rebuilt from its tensors.
        tokens: int64 (B, n).
        config: of the model, for mappings and files without one; Mamba-2 needs its number of groups if not 1.

    Raises:
        AnatomyError: if the model has no state-space layer, or cannot be rebuilt from its tensors.
        DataError: if the tokens are not (B, n), or an output is not reproduced by the maps.
        UsageError: if a token is outside the vocabulary, or B n^2 is above 2^26.

    Source: thesis Eq. 3.34 and 3.3.1; Ali et al. 2024.

    Example:
        >>> found = state_space_maps(mamba, tokens)
        >>> found.layers[1].map.shape
        (100, 100)
    """
    batch = torch.as_tensor(tokens)
    if batch.ndim != 2 or 0 in batch.shape or batch.is_floating_point():
        raise DataError(f"expected tokens (B, n) of an integer type, found {tuple(batch.shape)} of {batch.dtype}")
    check_size(*batch.shape)
    network = _network(model, config)
    mixers = {name: m for name, m in network.named_modules() if isinstance(m, (MambaMixer, Mamba2Mixer))}
    inputs: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        mixer.register_forward_hook(lambda _, x, y, name=name: inputs.__setitem__(name, (x[0], y)))
        for name, mixer in mixers.items()
    ]
    try:
        with torch.no_grad():
            network(batch.long())
            numbers = _numbers(list(mixers))
            layers = [_layer(i, name, mixers[name], *inputs[name]) for i, name in zip(numbers, mixers, strict=True)]
    finally:
        for hook in hooks:
            hook.remove()
    return StateSpaceMaps(tuple(layers), *batch.shape)


def check_size(sequences: int, tokens: int) -> None:
    """Refuse tokens (B, n) whose maps, B n^2 numbers for a channel, would not fit into memory.

    Raises:
        UsageError: naming the largest n.
    """
    if sequences * tokens * tokens > _MOST:
        raise UsageError(
            f"tokens: expected at most {math.isqrt(_MOST // sequences)} in a sequence for maps of B = {sequences}, "
            f"found {tokens}; use shorter sequences, or fewer"
        )


def _network(model: Any, config: Mapping[str, Any] | None) -> nn.Module:
    """A copy of the model in float64 on the CPU, made of our mixers."""
    ours = isinstance(model, nn.Module) and any(isinstance(m, (MambaMixer, Mamba2Mixer)) for m in model.modules())
    return (copy.deepcopy(model) if ours else rebuilt(model, config)).cpu().double().eval()


def _numbers(paths: list[str]) -> list[int]:
    """The first number in each path, which is that of the network's layer; or 0, 1, ... unless these are growing."""
    found = [next((int(part) for part in path.split(".") if part.isdecimal()), -1) for path in paths]
    growing = found[0] >= 0 and all(a < b for a, b in pairwise(found))
    return found if growing else list(range(len(paths)))


def _layer(number: int, name: str, mixer: MambaMixer | Mamba2Mixer, x: Tensor, expected: Tensor) -> StateSpaceLayer:
    selected = mixer.select(x)
    y = torch.empty_like(selected.x)
    mean = mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    for start, maps, masks in _chunks(selected):
        here = slice(start, start + maps.shape[1])
        y[:, :, here] = torch.einsum("bdij,bjd->bid", maps, selected.x[:, :, here])
        mean, mask = mean + maps.mean(0).sum(0), mask + masks.mean(0).sum(0)
    output = mixer.finish(y + selected.x * selected.skip, selected.gate)
    error = float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    if not error <= _TOLERANCE:
        raise DataError(f"`{name}`: the maps do not give the layer's output: it differs by {error:.1e} of its size")
    channels = y.shape[2]
    return StateSpaceLayer(number, name, (mean / channels).numpy(), (mask / channels).numpy(), error)


def channel_maps(selected: Selected) -> Tensor:
    """M_d of every channel, (B, p, n, n); see `state_space_maps`.

    Args:
        selected: of a mixer, `mixer.select(x)`.
    """
    return torch.cat([maps for _, maps, _ in _chunks(selected)], 1)


def _chunks(s: Selected) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first channel, maps (B, c, n, n), masks (B, c, n, n)) of a few channels at a time."""
    (batch, tokens, channels), states, groups = s.x.shape, s.a.shape[1], s.b.shape[2]
    size = max(1, _AT_ONCE // (batch * tokens * tokens))
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=s.x.device).triu(1)
    for start in range(0, channels, size):
        here = slice(start, min(start + size, channels))
        group = torch.arange(channels, device=s.x.device)[here] // (channels // groups)
        delta = s.delta[:, :, here].mT  # (B, c, n)
        time = delta.cumsum(-1)
        elapsed = time.unsqueeze(-1) - time.unsqueeze(-2)
        maps, masks = torch.zeros_like(elapsed), torch.zeros_like(elapsed)
        for n in range(states):
            decay = torch.exp((s.a[here, n, None, None] * elapsed).masked_fill(later, -torch.inf))
            product = torch.einsum("big,bjg->bgij", s.c[..., n], s.b[..., n])[:, group]
            maps += product * decay
            masks += decay / states
        yield start, maps * delta.unsqueeze(-2), masks
