"""Expectations of `sinusoidal_positions_` and `impulse_attention_`: inner products of codes, and attention maps."""

import math
from collections.abc import Sequence

import torch
from scipy import optimize, stats
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import AttentionPart, ModuleTensors, NamedTensors, PositionEmbedding, positions
from weightscope.anatomy.attention_part import chosen_heads
from weightscope.anatomy.embedding import find_positions
from weightscope.anatomy.matrices import chosen_layers
from weightscope.anatomy.token_grid import Offset, TokenGrid
from weightscope.auditing.attention import self_attention
from weightscope.auditing.default_start import default_start
from weightscope.auditing.intervals import LEVEL, UNTOUCHED, Interval, error_in, outside, outside_of
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.errors import AnatomyError
from weightscope.init.attention import table_codes
from weightscope.init.impulse_attention import (
    PENALTY,
    attention_map,
    filter_offsets,
    impulse_matrix,
    nearest_table,
    normalised,
    position_codes,
    span,
)
from weightscope.networks.layers import TEMPERATURE

DISTANCE = (0.0, 0.01)
PEAKS = (0.95, 1.0)
# The solver's own factors were 0.88 to 1.14 in 27 heads of 5 networks (widths 32 to 96); powers assume 10 % spread.
FACTOR = (0.7, 1.5)
_DRAWS = 4  # of what an untouched network starts from
_WRONG_LOGITS = (("2", "large", 2.0), ("2", "small", 0.5))


@EXPECTATIONS.register("sinusoidal_positions")
def sinusoidal_positions_checks(source: NamedTensors, *, gamma: float, special: str, temperature: float) -> list[Check]:
    """Checks of every table's inner products `P P^T = gamma^2 C C^T`, which are invariant to the order of features.

    An untouched table is the one that its module's `reset_parameters` makes, else a random one. Where the former has
    the same codes, as in the package's ViT, the audit is undecidable; so it is for fixed tables and tables called
    `pos_embed` without a module, of which only the network's constructor knows what they start from.

    Raises:
        AnatomyError: if there is no position embedding.
    """
    choice("special", special, ("keep", "zero"))
    checks = []
    g = torch.Generator().manual_seed(0)
    for i, table in enumerate(positions(source)):
        value = table.read().cpu().double()
        codes, ordinary = table_codes(table, temperature).double(), value[table.prefix :]
        scale, distance = _likeness(ordinary, codes)
        limits = (0.99 * abs(gamma), 1.01 * abs(gamma))
        name = table.name
        if distance > DISTANCE[1] and table.grid is None and _likeness(ordinary, _endpoint_codes(ordinary))[1] < 0.01:
            name += " (sinusoidal, but with the frequencies T^(-i / (q - 1)) of Whisper and tensor2tensor)"
        off = {error_in("gamma"): outside(limits, 1.2 * abs(gamma), 0.0)}
        scaled, apart = _untouched(source, table, codes, limits, g)
        rows: list[Row] = [
            ("gamma", math.sqrt(max(scale, 0.0)), limits, {**off, UNTOUCHED: scaled}),
            ("distance of inner products", distance, DISTANCE, {UNTOUCHED: apart}),
        ]
        if special == "zero" and table.prefix:
            rows.append(("special tokens", float(value[: table.prefix].abs().max()), (0.0, 0.0)))
        checks += checks_of("sinusoidal_positions", "positions", i, None, name, rows)
    return checks


def _untouched(
    source: NamedTensors, table: PositionEmbedding, codes: Tensor, limits: Interval, generator: torch.Generator
) -> tuple[float, float]:
    """The powers of the checks of gamma and of the distance against the network's default start."""
    starts = [default_start(source, table.name, seed) for seed in range(_DRAWS)]
    likenesses = [
        _likeness(start.reshape(table.tokens, table.width)[table.prefix :].cpu().double(), codes)
        for start in starts
        if start is not None
    ]
    if likenesses:
        scales, distances = zip(*likenesses, strict=True)
        return outside_of(limits, [math.sqrt(max(scale, 0.0)) for scale in scales]), outside_of(DISTANCE, distances)
    ours = not isinstance(source, ModuleTensors) and table.name.endswith("pos_embed")
    if ours or not table.trained:
        return 0.0, 0.0
    size = min(256, len(codes)), table.width
    drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(_DRAWS)]
    return 0.0, outside_of(DISTANCE, [_likeness(draw, codes[:256])[1] for draw in drawn])


def _likeness(table: Tensor, codes: Tensor) -> tuple[float, float]:
    """The s for which `s C C^T` is nearest to `P P^T`, and its relative distance."""
    mine, theirs = table @ table.T, codes @ codes.T
    scale = float((mine * theirs).sum() / theirs.square().sum())
    return scale, float((mine - scale * theirs).norm() / mine.norm().clamp_min(1e-300))


def _endpoint_codes(table: Tensor) -> Tensor:
    """Codes (N, d) with q = d / 2 frequencies from 1 to exactly 1/T: `T^(-i / (q - 1))`, not `T^(-i / q)`.

    Source: Vaswani et al.'s tensor2tensor, from which Whisper and fairseq have it.
    """
    q = table.shape[1] // 2
    frequencies = TEMPERATURE ** (-torch.arange(q, dtype=torch.float64) / max(1, q - 1))
    angles = torch.arange(len(table), dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@EXPECTATIONS.register("impulse_attention", reads=("attention modules",))
def impulse_attention_checks(
    source: NamedTensors,
    *,
    filter_size: int,
    offsets: str | Sequence[Sequence[int]],
    pseudo_input: str,
    following: str | None,
    normalise: bool,
    grid: int | Sequence[int] | None,
    layers: int | list[int] | None,
    heads: int | list[int] | None,
    adam_steps: int | None,
) -> list[Check]:
    """Checks of every head's attention map on the position codes.

    - peaks: share of the tokens with a target in the image whose largest weight is that of the target;
    - weight: the mean attention of these tokens to their targets;
    - error: mean squared error of the map against the impulse matrix, times the number of tokens;
    - logit factor: the factor by which all logits exceed those that minimise the initialiser's objective, which steps
      of Adam have not reached (not checked);
    - uses of the offset: how many heads of the layer so far have the head's offset, which may be drawn independently;
    - copies: heads before with the same queries and keys.

    The offset of a head is the one to which most of its tokens attend. Layers solved for another pseudo input than
    positions are not checked, since their maps on the codes are arbitrary.

    Raises:
        AnatomyError: if there is no self-attention, or no position embedding and no `grid`.
    """
    found = self_attention(source)
    wanted = chosen_layers(found, layers)
    tables = find_positions(source)
    checks: list[Check] = []
    for i, part in enumerate(found):
        kind = pseudo_input if i == 0 or following is None else following
        if part in wanted and kind == "positions":
            if part.positional:
                raise AnatomyError(f"`{part.name}`: gates or convolutions enter the map, so Q K^T does not give it")
            codes, tokens = position_codes(part, nearest_table(part, tables), grid)
            every = filter_offsets(filter_size, tokens.rows > 1)
            known = every if isinstance(offsets, str) else [(dy, dx) for dy, dx in offsets]
            known = [offset for offset in known if not tokens.causal or offset <= (0, 0)]
            x = normalised(codes) if normalise else codes.double()
            checks += _maps(chosen_heads([part], heads)[0], x, tokens, known, minimised=adam_steps is None)
    if not checks:
        raise AnatomyError("expected layers solved for positions, found none to check")
    return checks


def _maps(part: AttentionPart, x: Tensor, tokens: TokenGrid, known: list[Offset], *, minimised: bool) -> list[Check]:
    q, k = part.read("q").cpu().double(), part.read("k").cpu().double()
    targets = torch.stack([tokens.targets(offset) for offset in known])  # (offsets, N)
    used: dict[Offset, int] = {}
    checks = []
    for head in range(part.heads):
        found = attention_map(x, q[head], k[part.kv_head(head)], part.scale, tokens.causal)
        hits = (targets == found.argmax(1)) & (targets >= 0)
        best = int((hits.sum(1) / (targets >= 0).sum(1).clamp_min(1)).argmax())
        valid = (targets[best] >= 0).nonzero()[:, 0]
        weight = float(found[valid, targets[best][valid]].mean())
        wanted = impulse_matrix(tokens, known[best]).double()
        error = float((found - wanted).square().mean()) * tokens.total
        used[known[best]] = used.get(known[best], 0) + 1
        most = max(math.ceil(part.heads / len(known)), stats.binom.isf(LEVEL, part.heads, 1 / len(known)))
        copies = sum(torch.equal(q[head], q[h]) and part.kv_heads == part.heads for h in range(head))
        # Of an untouched head's tokens, one in N has its largest weight at a given target.
        chance = float(stats.binom.sf(math.ceil(PEAKS[0] * len(valid)) - 1, len(valid), 1 / tokens.total))
        rows: list[Row] = [
            ("peaks", float(hits[best].sum()) / len(valid), PEAKS, {UNTOUCHED: 1 - min(1.0, len(known) * chance)}),
            ("weight", weight, (0.5, 1.0)),
            ("error", error, (0.0, 0.5)),
            ("uses of the offset", float(used[known[best]]), (1.0, float(most))),
            ("copies", float(copies), (0.0, 0.0)),
        ]
        if minimised:
            factor = _logit_factor(part, x, q[head], k[part.kv_head(head)], tokens, wanted)
            doubled = {f"logits {n} times too {what}": outside(FACTOR, f, 0.1 * f) for n, what, f in _WRONG_LOGITS}
            rows.append(("logit factor", factor, FACTOR, doubled))
        name = f"{part.name} {known[best]}"
        checks += checks_of("impulse_attention", "map", part.layer, part.numbers[head], name, rows)
    return checks


def _logit_factor(part: AttentionPart, x: Tensor, q: Tensor, k: Tensor, tokens: TokenGrid, wanted: Tensor) -> float:
    """1 / t for the t that minimises the objective of `impulse.solve` on t times the logits; 1 at its solution."""
    logits = (x @ q) @ (x @ k).mT * part.scale
    if tokens.causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    # With a shared key only the queries are free, else both grow with sqrt(t).
    powers = (2, 0) if part.kv_heads < part.heads else (1, 1)
    directions = span(x)
    norms = [float((directions @ m).square().sum()) for m in (q, k)]  # outside the span nothing was solved

    def objective(log: float) -> float:
        t = math.exp(log)
        error = float((torch.softmax(logits * t, dim=1) - wanted).square().sum()) / tokens.total
        return error + PENALTY * tokens.total * sum(n * t**power for n, power in zip(norms, powers, strict=True))

    return math.exp(-optimize.minimize_scalar(objective, bounds=(-3, 3), method="bounded", options={"xatol": 1e-2}).x)
