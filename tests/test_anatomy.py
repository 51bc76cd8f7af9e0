"""One contract suite for every family: views read what the model uses, and write only that."""

import functools
import math

import pytest
import references_sequences as reference
import shims
import torch
from families import FAMILIES, HEADS, HIDDEN, TOKENS, WIDTH, Family, built, rows, scramble
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from weightscope import anatomy
from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.errors import AnatomyError, DataError, SpecError, UsageError

KINDS = {
    "attention": anatomy.attention,
    "depthwise": anatomy.depthwise,
    "mlps": anatomy.mlps,
    "patch_embeddings": anatomy.patch_embeddings,
    "positions": anatomy.positions,
    "ssms": anatomy.ssms,
}
NAMES = ("attention modules", "depthwise convolutions", "MLPs", "patch embeddings", "position embeddings")
NAMES += ("state-space layers",)
DEIT = ("timm-deit", "timm-eva", "hf-deit", "hf-dinov2")


def ids(families: list[Family]) -> dict:
    return {"argvalues": families, "ids": [f.name for f in families]}


def slots(part) -> list[tuple]:
    """(read, write) of every number that a part shows, as pairs of functions."""
    if not isinstance(part, anatomy.AttentionPart | anatomy.MLPPart | anatomy.SSMPart):
        return [(part.read, part.write)]
    out = [(functools.partial(part.read, n), functools.partial(part.write, n)) for n in part.parameters]
    biases = part.bias_parameters
    return out + [(functools.partial(part.read_bias, n), functools.partial(part.write_bias, n)) for n in biases]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- counts and errors ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", **ids(list(FAMILIES.values())))
def test_counts_and_a_missing_kind_raises_with_what_was_found(family):
    model = built(family.name)
    counts = anatomy.inventory(model)
    for (kind, find), count in zip(KINDS.items(), (counts[named] for named in NAMES), strict=True):
        assert count == family.parts.get(kind, 0)
        if kind in family.parts:
            parts = find(model)
            assert len(parts) == family.parts[kind], kind
            for part in parts if kind == "attention" else ():
                assert (part.heads, part.kv_heads, part.width) == (*family.heads, WIDTH)
                assert part.head_width == part.value_width == WIDTH // part.heads
                assert part.rotary == (family.name in ("hf-llama", "hf-phi3", "hf-neox"))
        else:
            with pytest.raises(AnatomyError, match=r"expected .* found .* tensors \(`"):
                find(model)


def test_layers_kinds_and_masks():
    whisper = [(p.layer, p.kind, p.causal) for p in anatomy.attention(built("hf-whisper"))]
    encoder = [(0, "self", False), (1, "self", False)]
    assert whisper == [*encoder, (2, "self", True), (2, "cross", False), (3, "self", True), (3, "cross", False)]
    decoder = [(p.layer, p.kind) for p in anatomy.attention(built("torch-decoder"))]
    assert decoder == [(0, "self"), (0, "cross"), (1, "self"), (1, "cross")]
    assert [p.kind for p in anatomy.attention(built("torch-kdim"))] == ["cross"]
    assert [p.kind for p in anatomy.attention(built("hf-t5"))] == ["self"] * 2 + ["self", "cross"] * 2
    assert {p.causal for p in anatomy.attention(built("hf-llama")) + anatomy.attention(built("hf-gpt2"))} == {True}


def test_stages():
    efficient = [0] + [1] * 2 + [2] * 2 + [3] * 3 + [4] * 3 + [5] * 4 + [6]
    expected = {"timm-convnext": [0, 1, 2, 2, 3], "torchvision-convnext": [0, 1, 1, 2], "ours-convnext": [0, 0, 1]}
    for name, stages in (expected | {"ours-convmixer": [0, 0, 0], "timm-efficientnet": efficient}).items():
        parts = anatomy.depthwise(built(name))
        assert [p.stage for p in parts] == stages
        assert [(p.layer, p.depth) for p in parts] == [(i, len(stages)) for i in range(len(stages))]


@pytest.mark.parametrize(
    ("name", "tokens", "prefix", "grid"),
    [
        ("ours-vit", 16, 0, (4, 4)),
        ("ours-vit-token", 17, 1, (4, 4)),
        ("timm-vit", 17, 1, (4, 4)),
        ("timm-deit", 18, 2, (4, 4)),
        ("torchvision-vit", 17, 1, (4, 4)),
        ("hf-vit", 17, 1, (4, 4)),
        ("hf-deit", 18, 2, (4, 4)),
        ("hf-dinov2", 17, 1, (4, 4)),
        ("hf-bert", 20, 0, None),
        ("hf-gpt2", 20, 0, None),
    ],
)
def test_positions_know_their_grid(name, tokens, prefix, grid):
    (table,) = anatomy.positions(built(name))
    assert (table.tokens, table.prefix, table.grid) == (tokens, prefix, grid)
    model = built(name)
    (from_state,) = anatomy.positions(model.state_dict(), getattr(getattr(model, "config", None), "to_dict", dict)())
    assert (from_state.tokens, from_state.prefix, from_state.grid) == (tokens, prefix, grid)


def test_clip_and_whisper_have_two_towers():
    text, vision = anatomy.positions(built("hf-clip"))
    assert (text.grid, text.prefix, vision.grid, vision.prefix) == (None, 0, (4, 4), 1)
    encoder, decoder = anatomy.positions(built("hf-whisper"))
    assert (encoder.trained, decoder.trained) == (False, True)


def test_a_rectangular_grid_comes_from_the_patch_embedding():
    shims.timm()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=(32, 16), patch_size=8, embed_dim=8, depth=1, num_heads=1, reg_tokens=2)
    (table,) = anatomy.positions(model)
    assert (table.prefix, table.grid) == (3, (4, 2))


# --- reading and writing -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_write_is_the_inverse_of_read(kind, dtype):
    for family in rows(kind):
        model = family.build().to(dtype)
        before = state(model)
        for part in KINDS[kind](model):
            for read, write in slots(part):
                value = read()
                assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                write(value)
                value.zero_()  # it shares no memory
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{family.name} {name}"
        for part in KINDS[kind](model):
            for read, write in slots(part):
                old = read()
                new = torch.randn(old.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(old)
                write(new)
                assert torch.equal(read(), new), family.name
                write(old)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{family.name} {name}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_writing_one_part_changes_only_the_named_tensors(kind):
    for family in rows(kind):
        model = family.build()
        part = KINDS[kind](model)[-1]
        for read, write in slots(part):
            before, kept = state(model), [other() for other, _ in slots(part)]
            write(read() + 1.0)
            changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
            assert len(changed) == 1
            again = [other() for other, _ in slots(part)]
            assert sum(not torch.equal(a, b) for a, b in zip(kept, again, strict=True)) == 1


# --- the effective operators ---------------------------------------------------------------------------------------


class Recorder:
    """Inputs, outputs and scaled-dot-product calls of modules, from a real forward pass."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: dict[str, tuple] = {}
        self.outputs: dict[str, Tensor] = {}
        self.calls: list[dict] = []
        for path, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._before, path), with_kwargs=True)
            module.register_forward_hook(functools.partial(self._after, path))
        real = F.scaled_dot_product_attention

        def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            self.calls.append(
                {"q": query, "k": key, "v": value, "mask": attn_mask, "causal": is_causal, "scale": scale}
            )
            return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)

    def _before(self, path, module, args, kwargs):
        self.inputs[path] = (args, kwargs)

    def _after(self, path, module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            self.outputs[path] = first


def tokens_of(recorder: Recorder, part) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that queries, keys and values read: (n, d), (m, d_kv), (m, d_v)."""
    args, kwargs = recorder.inputs[part.name]
    x = args[0] if args else kwargs.get("hidden_states", kwargs.get("query"))
    if part.kind == "self":
        return x[0], x[0], x[0]
    others = [a for a in args[1:3] if isinstance(a, Tensor)] or [kwargs.get("key_value_states")]
    return x[0], others[0][0], others[-1][0]


@pytest.mark.parametrize("family", **ids([f for f in rows("attention") if f.extra.get("emulate", True)]))
def test_the_views_reproduce_the_real_attention(family, monkeypatch):
    """softmax(X Wq Wk^T X^T) X Wv Wo from the views equals the model's own forward, head by head."""
    # nn.MultiheadAttention takes a compiled shortcut in evaluation mode; without dropout training is the same.
    model = family.build().train("torch" in family.name and "hf" not in family.name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    parts = anatomy.attention(model)  # which runs its modules, too
    recorder = Recorder(model, monkeypatch)
    family.call(model)
    assert len(recorder.calls) == len(parts)
    order = sorted(parts, key=lambda p: list(recorder.inputs).index(p.name))
    for part, call in zip(order, recorder.calls, strict=True):
        xq, xk, xv = tokens_of(recorder, part)
        group = part.heads // part.kv_heads
        zero = torch.zeros(())
        bias = {n: b if (b := part.read_bias(n)) is not None else zero for n in "qkvo"}
        q, k, v = (
            x @ part.read(n) + (bias[n].unsqueeze(1) if bias[n].ndim else zero)
            for n, x in zip("qkv", (xq, xk, xv), strict=True)
        )  # (H, n, k), (kv, m, k), (kv, m, v)
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        logits = q @ k.mT * part.scale
        scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(part.head_width)
        theirs = call["q"][0] @ call["k"][0].repeat_interleave(part.heads // call["k"].shape[1], 0).mT * scale
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
        assert logits.std() > 1e-2
        if call["mask"] is not None:
            mask = call["mask"][0] if call["mask"].ndim == 4 else call["mask"]
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        if call["causal"] and logits.shape[-2] > 1:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
        out = (logits.softmax(-1) @ v @ part.read("o")).sum(0) + bias["o"]
        owner = part.parameters["o"][0].rpartition(".")[0]
        real = recorder.outputs[owner if owner in recorder.outputs else part.name][0]
        torch.testing.assert_close(out, real.reshape(out.shape), rtol=1e-4, atol=1e-4)
        assert out.std() > 1e-2


@pytest.mark.parametrize("family", **ids(rows("mlps")))
def test_the_views_reproduce_the_real_mlps(family, monkeypatch):
    model = family.build()
    recorder = Recorder(model, monkeypatch)
    family.call(model)
    for part in anatomy.mlps(model):
        assert (part.hidden, part.width) == tuple(part.read("fc1").shape)
        assert part.read("fc2").shape[1] == part.hidden
        if family.name not in ("timm-vit-packed", "timm-vit-swiglu") and "conv" not in family.name:
            assert (part.width, part.hidden) in ((WIDTH, HIDDEN), (WIDTH, 4 * WIDTH))
        inner = {n: part.parameters[n][0].removesuffix(".weight") for n in part.parameters}
        if inner["fc1"] not in recorder.inputs:  # nn.TransformerEncoder's compiled shortcut
            pytest.fail(f"{inner['fc1']} was not called")

        def apply(name, x, part=part):
            bias = part.read_bias(name)
            return x @ part.read(name).T + (0 if bias is None else bias)

        convolution = model.get_parameter(part.parameters["fc1"][0]).ndim == 4

        def channels_last(x, convolution=convolution):
            return x.movedim(1, -1) if convolution else x

        x, y = (channels_last(recorder.inputs[inner[n]][0][0]) for n in ("fc1", "fc2"))
        hidden = apply("fc1", x)
        if part.kind == "plain":
            torch.testing.assert_close(hidden, channels_last(recorder.outputs[inner["fc1"]]), rtol=1e-4, atol=1e-4)
        else:
            inner_module = model.get_submodule(part.name)
            activation = next(
                getattr(inner_module, n) for n in ("act", "act_fn", "activation_fn") if hasattr(inner_module, n)
            )
            expected = activation(apply("gate", x)) * hidden
            torch.testing.assert_close(expected, y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(apply("fc2", y), channels_last(recorder.outputs[inner["fc2"]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", **ids(rows("depthwise")))
def test_the_views_reproduce_the_real_depthwise_convolutions(family, monkeypatch):
    model = family.build()
    recorder = Recorder(model, monkeypatch)
    family.call(model)
    for part in anatomy.depthwise(model):
        if part.name not in recorder.inputs:
            continue  # Mamba's slow path calls the kernel with the weight itself
        inner = model.get_submodule(part.name)
        x, filters = recorder.inputs[part.name][0][0], part.read()
        weight = filters.unsqueeze(1) if part.ndim == 2 else filters
        bias, groups = inner.bias, part.channels
        if part.ndim == 1:
            y = F.conv1d(x, weight, bias, inner.stride, inner.padding, inner.dilation, groups)
        else:
            y = F.conv2d(x, weight, bias, inner.stride, inner.padding, inner.dilation, groups)
        torch.testing.assert_close(y, recorder.outputs[part.name])


def test_mamba_scan_from_the_views(monkeypatch):
    """Eq. 3.29-3.34 of the thesis with A, Delta, B, C from the views equals transformers' own scan."""
    model = FAMILIES["hf-mamba"].build()
    recorder = Recorder(model, monkeypatch)
    FAMILIES["hf-mamba"].call(model)
    for part in anatomy.ssms(model):
        mixer = model.get_submodule(part.name)
        u = recorder.inputs[f"{part.name}.x_proj"][0][0]  # (1, T, channels), after the convolution
        gate = mixer.in_proj(recorder.inputs[part.name][0][0]).chunk(2, dim=-1)[1]
        rank = part.read("dt_weight").shape[1]
        delta = F.softplus(u @ mixer.x_proj.weight[:rank].T @ part.read("dt_weight").T + part.read("dt_bias"))
        a, b, c = -part.read("A_log").exp(), u @ part.read("B").T, u @ part.read("C").T
        expected = (reference.selective_scan(u, delta, a, b, c) + part.read("D") * u) * F.silu(gate)
        torch.testing.assert_close(expected, recorder.inputs[f"{part.name}.out_proj"][0][0], rtol=1e-4, atol=1e-4)
        assert part.read("conv_weight").shape == (part.channels, 4)


def test_mamba2_scan_from_the_views(monkeypatch):
    model = FAMILIES["hf-mamba2"].build()
    recorder = Recorder(model, monkeypatch)
    FAMILIES["hf-mamba2"].call(model)
    for part in anatomy.ssms(model):
        mixer = model.get_submodule(part.name)
        args, kwargs = recorder.inputs[part.name]
        x = (args[0] if args else kwargs["hidden_states"])[0]  # (T, d)
        n, d = part.state * part.groups, part.channels
        inner = x @ mixer.in_proj.weight[d : 2 * d].T
        mixed = torch.cat([inner, x @ part.read("B").T, x @ part.read("C").T], dim=1)
        padded = F.pad(mixed.T, (part.read("conv_weight").shape[1] - 1, 0))
        mixed = F.silu(
            F.conv1d(padded, part.read("conv_weight").unsqueeze(1), part.read("conv_bias"), groups=d + 2 * n).T
        )
        u, b, c = mixed.split([d, n, n], dim=1)
        delta = F.softplus(x @ part.read("dt_weight").T + part.read("dt_bias"))  # (T, heads)
        a = -part.read("A_log").exp()
        u, b, c = (t.unflatten(1, (n, -1))[None] for t, n in ((u, part.heads), (b, part.groups), (c, part.groups)))
        expected = reference.heads_scan(u, delta[None], a, b, c) + part.read("D")[:, None] * u
        torch.testing.assert_close(
            expected.flatten(2), recorder.inputs[f"{part.name}.norm"][0][0], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("family", **ids([f for f in rows("positions") if "vit" in f.name or f.name in DEIT]))
def test_a_position_row_moves_its_own_token(family):
    """Changing row i of the table changes token i, and only that one, where the first block reads it."""
    model = family.build()
    (table,) = anatomy.positions(model)
    seen: list[Tensor] = []
    first = anatomy.attention(model)[0].name.rsplit(".", 1)[0]
    model.get_submodule(first).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    family.call(model)
    value = table.read()
    value[table.prefix + 5] += 1.0
    table.write(value)
    family.call(model)
    moved = (seen[1] - seen[0])[0].abs().sum(-1)
    assert moved.nonzero().flatten().tolist() == [table.prefix + 5]
    assert len(moved) == table.tokens


# --- wrappers, ties and sources ------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("name", ["timm-vit", "hf-mamba2", "ours-convnext"])
def test_wrapper_prefixes_do_not_matter(name):
    family = FAMILIES[name]
    model = family.build()
    compiled = torch.compile(model, backend="eager")  # only wraps
    for wrapped, prefix in ((Wrapped(Wrapped(model)), "module.module."), (compiled, "")):
        for kind in family.parts:
            for part, same in zip(KINDS[kind](wrapped), KINDS[kind](model), strict=True):
                assert part.name == prefix + same.name
                for (read, _), (other, _) in zip(slots(part), slots(same), strict=True):
                    assert torch.equal(read(), other())


@pytest.mark.parametrize("family", **ids([f for f in FAMILIES.values() if f.name not in ("torch-kdim",)]))
def test_a_state_dict_with_its_config_gives_the_same_parts_in_any_order(family):
    model = built(family.name)
    config = model.config.to_dict() if hasattr(model, "config") else {"num_heads": family.heads[0], "gate_last": False}
    shuffled = dict(sorted(model.state_dict().items(), reverse=True))
    for kind in family.parts:
        mine, theirs = KINDS[kind](shuffled, config), KINDS[kind](model)
        assert [p.name for p in mine] == [p.name for p in theirs], kind
        for a, b in zip(mine, theirs, strict=True):
            for (read, _), (other, _) in zip(slots(a), slots(b), strict=True):
                assert torch.equal(read(), other())
            for fact in ("layer", "kind", "rotary", "scale", "stage", "version", "state", "groups"):
                assert getattr(a, fact, None) == getattr(b, fact, None), fact


def test_tied_layers_are_one_part():
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)] * 2)
    assert len(anatomy.attention(model)) == len(anatomy.mlps(model)) == 1


def test_gpt2_cross_attention_and_a_square_conv1d():
    transformers = shims.transformers()
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8, n_inner=8, add_cross_attention=True
    )
    config.bos_token_id = config.eos_token_id = 1
    model = scramble(transformers.GPT2Model(config).eval())
    own, cross = anatomy.attention(model)
    assert (own.kind, cross.kind, own.layer, cross.layer) == ("self", "cross", 0, 0)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    k, v = model.h[0].crossattention.c_attn(x).chunk(2, -1)
    for name, theirs in (("q", model.h[0].crossattention.q_attn(x)), ("k", k), ("v", v)):
        mine = x @ cross.read(name) + cross.read_bias(name).unsqueeze(1)
        torch.testing.assert_close(mine.transpose(0, 1).reshape(3, -1), theirs)
    (mlp,) = anatomy.mlps(model)  # n_inner == n_embd: the shapes do not tell the layout
    torch.testing.assert_close(x @ mlp.read("fc1").T + mlp.read_bias("fc1"), model.h[0].mlp.c_fc(x))


def test_what_only_looks_like_a_part():
    shims.timm()
    models = pytest.importorskip("torchvision.models")
    squeeze = models.efficientnet_b0(num_classes=3).features[2][0]  # fc1 and fc2 of squeeze-and-excitation
    with pytest.raises(AnatomyError, match="expected MLPs, found 1 depthwise"):
        anatomy.mlps(squeeze)
    grey = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8))
    assert [p.name for p in anatomy.depthwise(grey)] == ["1"]
    upsampling = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, groups=8))
    with pytest.raises(AnatomyError, match="expected depthwise"):
        anatomy.depthwise(upsampling)
    xcit = shims.timm().create_model("xcit_nano_12_p16_224", img_size=32, depth=1, cls_attn_layers=1, num_classes=2)
    kinds = {part.name: part.kind for part in anatomy.attention(xcit)}
    assert kinds == {"blocks.0.attn": "channels", "cls_attn_blocks.0.attn": "pooled"}
    stem = nn.ModuleDict({"stem": nn.Sequential(nn.Conv2d(3, 8, 3, stride=2))})
    with pytest.raises(AnatomyError, match="expected patch"):
        anatomy.patch_embeddings(stem)


@pytest.mark.parametrize(
    ("options", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_falcon_packs_queries_by_key_head_and_its_config_says_so(options, kv_heads):
    transformers = shims.transformers()
    config = transformers.FalconConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, bias=True, **TOKENS, **options
    )
    model = scramble(transformers.FalconModel(config).eval())
    own = model.h[0].self_attention
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = own._split_heads(own.query_key_value(x))
    for source, hints in ((model, None), (model.state_dict(), config.to_dict())):
        (part,) = anatomy.attention(source, hints)
        assert (part.heads, part.kv_heads) == (4, kv_heads)
        for name, wanted in zip("qkv", theirs, strict=True):
            heads = range(4) if name == "q" else map(part.kv_head, range(wanted.shape[2]))
            mine = [x[0] @ part.read(name)[h] + part.read_bias(name)[h] for h in heads]
            torch.testing.assert_close(torch.stack(mine, 1), wanted[0])


def test_depthwise_filters_are_found_by_shape_under_any_name():
    state = {
        "stem.0.weight": torch.zeros(8, 3, 3, 3),
        "stem.1.weight": torch.zeros(8, 1, 3, 3),
        "body.spatial_kernel": torch.zeros(8, 1, 5, 5),
        "body.downsample.weight": torch.zeros(8, 1, 3, 3),
        "body.scale": torch.zeros(8, 1, 1, 1),
    }
    assert [part.parameters[0] for part in anatomy.depthwise(state)] == [
        *("body.downsample.weight", "body.spatial_kernel", "stem.1.weight")
    ]
    grey = {"stem.0.weight": torch.zeros(8, 1, 3, 3), "body.weight": torch.zeros(8, 1, 3, 3)}
    assert [part.name for part in anatomy.depthwise(grey)] == ["body"]


# --- bad input -----------------------------------------------------------------------------------------------------


def test_unknown_head_count():
    state_dict = built("timm-vit").state_dict()
    with pytest.raises(AnatomyError, match=r"`blocks.0.attn`.*config=\{'num_attention_heads'"):
        anatomy.attention(state_dict)
    with pytest.raises(AnatomyError, match="5 heads do not divide"):
        anatomy.attention(state_dict, {"num_heads": 5})


@pytest.mark.parametrize("key", ["num_heads", "num_attention_heads"])
def test_a_head_count_that_is_given_counts_before_the_model_s(key):
    model = built("timm-vit")
    stored = Checkpoint(model.state_dict())
    stored.config |= {"num_heads": 3, "num_attention_heads": 3}
    assert {part.heads for part in anatomy.attention(stored, {key: 1})} == {1}
    with pytest.raises(AnatomyError, match="config= says 1 heads, its forward pass has 3"):
        anatomy.attention(model, {key: 1})


def test_wrong_shapes_names_and_types():
    model = FAMILIES["timm-vit"].build()
    part, mlp = anatomy.attention(model)[0], anatomy.mlps(model)[0]
    (table,) = anatomy.positions(model)
    for wrong in ((3, 16, WIDTH), (WIDTH, 3 * 16)):
        with pytest.raises(SpecError, match=r"`blocks.0.attn.qkv.weight`: expected values of shape \(3, 48, 16\)"):
            part.write("q", torch.zeros(wrong))
    with pytest.raises(SpecError, match=r"`blocks.0.attn.qkv.bias`: expected values of shape \(3, 16\), found \(48,"):
        part.write_bias("k", torch.zeros(3 * 16))
    with pytest.raises(SpecError, match="expected values of shape"):
        mlp.write("fc1", mlp.read("fc1").T)
    with pytest.raises(SpecError, match="`pos_embed`: expected values of shape"):
        table.write(torch.zeros(1, 17, WIDTH))
    with pytest.raises(UsageError, match="one of 'q', 'k', 'v', 'o', found 'w'"):
        part.read("w")
    with pytest.raises(UsageError, match=r"`blocks.0.mlp`: part: expected one of 'fc1', 'fc2', found 'gate'"):
        mlp.read("gate")
    with pytest.raises(AnatomyError, match="expected a module, a mapping"):
        anatomy.attention([1, 2])
    with pytest.raises(AnatomyError, match="found no known parts"):
        anatomy.attention(nn.Linear(2, 2))


def test_no_bias():
    model = built("hf-llama")
    for part, name in ((anatomy.attention(model)[0], "q"), (anatomy.mlps(model)[0], "fc1")):
        assert part.read_bias(name) is None
        with pytest.raises(SpecError, match=f"no bias for {name}"):
            part.write_bias(name, torch.zeros(4, 12))


def test_values_that_overflow_in_half_precision_are_refused():
    part = anatomy.attention(FAMILIES["timm-vit"].build().half())[0]
    before = part.read("q")
    with pytest.raises(DataError, match=r"overflow in torch\.float16"):
        part.write("q", torch.full_like(before, 1e6))
    assert torch.equal(part.read("q"), before)


def test_tables_of_rotations_and_relative_biases_are_no_embeddings():
    transformers, timm = shims.transformers(), shims.timm()
    config = transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=10)
    with pytest.raises(AnatomyError, match="expected position embeddings, found 1 attention modules, 1 MLPs"):
        anatomy.positions(transformers.GPTJModel(config))
    eva = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1, num_classes=2)
    (part,) = anatomy.attention(eva)
    assert part.rotary
    assert [table.name for table in anatomy.positions(eva)] == ["pos_embed"]
    assert [mlp.kind for mlp in anatomy.mlps(eva)] == ["gated"]


def test_a_learned_query_pools():
    transformers, timm = shims.transformers(), shims.timm()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    siglip = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8))
    assert [part.kind for part in anatomy.attention(siglip)] == ["self", "pooled"]
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, global_pool="map", class_token=False
    )
    assert [part.kind for part in anatomy.attention(model)] == ["self", "pooled"]


def test_one_function_opens_anything(tmp_path, tensors_read):
    model = FAMILIES["ours-vit"].build()
    config = {"num_heads": HEADS}
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    expected = [part.read("q") for part in anatomy.attention(model)]
    for source in (
        model,
        model.state_dict(),
        Checkpoint(path),
        str(path),
        tmp_path,
        anatomy.named_tensors(path, config),
    ):
        tensors = anatomy.named_tensors(source, config)
        assert set(model.state_dict()) <= set(tensors.names)
        for found in (anatomy.attention(source, config), anatomy.attention(tensors)):
            assert all(torch.equal(part.read("q"), q) for part, q in zip(found, expected, strict=True))
    assert anatomy.named_tensors(tensors) is tensors
    with pytest.raises(DataError, match="no such file"):
        anatomy.named_tensors(tmp_path / "other.safetensors")
    tensors_read.clear()
    (first, *_) = anatomy.attention(open_checkpoint(tmp_path), {"num_heads": HEADS})
    assert not tensors_read
    first.read("o")
    assert tensors_read == list(first.parameters["o"])
