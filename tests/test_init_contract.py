"""One contract for every initialiser on every family where it applies.

The effective operators are as published, nothing else changes, the generator determines the bits, and forward and
backward passes stay finite. False alarms: seeds are fixed; statistical bounds are six standard errors.
"""

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, Family, built, rows, scramble, seeded
from references_init import low_rank_product
from torch import Tensor, nn

from weightscope import anatomy
from weightscope.anatomy.matrices import matrices
from weightscope.auditing import audit
from weightscope.errors import AnatomyError, UsageError
from weightscope.init import INITIALISERS, get
from weightscope.init.baselines import as_matrix, branches, centre_tap, zero_matrix
from weightscope.networks.sequences import CausalTransformer

# Initialisers that need another network, and the one that does nothing.
SOURCED = (
    *("default", "select_weights", "grow", "transfer", "transfer_singular", "covariance_transfer"),
    *("ssm_from_attention", "repeat_layer"),
)


@functools.cache
def copied(name: str, role: str) -> nn.Module:
    return copy.deepcopy(built(name))


def fresh(family: Family, role: str = "model") -> nn.Module:
    """A model as the family builds it. Copying a model takes longer than most tests, so each role has one."""
    model, start = copied(family.name, role), built(family.name)
    with torch.no_grad():
        for mine, theirs in zip(tensors_of(model), tensors_of(start), strict=True):
            mine.copy_(theirs)
            mine.grad = None
    return model


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def state(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in tensors}


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else []
    return [t for value in values for t in tensors_in(value)]


def names_of(parts: list[Any], *wanted: str, key: str = "parameters") -> set[str]:
    found = (getattr(part, key) for part in parts)
    groups = [[p[w] for w in wanted if w in p] if isinstance(p, dict) else [p] for p in found]
    return {name for names in groups for group in names for name in group}


biases_of = functools.partial(names_of, key="bias_parameters")


def selves(model: nn.Module) -> list[Any]:
    return [part for part in anatomy.attention(model) if part.kind == "self"]


def elsewhere(before: nn.Module, after: nn.Module, loose: float) -> None:
    """In `test_covariance_transfer` and `test_init_ssm`."""


def unit(part: anatomy.MLPPart) -> float:
    """The deviation of torch's default entries in the first layer."""
    return 1 / math.sqrt(3 * part.width)


def check_mlp(change: Callable[[anatomy.MLPPart], Tensor]) -> Callable[[nn.Module, nn.Module, float], None]:
    """fc1 is exactly what a function of the MLP before gives."""

    def check(before: nn.Module, after: nn.Module, loose: float) -> None:
        for old, new in zip(anatomy.mlps(before), anatomy.mlps(after), strict=True):
            torch.testing.assert_close(new.read("fc1"), change(old), atol=1e-6 + loose, rtol=0)

    return check


def check_mimetic_ssm(before: nn.Module, after: nn.Module, loose: float) -> None:
    for old, new in zip(anatomy.ssms(before), anatomy.ssms(after), strict=True):
        a_old, a_new = (-torch.exp(part.read("A_log")) for part in (old, new))
        torch.testing.assert_close(a_new, -((-a_old) ** -8.0), rtol=1e-4 + 20 * loose, atol=1e-6)  # -exp(-c A_log)
        step = torch.nn.functional.softplus(new.read("dt_bias"))
        torch.testing.assert_close(step, torch.ones_like(step), atol=1e-6 + loose, rtol=0)
        assert not new.read("dt_weight").any()
        torch.testing.assert_close(new.read("C"), (old.read("C") + old.read("B")) / 2, atol=1e-6 + loose, rtol=0)
        assert torch.equal(new.read("B"), old.read("B"))
        if new.version == 2:  # the convolution passes the current token, which is the last tap
            taps = new.read("conv_weight")
            assert torch.equal(taps, torch.eye(taps.shape[1])[-1].expand_as(taps))
        else:
            assert torch.equal(new.read("conv_weight"), old.read("conv_weight"))


def like(values: Tensor, std: float, bound: float, loose: float) -> None:
    """Entries within a bound, uniform if it is sqrt(3) std, with the stated mean square."""
    kurtosis = 1.8 if bound < 2 * std else 3
    squares, error = (values / std).square().mean().item(), math.sqrt((kurtosis - 1) / values.numel())
    assert squares == pytest.approx(1, abs=6 * error + loose)
    assert values.abs().max() <= bound * (1 + 1e-6 + loose)


def check_entries(
    of: Callable[[int, int], tuple[float, float]], bias: bool = False
) -> Callable[[nn.Module, nn.Module, float], None]:
    """Independent entries, whose std and bound follow from fan-in and fan-out; biases are uniform or zero."""

    def check(before: nn.Module, after: nn.Module, loose: float) -> None:
        for matrix in matrices(after):
            for block in matrix.split(matrix.weight):
                inputs, outputs = block[0].numel(), block[:, 0].numel()
                like(block.float(), *of(inputs, outputs), loose)
            if matrix.bias is not None:
                assert matrix.bias.abs().max() <= bias * inputs**-0.5 * (1 + 1e-6 + loose)

    return check


def check_t_fixup(before: nn.Module, after: nn.Module, loose: float) -> None:
    layers = len({part.layer for part in selves(after)})
    for part, name in branches(after, "both", strict=None, caller="t_fixup_"):
        w = as_matrix(name, part.read(name)).float()
        bound = math.sqrt(6 / sum(w.shape)) * (1 if name in "qk" else 0.67 * layers**-0.25)
        like(w, bound / math.sqrt(3), bound, loose)


def check_zero_init(before: nn.Module, after: nn.Module, loose: float) -> None:
    for part in anatomy.attention(after):
        for name in "qkvo":
            w = as_matrix(name, part.read(name)).float()
            wanted = torch.zeros_like(w) if name in "qo" else zero_matrix(*w.shape)
            torch.testing.assert_close(w, wanted, atol=loose, rtol=0)
            bias = part.read_bias(name)
            assert bias is None or not bias.any()


def check_constant_bias(before: nn.Module, after: nn.Module, loose: float) -> None:
    assert all((part.read_bias("fc1") == 0.25).all() for part in anatomy.mlps(after))


def check_box(before: nn.Module, after: nn.Module, loose: float) -> None:
    assert all((part.read() == 1).all() for part in anatomy.depthwise(after))


def check_first_last(rho: float, rows: bool = False) -> Callable[[nn.Module, nn.Module, float], None]:
    """The last fc2 is m' + s' (rho (W2 - m) / s + sqrt(1 - rho^2) (W2' - m') / s'), or its row means are."""

    def check(before: nn.Module, after: nn.Module, loose: float) -> None:
        first, old = (anatomy.mlps(before)[i].read("fc2").double() for i in (0, -1))
        x, y = (w.mean(1, keepdim=True) if rows else w for w in (first, old))
        mixed = rho * (x - x.mean()) / x.std(correction=0) + (1 - rho**2) ** 0.5 * (y - y.mean()) / y.std(correction=0)
        change = (y.mean() + y.std(correction=0) * mixed - y).expand_as(old)
        found = anatomy.mlps(after)[-1].read("fc2").double() - old
        torch.testing.assert_close(found, change, atol=1e-6 + loose * float(old.std()), rtol=0)

    return check


def check_delta_orthogonal(before: nn.Module, after: nn.Module, loose: float) -> None:
    for layer in after.modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            centre = centre_tap(layer.weight.detach().float())
            assert layer.weight.count_nonzero() <= centre.numel()
            for block in centre.chunk(layer.groups):
                gram = block.T @ block if len(block) >= block.shape[1] else block @ block.T
                torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-4 + loose, rtol=0)


def attentive() -> nn.Module:
    """A trained attention for the state-space families, whose width is 32."""
    torch.manual_seed(7)
    return CausalTransformer(9, 32, 2, heads=4)


def blocks_of(model: nn.Module) -> list[Tensor]:
    return [block.float() for matrix in matrices(model) for block in matrix.split(matrix.weight)]


def check_layer_scale(before: nn.Module, after: nn.Module, loose: float) -> None:
    factors = [p for name, p in after.named_parameters() if name.endswith(("gamma", "lambda1", "layer_scale"))]
    if factors:
        assert all(torch.allclose(p, torch.full_like(p, 0.1)) for p in factors)
        return
    for (old, last), (new, _) in zip(branch_ends(before), branch_ends(after), strict=True):
        torch.testing.assert_close(new.read(last), old.read(last) * 0.1, atol=1e-6 + loose, rtol=1e-2 * (loose > 0))


def branch_ends(model: nn.Module) -> list[tuple[Any, str]]:
    """The parts of residual branches, with the name of the last matrix of each."""
    out = []
    for finder, last in ((anatomy.attention, "o"), (anatomy.mlps, "fc2")):
        with contextlib.suppress(AnatomyError):
            out += [(part, last) for part in finder(model)]
    return out


def check_permute(before: nn.Module, after: nn.Module, loose: float) -> None:
    moved = 0
    for old, new in zip(blocks_of(before), blocks_of(after), strict=True):
        assert torch.equal(old.reshape(-1).sort().values, new.reshape(-1).sort().values)
        moved += not torch.equal(old, new)
    assert moved == len(blocks_of(before))


def check_same_as_donor(before: nn.Module, after: nn.Module, loose: float) -> None:
    wanted = {n: p for n, p in donor_of(before).named_parameters() if n in touched_all(before)}
    for name, value in after.named_parameters():
        if name in wanted:
            torch.testing.assert_close(value.float(), wanted[name].float(), atol=1e-6 + loose, rtol=loose)


def check_transfer_singular(before: nn.Module, after: nn.Module, loose: float) -> None:
    for theirs, mine in zip(blocks_of(donor_of(before)), blocks_of(after), strict=True):
        wanted = low_rank_product(theirs.flatten(1), 3).float()
        torch.testing.assert_close(mine.flatten(1), wanted, atol=1e-4 + loose, rtol=loose)


DONORS: dict[tuple[str, torch.dtype], nn.Module] = {}


def donor_of(model: nn.Module) -> nn.Module:
    """A network of the same architecture with other numbers."""
    key = str(model), next(model.parameters()).dtype
    if key not in DONORS:
        DONORS[key] = scramble(copy.deepcopy(model), seed=5)
    return DONORS[key]


def touched_all(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def touched_matrices(model: nn.Module) -> set[str]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return touched_weights(model) | {by_id[id(m.bias)] for m in matrices(model) if m.bias is not None}


def touched_weights(model: nn.Module) -> set[str]:
    return {matrix.name for matrix in matrices(model)}


def touched_filters(model: nn.Module) -> set[str]:
    return names_of(anatomy.depthwise(model))


def touched_positions(model: nn.Module) -> set[str]:
    return names_of(anatomy.positions(model))


def touched_convolutions(model: nn.Module) -> set[str]:
    kinds = (nn.Conv1d, nn.Conv2d)
    return {f"{n}.{k}" for n, m in model.named_modules() if isinstance(m, kinds) for k in ("weight", "bias")}


def touched_layer_scale(model: nn.Module) -> set[str]:
    factors = {n for n, _ in model.named_parameters() if n.endswith(("gamma", "lambda1", "layer_scale"))}
    ends = [names_of([part], last) | biases_of([part], last) for part, last in branch_ends(model)]
    return factors or set().union(*ends)


def touched_attention(letters: str, parts: Callable[[nn.Module], list[Any]] = selves) -> Callable[..., set[str]]:
    return lambda model: names_of(parts(model), *letters) | biases_of(parts(model), *letters)


SSM_NAMES = ("A_log", "dt_weight", "dt_bias", "B", "C", "conv_weight", "conv_bias")


@dataclass(frozen=True)
class Case:
    """An initialiser with numbers, the families it is for, what it may change and what is expected."""

    name: str
    families: list[Family]
    touched: Callable[[nn.Module], set[str]]
    check: Callable[[nn.Module, nn.Module, float], None] | None  # None: by its audit
    numbers: dict[str, Any] = field(default_factory=dict)
    donor: str | None = None
    random: bool = True  # whether the seed matters
    half: float = 0.02  # extra tolerance in bfloat16, whose numbers have 8 bits

    def run(self, model: nn.Module, generator: torch.Generator | int = 3) -> nn.Module:
        given = {self.donor: donor_of(model)} if self.donor else {}
        return get(self.name, **self.numbers, **given)(model, generator=generator)

    def verify(self, before: nn.Module, after: nn.Module, loose: float = 0.0) -> None:
        """Check the effective operators of an initialised model."""
        if self.check is not None:
            self.check(before, after, loose)
        else:
            report = audit(after, self.name, **self.numbers)
            assert not report.failures, str(report)
            assert report.checks


def only(kind: str, *without: str) -> list[Family]:
    return [family for family in rows(kind) if family.name not in without]


# timm's EfficientNet comes in one size, too large to take part in what is not about its filters.
EVERY = [family for family in FAMILIES.values() if family.name != "timm-efficientnet"]
# What copies tensors by name, or shares all code with another row, needs one family of each library.
FEW = [
    f
    for f in EVERY
    if f.name in ("ours-vit-token", "ours-convnext", "timm-convmixer", "hf-gpt2", "hf-mamba2", "torch-decoder")
]


def few(kind: str) -> list[Family]:
    return [family for family in FEW if kind in family.parts]


ROTARY = ("hf-llama", "hf-phi3", "hf-neox", "hf-t5", "hf-clip-text")
POSITIONAL = [family.name for family in EVERY if family.extra.get("positional")]
PICTURES = [f for f in rows("depthwise") if "mamba" not in f.name]
SELF = only("attention", "torch-kdim")
MLPS = rows("mlps")
MLP_W1 = {"touched": lambda m: names_of(anatomy.mlps(m), "fc1")}
ONE_SHAPE = [f for f in MLPS if "depthwise" not in f.parts]  # ConvNeXts of several stages have several


ABSOLUTE, MLP_ABSOLUTE = {"b": 0.05, "units": "absolute"}, check_mlp(lambda part: part.read("fc1") + 0.05)
MLP_SCALAR = check_mlp(lambda part: part.read("fc1") + 0.5 * unit(part))
MLP_ANTI = check_mlp(lambda part: (part.read("fc1") - part.read("fc2").T) / 2)


LAST = {"touched": lambda m: names_of(anatomy.mlps(m)[-1:], "fc2"), "random": False}
CONVOLUTIONAL = [f for f in EVERY if {"depthwise", "patch_embeddings"} & set(f.parts)]
BRANCHES = [f for f in EVERY if {"attention", "mlps"} & set(f.parts) and f.name != "torch-kdim"]

CASES = [
    Case("default", FEW, lambda m: set(), elsewhere),
    Case("kaiming_uniform", EVERY, touched_matrices, check_entries(lambda i, o: ((3 * i) ** -0.5, i**-0.5), bias=True)),
    Case("xavier", FEW, touched_matrices, check_entries(lambda i, o: ((2 / (i + o)) ** 0.5, (6 / (i + o)) ** 0.5))),
    Case("trunc_normal", FEW, touched_matrices, check_entries(lambda i, o: (0.02, 2.0))),
    Case("conv_covariance", PICTURES, touched_filters, None, {"preset": "imagenet-thawed"}),
    Case("covariance_transfer", PICTURES, touched_filters, elsewhere, donor="source"),
    Case("random_filters", rows("depthwise"), touched_filters, None),
    Case("impulse_filters", rows("depthwise"), touched_filters, None),
    Case("box_filters", rows("depthwise"), touched_filters, check_box, random=False),
    Case("box_filters", few("depthwise"), touched_filters, None, {"value": 0.5, "sign": "random"}),
    Case("mimetic_attention", SELF, lambda m: names_of(selves(m), *"qkvo"), None),
    Case("sinusoidal_positions", rows("positions"), touched_positions, None, {"gamma": 2.0}, random=False),
    Case("impulse_attention", only("positions", *ROTARY, *POSITIONAL), touched_attention("qk"), None),
    Case("impulse_attention", [FAMILIES["torch-encoder"]], touched_attention("qk"), None, {"grid": (4, 4)}),
    Case("mimetic_mlp", MLPS, **MLP_W1, check=MLP_SCALAR, numbers={"b": 0.5}, random=False),
    Case("mimetic_mlp", few("mlps"), **MLP_W1, check=MLP_ABSOLUTE, numbers=ABSOLUTE, random=False),
    Case("mimetic_mlp", few("mlps"), **MLP_W1, check=None, numbers={"mode": "rows", "sigma": 1.5}),
    Case("mimetic_mlp", few("mlps"), **MLP_W1, check=MLP_ANTI, numbers={"mode": "anticorrelated"}),
    Case(
        "constant_mlp_bias",
        only("mlps", "hf-llama", "hf-phi3", "hf-t5"),  # have no biases
        lambda m: biases_of(anatomy.mlps(m), "fc1"),
        check_constant_bias,
        {"value": 0.25},
        random=False,
    ),
    Case(
        "mimetic_conv_mlp",
        [f for f in MLPS if "depthwise" in f.parts],
        lambda m: names_of([part.filters for part in anatomy.filter_mlps(m)]),
        None,
        {"correlation": -0.7},
        random=False,
    ),
    Case("mimetic_first_last_mlp", ONE_SHAPE, check=check_first_last(0.3), numbers={"correlation": 0.3}, **LAST),
    Case("mimetic_first_last_mlp", ONE_SHAPE, check=check_first_last(-0.5, True), numbers={"mode": "rows"}, **LAST),
    Case("mimetic_ssm", rows("ssms"), lambda m: names_of(anatomy.ssms(m), *SSM_NAMES), check_mimetic_ssm, random=False),
    Case(
        "ssm_from_attention",
        rows("ssms"),
        lambda m: names_of(anatomy.ssms(m), "B", "C"),
        elsewhere,
        {"head": 1, "source": attentive()},
    ),
    Case(
        "repeat_layer",
        [*rows("ssms"), *(f for f in FEW if "attention" in f.parts)],
        lambda m: {name for name, _ in m.named_parameters() if re.search(r"(^|\.)(layers|blocks|h)\.\d", name)},
        elsewhere,
        {"layer": 1},
        donor="source",
    ),
    Case("zero_init", SELF, touched_attention("qkvo", anatomy.attention), check_zero_init, random=False),
    Case(
        "t_fixup",
        [f for f in SELF if "mlps" in f.parts],
        lambda m: names_of(anatomy.attention(m), *"qkvo") | names_of(anatomy.mlps(m), "fc1", "fc2", "gate"),
        check_t_fixup,
    ),
    Case("delta_orthogonal", CONVOLUTIONAL, touched_convolutions, check_delta_orthogonal),
    Case("layer_scale_identity", BRANCHES, touched_layer_scale, check_layer_scale, random=False),
    Case("permute", FEW, touched_weights, check_permute),
    Case("transfer", FEW, touched_all, check_same_as_donor, donor="source"),
    Case("transfer_singular", FEW, touched_weights, check_transfer_singular, {"rank": 3}, donor="source"),
    Case(
        "grow", [f for f in FEW if f.name != "torch-decoder"], touched_all, check_same_as_donor, donor="source"
    ),  # of equal sizes
    Case("select_weights", FEW, touched_all, check_same_as_donor, {"components": "all"}, donor="teacher"),
]
CASE = {case.name: case for case in reversed(CASES)}  # the first of each name


def grid() -> list[Any]:
    return [
        pytest.param(case, family, id="-".join([case.name, *map(str, list(case.numbers.values())[:1]), family.name]))
        for case in CASES
        for family in case.families
    ]


def test_every_registered_initialiser_is_under_contract():
    assert {case.name for case in CASES} == set(INITIALISERS)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "family"), grid())
def test_contract(case, family):
    before, model, other = (fresh(family, role) for role in ("before", "model", "other"))
    assert case.run(model) is model
    case.run(other, seeded(3))
    now, again, old = state(model), state(other), state(before)
    assert all(torch.equal(now[name], again[name]) for name in now), "a generator of the same seed, other bits"
    allowed = case.touched(before)
    changed = {name for name in now if not torch.equal(now[name], old[name])}
    assert changed <= allowed, f"also changed {sorted(changed - allowed)}"
    assert all(value.dtype == old[name].dtype for name, value in now.items())
    case.verify(before, model)
    outputs = tensors_in(family.call(model))
    assert outputs
    assert all(out.isfinite().all() for out in outputs)
    sum(out.float().square().mean() for out in outputs).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


HALVES = [param for param in grid() if param.values[1].name in ("ours-vit-token", "ours-convnext", "hf-mamba2")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("case", "family"), HALVES)
def test_contract_in_half_precision(case, family, dtype):
    before, model = (copy.deepcopy(built(family.name)).to(dtype) for _ in range(2))
    case.run(model)
    assert all(p.dtype == dtype for p in model.parameters())
    case.verify(before, model, case.half)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("case", "family"), HALVES)
def test_contract_on_a_gpu(case, family):
    """The generator's numbers are drawn on the CPU, so that weights are the same on any device."""
    here, there = case.run(fresh(family)), case.run(copy.deepcopy(built(family.name)).cuda())
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert theirs.is_cuda
        torch.testing.assert_close(theirs.cpu(), mine, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in INITIALISERS if n not in SOURCED])
def test_other_seeds_give_other_weights_unless_nothing_is_random(name):
    case = CASE[name]
    one, other = case.run(fresh(case.families[0]), 1), case.run(fresh(case.families[0], "other"), 2)
    same = all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert same == (not case.random)


@pytest.mark.parametrize("name", ["mimetic_attention", "conv_covariance", "kaiming_uniform", "impulse_attention"])
def test_no_generator_means_torchs_global_one(name):
    found = []
    fresh(CASE[name].families[0])  # a library that is imported for the first time may draw
    for _ in range(2):
        torch.manual_seed(11)
        found.append(state(get(name, **CASE[name].numbers)(fresh(CASE[name].families[0]))))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize("name", [n for n in INITIALISERS if n not in SOURCED])
def test_a_module_without_the_part_raises(name):
    needs = {"conv_covariance": {"preset": "imagenet-thawed"}}.get(name, {})
    with pytest.raises(AnatomyError, match="expected"):
        get(name, **needs)(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("name", INITIALISERS)
def test_generators_of_another_kind_are_refused(name):
    with pytest.raises(UsageError, match=r"torch\.Generator"):
        INITIALISERS[name](nn.Linear(2, 2), generator=np.random.default_rng(0))


@pytest.mark.parametrize("name", ["mimetic_attention", "xavier"])
@pytest.mark.parametrize("ambient", ["autocast", "default dtype"])
def test_ambient_settings_change_no_bits(name: str, ambient: str) -> None:
    wanted, found = (fresh(FAMILIES["ours-vit"], f"ambient {i}") for i in range(2))
    get(name)(wanted, generator=torch.Generator().manual_seed(0))
    if ambient == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            get(name)(found, generator=torch.Generator().manual_seed(0))
    else:
        torch.set_default_dtype(torch.float64)
        try:
            get(name)(found, generator=torch.Generator().manual_seed(0))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, tensors_of(wanted), tensors_of(found)))
