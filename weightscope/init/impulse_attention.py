"""Impulse initialisation of self-attention: heads that start as convolutions with a one-pixel filter.

Each offset is solved once, which three facts make fast. Position codes are smooth: all but about 20 of their singular
values vanish. Sinusoidal codes turn a shift into a rotation: with R the linear map that shifts codes, `(R Q_0, K_0)`
attends to the offset where `(Q_0, K_0)` attends to the token itself. And (Q R', K R') has the same logits for every
orthogonal R', so heads with one offset share a solution without sharing weights.
"""

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weightscope._util.checks import choice, count, flag, odd
from weightscope._util.threads import one_thread
from weightscope.anatomy import AttentionPart, PositionEmbedding, chosen_layers, named_tensors, parts_of, self_attention
from weightscope.anatomy.attention_part import PartName, chosen_heads
from weightscope.anatomy.embedding import Offset, TokenGrid
from weightscope.anatomy.tensors import check_separate, shared
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init._trained import token_grid
from weightscope.init.base import INITIALISERS, Generator, M, frame, normal, permutation
from weightscope.init.baselines import truncated
from weightscope.networks.layers import sinusoidal_positions

_CUT = 1e-4  # singular values of the codes below this fraction of the largest are left out
_RIDGE = 0.1  # on the least squares problem of the shift, against codes of squared norm d
PENALTY = 1e-7  # on ||Q||^2 + ||K||^2, against the mean squared error of the map
ADAM_RATE = 1e-4  # impulse paper, section 4.2
RESET = 100  # steps between resets of the norms in the published code
NORMS = ("free", "start")
_CACHED = 1 << 17  # float32 numbers of a map at a time
_START_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def impulse_matrix(tokens: TokenGrid, offset: Offset) -> Tensor:
    """The target attention map H (N, N): row i is 1 at the token `offset` away, and zero if that is outside."""
    index = tokens.targets(offset)
    out = torch.zeros(tokens.total, tokens.total)
    rows = (index >= 0).nonzero()[:, 0]
    out[rows, index[rows]] = 1
    return out


def attention_map(codes: Tensor, query: Tensor, key: Tensor, scale: float, causal: bool = False) -> Tensor:
    """`softmax(scale X Q K^T X^T)` for codes X (N, d), Q and K (..., d, k): (..., N, N), rows sum to one."""
    logits = (codes @ query) @ (codes @ key).mT * scale
    return torch.softmax(masked(logits) if causal else logits, dim=-1)


def masked(logits: Tensor, first: int = 0) -> Tensor:
    """Logits (..., n, N) of the queries from `first` on, with -inf where the key's token is later than the query's."""
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1 + first), -math.inf)


def normalised(codes: Tensor) -> Tensor:
    """Codes (N, d) after LayerNorm: rows of mean 0 and variance 1, float64; zero rows stay zero."""
    return torch.nn.functional.layer_norm(codes.double(), codes.shape[-1:], eps=1e-6)


@contextlib.contextmanager
def no_denormals() -> Iterator[None]:
    """Flush denormal numbers to zero, which the softmax of a sharp map is full of, and which take 10 times as long."""
    flushed = bool(torch.tensor([1e-30]) * 1e-10 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


@one_thread()
@no_denormals()
def solve(
    codes: Tensor,
    tokens: TokenGrid,
    offsets: Sequence[Offset],
    head_width: int,
    *,
    scale: float | None = None,
    shared_key: bool = False,
    norm: float | None = None,
) -> dict[Offset, tuple[Tensor, Tensor]]:
    """Q and K for each offset, minimising `||softmax(scale X Q K^T X^T) - H||^2 / N^2 + 1e-7 (||Q||^2 + ||K||^2)`.

    The offset (0, 0) is solved from a multiple of the identity in the space of the codes, every other one from its
    solution, shifted; both by 100 iterations of L-BFGS-B in one thread, with maps in float32. Rows whose target is
    outside the image have no impulse. The time grows as N^2.

    For codes X (N, d), heads of width k and logits scaled by `1 / sqrt(k)` by default; with `shared_key` every offset
    gets the K of (0, 0). With `norm`, Q and K are constrained to this Frobenius norm. Q and K are float64 (d, k), zero
    in the columns beyond the rank of the codes.

    Source: impulse paper, Eq. 8 and Algorithm 1, which takes 10,000 steps of Adam for every head.
    """
    if codes.ndim != 2 or len(codes) != tokens.total:
        raise UsageError(f"codes: expected one row for each of {tokens.total} tokens, found {tuple(codes.shape)}")
    found = {}
    own, directions = coordinates(codes)
    problem = _Problem(own, tokens, scale or 1 / math.sqrt(head_width), norm)
    start = problem.start(min(len(directions), head_width))
    home = problem.polish((0, 0), start, start)
    for offset in dict.fromkeys(offsets):
        a, b = home
        if offset != (0, 0):
            a, b = problem.polish(offset, problem.shift(offset) @ a, b, move_key=not shared_key)
        weights = (directions.T @ a, directions.T @ b)  # (d, k'), k' <= k
        q, k = (torch.nn.functional.pad(w, (0, head_width - w.shape[1])) for w in weights)
        found[offset] = q, k
    return found


def coordinates(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes X (N, d) in the directions that `solve` keeps (N, r), and these directions V, orthonormal (r, d).

    They are the right singular vectors with singular values above 1e-4 of the largest; the others hardly occur in X.
    """
    left, values, directions = torch.linalg.svd(codes.double(), full_matrices=False)
    rank = int((values > _CUT * values[0]).sum())
    if rank == 0:
        raise UsageError("codes: expected position codes that differ from each other, found zeros")
    return left[:, :rank] * values[:rank], directions[:rank]


@one_thread()
@no_denormals()
def by_adam(
    codes: Tensor,
    targets: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    steps: int,
    scale: float,
    causal: bool = False,
    norm: str = "free",
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 as published: Adam at rate 1e-4 on `||softmax(scale X Q K^T X^T) - H||^2 / N^2`, without a penalty.

    X (N, d), targets H (H, N, N); Q (H, d, k) and K (G, d, k) from the start given, float32. With norm "start" their
    columns get their first norms again after every 100 steps and the last. A key that heads share descends the sum of
    their errors. In one thread, so that the result does not depend on the machine's load.
    """
    x, wanted, group = codes.float(), targets.float(), len(query) // len(key)
    q, k = (value.detach().float().clone().requires_grad_() for value in (query, key))
    adam = torch.optim.Adam([q, k], lr=ADAM_RATE)
    with torch.enable_grad():
        for step in range(steps):
            found = attention_map(x, q, k.repeat_interleave(group, 0), scale, causal)
            loss = (found - wanted).square().mean((1, 2)).sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            if norm == "start" and ((step + 1) % RESET == 0 or step + 1 == steps):
                for found, first in ((q, query), (k, key)):
                    found.data = with_norms(found.data, first.float())
    return q.detach(), k.detach()


def with_norms(weights: Tensor, first: Tensor, axes: tuple[int, ...] = (-2,)) -> Tensor:
    """Weights (..., d, k) with the norms of others over some axes, by default those of their columns."""
    return weights * (first.norm(dim=axes, keepdim=True) / weights.norm(dim=axes, keepdim=True).clamp_min(1e-30))


def _balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (r, k), k <= r, with the product a b^T and the smallest norms: U S^(1/2) and V S^(1/2)."""
    u, s, vh = torch.linalg.svd(a @ b.T)
    k = a.shape[1]
    roots = s[:k].sqrt()
    return u[:, :k] * roots, vh.T[:, :k] * roots


class _Problem:
    """The fit of one attention map in coordinates Y (N, r) of the codes: logits `scale Y A B^T Y^T`."""

    def __init__(self, coordinates: Tensor, tokens: TokenGrid, scale: float, norm: float | None = None) -> None:
        self.y, self.tokens, self.scale, self.norm = coordinates, tokens, scale, norm
        self._y = coordinates.float()
        self._room = torch.empty(2, max(1, _CACHED // len(self._y)), len(self._y))

    def start(self, k: int) -> Tensor:
        """A multiple of the identity (r, k) on the leading directions, the best of a few for the offset (0, 0)."""
        eye = torch.eye(self.y.shape[1], k, dtype=self.y.dtype)
        peak = (self.y[:, :k].square().sum(1).mean() * self.scale).item()
        index = self.tokens.targets((0, 0))
        trials = [eye * math.sqrt(s / peak) for s in _START_SCALES]
        losses = [self._evaluate(index, trial, trial)[0] for trial in trials]
        return trials[min(range(len(trials)), key=losses.__getitem__)]

    def shift(self, offset: Offset) -> Tensor:
        """The linear map (r, r) that takes codes nearest to those at the offset, or to zero if that is outside."""
        index = self.tokens.targets(offset)
        there = self.y[index.clamp_min(0)] * (index >= 0)[:, None]
        ridge = _RIDGE * torch.eye(self.y.shape[1], dtype=self.y.dtype)
        return torch.linalg.solve(self.y.T @ self.y + ridge, self.y.T @ there)

    def polish(self, offset: Offset, a: Tensor, b: Tensor, move_key: bool = True) -> tuple[Tensor, Tensor]:
        """Minimise the objective by L-BFGS-B from (a, b)."""
        from scipy.optimize import minimize

        index, start = self.tokens.targets(offset), torch.stack(_balanced(a, b)) if move_key else a[None]

        def factors(x: np.ndarray) -> tuple[Tensor, Tensor | float]:
            both = torch.from_numpy(x).reshape(start.shape)
            size = both.norm(dim=(1, 2), keepdim=True) / self.norm if self.norm else 1.0
            return both / size, size

        def flat(x: np.ndarray) -> tuple[float, np.ndarray]:
            both, size = factors(x)
            loss, *gradients = self._evaluate(index, both[0], both[1] if move_key else b)
            slope = torch.stack(gradients[: len(start)])
            if self.norm:
                slope = slope - both * (slope * both).sum((1, 2), keepdim=True) / self.norm**2
            return loss, (slope / size).reshape(-1).numpy()

        options: Any = {"maxiter": 100, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
        with one_thread():  # of the library that the import loads
            found = minimize(flat, start.reshape(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
        both, _ = factors(found.x)
        return _balanced(both[0], both[1]) if move_key else (both[0], b)

    def _evaluate(self, index: Tensor, a: Tensor, b: Tensor) -> tuple[float, Tensor, Tensor]:
        """Objective, in units where the uniform map scores about 1, and its gradients, in closed form.

        Rows of the map are computed in blocks that stay in the cache. With p its weights, h the wanted ones, e = p - h
        and s = e . p, the gradient by the logits is p (e - s), which is e (e - s) but at the target.
        """
        n, y = len(index), self._y  # the uniform map has a mean squared error of 1/N
        u, v = y @ (a * self.scale).float(), y @ b.float()
        right, r = torch.cat([v, y], 1), v.shape[1]
        squares, slopes = 0.0, [torch.zeros_like(a), torch.zeros_like(b)]
        step = max(1, _CACHED // n)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            columns = rows.stop if self.tokens.causal else n
            e = torch.mm(u[rows], v[:columns].T, out=self._room[0][: rows.stop - start, :columns])
            e = torch.softmax(masked(e, start) if self.tokens.causal else e, dim=1, out=e)
            inside = (index[rows] >= 0).nonzero()[:, 0]
            target = inside, index[rows][inside]
            e[target] -= 1
            sums = torch.linalg.vector_norm(e, dim=1).square()
            squares += sums.double().sum().item()
            at = e[target]
            sums[inside] += at
            slope = torch.sub(e, sums[:, None], out=self._room[1][: rows.stop - start, :columns]).mul_(e)
            slope[target] = (at + 1) * (at - sums[inside])
            products = slope @ right[:columns]
            slopes[0] += (y[rows].T @ products[:, :r]).double()
            slopes[1] += (products[:, r:].T @ u[rows]).double()
        penalty = PENALTY * n
        loss = squares / n + penalty * (a.square().sum() + b.square().sum()).item()
        return loss, slopes[0] * (2 / n * self.scale) + 2 * penalty * a, slopes[1] * (2 / n) + 2 * penalty * b


QUERY_KEY: tuple[PartName, ...] = ("q", "k")
PSEUDO_INPUTS = ("positions", "gaussian", "uniform", "positions+gaussian", "positions+uniform")


def filter_offsets(filter_size: int, grid: bool) -> list[Offset]:
    """The f^2 offsets (dy, dx) of an f x f filter, row by row; the f offsets (0, dx) for a sequence."""
    reach = range(-(odd("filter_size", filter_size) // 2), filter_size // 2 + 1)
    return [(dy, dx) for dy in (reach if grid else (0,)) for dx in reach]


@INITIALISERS.register("impulse_attention", source="impulse paper, Algorithm 1", needs="self-attention and positions")
def impulse_attention_(
    module: M,
    *,
    filter_size: int = 3,
    offsets: str | Sequence[Sequence[int]] = "random",
    pseudo_input: str = "positions",
    following: str | None = None,
    same_layers: bool = False,
    grid: int | Sequence[int] | None = None,
    causal: bool | None = None,
    layers: int | list[int] | None = None,
    heads: int | list[int] | None = None,
    adam_steps: int | None = None,
    norm: str = "free",
    strict: bool = True,
    generator: Generator = None,
) -> M:
    """Give each head queries and keys whose attention map is an impulse: token (y, x) attends to (y + dy, x + dx).

        softmax(scale X Q K^T X^T) ~ H(dy, dx),   X = LayerNorm(pseudo input)

    In the span of the codes every head gets its own random rotation R of the solution for its offset. Outside, queries
    and keys keep their values if `norm` is "free", as under Algorithm 1, whose gradients lie in that span:

        Q <- Q_solved R + (I - V^T V) Q,   K <- K_solved R + (I - V^T V) K,   V: right singular vectors of X

    The default pseudo input is the module's own position embedding: apply `sinusoidal_positions_` before, not after.

    Args:
        module: changed in place: query and key weights of self-attention, and their biases, which become zero.
        filter_size: f, odd; offsets of an f x f filter (f for a sequence; with a causal mask those <= 0).
        offsets: "random" assigns random offsets to the heads of a layer, none twice before all are used; "cycle"
            assigns them row by row, continuing through the layers; or a list of (dy, dx), used in a cycle.
        pseudo_input: of the first layer: "positions", "gaussian" (standard deviation 0.5, truncated at 2), "uniform"
            in [-1, 1], "positions+gaussian" or "positions+uniform".
        following: the pseudo input of all later layers; None for the one of the first.
        same_layers: give every layer the offsets and rotations of the first.
        grid: of a module without a position embedding: (rows, columns) or a length, for sinusoidal codes.
        causal: of a sequence, whether later tokens are masked where the module's caller decides it; None refuses such.
        heads: which heads of each layer; None for all; of heads that share a key all or none.
        adam_steps: Algorithm 1 as published, this many steps of Adam for every head from the queries and keys that
            the module has (10,000 in the paper: minutes); None solves each offset once for all layers (a 3x3 filter on
            busy core: 2 s for 256 tokens, 18 s for 1,369).
        norm: "free", or "start": the queries and keys of each head keep their Frobenius norm, are optimised under this
            constraint, and are zero outside the span; an audit needs the same `norm`. Maps are less sharp, and at small
            widths the largest weight of some tokens is not at the target. With `adam_steps`, columns are rescaled to
            their first norms every 100 steps, as in the published code, which shrinks what is outside the span.

    Raises:
        DataError: if queries or keys of the module, which are kept in part, are not finite; with `norm="start"`,
            if those of a head are zero.
        UsageError: if queries and keys are rotated by position (RoPE) or normalised, the map has terms of its own
            (gates, convolutions), tokens see a window of the others only, or the mask is unknown.

    Source: impulse paper, Algorithm 1 and sections 4.2, 5.4.

    Example:
        >>> impulse_attention_(vit, filter_size=3, generator=torch.Generator().manual_seed(0))
    """
    choice("pseudo_input", pseudo_input, PSEUDO_INPUTS)
    choice("following", following or pseudo_input, PSEUDO_INPUTS)
    flag("same_layers", same_layers)
    choice("norm", norm, NORMS)
    if adam_steps is not None:
        count("adam_steps", adam_steps)
    tensors = named_tensors(module)
    everything = self_attention(tensors, strict=strict, caller="impulse_attention_")
    tables = parts_of("position embeddings", tensors, strict=strict, caller="impulse_attention_")
    if tables and grid is not None:
        raise UsageError(f"grid: leave it out, the module has the position embedding `{tables[0].name}`")
    towers: dict[tuple[str | int, bool], list[AttentionPart]] = {}  # the parts that share position codes
    some = chosen_heads(chosen_layers(everything, layers), heads)
    check_separate((part, name) for part in some for name in QUERY_KEY)
    for part in some:
        part = of_positions_alone(part, causal)
        table = nearest_table(part, tables)
        towers.setdefault((table.name if table else part.width, bool(part.causal)), []).append(part)
    for parts in towers.values():
        table, width = nearest_table(parts[0], tables), parts[0].width
        codes, tokens = position_codes(parts[0], table, grid)
        plans = _plans(parts, offsets, filter_size, tokens, same_layers, norm, generator)
        first = next(p.name for p in everything if p.width == width and nearest_table(p, tables) is table)
        split = len(plans) if following is None else sum(plan.part.name == first for plan in plans)
        for kind, chosen in ((pseudo_input, plans[:split]), (following or pseudo_input, plans[split:])):
            if chosen:
                x = _pseudo(kind, codes, generator)
                if adam_steps is None:
                    found = _solved(x, tokens, chosen, norm)
                else:
                    found = _descended(x, tokens, chosen, adam_steps, norm)
                for plan, pair in zip(chosen, found, strict=True):
                    for name, value in zip(QUERY_KEY, pair, strict=True):
                        plan.part.write(name, value.float())
                        if (bias := plan.part.read_bias(name)) is not None:
                            plan.part.write_bias(name, torch.zeros_like(bias))
    return module


def of_positions_alone(part: AttentionPart, causal: bool | None) -> AttentionPart:
    """The part, if Q K^T gives the map of its positions; `causal` is used where the part does not know."""
    reasons = {
        "queries and keys are rotated by position (RoPE)": part.rotary,
        "queries and keys are normalised": part.normalised,
        "gates, convolutions or biases of positions enter the map": part.positional,
    }
    if why := next((why for why, holds in reasons.items() if holds), None):
        raise UsageError(f"`{part.name}`: {why}, so Q K^T does not give the map; impulses need attention without")
    part.without("heads mixed", caller="impulse_attention_")
    return replace(part, causal=causal) if part.causal is None else part


def nearest_table(part: AttentionPart, tables: list[PositionEmbedding]) -> PositionEmbedding | None:
    """The position embedding of the width of a part with the longest common prefix of module paths."""
    fitting = [table for table in tables if table.width == part.width]
    if tables and not fitting:
        found = tables[0]
        raise AnatomyError(
            f"`{part.name}`: expected a position embedding of width {part.width}, found `{found.name}` of {found.width}"
        )
    return max(fitting, key=lambda table: len(shared((table.name.split("."), part.name.split(".")))), default=None)


def position_codes(
    part: AttentionPart, table: PositionEmbedding | None, grid: int | Sequence[int] | None
) -> tuple[Tensor, TokenGrid]:
    """The position codes (N, d) of a part's tokens, from its position embedding or for a given grid, and their grid."""
    if table is not None:
        tokens, codes = token_grid(table), table.read().cpu()
    elif grid is None:
        raise AnatomyError(
            "expected a position embedding, found none; give grid=(rows, columns) or grid=length for sinusoidal codes"
        )
    elif isinstance(grid, int):
        tokens, codes = TokenGrid(1, count("grid", grid, 2)), sinusoidal_positions(grid, None, part.width)
    elif len(grid) == 2:
        tokens = TokenGrid(count("grid", grid[0]), count("grid", grid[1]))
        codes = sinusoidal_positions(tokens.rows, tokens.columns, part.width)
    else:
        raise UsageError(f"grid: expected (rows, columns) or a length, found {grid!r}")
    if part.window is not None and max(tokens.rows, tokens.columns) > part.window:
        raise UsageError(
            f"`{part.name}`: attributes or config state a window of {part.window}, fewer than the {tokens.columns} "
            "positions in a row, so Q K^T does not give the map; impulses need attention to all tokens"
        )
    if part.causal is None and tokens.rows == 1:
        raise UsageError(
            f"`{part.name}`: expected to know whether later tokens are masked, found that its caller decides; give "
            "causal=True or causal=False, or the whole model"
        )
    return codes, replace(tokens, causal=bool(part.causal))


def _pseudo(kind: str, codes: Tensor, generator: Generator) -> Tensor:
    """The pseudo input (N, d) of a kind after LayerNorm, float64."""
    out = codes.double() if kind.startswith("positions") else torch.zeros_like(codes, dtype=torch.float64)
    if kind.endswith("gaussian"):
        out = out + truncated(*codes.shape, std=0.5, cut=2.0, generator=generator)
    elif kind.endswith("uniform"):
        out = out + (torch.special.ndtr(normal(*codes.shape, generator=generator)) * 2 - 1)
    return normalised(out)


class _Plan(NamedTuple):
    """What one attention module gets."""

    part: AttentionPart
    offsets: list[Offset]  # of the H heads
    rotations: list[Tensor]  # (k, k), one for each of the G key heads
    queries: Tensor  # of the module before, or of the first one if all layers are the same (H, d, k)
    keys: Tensor  # (G, d, k), likewise


def _plans(
    parts: list[AttentionPart],
    rule: str | Sequence[Sequence[int]],
    filter_size: int,
    tokens: TokenGrid,
    same_layers: bool,
    norm: str,
    generator: Generator,
) -> list[_Plan]:
    """The plans of attention modules; with `same_layers`, modules of one shape share the plan of the first."""
    known = known_offsets(rule, filter_size, tokens)
    in_turn, plans, kept = itertools.cycle(known), list[_Plan](), dict[tuple[float, ...], _Plan]()
    for part in parts:
        shape, k = (part.heads, part.kv_heads, part.width, part.head_width, part.scale), part.head_width
        if not (same_layers and shape in kept):
            offsets = list(itertools.islice(in_turn, part.heads)) if rule != "random" else []
            while len(offsets) < part.heads:
                offsets += [known[i] for i in permutation(len(known), generator).tolist()]
            rotations = [frame(k, k, generator=generator, dtype=torch.float64) for _ in range(part.kv_heads)]
            before = {name: part.read(name).cpu() for name in QUERY_KEY}
            if bad := next((name for name, value in before.items() if not bool(value.isfinite().all())), None):
                raise DataError(
                    f"`{part.name}` {bad}: expected finite weights, which are kept outside the span of the codes, "
                    "found NaN or infinity; initialise the module first"
                )
            if norm == "start" and not all(bool(value.any(-1).any(-1).all()) for value in before.values()):
                raise DataError(f"`{part.name}`: a norm of 0 cannot be kept, found a head with only zeros; norm='free'")
            kept[shape] = _Plan(part, offsets[: part.heads], rotations, *before.values())
        plans.append(kept[shape]._replace(part=part))
    return plans


def known_offsets(rule: str | Sequence[Sequence[int]], filter_size: int, tokens: TokenGrid) -> list[Offset]:
    """The offsets to choose from, checked."""
    known: list[Any]
    if isinstance(rule, str):
        choice("offsets", rule, ("random", "cycle"))
        known = [o for o in filter_offsets(filter_size, tokens.rows > 1) if not tokens.causal or o <= (0, 0)]
    else:
        known = [tuple(item) if isinstance(item, Sequence) else () for item in rule]
        if any(len(pair) != 2 or any(type(n) is not int for n in pair) for pair in known):
            raise UsageError(f"offsets: expected 'random', 'cycle' or pairs of integers (dy, dx), found {rule!r}")
    for offset in known:
        if not bool((tokens.targets(offset) >= 0).any()):
            raise UsageError(
                f"offsets: {offset} is outside the {tokens.rows} x {tokens.columns} tokens for every token"
            )
    if not known:
        raise UsageError("offsets: expected at least one (dy, dx), found none")
    return known


def _solved(x: Tensor, tokens: TokenGrid, plans: list[_Plan], norm: str) -> list[tuple[Tensor, Tensor]]:
    """Each head's rotation of its offset's solution in the span of the codes, and its own weights outside."""
    shapes = [(plan.part.head_width, plan.part.scale, plan.part.kv_heads < plan.part.heads) for plan in plans]
    keys = list(zip(shapes, [0] * len(plans) if norm == "free" else _alike(plans), strict=True))
    groups: dict[tuple[tuple[int, float, bool], int], list[_Plan]] = {}
    for key, plan in zip(keys, plans, strict=True):
        groups.setdefault(key, []).append(plan)
    solutions = {}
    for key, some in groups.items():
        (width, scale, shared_key), _ = key
        wanted = [offset for plan in some for offset in plan.offsets]
        size = None if norm == "free" else _mean_norm(some)
        solutions[key] = solve(x, tokens, wanted, width, scale=scale, shared_key=shared_key, norm=size)
    v, out = coordinates(x)[1], []
    for key, (part, offsets, rotations, *before) in zip(keys, plans, strict=True):
        first = offsets[:: part.heads // part.kv_heads]
        queries = [solutions[key][o][0] @ rotations[part.kv_head(h)] for h, o in enumerate(offsets)]
        shared = [solutions[key][o][1] @ r for o, r in zip(first, rotations, strict=True)]
        inside, old = (torch.stack(queries), torch.stack(shared)), [value.double() for value in before]
        if norm == "free":
            out.append((inside[0] + old[0] - v.T @ (v @ old[0]), inside[1] + old[1] - v.T @ (v @ old[1])))
        else:
            out.append((with_norms(inside[0], old[0], (-2, -1)), with_norms(inside[1], old[1], (-2, -1))))
    return out


def _alike(plans: list[_Plan]) -> list[int]:
    """For each plan the number of a class; mean norms in one differ by at most a fifth."""
    norms, least = [_mean_norm([plan]) for plan in plans], list[float]()
    for size in sorted(norms):
        if not least or size > 1.2 * least[-1]:
            least.append(size)
    return [bisect.bisect(least, size) for size in norms]


def _mean_norm(plans: list[_Plan]) -> float:
    """The geometric mean of the mean norms of the queries and the keys of heads."""
    both = torch.cat([plan.queries for plan in plans]), torch.cat([plan.keys for plan in plans])
    return math.sqrt(math.prod(float(value.double().norm(dim=(1, 2)).mean()) for value in both))


def _descended(x: Tensor, tokens: TokenGrid, plans: list[_Plan], steps: int, norm: str) -> list[tuple[Tensor, Tensor]]:
    """Algorithm 1 from the queries and keys of every module; layers that are the same are solved once."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for part, offsets, _, queries, keys in plans:
        if id(queries) not in done:
            targets = torch.stack([impulse_matrix(tokens, offset) for offset in offsets])
            done[id(queries)] = by_adam(
                x, targets, queries, keys, steps=steps, scale=part.scale, causal=tokens.causal, norm=norm
            )
    return [done[id(plan.queries)] for plan in plans]
