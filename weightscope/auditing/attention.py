"""Statistics of the initialisers of attention: products near a multiple of the identity, attention maps, positions.

Statistics of mimetic attention are of the effective operators `W_Q W_K^T` of a head and `sum_h W_V W_O` of a layer, in
the row-vector convention, so that any construction with the same products passes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import (
    AttentionPart,
    ModuleTensors,
    NamedTensors,
    chosen_layers,
    parts_of,
    positions,
    self_attention,
)
from weightscope.anatomy.attention_part import NO_PRODUCT, chosen_heads
from weightscope.anatomy.embedding import Offset, TokenGrid
from weightscope.auditing.report import EXPECTATIONS, UNTOUCHED, Check, error_in
from weightscope.auditing.runs import Copy, Statistic
from weightscope.errors import AnatomyError
from weightscope.init import impulse_attention as impulse
from weightscope.init.attention import PARTS, numbers, table_codes

# --- mimetic attention ------------------------------------------------------------------------------------------------

_LARGEST = 192  # width of the networks in which the initialiser is run for wider ones, whose statistics vary less
_RUNS = 20
_HALF = 2e-3  # for half precision and an approximate SVD


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention layer."""

    width: int  # d
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_width: int  # k

    @staticmethod
    def of(part: AttentionPart) -> "Sizes":
        """Those of a part."""
        return Sizes(part.width, part.heads, part.kv_heads, part.head_width)

    def scaled(self) -> "Sizes":
        """The same at a width that is cheap to initialise, with the same k / d."""
        if self.width <= _LARGEST:
            return self
        d = next((d for d in range(_LARGEST, _LARGEST // 2, -1) if self.head_width * d % self.width == 0), _LARGEST)
        return replace(self, width=d, head_width=max(1, round(self.head_width * d / self.width)))

    def network(self) -> NamedTensors:
        """One layer of these sizes."""
        d, rows, kv_rows = self.width, self.heads * self.head_width, self.kv_heads * self.head_width
        shapes = {"q": (rows, d), "k": (kv_rows, d), "v": (kv_rows, d), "o": (d, rows)}
        return NamedTensors(
            {f"blocks.0.attn.{name}_proj.weight": torch.zeros(shape) for name, shape in shapes.items()},
            {"num_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_width},
        )


def _one_layer_of_each_size(source: NamedTensors, p: dict[str, Any]) -> Iterator[tuple[Copy, dict[str, Any]]]:
    chosen = chosen_heads(chosen_layers(self_attention(source, strict=None), p["layers"]), p["heads"])
    for sizes in dict.fromkeys(Sizes.of(part).scaled() for part in chosen):
        yield Copy(sizes.network()), p | {"layers": None, "heads": None}


def _numbers(p: dict[str, Any]) -> dict[str, float]:
    """The alphas and betas; "same-random" has no alphas."""
    names = ("alpha_qk", "beta_qk", "alpha_vo", "beta_vo")
    values = numbers(p["preset"], p["construction"], tuple(p[name] for name in names))
    found = dict(zip(names, values, strict=True))
    return {n: x for n, x in found.items() if p["construction"] == "svd" or n.startswith("beta")}


def _errors(p: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = _numbers(p)
    wanted = ("qk", "vo") if p["parts"] == "both" else (p["parts"],)
    wrong = {n: x for n, x in found.items() if x and n[-2:] in wanted}
    return {error_in(n): p | found | {"preset": None, n: 1.2 * x} for n, x in wrong.items()}


@EXPECTATIONS.register(
    "mimetic_attention",
    reads=("attention modules",),
    variants=({"preset": "vision"}, {"preset": "language"}),
    stand_ins=_one_layer_of_each_size,
    errors=_errors,
    runs=_RUNS,
)
def mimetic_attention_statistics(source: NamedTensors, **p: Any) -> Iterator[Statistic]:
    """Statistics of every head's query-key product and every layer's value-output product.

    They are compared with those of the initialiser in one layer of the same sizes, or of the same ratios at a smaller
    width d, where `diagonal std` is larger in proportion to 1/sqrt(d) and all fluctuate more.
    """
    given = _numbers(p)
    choice("parts", p["parts"], PARTS)
    chosen = list(chosen_heads(chosen_layers(self_attention(source, strict=None), p["layers"]), p["heads"]))
    for kind in ("qk", "vo") if p["parts"] == "both" else (p["parts"],):
        size = max(given.get(f"alpha_{kind}", 0.0), abs(given[f"beta_{kind}"]))
        for part in chosen:
            if kind == "vo":
                part.without(*NO_PRODUCT, caller="audit")
            sizes = Sizes.of(part)
            small = sizes.scaled()
            slack = _HALF + (1 / small.width if small != sizes else 0)
            for head, found in enumerate(_measured(part, kind)):
                number = part.numbers[head] if kind == "qk" else None
                for name, value in found.items():
                    unit = math.sqrt(small.width / sizes.width) if name == "diagonal std" else 1.0
                    side, mine = "both", slack * unit * (1 if name == "asymmetry" else size)
                    if name == "other heads":  # whose correlations are smaller in wider layers
                        side, mine = "above", 0.1
                    yield Statistic(
                        kind, part.layer, number, part.name, name, value, "identity", small, unit, mine, side
                    )


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

    - other heads: the root mean square of the correlations of a head's product, without its diagonal mean, with those
      of other heads of the layer: large if two heads have the same noise.
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
    """The rms correlation of each `A_h B_h^T`, without its diagonal mean, with the others, for A, B (H, d, k)."""
    heads, d, k = a.shape
    grams = [x.permute(1, 0, 2).flatten(1).T @ x.permute(1, 0, 2).flatten(1) for x in (a, b)]  # (H k, H k)
    products = (grams[0] * grams[1]).double().view(heads, k, heads, k).sum((1, 3))  # <M_g, M_h>
    traces = (a * b).double().sum((1, 2))
    products -= traces.outer(traces) / d
    norms = products.diagonal().clamp_min(1e-300).sqrt()
    squares = (products / norms.outer(norms)).square().fill_diagonal_(0)
    found: list[float] = (squares.sum(1) / (heads - 1)).sqrt().tolist()
    return found


# --- positions --------------------------------------------------------------------------------------------------------


def _untouched_tables(network: Copy, **_: Any) -> Callable[[torch.Generator], None]:
    """What the module's `reset_parameters` makes of a table, else a random one, or what it is where that is not known.

    Of fixed tables, and of tables called `pos_embed` without a module, only the network's constructor knows it.
    """
    tables = positions(network.source, strict=None)
    code = isinstance(network.source, ModuleTensors)
    known = {table.name: table.trained and (code or not table.name.endswith("pos_embed")) for table in tables}

    def start(g: torch.Generator) -> None:
        left = network.start_layers(known)
        for table in tables:
            if table.name in left and known[table.name]:
                table.write(torch.randn(table.read().shape, generator=g))

    return start


@EXPECTATIONS.register(
    "sinusoidal_positions", reads=("position embeddings",), start=_untouched_tables, errors=("gamma",)
)
def sinusoidal_positions_statistics(source: NamedTensors, *, gamma: float) -> Iterator[Statistic]:
    """Statistics of every table's inner products `P P^T = gamma^2 C C^T`, which are invariant to the order of features.

    Where an untouched table has the same codes, as in the package's ViT, the audit is undecidable.
    """
    for i, table in enumerate(positions(source, strict=None)):
        value = table.read().cpu().double()
        scale, distance = _likeness(value[table.prefix :], table_codes(table).double())
        rows = (("gamma", scale, 0.01 * abs(gamma), "both"), ("distance of inner products", distance, 0.01, "above"))
        for what, found, slack, side in rows:
            yield Statistic("positions", i, None, table.name, what, found, like=table.name, slack=slack, side=side)


def _likeness(table: Tensor, codes: Tensor) -> tuple[float, float]:
    """The gamma for which `gamma^2 C C^T` is nearest to `P P^T`, and the relative distance."""
    mine, theirs = table @ table.T, codes @ codes.T
    scale = float((mine * theirs).sum() / theirs.square().sum())
    return math.sqrt(max(scale, 0.0)), float((mine - scale * theirs).norm() / mine.norm().clamp_min(1e-300))


# --- impulses ---------------------------------------------------------------------------------------------------------

# A solution takes as long as the initialiser, so that the expected intervals are fixed, and not those of runs.
PEAKS = 0.95
BLUNT_PEAKS = 0.45  # where norms are kept; at width 24, half of a head's tokens had their peak elsewhere
# The solver's own factors were 0.88 to 1.14 in 27 heads of 5 networks (widths 32 to 96); the power is for this spread.
FACTOR = (0.7, 1.5)
_FACTOR_POWER = 0.99
_RARE = 1e-6  # probability of more heads with one offset, if offsets are drawn independently


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
        x, free = impulse.normalised(codes), p["norm"] == "free"
        checks += _maps(chosen_heads([part], p["heads"])[0], x, tokens, known, free, free and p["adam_steps"] is None)
    if not checks:
        raise AnatomyError("expected layers solved for positions, found none to check")
    return checks


def _maps(
    part: AttentionPart, x: Tensor, tokens: TokenGrid, known: list[Offset], sharp: bool, minimised: bool
) -> Iterator[Check]:
    q, k = part.read("q").cpu().double(), part.read("k").cpu().double()
    targets = torch.stack([tokens.targets(offset) for offset in known])  # (offsets, N)
    rare = special.bdtrc(np.arange(part.heads + 1), part.heads, 1 / len(known)) <= _RARE  # that more heads have it
    most = max(math.ceil(part.heads / len(known)), int(rare.argmax()))
    used: dict[Offset, int] = {}
    peaks = PEAKS if sharp else BLUNT_PEAKS
    for head in range(part.heads):
        found = impulse.attention_map(x, q[head], k[part.kv_head(head)], part.scale, tokens.causal)
        hits = (targets == found.argmax(1)) & (targets >= 0)
        best = int((hits.sum(1) / (targets >= 0).sum(1).clamp_min(1)).argmax())
        valid = (targets[best] >= 0).nonzero()[:, 0]
        wanted = impulse.impulse_matrix(tokens, known[best]).double()
        used[known[best]] = used.get(known[best], 0) + 1
        copies = sum(torch.equal(q[head], q[h]) and part.kv_heads == part.heads for h in range(head))
        # Of an untouched head's tokens, one in N has its largest weight at a given target.
        chance = float(special.bdtrc(math.ceil(peaks * len(valid)) - 1, len(valid), 1 / tokens.total))
        share, untouched = float(hits[best].sum()) / len(valid), 1 - min(1.0, len(known) * chance)
        rows: list[tuple[str, float, float, float, dict[str, float]]] = [
            ("peaks", share, peaks, 1.0, {UNTOUCHED: untouched}),
            ("uses of the offset", float(used[known[best]]), 1.0, float(most), {}),
            ("copies", float(copies), 0.0, 0.0, {}),
        ]
        if sharp:
            rows.append(("weight", float(found[valid, targets[best][valid]].mean()), 0.5, 1.0, {}))
            rows.append(("error", float((found - wanted).square().mean()) * tokens.total, 0.0, 0.5, {}))
        if minimised:
            factor = _logit_factor(part, x, q[head], k[part.kv_head(head)], tokens, wanted)
            wrong = {f"logits 2 times too {size}": _FACTOR_POWER for size in ("large", "small")}
            rows.append(("logit factor", factor, *FACTOR, wrong))
        name = f"{part.name} {known[best]}"
        yield from (Check("impulse_attention", "map", part.layer, part.numbers[head], name, *one) for one in rows)
    biases = [bias.flatten() for name in impulse.QUERY_KEY if (bias := part.read_bias(name)) is not None]
    if biases:
        largest = float(torch.cat(biases).abs().max())
        yield Check("impulse_attention", "map", part.layer, None, part.name, "largest bias", largest, 0.0, 0.0)


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
