"""Expectations of `mimetic_attention_`: products of weights at a given distance from a multiple of the identity.

All checks but one are of the effective operators `W_Q W_K^T` of a head and `sum_h W_V W_O` of a layer, in the
row-vector convention, so that any construction with the same products passes. The other one is of the factors: the
singular values are shared evenly between them.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weightscope._util.checks import choice
from weightscope.anatomy import AttentionPart, NamedTensors, chosen_layers
from weightscope.anatomy.attention_modules import chosen_heads, find
from weightscope.anatomy.factored_products import FactoredProduct
from weightscope.auditing.intervals import UNTOUCHED, Interval, error_in, outside_of, predicted
from weightscope.auditing.registry import EXPECTATIONS
from weightscope.auditing.report import Check, Row, checks_of
from weightscope.errors import AnatomyError
from weightscope.init.attention import CONSTRUCTIONS, PARTS, PRESETS

IMBALANCE = (0.0, 0.02)  # half precision rounds each factor by 0.2 %; exchanged roots differ by tens of per cent
_WRONG_DRAWS = 12  # of each error whose detection is estimated
_DRAWS = 48  # of the simulated null; the t quantile of LEVEL is 5.6
_LARGEST = 192  # simulated width; fluctuations at larger widths are scaled
_PROBES = 16  # random vectors by whose images d x d matrices of heads are compared
_SEED = 0x5EED  # of the simulation and the probes, so that an audit is reproducible

# Statistic of a check -> its name in `FactoredProduct.statistics`.
_STATISTICS = {
    "diagonal mean": "diagonal_mean",
    "diagonal std": "diagonal_std",
    "off-diagonal": "offdiagonal_norm",
    "alpha": "alpha",
    "asymmetry": "asymmetry",
    "participation": "participation",
}


def product_statistics(a: Tensor, b: Tensor) -> dict[str, float]:
    """The statistics of `M = A B^T` that are checked, for A, B (d, r), by the names of the checks."""
    found = FactoredProduct(a, b).statistics()
    return {check: float(found[name]) for check, name in _STATISTICS.items()}


def imbalance(a: Tensor, b: Tensor) -> float:
    """`||A^T A - B^T B||_F / ||B^T B||_F` for factors (n, d, r) of n products that share r singular values.

    The Gram matrices are averaged over the products. Zero means that both sides have the square roots of the singular
    values.
    """
    gram_a = torch.einsum("hdr,hds->rs", a, a) / len(a)
    gram_b = torch.einsum("hdr,hds->rs", b, b) / len(b)
    return float((gram_a - gram_b).norm() / gram_b.norm())


@dataclass(frozen=True)
class Null:
    """The shape and the parameters of a correct construction.

    Attributes:
        width: d.
        rank: r of the product.
        group: number of products that share one factor (query heads per key head).
        alpha: scale of the noise.
        beta: diagonal, with its sign.
        construction: "svd" or "same-random".
    """

    width: int
    rank: int
    group: int
    alpha: float
    beta: float
    construction: str

    def scaled(self) -> "Null":
        """The same at a width that is cheap to simulate, with the same rank / width."""
        most = _LARGEST if self.group == 1 else _LARGEST // 2
        if self.width <= most:
            return self
        exact = [d for d in range(most, most // 2, -1) if self.rank * d % self.width == 0]
        d = exact[0] if exact else most
        return Null(d, max(1, round(self.rank * d / self.width)), self.group, self.alpha, self.beta, self.construction)


@lru_cache(maxsize=256)
def intervals(null: Null) -> dict[str, Interval]:
    """Statistic -> the interval that contains it in a correct construction with probability 1 - LEVEL.

    `diagonal std` scales as 1/sqrt(d); the others converge. All fluctuate by 1/d.
    """
    small = null.scaled()
    g = torch.Generator().manual_seed(_SEED)
    draws = [product_statistics(*_draw(small, g)) for _ in range(_DRAWS)]
    ratio = small.width / null.width
    scale = max(null.alpha, abs(null.beta))
    # For half precision, an approximate SVD, and the finite width of the simulation.
    base = 2e-3 + (1 / small.width if ratio < 1 else 0)
    out = {}
    for name in _STATISTICS:
        values = [draw[name] for draw in draws]
        if name == "diagonal std":
            root = math.sqrt(ratio)
            out[name] = predicted([v * root for v in values], shrink=root, slack=base * scale * root)
        else:
            relative = name in ("asymmetry", "participation")
            out[name] = predicted(values, shrink=ratio, slack=base * (1 if relative else scale))
    return out


@lru_cache(maxsize=256)
def powers(null: Null, kind: str) -> dict[str, dict[str, float]]:
    """Statistic -> error -> probability that the check fails for one product with that error, simulated.

    An untouched network has factors of independent entries, here with the norm of a correct product, which is the
    hardest to tell.
    """
    small, expected = null.scaled(), intervals(null)
    ratio = small.width / null.width
    g = torch.Generator().manual_seed(_SEED)
    correct = [product_statistics(*_draw(small, g)) for _ in range(_WRONG_DRAWS)]
    norm = sum(math.hypot(draw["diagonal mean"], draw["alpha"]) for draw in correct) / _WRONG_DRAWS
    wrong = {UNTOUCHED: [_independent(small, norm, g) for _ in range(_WRONG_DRAWS)]}
    for name in ("alpha", "beta"):
        if getattr(null, name) and (name == "beta" or null.construction == "svd"):
            other = replace(small, **{name: 1.2 * getattr(small, name)})
            draws = [product_statistics(*_draw(other, g)) for _ in range(_WRONG_DRAWS)]
            wrong[error_in(f"{name}_{kind}")] = draws
    out: dict[str, dict[str, float]] = {}
    for error, draws in wrong.items():
        for name in draws[0]:
            limits = expected.get(name, IMBALANCE)
            factor = math.sqrt(ratio) if name == "diagonal std" else 1.0
            values = [draw[name] for draw in draws]
            out.setdefault(name, {})[error] = outside_of(limits, values, shrink=ratio, factor=factor)
    return out


def _independent(null: Null, norm: float, g: torch.Generator) -> dict[str, float]:
    """Statistics of a product (d, d) of factors with independent entries, of Frobenius norm sqrt(d) norm."""
    a, b = (torch.randn(null.width, null.rank, generator=g) for _ in range(2))
    scale = math.sqrt(norm * math.sqrt(null.width) / float((a @ b.T).norm()))
    a, b = a * scale, b * scale
    return product_statistics(a, b) | {"imbalance": imbalance(a[None], b[None])}


def _draw(null: Null, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors A, B (d, r) of one correct product; by full singular value decompositions."""
    d, r = null.width, min(null.rank, null.width)
    if null.construction == "same-random":
        z = torch.randn(d, null.rank, generator=g) * math.sqrt(abs(null.beta) / null.rank)
        return z * math.copysign(1, null.beta), z
    if null.alpha == 0:
        basis = torch.linalg.qr(torch.randn(d, r, generator=g))[0]
        return basis * null.beta, basis
    noise = torch.randn(null.group, d, d, generator=g) * (null.alpha / math.sqrt(d))
    wanted = (noise + null.beta * torch.eye(d)).reshape(-1, d)
    if r == d:
        return wanted[:d], torch.eye(d)
    u, s, vh = torch.linalg.svd(wanted, full_matrices=False)
    return u[:d, :r] * s[:r], vh[:r].T


@EXPECTATIONS.register(
    "mimetic_attention", reads=("attention modules",), variants=({"preset": "vision"}, {"preset": "language"})
)
def mimetic_attention_checks(
    source: NamedTensors,
    *,
    alpha_qk: float,
    beta_qk: float,
    alpha_vo: float,
    beta_vo: float,
    preset: str | None,
    construction: str,
    parts: str,
    layers: int | list[int] | None,
    heads: int | list[int] | None,
) -> list[Check]:
    """Checks of every head's query-key product and every layer's value-output product.

    Raises:
        AnatomyError: if there is no self-attention.
    """
    choice("construction", construction, CONSTRUCTIONS)
    choice("parts", parts, PARTS)
    if preset is not None:
        choice("preset", preset, PRESETS)
    a1, b1, a2, b2 = PRESETS[preset] if preset is not None else (alpha_qk, beta_qk, alpha_vo, beta_vo)
    checks: list[Check] = []
    seen: dict[str, list[NoiseImage]] = {"qk": [], "vo": []}
    for part in chosen_heads(chosen_layers(self_attention(source), layers), heads):
        if parts != "vo":
            checks += _query_key(part, a1, b1, construction, seen["qk"])
        if parts != "qk":
            checks += _value_output(part, a2, -b2, construction, seen["vo"])
    return _with_resemblance(checks, seen)


def self_attention(source: NamedTensors) -> list[AttentionPart]:
    """The self-attention parts; raises AnatomyError if there are none."""
    found = [part for part in find(source) if part.kind == "self"]
    if not found:
        raise AnatomyError("expected self-attention, found none")
    return found


@dataclass(frozen=True)
class NoiseImage:
    """Identifies the noise of a product.

    Attributes:
        vector: (16 d,), see `_noise_image`.
        group: products of the same group share a factor.
    """

    vector: Tensor
    group: tuple[str, int]


def _query_key(
    part: AttentionPart, alpha: float, beta: float, construction: str, seen: list[NoiseImage]
) -> list[Check]:
    q, k = part.read("q").cpu(), part.read("k").cpu()  # (H, d, k), (kv, d, k)
    group = part.heads // part.kv_heads
    null = Null(part.width, part.head_width, group, alpha, beta, construction)
    checks = []
    for head in range(part.heads):
        key = k[part.kv_head(head)]
        found = product_statistics(q[head], key)
        first = head // group * group
        checks += _checks("qk", part, head, found, null, imbalance(q[first : first + group], key[None]))
        vector = _noise_image(q[head], key, found["diagonal mean"])
        seen.append(NoiseImage(vector, (part.name, part.kv_head(head))))
    return checks


def _value_output(
    part: AttentionPart, alpha: float, beta: float, construction: str, seen: list[NoiseImage]
) -> list[Check]:
    v, o = part.read("v").cpu(), part.read("o").cpu()  # (kv, d, k), (H, k, d)
    group, d = part.heads // part.kv_heads, part.width
    shared = o.reshape(part.kv_heads, group, -1, d).permute(1, 3, 0, 2).reshape(group, d, -1)  # (group, d, kv k)
    values = v.permute(1, 0, 2).reshape(d, -1)  # (d, kv k)
    outputs = shared.sum(0)  # the query heads of a group add up, since they share a value head
    null = Null(d, part.kv_heads * part.value_width, 1, alpha, beta, construction)
    found = product_statistics(values, outputs)
    seen.append(NoiseImage(_noise_image(values, outputs, found["diagonal mean"]), (part.name, 0)))
    return _checks("vo", part, None, found, null, imbalance(values[None], shared * math.sqrt(group)))


def _checks(
    kind: str,
    part: AttentionPart,
    head: int | None,
    found: dict[str, float],
    null: Null,
    uneven: float,
) -> list[Check]:
    expected, power = intervals(null), powers(null, kind)
    rows: list[Row] = [(name, found[name], expected[name], power[name]) for name in _STATISTICS]
    rows.append(("imbalance", uneven, IMBALANCE, power["imbalance"]))
    number = None if head is None else part.numbers[head]
    return checks_of("mimetic_attention", kind, part.layer, number, part.name, rows)


def _noise_image(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """`(M - beta I)` applied to fixed random vectors, normalised: nearly equal only for heads with the same noise."""
    probes = torch.randn(len(b), _PROBES, generator=torch.Generator().manual_seed(_SEED)).to(a)
    image = (a @ (b.T @ probes) - beta * probes).flatten()
    return image / image.norm().clamp_min(1e-30)


def _with_resemblance(checks: list[Check], seen: dict[str, list[NoiseImage]]) -> list[Check]:
    """Add to each product its largest absolute correlation with another one, which is near 1 if noise was reused.

    Query heads that share a key are correlated by construction and not compared.
    """
    found = {kind: iter(_resemblances(mine)) for kind, mine in seen.items()}
    out = []
    for check in checks:
        out.append(check)
        if check.statistic == "imbalance":
            value, high = next(found[check.part])
            out.append(replace(check, statistic="resemblance", found=value, low=0.0, high=high, power={}))
    return out


def _resemblances(seen: list[NoiseImage]) -> list[tuple[float, float]]:
    """(largest absolute correlation with a product of another group, its upper limit) for each signature."""
    out = [0.0] * len(seen)
    for length in {len(s.vector) for s in seen}:
        index = [i for i, s in enumerate(seen) if len(s.vector) == length]
        stack = torch.stack([seen[i].vector for i in index])
        cosines = (stack @ stack.T).abs()
        groups = [seen[i].group for i in index]
        cosines[torch.tensor([[a == b for b in groups] for a in groups])] = 0
        for i, value in zip(index, cosines.amax(1).tolist(), strict=True):
            out[i] = value
    # The correlation of two independent heads has a standard deviation of about 1/d.
    return [(x, min(0.9, max(0.3, 8 * _PROBES / len(s.vector)))) for x, s in zip(out, seen, strict=True)]
