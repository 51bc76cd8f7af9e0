"""State-space layers from trained ones: W_C and W_B from attention, and one teacher layer for all."""

from typing import Any

import torch
from torch import Tensor

from weightscope._util.checks import count, number
from weightscope.anatomy import AttentionPart, NamedTensors, SSMPart, attention, named_tensors, ssms
from weightscope.anatomy.matrices import chosen_layers
from weightscope.anatomy.tensors import put
from weightscope.errors import SpecError, UsageError
from weightscope.init import _trained
from weightscope.init._common import M
from weightscope.init.registry import INITIALISERS


@INITIALISERS.register(
    "ssm_from_attention", source="thesis 3.3.2", needs="state-space layers; a network with attention"
)
def ssm_from_attention_(
    module: M,
    source: Any,
    *,
    head: int = 0,
    source_layer: int | None = None,
    scale: float = 1.0,
    layers: int | list[int] | None = None,
    generator: torch.Generator | None = None,
) -> M:
    """Give state-space layers the queries and keys of trained attention, as W_C and W_B.

        W_C^T W_B = scale W_Q W_K^T / sqrt(k)

    as maps of the d channels of the residual stream, or the best approximation of rank N if the head is wider than the
    state (k > N); both factors take the roots of the singular values. States beyond k get no output, W_C = 0, and
    keep their W_B. In Mamba, W_C and W_B read the p inner channels `W_1 x`, and are multiplied by the pseudo-inverse
    of W_1. The short convolution and SiLU in between are not taken into account. With slow decay and unit steps
    (`mimetic_ssm_` with `cb=False`), the layer's map is then close to the attention's logits.

    Args:
        module: changed in place: W_C and W_B of its state-space layers.
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`, of the same d.
        head: of the source's layer; in Mamba-2, group g takes head `head + g`.
        source_layer: attention layer for all layers; None takes layer i of the source for state-space layer i.
        scale: factor on the product.
        layers: which state-space layers, counted from 0; None for all.
        generator: not used.

    Raises:
        AnatomyError: if the module has no state-space layer or the source no attention.
        SpecError: if the source has another width, or too few layers or heads.
        UsageError: if an argument is invalid.

    Source: thesis 3.3.2, Eq. 3.38 (the correspondence); the transfer itself is this project's.

    Example:
        >>> ssm_from_attention_(mimetic_ssm_(mamba, cb=False), trained_transformer, head=2)
    """
    count("head", head, 0)
    number("scale", scale)
    found = [part for part in attention(_trained.opened(source)) if part.kind == "self"]
    for part in chosen_layers(ssms(module), layers):
        wanted = part.layer if source_layer is None else count("source_layer", source_layer, 0)
        if wanted >= len(found):
            raise SpecError(
                f"`{part.name}`: expected self-attention layer {wanted} in the source, which has {len(found)}"
            )
        _from_attention(part, found[wanted], head, scale)
    return module


def _from_attention(part: SSMPart, source: AttentionPart, head: int, scale: float) -> None:
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
        left, right = balanced(scale * source.scale * q[h], k[source.kv_head(h)], part.state)
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


@INITIALISERS.register("repeat_layer", source="thesis 3.3.5, Fig. 3.34", needs="state-space layers; a trained network")
def repeat_layer_(
    module: M,
    source: Any,
    *,
    layer: int = 0,
    layers: int | list[int] | None = None,
    generator: torch.Generator | None = None,
) -> M:
    """Copy one state-space layer of a teacher, with its normalisation, to all layers: `S_j := T_i` for every j.

    Args:
        module: changed in place: the tensors of the blocks of its state-space layers.
        source: a module, a mapping of tensors, a `Checkpoint`, a path, or `hf://org/name`, of the same width.
        layer: i, which state-space layer of the teacher, counted from 0.
        layers: which state-space layers of the module, counted from 0; None for all.
        generator: not used.

    Raises:
        AnatomyError: if the module or the source has no state-space layer.
        SpecError: if the tensors of a block differ from the teacher's in name or shape; nothing is copied then.
        UsageError: if there is no such layer.

    Source: thesis 3.3.5 and Fig. 3.34.

    Example:
        >>> repeat_layer_(student, "hf://state-spaces/mamba-130m-hf", layer=12)
    """
    theirs = named_tensors(_trained.opened(source))
    found = ssms(theirs)
    if count("layer", layer, 0) >= len(found):
        raise UsageError(f"layer: expected 0 to {len(found) - 1} of the source, found {layer}")
    tensors = named_tensors(module)
    teacher = _block(theirs, found[layer])
    students = [_block(tensors, part) for part in chosen_layers(ssms(module), layers)]
    for student in students:
        for name in sorted(student.keys() | teacher.keys()):
            mine = tensors.shape(student[name]) if name in student else None
            other = theirs.shape(teacher[name]) if name in teacher else None
            if mine != other:
                raise SpecError(f"`{student.get(name, name)}`: found {mine}, and {other} in the source's layer {layer}")
    for student in students:
        for name, target in student.items():
            put(tensors, target, theirs.get(teacher[name]), tensors.shape(target))
    return module


def _block(tensors: NamedTensors, part: SSMPart) -> dict[str, str]:
    """Tensors of a layer's block: name within the block -> name."""
    prefix = part.name.rpartition(".")[0]
    prefix = f"{prefix}." if prefix else ""
    return {name.removeprefix(prefix): name for name in tensors.names if name.startswith(prefix)}
