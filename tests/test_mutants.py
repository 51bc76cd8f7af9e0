"""Wrong copies of the initialisers, as found in public code or one slip away: every one must fail its audit.

Each mutant is a correct construction with one change, built here from plain singular value decompositions and
samples. The same construction without the change must pass, so that nothing fails for being built here.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import references_init as references
import shims
import torch
from torch import Tensor, nn

from weightscope import anatomy
from weightscope import init as wi
from weightscope.auditing import audit
from weightscope.networks import ConvMixer, ViT
from weightscope.networks.layers import sinusoidal_positions


@dataclass(frozen=True)
class Mutant:
    """One change of a construction."""

    build: Callable[[nn.Module, torch.Generator], None]  # changes a correct module in place
    caught: tuple[str, ...]  # statistics of which at least one must fail
    parameters: dict[str, Any] = field(default_factory=dict)  # of the initialiser, when not its defaults


def changing(
    finder: Callable[[nn.Module], Iterable[Any]],
    change: Callable[[Any, torch.Generator], Any],
    after: Callable[[nn.Module, torch.Generator], Any] = lambda module, g: None,
) -> Callable[[nn.Module, torch.Generator], None]:
    """A construction, and then a change of every part of the module that is found."""

    def build(module: nn.Module, g: torch.Generator) -> None:
        after(module, g)
        for part in finder(module):
            change(part, g)

    return build


D, H, L = 192, 3, 2


def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(32, 8, D, L, H, 10)


def naive_attention(
    module: nn.Module,
    g: torch.Generator,
    *,
    qk: tuple[float, float] = (0.7, 0.7),
    vo: tuple[float, float] = (0.4, -0.4),
    noise: float = 1.0,
    roots: tuple[float, float] = (0.5, 0.5),
    swapped: bool = False,
    equal: bool = False,
) -> None:
    """Thesis Eq. 3.12-3.18 with knobs for the slips of public copies."""

    def draw() -> Tensor:
        return torch.randn(D, D, generator=g) * (noise / math.sqrt(D))

    def halves(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(matrix)
        return u[:, :rank] * s[:rank] ** roots[0], vh[:rank].T * s[:rank] ** roots[1]

    for part in anatomy.attention(module):
        k = part.head_width
        heads = [halves(qk[0] * draw() + qk[1] * torch.eye(D), k) for _ in range(1 if equal else part.heads)]
        heads *= part.heads if equal else 1
        part.write("q", torch.stack([q for q, _ in heads]))
        part.write("k", torch.stack([key for _, key in heads]))
        left, right = halves(vo[0] * draw() + vo[1] * torch.eye(D), D)
        if swapped:  # v holds R = S^(1/2) V^T and proj holds L = U S^(1/2): the product is R L
            left, right = right.T, left.T
        part.write("v", left.reshape(D, part.heads, k).transpose(0, 1))
        part.write("o", right.T.reshape(part.heads, k, D))


def exchange(part: anatomy.AttentionPart, _: torch.Generator) -> None:
    q, k, v, o = (part.read(n) for n in "qkvo")
    part.write("v", q), part.write("o", k.mT), part.write("q", v), part.write("k", o.mT)


def interleaved_heads(part: anatomy.AttentionPart, _: torch.Generator) -> None:
    """Queries cut into heads by stride, keys by blocks."""
    part.write("q", part.read("q").permute(1, 0, 2).reshape(D, part.head_width, part.heads).permute(2, 0, 1))


def one_head_again(part: anatomy.AttentionPart, g: torch.Generator) -> None:
    q = part.read("q")
    q[1] = torch.randn(D, part.head_width, generator=g) * 0.02
    part.write("q", q)


def mutate(**knobs: Any) -> Callable[[nn.Module, torch.Generator], None]:
    return functools.partial(naive_attention, **knobs)


heads_of = functools.partial(changing, anatomy.attention, after=naive_attention)
blocks_of = functools.partial(changing, lambda module: module.blocks, after=naive_attention)


LANGUAGE = {"preset": "language"}
OFF = {"alpha_qk": 0.3, "beta_qk": 0.7, "alpha_vo": 0.4, "beta_vo": 0.2}
ATTENTION = {
    "factors swapped, R L for L R": Mutant(mutate(swapped=True), ("diagonal std",)),
    "1/sqrt(d) forgotten": Mutant(mutate(noise=math.sqrt(D)), ("off-diagonal",)),
    "root taken twice": Mutant(mutate(roots=(0.25, 0.25)), ("diagonal mean",)),
    "sign of V/proj wrong": Mutant(mutate(vo=(0.4, 0.4)), ("diagonal mean",)),
    "alpha and beta exchanged": Mutant(mutate(qk=(0.7, 0.3), vo=(0.2, -0.4)), ("diagonal mean",), OFF),
    "q and k written into v and o": Mutant(heads_of(exchange), ("diagonal mean",)),
    "proj.weight transposed": Mutant(
        blocks_of(lambda b, _: b.attn.proj.weight.data.copy_(b.attn.proj.weight.data.T.clone())), ("diagonal std",)
    ),
    "equal noise in all heads": Mutant(mutate(equal=True), ("other heads",)),
    "heads interleaved in q only": Mutant(heads_of(interleaved_heads), ("diagonal mean",)),
    "same random matrix for SVD": Mutant(
        lambda m, g: wi.mimetic_attention_(m, construction="same-random", generator=g), ("asymmetry",)
    ),
    "one head overwritten": Mutant(
        changing(lambda m: anatomy.attention(m)[-1:], one_head_again, naive_attention), ("diagonal mean",)
    ),
    "alpha 10 % too large": Mutant(mutate(vo=(0.44, -0.4)), ("alpha",)),
}


def right_attention(parameters: dict[str, Any]) -> nn.Module:
    model, g = vit(), torch.Generator().manual_seed(0)
    if parameters == LANGUAGE:  # without noise an SVD gives all heads one subspace, so ours draws it
        return wi.mimetic_attention_(model, preset="language", generator=g)
    naive_attention(model, g, **({"qk": (0.3, 0.7), "vo": (0.4, -0.2)} if parameters == OFF else {}))
    return model


K, C, DEPTH = 5, 96, 4
SCHEDULE = {"sigma0": 0.16, "v": 0.32, "a": 2.88}


def mixer() -> nn.Module:
    torch.manual_seed(0)
    return ConvMixer(C, DEPTH, K, 4, 10)


def sigma(d: float) -> float:
    return SCHEDULE["sigma0"] + SCHEDULE["v"] * d + 0.5 * SCHEDULE["a"] * d**2


def naive_filters(
    module: nn.Module,
    g: torch.Generator,
    *,
    covariance: Callable[[int, float], np.ndarray] = references.conv_covariance,
    root: Callable[[np.ndarray], np.ndarray] = lambda s: wi.convolution.covariance_root(s, "abs"),
    depth: Callable[[int, int], float] = lambda i, n: i / (n - 1),
    variance: Callable[[float], float] = lambda s: s,
) -> None:
    """Fig. A.4, with knobs."""
    parts = anatomy.depthwise(module)
    for i, part in enumerate(parts):
        matrix = root(covariance(K, variance(sigma(depth(i, len(parts))))))
        draws = torch.randn(part.channels, K * K, generator=g, dtype=torch.float64) @ torch.from_numpy(matrix).T
        part.write(draws.float().reshape(part.channels, K, K))


def mirrored(k: int, s: float) -> np.ndarray:
    """Eq. B.4 as printed: block (i, j) peaks at the mirrored pixel; symmetrised as a sampler would."""
    z = references.gauss(k, k // 2, k // 2, s).reshape(-1)
    c = references.wrapped_bumps(k, s).reshape(k, k, k, k)[::-1, ::-1].reshape(k * k, k * k)
    out = 0.5 * ((z[:, None] + z[None, :]) * c - np.outer(z, z))
    return (out + out.T) / 2


def without_half(k: int, s: float) -> np.ndarray:
    """The second line of Eq. 3.9, which drops the factor 1/2."""
    z = references.gauss(k, k // 2, k // 2, s).reshape(-1)
    c = references.wrapped_bumps(k, s)
    return (z[:, None] + z[None, :]) * c - np.outer(z, z)


def knob(**knobs: Any) -> Callable[[nn.Module, torch.Generator], None]:
    return functools.partial(naive_filters, **knobs)


clipped = functools.partial(wi.convolution.covariance_root, psd="clip")
filters_of = functools.partial(changing, anatomy.depthwise, after=naive_filters)
CLIP = {"psd": "clip"}
FILTERS = {
    "shift mirrored": Mutant(knob(covariance=mirrored, root=clipped), ("outside",), CLIP),
    "1/2 dropped as in Eq. 3.9": Mutant(knob(covariance=without_half), ("energy", "unevenness")),
    "sigma taken for a std": Mutant(knob(variance=lambda s: s * s), ("unevenness",)),
    "depth reversed": Mutant(knob(depth=lambda i, n: 1 - i / (n - 1)), ("unevenness",)),
    "one sigma for all layers": Mutant(knob(depth=lambda i, n: 0.5), ("unevenness",)),
    "covariance for its root": Mutant(knob(root=lambda s: s), ("unevenness",)),
    "psd abs declared clip": Mutant(knob(), ("outside",), CLIP),
    "one filter for all channels": Mutant(
        filters_of(lambda p, _: p.write(p.read()[:1].expand(C, K, K))), ("correlation",)
    ),
}
FILTERS = {name: replace(m, parameters=SCHEDULE | m.parameters) for name, m in FILTERS.items()}


def right_filters(parameters: dict[str, Any]) -> nn.Module:
    model = mixer()
    root = functools.partial(wi.convolution.covariance_root, psd=parameters["psd"])
    naive_filters(model, torch.Generator().manual_seed(0), root=root)
    return model


def test_absolute_eigenvalues_hide_a_mirrored_shift():
    """The mirror image of the covariance is P Sigma with P^2 = I commuting with Sigma, so |P Sigma| = |Sigma|.

    Eq. B.4 as printed gives it, and whoever samples by absolute values, as the thesis's code does, cannot tell.
    """
    for s in (0.16, 0.5, 1.92):
        roots = [wi.convolution.covariance_root(f(K, s), "abs") for f in (mirrored, references.conv_covariance)]
        np.testing.assert_allclose(roots[0] @ roots[0].T, roots[1] @ roots[1].T, atol=1e-12)


SIGMA, B = 0.5, 0.8  # in units of the std of default entries


def fc1_update(update: Callable[[Tensor, Tensor, torch.Generator], Tensor]) -> Callable[..., None]:
    return changing(anatomy.mlps, lambda p, g: p.write("fc1", update(p.read("fc1"), p.read("fc2"), g)))


def unit(fc1: Tensor) -> float:
    return 1 / math.sqrt(3 * fc1.shape[1])


def rows(fc1: Tensor, g: torch.Generator, sd: float) -> Tensor:
    return torch.randn(1, fc1.shape[1], generator=g) * sd


ROWS, SCALAR, ANTI = {"mode": "rows", "sigma": SIGMA}, {"mode": "scalar", "b": B}, {"mode": "anticorrelated"}
MLP = {
    "one number for each hidden unit": Mutant(
        fc1_update(lambda w, _, g: w + torch.randn(len(w), 1, generator=g) * SIGMA * unit(w)), ("unit means",), ROWS
    ),
    "variance used as std": Mutant(
        fc1_update(lambda w, _, g: w + rows(w, g, (SIGMA * unit(w)) ** 2)), ("input means",), ROWS
    ),
    "scalar where a vector is meant": Mutant(
        fc1_update(lambda w, _, g: w + SIGMA * unit(w)), ("input means", "mean"), ROWS
    ),
    "scalar with the wrong sign": Mutant(fc1_update(lambda w, _, g: w - B * unit(w)), ("mean",), SCALAR),
    "vector where a scalar is meant": Mutant(
        fc1_update(lambda w, _, g: w + B * unit(w) + rows(w, g, 0.8 * unit(w))), ("input means",), SCALAR
    ),
    "in units of the weights": Mutant(fc1_update(lambda w, _, g: w + B), ("mean",), SCALAR),
    "sum for difference": Mutant(fc1_update(lambda w, fc2, g: (w + fc2.T) / 2), ("slope",), ANTI),
    "fc1 replaced": Mutant(fc1_update(lambda w, fc2, g: -fc2.T / 2), ("own share",), ANTI),
    "second layer for first": Mutant(
        changing(anatomy.mlps, lambda p, _: p.write("fc2", p.read("fc2") + B * unit(p.read("fc1")))), ("mean",), SCALAR
    ),
}


def right_mlps(parameters: dict[str, Any]) -> nn.Module:
    updates = {
        "rows": lambda w, _, g: w + rows(w, g, SIGMA * unit(w)),
        "scalar": lambda w, _, g: w + B * unit(w),
        "anticorrelated": lambda w, fc2, g: (w - fc2.T) / 2,
    }
    model = vit()
    fc1_update(updates[parameters["mode"]])(model, torch.Generator().manual_seed(0))
    return model


def mamba(version: int) -> nn.Module:
    transformers = shims.transformers()
    torch.manual_seed(0)
    common = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}
    common |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if version == 1:
        return transformers.MambaModel(transformers.MambaConfig(**common))
    return transformers.Mamba2Model(transformers.Mamba2Config(**common, head_dim=4, num_heads=16, n_groups=1))


def ssm_update(**changes: Callable[[anatomy.SSMPart], Tensor]) -> Callable[..., None]:
    """The correct initialisation with some parts set otherwise, from the values before it."""

    def build(module: nn.Module, g: torch.Generator) -> None:
        before = [{name: change(part) for name, change in changes.items()} for part in anatomy.ssms(module)]
        wi.mimetic_ssm_(module, generator=g)
        for part, values in zip(anatomy.ssms(module), before, strict=True):
            for name, value in values.items():
                part.write(name, value)

    return build


SSM = {
    "A_log not negated": Mutant(ssm_update(A_log=lambda p: 8 * p.read("A_log")), ("mean A_log",)),
    "A_log untouched": Mutant(ssm_update(A_log=lambda p: p.read("A_log")), ("mean A_log",)),
    "c on A for c on log A": Mutant(ssm_update(A_log=lambda p: p.read("A_log") - math.log(8)), ("mean A_log",)),
    "softplus inverse log(e + 1)": Mutant(
        ssm_update(dt_bias=lambda p: torch.full_like(p.read("dt_bias"), math.log(math.e + 1))), ("Delta",)
    ),
    "W_Delta kept": Mutant(ssm_update(dt_weight=lambda p: p.read("dt_weight")), ("W_Delta",)),
    "C made equal to B": Mutant(ssm_update(C=lambda p: p.read("B")), ("C on B",)),
    "B changed for C": Mutant(
        ssm_update(B=lambda p: (p.read("C") + p.read("B")) / 2, C=lambda p: p.read("C")), ("C on B",)
    ),
}
TAPS = {
    "convolution left alone": Mutant(ssm_update(conv_weight=lambda p: p.read("conv_weight")), ("current tap",)),
    "bias of the convolution kept": Mutant(
        ssm_update(conv_bias=lambda p: torch.full_like(p.read("conv_bias"), 0.1)), ("other taps and bias",)
    ),
}


def set_positions(codes: Callable[[], Tensor]) -> Callable[..., None]:
    return changing(anatomy.positions, lambda table, _: table.write(codes()))


POSITIONS = {
    "a sequence's codes on a grid": Mutant(
        set_positions(lambda: sinusoidal_positions(16, None, D)), ("distance of inner products",)
    ),
    "other temperature": Mutant(
        set_positions(lambda: sinusoidal_positions(4, 4, D, 100.0)), ("distance of inner products",)
    ),
    "learned instead": Mutant(set_positions(lambda: torch.randn(16, D)), ("distance of inner products",)),
}


def test_the_order_of_features_is_no_mistake():
    """sin and cos of one frequency side by side: the same inner products."""
    model = ViT(32, 8, D, L, H, 10, positions="learned")  # sinusoidal ones are undecidable
    order = torch.randperm(D, generator=torch.Generator().manual_seed(0))
    anatomy.positions(model)[0].write(sinusoidal_positions(4, 4, D)[:, order])
    assert audit(model, "sinusoidal_positions").passed


def solved() -> nn.Module:
    torch.manual_seed(0)
    model = ViT(32, 4, 96, 1, 3, 10)  # 8 x 8 tokens
    return wi.impulse_attention_(model, generator=torch.Generator().manual_seed(0))


def same_head(part: anatomy.AttentionPart, _: torch.Generator) -> None:
    for name in "qk":
        part.write(name, part.read(name)[:1].expand(part.heads, -1, -1))


queries_of = functools.partial(changing, anatomy.attention)
IMPULSES = {
    "one offset for all heads": Mutant(queries_of(same_head), ("copies",)),
    "heads of q and k out of step": Mutant(queries_of(lambda p, _: p.write("q", p.read("q").roll(1, 0))), ("peaks",)),
    "scale applied twice": Mutant(queries_of(lambda p, _: p.write("q", p.read("q") * p.scale)), ("weight",)),
    "overwritten": Mutant(lambda m, g: wi.trunc_normal_(m, generator=g) and None, ("peaks",)),
}


WRONG = (
    ("mimetic_attention", vit, ATTENTION),
    ("conv_covariance", mixer, FILTERS),
    ("mimetic_mlp", vit, MLP),
    ("mimetic_ssm", functools.partial(mamba, 1), SSM),
    ("mimetic_ssm", functools.partial(mamba, 2), SSM | TAPS),
    ("sinusoidal_positions", vit, POSITIONS),
    ("impulse_attention", solved, IMPULSES),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "mutant"),
    [pytest.param(n, make, m, id=f"{n}-{what}") for n, make, mutants in WRONG for what, m in mutants.items()],
)
def test_wrong_copies_fail(name, make, mutant):
    model = make()
    mutant.build(model, torch.Generator().manual_seed(3))
    report = audit(model, name, **mutant.parameters)
    assert not report.passed, str(report)
    failed = {c.statistic for c in report.failures}
    assert failed & set(mutant.caught), f"expected one of {mutant.caught}, found {failed}\n{report}"


@pytest.mark.parametrize(
    ("name", "make", "parameters"),
    [
        *(("mimetic_attention", right_attention, p) for p in ({}, OFF, LANGUAGE)),
        *(("conv_covariance", right_filters, SCHEDULE | {"psd": psd}) for psd in ("abs", "clip")),
        *(("mimetic_mlp", right_mlps, p) for p in (ROWS, SCALAR, ANTI)),
        ("impulse_attention", lambda _: solved(), {}),
    ],
)
def test_right_constructions_pass(name, make, parameters):
    report = audit(make(parameters), name, **parameters)
    assert report.passed, str(report)
