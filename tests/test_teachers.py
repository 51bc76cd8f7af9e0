"""The teachers that analyses/papers.md and recipes name, as networks of their architecture without trained weights."""

import ast
import re

import pytest
import shims
import torch
from costs import planned_command
from programs import ROOT
from torch import nn

from weightscope.errors import SpecError
from weightscope.init import select_weights_, transfer_
from weightscope.networks import build_for
from weightscope.recipe import Recipe
from weightscope.training import distillation

COMMANDS = re.findall(r"`(bench .*?)`", (ROOT / "analyses" / "papers.md").read_text())
CALLS = {call: command for command in COMMANDS for call in re.findall(r"'select_weights\((.*?)\)'", command)}
TIMM = {call: command for call, command in CALLS.items() if "hf://timm/" in call}


DISTILLED = [
    path.stem
    for path in sorted((ROOT / "populations").glob("*.toml"))
    if (section := Recipe.load(path).distillation) is not None and section.teacher.startswith("hf://timm/")
]


def architecture_of(teacher: str) -> str:
    """`vit_small_patch16_224` for `hf://timm/vit_small_patch16_224.augreg_in21k`."""
    return teacher.removeprefix("hf://timm/").partition(".")[0]


def parsed(call: str) -> tuple[str, dict[str, object]]:
    """The architecture of the teacher, and the other arguments."""
    (statement,) = ast.parse(f"f({call})").body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    given = {str(word.arg): ast.literal_eval(word.value) for word in statement.value.keywords}
    return architecture_of(given.pop("teacher")), given


def weights(architecture: str) -> dict[str, torch.Tensor]:
    """The names and shapes of timm's network, all ones."""
    with torch.device("meta"):
        found = shims.timm().create_model(architecture, num_classes=10).state_dict()
    return {name: torch.ones(()).expand(value.shape) for name, value in found.items()}


@pytest.mark.parametrize("call", TIMM)
def test_a_documented_teacher_fits_its_student(call: str) -> None:
    """Every tensor that is selected becomes ones; the rest of the student stays as it is."""
    architecture, given = parsed(call)
    with torch.device("meta"):  # initial weights take seconds
        student = build_for(planned_command(TIMM[call])[1][0].recipe)
    for parameter in student.to_empty(device="cpu").parameters():
        nn.init.zeros_(parameter)
    select_weights_(student, weights(architecture), **given)  # type: ignore[arg-type]
    filled = {name for name, value in student.state_dict().items() if value.eq(1).all()}
    assert {name for name, value in student.state_dict().items() if value.eq(0).all()} | filled == {
        *student.state_dict()
    }
    assert any(".attn.qkv." in name or ".mlp.fc1." in name for name in filled)
    if "positions" in given:
        assert "pos_embed" in filled
        with pytest.raises(SpecError, match=r"pos_embed.*use positions='interpolate'"):
            select_weights_(student, weights(architecture), **given | {"positions": "select"})  # type: ignore[arg-type]


def test_a_teacher_without_a_tensor_is_refused() -> None:
    """CLIP's patch embedding has no bias, which analyses/papers.md leaves out."""
    (call,) = (call for call in TIMM if "_clip_" in call)
    student = build_for(planned_command(TIMM[call])[1][0].recipe)
    with pytest.raises(SpecError, match=r"no counterpart of `patch_embed\.proj\.bias`"):
        select_weights_(student, weights(parsed(call)[0]))


@pytest.mark.parametrize("name", DISTILLED)
def test_the_teacher_of_distillation_has_the_weights_of_timms_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the classifier, which has the student's classes: the section [distillation.network] fits timm's names."""
    recipe = Recipe.load(name).replace({"distillation.alpha": 1.0})
    assert recipe.distillation is not None
    found = weights(architecture_of(recipe.distillation.teacher))
    monkeypatch.setattr(distillation, "transfer_", lambda network, _, **given: transfer_(network, found, **given))
    teacher = distillation.teacher_of(recipe)
    assert teacher is not None
    state = teacher.state_dict()
    head = distillation.head_of(teacher)
    others = [tensor for tensor in state if not tensor.startswith(f"{head}.")]
    assert all(state[tensor].eq(1).all() for tensor in others)
    assert {*others} == {tensor for tensor in found if not tensor.startswith(f"{head}.")}
    narrow = recipe.replace({"distillation.network.width": recipe.network.model_dump()["width"]})
    with pytest.raises(SpecError, match=r"distillation\.teacher: .*expected"):
        distillation.teacher_of(narrow)


def test_recipes_distil_from_both_families() -> None:
    assert DISTILLED == ["selection-convnext", "selection-vit"]


def test_the_pretrained_teacher_in_dinov2s_layout_fits_its_student() -> None:
    """With 37 x 37 positions for 8 x 8, and the unused mask token."""
    shims.transformers()
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}
    with torch.device("meta"):
        found = Dinov2Model(Dinov2Config(**sizes)).state_dict()
        student = build_for(Recipe.load("selection-vit-pretrained"))
    for parameter in student.to_empty(device="cpu").parameters():
        nn.init.zeros_(parameter)
    teacher = {name: torch.ones(()).expand(value.shape) for name, value in found.items()}
    select_weights_(student, teacher, positions="interpolate")
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, torch.full_like(value, 0.0 if name.startswith("head.") else 1.0))
