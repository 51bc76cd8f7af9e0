"""Attention maps of a Transformer: measured maps, maps expected from the weights, and the rank condition."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.checks import choice, count, odd
from weightscope._util.progress import DELAY, Bar
from weightscope._util.results import Result, row_table
from weightscope._util.threads import one_thread
from weightscope.anatomy import AttentionPart, ModuleTensors, attention, chosen_layers, patch_embeddings, positions
from weightscope.anatomy.attention_part import OTHERS
from weightscope.anatomy.embedding import Offset, TokenGrid
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.networks.sequences import CausalAttention, rotated

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Kind = Literal["maps", "expected", "offsets", "ranks"]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """One attention layer on a batch of B images or sequences with n tokens."""

    layer: int  # index in the order in which the model calls its layers, from 0
    name: str  # path of the attention module
    maps: np.ndarray  # (H, n, n), attention probabilities, mean over images; rows (queries) sum to 1
    entropy: np.ndarray  # (H,), mean entropy of single images' rows, in units of log n: 1 for uniform attention
    peak: np.ndarray  # (H,), mean largest weight of single images' rows
    beta: np.ndarray  # (H,), `tr(W_Q W_K^T) / d`, the least-squares beta of `W_Q W_K^T ~ alpha Z + beta I`
    expected: np.ndarray | None  # (H, n, n), thesis Eq. 3.19 with these beta; None without a position table
    stable_ranks: np.ndarray  # (B,), of the layer's input, patch tokens only (see `AttentionMaps.condition`)
    width: int  # D
    targets: tuple[Offset, ...] | None  # (H,), (dy, dx) that has most weight on the codes alone; None without a table


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps(Result):
    """Mean attention maps of every layer and head, and the maps expected from Eq. 3.19."""

    layers: tuple[LayerMaps, ...]  # in the order of the model's calls
    tokens: TokenGrid  # special ones first, then the grid row by row
    images: int  # B, number of images or sequences
    filter_size: int  # f, of the neighbourhood and the rank condition
    positions: str  # name of the position table P of Eq. 3.19; "none" without one
    skipped: Mapping[str, str] = field(default_factory=dict)  # path of an attention module -> why it is left out
    inputs: Literal["images", "sequences"] = "images"  # what the maps are means over

    @property
    def taps(self) -> int:
        """Tokens that a filter covers: f^2 of images, f of sequences."""
        return self.filter_size ** (2 if self.inputs == "images" else 1)

    @property
    def _taps(self) -> str:
        """The formula of `taps`."""
        return "f^2" if self.inputs == "images" else "f"

    @property
    def neighbourhood(self) -> str:
        """The tokens that `near` of the rows counts, in words."""
        if self.inputs == "sequences" and self.tokens.causal:
            return f"last {self.filter_size} tokens"
        return f"{self.filter_size}{f' × {self.filter_size}' * (self.inputs == 'images')} tokens around a query"

    @property
    def columns(self) -> Mapping[str, str]:  # type: ignore[override]
        """The statistics of `rows`."""
        f = self.filter_size
        near = f"{f}x{f}" if self.inputs == "images" else f"{'last' if self.tokens.causal else 'nearest'} {f}"
        shares = {"self": "{self:.3f}", near: "{near:.3f}", "target": "{target:.3f}", "special": "{special:.3f}"}
        rest = {"peak": "{peak:.3f}", "entropy": "{entropy:.3f}", "beta": "{beta:+.3f}", "r(3.19)": "{expected_r:.2f}"}
        return shares | rest

    def summary(self) -> str:
        heads = sum(len(layer.maps) for layer in self.layers)
        return f"attention of {heads} heads in {len(self.layers)} layers on {self.images} {self.inputs}"

    @one_thread()
    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and head.

        `self` is the mean weight of a patch token on itself; `near` on the f x f tokens around it, itself included (of
        sequences the f tokens around it or, if attention is causal, itself and the f - 1 before); `special` on class
        token and registers; `expected_r` the correlation of the patch tokens' entries with Eq. 3.19, None without one.
        `peak` is the mean of the largest weights of the rows of single images or sequences, special tokens' included.
        `target` is the mean weight of the tokens at `offset`, the (dy, dx) within f // 2 that has most weight on the
        position codes alone: of impulse attention, the head's own offset. Both are None for sequences and without a
        position table.
        """
        near, patches = _near(self.tokens, self.filter_size), slice(self.tokens.prefix, None)
        rows: list[dict[str, Any]] = []
        for layer in self.layers:
            placed = _by_offset(layer.maps, self.tokens)
            for head, whole in enumerate(layer.maps):
                block, offset = whole[patches, patches], None if layer.targets is None else layer.targets[head]
                shares = {
                    "self": np.trace(block) / len(block),
                    "near": (block * near).sum() / len(block),
                    "special": whole[patches, : self.tokens.prefix].sum() / len(block),
                    "peak": layer.peak[head],
                    "entropy": layer.entropy[head],
                    "beta": layer.beta[head],
                }
                row: dict[str, Any] = {"layer": layer.layer, "head": head} | {
                    key: float(value) for key, value in shares.items()
                }
                other = None if layer.expected is None else layer.expected[head, patches, patches]
                dy, dx = offset or (0, 0)
                weight = float(placed[head, self.tokens.rows - 1 + dy, self.tokens.columns - 1 + dx])
                row |= {"target": offset and weight, "offset": offset and [dy, dx]}
                rows.append(row | {"expected_r": None if other is None else _correlation(block, other)})
        return rows

    def condition(self) -> list[dict[str, Any]]:
        """One row for each layer on the condition D >= k f^2 (impulse paper, Eq. 3), where k is the rank of its input.

        By Proposition 1 any output of f x f filters is a mixture of channels if D >= k f^2. As in Remark 1, k is here
        the stable rank `sum s_i^2 / s_1^2` of the input X (n patches, D): at most the rank, and dominated by the mean
        token, because X is not centred. D < k f^2 therefore shows that the condition fails; D >= k f^2 shows nothing.

        For attention with H heads, whose maps are shared by D/H channels each, the paper splits it into two conditions:
        H >= f^2 different maps, and D/H >= k copies of each. For sequences, whose filters have f taps, f takes the
        place of f^2.

        `low` and `high` are quantiles of 5 % and 95 % of k over images, `needed` is k f^2, `holds` whether D is as
        large, `share` the share of the images for which it is, `largest_f` the largest odd f for which it is, or 0.
        """
        rows = []
        for layer in self.layers:
            k = float(layer.stable_ranks.mean())
            low, high = np.quantile(layer.stable_ranks, [0.05, 0.95])
            reach = math.isqrt(int(layer.width / k)) if self.inputs == "images" else int(layer.width / k)
            row = {"layer": layer.layer, "stable_rank": k, "low": float(low), "high": float(high)}
            row |= {"needed": k * self.taps, "width": layer.width, "holds": layer.width >= k * self.taps}
            row |= {"share": float(np.mean(layer.width >= layer.stable_ranks * self.taps))}
            row |= {"largest_f": reach - (reach + 1) % 2 if reach else 0}
            enough = {"enough_heads": len(layer.maps) >= self.taps, "enough_copies": layer.width / len(layer.maps) >= k}
            rows.append(row | enough)
        return rows

    def offsets(self) -> np.ndarray:
        """Mean weight by relative position, (L, H, 2 rows - 1, 2 columns - 1); the middle is the token itself.

        Entry (dy, dx) is the mean of `maps[(y, x), (y + dy, x + dx)]` over the patch tokens for which it exists.
        """
        return _by_offset(_stack([layer.maps for layer in self.layers]), self.tokens)

    def text(self) -> str:
        """A table with one line for each layer, heads averaged, and the finding on the rank condition."""
        f, grid, images = self.filter_size, self.tokens, self.inputs == "images"
        where = f"{grid.prefix} special tokens and {grid.rows} x {grid.columns} patches"
        columns = {"layer": "{layer}", **self.columns, "k": "{stable_rank:.2f}", f"{self.taps} k": "{needed:.1f}"}
        columns |= {"D": "{width}", "": "{verdict}"}
        heads, table, near = self.rows(), [], list(self.columns)[1]
        for row in self.condition():
            row |= _means([head for head in heads if head["layer"] == row["layer"]])
            table.append(row | {"verdict": "" if row["holds"] else f"D < k {self._taps}"})
        around = f"the {f} x {f} tokens around it" if images else f"the {near} tokens"
        lines = [
            f"means over heads and {self.images} {self.inputs}, {where if images else f'{grid.total} tokens'}",
            "",
            row_table(columns, table, left=(len(columns) - 1,)),
            "",
            f"self, {near}: share of a query's attention on itself, and on {around}; special: on special tokens",
            "target: on the relative position near it that the head attends to most on position codes alone",
            "peak: largest weight of a query; entropy: of the attention, 1 if uniform",
            "beta: mean of the diagonal of W_Q W_K^T",
            "r(3.19): correlation with the map that positions alone predict",
            "k: stable rank of the layer's input, at most its rank; D: its width",
            "",
            self.finding(),
        ]
        return "\n".join([*lines, *(f"left out: {name}, {why}" for name, why in self.skipped.items())])

    def finding(self) -> str:
        """One sentence about the rank condition."""
        rows = self.condition()
        failed, heads = sum(not row["holds"] for row in rows), sum(row["enough_heads"] for row in rows)
        where = (
            f"fails in {failed} or more of {len(rows)} layers"
            if failed
            else f"is not shown to fail in {len(rows)} layers"
        )
        fails = f"D >= k {self._taps} {where} for f = {self.filter_size} (k: stable ranks, at most the ranks)"
        return f"{fails}; {heads} of {len(rows)} layers have {self.taps} heads, one for each entry of a filter"

    def _title(self, kind: str) -> str:
        """The finding of a picture in numbers."""
        if kind == "ranks":
            return self.finding().replace(">=", "≥").replace("^2", "²")
        f, rows = self.filter_size, self.rows()
        if kind == "expected":
            r = [row["expected_r"] for row in rows if row["expected_r"] is not None]
            known = f"; correlation with the real maps {np.mean(r):.2f}" if r else ""
            return f"Attention that positions alone predict (thesis Eq. 3.19){known}"
        near, mask = np.mean([row["near"] for row in rows]), _near(self.tokens, f)
        reached = np.arange(1, len(mask) + 1) if self.tokens.causal else self.tokens.total
        flat, around = (mask.sum(1) / reached).mean(), self.neighbourhood
        where = ", the query in the middle" if kind == "offsets" else ": queries down, keys across"
        return (
            f"Mean attention over {self.images} {self.inputs}{where}; {100 * near:.0f} % of the weight lies on the "
            f"{around} (uniform attention: {100 * flat:.0f} %)"
        )

    def to_dict(self) -> dict[str, Any]:
        grid = {"rows": self.tokens.rows, "columns": self.tokens.columns, "special": self.tokens.prefix}
        out = {self.inputs: self.images, "tokens": grid, "filter_size": self.filter_size, "positions": self.positions}
        layers = [{"name": a.name} | b for a, b in zip(self.layers, self.condition(), strict=True)]
        return out | {"heads": self.rows(), "layers": layers, "skipped": dict(self.skipped)}

    def plot(self, path: str | Path | None = None, kind: Kind = "maps", *, title: str | None = None) -> "Figure":
        """Draw the maps (thesis Fig. 3.18, per head); the file (.png, .pdf, .svg) is written if there is a path.

        Kinds are `"maps"`, or `"expected"` for Eq. 3.19, layers across and heads down; `"offsets"` the same by relative
        position; `"ranks"`, stable ranks against the layer.
        """
        from weightscope import plots

        choice("kind", kind, get_args(Kind))
        title = title or self._title(kind)
        if kind == "ranks":
            if self.inputs == "sequences":
                raise UsageError("kind: 'ranks' is for images; the stable ranks of sequences are in the table")
            ranks, width = [layer.stable_ranks for layer in self.layers], max(layer.width for layer in self.layers)
            return plots.finished(plots.rank_condition(ranks, width, title=title), path)
        expected = [layer.expected for layer in self.layers if layer.expected is not None]
        if kind == "expected" and len(expected) < len(self.layers):
            raise UsageError("kind: 'expected' needs the model's position table (Eq. 3.19), found none")
        maps = [layer.maps for layer in self.layers]
        panels = self.offsets() if kind == "offsets" else _stack(expected if kind == "expected" else maps)
        figure = plots.attention_grid(
            self.tokens.total * panels.transpose(1, 0, 2, 3),
            column_labels=[f"layer {layer.layer}" for layer in self.layers],
            row_labels=[f"head {h}" for h in range(panels.shape[1])],
            title=title,
        )
        return plots.finished(figure, path)


def mean_maps(
    models: Mapping[str, AttentionMaps],
    path: str | Path | None = None,
    *,
    corner: int | None = None,
    title: str | None = None,
) -> "Figure":
    """Draw the means over heads of one or several models, models down and layers across (thesis Fig. 3.18).

    Below each model the upper left `corner` x `corner` entries of its maps are drawn again (impulse paper, Fig. 3 to
    5). The file (.png, .pdf, .svg) is written if there is a path. DataError if some models have images and others
    sequences; UsageError if a model has no more than `corner` tokens.

    Example:
        >>> mean_maps({"default": attention_maps(vit, images), "mimetic": attention_maps(other, images)}, "maps.png")
    """
    from weightscope import plots

    kinds = {found.inputs for found in models.values()}
    if len(kinds) != 1:
        raise DataError(f"expected models of images or of sequences, found both: {', '.join(models)}")
    fewest = min(found.tokens.total for found in models.values())
    if corner is not None and count("corner", corner) >= fewest:
        raise UsageError(f"corner: expected fewer than the {fewest} tokens of a map, found {corner}")
    layers = sorted({layer.layer for found in models.values() for layer in found.layers})
    lines, shares = [], []
    for name, found in models.items():
        means = {layer.layer: found.tokens.total * layer.maps.mean(axis=0) for layer in found.layers}
        lines.append([means.get(layer) for layer in layers])
        shares.append(f"{100 * np.mean([row['near'] for row in found.rows()]):.0f} % {name}")
    first = next(iter(models.values()))
    figure = plots.attention_grid(
        lines,
        row_labels=list(models),
        column_labels=[f"layer {layer}" for layer in layers],
        corner=corner,
        note="means over heads, queries down, keys across",
        title=title or f"Share of attention on the {first.neighbourhood}: {', '.join(shares)}",
    )
    return plots.finished(figure, path)


def _stack(maps: Sequence[np.ndarray]) -> np.ndarray:
    if len({m.shape for m in maps}) != 1:
        raise DataError("expected the same number of heads in all layers, found different ones; draw layers separately")
    return np.stack(maps)


def _by_offset(maps: np.ndarray, tokens: TokenGrid) -> np.ndarray:
    """Mean weight by relative position, (..., 2 rows - 1, 2 columns - 1), of maps (..., n, n)."""
    rows, columns, prefix = tokens.rows, tokens.columns, tokens.prefix
    y, x = np.divmod(np.arange(rows * columns), columns)
    place = (y - y[:, None] + rows - 1) * (2 * columns - 1) + (x - x[:, None] + columns - 1)  # (query, key)
    size = (2 * rows - 1) * (2 * columns - 1)
    counts = np.bincount(place.ravel(), minlength=size)
    flat = maps[..., prefix:, prefix:].reshape(-1, place.size)
    sums = np.stack([np.bincount(place.ravel(), weights=m, minlength=size) for m in flat])
    return (sums / counts).reshape(*maps.shape[:-2], 2 * rows - 1, 2 * columns - 1)


def _near(tokens: TokenGrid, f: int) -> np.ndarray:
    """(patches, patches) bool: whether the key is in the f x f window around the query, or one of the f last tokens."""
    if tokens.causal:
        back = np.subtract.outer(np.arange(tokens.columns), np.arange(tokens.columns))
        return (back >= 0) & (back < f)
    y, x = np.divmod(np.arange(tokens.rows * tokens.columns), tokens.columns)
    return (np.abs(y[:, None] - y) <= f // 2) & (np.abs(x[:, None] - x) <= f // 2)


def _correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Pearson correlation of entries; None if one of the arrays is constant."""
    a, b = one.ravel() - one.mean(), other.ravel() - other.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale > 0 else None


# --- recording the maps of a forward pass ----------------------------------------------------------------------------

_BYTES = 96 * 2**20  # of the maps of single images held at once
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative, between a module's output and the recomputed one
_HALF = 5e-2  # for half precision, in which the module rounds inner products


class _Recorder:
    """Sums over images, or sequences, of the maps of one attention layer with n tokens."""

    def __init__(self, part: AttentionPart, module: nn.Module, n: int, patches: tuple[int, int] | None) -> None:
        self.part = part
        self._rotate = rotated if _rotates(module) else None
        prefix = -1 if patches is None else n - patches[0] * patches[1]
        grid = (1, n, 0) if prefix < 0 or patches is None else (*patches, prefix)
        self.tokens = TokenGrid(*grid, causal=part.causal is True)
        self.maps = torch.zeros(part.heads, n, n, dtype=torch.float64)
        self.entropy = torch.zeros(part.heads, dtype=torch.float64)  # mean over rows, in units of log n
        self.peak = torch.zeros(part.heads, dtype=torch.float64)  # mean over rows of their largest weight
        self.ranks: list[Tensor] = []  # stable ranks of the inputs' patch tokens, a tensor for each batch
        self.images = 0
        self._weights = {name: (part.read(name), part.read_bias(name)) for name in ("q", "k", "v")}

    def add(self, x: Tensor, answer: Tensor | None) -> None:
        """Add inputs x (B, n, d); the first few are checked against the module's output."""
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
            if not self.ranks:
                self._compare(some, maps, None if answer is None else answer[:step], x.dtype)
            self.maps += sums
            rows = -torch.special.xlogy(maps, maps).sum(-1).mean(-1).sum(0, dtype=torch.float64)
            self.entropy += rows.cpu() / math.log(max(n, 2))
            self.peak += maps.amax(-1).mean(-1).sum(0, dtype=torch.float64).cpu()
            self.ranks.append(stable_ranks(some[:, self.tokens.prefix :]).cpu())
        self.images += count

    def _project(self, name: str, x: Tensor) -> Tensor:
        """(B, H, n, width of a head), key and value heads repeated for the queries that share them."""
        weight, bias = self._weights[name]
        out = torch.einsum("bnd,hdk->bhnk", x, weight.to(x))
        out = out if bias is None else out + bias.to(x)[:, None]
        return out if name == "q" else out[:, [self.part.kv_head(h) for h in range(self.part.heads)]]

    def targets(self, codes: np.ndarray, filter_size: int) -> tuple[Offset, ...]:
        """For each head, the offset within f // 2 that has most weight on the position codes (n, d) alone."""
        rows, columns = self.tokens.rows, self.tokens.columns
        dy, dx = (min(filter_size // 2, size - 1) for size in (rows, columns))
        maps = self._attend(F.layer_norm(torch.from_numpy(codes), codes.shape[-1:])[None])[0].numpy()
        near = _by_offset(maps, self.tokens)[:, rows - 1 - dy : rows + dy, columns - 1 - dx : columns + dx]
        best = (np.unravel_index(weights.argmax(), weights.shape) for weights in near)
        return tuple((int(y) - dy, int(x) - dx) for y, x in best)

    def _attend(self, x: Tensor) -> Tensor:
        """The maps (B, H, n, n) of inputs (B, n, d)."""
        q, k = self._project("q", x), self._project("k", x)
        if self._rotate is not None:
            q, k = self._rotate(q), self._rotate(k)
        logits = (q @ k.mT).mul_(self.part.scale)
        if self.tokens.causal:
            n = x.shape[1]
            logits.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        return torch.softmax(logits, dim=-1)

    def _compare(self, x: Tensor, maps: Tensor, answer: Tensor | None, dtype: torch.dtype) -> None:
        """The maps applied to values must be the module's output, before or after W_O, or after its input is added."""
        part = self.part
        if answer is None:
            raise DataError(
                f"`{part.name}`: expected an output with one row for each token, found none; its map cannot be checked"
            )
        context = maps @ self._project("v", x)  # (B, H, n, v)
        bias = part.read_bias("o")
        whole = torch.einsum("bhnv,hvd->bnd", context, part.read("o").to(x))
        whole = whole if bias is None else whole + bias.to(x)
        pairs = [(whole, answer), (context.transpose(1, 2).flatten(2), answer)]
        pairs += [(whole, answer - x)] if answer.shape == x.shape else []
        found = [(y - own).norm() / own.norm().clamp_min(1e-30) for y, own in pairs if y.shape == own.shape]
        apart = min(map(float, found), default=math.inf)
        if not apart <= _TOLERANCE.get(dtype, _HALF):
            raise DataError(
                f"`{part.name}`: its output differs by {apart:.2g} of its norm from that of its attention map; "
                "the module does more than its weights show (relative positions, a mask, gates)"
            )


def _rotates(module: nn.Module) -> bool:
    """Whether it is one of weightscope's modules that rotate their queries and keys by position."""
    return isinstance(module, CausalAttention) and bool(module.rope)


def stable_ranks(x: Tensor) -> Tensor:
    """`sum s_i^2 / s_1^2` of each matrix of (B, n, d): float64 (B,), 0 for a zero matrix (impulse paper, Remark 1)."""
    wide = x.double()
    gram = wide @ wide.mT if x.shape[1] <= x.shape[2] else wide.mT @ wide
    largest = torch.linalg.eigvalsh(gram)[:, -1]
    return torch.where(largest > 0, gram.diagonal(dim1=1, dim2=2).sum(1) / largest.clamp_min(1e-300), 0.0)


def _recorded(
    model: nn.Module,
    parts: Sequence[AttentionPart],
    batches: Sequence[Tensor],
    patches: tuple[int, int] | None,
    forward: Callable[[nn.Module, Tensor], Any],
) -> list[_Recorder]:
    """A recorder for each call of an attention module in a forward pass, in the order of the calls."""
    modules = dict(model.named_modules(remove_duplicate=False))
    modes = {module: module.training for module in modules.values()}
    found: dict[tuple[str, int], _Recorder] = {}
    calls: Counter[str] = Counter()
    size = 0

    def hook(part: AttentionPart, module: nn.Module, args: Any, named: Mapping[str, Any], output: Any) -> None:
        given = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        x = next((value for value in given if value.ndim == 3 and value.shape[-1] == part.width), None)
        answer = output[0] if isinstance(output, tuple | list) and output else output
        answer = answer if isinstance(answer, Tensor) and answer.ndim == 3 else None
        if x is not None and getattr(module, "batch_first", True) is False:
            x, answer = x.transpose(0, 1), None if answer is None else answer.transpose(0, 1)
        if x is None or len(x) != size:
            shapes = ", ".join(str(tuple(value.shape)) for value in given) or "nothing"
            raise DataError(
                f"`{part.name}`: expected tokens ({size}, n, {part.width}), found {shapes}; attention within "
                "windows has no map over the image"
            )
        key = part.name, calls[part.name]
        calls[part.name] += 1
        if key not in found:
            found[key] = _Recorder(part, module, x.shape[1], patches)
        if x.shape[1] != found[key].tokens.total:
            raise DataError(
                f"`{part.name}`: expected {found[key].tokens.total} tokens as in the first batch, found {x.shape[1]}"
            )
        found[key].add(x, answer)

    handles = []
    try:
        for part in parts:
            handles.append(modules[part.name].register_forward_hook(partial(hook, part), with_kwargs=True))
        model.eval()
        with torch.no_grad():
            for batch in Bar(batches, desc="attention maps", delay=DELAY, disable=None):
                calls.clear()
                size = len(batch)
                _run(model, batch, forward)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return list(found.values())


def _run(model: nn.Module, batch: Tensor, forward: Callable[[nn.Module, Tensor], Any]) -> None:
    try:
        forward(model, _placed(model, batch))
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        what = "images" if batch.is_floating_point() else "sequences"
        raise DataError(f"the model failed on {what} {tuple(batch.shape)}: {reason}") from error


def _placed(model: nn.Module, batch: Tensor) -> Tensor:
    """Inputs on the device and, if they are images, in the data type of a model."""
    reference = next((p for p in model.parameters() if p.is_floating_point()), batch)
    return batch.to(reference.device, reference.dtype if batch.is_floating_point() else batch.dtype)


# --- the analysis ----------------------------------------------------------------------------------------------------


def compared(models: Mapping[str, Result]) -> str:
    """A table with one line for each model, of means over its heads or layers, under the headers of its own table."""
    columns, rows = {"mean of": "{model}"}, []
    for name, found in models.items():
        means = _means(found.rows())
        columns |= {head: form for head, form in found.columns.items() if form[1:-1].partition(":")[0] in means}
        rows.append({"model": name} | means)
    return row_table(columns, rows)


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the numbers that are no indices, each over the rows in which it is known."""
    columns = {key: [row[key] for row in rows if isinstance(row[key], float)] for key in rows[0]}
    return {key: float(np.nanmean(values)) for key, values in columns.items() if values}


@one_thread()
def attention_maps(
    model: nn.Module,
    inputs: Any,
    *,
    filter_size: int = 3,
    batch_size: int = 8,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    layers: int | Iterable[int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttentionMaps:
    """Mean attention maps of a Transformer on a batch of images or of sequences, per layer and head (thesis Fig. 3.18).

    For every self-attention module with input X (n, d) on each image or sequence:

        A_h = softmax(mask(scale (X W_Q + b_Q) (X W_K + b_K)^T)),      mean over images or sequences;
        expected: softmax((beta_h d I + beta_h P P^T) / sqrt(k)),  P the positions, beta_h = tr(W_Q W_K^T) / d.

    The maps are computed from the weights that `weightscope.anatomy` finds, and checked: applied to the values they
    must reproduce the module's output. Causal attention is masked, and the rotary positions of weightscope's own
    networks are applied. A module that does more (relative biases, windows, other masks) is an error. Modules whose
    queries and keys are normalised, or rotated in another library, or whose maps have gates or convolutions of their
    own, and cross-attention, are skipped and listed.

    The model runs in evaluation mode without gradients; modes are restored and hooks removed even after an error.

    Args:
        model: a network of weightscope, timm, torchvision or transformers, or any that `anatomy` supports.
        inputs: images (B, c, height, width), normalised as the model expects; or tokens (B, n) of an integer type.
        filter_size: f, odd, of the neighbourhood of a token and of the condition D >= k f^2.
        batch_size: images or sequences at a time; affects memory only.
        forward: how to call the model, `(model, inputs) -> anything`; `model(inputs)` if None.
        layers: those that are computed, counted from 0; all if None.
        config: for models whose attributes do not contain the number of heads.

    AnatomyError if no map can be computed, with the reason; DataError if inputs do not fit the model, or an output is
    not finite or not reproduced by the map; UsageError for an invalid option.

    Source: thesis section 3.2.2, Fig. 3.18 and Eq. 3.19; impulse paper, Remark 1 and Proposition 1.

    Example:
        >>> found = attention_maps(vit, images)
        >>> found.layers[0].maps.shape, found.condition()[0]["holds"]
        ((3, 64, 64), True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected an nn.Module, found {type(model).__name__}")
    odd("filter_size", filter_size)
    count("batch_size", batch_size)
    batch = _checked(inputs)
    sequences = batch.ndim == 2
    # On these images, which may be smaller than those of the model's config.
    example = _placed(model, batch[:1]) if forward is None else None
    parts, skipped = _usable(model, ModuleTensors(model, config, example))
    parts = chosen_layers(parts, layers)
    patch = None if sequences else _patch(model, batch)
    found = _recorded(model, parts, batch.split(batch_size), patch, forward or (lambda model, x: model(x)))
    if not found:
        raise AnatomyError("the model called none of its attention modules; pass `forward` to call it differently")
    layouts = {recorder.tokens for recorder in found}
    if len(layouts) != 1:
        counts = sorted({layout.total for layout in layouts})
        raise DataError(f"expected the same number of tokens in all layers, found {counts}: the model merges tokens")
    tokens = layouts.pop()
    computed = []
    for recorder in found:
        part, images = recorder.part, recorder.images
        codes, origin = _codes(model, tokens, part.width)
        q, k = part.read("q").double().cpu(), part.read("k").double().cpu()
        beta = torch.stack([(q[h] * k[part.kv_head(h)]).sum() for h in range(part.heads)]).numpy() / part.width
        maps, entropy, peak = ((sums / images).numpy() for sums in (recorder.maps, recorder.entropy, recorder.peak))
        expected = None if codes is None else expected_map(codes, beta, part.scale)
        targets = None if codes is None else recorder.targets(codes, filter_size)
        ranks = torch.cat(recorder.ranks).numpy()
        computed.append(
            LayerMaps(part.layer, part.name, maps, entropy, peak, beta, expected, ranks, part.width, targets)
        )
    kind: Literal["images", "sequences"] = "sequences" if sequences else "images"
    return AttentionMaps(tuple(computed), tokens, len(batch), filter_size, origin, skipped, kind)


def _checked(inputs: Any) -> Tensor:
    batch = torch.as_tensor(inputs)
    if batch.ndim == 2 and 0 not in batch.shape and not batch.is_floating_point():
        return batch.long()
    if batch.ndim != 4 or 0 in batch.shape or not batch.is_floating_point():
        expected = "images (B, c, height, width) as floats, normalised, or tokens (B, n) of an integer type"
        raise DataError(f"expected {expected}, found {tuple(batch.shape)} of {batch.dtype}")
    return batch


def _usable(model: nn.Module, tensors: ModuleTensors) -> tuple[list[AttentionPart], dict[str, str]]:
    reasons, modules = {}, dict(model.named_modules(remove_duplicate=False))
    parts = attention(tensors, strict=None)
    for part in parts:
        if part.kind != "self":
            reasons[part.name] = f"it is {OTHERS[part.kind]}"
        elif part.normalised:
            reasons[part.name] = "queries and keys are normalised"
        elif part.rotary and not _rotates(modules[part.name]):
            reasons[part.name] = "queries and keys are rotated by position"
        elif part.positional:
            reasons[part.name] = "gates, convolutions or biases of positions enter its map"
    usable = [part for part in parts if part.name not in reasons]
    if not usable:
        name, why = next(iter(reasons.items()))
        raise AnatomyError(f"no attention map can be computed from weights: `{name}`: {why}")
    return usable, reasons | {unread.name: unread.why for unread in parts.unread}


def _patch(model: nn.Module, batch: Tensor) -> tuple[int, int] | None:
    """Patches (rows, columns) of these images; None for a model without a known patch embedding."""
    try:
        found = patch_embeddings(model, strict=None)
    except AnatomyError:
        return None
    part = next((part for part in found if part.channels == batch.shape[1]), None)
    if part is None:
        raise DataError(f"`{found[0].name}`: expected images of {found[0].channels} channels, found {batch.shape[1]}")
    (rows, columns), (height, width) = part.patch, batch.shape[2:]
    if height % rows or width % columns:
        wanted = f"expected images divisible into {rows} x {columns} patches"
        raise DataError(f"`{part.name}`: {wanted}, found {height} x {width}")
    return height // rows, width // columns


def _codes(model: nn.Module, tokens: TokenGrid, width: int) -> tuple[np.ndarray | None, str]:
    """P (n, d) of Eq. 3.19 and its origin; zero for special tokens without a position."""
    try:
        tables = [table for table in positions(model, strict=None) if table.width == width and table.grid is not None]
    except AnatomyError:
        tables = []
    if not tables or tokens.rows == 1:
        return None, "none"
    table, origin = tables[0], tables[0].name
    value, prefix = table.read().cpu().double(), min(table.prefix, tokens.prefix)
    special, grid = value[:prefix], value[table.prefix :]
    if table.grid is not None and table.grid != (tokens.rows, tokens.columns):
        image = grid.T.reshape(1, width, *table.grid)
        image = F.interpolate(image, (tokens.rows, tokens.columns), mode="bicubic", align_corners=False)
        grid, origin = image[0].flatten(1).T, f"{origin}, resampled from {table.grid[0]} x {table.grid[1]}"
    missing = torch.zeros(tokens.prefix - prefix, width, dtype=torch.float64)
    return torch.cat([special, missing, grid]).numpy(), origin


def expected_map(codes: np.ndarray, beta: np.ndarray, scale: float) -> np.ndarray:
    """`softmax(scale (beta d I + beta P P^T))` for each beta (H,) and codes P (n, d): (H, n, n).

    The approximate expectation of attention for inputs X + P with X ~ N(0, I) and `W_Q W_K^T = alpha Z + beta I`: of
    the products in the logits only X X^T, with mean d I, and P P^T have a mean (thesis Eq. 3.19, scale 1 / sqrt(k)).
    """
    n, d = codes.shape
    logits = scale * np.asarray(beta, dtype=np.float64)[:, None, None] * (codes @ codes.T + d * np.eye(n))
    return torch.softmax(torch.from_numpy(logits), -1).numpy()
