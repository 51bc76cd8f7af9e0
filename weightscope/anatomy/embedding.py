"""Patch embeddings, position embeddings and the grid of tokens."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy.convolution import strides
from weightscope.anatomy.tensors import NamedTensors, OneTensor, Parts, Slot, Unread, shared

_PATCH = re.compile(
    r"(^|[._])(patch_embed\w*(\.\w+)*|patch_embedding|conv_proj|patchify|stem\.0|stem\.conv|features\.0\.0|visual\.conv1)\.weight$"
)
_POSITION = re.compile(
    r"(^|\.)(pos_embed|pos_embedding|position_embeddings?|positional_embeddings?|embed_positions|wpe|positions|"
    r"position_embed|pos_emb|positional_encoding|pe)(\.weight|\.pe)?$"
)
# Rotation tables and relative position biases are not embeddings of tokens.
_NOT_TOKENS = re.compile(r"(^|\.)(rope|rotary\w*|rel_pos\w*|attn|self_attn|attention|self_attention)\.")
_TOKENS = re.compile(
    r"(^|\.)(cls_token|class_token|class_embedding|dist_token|distillation_token|reg_tokens?|register_tokens)$"
)


@dataclass(frozen=True, eq=False)
class PatchEmbedding(OneTensor):
    """The convolution that turns patches of an image into tokens; `read` and `write` take weights (d, c, kh, kw)."""

    name: str  # path of the convolution
    width: int  # d, of a token
    channels: int  # c, of the image
    patch: tuple[int, int]  # height and width of a patch
    _tensors: NamedTensors = field(repr=False)
    _slot: Slot = field(repr=False)


@dataclass(frozen=True, eq=False)
class PositionEmbedding(OneTensor):
    """A table of position embeddings (tokens, d), one row for each token."""

    name: str  # of the tensor
    tokens: int  # number of rows, special tokens included
    width: int  # d
    prefix: int  # number of rows at the start for class, distillation and register tokens
    grid: tuple[int, int] | None  # (rows, columns) of the patches after them; None for a sequence
    trained: bool  # whether it is a parameter that takes gradients (a fixed table is a buffer or frozen)
    _tensors: NamedTensors = field(repr=False)
    _slot: Slot = field(repr=False)


def find_patches(tensors: NamedTensors) -> Parts[PatchEmbedding]:
    """All patch embeddings.

    In a module, these are the convolutions whose kernel equals their stride, if their name says so or they are the
    model's first convolution. In a mapping, the names decide, and a 3x3 stem is not one.
    """
    parts, first = Parts[PatchEmbedding](), True
    seen: set[Any] = set()
    parts.unread = tuple(Unread(n, f"({why})") for n, why in tensors.every.items() if why and _PATCH.search(n))
    for name in tensors.names:
        shape = tensors.shape(name) if name.endswith("weight") else ()
        if len(shape) != 4 or tensors.identity(name) in seen:
            continue
        seen.add(tensors.identity(name))
        path, kernel = name.rpartition(".")[0], (shape[2], shape[3])
        stride = strides(tensors, path)
        fits = stride == kernel if stride is not None else kernel != (3, 3)
        if fits and (_PATCH.search(name) or (first and stride is not None and max(kernel) > 1)):
            parts.append(PatchEmbedding(path, shape[0], shape[1], kernel, tensors, Slot(name, vector=True)))
        first = False
    return parts


def find_positions(tensors: NamedTensors) -> Parts[PositionEmbedding]:
    """All tables of position embeddings."""
    tables, parts = [], Parts[PositionEmbedding]()
    seen: set[Any] = set()
    for name, bad in tensors.every.items():
        if not _POSITION.search(name) or _NOT_TOKENS.search(name):
            continue
        if bad:
            parts.unread += (Unread(name, f"({bad})"),)
            continue
        shape = tensors.shape(name)
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(shape) == 2 and min(shape) > 1 and tensors.identity(name) not in seen:
            seen.add(tensors.identity(name))
            tables.append((name, shape))
    owners: dict[str, PatchEmbedding] = {}  # each patch embedding is that of the table with the most similar name
    for patch in find_patches(tensors) if tables else ():
        owner = max(tables, key=lambda table: len(shared(one.split(".") for one in (table[0], patch.name))))[0]
        owners.setdefault(owner, patch)
    for name, (tokens, width) in tables:
        prefix, grid = _grid(tensors, name, tokens, owners[name]) if name in owners else (0, None)
        trained = tensors.trained(name)
        slot = Slot(name, vector=True, shape=(tokens, width))
        parts.append(PositionEmbedding(name, tokens, width, prefix, grid, trained, tensors, slot))
    return parts


def _grid(tensors: NamedTensors, name: str, tokens: int, patch: PatchEmbedding) -> tuple[int, tuple[int, int] | None]:
    """The number of special tokens at the start, and the grid of the others."""
    scope = patch.name.rpartition(".")[0]
    known = tensors.hint(scope, ("grid_size",), (tuple, list)) or _from_image(tensors, scope, patch)
    if known is not None and len(known) == 2 and 0 <= tokens - known[0] * known[1] <= 16:
        return tokens - known[0] * known[1], (int(known[0]), int(known[1]))
    top = name.split(".")[0] if "." in name else ""
    rows = (tensors.shape(n)[-2:-1] for n in tensors.names if _TOKENS.search(n) and (n.startswith(top) or "." not in n))
    special = sum(shape[0] if shape else 1 for shape in rows)
    for prefix in range(special + 1):
        side = math.isqrt(max(tokens - prefix, 0))
        if side * side == tokens - prefix and side > 0:
            return prefix, (side, side)
    return 0, None


def _from_image(tensors: NamedTensors, scope: str, patch: PatchEmbedding) -> tuple[int, int] | None:
    size = tensors.hint(scope, ("image_size", "img_size", "input_resolution"), (int, tuple, list))
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    return height // patch.patch[0], width // patch.patch[1]


Offset = tuple[int, int]
"""(dy, dx): token (y, x) refers to the token at (y + dy, x + dx)."""


@dataclass(frozen=True)
class TokenGrid:
    """Positions of tokens: `prefix` special ones (class token, registers), then a grid in row-major order.

    A sequence is a grid of one row.
    """

    rows: int
    columns: int
    prefix: int = 0
    causal: bool = False  # whether a token attends only to itself and earlier ones

    @property
    def total(self) -> int:
        """N, the number of all tokens."""
        return self.prefix + self.rows * self.columns

    def targets(self, offset: Offset) -> Tensor:
        """The index (N,) of the token at `offset` = (dy, dx) from each token, -1 if it is outside the grid.

        Special tokens have none.
        """
        y, x = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        y, x = y + offset[0], x + offset[1]
        inside = (y >= 0) & (y < self.rows) & (x >= 0) & (x < self.columns)
        index = torch.where(inside, y * self.columns + x + self.prefix, -1).reshape(-1)
        index = torch.cat([torch.full((self.prefix,), -1), index])
        if self.causal:
            index = torch.where(index > torch.arange(self.total), -1, index)
        return index
