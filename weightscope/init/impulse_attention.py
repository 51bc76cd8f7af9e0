"""Impulse initialisation of self-attention: heads that start as convolutions with a one-pixel filter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightscope._util.checks import choice, count, flag
from weightscope.anatomy import AttentionPart, PositionEmbedding, named_tensors, self_attention
from weightscope.anatomy.attention_modules import PartName, chosen_heads
from weightscope.anatomy.embedding import Offset, TokenGrid, find_positions
from weightscope.anatomy.matrices import chosen_layers
from weightscope.anatomy.strictness import reads
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init._common import M, cpu_generator, frame, normal
from weightscope.init.impulse import by_adam, impulse_matrix, normalised, solve, span
from weightscope.init.registry import INITIALISERS
from weightscope.init.univariate import truncated
from weightscope.networks.positions import sinusoidal_positions

QUERY_KEY: tuple[PartName, ...] = ("q", "k")
PSEUDO_INPUTS = ("positions", "gaussian", "uniform", "positions+gaussian", "positions+uniform")


def filter_offsets(filter_size: int, grid: bool) -> list[Offset]:
    """The f^2 offsets (dy, dx) of an f x f filter, row by row; the f offsets (0, dx) for a sequence.

    Raises:
        UsageError: if filter_size is not odd and positive.
    """
    if count("filter_size", filter_size) % 2 == 0:
        raise UsageError(f"filter_size: expected an odd number (offsets are centred on the token), found {filter_size}")
    reach = range(-(filter_size // 2), filter_size // 2 + 1)
    return [(dy, dx) for dy in (reach if grid else (0,)) for dx in reach]


@INITIALISERS.register("impulse_attention", source="impulse paper, Algorithm 1", needs="self-attention and positions")
@reads(("attention modules",))
def impulse_attention_(
    module: M,
    *,
    filter_size: int = 3,
    offsets: str | Sequence[Sequence[int]] = "random",
    pseudo_input: str = "positions",
    following: str | None = None,
    same_layers: bool = False,
    normalise: bool = True,
    grid: int | Sequence[int] | None = None,
    layers: int | list[int] | None = None,
    heads: int | list[int] | None = None,
    adam_steps: int | None = None,
    strict: bool = True,
    generator: torch.Generator | None = None,
) -> M:
    """Give each head queries and keys whose attention map is an impulse: token (y, x) attends to (y + dy, x + dx).

        softmax(scale X Q K^T X^T) ~ H(dy, dx),   X = LayerNorm(pseudo input)

    Each offset is solved once (see `impulse.solve`) and every head gets its own random rotation R of the solution,
    which has the same map, in the span of the codes. Outside, queries and keys keep the values that they have, as under
    the steps of Algorithm 1, whose gradients lie in that span:

        Q <- Q_solved R + (I - P) Q,   K <- K_solved R + (I - P) K,   P = V^T V, V = impulse.span(X)

    The default pseudo input is the module's own position embedding, so the maps hold for the codes that the module
    adds to its tokens: apply `sinusoidal_positions_` before, not after.

    Args:
        module: changed in place: query and key weights of self-attention, and their biases, which become zero.
        filter_size: f, odd; offsets of an f x f filter (f for a sequence; with a causal mask those <= 0).
        offsets: "random" assigns random offsets to the heads of a layer, none twice before all are used; "cycle"
            assigns them row by row, continuing through the layers; or a list of (dy, dx), used in a cycle.
        pseudo_input: of the first layer: "positions", "gaussian" (standard deviation 0.5, truncated at 2), "uniform"
            in [-1, 1], "positions+gaussian" or "positions+uniform".
        following: the pseudo input of all later layers; None for that of the first.
        same_layers: give every layer the offsets and rotations of the first.
        normalise: apply LayerNorm to the pseudo input, as networks do that normalise before attention.
        grid: of a module without a position embedding: (rows, columns) or a length, for sinusoidal codes.
        layers: which layers, counted from 0; None for all.
        heads: which heads of each layer; None for all; of heads that share a key all or none.
        adam_steps: Algorithm 1 as published, this many steps of Adam for every head from the queries and keys that
            the module has (10,000 in the paper: minutes); None solves each offset once, in less than a second.
        strict: whether tensors that look like attention and cannot be read are an error; if not, a warning
            lists them and they stay as they are.
        generator: a CPU generator; None for torch's global one.

    Raises:
        AnatomyError: if the module has no attention, or no position embedding and no `grid` is given.
        DataError: if the queries and keys of the module, of which a part is kept, are not finite.
        UsageError: if an argument is invalid, or queries and keys are rotated by position (RoPE) or normalised, or the
            map has terms of its own (gates, convolutions).

    Source: impulse paper, Algorithm 1 and sections 4.2, 5.4.

    Example:
        >>> impulse_attention_(vit, filter_size=3, generator=torch.Generator().manual_seed(0))
    """
    choice("pseudo_input", pseudo_input, PSEUDO_INPUTS)
    if following is not None:
        choice("following", following, PSEUDO_INPUTS)
    flag("same_layers", same_layers)
    flag("normalise", normalise)
    if adam_steps is not None:
        count("adam_steps", adam_steps)
    for tower in _towers(module, chosen_heads(chosen_layers(self_attention(module), layers), heads), grid):
        assignment = _Assignment(offsets, filter_size, tower.tokens, same_layers, generator)
        plans = [assignment.plan(part) for part in tower.parts]
        split = len(plans) if following is None else sum(plan.part.name == tower.first for plan in plans)
        for kind, chosen in ((pseudo_input, plans[:split]), (following or pseudo_input, plans[split:])):
            if chosen:
                x = _pseudo(kind, tower.codes, normalise, generator)
                if adam_steps is None:
                    _solve_and_write(x, tower.tokens, chosen)
                else:
                    _descend_and_write(x, tower.tokens, chosen, adam_steps)
    return module


class _Tower:
    """The self-attention parts that share one position embedding, with its codes and tokens."""

    def __init__(self, codes: Tensor, tokens: TokenGrid, first: str) -> None:
        self.codes, self.tokens, self.first = codes, tokens, first
        self.parts: list[AttentionPart] = []


def _towers(module: torch.nn.Module, parts: list[AttentionPart], grid: int | Sequence[int] | None) -> list[_Tower]:
    tables = find_positions(named_tensors(module))
    if tables and grid is not None:
        raise UsageError(f"grid: leave it out, the module has the position embedding `{tables[0].name}`")
    everything = self_attention(module)
    towers: dict[tuple[str, bool], _Tower] = {}
    for part in parts:
        if part.rotary or part.normalised:
            why = "rotated by position (RoPE)" if part.rotary else "normalised"
            raise UsageError(f"`{part.name}`: queries and keys are {why}, so Q K^T does not give the attention map")
        if part.positional:
            raise UsageError(
                f"`{part.name}`: gates or convolutions enter the attention map, so Q K^T does not give it; "
                "impulse_attention is for attention without them"
            )
        table = nearest_table(part, tables)
        key = (table.name if table else f"width {part.width}", bool(part.causal))
        if key not in towers:
            mates = (p.name for p in everything if nearest_table(p, tables) is table and p.width == part.width)
            codes, tokens = position_codes(part, table, grid)
            towers[key] = _Tower(codes, tokens, next(mates))
        towers[key].parts.append(part)
    return list(towers.values())


def nearest_table(part: AttentionPart, tables: list[PositionEmbedding]) -> PositionEmbedding | None:
    """The position embedding of a part: of its width, with the longest common prefix of module paths."""
    fitting = [table for table in tables if table.width == part.width]
    if tables and not fitting:
        found = tables[0]
        raise AnatomyError(
            f"`{part.name}`: expected a position embedding of width {part.width}, found `{found.name}` of {found.width}"
        )

    def shared(table: PositionEmbedding) -> int:
        pairs = zip(table.name.split("."), part.name.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 99)

    return max(fitting, key=shared) if fitting else None


def position_codes(
    part: AttentionPart, table: PositionEmbedding | None, grid: int | Sequence[int] | None
) -> tuple[Tensor, TokenGrid]:
    """The position codes (N, d) of a part's tokens, from its position embedding or for a given grid, and their grid.

    Raises:
        AnatomyError: if there is neither.
        UsageError: if the grid is neither a length nor a pair.
    """
    causal = bool(part.causal)
    if table is not None:
        shape = table.grid or (1, table.tokens - table.prefix)
        return table.read().cpu(), TokenGrid(*shape, table.prefix, causal)
    if isinstance(grid, int):
        return sinusoidal_positions(count("grid", grid, 2), None, part.width), TokenGrid(1, grid, 0, causal)
    if grid is None:
        raise AnatomyError(
            "expected a position embedding, found none; give grid=(rows, columns) or grid=length for sinusoidal codes"
        )
    if len(grid) != 2:
        raise UsageError(f"grid: expected (rows, columns) or a length, found {grid!r}")
    rows, columns = (count("grid", n) for n in grid)
    return sinusoidal_positions(rows, columns, part.width), TokenGrid(rows, columns, 0, causal)


def _pseudo(kind: str, codes: Tensor, normalise: bool, generator: torch.Generator | None) -> Tensor:
    """The pseudo input (N, d) of a kind, float64."""
    out = codes.double() if kind.startswith("positions") else torch.zeros_like(codes, dtype=torch.float64)
    if kind.endswith("gaussian"):
        out = out + truncated(*codes.shape, std=0.5, cut=2.0, generator=generator)
    elif kind.endswith("uniform"):
        out = out + (torch.special.ndtr(normal(*codes.shape, generator=generator)) * 2 - 1)
    return normalised(out) if normalise else out


@dataclass(frozen=True)
class _Plan:
    """What one attention module gets.

    Attributes:
        part: the module.
        offsets: of the H heads.
        rotations: (k, k), one for each of the G key heads.
        queries: of the module before, or of the first one if all layers are the same (H, d, k).
        keys: (G, d, k), likewise.
    """

    part: AttentionPart
    offsets: list[Offset]
    rotations: list[Tensor]
    queries: Tensor
    keys: Tensor


class _Assignment:
    """The offset and the rotation of each head, layer by layer."""

    def __init__(
        self,
        rule: str | Sequence[Sequence[int]],
        filter_size: int,
        tokens: TokenGrid,
        same_layers: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.random, self.same, self.next = rule == "random", same_layers, 0
        self.generator = cpu_generator(generator)
        self.kept: dict[tuple[float, ...], _Plan] = {}
        if isinstance(rule, str):
            choice("offsets", rule, ("random", "cycle"))
            self.known = filter_offsets(filter_size, tokens.rows > 1)
            if tokens.causal:
                self.known = [offset for offset in self.known if offset <= (0, 0)]
        else:
            self.known = [_offset(item) for item in rule]
        for offset in self.known:
            if not bool((tokens.targets(offset) >= 0).any()):
                raise UsageError(
                    f"offsets: {offset} is outside the {tokens.rows} x {tokens.columns} tokens for every token"
                )
        if not self.known:
            raise UsageError("offsets: expected at least one (dy, dx), found none")

    def plan(self, part: AttentionPart) -> _Plan:
        """The plan of the next layer; if all layers are the same, that of the first one of its shape."""
        shape = (part.heads, part.kv_heads, part.width, part.head_width, part.scale)
        if self.same and shape in self.kept:
            return replace(self.kept[shape], part=part)
        offsets, k = self._offsets(part.heads), part.head_width
        rotations = [frame(k, k, generator=self.generator, dtype=torch.float64) for _ in range(part.kv_heads)]
        before = {name: part.read(name).cpu() for name in QUERY_KEY}
        for name, value in before.items():
            if not bool(value.isfinite().all()):
                raise DataError(
                    f"`{part.name}` {name}: expected finite weights, of which the part outside the span of the codes "
                    "is kept, found NaN or infinity; initialise the module first"
                )
        self.kept[shape] = _Plan(part, offsets, rotations, before["q"], before["k"])
        return self.kept[shape]

    def _offsets(self, heads: int) -> list[Offset]:
        """The offsets of the next layer's heads."""
        out: list[Offset] = []
        while len(out) < heads:
            if self.random:
                order = torch.randperm(len(self.known), generator=self.generator).tolist()
                out += [self.known[i] for i in order]
            else:
                out.append(self.known[self.next % len(self.known)])
                self.next += 1
        return out[:heads]


def _offset(item: Sequence[int]) -> Offset:
    if isinstance(item, str) or not isinstance(item, Sequence) or len(item) != 2:
        raise UsageError(f"offsets: expected 'random', 'cycle' or pairs (dy, dx), found {item!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) for n in item):
        raise UsageError(f"offsets: expected pairs of integers, found {item!r}")
    return item[0], item[1]


def _solve_and_write(x: Tensor, tokens: TokenGrid, plans: list[_Plan]) -> None:
    """Solve the offsets of all heads, and write each head's rotation of its solution into the span of the codes."""
    needs: dict[tuple[int, float, bool], list[Offset]] = {}
    for plan in plans:
        needs.setdefault(_problem_of(plan.part), []).extend(plan.offsets)
    solutions = {
        (k, scale, shared): solve(x, tokens, offsets, k, scale=scale, shared_key=shared)
        for (k, scale, shared), offsets in needs.items()
    }
    directions = span(x)
    for plan in plans:
        part, solved = plan.part, solutions[_problem_of(plan.part)]
        first = plan.offsets[:: part.heads // part.kv_heads]
        queries = [solved[o][0] @ plan.rotations[part.kv_head(h)] for h, o in enumerate(plan.offsets)]
        keys = [solved[o][1] @ r for o, r in zip(first, plan.rotations, strict=True)]
        _write(
            part,
            torch.stack(queries) + _outside(directions, plan.queries),
            torch.stack(keys) + _outside(directions, plan.keys),
        )


def _problem_of(part: AttentionPart) -> tuple[int, float, bool]:
    """What the solution for an offset depends on."""
    return part.head_width, part.scale, part.kv_heads < part.heads


def _outside(directions: Tensor, value: Tensor) -> Tensor:
    """`(I - V^T V) W` for orthonormal rows V (r, d) and matrices W (heads, d, k), float64."""
    return value.double() - directions.T @ (directions @ value.double())


def _descend_and_write(x: Tensor, tokens: TokenGrid, plans: list[_Plan], steps: int) -> None:
    """Run Algorithm 1 from the queries and keys of every module; layers that are the same are solved once."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for plan in plans:
        part = plan.part
        if id(plan.queries) not in done:
            targets = torch.stack([impulse_matrix(tokens, offset) for offset in plan.offsets])
            done[id(plan.queries)] = by_adam(
                x, targets, plan.queries, plan.keys, steps=steps, scale=part.scale, causal=tokens.causal
            )
        _write(part, *done[id(plan.queries)])


def _write(part: AttentionPart, queries: Tensor, keys: Tensor) -> None:
    """Write queries (H, d, k) and keys (G, d, k); their biases become zero."""
    for name, value in zip(QUERY_KEY, (queries, keys), strict=True):
        part.write(name, value.float())
        if (bias := part.read_bias(name)) is not None:
            part.write_bias(name, torch.zeros_like(bias))
