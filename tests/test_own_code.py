"""Populations of one's own networks, images and initialisers."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import own_code
import pytest
import tiny
import tomli_w
import torch

import weightscope
from weightscope._util.seeding import Purpose, torch_seed
from weightscope.errors import UsageError
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.training import spec_of, train_tile
from weightscope.training.collection import collect

BASE = tiny.BASE | {
    "data": {"name": "digits", "train": 64, "test": 40},
    "population": {"networks": 3, "tile": 2, "seed": 7},
}


def recipe(network, **changes):
    return tiny.recipe(BASE | {"network": network}, **changes)


@pytest.mark.parametrize("network", [own_code.Cnn, own_code.Residual, own_code.partly_frozen, own_code.NormTwice])
def test_a_network_of_layers_with_batched_versions_trains_batched_as_by_loop(network):
    plan = recipe(network)
    batched, loop = (train_tile(plan.replace({"training.engine": e}), 0, device="cpu") for e in ("batched", "loop"))
    tiny.assert_same_weights(spec_of(plan), batched.weights, loop.weights)
    tiny.assert_same_metrics(batched.metrics, loop.metrics)


def test_what_needs_no_gradient_is_not_trained():
    plan = recipe(own_code.partly_frozen)
    tile = train_tile(plan, 0, device="cpu")
    torch.manual_seed(torch_seed(plan.population.seed, 0, Purpose.INIT))
    start = build_for(plan).state_dict()
    found = spec_of(plan).unpack(tile.weights[0])
    assert np.array_equal(found["0.weight"], start["0.weight"].numpy())
    assert not np.array_equal(found["4.weight"], start["4.weight"].numpy())


def test_a_network_without_batched_layers_trains_by_loop(tmp_path):
    with pytest.raises(UsageError, match=r'`gru` \(GRU\) has no batched version; use training.engine = "loop"'):
        collect(recipe(own_code.Gru), tmp_path / "a.pop")
    assert not (tmp_path / "a.pop").exists()
    plan = recipe({"type": own_code.Gru, "hidden": 5}, training__engine="loop")
    population = collect(plan, tmp_path / "a.pop", workers=1, device="cpu")
    assert population.spec["head.weight"].shape == (10, 5)
    assert not population.diverged.any()
    network = population.network(2)
    assert isinstance(network, own_code.Gru)
    np.testing.assert_array_equal(network.head.weight.detach(), population.weights("head.weight")[2].reshape(10, 5))


def test_dropout_of_a_network_does_not_depend_on_its_neighbours():
    plan = recipe(own_code.Gru, training__engine="loop")
    wide, narrow = (train_tile(plan.replace({"population.tile": t}), 0, device="cpu").weights for t in (2, 1))
    assert wide[0].tobytes() == narrow[0].tobytes()
    plain = train_tile(plan.replace({"population.seed": 8}), 0, device="cpu").weights
    assert not np.array_equal(plain[0], wide[0])


@pytest.mark.parametrize("how", ["softmax", "mean", "cat", "clip", "shape", "random"])
def test_a_forward_that_mixes_networks_is_refused(how):
    plan = recipe({"type": own_code.Mixing, "how": how})
    with pytest.raises(UsageError, match=r"own_code:Mixing.*batched and plain networks differ.*training.engine"):
        train_tile(plan, 0, device="cpu")
    if how != "shape":
        train_tile(plan.replace({"training.engine": "loop", "training.epochs": 1}), 0, device="cpu")


def test_the_same_code_without_the_step_that_mixes_trains():
    assert np.isfinite(train_tile(recipe({"type": own_code.Mixing, "how": "not"}), 0, device="cpu").weights).all()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("own_code:Missing", "no name 'Missing'"),
        ("own_codes:Cnn", "cannot import own_codes"),
        ({"type": "own_code:Cnn", "depth": 3}, r"called with \(in_channels, image_size, num_classes, \*\*numbers\)"),
        ("own_code:no_module", "expected an nn.Module from own_code:no_module, found str"),
        ("own_code:wrong_logits", r"expected logits \(4, 10\) from the network, found \(4, 11\)"),
        ("own_code:broken", r"own_code:broken\(1, 8, 10\) raised ValueError: no such size"),
        ("own_code:Unused", "`0.extra` does not affect the logits"),
        ({"type": "own_code:Mixing", "how": "error"}, r"failed on images \(4, 1, 8, 8\): RuntimeError: no"),
    ],
)
def test_impossible_networks_leave_nothing(tmp_path, network, message):
    network = network if isinstance(network, dict) else {"type": network}
    plan = recipe(network)
    with pytest.raises(UsageError, match=message):
        collect(plan, tmp_path / "a.pop", device="cpu")
    assert not (tmp_path / "a.pop").exists()


def test_tied_weights_train_by_loop():
    plan = recipe(own_code.Tied)
    with pytest.raises(UsageError, match=r"`conv.weight` and `second.weight` are the same.*training.engine"):
        train_tile(plan, 0, device="cpu")
    plan = plan.replace({"training.engine": "loop"})
    assert "second.weight" not in spec_of(plan).names
    assert not train_tile(plan, 0, device="cpu").metrics["diverged"].any()


def test_buffers_that_a_forward_pass_replaces_are_stored():
    plan = recipe(own_code.Average, training__engine="loop")
    found = spec_of(plan).unpack(train_tile(plan, 0, device="cpu").weights[1])
    assert np.abs(found["average"]).min() > 0


@pytest.mark.parametrize(
    ("init", "message"), [("failing", "raised KeyError: 'blocks'"), ("reshaped", "names and shapes")]
)
def test_initialisers_that_fail_are_named(init, message):
    with pytest.raises(UsageError, match=f"{init}.*{message}"):
        train_tile(recipe(own_code.Cnn, init=getattr(own_code, init)), 0, device="cpu")


def test_generators_of_numpy_and_python_are_seeded_for_each_network():
    plan = recipe(own_code.Cnn, init=own_code.global_numbers)
    first, again = (train_tile(plan, 0, device="cpu").weights for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1])


@pytest.mark.slow
def test_own_code_everywhere_and_in_workers(tmp_path):
    """Functions that a worker can import, and one that it cannot; the same bits as here."""

    def quarter(module, *, generator):
        return own_code.half(module, generator=generator, factor=0.25)

    values = {**BASE, "network": own_code.Cnn, "data": own_code.images, "init": [own_code.half, quarter]}
    here = collect(values, tmp_path / "here.pop", workers=1, device="cpu")
    there = collect(values, tmp_path / "there.pop", workers=2, device="cpu")
    assert here.weights().tobytes() == there.weights().tobytes()
    assert here.metrics["init"].tolist() == [0, 1, 0]
    inputs = Population(tmp_path / "here.pop").manifest.inputs
    assert {name.removesuffix(name.partition("quarter_")[2]) for name in inputs} == {
        "network own_code:Cnn",
        "data own_code:images",
        "init own_code:half",
        f"init {__name__}:quarter_",
    }


MODULE = """
from torch import nn

def network(in_channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@pytest.mark.slow
def test_a_module_beside_the_recipe(tmp_path):
    """The command line in the folder of the module; workers find it as well."""
    (tmp_path / "my_network.py").write_text(MODULE)
    network = {"network": {"type": "my_network:network"}, "population": {"networks": 2, "tile": 1}}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(BASE | network))
    code = "import sys; sys.path.pop(0); from weightscope.cli import main; main(sys.argv[1:])"  # as the console script
    call = [sys.executable, "-c", code, "collect", "recipe.toml", "-o", "a.pop", "--workers", "2"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": str(Path(weightscope.__file__).parents[1])}
    done = subprocess.run(call, **options)
    assert done.returncode == 0, done.stderr


STALE = """
import torch

def constant(module, *, generator):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.25)
    return module
"""


def test_code_that_changes_in_a_session_is_reloaded_by_workers(tmp_path, monkeypatch):
    values = {**BASE, "network": own_code.Cnn, "training": {"epochs": 1, "batch_size": 16, "learning_rate": 1e-9}}
    values["population"] = {"networks": 2, "tile": 1}
    collect(values, tmp_path / "before.pop", workers=2, device="cpu")  # starts the workers, without this path
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "module_that_changes.py"
    file.write_text(STALE)
    module = importlib.import_module("module_that_changes")
    values |= {"init": {"name": "module_that_changes:constant"}}
    a = collect(values, tmp_path / "a.pop", workers=2, device="cpu")
    assert np.allclose(a.weights(), 0.25, atol=1e-4)
    file.write_text(STALE.replace("0.25", "0.5"))
    importlib.reload(module)
    b = collect(values, tmp_path / "b.pop", workers=2, device="cpu")
    assert np.allclose(b.weights(), 0.5, atol=1e-4)
