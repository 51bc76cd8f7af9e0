"""What a user types or runs is consent; data run no code of users' own without `trust`."""

import shutil
import sys

import numpy as np
import pytest
import torch
from programs import run

import weightscope
from weightscope import fit
from weightscope.errors import DataError, UsageError
from weightscope.init import load_init
from weightscope.population import Population, open_network
from weightscope.training.collection import collect

MODULE = """
import os
import pathlib
pathlib.Path(os.environ["MARK"]).touch()
import numpy as np
from torch import nn
from weightscope.fits import STRUCTURES

def network(in_channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

def plain():
    return network(1, 8, 10)

def data():
    pixels, labels = np.arange(60 * 64, dtype=np.uint8).reshape(60, 1, 8, 8), np.arange(60) % 10
    return pixels[:40], labels[:40], pixels[40:], labels[40:]

def init(module, *, generator):
    return module

class Structure(STRUCTURES["diagonal"]):
    pass
"""
RECIPE = """
network = { type = "foreign:network" }
data = { name = "foreign:data" }
training = { epochs = 1 }
init = { name = "foreign:init" }
population = { networks = 4, tile = 2 }
"""


def forget(folder):
    """As in a new process."""
    sys.modules.pop("foreign", None)
    (folder / "mark").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "foreign.py").write_text(MODULE)
    (folder / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MARK", str(folder / "mark"))
        collect(weightscope.Recipe.load("recipe.toml"), "own.pop", workers=1, device="cpu", progress=False)
        options = {"select": "*", "holdout": 0.5, "structure": "foreign:Structure"}
        fit("own.pop", **options).save("own.safetensors")
        torch.save(Population("own.pop", trust=True)[0].state_dict(), "digits.pt")
        forget(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A folder with a recipe, a population and an artifact, in which commands are run."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    yield tmp_path
    forget(tmp_path)


READ = [  # from the weights and the spec
    ("inspect", "own.pop"),
    ("inspect", "own.pop::0"),
    ("inspect", "own.pop", "--source"),
    ("verify", "own.pop"),
    ("export", "own.pop", "-o", "own.h5"),
    ("covariance", "own.pop", "-o", "a.png"),
    ("report", "own.pop", "-o", "a.html"),
    ("audit", "own.pop::0"),
]
RUN = [
    ("attention-maps", "own.pop", "-o", "a.png"),
    ("collect", "own.pop", "-o", "new.pop", "--workers", "1"),
    ("bench", "own.pop", "--init", "default", "--seeds", "2", "-o", "b"),
    ("bench", "digits-convnext", "--init", "own.safetensors", "--seeds", "2", "-o", "b"),
    ("import", "digits.pt", "-o", "zoo.pop", "--network", "own.pop"),
]
TYPED = [
    ("collect", "recipe.toml", "-o", "own.pop", "-n", "6", "--workers", "1", "--device", "cpu"),
    ("import", "digits.pt", "-o", "zoo.pop", "--network", "foreign:plain"),
    (
        "fit-init",
        "own.pop",
        "--select",
        "*",
        "--holdout",
        "0.5",
        "--structure",
        "foreign:Structure",
        "-o",
        "a.safetensors",
    ),
]


@pytest.mark.parametrize("command", READ, ids=" ".join)
def test_what_needs_no_code_runs_none(folder, command, capsys):
    run(*command, capsys=capsys)
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("command", RUN, ids=" ".join)
def test_code_that_data_name_needs_trust(folder, command, capsys):
    code, _, err = run(*command, capsys=capsys)
    assert not (folder / "mark").exists()
    assert code in (2, 3)
    assert err.count("\n") == 1
    assert "foreign:" in err
    assert "--trust" in err
    run(*command, "--trust", capsys=capsys)
    assert (folder / "mark").exists()


@pytest.mark.parametrize("command", TYPED, ids=" ".join)
def test_code_that_a_user_types_or_runs_needs_none(folder, command, capsys):
    code, _, err = run(*command, capsys=capsys)
    assert code == 0, err
    assert (folder / "mark").exists()


def test_trust_is_that_of_a_call(folder):
    assert open_network("own.pop::1")["1.weight"].shape == (10, 64), "tensors, as the code does not run"
    for call in (
        lambda **given: Population("own.pop", **given)[0],
        lambda **given: load_init("own.safetensors", **given),
    ):
        with pytest.raises((UsageError, DataError), match="--trust"):
            call()
        assert not (folder / "mark").exists()
        call(trust=True)
        assert (folder / "mark").exists()
        forget(folder)
        with pytest.raises((UsageError, DataError), match="--trust"):
            call()


def test_a_file_that_has_changed_is_named(folder, capsys):
    (folder / "foreign.py").write_text(MODULE.replace("nn.Linear", "nn.Linear  "))
    with pytest.raises(DataError, match=rf"{folder}/foreign.py \(foreign:network\) has changed since the population"):
        Population("own.pop", trust=True).network(1)
    code, _, err = run("collect", "recipe.toml", "-o", "own.pop", "-n", "6", "--workers", "1", capsys=capsys)
    assert (code, "foreign.py" in err) == (3, True), err


def test_without_the_module_the_tensors_are_read(folder):
    (folder / "foreign.py").unlink()
    found = open_network("own.pop::1")
    np.testing.assert_array_equal(found["1.weight"].numpy().ravel(), Population("own.pop").weights("1.weight")[1])
    with pytest.raises(UsageError, match=r"^foreign:network: cannot import foreign \(no Python file of this name\)"):
        Population("own.pop", trust=True)[0]
