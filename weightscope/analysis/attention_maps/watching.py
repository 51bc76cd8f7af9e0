"""Hooks on attention modules that compute attention maps from the inputs and check them against the outputs."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightscope.anatomy import AttentionPart
from weightscope.anatomy.embedding import TokenGrid
from weightscope.errors import DataError
from weightscope.networks.sequences.attention import CausalAttention, rotated

_BYTES = 96 * 2**20  # of the maps of single images held at once
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative, between a module's output and the recomputed one
_HALF = 5e-2  # for half precision, in which the module rounds inner products


def rotation_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a module rotates its queries and keys (B, H, n, k) by position, if it is one of weightscope's that does."""
    return rotated if isinstance(module, CausalAttention) and module.rope else None


class Recorder:
    """Sums over images, or sequences, of one attention layer's maps.

    Args:
        part: the module's weights.
        n: number of tokens.
        patches: rows and columns of the patches of images.
        rotate: see `rotation_of`.

    Attributes:
        part: the module's weights.
        tokens: arrangement of its tokens.
        maps: (H, n, n) float64, sum of attention maps.
        entropy: (H,) float64, sum of mean row entropies in units of log n.
        ranks: stable ranks of the inputs' patch tokens, a tensor for each batch.
        images: number of images.
    """

    def __init__(
        self,
        part: AttentionPart,
        n: int,
        patches: tuple[int, int] | None,
        rotate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.part, self._rotate = part, rotate
        prefix = -1 if patches is None else n - patches[0] * patches[1]
        grid = (1, n, 0) if prefix < 0 or patches is None else (*patches, prefix)
        self.tokens = TokenGrid(*grid, causal=part.causal is True)
        self.maps = torch.zeros(part.heads, n, n, dtype=torch.float64)
        self.entropy = torch.zeros(part.heads, dtype=torch.float64)
        self.ranks: list[Tensor] = []
        self.images = 0
        self._checked = False
        self._weights = {name: _projection(part, name) for name in ("q", "k", "v")}

    def add(self, x: Tensor, answer: Tensor | None) -> None:
        """Add inputs x (B, n, d); the first few are checked against the module's output.

        Raises:
            DataError: if the map is not finite, or does not reproduce the output.
        """
        part, (count, n, _) = self.part, x.shape
        wide = x if x.dtype == torch.float64 else x.float()
        step = max(1, _BYTES // (part.heads * n * n * 4))
        for start in range(0, count, step):
            some = wide[start : start + step]
            maps = self._attend(some)
            sums = maps.sum(0, dtype=torch.float64).cpu()
            if not bool(sums.isfinite().all()):
                raise DataError(
                    f"`{part.name}`: attention is not finite; do weights or inputs contain NaN or infinity?"
                )
            if not self._checked:
                self._compare(some, maps, answer[start : start + step] if answer is not None else None, x.dtype)
            self.maps += sums
            rows = -torch.special.xlogy(maps, maps).sum(-1).mean(-1).sum(0, dtype=torch.float64)
            self.entropy += rows.cpu() / math.log(max(n, 2))
            self.ranks.append(stable_ranks(some[:, self.tokens.prefix :]).cpu())
        self.images += count

    def _project(self, name: str, x: Tensor) -> Tensor:
        """(B, heads, n, width of a head), key and value heads repeated for the queries that share them."""
        weight, bias = self._weights[name]
        weight = weight.to(x)
        out = torch.einsum("bnd,hdk->bhnk", x, weight)
        return out if bias is None else out + bias.to(x)[:, None]

    def _attend(self, x: Tensor) -> Tensor:
        q, k = self._project("q", x), self._project("k", x)
        if self._rotate is not None:
            q, k = self._rotate(q), self._rotate(k)
        logits = (q @ k.mT).mul_(self.part.scale)
        if self.tokens.causal:
            n = x.shape[1]
            logits.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        return torch.softmax(logits, dim=-1)

    def _compare(self, x: Tensor, maps: Tensor, answer: Tensor | None, dtype: torch.dtype) -> None:
        """The maps applied to the values must equal the module's output, before or after the output projection."""
        part, self._checked = self.part, True
        if answer is None:
            raise DataError(
                f"`{part.name}`: expected an output with one row for each token, found none; its map cannot be checked"
            )
        context = maps @ self._project("v", x)  # (B, H, n, v)
        bias = part.read_bias("o")
        whole = torch.einsum("bhnv,hvd->bnd", context, part.read("o").to(x))
        whole = whole if bias is None else whole + bias.to(x)
        joined = context.transpose(1, 2).flatten(2)
        distances = [
            float((ours - answer).norm() / answer.norm().clamp_min(1e-30))
            for ours in (whole, joined)
            if ours.shape == answer.shape
        ]
        apart = min(distances, default=math.inf)
        if not apart <= _TOLERANCE.get(dtype, _HALF):
            raise DataError(
                f"`{part.name}`: its output differs by {apart:.2g} of its norm from that of its attention map; "
                "the module does more than its weights show (relative positions, a mask, gates)"
            )


def _projection(part: AttentionPart, name: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = part.read(name), part.read_bias(name)
    if name == "q":
        return weight, bias
    heads = torch.tensor([part.kv_head(h) for h in range(part.heads)], device=weight.device)
    return weight[heads], None if bias is None else bias[heads]


def stable_ranks(x: Tensor) -> Tensor:
    """`sum s_i^2 / s_1^2` over the singular values of each matrix of (B, n, d): float64 (B,); 0 for a zero matrix.

    Source: impulse paper, Remark 1.
    """
    wide = x.double()
    gram = wide @ wide.mT if x.shape[1] <= x.shape[2] else wide.mT @ wide
    largest = torch.linalg.eigvalsh(gram)[:, -1]
    return torch.where(largest > 0, gram.diagonal(dim1=1, dim2=2).sum(1) / largest.clamp_min(1e-300), 0.0)


class Recorders:
    """The recorders of a model, one for each call of an attention module in a forward pass."""

    def __init__(self, patches: tuple[int, int] | None) -> None:
        self._patches = patches
        self._found: dict[tuple[str, int], Recorder] = {}
        self._calls: dict[str, int] = {}
        self._count = 0

    def begin(self, count: int) -> None:
        """Start a forward pass on `count` images."""
        self._calls, self._count = {}, count

    def in_order(self) -> list[Recorder]:
        """All recorders in the order of the calls; a module that is called several times has several."""
        return list(self._found.values())

    def call(self, part: AttentionPart, module: nn.Module, args: Sequence[Any], named: Mapping, output: Any) -> None:
        """Record one call of an attention module; the arguments are those of a forward hook.

        Raises:
            DataError: if none of its inputs has the shape (B, n, d).
        """
        given = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        x = next((value for value in given if value.ndim == 3 and value.shape[-1] == part.width), None)
        answer = output[0] if isinstance(output, tuple | list) and output else output
        answer = answer if isinstance(answer, Tensor) and answer.ndim == 3 else None
        if x is not None and getattr(module, "batch_first", True) is False:
            x, answer = x.transpose(0, 1), None if answer is None else answer.transpose(0, 1)
        if x is None or len(x) != self._count:
            shapes = ", ".join(str(tuple(value.shape)) for value in given) or "nothing"
            raise DataError(
                f"`{part.name}`: expected tokens ({self._count}, n, {part.width}), found {shapes}; attention within "
                "windows has no map over the image"
            )
        number = self._calls.get(part.name, 0)
        self._calls[part.name] = number + 1
        if (part.name, number) not in self._found:
            self._found[part.name, number] = Recorder(part, x.shape[1], self._patches, rotation_of(module))
        recorder = self._found[part.name, number]
        if x.shape[1] != recorder.tokens.total:
            raise DataError(
                f"`{part.name}`: expected {recorder.tokens.total} tokens as in the first batch, found {x.shape[1]}"
            )
        recorder.add(x, answer)


@contextlib.contextmanager
def watch(model: nn.Module, parts: Sequence[AttentionPart], patches: tuple[int, int] | None) -> Iterator[Recorders]:
    """Hook the modules of these parts and switch to evaluation mode within the block; both are undone at its end."""
    recorders, modules = Recorders(patches), dict(model.named_modules(remove_duplicate=False))
    modes = {module: module.training for module in modules.values()}
    handles = []
    try:
        for part in parts:

            def hook(module: nn.Module, args: Any, named: Any, output: Any, part: AttentionPart = part) -> None:
                recorders.call(part, module, args, named, output)

            handles.append(modules[part.name].register_forward_hook(hook, with_kwargs=True))
        model.eval()
        yield recorders
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
