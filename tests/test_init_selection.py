import copy
from functools import partial

import numpy as np
import pytest
import shims
import torch
from families import scramble, seeded, state_space
from references_init import select_uniform

from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.errors import AnatomyError, DataError, SpecError, UsageError
from weightscope.init import grow_, growth, permute_, select_weights_, transfer_, transfer_singular_
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.population import Population

pytestmark = pytest.mark.usefixtures("trained_here")


def vit(width=64, depth=4, heads=4, image=16, classes=10, seed=0, **options):
    torch.manual_seed(seed)
    model = ViT(image, 4, width, depth, heads, classes, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


def student(**options):
    return vit(**{"width": 32, "depth": 2, "heads": 2, "seed": 1} | options)


def test_uniform_selection_equals_the_papers_algorithm_on_every_tensor():
    teacher, small = vit(), student()
    head = small.head.weight.clone()
    select_weights_(small, teacher)
    theirs = dict(teacher.named_parameters())
    for name, value in small.named_parameters():
        if not name.startswith("head"):
            assert torch.equal(value, select_uniform(theirs[name], value.shape)), name
    assert torch.equal(small.head.weight, head)


@pytest.mark.parametrize(("rule", "wanted"), [("first", [0, 1, 2]), ("spaced", [0, 2, 4]), ("linspace", [0, 2, 5])])
def test_layers(rule, wanted):
    teacher, small = vit(depth=6), student(depth=3, width=64, heads=4)
    select_weights_(small, teacher, layers=rule)
    for mine, theirs in enumerate(wanted):
        for name, value in small.blocks[mine].named_parameters():
            assert torch.equal(value, teacher.blocks[theirs].get_parameter(name))


def test_structured_pruning_keeps_the_largest_slices():
    teacher, small = vit(), student()
    with torch.no_grad():
        teacher.blocks[0].mlp.fc1.weight[5:133] *= 100  # 128 of 256 hidden units
    select_weights_(small, teacher, elements="l1")
    assert small.blocks[0].mlp.fc1.weight.abs().mean() > 50 * small.blocks[1].mlp.fc1.weight.abs().mean()


def test_position_tables_are_selected_on_the_grid():
    options = {"positions": "learned", "pool": "token"}
    teacher, small = vit(image=32, **options), student(image=16, **options)
    select_weights_(small, teacher)
    theirs = teacher.pos_embed[0, 1:].reshape(8, 8, 64)[::2, ::2, ::2].reshape(16, 32)
    assert torch.equal(small.pos_embed[0, 1:], theirs)
    assert torch.equal(small.pos_embed[0, 0], teacher.pos_embed[0, 0, ::2])


def test_components_and_exclusions():
    """Of a teacher's state dict with prefixes of wrappers."""
    teacher, small = vit(), student()
    before = {n: p.detach().clone() for n, p in small.named_parameters()}
    wrapped = {f"module._orig_mod.{name}": value for name, value in teacher.state_dict().items()}
    select_weights_(small, wrapped, components=["attention", "mlp"], exclude=["blocks.1.*"])
    changed = {n for n, p in small.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.startswith("blocks.0.") and "norm" not in n}


def test_batch_norm_statistics_come_along():
    teacher, small = ConvMixer(8, 1, 3, 4, 10), ConvMixer(4, 1, 3, 4, 10)
    teacher.stem[2].running_var.copy_(torch.arange(8.0))
    select_weights_(small, teacher)
    assert small.stem[2].running_var.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_the_remainder_is_kept_outside_the_directions():
    source, model = vit(), vit(seed=1)
    old = model.blocks[1].mlp.fc1.weight.detach().clone()
    transfer_singular_(model, source, fraction=0.25, remainder="keep", select="blocks.1.mlp.fc1.*")
    u, s, vh = torch.linalg.svd(source.blocks[1].mlp.fc1.weight.detach(), full_matrices=False)
    u, s, vh = u[:, :16], s[:16], vh[:16]
    new = model.blocks[1].mlp.fc1.weight.detach()
    torch.testing.assert_close(u.T @ new @ vh.T, torch.diag(s), atol=1e-4, rtol=1e-4)
    outside = torch.eye(256) - u @ u.T, torch.eye(64) - vh.T @ vh
    torch.testing.assert_close(outside[0] @ new @ outside[1], outside[0] @ old @ outside[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("mode", ["entries", "rows", "columns"])
def test_permutations_keep_what_they_say(mode):
    model = vit()
    before = copy.deepcopy(model)
    permute_(model, mode=mode, components="mlp", generator=seeded())
    old, new = before.blocks[0].mlp.fc1.weight.detach(), model.blocks[0].mlp.fc1.weight.detach()
    assert not torch.equal(old, new)
    assert torch.equal(old.reshape(-1).sort().values, new.reshape(-1).sort().values)
    values = [torch.linalg.svdvals(w) for w in (old, new)]
    assert torch.allclose(*values, atol=1e-4) == (mode != "entries")
    if mode == "rows":
        torch.testing.assert_close(new.T @ new, old.T @ old, atol=1e-4, rtol=1e-4)
    if mode == "columns":
        torch.testing.assert_close(new @ new.T, old @ old.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(before.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("linear_student", [False, True])
def test_timms_femto_to_a_smaller_one(linear_student):
    """Its MLPs are 1 x 1 convolutions, ours are linear layers."""
    timm = shims.timm()
    torch.manual_seed(0)
    teacher = timm.create_model("convnext_femto", num_classes=5)
    sizes = {"widths": (24, 48, 96, 192), "depths": (1, 2, 3, 1)}
    if linear_student:
        small = ConvNeXt(sizes["widths"], sizes["depths"], patch_size=4, num_classes=5)
    else:
        small = timm.create_model("convnext_femto", dims=sizes["widths"], depths=sizes["depths"], num_classes=5)
    select_weights_(small, teacher)
    theirs = teacher.state_dict()
    mine = {name: value for name, value in small.state_dict().items() if not name.startswith("head.fc")}
    assert mine["stages.2.blocks.1.mlp.fc1.weight"].ndim == (2 if linear_student else 4)
    for name, value in mine.items():
        assert torch.equal(value, select_uniform(theirs[name].reshape(theirs[name].shape[: value.ndim]), value.shape))
    back = timm.create_model("convnext_femto", dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_classes=5)
    select_weights_(back, small)  # linear layers to convolutions
    wanted = select_uniform(mine["stages.0.blocks.0.mlp.fc1.weight"].flatten(1), (32, 8))
    assert torch.equal(back.stages[0].blocks[0].mlp.fc1.weight[:, :, 0, 0], wanted)


def hugging_face_vit(width, depth, heads, seed):
    transformers = shims.transformers()
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=16, patch_size=4, num_labels=10,
    )  # fmt: skip
    return scramble(transformers.ViTForImageClassification(config))


@pytest.mark.parametrize("old_names", [False, True])
def test_hugging_faces_names_match_timms(old_names):
    teacher = hugging_face_vit(64, 4, 4, 0)
    state = teacher.state_dict()
    if old_names:  # as in checkpoints from before version 5
        for new, old in {
            ".layers.": ".encoder.layer.", ".q_proj.": ".attention.query.", ".k_proj.": ".attention.key.",
            ".v_proj.": ".attention.value.", ".o_proj.": ".output.dense.", ".mlp.fc1.": ".intermediate.dense.",
            ".mlp.fc2.": ".output.dense.",
        }.items():  # fmt: skip
            state = {name.replace(new, old): value for name, value in state.items()}
    by_timm = vit(width=64, depth=4, heads=4, positions="learned", pool="token")
    transfer_(by_timm, state)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(by_timm.eval()(images), teacher.eval()(images).logits, rtol=1e-4, atol=1e-4)
    one, other = (student(positions="learned", pool="token") for _ in range(2))
    select_weights_(one, state)
    select_weights_(other, by_timm)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    back = hugging_face_vit(32, 2, 2, 1)
    select_weights_(back, by_timm, components="all", exclude="classifier*")
    assert torch.equal(back.vit.layers[1].attention.k_proj.weight, one.blocks[1].attn.qkv.weight[32:64])
    average = student(positions="learned")
    select_weights_(average, state, exclude="pos_embed")
    assert torch.equal(average.fc_norm.weight, one.norm.weight)


def test_hugging_faces_convnext_matches_timms():
    transformers = shims.transformers()
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 3], num_stages=2, num_labels=10)
    teacher = scramble(transformers.ConvNextForImageClassification(config))
    ours = ConvNeXt((16, 32), (2, 3), num_classes=10)
    transfer_(ours, teacher)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), teacher.eval()(images).logits, rtol=1e-3, atol=1e-4)


def test_a_teacher_within_another_module_is_the_same_one():
    teacher, one, other = vit(), student(), student()
    select_weights_(one, {f"student.backbone.{name}": value for name, value in teacher.state_dict().items()})
    select_weights_(other, teacher)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_stands_before_all_names_of_the_teacher_is_named():
    teacher = {f"student.backbone.{name}": value for name, value in gpt2(24, 2, 3).state_dict().items()}
    for initialise, small in ((select_weights_, gpt2(16, 1, 2)), (transfer_, gpt2(24, 2, 3))):
        with pytest.raises(
            SpecError, match=r"names of the trained network begin with `student\.backbone\.`, the module's"
        ):
            initialise(small, teacher)


def test_a_network_of_a_population_is_a_teacher(tmp_path):
    teachers = [vit(width=16, depth=2, heads=2, image=8, seed=seed) for seed in (0, 1)]
    for k, teacher in enumerate(teachers):
        torch.save(teacher.state_dict(), tmp_path / f"{k}.pt")
    path = Population.of([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "large.pop", progress=False).path
    one, other = (student(width=8, depth=1, heads=1, image=8) for _ in range(2))
    state = torch.get_rng_state()
    select_weights_(one, f"{path}::1", components="all", exclude="head*")
    assert torch.equal(torch.get_rng_state(), state)
    select_weights_(other, teachers[1], components="all", exclude="head*")
    assert all(torch.equal(p, one.get_parameter(n)) for n, p in other.named_parameters() if "head" not in n)
    with pytest.raises(UsageError, match="no network 7"):
        select_weights_(one, f"{path}::7")


@pytest.mark.parametrize(("theirs", "mine"), [(16, 32), (32, 16), (16, 24)])
def test_position_grids_are_interpolated_both_ways(theirs, mine):
    """As timm does; and a plane of positions stays a plane away from the border."""
    timm = shims.timm()
    teacher = vit(image=theirs, positions="learned", pool="token")
    small = student(image=mine, positions="learned", pool="token", width=64, heads=4)
    select_weights_(small, teacher, positions="interpolate")
    side = mine // 4
    expected = timm.layers.resample_abs_pos_embed(teacher.pos_embed.detach(), (side, side), num_prefix_tokens=1)
    torch.testing.assert_close(small.pos_embed.detach(), expected)
    narrow = student(image=mine, positions="learned", pool="token")
    select_weights_(narrow, teacher, positions="interpolate")
    torch.testing.assert_close(narrow.pos_embed.detach(), expected[..., ::2])
    if mine > theirs:
        with pytest.raises(SpecError, match=r"expected at most the teacher's tokens, 1 \+ 4 x 4, .*'interpolate'"):
            select_weights_(narrow, teacher)


@pytest.mark.parametrize(("k", "size"), [(3, 7), (7, 3), (5, 5)])
def test_filters_are_padded_or_resampled(k, size):
    torch.manual_seed(0)
    source, module = ConvNeXt((8,), (2,), kernel_size=k), ConvNeXt((8,), (2,), kernel_size=size)
    theirs = source.stages[0].blocks[0].conv_dw.weight.detach()
    transfer_(module, source, components="convolution", filters="pad")
    found, small = module.stages[0].blocks[0].conv_dw.weight.detach(), min(k, size)
    cut = [slice((n - small) // 2, (n + small) // 2) for n in (size, k)]
    assert torch.equal(found[:, :, cut[0], cut[0]], theirs[:, :, cut[1], cut[1]])
    assert torch.count_nonzero(found) == 8 * small**2
    with torch.no_grad():  # constant filters keep their sum, linear ones stay linear
        source.stages[0].blocks[0].conv_dw.weight.copy_(torch.arange(float(k)).expand(8, 1, k, k))
        source.stages[0].blocks[1].conv_dw.weight.fill_(2.0)
    transfer_(module, source, components="convolution", filters="resample")
    linear, constant = (block.conv_dw.weight.detach() for block in module.stages[0].blocks)
    torch.testing.assert_close(constant.sum((2, 3)), torch.full((8, 1), 2.0 * k * k))
    torch.testing.assert_close(linear[0, 0, 0], torch.linspace(0, k - 1, size) * k**2 / size**2)
    if k != size:
        with pytest.raises(SpecError, match=r"expected filters of \(\d, \d\), found .* filters='pad' or 'resample'"):
            transfer_(module, source)


# --- growing ----------------------------------------------------------------------------------------------------------


def gpt2(width, depth, heads):
    transformers = shims.transformers()
    sizes = {"n_embd": width, "n_layer": depth, "n_head": heads, "vocab_size": 40, "n_positions": 8}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def timm_vit(width, depth, heads):
    make = shims.timm().models.VisionTransformer
    return make(img_size=16, patch_size=4, embed_dim=width, depth=depth, num_heads=heads, num_classes=5, init_values=1)


CONVNEXT = partial(ConvNeXt, kernel_size=3, layer_scale=0.5)
SKIP = partial(vit, layer_scale=0.3, layer_scale_on="skip")
GROWN = {
    "vit": (lambda: vit(32, 2, 2), lambda: vit(96, 4, 6)),
    "vit, wider heads": (lambda: vit(32, 2, 2), lambda: vit(64, 2, 2)),
    "vit, more and wider heads": (lambda: vit(32, 2, 2), lambda: vit(96, 3, 3)),
    "vit, scaled skip": (lambda: SKIP(32, 2, 2), lambda: SKIP(64, 3, 4)),
    "gpsa": (lambda: vit(32, 2, 2, attention="gpsa"), lambda: vit(64, 2, 4, attention="gpsa")),
    "convnext": (lambda: CONVNEXT((8, 12), (1, 2)), lambda: CONVNEXT((16, 36), (3, 2))),
    "convnext, hidden units": (lambda: CONVNEXT(8, 2, expansion=2), lambda: CONVNEXT(8, 2, expansion=3)),
    "convnext, learned sum": (lambda: CONVNEXT(8, 2, learned_sum=0.1), lambda: CONVNEXT(16, 3, learned_sum=0.1)),
    "convmixer": (lambda: ConvMixer(8, 2, 3, 4, 10), lambda: ConvMixer(13, 2, 3, 4, 10)),  # BatchNorm: any width
    "gpt2": (lambda: gpt2(24, 2, 3), lambda: gpt2(48, 3, 6)),  # tied embeddings
    "timm": (lambda: timm_vit(24, 2, 3), lambda: timm_vit(48, 3, 6)),
    "transformers": (lambda: hugging_face_vit(32, 2, 2, 0), lambda: hugging_face_vit(64, 3, 4, 0)),
}


def pair_of(name):
    small, large = (scramble(make(), seed).double().eval() for seed, make in enumerate(GROWN[name]))
    for network, seed in ((small, 0), (large, 1)):
        for key, value in network.named_buffers():
            if "running" in key:
                value.copy_(torch.rand(value.shape, generator=seeded(seed)) + 0.5)
    return small, large


@torch.no_grad()
def outputs(*networks):
    text = type(networks[0]).__name__.startswith("GPT2")
    inputs = torch.arange(14).reshape(2, 7) if text else torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = [network(inputs) for network in networks]
    return [getattr(one, "logits", one) for one in found]


@pytest.mark.parametrize("name", GROWN)
def test_a_grown_network_computes_the_same_function(name):
    small, large = pair_of(name)
    expected, before = outputs(small, large)
    assert not torch.allclose(before, expected, atol=0.1)
    grow_(large, small, noise=0.0)
    expected, found = outputs(small, large)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    grow_(large, small, noise=0.01, generator=seeded())
    expected, near = outputs(small, large)
    assert 1e-6 < (near - expected).norm() / expected.norm() < 0.3


def units_with(**change):
    """`_units` with other fields."""

    def changed(make):
        def units(*args):
            found = make(*args)
            return found._replace(**{key: how(getattr(found, key)) for key, how in change.items()})

        return units

    return changed


PLANTED = {
    "nothing is divided": ("_units", units_with(share=np.ones_like), "convnext"),
    "units are confused": ("_units", units_with(taken=lambda units: units[::-1], share=np.sort), "convmixer"),
    "queries and keys as they are": ("_units", units_with(factor=np.ones_like), "vit, wider heads"),
    "the wrong axis is divided": ("_inputs", lambda make: lambda m: dict.fromkeys(make(m), 0), "vit"),
    "the last norm as it is": ("_last_norm", lambda make: lambda *args: {}, "gpt2"),
    "branches as they are": ("_zero_branches", lambda make: lambda *args: None, "timm"),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_changes_the_function(error, monkeypatch):
    function, change, name = PLANTED[error]
    monkeypatch.setattr(growth, function, change(getattr(growth, function)))
    monkeypatch.setattr(growth, "_refuse_products", lambda *args: None)
    small, large = pair_of(name)
    expected, found = outputs(small, grow_(large, small, noise=0.0))
    assert (found - expected).norm() > 1e-3 * expected.norm()


def test_a_width_that_is_no_multiple_changes_the_function_under_layernorm():
    small, large = (network.double() for network in (vit(32, 2, 2), vit(48, 2, 3)))
    expected, found = outputs(small, grow_(large, small, noise=0.0))
    assert (found - expected).norm() > 1e-3 * expected.norm()


def test_noise_breaks_the_symmetry_of_equal_units():
    small = vit(32, 1, 2)
    for noise, equal in ((0.0, True), (0.01, False)):
        large = grow_(vit(64, 1, 4), small, noise=noise, generator=seeded())
        large(torch.randn(2, 3, 16, 16)).square().sum().backward()
        gradient = large.blocks[0].mlp.fc1.weight.grad
        same = torch.allclose(gradient[:128], gradient[128:], rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
        assert same == equal


def test_selection_in_reverse_undoes_selection():
    """Its entries are those that `select_weights_` takes from the larger network; the others stay."""
    small, large = student(), vit()
    before = copy.deepcopy(large)
    grow_(large, small, width="select", depth="repeat")
    back = select_weights_(student(seed=5), large, layers="linspace", components=["mlp", "norm", "embedding"])
    for name, value in back.named_parameters():
        assert torch.equal(value, small.get_parameter(name)) or "attn" in name or "head" in name  # heads are whole
    assert torch.equal(large.blocks[3].attn.proj.weight[::2, :16], small.blocks[1].attn.proj.weight[:, :16])
    changed = large.blocks[0].mlp.fc1.weight != before.blocks[0].mlp.fc1.weight
    assert changed.sum() == small.blocks[0].mlp.fc1.weight.numel()
    assert torch.equal(changed[::2, ::2], torch.ones(128, 32, dtype=torch.bool))


def test_repeated_blocks_are_those_of_nearest_relative_depth():
    small, large = ConvMixer(8, 2, 3, 4, 10), ConvMixer(8, 5, 3, 4, 10)
    grow_(large, small, depth="repeat", generator=seeded())
    for mine, theirs in enumerate([0, 0, 0, 1, 1]):
        pairs = zip(large.blocks[mine].parameters(), small.blocks[theirs].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("small", "large", "given", "error", "message"),
    [
        (vit, lambda: vit(32, 4, 2), {}, SpecError, "channels: expected at most 32 units .* found 64; select_weights_"),
        (vit, lambda: vit(96, 4, 3), {}, SpecError, "qk.0: expected at most 3 heads of 32 units .* 4 heads of 16"),
        (vit, lambda: vit(64, 2, 4), {}, SpecError, "2 layers in `blocks`, the teacher 4; .* smaller network"),
        (vit, lambda: vit(classes=7), {}, SpecError, r"`head.weight`: only axes of units can grow.*exclude="),
        (vit, lambda: vit(128, 4, 8), {"depth": "zero"}, UsageError, "'identity', 'repeat'"),
        (vit, lambda: vit(128, 4, 8), {"noise": -1.0}, UsageError, "noise: expected a number >= 0"),
        (lambda: vit().state_dict(), lambda: vit(128, 4, 8), {}, SpecError, "number of attention heads is known"),
        (
            lambda: ConvMixer(8, 2, 3, 4, 10),
            lambda: ConvMixer(8, 3, 3, 4, 10),
            {},
            SpecError,
            "none in `blocks.1`; use depth='repeat'",
        ),
        (
            lambda: state_space(2),
            lambda: state_space(2, width=32),
            {},
            SpecError,
            r"dt_bias`: only axes of units can grow",
        ),
    ],
)
def test_growth_refuses_what_it_cannot_do(small, large, given, error, message):
    module = large()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        grow_(module, small(), **given)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("init", [select_weights_, transfer_, partial(transfer_singular_, rank=3)])
@pytest.mark.parametrize(
    ("value", "message"), [(float("nan"), "expected finite values"), (1e6, "the values overflow in torch.float16")]
)
def test_numbers_that_the_student_cannot_hold_are_refused(init, value, message):
    teacher, student = ViT(8, 4, 8, 1, 2, 3), ViT(8, 4, 8, 1, 2, 3).half()
    torch.nn.init.constant_(teacher.blocks[0].mlp.fc1.weight, value)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(DataError, match=rf"(a weight of shape .*|`blocks\.0\.mlp\.fc1\.weight`): {message}"):
        init(student, teacher)
    assert all(torch.equal(found, before[name]) for name, found in student.state_dict().items())


def test_a_network_of_unknown_names_grows_with_its_permutations():
    def network(width, hidden):
        torch.manual_seed(width)
        branch = torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width))
        return torch.nn.Sequential(
            torch.nn.Linear(5, width), branch, torch.nn.LayerNorm(width), torch.nn.Linear(width, 3)
        )

    small, large, x = network(8, 16), network(16, 48), torch.randn(7, 5)
    before = copy.deepcopy(large.state_dict())
    with pytest.raises(AnatomyError, match="no permutation specification"):
        grow_(large, small, generator=seeded())
    assert all(torch.equal(value, before[name]) for name, value in large.state_dict().items())
    grow_(large, small, noise=0.0, permutations=permutation_spec(large, x), generator=seeded())
    assert (large(x) - small(x)).abs().max() < 1e-6
