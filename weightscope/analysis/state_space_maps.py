"""Maps of state-space layers: what each token adds to each later one, the counterpart of attention maps."""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.names import listing
from weightscope._util.results import Result
from weightscope._util.threads import one_thread
from weightscope.anatomy import named_tensors, ssms
from weightscope.anatomy.effective import refuse_adapters
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.networks.sequences import Mamba, Mamba2, Mamba2Mixer, MambaMixer, Selected

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class StateSpaceLayer:
    """One state-space layer on sequences of n tokens."""

    # number of the network's layer, from its path: 1 and 3 in a hybrid with attention in 0 and 2; the index among the
    # state-space layers if their paths have no growing numbers
    layer: int
    name: str  # path of the mixer
    map: np.ndarray  # (n, n), (1/D) sum_d M_d, mean over sequences; rows are outputs, columns inputs
    mask: np.ndarray  # (n, n), mean over d, n and sequences of prod_k exp(Delta[k, d] A[d, n]): 1 on the diagonal
    error: float  # largest difference of the layer's output from the one that its maps give, over the largest output

    def statistics(self) -> dict[str, Any]:
        """Numbers of the maps.

        `reach` is the mean of the mask below the diagonal, 1 if no state decays (linear attention), 0 if all do;
        `self` the share of sum |map| on the diagonal; `offset` the distance i - j > 0 with the largest mean |map|, None
        for a single token; `offset_share` the share of sum |map| at this distance.
        """
        weights, n = np.abs(self.map), len(self.map)
        total = float(weights.sum()) or 1.0
        means = [float(weights.diagonal(-k).mean()) for k in range(1, n)]
        offset = 1 + int(np.argmax(means)) if means else None
        return {
            "layer": self.layer,
            "reach": float(self.mask[np.tril_indices(n, -1)].mean()) if n > 1 else 1.0,
            "self": float(np.trace(weights)) / total,
            "offset": offset,
            "offset_share": 0.0 if offset is None else float(weights.diagonal(-offset).sum()) / total,
        }


@dataclass(frozen=True, eq=False, repr=False)
class StateSpaceMaps(Result):
    """Mean maps and masks of every state-space layer of a model; rows are `StateSpaceLayer.statistics`."""

    layers: tuple[StateSpaceLayer, ...]
    sequences: int  # B
    tokens: int  # n

    columns: ClassVar = {
        "layer": "{layer}",
        "reach": "{reach:.3f}",
        "on itself": "{self:.1%}",
        "strongest distance": "{offset}",
        "share": "{offset_share:.1%}",
    }

    def summary(self) -> str:
        return f"maps of {len(self.layers)} state-space layers on {self.sequences} sequences of {self.tokens} tokens"

    def rows(self) -> list[dict[str, Any]]:
        return [layer.statistics() for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        layers = [{"name": layer.name, "error": layer.error, **layer.statistics()} for layer in self.layers]
        return {"sequences": self.sequences, "tokens": self.tokens, "layers": layers}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Draw the mean maps and, below them, the mean masks, layers across (thesis Fig. 3.24 and 3.34)."""
        from weightscope import plots

        if title is None:
            reach = [row["reach"] for row in self.rows()]
            title = f"State-space maps over {self.sequences} sequences; mean of the masks {np.mean(reach):.2f}"
        figure = plots.matrix_grid(
            [[layer.map for layer in self.layers], [layer.mask for layer in self.layers]],
            row_labels=["map", "mask"],
            column_labels=[f"layer {layer.layer}" for layer in self.layers],
            quantity="what a token (across) adds to a later one (down), mean over channels",
            title=title,
        )
        return plots.finished(figure, path)


_EMBEDDING = "backbone.embeddings.weight"


def rebuilt(model: Any, config: Mapping[str, Any] | None = None) -> nn.Module:
    """A `Mamba` or `Mamba2` with a model's weights; sizes are those of its tensors."""
    tensors = named_tensors(model, config)
    refuse_adapters(model)
    parts = ssms(tensors)
    ours = {_our_name(name): name for name in tensors.names}
    if _EMBEDDING not in ours:
        raise AnatomyError(f"expected a Mamba model with `{_EMBEDDING}`, found {listing(list(ours), 4)}")
    vocabulary, width = tensors.shape(ours[_EMBEDDING])
    head = ours.get("lm_head.weight", ours[_EMBEDDING])
    tied = tensors.identity(head) == tensors.identity(ours[_EMBEDDING])
    first, expansion = parts[0], parts[0].channels // width
    with torch.device("meta"):
        if first.version == 1:
            network: nn.Module = Mamba(vocabulary, width, len(parts), state=first.state, expansion=expansion, tied=tied)
        else:
            sizes: dict[str, Any] = {"state": first.state, "groups": first.groups}
            sizes["head_width"] = first.channels // first.heads
            network = Mamba2(vocabulary, width, len(parts), expansion=expansion, tied=tied, **sizes)
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if tied:
        ours["lm_head.weight"] = ours[_EMBEDDING]
    found = {name: tuple(tensors.shape(theirs)) for name, theirs in ours.items()}
    if odd := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise AnatomyError(
            f"`{odd[0]}`: expected {wanted.get(odd[0], 'no such tensor')} in a Mamba model of these sizes, found "
            f"{found.get(odd[0], 'none')}; hybrids and other variants can be given as modules of weightscope only"
        )
    values = {name: tensors.get(theirs).detach().cpu().double() for name, theirs in ours.items()}
    network.load_state_dict({name: nn.Parameter(v, requires_grad=False) for name, v in values.items()}, assign=True)
    return network


def _our_name(name: str) -> str:
    if not name.startswith(("backbone.", "lm_head.")):
        name = f"backbone.{name}"
    return re.sub(r"^backbone\.embedding\.", "backbone.embeddings.", name)


_AT_ONCE = 1 << 22  # entries of the maps of a few channels: 32 MB
_MOST = 1 << 26  # entries of the maps of one channel: 512 MiB for each of a few copies
_TOLERANCE = 1e-6  # of the output that maps give, relative to the largest output


@one_thread()
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

    AnatomyError if the model has no state-space layer or cannot be rebuilt from its tensors; DataError if the tokens
    are not (B, n), or an output is not reproduced by the maps; UsageError if a token is outside the vocabulary, or
    B n^2 is above 2^26.

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
    network = (copy.deepcopy(model) if has_state_spaces(model) else rebuilt(model, config)).cpu().double().eval()
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


def has_state_spaces(model: Any) -> bool:
    """Whether a model is a module with layers of weightscope's Mamba or Mamba-2."""
    return isinstance(model, nn.Module) and any(isinstance(m, MambaMixer | Mamba2Mixer) for m in model.modules())


def check_size(sequences: int, tokens: int) -> None:
    """Refuse tokens (B, n) whose maps, B n^2 numbers for a channel, would not fit into memory."""
    if sequences * tokens * tokens > _MOST:
        raise UsageError(
            f"tokens: expected at most {math.isqrt(_MOST // sequences)} in a sequence for maps of B = {sequences}, "
            f"found {tokens}; use shorter sequences, or fewer"
        )


def _numbers(paths: list[str]) -> list[int]:
    """The first number in each path, which is that of the network's layer; or 0, 1, ... unless these are growing."""
    found = [next((int(part) for part in path.split(".") if part.isdecimal()), -1) for path in paths]
    return found if found[0] >= 0 and found == sorted(set(found)) else list(range(len(paths)))


def _layer(number: int, name: str, mixer: MambaMixer | Mamba2Mixer, x: Tensor, expected: Tensor) -> StateSpaceLayer:
    selected = mixer.select(x)
    y = torch.empty_like(selected.x)
    mean = mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    for start, maps, masks in channel_maps(selected):
        here = slice(start, start + maps.shape[1])
        y[:, :, here] = torch.einsum("bdij,bjd->bid", maps, selected.x[:, :, here])
        mean, mask = mean + maps.mean(0).sum(0), mask + masks.mean(0).sum(0)
    output = mixer.finish(y + selected.x * selected.skip, selected.gate)
    error = float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    if not error <= _TOLERANCE:
        raise DataError(f"`{name}`: the maps do not give the layer's output: it differs by {error:.1e} of its size")
    channels = y.shape[2]
    return StateSpaceLayer(number, name, (mean / channels).numpy(), (mask / channels).numpy(), error)


def channel_maps(s: Selected) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first channel, maps M_d (B, c, n, n), masks (B, c, n, n)) of a few channels at a time."""
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
