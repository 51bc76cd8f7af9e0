"""Orders of the rows of one matrix that packs queries, keys and values."""

from collections.abc import Callable

import torch

from weightscope.anatomy.tensors import Rows
from weightscope.errors import AnatomyError

Parts = tuple[Rows, Rows, Rows]


def _blocks(rows: int, inner: int, heads: int) -> Parts:
    keys = (rows - inner) // 2
    if keys <= 0 or inner + 2 * keys != rows:
        raise AnatomyError(f"{rows} rows are not {inner} of queries and as many keys as values")
    return slice(0, inner), slice(inner, inner + keys), slice(inner + keys, rows)


def _by_head(rows: int, inner: int, heads: int, groups: int) -> Parts:
    values, each = inner // heads, heads // groups  # queries of one key
    if inner % heads or rows % groups or (width := rows // groups - values) <= 0 or width % (each + 1):
        raise AnatomyError(f"{rows} rows are not those of {heads} heads with {groups} keys, for an output of {inner}")
    k = width // (each + 1)
    table = torch.arange(rows).reshape(groups, -1)
    return table[:, : each * k].flatten(), table[:, each * k : width].flatten(), table[:, width:].flatten()


def _heads(rows: int, inner: int, heads: int) -> Parts:
    return _by_head(rows, inner, heads, heads)


def _groups(rows: int, inner: int, heads: int) -> Parts:
    groups = (rows * heads // inner - heads) // 2
    if rows * heads % inner or groups < 1 or heads % groups:
        raise AnatomyError(f"{rows} rows are not those of {heads} heads and a divisor of them of keys of one width")
    return _by_head(rows, inner, heads, groups)


def _codegen(rows: int, inner: int, heads: int) -> Parts:
    if rows != 3 * inner or heads % 4:
        raise AnatomyError(f"{rows} rows of {heads} heads are not 4 blocks of q, v and k of {inner} rows each")
    table = torch.arange(rows).reshape(4, 3, -1)
    return table[:, 0].flatten(), table[:, 2].flatten(), table[:, 1].flatten()


def _strided(rows: int, inner: int, heads: int) -> Parts:
    if rows != 3 * inner:
        raise AnatomyError(f"{rows} rows are not {inner} times q, k and v")
    return slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)


LAYOUTS: dict[str, Callable[[int, int, int], Parts]] = {
    "blocks": _blocks,  # all q, then all k, then all v; fewer k and v with grouped queries
    "heads": _heads,  # q, k and v of head 0, then of head 1
    "groups": _groups,  # the queries of the first key, this key, its value, then those of the second
    "codegen": _codegen,  # 4 blocks of q, v, k
    "strided": _strided,  # the first row of q, of k, of v, then the second
}
"""Name of an order -> the rows of q, k and v, of all rows, those of the output projection and the number of heads."""


def fitting(rows: int, inner: int, heads: int) -> list[str]:
    """The orders that so many rows may be in."""
    out = []
    for name, order in LAYOUTS.items():
        try:
            order(rows, inner, heads)
        except AnatomyError:
            continue
        out.append(name)
    return out
