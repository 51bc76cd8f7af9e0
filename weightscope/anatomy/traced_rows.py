"""Where in a parameter the matrix of a traced linear map is, as rows of a slot."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy.tracing import BITS, ENTRY, Tracer, Weight


def rows_of(tracer: Tracer, weight: Weight) -> tuple[int, Tensor, bool] | None:
    """(parameter, rows or columns of it, whether it is stored transposed) of a matrix; None if it is neither."""
    owners = (weight.first >> BITS).unique().tolist()
    if len(owners) != 1:
        return None
    shape, flat, columns = tuple(tracer.parameters[owners[0]].shape), weight.first & ENTRY, weight.columns
    total = torch.Size(shape).numel()
    if (weight.step == 1 or columns == 1) and shape[0] * columns == total and not bool((flat % columns).any()):
        return owners[0], flat // columns, False
    if len(shape) > 1 and total == shape[0] * shape[1] and weight.step == shape[1] and bool((flat < shape[1]).all()):
        return owners[0], flat, True
    return None


def span(rows: Tensor, total: int) -> Any:
    """Rows as a slice where they follow each other, None for all."""
    start, n = int(rows[0]), len(rows)
    if not bool((rows == torch.arange(start, start + n)).all()):
        return rows
    return None if (start, n) == (0, total) else slice(start, start + n)


def owner(names: Sequence[str]) -> str:
    """The path of the module that has some weights: `attn` of `attn.q.weight`, `attn.qkv.weight`, `attn.in_proj`."""
    words = [name.split(".") for name in names]
    return ".".join(shared(w[:-2] if w[-1] in ("weight", "kernel") else w[:-1] for w in words))


def shared(paths: Iterable[Sequence[str]]) -> list[str]:
    """The components with which all of some paths begin."""
    return [w[0] for w in takewhile(lambda w: len(set(w)) == 1, zip(*paths, strict=False))]
