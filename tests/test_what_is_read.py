"""What is read of foreign models, judged by their own forward passes; and that the judge finds what is wrong."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import forward_truth as truth
import pytest
import small_models
import torch
import torch.nn.functional as F
import what_is_read as study
from torch import Tensor, nn

from weightscope import anatomy
from weightscope.errors import UsageError
from weightscope.init import mimetic_attention_

TIMM = small_models.words(
    "test_vit test_convnext test_efficientnet vit_tiny_patch16_224 cait_xxs24_224 coatnet_nano_rw_224 tiny_vit_5m_224 "
    "gemma4_vit_167m levit_128s lowformer_b0 efficientformer_l1 pvt_v2_b0 swinv2_cr_tiny_224 davit_tiny"
)
TRANSFORMERS = small_models.words(
    "bart bert blenderbot bloom clip cohere convnext deberta-v2 distilbert electra esm falcon gemma3_text glm4 gpt2 "
    "gpt_bigcode gpt_neox llama mistral mpnet mpt olmo2 opt persimmon phi3 pvt qwen3 roberta segformer t5 vit whisper"
)

HEADS, GROUPS, WIDTH, KEY = 4, 2, 24, 8


class Attention(nn.Module):
    """Attention of grouped heads whose width times their number is not that of the stream, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.o = nn.Linear(WIDTH, HEADS * KEY), nn.Linear(HEADS * KEY, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * KEY) for _ in range(2))
        self.taps = nn.Conv1d(HEADS * KEY, HEADS * KEY, 3, padding=1, groups=HEADS * KEY)
        self.pool = nn.AvgPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        other = self.pool(x.mT).mT if self.kind == "another stream" else x
        rows = self.q(x)
        if self.kind == "convolved":
            rows = self.taps(rows.mT).mT
        if self.kind == "normalised over heads":
            rows = F.layer_norm(rows, rows.shape[-1:])
        q = rows.unflatten(-1, (HEADS, KEY)).transpose(1, 2)
        k, v = (each(other).unflatten(-1, (GROUPS, KEY)).transpose(1, 2) for each in (self.k, self.v))
        if self.kind == "normalised":
            q, k = F.layer_norm(q, (KEY,)), F.normalize(k, dim=-1)
        if self.kind == "normalised over heads":
            k = F.layer_norm(k.transpose(1, 2), (GROUPS, KEY)).transpose(1, 2)
        if self.kind in ("rotated", "normalised over heads"):
            q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.o(F.gelu(y) if self.kind == "function before o" else y)


def rotated(x: Tensor) -> Tensor:
    """Pairs of channels (j, j + half) turned by the token's number."""
    angle = torch.arange(x.shape[-2])[:, None] / 3 ** torch.arange(KEY // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


KINDS = ["plain", "rotated", "normalised", "normalised over heads", "convolved", "function before o"]


def by_hand(module: Attention) -> truth.Claim:
    """The matrices of the heads."""
    q, k, v = (each.weight.detach().T.unflatten(1, (-1, KEY)).movedim(1, 0) for each in (module.q, module.k, module.v))
    return truth.Claim("", q, k, v, module.o.weight.detach().T.unflatten(0, (HEADS, KEY)))


def halves(x: Tensor) -> Tensor:
    """Twice as many heads of half the width."""
    return x.unflatten(-1, (2, -1)).movedim(-2, 1).flatten(0, 1)


def rolled(x: Tensor, axis: int) -> Tensor:
    return x.roll(1, axis)


def exchanged(x: Tensor) -> Tensor:
    """The first column of two heads exchanged."""
    x = x.clone()
    x[:2, :, 0] = x[:2, :, 0].flip(0)
    return x


WRONG: dict[str, Callable[[truth.Claim], dict[str, Any]]] = {
    "queries of the next head": lambda c: {"q": rolled(c.q, 0)},
    "keys of the other group": lambda c: {"k": rolled(c.k, 0)},
    "values of the other group": lambda c: {"v": rolled(c.v, 0)},
    "outputs of the next head": lambda c: {"o": rolled(c.o, 0)},
    "a column of queries in another head": lambda c: {"q": exchanged(c.q)},
    "a column of keys in another head": lambda c: {"k": exchanged(c.k)},
    "a column of values in another head": lambda c: {"v": exchanged(c.v)},
    "a row of outputs in another head": lambda c: {"o": exchanged(c.o.mT).mT},
    "queries and keys exchanged": lambda c: {"q": c.k, "k": c.q[::2], "v": c.v, "o": c.o[::2]},
    "keys and values exchanged": lambda c: {"k": c.v, "v": c.k},
    "queries in place of values": lambda c: {"v": c.q},
    "heads of half the width": lambda c: {"q": halves(c.q), "k": halves(c.k), "v": halves(c.v), "o": halves(c.o.mT).mT},
    "heads by stride": lambda c: {"q": c.q.movedim(0, -1).flatten(1).unflatten(1, (HEADS, KEY)).movedim(1, 0)},
    "columns of queries in another order": lambda c: {"q": c.q.roll(1, 2)},
    "columns of keys in another order": lambda c: {"k": c.k.roll(1, 2)},
    "columns of values in another order": lambda c: {"v": c.v.roll(1, 2)},
    "rows of outputs in another order": lambda c: {"o": c.o.roll(1, 1)},
    "weights that the pass does not have": lambda c: {"q": c.q.flip(1)},
}


def judged(module: nn.Module, claim: truth.Claim, **changes: Any) -> truth.Verdict:
    torch.manual_seed(3)
    true = study.Truth(module.eval(), torch.randn(1, 10, WIDTH))
    return truth.attention_verdict(true.seen, truth.Claim(**{**vars(claim), **changes}), true.again)


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_accepts_what_is_right_and_finds_every_mistake(kind: str) -> None:
    torch.manual_seed(0)
    module = Attention(kind).double()
    claim = by_hand(module)
    assert judged(module, claim).why == ""
    missed = [name for name, change in WRONG.items() if judged(module, claim, **change(claim)).right]
    assert missed == []


def test_keys_of_another_stream_are_no_self_attention() -> None:
    torch.manual_seed(0)
    module = Attention("another stream").double()
    assert judged(module, by_hand(module)).why == truth.FINAL
    assert judged(module, by_hand(module), kind="cross").right


class MLPs(nn.Module):
    """A convolution of each channel over tokens, then two gated MLPs."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.taps = nn.Conv2d(WIDTH, WIDTH, (1, 5), padding=(0, 2), groups=WIDTH)
        self.up, self.gate = (nn.ModuleList(nn.Linear(WIDTH, 40) for _ in range(2)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(40, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.taps(x.mT[:, :, None])[:, :, 0].mT
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            x = x + down(self.act(gate(x)) * up(x))
        return x


WRONG_MLPS: dict[str, Callable[..., Any]] = {
    "units of fc1 in another order": lambda up, gate, down, other: (up.roll(1, 0), down, gate),
    "units of the gate in another order": lambda up, gate, down, other: (up, down, gate.roll(1, 0)),
    "units of fc2 in another order": lambda up, gate, down, other: (up, down.roll(1, 1), gate),
    "two units of fc1 exchanged": lambda up, gate, down, other: (torch.cat([up[:2].flip(0), up[2:]]), down, gate),
    "fc1 and gate exchanged": lambda up, gate, down, other: (gate, down, up),
    "the gate as fc1": lambda up, gate, down, other: (gate, down, gate),
    "fc2 of the next MLP": lambda up, gate, down, other: (up, other, gate),
    "inputs of fc1 in another order": lambda up, gate, down, other: (up.roll(1, 1), down, gate),
    "outputs of fc2 in another order": lambda up, gate, down, other: (up, down.roll(1, 0), gate),
}
WRONG_FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels in another order": lambda f: f.roll(1, 0),
    "height and width exchanged": lambda f: f.mT,
    "taps in another order": lambda f: f.flip(2),
    "some of the channels": lambda f: f[:-1],
}


@pytest.mark.parametrize("act", [F.silu, F.gelu, F.relu6, torch.sigmoid])
def test_the_judge_finds_every_mistake_in_mlps_and_filters(act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = MLPs(act).double()
    true = study.Truth(module, torch.randn(1, 10, WIDTH))
    up, gate, down, other = (
        each.weight.detach() for each in (module.up[0], module.gate[0], module.down[0], module.down[1])
    )
    assert truth.mlp_verdict(true.seen, up, down, gate, true.again).right
    wrong = {name: change(up, gate, down, other) for name, change in WRONG_MLPS.items()}
    assert [name for name, claim in wrong.items() if truth.mlp_verdict(true.seen, *claim, true.again).right] == []
    taps = module.taps.weight.detach()[:, 0]
    assert truth.filters_verdict(true.seen, taps).right
    assert [n for n, change in WRONG_FILTERS.items() if truth.filters_verdict(true.seen, change(taps)).right] == []


def check(model: nn.Module, inputs: Any, kinds: Sequence[str]) -> None:
    found = study.row(lambda: (model, inputs), kinds)
    verdicts = {kind: found[kind] for kind in kinds}
    assert all(one["verdict"] in ("right", "absent") for one in verdicts.values()), verdicts
    assert any(one["verdict"] == "right" for one in verdicts.values())


class Patches(nn.ConvTranspose2d):
    """An output projection that makes patches, which overlap, of the tokens of a 4 x 4 image."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.mT.unflatten(-1, (4, 4))).flatten(2).mT


class Half(nn.Linear):
    """A map of the first half of the channels."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[..., : WIDTH // 2])


def test_values_of_another_width_than_keys_are_no_self_attention() -> None:
    model = Attention("plain")
    model.v = Half(WIDTH // 2, GROUPS * KEY)
    (part,) = anatomy.attention(model)
    assert (part.kind, part.read("k").shape[1], part.read("v").shape[1]) == ("cross", WIDTH, WIDTH // 2)
    with pytest.raises(UsageError, match="found cross-attention only"):
        mimetic_attention_(model)


class OneChannel(nn.Module):
    """A softmax over the one number that all tokens of one channel give, as in CSATv2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.mean(-1, keepdim=True)).unbind(-1)
        return x + ((q @ k.mT).softmax(-1) @ v)[..., None]


def test_outputs_that_are_patches_are_read_and_a_softmax_over_one_channel_is_no_attention() -> None:
    torch.manual_seed(0)
    patches = Attention("plain")
    patches.o = Patches(HEADS * KEY, WIDTH, 3, padding=1)
    for model in (patches, nn.Sequential(OrderedDict(attn=OneChannel(), main=Attention("plain")))):
        check(model, torch.randn(1, 16, WIDTH), ("attention",))


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm_are_read_as_they_compute(name: str) -> None:
    kinds = ("attention", "filters") if "convnext" in name or "efficientnet" in name else ("attention",)
    check(*small_models.timm_model(name), kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_read_as_they_compute(name: str) -> None:
    kinds = ("MLPs", "filters") if name == "convnext" else ("attention", "MLPs")
    check(*small_models.transformers_model(name), kinds)
