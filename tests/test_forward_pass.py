"""Attention that computes something else than its names say is refused; an initialiser that fails changes nothing."""

import copy
import functools
import json
import random
from collections import Counter

import pytest
import shims
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from families import HF, TEXT, TOKENS
from programs import script
from torch import nn

from weightscope import anatomy, attention_maps, products
from weightscope import init as wi
from weightscope.anatomy import tensors, traced
from weightscope.auditing import audit
from weightscope.cli import cli
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init.initialise import initialise
from weightscope.networks import ViT
from weightscope.recipe import Recipe
from weightscope.training.initial_weights import initial_weights


class Attention(nn.Module):
    """Self-attention with the names of timm's, and something else inside."""

    def __init__(self, heads: int, width: int, key: int, kind: str = "plain", bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.kind = heads, kind
        self.qkv = nn.Linear(width, 3 * heads * key, bias=bias)
        self.proj = nn.Linear(heads * key, width)
        self.mix = nn.Parameter(torch.randn(heads, heads))
        self.taps = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        h, kind, rows = self.num_heads, self.kind, self.qkv(x)
        if kind == "packed by head":
            q, k, v = rows.reshape(b, n, h, 3, -1).permute(3, 0, 2, 1, 4)
        elif kind == "heads by stride":
            q, k, v = rows.reshape(b, n, 3, -1, h).permute(2, 0, 4, 1, 3)
        else:
            q, k, v = rows.reshape(b, n, 3, h, -1).permute(2, 0, 3, 1, 4)
        if kind in ("k q v", "v k q", "q v k"):
            q, k, v = {"k q v": (k, q, v), "v k q": (v, k, q), "q v k": (q, v, k)}[kind]
        if kind == "keys of the next head":
            k = k.roll(1, 1)
        if kind == "values of neighbours":
            v = v + torch.arange(n, dtype=x.dtype)[:, None] * v.roll(1, 2)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if kind == "mixed logits":
            logits = torch.einsum("gh,bhnm->bgnm", self.mix, logits)
        maps = logits.relu() if kind == "no softmax" else logits.softmax(-1)
        if kind == "mixed maps":
            maps = torch.einsum("gh,bhnm->bgnm", self.mix, maps)
        y = maps @ v
        if kind == "gated":
            y = y * q.sigmoid()
        y = y.permute(0, 2, 3, 1) if kind == "output by stride" else y.transpose(1, 2)
        return self.proj(y.reshape(b, n, -1))


OTHERS = (
    *("packed by head", "heads by stride", "k q v", "v k q", "q v k", "keys of the next head"),
    *("values of neighbours", "mixed logits", "no softmax", "mixed maps", "gated", "output by stride"),
)


class Wrapped(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": layer}) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["attn"](x)
        return x


def unread(model: nn.Module) -> list[int | None]:
    return [found.layer for found in anatomy.FINDERS["attention modules"](anatomy.named_tensors(model)).unread]


REFUSED = {
    "values of neighbours": "the values are not what their matrix gives",
    "no softmax": "its forward pass shows no softmax",
}
NOTED = {"mixed logits": "heads mixed", "mixed maps": "heads mixed", "gated": "gated"}


def own_products(layer: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q W_K^T and W_V W_O of each head, (H, d, d), by the layer's own order of rows."""
    rows, o = layer.qkv.weight.double(), layer.proj.weight.double()
    h, kind, width = layer.num_heads, layer.kind, rows.shape[1]
    if kind == "packed by head":
        q, k, v = rows.reshape(h, 3, -1, width).transpose(0, 1)
    elif kind == "heads by stride":
        q, k, v = rows.reshape(3, -1, h, width).transpose(1, 2)
    else:
        q, k, v = rows.reshape(3, h, -1, width)
    if kind in ("k q v", "v k q", "q v k"):
        q, k, v = {"k q v": (k, q, v), "v k q": (v, k, q), "q v k": (q, v, k)}[kind]
    k = k.roll(1, 0) if kind == "keys of the next head" else k
    strided = kind == "output by stride"
    o = o.reshape(width, -1, h).permute(2, 1, 0) if strided else o.reshape(width, h, -1).permute(1, 2, 0)
    return q.mT @ k, v.mT @ o


@pytest.mark.slow
def test_a_layer_is_read_as_it_computes_whatever_its_names_say():
    """Stacks with one odd layer: the products of its heads are those of its code, or it alone is refused."""
    rng = random.Random(0)
    for kind in OTHERS * 3:
        torch.manual_seed(rng.randrange(2**31))
        heads, depth, key = rng.randint(2, 5), rng.randint(1, 3), rng.choice((4, 8, 12))
        width = heads * key if rng.random() < 0.7 else rng.randint(8, 40)
        layers, at = [Attention(heads, width, key, bias=rng.random() < 0.5) for _ in range(depth)], rng.randrange(depth)
        layers[at] = Attention(heads, width, key, kind)
        model, refused = Wrapped(*layers), kind in REFUSED
        assert unread(model) == [at] * refused, kind
        parts = anatomy.FINDERS["attention modules"](anatomy.named_tensors(model))
        read = [layer for layer in layers if not (refused and layer is layers[at])]
        for part, layer in zip(parts, read, strict=True):
            q, k, v, o = (part.read(letter).double() for letter in "qkvo")
            torch.testing.assert_close((q @ k.mT, v @ o), own_products(layer), rtol=1e-5, atol=1e-8)
            assert part.notes == ({NOTED[kind]} if layer is layers[at] and kind in NOTED else set())
        before = copy.deepcopy(model.state_dict())
        for use in (wi.mimetic_attention_, wi.zero_init_, lambda m: audit(m, "mimetic_attention")) if refused else ():
            with pytest.raises(AnatomyError, match=REFUSED[kind]):
                use(model)
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


NEO = {"hidden_size": 48, "num_layers": 2, "num_heads": 3, "attention_types": [[["global", "local"], 1]]}
BLOOM = {"vocab_size": 50, "hidden_size": 48, "n_layer": 2, "n_head": 3} | TOKENS
XGLM = {"vocab_size": 50, "d_model": 48, "num_layers": 2, "attention_heads": 3, "ffn_dim": 96} | TOKENS
MEASURED = {  # config -> scale sqrt(k), causal, rotary, positional
    "GPTNeo": (NEO | TEXT | TOKENS, 4.0, True, False, False),
    "Esm": (HF | TEXT | TOKENS | {"position_embedding_type": "rotary", "mask_token_id": 3}, 1.0, False, True, False),
    "RoFormer": (HF | TEXT, 1.0, False, True, False),
    "OPT": (HF | TEXT | TOKENS | {"ffn_dim": 96, "word_embed_proj_dim": 48}, 1.0, True, False, False),
    "XGLM": (XGLM, 1.0, True, False, False),
    "Bloom": (BLOOM, 1.0, True, False, True),
    "MPNet": (HF | TEXT, 1.0, False, False, True),
    "Qwen3": (HF | {"vocab_size": 50, "num_key_value_heads": 3, "head_dim": 16} | TOKENS, 1.0, True, True, False),
    "Beit": (HF | {"image_size": 32, "patch_size": 8, "use_relative_position_bias": True}, 1.0, False, False, True),
}


@pytest.mark.parametrize("name", MEASURED)
def test_scale_mask_and_positions_are_measured(name):
    settings, *expected = MEASURED[name]
    transformers = shims.transformers()
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings)).eval()
    for part in anatomy.attention(model):
        found = [part.scale * part.head_width**0.5, part.causal, part.rotary, part.positional]
        assert found == [pytest.approx(expected[0], rel=1e-4), *expected[1:]]
    if part.rotary or part.positional:
        with pytest.raises(UsageError, match=r"rotated by position|biases of positions"):
            wi.impulse_attention_(model, grid=None if anatomy.inventory(model)["position embeddings"] else (1, 5))


def test_what_cannot_be_run_is_not_confirmed():
    class Unusual(Attention):
        def forward(self, x, where):  # type: ignore[override]
            return super().forward(x[where.tokens])

    with pytest.raises(AnatomyError, match=r"random inputs: AttributeError: 'NoneType' object has no att"):
        wi.mimetic_attention_(Wrapped(Unusual(2, 16, 8)))
    state = Wrapped(Unusual(2, 16, 8)).state_dict()  # without code, names are all there is
    assert len(anatomy.attention(state, {"num_heads": 2, "layout": "blocks"})) == 1


def test_an_input_with_too_many_tokens_is_not_traced(monkeypatch):
    monkeypatch.setattr("weightscope.anatomy.tracing._MOST", 100)
    with pytest.raises(AnatomyError, match="could not be run on random inputs"):
        wi.mimetic_attention_(Wrapped(Attention(2, 22, 11)))


def test_why_a_class_refuses_a_config_is_said():
    shims.transformers()
    state = {"l.0.attn.qkv.weight": torch.zeros(144, 48), "l.0.attn.proj.weight": torch.zeros(48, 48)}
    with pytest.raises(AnatomyError, match=r"5 heads do not divide .*'esm' could not be built to see its layout: Type"):
        anatomy.attention(state, {"model_type": "esm", "hidden_size": 48, "num_attention_heads": 5})


class Positions(Attention):
    """Attention with a scale, mask or positions of its own, which no name or attribute tells."""

    def __init__(self, heads: int, width: int, key: int, kind: str) -> None:
        super().__init__(heads, width, key, kind)
        self.table = nn.Parameter(torch.zeros(heads, 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        at, factor = torch.arange(n, dtype=x.dtype), 1.0 if self.kind == "scale" else q.shape[-1] ** -0.5
        if self.kind.startswith("rotary"):
            real, imaginary = (torch.stack([t[..., 0::2], t[..., 1::2]]) for t in (q, k))
            turn = torch.stack([at.cos(), at.sin()])[:, :, None]
            q, k = (
                torch.cat([t[0] * turn[0] - t[1] * turn[1], t[0] * turn[1] + t[1] * turn[0]], -1)
                for t in (real, imaginary)
            )
        if self.kind.endswith("normalised"):
            q = nn.functional.normalize(q, dim=-1)
        logits = q @ k.mT * factor
        if self.kind == "alibi":
            logits = logits + 0.3 * at
        if self.kind == "relative":
            logits = logits - 0.1 * (at[:, None] - at).abs()
        if self.kind == "zero table":  # as it starts
            logits = logits + self.table[:, (at[:, None] - at).long().clamp(-7, 7) + 7]
        if self.kind == "causal":
            logits = logits.masked_fill(at[:, None] < at, -torch.inf)
        if self.kind == "window":
            logits = logits.masked_fill((at[:, None] - at).abs() > 2, -torch.inf)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))


def turned(t: torch.Tensor, kind: str) -> torch.Tensor:
    """Rotary positions of (b, h, n, d), as they are written out in several codes."""
    if kind == "all but a class token":  # DINOv3: no angle is zero, and its sines may be larger than its cosines
        angles = (torch.arange(1, 2 * t.shape[-2] - 1, 2)[:, None] * torch.tensor([1.57, 1.57, 1.57, 0.3])).repeat(1, 2)
        x, y = t[..., 1:, :].chunk(2, -1)
        rest = t[..., 1:, :] * angles.cos() + torch.cat([-y, x], -1) * angles.sin()
        return torch.cat([t[..., :1, :], rest], -2)
    c, s = (
        f(torch.arange(t.shape[-2])[:, None] * 10.0 ** -torch.arange(t.shape[-1] // 2)) for f in (torch.cos, torch.sin)
    )
    if kind == "complex":
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(c), c.acos() * s.sign())).flatten(-2)
    if kind == "pairs":
        x, y = t[..., ::2], t[..., 1::2]
        return torch.stack([x * c - y * s, x * s + y * c], -1).flatten(-2)
    x, y = t.chunk(2, -1)
    c, s = (c * 1.3, s * 1.3) if kind == "stretched" else (c, s)
    if kind == "other sign":
        return torch.cat([x * c + y * s, x * (-s) + y * c], -1)
    return t * torch.cat([c, c], -1) + torch.cat([-y, x], -1) * torch.cat([s, s], -1)


class Changed(Attention):
    """Attention in which something acts on queries, keys, values or outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__(3, 24, 8, kind)
        self.gain, self.shift = nn.Parameter(torch.linspace(0.2, 3, 24)), nn.Parameter(torch.full((24,), 200.0))
        self.heads, self.more, self.norm = nn.Parameter(torch.rand(3, 1, 1)), nn.Linear(24, 24), nn.BatchNorm1d(24)
        self.norm.running_var.uniform_(0.1, 9)
        self.norm.running_mean.fill_(100)
        self.tokens, self.rms = nn.Parameter(torch.rand(3, 24)), nn.RMSNorm(24)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, kind, n = x, self.kind, x.shape[1]
        x = self.more(x) if kind == "map before" else x
        if kind == "tokens shifted":
            before = nn.functional.pad(x, (0, 0, 1, -1))
            mixed = (x * m + before * (1 - m) for m in self.tokens)
            q, k, v = (row(y) for row, y in zip(self.rows(), mixed, strict=True))
        else:
            q, k, v = (row(x) for row in self.rows())
        q = q * self.gain + self.shift if kind == "gain below a bias" else self.normed(q) if kind == "batch norm" else q
        k = k * self.gain if kind == "gain before rotation" else k
        q, k, v = (t.view(*t.shape[:2], 3, 8).transpose(1, 2) for t in (q, k, v))
        q = q + 0.5 * q.flip(-1) if kind == "channels added" else q
        if kind in (*ROTATIONS, "gain before rotation"):
            q, k = turned(q, kind), turned(k, kind)
        logits = q @ k.mT
        logits = -logits if kind == "negative logits" else logits
        if kind == "divided by norms":
            logits = 8 * logits / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])
        if kind == "two products":
            logits = q[..., :4] @ k[..., :4].mT + q[..., 4:] @ k[..., 4:].mT
        if kind == "mask of triu":
            logits = logits + torch.full((n, n), -torch.inf).triu(1)
        maps = logits.softmax(-1)
        maps = maps - 0.5 * (k @ q.mT).softmax(-1) if kind == "two maps" else maps
        maps = 2 * maps if kind == "maps doubled" else maps
        y = maps @ (-v if kind == "values negated" else v)
        y = (y * self.heads if kind == "factors of heads" else y).transpose(1, 2).flatten(2)
        y = nn.functional.layer_norm(y, (24,), self.gain) if kind == "norm of values" else y
        y = self.proj(y * self.gain if kind == "gain of values" else y)
        y = self.more(y) if kind == "map after" else y + self.more(x).relu() if kind == "parallel" else y
        y = self.more(x) + y if kind == "parallel map" else y
        y = y * self.more(x).sigmoid() if kind == "output gated" else y.relu() if kind == "output activated" else y
        y = y * torch.linspace(-1, 1, 24) if kind == "constants of channels" else y
        y = y.flip(-1) if kind == "output mirrored" else self.rms(y) if kind == "output normalised" else y
        if kind in ("subtracted", "alpha"):
            return given - 0.5 * y if kind == "subtracted" else given.add(y, alpha=0.25)
        return given + (self.normed(y) if kind == "batch norm of outputs" else y)

    def rows(self) -> list:
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        return [functools.partial(nn.functional.linear, weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]


ROTATIONS = ("halves", "other sign", "pairs", "complex", "stretched", "all but a class token")
CHANGED = {
    "gain below a bias": "the queries are not what",
    "batch norm": "the queries are not what",
    "gain before rotation": "queries and keys of one token",
    "channels added": "queries and keys of one token",
    "two products": "a sum of several products",
    "map after": "another linear map follows",
    "factors of heads": {"scaled"},
    "gain of values": {"scaled"},
    "norm of values": {"scaled"},
    "batch norm of outputs": {"scaled"},
    "map before": {"widened"},
    "tokens shifted": "cross",
    "negative logits": "a negative number times",
    "two maps": "a sum of several products",
    "output gated": {"scaled"},
    "output activated": {"scaled"},
    "constants of channels": {"scaled"},
    "output mirrored": {"widened"},
    **dict.fromkeys(("values negated", "subtracted", "alpha", "maps doubled"), frozenset()),
    **dict.fromkeys(("output normalised", "divided by norms"), frozenset()),
    **dict.fromkeys((*ROTATIONS, "plain", "parallel", "parallel map", "mask of triu"), frozenset()),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_acts_on_queries_keys_values_and_outputs_is_seen_in_their_numbers(kind):
    torch.manual_seed(0)
    model, wanted = Changed(kind).eval(), CHANGED[kind]
    if isinstance(wanted, str) and wanted != "cross":
        with pytest.raises(AnatomyError, match=wanted):
            anatomy.attention(model)
        return
    (part,) = anatomy.attention(model)
    assert (part.kind, part.notes) == (("cross", set()) if wanted == "cross" else ("self", wanted))
    q, k, _ = model.qkv.weight.double().view(3, 3, 8, 24)
    torch.testing.assert_close(part.read("q").double() @ part.read("k").double().mT, q.mT @ k, rtol=1e-5, atol=1e-8)
    assert part.normalised == (kind == "divided by norms")
    if kind == "output normalised":
        with pytest.raises(AnatomyError, match="its output is normalised before it is added"):
            part.layer_scale_factors()
    elif not wanted:
        factors = part.layer_scale_factors()
        assert (1.0 if factors is None else float(factors)) == pytest.approx(FACTORS.get(kind, 1.0))
        if FACTORS.get(kind, 1.0) < 0:
            with pytest.raises(UsageError, match="a negative number multiplies the output, which it does not support"):
                wi.mimetic_attention_(model)


FACTORS = {"values negated": -1.0, "subtracted": -0.5, "alpha": 0.25, "maps doubled": 2.0}


class OfOneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(24, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (one(x) for one in self.maps)
        return (q @ k.mT).softmax(-1) @ v


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(OfOneHead() for _ in range(3)), nn.Linear(24, 24)

    def forward(self, x):
        return x + self.proj(torch.cat([head(x) for head in self.heads], -1))


def test_heads_that_are_modules_are_no_layers():
    with pytest.raises(AnatomyError, match=r"`0.proj.weight` reads several attentions; heads in modules of their own"):
        products(nn.Sequential(Heads(), Heads()))


def test_what_a_norm_without_weights_or_of_values_does_is_known_of_files():
    state = {f"layers.0.self_attn.{x}_proj.weight": torch.randn(24, 24) for x in "qkvo"}
    for kind, found in (("llama", (False, [])), ("nanochat", (True, [])), ("bitnet", (False, ["scaled"]))):
        (part,) = anatomy.attention(state, {"model_type": kind, "num_attention_heads": 3})
        assert (part.normalised, sorted(part.notes)) == found
    for norm in ("norm", "inner_attn_ln"):
        names = {f"blocks.0.attn.{x}.weight": torch.randn(24, 24) for x in ("q_proj", "k_proj", "v_proj", "proj")}
        (part,) = anatomy.attention(names | {f"blocks.0.attn.{norm}.weight": torch.ones(24)}, {"num_heads": 3})
        assert part.notes == {"scaled"}
    state["layers.0.self_attn.v_proj.weight"] = torch.randn(24, 16)
    assert anatomy.attention(state, {"model_type": "llama", "num_attention_heads": 3})[0].kind == "cross"


BIASED = ("alibi", "relative", "zero table", "window")


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", [*("plain", "scale", "causal", "rotary", "normalised"), *BIASED, "rotary normalised"])
def test_what_a_module_does_on_its_own_is_measured(kind, heads):
    model = Wrapped(Positions(heads, 24, 8, kind))
    (part,) = anatomy.attention(model)
    assert part.scale == (1.0 if kind == "scale" else 8**-0.5)
    measured = kind == "causal", kind.startswith("rotary"), kind.endswith("normalised"), kind in BIASED
    assert (part.causal, part.rotary, part.normalised, part.positional) == measured
    if any(measured[1:]):
        for use in (wi.impulse_attention_, lambda m, grid: audit(m, wi.get("impulse_attention", grid=grid))):
            with pytest.raises(UsageError, match=r"rotated by position|normalised|biases of positions"):
                use(model, grid=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "notes", "unread"),
    [
        ("maxvit_rmlp_pico_rw_256", {"self": 22}, set(), 0),
        ("efficientformer_l1", {"self": 1}, set(), 0),
        ("cait_xxs24_224", {"self": 24, "pooled": 2}, {"heads mixed"}, 0),
        ("hiera_tiny_224", {"self": 12}, {"widened"}, 0),
        ("levit_128s", {"self": 11}, {"activated", "widened"}, 0),
        ("lowformer_b0", {"self": 7}, {"widened"}, 0),
    ],
)
def test_attention_of_timm_that_no_name_tells(name, kinds, notes, unread):
    parts = anatomy.FINDERS["attention modules"](anatomy.named_tensors(shims.timm().create_model(name)))
    assert (Counter(part.kind for part in parts), len(parts.unread)) == (kinds, unread)
    assert set().union(*(part.notes for part in parts)) == notes


@pytest.mark.slow
def test_initialisers_say_what_they_do_not_support():
    timm = shims.timm()
    levit, cait = timm.create_model("levit_128s"), timm.create_model("cait_xxs24_224")
    with pytest.raises(UsageError, match="a nonlinear function acts between the values and the output projection"):
        wi.mimetic_attention_(levit)
    wi.mimetic_attention_(levit, parts="qk", alpha_qk=0.0, beta_qk=1.0)
    found = products(levit)
    assert min(row["beta"] for row in found.select("qk")) > 0.03  # a head has 16 of at most 384 dimensions
    assert not found.select("vo")
    assert any("so that it is no map of the stream to itself" in note for note in found.notes())
    with pytest.raises(UsageError, match=r"maps of several heads are mixed"):
        wi.impulse_attention_(cait)


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.stack = nn.ModuleList(Layer() for _ in range(depth))
    def forward(self, x):
        for layer in self.stack:
            x = x + layer(x)
        return x
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.back = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)
    def forward(self, x):
        k, v, q = (part.unflatten(-1, (8, 3)).permute(0, 3, 1, 2) for part in self.rows(x).chunk(3, -1))
        return self.back((torch.softmax(q @ k.mT / 8**0.5, -1) @ v).permute(0, 2, 3, 1).flatten(2))
"""


def test_a_file_is_read_as_code_of_ones_own_computes(tmp_path, monkeypatch):
    """Keys, values, queries in this order, and heads that take turns: no name says so."""
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    state = {
        f"net.stack.{i}.{name}.weight": torch.randn(shape)
        for i in range(3)
        for name, shape in (("rows", (72, 24)), ("back", (24, 24)))
    }
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(AnatomyError, match="expected attention"):
        anatomy.attention(state)
    parts = anatomy.attention(str(tmp_path / "weights.pt"), {"code": "own_net:Net"})
    assert [(part.layer, part.name, part.heads) for part in parts] == [(i, f"net.stack.{i}", 3) for i in range(3)]
    for i, part in enumerate(parts):
        k, _, q = state[f"net.stack.{i}.rows.weight"].unflatten(0, (3, 8, 3)).transpose(1, 2)
        torch.testing.assert_close(part.read("q") @ part.read("k").mT, q.mT @ k)
    done = CliRunner().invoke(
        cli, ["products", "weights.pt", "--code", "own_net:Net", "-o", "out.png", "--json", "out.json"]
    )
    assert done.exit_code == 0, done.output
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 3 * (3 + 3 + 1)
    with pytest.raises(UsageError, match="none of the attention modules that its forward pass shows has the names"):
        anatomy.attention({"other.weight": torch.zeros(24, 24)}, {"code": "own_net:Net"})
    with pytest.raises(UsageError, match="it raised ZeroDivisionError: "):
        anatomy.attention({"other.weight": torch.zeros(24, 24)}, {"code": lambda: 1 // 0})


class Coded(nn.Module):
    """Layers with their own number of heads, and a gain of ones or a batch norm with statistics of 0 and 1 after q."""

    def __init__(self, heads: tuple[int, ...] = (3,), after: str = "") -> None:
        super().__init__()
        self.heads, self.after = heads, after
        self.maps = nn.ModuleList(nn.ModuleDict({x: nn.Linear(24, 24) for x in "qkvo"}) for _ in heads)
        self.gain = nn.Parameter(torch.ones(24)) if after == "gain" else None
        self.norm = nn.BatchNorm1d(24) if after == "batch norm" else nn.LayerNorm(24)
        self.units = nn.ModuleList([nn.Linear(24, 32), nn.Linear(32, 24)])

    def forward(self, x):
        for maps, heads in zip(self.maps, self.heads, strict=True):
            stream = x if self.after == "batch norm" else self.norm(x)
            q, k, v = (maps[name](stream) for name in "qkv")
            q = q if self.gain is None else q * self.gain
            q = self.norm(q.mT).mT if self.after == "batch norm" else q
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
            x = x + maps["o"](torch.softmax(q @ k.mT, -1).matmul(v).transpose(1, 2).flatten(2))
        return x + self.units[1](torch.relu(self.units[0](x)))


@pytest.mark.parametrize("after", ["gain", "batch norm"])
def test_what_is_one_at_the_start_is_no_reading_of_a_trained_file(after):
    module = Coded(after=after)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(AnatomyError, match="the queries are not what their matrix gives"):
        anatomy.attention(before, {"code": module})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("wrapped", ["", "net."])
def test_layers_that_code_does_not_build_are_those_that_it_builds_if_these_agree(wrapped):
    state = {f"{wrapped}{name}": value for name, value in Coded((3, 6, 3, 6)).state_dict().items()}

    def heads(*built):
        parts = anatomy.attention(state, {"code": lambda: Coded(built)}, strict=None)
        return [part.heads for part in parts], [str(one) for one in parts.unread]

    assert heads(3, 6, 3, 6) == ([3, 6, 3, 6], [])
    assert heads(3, 3) == ([3] * 4, [])
    found, unread = heads(3, 6)
    assert found == [3, 6]
    assert [one.split()[0] for one in unread] == [f"`{wrapped}maps.{i}.q.weight`" for i in (2, 3)]
    assert all("`maps.0`, `maps.1`, alike in shapes, which differ in what they do" in one for one in unread)


def test_mlps_of_a_file_are_those_of_its_code():
    state = Coded().state_dict()
    part = anatomy.mlps(state, {"code": Coded})[0]
    assert torch.equal(part.read("fc1"), state["units.0.weight"])
    with pytest.raises(AnatomyError, match="expected MLPs"):
        anatomy.mlps(state)


def test_a_library_that_cannot_be_imported_is_named(monkeypatch):
    def fails(*_, **__):
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from RuntimeError(
            "torchvision::nms not found"
        )

    mapping = shims.transformers().models.auto.configuration_auto.CONFIG_MAPPING
    monkeypatch.setattr(type(mapping), "__getitem__", fails)
    state = {f"layers.0.self_attn.{x}_proj.weight": torch.randn(8, 8) for x in "qkvo"}
    state["layers.1.self_attn.q_proj.weight"] = torch.zeros(8, 8, dtype=torch.int8)
    parts = anatomy.attention(state, {"model_type": "llama", "num_attention_heads": 2}, strict=None)
    assert len(parts) == 1
    assert "its code cannot be imported: expected a torchvision of the build of torch" in str(parts.unread[0])


def test_mlps_over_tokens_are_left_alone():
    shims.timm()
    from timm.models.mlp_mixer import MlpMixer

    mixer = MlpMixer(img_size=16, patch_size=4, num_blocks=2, embed_dim=24)
    assert [part.name for part in anatomy.mlps(mixer)] == [f"blocks.{i}.mlp_channels" for i in range(2)]


class Second(nn.Module):
    """Attention to its own tokens, or to a second stream if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x, context=None):
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in (self.q(x), k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Keyed(Second):
    def forward(self, hidden_states, attention_mask=None, key_value_states=None):
        return super().forward(hidden_states, key_value_states)


class Multihead(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(24, 3, batch_first=True)


class Layer(nn.Module):
    """Cross-attention only if there is something to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Keyed(), Keyed()

    def forward(self, x, encoder_hidden_states=None):
        x = x + self.one(x)
        return x if encoder_hidden_states is None else x + self.two(x, key_value_states=encoder_hidden_states)


class Unguessed(Wrapped):
    def forward(self, x, more):
        for block in self.blocks:
            x = x + block["attn"](x, *more["text"])
        return x


@pytest.mark.parametrize(
    ("layer", "kinds", "refused"),
    [
        *((of, [], 1) for of in (Second, Keyed, Multihead)),
        (Layer, ["self", "cross"], 0),
        (lambda: Attention(3, 24, 8), ["self"], 0),
    ],
)
def test_attention_of_a_network_that_cannot_be_run_is_not_taken_for_self_attention(layer, kinds, refused):
    """Alone, a layer that may be given a second stream is not; a layer that the user hands over is."""
    found = anatomy.parts_of("attention modules", Unguessed(layer()), strict=None)
    assert [part.kind for part in found] == kinds
    assert sum("run alone, it is self- or cross-attention; give" in one.why for one in found.unread) == refused
    assert anatomy.attention(nn.ModuleList([layer()]), strict=None)[0].kind == "self"
    if layer is Second:
        network = Unguessed(layer())
        network.example_input_array = torch.randn(1, 6, 24), {"text": [torch.randn(1, 7, 24)]}
        assert [part.kind for part in anatomy.attention(network)] == ["cross"]


@pytest.mark.parametrize("network", [Wrapped, Unguessed])
@pytest.mark.parametrize("kind", ["plain", *REFUSED])
def test_one_block_in_three_places_is_one(network, kind):
    found = anatomy.parts_of("attention modules", network(*[Attention(3, 24, 8, kind)] * 3), strict=None)
    assert (len(found), found.layers, [one.path for one in found.unread]) == (
        (1, 1, []) if kind == "plain" else (0, 1, ["blocks.0.attn"])
    )
    apart = anatomy.parts_of("attention modules", network(*(Attention(3, 24, 8, kind) for _ in range(3))), strict=None)
    assert apart.layers == len(apart) + len(apart.unread) == 3


class Told(Attention):
    """Its kind is a setting that others hold."""

    kind = property(lambda self: self.__dict__["settings"].kind, lambda self, kind: None)


@pytest.mark.parametrize("holder", ["class", "object", "patched class"])
def test_another_forward_pass_of_the_same_parameters_is_read_anew(holder, monkeypatch):
    layer, settings = Told(3, 24, 8, bias=False), type("Settings", (), {})
    layer.__dict__["settings"] = settings if holder == "class" else settings()
    for kind in ("plain", "k q v", "heads by stride", "packed by head", "plain"):
        layer.settings.kind = kind
        if holder == "patched class":
            monkeypatch.setattr(Told, "kind", kind)
        (part,) = anatomy.attention(layer)
        q, k, v, o = (part.read(letter).double() for letter in "qkvo")
        torch.testing.assert_close((q @ k.mT, v @ o), own_products(layer), rtol=1e-5, atol=1e-8)


class Padded(Attention):
    """It takes the number of tokens, so that no input is guessed."""

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, : int(count)])


@pytest.mark.parametrize("of", [Padded, "instance"])
def test_an_example_input_of_a_class_or_an_instance(of, monkeypatch):
    layer = Padded(3, 24, 8)
    with pytest.raises(AnatomyError, match=r"could not be run on random inputs: TypeError: int\(\)"):
        anatomy.attention(layer)
    monkeypatch.setattr(layer if of == "instance" else of, *EXAMPLE, raising=False)
    assert [part.heads for part in anatomy.attention(layer)] == [3]


EXAMPLE = "example_input_array", (torch.randn(1, 6, 24), torch.tensor(4))


def doubled(module, *, generator=None):
    """Of a user: doubles the queries, and in the class, exchanges them with the keys."""
    for part in anatomy.attention(module):
        part.write("q", 2 * part.read("q"))
    kind = module.blocks[0]["attn"].settings
    kind.kind = "k q v" if kind.kind == "plain" else "plain"
    return module


def test_a_network_is_traced_once_for_a_call_and_anew_after_code_of_a_user(monkeypatch):
    def vits(n):
        return [ViT(16, 4, 32, 2, 2, 10) for _ in range(n)]

    seen, once = [], traced._read
    monkeypatch.setattr(traced, "_read", lambda tensors: seen.append(tensors) or once(tensors))
    both = "mimetic_attention+mimetic_mlp"
    recipe = Recipe.parse(RECIPE | {"init": {"name": both}})
    made = vits(8)
    for use in (
        lambda: audit(made[0]),
        lambda: audit(made[0], wi.mimetic_attention_),
        lambda: initialise(made[0], both),
        lambda: wi.get(both)(made[0]),
        lambda: wi.transfer_(made[0], made[1].state_dict()),
        lambda: initial_weights(recipe, range(4), iter(made[2:]).__next__),
    ):
        use()
        assert len(seen) == 1, use
        seen.clear()
    layer = Told(3, 24, 8, bias=False)
    layer.__dict__["settings"] = type("Settings", (), {"kind": "plain"})
    before = layer.qkv.weight.detach().clone()
    wi.compose(doubled, doubled)(Wrapped(layer))
    assert torch.equal(layer.qkv.weight, before * torch.tensor([2.0, 2.0, 1.0]).repeat_interleave(24)[:, None])


RECIPE = {
    "network": {"type": "vit", "width": 32, "depth": 2, "heads": 2, "patch_size": 4},
    "data": {"name": "digits", "train": 64, "test": 300},
    "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.001},
    "population": {"networks": 4, "tile": 4},
}


class Adds(Second):
    """It adds its input itself; of some, not all that their weights show."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return 10 * x + super().forward(x) if self.kind == "more" else x + super().forward(x)


class Single(Second):
    def forward(self, x):
        return torch.cat([x[:, :1] + super().forward(x[:, :1], x), x[:, 1:]], 1)


class Three(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x):
        return x + super().forward(x)


def test_maps_of_a_module_that_adds_its_input():
    network, images = nn.Sequential(nn.Embedding(20, 24), Adds()), torch.randint(20, (3, 7))
    (layer,) = attention_maps(network, images).layers
    x, one = network[0](images), network[1]
    q, k = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in (one.q(x), one.kv(x).chunk(2, -1)[0]))
    torch.testing.assert_close(
        torch.tensor(layer.maps), (q @ k.mT / 8**0.5).softmax(-1).mean(0).double(), check_dtype=False
    )
    network[1].kind = "more"
    with pytest.raises(DataError, match="the module does more than its weights show"):
        attention_maps(network, images)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: nn.Sequential(Single()), "found attention of single queries .* only: `0.q.weight`"),
        (lambda: Unguessed(Second()), "run alone, it is self- or cross-attention"),
        (Three, "expected attention modules, .* its forward pass shows no softmax of queries and keys"),
        (lambda: nn.Linear(3, 3), "expected attention modules, .* is this the right model"),
    ],
)
def test_what_there_is_in_place_of_self_attention(network, message):
    with pytest.raises((AnatomyError, UsageError), match=message):
        wi.mimetic_attention_(network())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Three, "expected MLPs, .* its forward pass shows no function of each unit between two linear maps"),
        (lambda: Refuses(24, 24), "expected MLPs, .*`Refuses` could not be run on random inputs: ValueError: never"),
    ],
)
def test_what_there_is_in_place_of_mlps(network, message):
    with pytest.raises(AnatomyError, match=message):
        wi.mimetic_mlp_(network())


class Refuses(nn.Bilinear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, 24)
        self.other = nn.Linear(24, 24)

    def forward(self, x):
        raise ValueError("never")


def centred(h):
    return F.gelu(h) - F.gelu(h).mean(-1, keepdim=True)


BETWEEN = {  # what is between the two matrices of an MLP -> how many times as wide the first one is
    *(("gelu", F.gelu, 1), ("in place", lambda h: h.relu_().square_(), 1), ("slopes", lambda h: SLOPES(h.mT).mT, 1)),
    *(("batch norm", lambda h: SCALES(h.relu().mT).mT, 1), ("silu", lambda h: h * h.sigmoid(), 1)),
    *(("neighbours", lambda h: F.gelu(TAPS(h.mT).mT), 1), ("bounds", lambda h: h.clamp(-1, 0.5), 1)),
    *(("gate", lambda h: h.chunk(2, -1)[0] * F.silu(h.chunk(2, -1)[1]), 2), ("steps", lambda h: (h > 0) * h, 1)),
}
MIXED = {
    *(("maxout", lambda h: torch.maximum(*h.chunk(2, -1)), 2), ("centred", centred, 1)),
    *(
        ("top k", lambda h: h.relu() * (h >= h.topk(8, -1).values[..., -1:]), 1),
        ("softmax", lambda h: h.softmax(-1), 1),
    ),
    *(("sorted", lambda h: h.sort(-1).values.relu(), 1), ("sums", lambda h: h.relu().cumsum(-1), 1)),
    *(("layer norm", lambda h: F.layer_norm(F.gelu(h), (32,)), 1), ("energy", lambda h: h.relu() / (1 + h.norm()), 1)),
    *(("share", lambda h: F.silu(h.chunk(2, -1)[0] - h.mean()) * h.chunk(2, -1)[1], 2),),
}
SCALES, SLOPES, TAPS = nn.BatchNorm1d(32).eval(), nn.PReLU(32), nn.Conv1d(32, 32, 3, padding=1, groups=32)


class Middle(nn.Module):
    def __init__(self, function, wide):
        super().__init__()
        self.fc1, self.fc2, self.function = nn.Linear(12, 32 * wide), nn.Linear(32, 12), function

    def forward(self, x):
        return x + self.fc2(self.function(self.fc1(x)))


@pytest.mark.parametrize(("name", "function", "wide"), sorted([*BETWEEN, *MIXED], key=lambda row: row[0]))
def test_what_is_between_the_matrices_of_an_mlp_is_a_function_of_each_unit(name, function, wide):
    network = nn.Sequential(*(Middle(function, wide) for _ in range(2)))
    found = anatomy.parts_of("MLPs", network, strict=None)
    assert len(found) == 2 * ((name, function, wide) in BETWEEN)


class Remembers(Middle):
    """It takes another way in each call."""

    calls = 0

    def forward(self, x):
        Remembers.calls += 1
        for _ in range(Remembers.calls % 5):
            x = x + self.fc2(F.gelu(self.fc1(x)))
        return super().forward(x[..., : 1 + Remembers.calls, :])


def test_an_mlp_of_a_module_that_remembers_earlier_calls():
    for _ in range(3):
        assert len(anatomy.parts_of("MLPs", Remembers(F.gelu, 1), strict=None)) < 2


study = functools.cache(lambda: script("analyses/audit_power/run.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(study().CASES))
def test_an_initialiser_that_fails_changes_nothing(name, monkeypatch):
    """Whichever of its first writes fails, and as a step of several."""
    case, keep = study().CASES[name], tensors.keep
    for fails_at in (1, 3):
        for init in (wi.get(case.name, **case.right), wi.compose("kaiming_uniform", wi.get(case.name, **case.right))):
            model, writes = case.make(16, 0), []
            own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}

            def failing(tensor, writes=writes, fails_at=fails_at, own=own):
                keep(tensor)
                if tensor.untyped_storage().data_ptr() in own:  # not of a copy that is probed
                    writes.append(tensor)
                    if len(writes) == fails_at:
                        raise DataError("the disk is on fire")

            before = copy.deepcopy(model.state_dict())
            with monkeypatch.context() as patch:
                for place in ("weightscope.anatomy.tensors.keep", "weightscope.init.base.keep"):
                    patch.setattr(place, failing)
                try:
                    init(model, generator=torch.Generator().manual_seed(0))
                except DataError:
                    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
                else:
                    assert len(writes) < fails_at
