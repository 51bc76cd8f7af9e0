"""The teachers that docs/papers.md names, as networks of their architecture without trained weights."""

import ast
import re

import pytest
import shims
import torch
from costs import planned_command
from programs import ROOT
from torch import nn

from weightscope.errors import SpecError
from weightscope.init import select_weights_
from weightscope.networks import build_for

COMMANDS = re.findall(r"`(bench .*?)`", (ROOT / "docs" / "papers.md").read_text())
CALLS = {call: command for command in COMMANDS for call in re.findall(r"'select_weights\((.*?)\)'", command)}
TIMM = {call: command for call, command in CALLS.items() if "hf://timm/" in call}


def parsed(call: str) -> tuple[str, dict[str, object]]:
    """The architecture of the teacher, and the other arguments."""
    (statement,) = ast.parse(f"f({call})").body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    given = {str(word.arg): ast.literal_eval(word.value) for word in statement.value.keywords}
    return given.pop("teacher").removeprefix("hf://timm/").partition(".")[0], given


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
    """CLIP's patch embedding has no bias, which docs/papers.md leaves out."""
    (call,) = (call for call in TIMM if "_clip_" in call)
    student = build_for(planned_command(TIMM[call])[1][0].recipe)
    with pytest.raises(SpecError, match=r"no counterpart of `patch_embed\.proj\.bias`"):
        select_weights_(student, weights(parsed(call)[0]))
