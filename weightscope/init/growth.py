"""Growing a small trained network into a wider and deeper one that computes the same function."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from weightscope._util.checks import choice, number
from weightscope._util.names import listing
from weightscope.anatomy import attention, mlps
from weightscope.anatomy.places import Place, Source, places
from weightscope.errors import SpecError
from weightscope.init import _trained
from weightscope.init._trained import CONVOLUTIONS, chosen, counterparts, found_parts, layers_of
from weightscope.init.base import INITIALISERS, Generator, M, normal, put
from weightscope.init.selection import Layout
from weightscope.networks.layers import SumLinear

DEPTHS = ("identity", "stack")


@INITIALISERS.register(
    "net2net", source="Net2Net, Chen et al. 2016; bert2BERT, Chen et al. 2022", needs="a smaller network of the family"
)
def net2net_(
    module: M,
    source: Any,
    *,
    depth: str = "identity",
    noise: float = 0.01,
    components: str | Sequence[str] = "all",
    exclude: str | Sequence[str] | None = None,
    generator: Generator = None,
) -> M:
    """Initialise a network with a smaller trained one: channels, hidden units and heads are copied, blocks added.

        W'[i, j] = W[i mod m, j mod n] / c(j),   c(j): how many inputs of the larger layer copy input j mod n

    for a layer of m outputs and n inputs. Vectors, position embeddings, depthwise filters and statistics are copied
    without division; the factor b of a sum of inputs, `SumLinear`, is divided as W is. Added blocks are copies, too,
    block l of block l mod L; with "identity" the last layers of their residual branches are zero and the factors of
    their skip connections one, with "stack" (Gong et al. 2019) they are not.

    With `noise = 0` and "identity" the network computes the same function, if it normalises each channel by itself
    (BatchNorm) or its width is a multiple of the smaller one's (LayerNorm). Equal copies would stay equal, so each
    copied output of a matrix differs by noise relative to the matrix's standard deviation.

    Args:
        module: changed in place: parameters and floating-point buffers of the components.
        source: the smaller network, whose names are matched as by `select_weights_`.
        depth: "identity" or "stack".
        noise: >= 0.
        exclude: shell patterns of tensors to leave unchanged, comma-separated or a sequence.

    Raises:
        SpecError: if a tensor has no counterpart, or a larger one, or filters or heads of another size; for "identity"
            also if an added block has no residual branch that ends in a linear layer.

    Source: Net2Net, Chen, Goodfellow and Shlens 2016, sections 2.2 (Eq. 2, with j mod n in place of a random mapping)
    and 2.3; for attention and LayerNorm, bert2BERT, Chen et al. 2022.

    Example:
        >>> net2net_(ViT(32, 4, 128, 12, 8, 10), ViT(32, 4, 64, 6, 4, 10), noise=0.0)
    """
    choice("depth", depth, DEPTHS)
    number("noise", noise, least=0)
    everything, wanted = _trained.weights(module), chosen(module, components, exclude=exclude)
    small = _trained.open_network(source)
    tensors = Source(_trained.tensors(small))
    layout = Layout(module, small, tensors)
    for head, theirs in zip(found_parts(attention, module), found_parts(attention, small), strict=False):
        if head.head_width != theirs.head_width:  # logits have another scale
            raise SpecError(
                f"`{head.name}`: expected heads of width {theirs.head_width}, as in the smaller network, found "
                f"{head.head_width}; more of them are copies"
            )
    found, mine = counterparts(wanted, everything, tensors, "cycle"), places(everything)
    linear = layers_of(module, nn.Linear, *CONVOLUTIONS).items()
    inputs = {name for name, layer in linear if getattr(layer, "groups", 1) == 1}  # those that mix channels
    added = {name for name in wanted if not tensors.has(mine[name])} if depth == "identity" else set()
    zero = _branch_ends(module, mine, added)
    shares = _shares_of_sums(module, found, tensors)
    grown: dict[str, Tensor] = {}
    for name, place in found.items():
        shape = tuple(wanted[name].shape)
        value = layout.with_positions(name, place, tensors.read(place, shape), "interpolate")
        grown[name] = _grown(name, value, shape, name in inputs, layout.blocks.get(name, 1))
        if noise and name in inputs:
            grown[name] = _noisy(grown[name], value.shape[0], noise, layout.blocks.get(name, 1), generator)
        if name in shares:
            grown[name] = shares[name] * grown[name]
    for name, value in grown.items():
        constant = 0.0 if name in zero else 1.0 if name in added and name.endswith("skip_scale") else None
        put(wanted[name], value if constant is None else torch.full_like(value, constant))
    return module


def _grown(name: str, value: Tensor, shape: tuple[int, ...], divide: bool, blocks: int) -> Tensor:
    """A tensor in a larger shape, by copies; shared among the copies of each input if `divide`."""
    small = tuple(value.shape)
    if len(small) != len(shape) or any(s > n for s, n in zip(small, shape, strict=True)):
        raise SpecError(f"`{name}`: expected at least the smaller network's shape {small}, found {shape}")
    if divide and small[2:] != shape[2:]:
        raise SpecError(f"`{name}`: filters of {small[2:]} cannot become {shape[2:]}; leave it out with exclude=")
    for axis, (s, n) in enumerate(zip(small, shape, strict=True)):
        if s == n:
            continue
        packed = blocks if axis == 0 else 1
        copies = torch.arange(n // packed) % (s // packed)
        index = torch.cat([copies + block * (s // packed) for block in range(packed)])
        value = value.index_select(axis, index)
        if divide and axis == 1:
            count = torch.bincount(copies)[copies].to(value.dtype)
            value = value / count.reshape(-1, *[1] * (value.ndim - 2))
    return value


def _noisy(value: Tensor, outputs: int, noise: float, blocks: int, generator: Generator) -> Tensor:
    """A matrix with Gaussian noise on the rows that are copies."""
    rows, first = len(value) // blocks, outputs // blocks
    if rows == first:
        return value
    out = value.clone()
    deviation = noise * float(value.float().std())
    for block in range(blocks):
        part = out[block * rows + first : (block + 1) * rows]
        part += deviation * normal(*part.shape, generator=generator)
    return out


def _shares_of_sums(module: nn.Module, wanted: Collection[str], source: Source) -> dict[str, float]:
    """The factor of each wanted sum of inputs -> inputs of the smaller layer / inputs of the larger one."""
    sums = {f"{name.removesuffix('weight')}sum_weight": name for name in layers_of(module, SumLinear)}
    matrices = [name for factor, name in sums.items() if factor in wanted]
    mine = _trained.weights(module)
    found = counterparts(matrices, mine, source, "cycle")
    inputs = {name: source.read(place, (0, 0)).shape[1] / mine[name].shape[1] for name, place in found.items()}
    return {factor: inputs[name] for factor, name in sums.items() if name in inputs}


def _branch_ends(module: nn.Module, mine: Mapping[str, Place], added: Set[str]) -> set[str]:
    """The last layers, with their biases, of the residual branches of added blocks."""
    ends: set[str] = set()
    for part in [*found_parts(attention, module), *found_parts(mlps, module)]:
        for named in (part.parameters, part.bias_parameters):
            ends |= {name for key in ("o", "fc2") for name in named.get(key, ()) if name in added}
    if left := {_block(mine[name].name) for name in added} - {_block(mine[name].name) for name in ends}:
        raise SpecError(
            f"depth: expected added blocks with residual branches that end in a linear layer, found none in "
            f"{listing(sorted(left))}; use depth='stack'"
        )
    return ends


def _block(path: str) -> str:
    """`blocks.3` of `blocks.3.mlp.fc1.weight`, `stages.1.blocks.2` of a stage's."""
    words = path.split(".")
    last = max((i for i, word in enumerate(words) if word in ("blocks", "layers", "layer", "h")), default=0)
    return ".".join(words[: last + 2])
