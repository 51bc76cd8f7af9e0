"""State-space initialisers: all combinations of the four components, transfer from attention, repeated layers."""

import copy
import itertools
import re

import pytest
import torch
from families import built, scramble, state_space
from references_init import low_rank_product
from torch import nn

from weightscope import anatomy
from weightscope.anatomy import ssm
from weightscope.errors import AnatomyError, SpecError
from weightscope.init import mimetic_ssm_, repeat_layer_, ssm_from_attention_, transfer_
from weightscope.networks.sequences import (
    CausalTransformer,
    Mamba,
    Mamba2Mixer,
    MambaMixer,
    Selected,
    causal_convolution,
)

COMPONENTS = {
    "a": {"A_log"},
    "delta": {"dt_weight", "dt_bias"},
    "cb": {"C"},
    "convolution": {"conv_weight", "conv_bias"},
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=4)))
def test_all_sixteen_combinations(version, on):
    """Thesis Fig. 3.26: each combination changes the parts of its components as each component alone does."""
    base, together = state_space(version), state_space(version)
    mimetic_ssm_(together, **dict(zip(COMPONENTS, on, strict=True)))
    expected = copy.deepcopy(base)
    for name in (name for name, wanted in zip(COMPONENTS, on, strict=True) if wanted):
        mimetic_ssm_(expected, **{other: other == name for other in COMPONENTS})
    touched = set().union(*(COMPONENTS[name] for name, wanted in zip(COMPONENTS, on, strict=True) if wanted))
    for part, mine, theirs in zip(*(anatomy.ssms(m) for m in (base, expected, together)), strict=True):
        for name in part.parts:
            assert torch.equal(mine.read(name), theirs.read(name))
            assert torch.equal(part.read(name), theirs.read(name)) == (name not in touched)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("heads", [2, 8])
def test_queries_and_keys_become_outputs_and_inputs(version, heads):
    """Heads narrower than the state are reproduced, wider ones by their best approximation of rank N."""
    torch.manual_seed(1)
    trained, network = CausalTransformer(9, 16, 3, heads=heads), state_space(version)
    ssm_from_attention_(network, trained)
    for part, source in zip(anatomy.ssms(network), anatomy.attention(trained), strict=True):
        c, b = part.read("C").double(), part.read("B").double()
        if version == 1:
            c, b = (value @ part.read("in").double() for value in (c, b))
        for g in range(part.groups):
            rows = slice(4 * g, 4 * g + 4)
            product = source.scale * source.read("q")[g].double() @ source.read("k")[g].double().T
            torch.testing.assert_close(c[rows].T @ b[rows], low_rank_product(product, 4), atol=1e-6, rtol=1e-5)
            assert part.read("B").abs().sum(1).min() > 0  # states that the head leaves free can still learn


class Ordered(MambaMixer):
    """Mamba with the rows of x_proj in another order, or those of in_proj if the gate is first."""

    order = ("dt", "B", "C")
    gate_first = False

    def select(self, x):
        inner, gate = self.in_proj(x).chunk(2, dim=-1)[:: -1 if self.gate_first else 1]
        inner = nn.functional.silu(causal_convolution(self.conv1d, inner))
        parts = self.named(self.x_proj(inner))
        delta = nn.functional.softplus(parts["dt"] @ self.dt_proj.weight.T + self.dt_proj.bias)
        return Selected(inner, delta, -self.A_log.exp(), parts["B"][:, :, None], parts["C"][:, :, None], self.D, gate)

    def named(self, x, dim=-1):
        sizes = [self.rank if name == "dt" else self.state for name in self.order]
        return dict(zip(self.order, x.split(sizes, dim), strict=True))


class Swapped(Mamba2Mixer):
    """Mamba-2 with the rows of C before those of B."""

    def _select(self, x):
        inner, delta, b, c, gate = super()._select(x)
        return inner, delta, c, b, gate


@pytest.mark.parametrize("order", list(itertools.permutations(("dt", "B", "C"))))
@pytest.mark.parametrize("wrapped", [False, True])
def test_rows_are_those_that_the_forward_pass_uses(order, wrapped):
    mixer = Ordered(16, state=4)
    mixer.order = order
    torch.nn.init.zeros_(mixer.out_proj.weight)  # no number of the weights is looked at
    model = nn.Sequential(nn.Embedding(9, 16), mixer) if wrapped else mixer
    before = {name: rows.detach().clone() for name, rows in mixer.named(mixer.x_proj.weight, 0).items()}
    (part,) = anatomy.ssms(model)
    assert all(torch.equal(part.read(name), before[name]) for name in "BC")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    mimetic_ssm_(model)
    after = mixer.named(mixer.x_proj.weight, 0)
    assert torch.equal(after["C"], (before["B"] + before["C"]) / 2)
    assert all(torch.equal(after[name], before[name]) for name in ("dt", "B"))


def test_other_orders_are_refused():
    mixer = Ordered(16, state=4)
    mixer.gate_first = True
    with pytest.raises(AnatomyError, match=r"rows of `in_proj` in another order than that of Mamba, for which"):
        mimetic_ssm_(mixer)
    with pytest.raises(AnatomyError, match=r"rows of `in_proj` in another order than that of Mamba-2"):
        mimetic_ssm_(Swapped(16, state=4, head_width=8))


@pytest.mark.parametrize("name", ["hf-mamba", "hf-mamba2"])
def test_mixers_of_transformers_are_run(name):
    for part in anatomy.ssms(built(name)):
        assert ssm._reach(built(name).get_submodule(part.name), part) is not None


def test_an_embedding_is_recycled_across_families():
    """And refused where a module has two tables, or the source another vocabulary."""
    trained, network = CausalTransformer(9, 16, 1, heads=2), Mamba(9, 16, 1, state=4)
    transfer_(network, trained, select="*embeddings.weight")
    assert torch.equal(network.lm_head.weight, trained.embeddings.weight)
    two = {"a.embed_tokens.weight": trained.embeddings.weight, "b.embed_tokens.weight": trained.embeddings.weight}
    with pytest.raises(SpecError, match="the source has no"):
        transfer_(network, two, select="*embeddings.weight")
    with pytest.raises(SpecError, match=r"expected \(9, 16\), found \(7, 16\)"):
        transfer_(network, CausalTransformer(7, 16, 1, heads=2), select="*embeddings.weight")


def test_one_layer_for_all():
    teacher, student = state_space(1, 4, seed=1), state_space(1)
    before = copy.deepcopy(student.state_dict())
    repeat_layer_(student, teacher, layer=2, layers=[0, 2])
    wanted = teacher.backbone.layers[2].state_dict()
    for i, layer in enumerate(student.backbone.layers):
        same = [torch.equal(value, wanted[name]) for name, value in layer.state_dict().items()]
        assert all(same) if i != 1 else not all(same)
    for name in ("backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers.1.mixer.in_proj.weight"):
        assert torch.equal(student.state_dict()[name], before[name])


@pytest.mark.parametrize("name", ["ours-vit-token", "hf-bert", "torchvision-vit", "hf-gpt2"])
def test_a_block_with_attention_for_all(name):
    """All of the block, with norms and MLP, and nothing else."""
    student = copy.deepcopy(built(name))
    teacher = scramble(copy.deepcopy(student), seed=5)
    before, wanted = copy.deepcopy(student.state_dict()), teacher.state_dict()
    repeat_layer_(student, teacher, layer=1)
    blocks, moved = set[str](), 0
    for key, value in student.state_dict().items():
        block = re.match(r"(.*\b(?:blocks|layer|layers|h)\.(?:encoder_layer_)?)[01]\.(.*)", key)
        assert torch.equal(value, wanted[f"{block[1]}1.{block[2]}"] if block else before[key])
        moved += block is not None and not torch.equal(value, before[key])
        blocks |= {block[2]} if block else set()
    assert moved >= 2 * 12
    assert any("norm" in name.lower() or "ln" in name for name in blocks)
    assert any(part in name for name in blocks for part in ("mlp", "intermediate"))


def test_a_block_of_a_file_without_a_number_of_heads(tmp_path):
    student = copy.deepcopy(built("ours-vit-token"))
    teacher = scramble(copy.deepcopy(student), seed=5)
    torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    repeat_layer_(student, tmp_path / "teacher.pt", layer=1)
    wanted = {name: value for name, value in teacher.state_dict().items() if name.startswith("blocks.1.")}
    for name, value in wanted.items():
        for i in (0, 1):
            assert torch.equal(student.state_dict()[name.replace("blocks.1.", f"blocks.{i}.")], value)


@pytest.mark.parametrize("inside", [False, True])
def test_layers_side_by_side_are_blocks_of_their_own(inside):
    """Of layers that have one parent, or none, it is no block: all of the teacher was copied, each layer to itself."""
    networks = [nn.Sequential(*(nn.MultiheadAttention(8, 2) for _ in range(2))) for _ in range(2)]
    student, teacher = networks
    before = copy.deepcopy(student.state_dict())
    repeat_layer_(*(nn.ModuleDict({"net": net}) if inside else net for net in networks), layer=1, layers=[0])
    for name, value in student.state_dict().items():
        wanted = teacher.state_dict()["1" + name[1:]] if name[0] == "0" else before[name]
        assert torch.equal(value, wanted)


def test_layers_of_hybrids_are_the_state_space_ones():
    """Layer 1 is attention, so layer 2 is the second of the state-space layers."""
    teacher, student = (Mamba(16, 16, 3, state=4, layers=["default", "attention", "default"]) for _ in range(2))
    before = copy.deepcopy(student.state_dict())
    repeat_layer_(student, teacher, layer=1)
    wanted = teacher.state_dict()
    for name, value in student.state_dict().items():
        block = re.match(r"(.*layers\.)[02]\.(.*)", name)
        assert torch.equal(value, wanted[f"{block[1]}2.{block[2]}"] if block else before[name])


def test_tensors_of_a_block_that_are_single_numbers_are_repeated():
    teacher, student = state_space(1, seed=1), state_space(1)
    for network, value in ((teacher, 3.0), (student, 0.0)):
        for layer in network.backbone.layers:
            layer.gain = torch.nn.Parameter(torch.tensor(value))
    repeat_layer_(student, teacher, layer=1)
    assert [layer.gain.item() for layer in student.backbone.layers] == [3.0] * len(student.backbone.layers)
