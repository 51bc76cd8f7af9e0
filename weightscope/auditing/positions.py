"""Expectations of `sinusoidal_positions_` and `impulse_attention_`: inner products of codes, and attention maps."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import AttentionPart, NamedTensors, positions
from weightscope.anatomy.embedding import find_positions
from weightscope.anatomy.matrices import chosen_layers
from weightscope.anatomy.token_grid import Offset, TokenGrid
from weightscope.auditing.attention import self_attention
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, checks_of
from weightscope.errors import AnatomyError
from weightscope.init.impulse import attention_map, impulse_matrix, normalised
from weightscope.init.impulse_attention import filter_offsets, nearest_table, position_codes
from weightscope.init.positions import table_codes


@EXPECTATIONS.register("sinusoidal_positions")
def sinusoidal_positions_checks(source: NamedTensors, *, gamma: float, special: str, temperature: float) -> list[Check]:
    """Checks of every table's inner products `P P^T = gamma^2 C C^T`, which are invariant to the order of features.

    Raises:
        AnatomyError: if there is no position embedding.
    """
    choice("special", special, ("keep", "zero"))
    checks = []
    for i, table in enumerate(positions(source)):
        value = table.read().cpu().double()
        codes, ordinary = table_codes(table, temperature).double(), value[table.prefix :]
        mine, theirs = ordinary @ ordinary.T, codes @ codes.T
        scale = float((mine * theirs).sum() / theirs.square().sum())
        distance = float((mine - scale * theirs).norm() / mine.norm().clamp_min(1e-300))
        rows = [
            ("gamma", math.sqrt(max(scale, 0.0)), (0.99 * abs(gamma), 1.01 * abs(gamma))),
            ("distance of inner products", distance, (0.0, 0.01)),
        ]
        if special == "zero" and table.prefix:
            rows.append(("special tokens", float(value[: table.prefix].abs().max()), (0.0, 0.0)))
        checks += checks_of("sinusoidal_positions", "positions", i, None, table.name, rows)
    return checks


@EXPECTATIONS.register("impulse_attention")
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
) -> list[Check]:
    """Checks of every head's attention map on the position codes.

    - peaks: share of the tokens with a target in the image whose largest weight is that of the target;
    - weight: the mean attention of these tokens to their targets;
    - error: mean squared error of the map against the impulse matrix, times the number of tokens;
    - uses of the offset: how many heads of the layer so far have the head's offset.

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
            codes, tokens = position_codes(part, nearest_table(part, tables), grid)
            every = filter_offsets(filter_size, tokens.rows > 1)
            known = every if isinstance(offsets, str) else [(dy, dx) for dy, dx in offsets]
            known = [offset for offset in known if not tokens.causal or offset <= (0, 0)]
            checks += _maps(part, normalised(codes) if normalise else codes.double(), tokens, known)
    if not checks:
        raise AnatomyError("expected layers solved for positions, found none to check")
    return checks


def _maps(part: AttentionPart, x: Tensor, tokens: TokenGrid, known: list[Offset]) -> list[Check]:
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
        allowed = math.ceil(part.heads / len(known))
        rows = [
            ("peaks", float(hits[best].sum()) / len(valid), (0.95, 1.0)),
            ("weight", weight, (0.5, 1.0)),
            ("error", error, (0.0, 0.5)),
            ("uses of the offset", float(used[known[best]]), (1.0, float(allowed))),
        ]
        name = f"{part.name} {known[best]}"
        checks += checks_of("impulse_attention", "map", part.layer, head, name, rows)
    return checks
