"""Distillation: equal to training each network alone with torch's own losses; in populations and benchmarks."""

import json
import re

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from plain import train_alone
from safetensors.torch import save_file
from tiny import NETWORKS, assert_same_metrics, assert_same_weights
from torch import nn

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.benchmarking import bench
from weightscope.errors import DataError, SpecError, UsageError, WeightscopeError
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training import spec_of, train_tile
from weightscope.training.collection import collect
from weightscope.training.distillation import head_of, teacher_of

pytestmark = pytest.mark.usefixtures("trained_here")

TEACHER = NETWORKS["convnext"] | {"width": 12}
BASE = tiny.BASE | {"training": tiny.BASE["training"] | {"label_smoothing": 0.1}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A file of weights whose logits and features are not close to those of an untrained network."""
    torch.manual_seed(3)
    network = build_for(Recipe.parse({**BASE, "network": TEACHER}))
    with torch.no_grad():
        for value in network.parameters():
            value.mul_(2)
    file = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_file(network.state_dict(), file)
    return file


def recipe(teacher, kind="logit", **changes):
    section = {"teacher": str(teacher), "kind": kind, "alpha": 0.7, "network": TEACHER}
    return tiny.recipe({**BASE, "distillation": section}, **changes)


def alone(plan, k):
    """Network k distilled with torch's own modules and losses."""
    teacher, seen = teacher_of(plan), {}
    head = teacher.get_submodule(head_of(teacher))
    head.register_forward_pre_hook(lambda module, inputs: seen.__setitem__("teacher", inputs[0]))
    template = build_for(plan)
    torch.manual_seed(torch_seed(plan.population.seed, k, Purpose.PROJECTION))
    width = template.get_submodule(head_of(template)).in_features
    mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, 12))
    divergence, l1 = nn.KLDivLoss(reduction="batchmean"), nn.L1Loss()

    def term(network, images, logits):
        with torch.no_grad():
            theirs = teacher(images)
        if plan.distillation.kind == "logit":
            return plan.distillation.alpha * divergence(F.log_softmax(logits, dim=1), theirs.softmax(1))
        return plan.distillation.alpha * l1(mlp(seen["student"]), seen["teacher"])

    parameters = list(mlp.parameters()) if plan.distillation.kind == "feature" else []

    def watch(module, inputs):
        if isinstance(module, nn.Linear) and module.out_features == 10 and module is not head:
            seen["student"] = inputs[0]

    handle = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        return train_alone(plan, k, more_loss=term, more_parameters=parameters)
    finally:
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logit", "feature"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_tile_equals_networks_distilled_one_by_one(name, kind, kernels, teacher):
    """With mixup: the teacher sees the student's images. The loop engine, which has torch's kernels, gives the same."""
    plan = recipe(teacher, kind, network=NETWORKS[name], training__kernels=kernels, training__mixup=0.5)
    tile, without = train_tile(plan, 1, device="cpu"), train_tile(plan.replace({"distillation": None}), 1, device="cpu")
    assert tile.weights.shape == without.weights.shape == (2, spec_of(plan).size)
    for row, k in zip(tile.weights, (2, 3), strict=True):
        assert_same_weights(spec_of(plan), row, alone(plan, k))
    if kernels == "torch":
        loop = train_tile(plan.replace({"training.engine": "loop"}), 1, device="cpu")
        assert_same_weights(spec_of(plan), loop.weights, tile.weights)
        assert_same_metrics(loop.metrics, tile.metrics)
    assert np.abs(tile.weights - without.weights).max() > 0.01, "the term changes what is learned"


def test_alpha_zero_is_training_without_a_teacher(teacher):
    plain = train_tile(recipe(teacher).replace({"distillation": None}), 0, device="cpu")
    for kind in ("logit", "feature"):
        off = train_tile(recipe("missing.safetensors", kind, distillation__alpha=0), 0, device="cpu")
        assert off.weights.tobytes() == plain.weights.tobytes()


def test_a_student_that_is_its_own_teacher_starts_with_no_divergence(tmp_path):
    plan = Recipe.parse(BASE).replace({"training.epochs": 1})
    collect(plan, tmp_path / "teachers.pop", workers=1, progress=False, device="cpu")
    member = f"{tmp_path / 'teachers.pop'}::1"
    found = teacher_of(plan.replace({"distillation": {"teacher": member}}))
    expected = Population(tmp_path / "teachers.pop").network(1)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())


def test_the_manifest_has_the_teachers_hash_and_refuses_another(tmp_path, teacher):
    file, path = tmp_path / "t.safetensors", tmp_path / "x.pop"
    file.write_bytes(teacher.read_bytes())
    plan = recipe(file, training__epochs=1, population__networks=2)
    population = collect(plan, path, workers=1, progress=False, device="cpu")
    inputs = json.loads((path / "population.json").read_text())["inputs"]
    assert re.fullmatch("[0-9a-f]{16}", inputs[f"teacher {file}"])
    assert not any("projection" in name for name in population.spec.names)
    state = build_for(plan.replace({"network": TEACHER})).state_dict()
    save_file(state, file)
    with pytest.raises(DataError, match="was collected with another teacher"):
        collect(plan, path, networks=4, workers=1, progress=False, device="cpu")
    assert "distillation" not in Recipe.parse(BASE).to_dict(), "recipes without a teacher keep their fingerprints"


def test_a_benchmark_has_arms_with_and_without_a_teacher(tmp_path, teacher):
    """{random, selected} x {with, without}, all paired, as in Table 3 of the selection paper."""
    select = f'select_weights(teacher="{teacher}")'
    given = {"vary": {"distillation.alpha": [0, 1]}, "workers": 1, "progress": False, "device": "cpu"}
    result = bench(recipe(teacher, training__epochs=1), ["default", select], tmp_path / "bench", seeds=2, **given)
    found = [(row["cell"]["distillation.alpha"], row["init"].split(" ")[0], row["n"]) for row in result.arms]
    assert found == [(alpha, init, 2) for alpha in (0, 1) for init in ("default", "select_weights")]
    losses = {(r["cell"]["distillation.alpha"], r["init"].split(" ")[0], r["seed"]): r["loss"] for r in result.runs}
    assert len(set(losses.values())) == 8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"teacher": "missing.safetensors"}, DataError, "distillation.teacher: .*missing.safetensors"),
        ({"network": BASE["network"]}, SpecError, r"distillation.teacher: .*expected \(4,.* found \(12,"),
        ({"teacher": "nowhere.pop::0"}, DataError, "distillation.teacher: nowhere.pop: expected a population"),
        ({"teacher": "nowhere.pop::last"}, UsageError, "distillation.teacher: .*found 'last'"),
    ],
)
def test_teachers_that_cannot_be_used(changes, error, message, teacher):
    plan = recipe(teacher)
    section = {**plan.to_dict()["distillation"], **changes}
    with pytest.raises(error, match=message) as caught:
        teacher_of(plan.replace({"distillation": section}))
    assert isinstance(caught.value, WeightscopeError)
    assert "\n" not in str(caught.value)


def test_a_network_without_a_classifier_has_no_features():
    with pytest.raises(UsageError, match="found no linear layer"):
        head_of(nn.Conv2d(1, 2, 3))
    with pytest.raises(UsageError, match="found `0` with 3 outputs"):
        head_of(nn.Sequential(nn.Linear(2, 3)), 10)
