"""Mimetic initialisation of state-space layers: close to linear attention that recalls, or from trained layers."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightscope._util.checks import chosen, count, flag, positive
from weightscope.anatomy import (
    AttentionPart,
    NamedTensors,
    SSMPart,
    attention,
    chosen_layers,
    named_tensors,
    parts_of,
    self_attention,
    ssms,
)
from weightscope.anatomy.tensors import Slot, check_separate
from weightscope.errors import SpecError, UsageError
from weightscope.init import _trained
from weightscope.init.base import INITIALISERS, Generator, M

# softplus(b) = 1 for b = log(e - 1) = 0.5413
UNIT_STEP = math.log(math.e - 1)


@INITIALISERS.register("mimetic_ssm", source="thesis 3.3.2", needs="state-space layers", may_set_nothing=True)
def mimetic_ssm_(
    module: M,
    *,
    c: float = 8.0,
    a: bool = True,
    delta: bool = True,
    cb: bool = True,
    convolution: bool | None = None,
    layers: int | list[int] | None = None,
    heads: int | list[int] | None = None,
    generator: Generator = None,
) -> M:
    """Make Mamba and Mamba-2 layers start close to linear attention between correlated tokens.

        a            A_log <- -c A_log              A = -exp(A_log) near 0: states decay slowly
        delta        W_Delta <- 0, b_Delta <- log(e - 1)      Delta = softplus(b) = 1 for every token
        cb           W_C <- (W_C + W_B) / 2         W_C^T W_B near a multiple of I: tokens attend to similar ones
        convolution  last tap 1, other taps and bias 0        the short convolution is the identity

    The four switches give the 16 combinations of thesis Fig. 3.26. Linear attention is approached, not reached: A_log
    of Mamba's state 1 (of Mamba-2's head 1) is log 1 = 0, so A = -1 for any c. The components transform the present
    weights, assumed to be those of Mamba's own initialisation; they are not idempotent.

    Args:
        c: factor on A_log, of the published {2, 4, 8}, > 0.
        a: apply the first component.
        delta: apply the second.
        cb: apply the third.
        convolution: apply the fourth; None applies it to Mamba-2 only, as published.
        heads: of Mamba-2, the heads that get A and Delta; None for all. The others are of all heads of a group.

    Source: thesis 3.3.2 and Fig. 3.26; 4.1 (a few layers or heads).

    Example:
        >>> mimetic_ssm_(mamba, c=8, layers=3)
    """
    positive("c", c)
    for name, value in (("a", a), ("delta", delta), ("cb", cb)):
        flag(name, value)
    if convolution is not None:
        flag("convolution", convolution)
    parts = chosen_layers(ssms(module), layers)
    check_separate((part, name) for part in parts for name in ("A_log", "B", "C"))
    for part in parts:
        some = chosen_states(part, heads)
        if a:
            rates = part.read("A_log").clone()
            rates[some] *= -c
            part.write("A_log", rates)
        if delta:
            weight, bias = part.read("dt_weight").clone(), part.read("dt_bias").clone()
            weight[some], bias[some] = 0, UNIT_STEP
            part.write("dt_weight", weight)
            part.write("dt_bias", bias)
        if cb:
            part.write("C", (part.read("C") + part.read("B")) / 2)
        if part.version == 2 if convolution is None else convolution:
            taps = torch.zeros_like(part.read("conv_weight"))  # (channels, taps)
            taps[:, -1] = 1
            part.write("conv_weight", taps)
            if "conv_bias" in part.parts:
                part.write("conv_bias", torch.zeros_like(part.read("conv_bias")))
    return module


def chosen_states(part: SSMPart, heads: int | list[int] | None) -> list[int]:
    """The rows of A_log and of Delta's weights that `heads` selects: channels of Mamba, heads of Mamba-2."""
    if heads is None:
        return list(range(part.heads))
    if part.version == 1:
        raise UsageError(f"heads: `{part.name}` is a Mamba layer and has none; leave them out")
    return chosen(f"heads of `{part.name}`", heads, range(part.heads))


@INITIALISERS.register(
    "ssm_from_attention", source="thesis 3.3.2, 4.1", needs="state-space layers; a network with attention"
)
def ssm_from_attention_(
    module: M,
    source: Any,
    *,
    head: int = 0,
    layers: int | list[int] | None = None,
    generator: Generator = None,
) -> M:
    """Give state-space layers the queries and keys of trained attention, as W_C and W_B.

        W_C^T W_B = W_Q W_K^T / sqrt(k)

    as maps of the d channels of the residual stream, or the best approximation of rank N if the head is wider than the
    state (k > N); both factors take the roots of the singular values. States beyond k get W_C = 0 and keep their W_B.
    In Mamba, W_C and W_B read the inner channels `W_1 x`, and are multiplied by the pseudo-inverse of W_1; the short
    convolution and SiLU in between are not taken into account.

    Args:
        head: of layer i of the source, for state-space layer i; in Mamba-2, group g takes head `head + g`.

    Raises:
        SpecError: if the source has another width, or too few layers or heads.

    Source: thesis 4.1 (the transfer, without a formula) and 3.3.2, Eq. 3.38 (the correspondence).

    Example:
        >>> ssm_from_attention_(mimetic_ssm_(mamba, cb=False), trained_transformer, head=2)
    """
    count("head", head, 0)
    found = [part for part in attention(_trained.open_network(source)) if part.kind == "self"]
    for part in chosen_layers(ssms(module), layers):
        if part.layer >= len(found):
            raise SpecError(
                f"`{part.name}`: expected self-attention layer {part.layer} in the source, which has {len(found)}"
            )
        _from_attention(part, found[part.layer], head)
    return module


def _from_attention(part: SSMPart, source: AttentionPart, head: int) -> None:
    inner = part.read("in").double() if part.version == 1 else None  # W_1 (p, d)
    width = part.read("C").shape[1] if inner is None else inner.shape[1]
    if source.width != width or source.kv_width != width:
        raise SpecError(f"`{part.name}`: expected attention of width {width}, found {source.width} in `{source.name}`")
    if head + part.groups > source.heads:
        raise SpecError(
            f"`{part.name}`: {part.groups} groups need heads {head} to {head + part.groups - 1}, found {source.heads} "
            f"heads in `{source.name}`"
        )
    c, b = part.read("C").double(), part.read("B").double()
    q, k = source.read("q").double(), source.read("k").double()
    for g in range(part.groups):
        rows = slice(g * part.state, (g + 1) * part.state)
        h = head + g
        left, right = balanced(source.scale * q[h], k[source.kv_head(h)], part.state)
        if inner is not None:
            left, right = (torch.linalg.pinv(inner).T @ factor for factor in (left, right))
        rank = left.shape[1]
        c[rows] = 0
        c[rows][:rank], b[rows][:rank] = left.T, right.T
    part.write("C", c)
    part.write("B", b)


def balanced(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best approximation of `left @ right.T` of a rank, each with the roots of the singular values."""
    (q, r), (p, s) = torch.linalg.qr(left), torch.linalg.qr(right)
    u, values, vh = torch.linalg.svd(r @ s.T)
    roots = values.sqrt()
    return ((q @ u) * roots)[:, :rank], ((p @ vh.T) * roots)[:, :rank]


@INITIALISERS.register(
    "repeat_layer", source="thesis 3.3.5, Fig. 3.34", needs="state-space or attention layers; a trained network"
)
def repeat_layer_(
    module: M, source: Any, *, layer: int = 0, layers: int | list[int] | None = None, generator: Generator = None
) -> M:
    """Copy one layer of a teacher, with all of its block, to all layers: `S_j := T_i` for every j.

    Layers are the state-space layers, or the self-attention of a network without any. The block of a layer is the last
    numbered module in its path: `blocks.3` of `blocks.3.attn` in a ViT, with its norms and its MLP.

    Args:
        module: changed in place: the tensors of the blocks of its layers.
        layer: i, which layer of the teacher, counted from 0.

    Raises:
        SpecError: if the tensors of a block differ from the teacher's in name or shape.

    Source: thesis 3.3.5 and Fig. 3.34, for Mamba only.

    Example:
        >>> repeat_layer_(student, "hf://state-spaces/mamba-130m-hf", layer=12)
    """
    opened = _trained.open_network(source)
    theirs = named_tensors(opened)
    if not (isinstance(opened, torch.nn.Module) or theirs.config or parts_of("state-space layers", theirs)):
        theirs = named_tensors(opened, {"num_heads": 1})  # which tensors are a layer's does not depend on it
    found = _layers(theirs)
    if count("layer", layer, 0) >= len(found):
        raise UsageError(f"layer: expected 0 to {len(found) - 1} of the source, found {layer}")
    tensors = named_tensors(module)
    teacher, own = _block(theirs, found, found[layer]), _layers(tensors)
    students = [_block(tensors, own, part) for part in chosen_layers(own, layers)]
    for student in students:
        for name in sorted(student.keys() | teacher.keys()):
            mine = tensors.shape(student[name]) if name in student else None
            other = theirs.shape(teacher[name]) if name in teacher else None
            if mine != other:
                raise SpecError(f"`{student.get(name, name)}`: found {mine}, and {other} in the source's layer {layer}")
    for student in students:
        for name, target in student.items():
            Slot(target, vector=True).write(tensors, theirs.get(teacher[name]))
    return module


def _layers(tensors: NamedTensors) -> Sequence[Any]:
    """The state-space layers, or self-attention of a network without any."""
    return parts_of("state-space layers", tensors) or self_attention(tensors)


def _block(tensors: NamedTensors, layers: Sequence[Any], part: Any) -> dict[str, str]:
    """Tensors of the block of one of some layers: name within the block -> name."""
    above = [_above(layer.name) for layer in layers]  # what is not one layer's is no block of it
    prefix = _above(part.name) if above.count(_above(part.name)) == 1 else ""
    prefix = prefix or (f"{part.name}." if part.name else "")
    return {name.removeprefix(prefix): name for name in tensors.names if name.startswith(prefix)}


def _above(name: str) -> str:
    """Up to the last number in the path of a layer, else to its parent; empty for the network itself."""
    found = re.match(r".*\d\.|.*\.", name)
    return found[0] if found else ""
