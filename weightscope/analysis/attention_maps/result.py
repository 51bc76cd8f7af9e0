"""Mean attention maps: statistics, the rank condition, text and pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from weightscope._util.checks import choice
from weightscope._util.results import Result
from weightscope._util.tables import text_table
from weightscope.anatomy.embedding import TokenGrid
from weightscope.errors import DataError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["maps", "expected", "offsets", "ranks"]


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """One attention layer on a batch of B images or sequences with n tokens.

    Attributes:
        layer: index in the order in which the model calls its layers, from 0.
        name: path of the attention module.
        maps: (H, n, n), attention probabilities, mean over images; rows (queries) sum to 1.
        entropy: (H,), mean entropy of single images' rows, in units of log n: 1 for uniform attention.
        beta: (H,), `tr(W_Q W_K^T) / d`, the least-squares beta of `W_Q W_K^T ~ alpha Z + beta I`.
        expected: (H, n, n), thesis Eq. 3.19 with these beta; None without a position table.
        stable_ranks: (B,), of the layer's input, patch tokens only (see `AttentionMaps.condition`).
        width: D.
    """

    layer: int
    name: str
    maps: np.ndarray
    entropy: np.ndarray
    beta: np.ndarray
    expected: np.ndarray | None
    stable_ranks: np.ndarray
    width: int

    @property
    def heads(self) -> int:
        """H."""
        return len(self.maps)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMaps(Result):
    """Mean attention maps of every layer and head, and the maps expected from Eq. 3.19.

    Attributes:
        layers: in the order of the model's calls.
        tokens: arrangement of the tokens: special ones first, then the grid row by row.
        images: B, number of images or sequences.
        filter_size: f, of the neighbourhood and the rank condition.
        positions: name of the position table P of Eq. 3.19; "none" without one.
        skipped: path of an attention module -> why it is left out.
        inputs: what the maps are means over, "images" or "sequences".
    """

    layers: tuple[LayerMaps, ...]
    tokens: TokenGrid
    images: int
    filter_size: int
    positions: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    inputs: Literal["images", "sequences"] = "images"

    @property
    def taps(self) -> int:
        """Tokens that a filter covers: f^2 of images, f of sequences."""
        return self.filter_size ** (2 if self.inputs == "images" else 1)

    @property
    def _taps(self) -> str:
        """The formula of `taps`."""
        return "f^2" if self.inputs == "images" else "f"

    def summary(self) -> str:
        """Number of layers, heads and images."""
        heads = sum(layer.heads for layer in self.layers)
        return f"attention of {heads} heads in {len(self.layers)} layers on {self.images} {self.inputs}"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer and head; see `statistics`."""
        return self.statistics()

    def statistics(self) -> list[dict[str, Any]]:
        """One row for each layer and head.

        - self: mean weight of a patch token on itself;
        - near: on the f x f tokens around it, itself included; of sequences on the f tokens around it, or, if attention
          is causal, on itself and the f - 1 before;
        - special: on the special tokens (class token, registers);
        - entropy: see `LayerMaps`;
        - beta: see `LayerMaps`;
        - expected_r: correlation of the entries of the mean map and of Eq. 3.19, patch tokens only; None without one.
        """
        near, patches = _near(self.tokens, self.filter_size), slice(self.tokens.prefix, None)
        rows: list[dict[str, Any]] = []
        for layer in self.layers:
            for head in range(layer.heads):
                block = layer.maps[head, patches, patches]
                row: dict[str, Any] = {"layer": layer.layer, "head": head, "self": float(np.trace(block) / len(block))}
                row["near"] = float((block * near).sum() / len(block))
                row["special"] = float(layer.maps[head, patches, : self.tokens.prefix].sum() / len(block))
                row |= {"entropy": float(layer.entropy[head]), "beta": float(layer.beta[head])}
                other = None if layer.expected is None else layer.expected[head, patches, patches]
                rows.append(row | {"expected_r": None if other is None else _correlation(block, other)})
        return rows

    def condition(self) -> list[dict[str, Any]]:
        """One row for each layer on the condition D >= k f^2 (impulse paper, Eq. 3).

        k is the stable rank `sum s_i^2 / s_1^2` of the layer's input X (n patches, D), as in Remark 1: at most the
        rank, and dominated by the mean token, because X is not centred. By Proposition 1 any output of f x f filters
        is a mixture of channels if D >= k f^2. For attention with H heads, whose maps are shared by D/H channels each,
        the paper splits it into two conditions: H >= f^2 different maps, and D/H >= k copies of each. For sequences,
        whose filters have f taps, f takes the place of f^2.

        Keys: `stable_rank` (mean over images) with `low` and `high` (5 % and 95 %), `needed` (k f^2), `width` (D),
        `holds`, `share` (of images for which it holds), `largest_f` (largest odd f for which it holds, 0 for none),
        `enough_heads`, `enough_copies`.
        """
        rows = []
        for layer in self.layers:
            k, square = float(layer.stable_ranks.mean()), self.taps
            low, high = np.quantile(layer.stable_ranks, [0.05, 0.95])
            reach = math.isqrt(int(layer.width / k)) if self.inputs == "images" else int(layer.width / k)
            rows.append(
                {
                    "layer": layer.layer,
                    "stable_rank": k,
                    "low": float(low),
                    "high": float(high),
                    "needed": k * square,
                    "width": layer.width,
                    "holds": layer.width >= k * square,
                    "share": float(np.mean(layer.width >= layer.stable_ranks * square)),
                    "largest_f": reach - (reach + 1) % 2 if reach else 0,
                    "enough_heads": layer.heads >= square,
                    "enough_copies": layer.width / layer.heads >= k,
                }
            )
        return rows

    def offsets(self) -> np.ndarray:
        """Mean weight by relative position, (L, H, 2 rows - 1, 2 columns - 1); the middle is the token itself.

        Entry (dy, dx) is the mean of `maps[(y, x), (y + dy, x + dx)]` over the patch tokens for which it exists.

        Raises:
            DataError: if layers have different numbers of heads.
        """
        return _by_offset(_stack([layer.maps for layer in self.layers]), self.tokens)

    def text(self) -> str:
        """A table with one line for each layer, heads averaged, and the finding on the rank condition."""
        f, grid = self.filter_size, self.tokens
        where = f"{grid.prefix} special tokens and {grid.rows} x {grid.columns} patches"
        where = where if self.inputs == "images" else f"{grid.total} tokens"
        head = f"means over heads and {self.images} {self.inputs}, {where}"
        near = f"{f}x{f}" if self.inputs == "images" else f"{'last' if grid.causal else 'nearest'} {f}"
        names = ["layer", "self", near, "special", "entropy", "beta", "r(3.19)", "k", f"{self.taps} k", "D"]
        table, statistics = [], self.statistics()
        for layer, row in zip(self.layers, self.condition(), strict=True):
            mine = [s for s in statistics if s["layer"] == layer.layer]
            mean = {key: np.mean([s[key] for s in mine]) for key in ("self", "near", "special", "entropy", "beta")}
            known = [s["expected_r"] for s in mine if s["expected_r"] is not None]
            cells = [f"{mean[key]:.3f}" for key in ("self", "near", "special", "entropy")]
            cells += [f"{mean['beta']:+.3f}", f"{np.mean(known):.2f}" if known else "-"]
            cells += [f"{row['stable_rank']:.2f}", f"{row['needed']:.1f}", str(row["width"])]
            table.append([str(layer.layer), *cells, "" if row["holds"] else f"D < k {self._taps}"])
        lines = [head, "", text_table((*names, ""), table, left=(len(names),))]
        lines += ["", _columns(f, near, self.inputs), "", self.finding()]
        return "\n".join([*lines, *(f"left out: {name}, {why}" for name, why in self.skipped.items())])

    def finding(self) -> str:
        """One sentence about the rank condition."""
        rows, f = self.condition(), self.filter_size
        good = sum(row["holds"] for row in rows)
        heads = sum(row["enough_heads"] for row in rows)
        return (
            f"D >= k {self._taps} holds in {good} of {len(rows)} layers for f = {f}; "
            f"{heads} of {len(rows)} have the {self._taps} = {self.taps} heads that as many filters need"
        )

    def _title(self, kind: str) -> str:
        """The finding of a picture in numbers."""
        if kind == "ranks":
            return self.finding().replace(">=", "≥").replace("^2", "²")
        f, rows = self.filter_size, self.statistics()
        if kind == "expected":
            r = [row["expected_r"] for row in rows if row["expected_r"] is not None]
            known = f"; correlation with the real maps {np.mean(r):.2f}" if r else ""
            return f"Attention that positions alone predict (thesis Eq. 3.19){known}"
        near, mask = np.mean([row["near"] for row in rows]), _near(self.tokens, f)
        reached = np.arange(1, len(mask) + 1) if self.tokens.causal else self.tokens.total
        flat, around = (mask.sum(1) / reached).mean(), f"{f} × {f} tokens around a query"
        if self.inputs == "sequences":
            around = f"last {f} tokens" if self.tokens.causal else f"{f} tokens around a query"
        where = ", the query in the middle" if kind == "offsets" else ": queries down, keys across"
        return (
            f"Mean attention over {self.images} {self.inputs}{where}; {100 * near:.0f} % of the weight lies on the "
            f"{around} (uniform attention: {100 * flat:.0f} %)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types, without the maps."""
        grid = {"rows": self.tokens.rows, "columns": self.tokens.columns, "special": self.tokens.prefix}
        return {
            self.inputs: self.images,
            "tokens": grid,
            "filter_size": self.filter_size,
            "positions": self.positions,
            "heads": self.statistics(),
            "layers": [{"name": a.name} | b for a, b in zip(self.layers, self.condition(), strict=True)],
            "skipped": dict(self.skipped),
        }

    def plot(self, path: str | Path | None = None, kind: Kind = "maps", *, title: str | None = None) -> "Figure":
        """Draw the maps (thesis Fig. 3.18, per head).

        Args:
            path: a .png, .pdf or .svg file to write; None to return the figure only.
            kind: `"maps"`, or `"expected"` for Eq. 3.19: layers across, heads down; `"offsets"` the same by relative
                position; `"ranks"`: stable ranks against the layer.
            title: instead of the finding in numbers.

        Raises:
            UsageError: for an unknown kind, `"ranks"` of sequences, or if there is no position table for Eq. 3.19.
            DataError: if layers have different numbers of heads.
        """
        from weightscope import plots

        choice("kind", kind, get_args(Kind))
        if kind == "ranks" and self.inputs == "sequences":
            raise UsageError("kind: 'ranks' is for images; the stable ranks of sequences are in the table")
        figure = self._ranks(title) if kind == "ranks" else self._grid(kind, title)
        if path is not None:
            plots.save(figure, path)
        return figure

    def _ranks(self, title: str | None) -> "Figure":
        from weightscope import plots

        ranks, widths = [layer.stable_ranks for layer in self.layers], {layer.width for layer in self.layers}
        return plots.root_figure(plots.rank_condition(ranks, max(widths), title=title or self._title("ranks")))

    def _grid(self, kind: Kind, title: str | None) -> "Figure":
        from weightscope import plots

        expected = [layer.expected for layer in self.layers if layer.expected is not None]
        if kind == "expected" and len(expected) < len(self.layers):
            raise UsageError("kind: 'expected' needs the model's position table (Eq. 3.19), found none")
        if kind == "offsets":
            panels = self.offsets()
        else:
            panels = _stack([layer.maps for layer in self.layers] if kind == "maps" else expected)
        labels = [f"layer {layer.layer}" for layer in self.layers], [f"head {h}" for h in range(panels.shape[1])]
        return plots.attention_grid(
            panels.transpose(1, 0, 2, 3),
            column_labels=labels[0],
            row_labels=labels[1],
            uniform=1 / self.tokens.total,
            title=title or self._title(kind),
        )


def _stack(maps: Sequence[np.ndarray]) -> np.ndarray:
    if len({m.shape for m in maps}) != 1:
        raise DataError("expected the same number of heads in all layers, found different ones; draw layers separately")
    return np.stack(maps)


def _columns(f: int, near: str, of: str) -> str:
    """What the columns of the table are."""
    where = f"the {f} x {f} tokens around it" if of == "images" else f"the {near} tokens"
    return "\n".join(
        (
            f"self, {near}: share of a query's attention on itself, and on {where}; special: on special tokens",
            "entropy: of the attention, 1 if uniform; beta: mean of the diagonal of W_Q W_K^T",
            "r(3.19): correlation with the map that positions alone predict",
            "k: stable rank of the layer's input; D: its width",
        )
    )


def _near(tokens: TokenGrid, f: int) -> np.ndarray:
    """(patches, patches) bool: whether the key is in the f x f window around the query, or one of the f last tokens."""
    if tokens.causal:
        back = np.subtract.outer(np.arange(tokens.columns), np.arange(tokens.columns))
        return (back >= 0) & (back < f)
    y, x = np.divmod(np.arange(tokens.rows * tokens.columns), tokens.columns)
    return (np.abs(y[:, None] - y) <= f // 2) & (np.abs(x[:, None] - x) <= f // 2)


def _by_offset(maps: np.ndarray, tokens: TokenGrid) -> np.ndarray:
    """(..., n, n) to means over pairs of equal offset, (..., 2 rows - 1, 2 columns - 1)."""
    rows, columns = tokens.rows, tokens.columns
    y, x = np.divmod(np.arange(rows * columns), columns)
    place = (y - y[:, None] + rows - 1) * (2 * columns - 1) + (x - x[:, None] + columns - 1)  # (query, key)
    size = (2 * rows - 1) * (2 * columns - 1)
    counts = np.bincount(place.ravel(), minlength=size)
    flat = maps[..., tokens.prefix :, tokens.prefix :].reshape(-1, place.size)
    sums = np.stack([np.bincount(place.ravel(), weights=m, minlength=size) for m in flat])
    return (sums / counts).reshape(*maps.shape[:-2], 2 * rows - 1, 2 * columns - 1)


def _correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Pearson correlation of entries; None if one of the arrays is constant."""
    a, b = one.ravel() - one.mean(), other.ravel() - other.mean()
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale > 0 else None
