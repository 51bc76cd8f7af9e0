"""Expectations of the initialisers of attention: products near a multiple of the identity, attention maps, positions.

Checks of mimetic attention are of the effective operators `W_Q W_K^T` of a head and `sum_h W_V W_O` of a layer, in the
row-vector convention, so that any construction with the same products passes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from scipy import optimize, stats
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import (
    AttentionPart,
    ModuleTensors,
    NamedTensors,
    PositionEmbedding,
    chosen_layers,
    parts_of,
    positions,
    self_attention,
)
from weightscope.anatomy.attention_modules import chosen_heads
from weightscope.anatomy.embedding import Offset, TokenGrid
from weightscope.auditing.intervals import (
    LEVEL,
    RUNS,
    UNTOUCHED,
    Interval,
    Row,
    default_start,
    error_in,
    interval,
    predicted,
    row,
    zero_biases,
)
from weightscope.auditing.report import EXPECTATIONS, Check, checks_of
from weightscope.errors import AnatomyError
from weightscope.init import impulse_attention as impulse
from weightscope.init.attention import PARTS, mimetic_attention_, numbers, table_codes
from weightscope.init.base import uniform

_LARGEST = 192  # width of the models in which the initialiser is run; fluctuations at larger widths are scaled
_SEED = 0x5EED  # of the runs, so that an audit is reproducible


# --- mimetic attention ------------------------------------------------------------------------------------------------


def product_statistics(a: Tensor, b: Tensor) -> dict[str, float]:
    """The statistics of `M = A B^T` that are checked, for A, B (d, r); `FactoredProduct.statistics` defines them."""
    m = a.double() @ b.double().T
    diagonal, energy, d = m.diagonal(), m.square().sum(), len(m)
    beta = diagonal.mean()
    found = {
        "diagonal mean": beta,
        "diagonal std": diagonal.std(correction=0),
        "off-diagonal": ((energy - diagonal.square().sum()).clamp_min(0) / d).sqrt(),
        "alpha": ((energy - d * beta.square()).clamp_min(0) / d).sqrt(),
        "asymmetry": ((energy - (m * m.T).sum()).clamp_min(0) / energy).sqrt(),
    }
    return {name: float(value) for name, value in found.items()}


def _measured(part: AttentionPart, kind: str) -> list[dict[str, float]]:
    """The statistics of each head's query-key product ("qk"), or of a layer's value-output product ("vo").

    - other heads: the largest correlation of a head's product, without its diagonal mean, with those of other heads of
      the layer: 1 if two heads have the same noise.
    """
    if kind == "vo":
        v, o = part.read("v").cpu(), part.read("o").cpu()  # (kv, d, k), (H, k, d)
        # The query heads of a group add up, since they share a value head.
        shared = o.unflatten(0, (part.kv_heads, -1)).sum(1)  # (kv, k, d)
        return [product_statistics(v.permute(1, 0, 2).flatten(1), shared.flatten(0, 1).T)]
    q, k = part.read("q").cpu(), part.read("k").cpu()[[part.kv_head(head) for head in range(part.heads)]]  # (H, d, k)
    out = [product_statistics(*pair) for pair in zip(q, k, strict=True)]
    if part.heads > 1:
        for found, value in zip(out, _likeness_of_heads(q, k), strict=True):
            found["other heads"] = value
    return out


def _likeness_of_heads(a: Tensor, b: Tensor) -> list[float]:
    """The largest correlation of each `A_h B_h^T`, without its diagonal mean, with the others, for A, B (H, d, k)."""
    heads, d, k = a.shape
    grams = [x.permute(1, 0, 2).flatten(1).T @ x.permute(1, 0, 2).flatten(1) for x in (a, b)]  # (H k, H k)
    products = (grams[0] * grams[1]).double().view(heads, k, heads, k).sum((1, 3))  # <M_g, M_h>
    traces = (a * b).double().sum((1, 2))
    products -= traces.outer(traces) / d
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    return (products / norms.outer(norms)).abs().fill_diagonal_(0).amax(1).tolist()


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention layer."""

    width: int  # d
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_width: int  # k

    def scaled(self) -> "Sizes":
        """The same at a width that is cheap to initialise, with the same k / d."""
        if self.width <= _LARGEST:
            return self
        d = next((d for d in range(_LARGEST, _LARGEST // 2, -1) if self.head_width * d % self.width == 0), _LARGEST)
        return replace(self, width=d, head_width=max(1, round(self.head_width * d / self.width)))

    def drawn(self, kind: str, numbers: Mapping[str, Any] | None, draws: int) -> list[dict[str, float]]:
        """Statistics of a model's products, initialised with the numbers, or at torch's default start without any."""
        g, layers = torch.Generator().manual_seed(_SEED), math.ceil(draws / (self.heads if kind == "qk" else 1))
        d, rows, kv_rows = self.width, self.heads * self.head_width, self.kv_heads * self.head_width
        shapes = {"q": (rows, d), "k": (kv_rows, d), "v": (kv_rows, d), "o": (d, rows)}
        model = NamedTensors(
            {
                f"blocks.{i}.attn.{name}_proj.weight": uniform(*shape, bound=shape[1] ** -0.5, generator=g)
                for i in range(layers)
                for name, shape in shapes.items()
            },
            {"num_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_width},
        )
        if numbers is not None:
            mimetic_attention_(model, **numbers, parts=kind, generator=g)
        return [found for part in self_attention(model) for found in _measured(part, kind)]


@lru_cache(maxsize=256)
def expected(
    sizes: Sizes, kind: str, given: tuple[tuple[str, Any], ...]
) -> dict[str, tuple[Interval, dict[str, float]]]:
    """Statistic -> its interval, and error -> the probability that the check fails for one product with that error.

    `diagonal std` scales as 1/sqrt(d); the others converge. All fluctuate by 1/d. The correlation with other heads may
    be anything up to the middle between the largest of the runs and 1, since a largest value has long tails.
    """
    small, numbers = sizes.scaled(), dict(given)
    ratio, draws = small.width / sizes.width, 2 * RUNS * min(8, max(1, _LARGEST // small.width))  # small ones cost less
    right, others = small.drawn(kind, numbers, draws), {UNTOUCHED: small.drawn(kind, None, draws // 4)}
    for name in (f"alpha_{kind}", f"beta_{kind}"):
        if numbers.get(name):
            others[error_in(name)] = small.drawn(kind, numbers | {name: 1.2 * numbers[name]}, draws // 4)
    # For half precision, an approximate SVD, and the finite width of the runs.
    base, out = 2e-3 + (1 / small.width if ratio < 1 else 0), dict[str, tuple[Interval, dict[str, float]]]()
    scale = max(numbers.get(f"alpha_{kind}", 0.0), abs(numbers[f"beta_{kind}"]))
    for name in right[0]:
        factor, shrink = (math.sqrt(ratio), math.sqrt(ratio)) if name == "diagonal std" else (1.0, ratio)
        slack, values = base * factor * (1 if name == "asymmetry" else scale), [one[name] for one in right]
        limits = interval(predicted(values, factor, shrink), slack)
        if name == "other heads":
            limits = 0.0, (1 + max(values)) / 2 + base
        wrong = {error: predicted([one[name] for one in drawn], factor, shrink) for error, drawn in others.items()}
        out[name] = limits, row(name, 0.0, limits, wrong)[3]
    return out


@EXPECTATIONS.register(
    "mimetic_attention", reads=("attention modules",), variants=({"preset": "vision"}, {"preset": "language"})
)
def mimetic_attention_checks(source: NamedTensors, **p: Any) -> Iterator[Check]:
    """Checks of every head's query-key product and every layer's value-output product.

    Intervals are those of the initialiser in models of the same sizes, or of the same ratios at a smaller width.
    """
    names = ("alpha_qk", "beta_qk", "alpha_vo", "beta_vo")
    values = numbers(p["preset"], p["construction"], tuple(p[name] for name in names))
    given = {"construction": p["construction"]} | dict(zip(names, values, strict=True))
    if p["construction"] == "same-random":  # has no alphas
        given = {name: value for name, value in given.items() if not name.startswith("alpha")}
    choice("parts", p["parts"], PARTS)
    chosen = list(chosen_heads(chosen_layers(self_attention(source, strict=None), p["layers"]), p["heads"]))
    for kind in ("qk", "vo") if p["parts"] == "both" else (p["parts"],):
        for part in chosen:
            sizes = Sizes(part.width, part.heads, part.kv_heads, part.head_width)
            limits = expected(sizes, kind, tuple(given.items()))
            for head, found in enumerate(_measured(part, kind)):
                number = part.numbers[head] if kind == "qk" else None
                rows = [(name, value, *limits[name]) for name, value in found.items()]
                yield from checks_of("mimetic_attention", kind, part.layer, number, part.name, rows)


# --- positions --------------------------------------------------------------------------------------------------------

_STARTS = 4  # draws of what an untouched table starts from


@EXPECTATIONS.register("sinusoidal_positions", reads=("position embeddings",))
def sinusoidal_positions_checks(source: NamedTensors, *, gamma: float) -> Iterator[Check]:
    """Checks of every table's inner products `P P^T = gamma^2 C C^T`, which are invariant to the order of features.

    An untouched table is the one that its module's `reset_parameters` makes, else a random one. Where the former has
    the same codes, as in the package's ViT, the audit is undecidable; so it is for fixed tables and tables called
    `pos_embed` without a module, of which only the network's constructor knows what they start from.
    """
    for i, table in enumerate(positions(source, strict=None)):
        value = table.read().cpu().double()
        codes = table_codes(table).double()
        scale, distance = _likeness(value[table.prefix :], codes)
        starts = [_likeness(start, codes[: len(start)]) for start in _starts(source, table)]
        scaled, apart = map(predicted, zip(*starts, strict=True)) if starts else (abs(gamma), 0.0)
        wrong = {error_in("gamma"): 1.2 * abs(gamma), UNTOUCHED: scaled}
        rows = [
            row("gamma", scale, abs(gamma), wrong, slack=0.01 * abs(gamma)),
            row("distance of inner products", distance, (0.0, 0.01), {UNTOUCHED: apart}),
        ]
        yield from checks_of("sinusoidal_positions", "positions", i, None, table.name, rows)


def _starts(source: NamedTensors, table: PositionEmbedding) -> list[Tensor]:
    """Draws of what an untouched table starts from (N, d); none where it may be anything."""
    reset = [default_start(source, table.name, seed) for seed in range(_STARTS)]
    if known := [start for start in reset if start is not None]:
        return [start.reshape(table.tokens, table.width)[table.prefix :].cpu().double() for start in known]
    if not table.trained or (not isinstance(source, ModuleTensors) and table.name.endswith("pos_embed")):
        return []
    g, size = torch.Generator().manual_seed(0), (min(256, table.tokens - table.prefix), table.width)
    return [torch.randn(size, generator=g, dtype=torch.float64) for _ in range(_STARTS)]


def _likeness(table: Tensor, codes: Tensor) -> tuple[float, float]:
    """The gamma for which `gamma^2 C C^T` is nearest to `P P^T`, and the relative distance."""
    mine, theirs = table @ table.T, codes @ codes.T
    scale = float((mine * theirs).sum() / theirs.square().sum())
    return math.sqrt(max(scale, 0.0)), float((mine - scale * theirs).norm() / mine.norm().clamp_min(1e-300))


# --- impulses ---------------------------------------------------------------------------------------------------------

PEAKS = (0.95, 1.0)
BLUNT_PEAKS = (0.45, 1.0)  # where norms are kept; at width 24, half of a head's tokens had their peak elsewhere
# The solver's own factors were 0.88 to 1.14 in 27 heads of 5 networks (widths 32 to 96); powers assume 10 % spread.
FACTOR = (0.7, 1.5)


@EXPECTATIONS.register("impulse_attention", reads=("attention modules",))
def impulse_attention_checks(source: NamedTensors, **p: Any) -> list[Check]:
    """Checks of every head's attention map on the position codes.

    - peaks: share of the tokens with a target in the image whose largest weight is that of the target;
    - weight: the mean attention of these tokens to their targets;
    - error: mean squared error of the map against the impulse matrix, times the number of tokens;
      these two, and the next, of maps whose norm is free;
    - logit factor: the factor by which all logits exceed those that minimise the initialiser's objective, which steps
      of Adam have not reached (not checked);
    - uses of the offset: how many heads of the layer so far have the head's offset, which may be drawn independently;
    - copies: heads before with the same queries and keys;
    - largest bias: of queries and keys, which would move the map.

    The offset of a head is the one to which most of its tokens attend. Layers solved for another pseudo input than
    positions are not checked, since their maps on the codes are arbitrary.
    """
    found = self_attention(source, strict=None)
    wanted, tables = chosen_layers(found, p["layers"]), parts_of("position embeddings", source, strict=None)
    checks: list[Check] = []
    for i, part in enumerate(found):
        kind = p["pseudo_input"] if i == 0 or p["following"] is None else p["following"]
        if part not in wanted or kind != "positions":
            continue
        part = impulse.of_positions_alone(part, p["causal"])
        codes, tokens = impulse.position_codes(part, impulse.nearest_table(part, tables), p["grid"])
        known = impulse.known_offsets(p["offsets"], p["filter_size"], tokens)
        x = impulse.normalised(codes) if p["normalise"] else codes.double()
        free = p["norm"] == "free"
        checks += _maps(chosen_heads([part], p["heads"])[0], x, tokens, known, free, free and p["adam_steps"] is None)
    if not checks:
        raise AnatomyError("expected layers solved for positions, found none to check")
    return checks


def _maps(
    part: AttentionPart, x: Tensor, tokens: TokenGrid, known: list[Offset], sharp: bool, minimised: bool
) -> Iterator[Check]:
    q, k = part.read("q").cpu().double(), part.read("k").cpu().double()
    targets = torch.stack([tokens.targets(offset) for offset in known])  # (offsets, N)
    most = max(math.ceil(part.heads / len(known)), stats.binom.isf(LEVEL, part.heads, 1 / len(known)))
    used: dict[Offset, int] = {}
    for head in range(part.heads):
        found = impulse.attention_map(x, q[head], k[part.kv_head(head)], part.scale, tokens.causal)
        hits = (targets == found.argmax(1)) & (targets >= 0)
        best = int((hits.sum(1) / (targets >= 0).sum(1).clamp_min(1)).argmax())
        valid = (targets[best] >= 0).nonzero()[:, 0]
        wanted = impulse.impulse_matrix(tokens, known[best]).double()
        used[known[best]] = used.get(known[best], 0) + 1
        copies = sum(torch.equal(q[head], q[h]) and part.kv_heads == part.heads for h in range(head))
        # Of an untouched head's tokens, one in N has its largest weight at a given target.
        limits = PEAKS if sharp else BLUNT_PEAKS
        chance = float(stats.binom.sf(math.ceil(limits[0] * len(valid)) - 1, len(valid), 1 / tokens.total))
        rows: list[Row] = [
            ("peaks", float(hits[best].sum()) / len(valid), limits, {UNTOUCHED: 1 - min(1.0, len(known) * chance)}),
            row("uses of the offset", float(used[known[best]]), (1.0, float(most))),
            row("copies", float(copies), 0.0),
        ]
        if sharp:
            rows.append(row("weight", float(found[valid, targets[best][valid]].mean()), (0.5, 1.0)))
            rows.append(row("error", float((found - wanted).square().mean()) * tokens.total, (0.0, 0.5)))
        if minimised:
            factor = _logit_factor(part, x, q[head], k[part.kv_head(head)], tokens, wanted)
            wrong = {f"logits 2 times too {size}": stats.norm(f, 0.1 * f) for size, f in (("large", 2), ("small", 0.5))}
            rows.append(row("logit factor", factor, FACTOR, wrong))
        name = f"{part.name} {known[best]}"
        yield from checks_of("impulse_attention", "map", part.layer, part.numbers[head], name, rows)
    yield from checks_of("impulse_attention", "map", part.layer, None, part.name, zero_biases(part, "qk"))


def _logit_factor(part: AttentionPart, x: Tensor, q: Tensor, k: Tensor, tokens: TokenGrid, wanted: Tensor) -> float:
    """1 / t for the t that minimises the objective of `impulse_attention.solve` on t times the logits; 1 if solved."""
    logits = (x @ q) @ (x @ k).mT * part.scale
    if tokens.causal:
        logits = impulse.masked(logits)
    # With a shared key only the queries are free, else both grow with sqrt(t).
    powers = (2, 0) if part.kv_heads < part.heads else (1, 1)
    directions = impulse.coordinates(x)[1]
    norms = [float((directions @ m).square().sum()) for m in (q, k)]  # outside the span nothing was solved

    def objective(log: float) -> float:
        t = math.exp(log)
        error = float((torch.softmax(logits * t, dim=1) - wanted).square().sum()) / tokens.total
        return error + impulse.PENALTY * tokens.total * sum(
            n * t**power for n, power in zip(norms, powers, strict=True)
        )

    return math.exp(-optimize.minimize_scalar(objective, bounds=(-3, 3), method="bounded", options={"xatol": 1e-2}).x)
