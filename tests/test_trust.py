"""Code of users' own runs only if they trust it, whatever recipes, populations, artifacts and the command line name."""

import contextlib
import hashlib
import os
import py_compile
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import run

from weightscope._util import plugins, trust
from weightscope.errors import DataError, UsageError
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

def data():
    pixels, labels = np.arange(60 * 64, dtype=np.uint8).reshape(60, 1, 8, 8), np.arange(60) % 10
    return pixels[:40], labels[:40], pixels[40:], labels[40:]

def init(module, *, generator):
    return module

class Structure(STRUCTURES["diagonal"]):
    pass
"""
RECIPE = {
    "network": {"type": "foreign:network"},
    "data": {"name": "digits", "train": 64, "test": 40},
    "training": {"epochs": 1},
    "population": {"networks": 6, "tile": 6},
}
TOML = """
network = {{ type = "{network}"{sizes} }}
data = {{ name = "{data}" }}
training = {{ epochs = 1 }}
init = {{ name = "{init}" }}
population = {{ networks = 2, tile = 2 }}
"""
SIZES = ", width = 4, depth = 1, patch_size = 2"


def forget(folder, monkeypatch):
    """As in a new process of a user who has trusted nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    for known in (trust._approved, plugins._passed, trust._seen):
        known.clear()
    sys.modules.pop("foreign", None)
    (folder / "mark").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "foreign.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MARK", str(folder / "mark"))
        forget(folder, patch)
        collect(RECIPE, "own.pop", workers=1, device="cpu", progress=False, trust=True)
        assert (folder / "mark").exists()
        forget(folder, patch)
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """Another user's folder with a population, and the recipes of other sections, in which this user runs commands."""
    shutil.copytree(made / "own.pop", tmp_path / "own.pop")
    (tmp_path / "foreign.py").write_text(MODULE)
    for section in ("network", "data", "init"):
        names = {"network": "convnext", "data": "digits", "init": "default"} | {section: f"foreign:{section}"}
        text = TOML.format(**names, sizes="" if section == "network" else SIZES)
        (tmp_path / f"{section}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    forget(tmp_path, monkeypatch)
    yield tmp_path
    forget(tmp_path, monkeypatch)


READ = [  # without the code, from the weights and the spec
    ("inspect", "own.pop"),
    ("inspect", "own.pop::0"),
    ("inspect", "own.pop", "--source"),
    ("verify", "own.pop"),
    ("export", "own.pop", "-o", "own.h5"),
    ("covariance", "own.pop", "-o", "a.png"),
    ("fit-init", "own.pop", "--select", "*", "--structure", "diagonal", "--holdout", "0.4", "-o", "a.safetensors"),
]
LOOK = [  # for parts that this network does not have
    ("audit", "own.pop::0"),
    ("products", "own.pop::0", "-o", "a.png"),
    ("covariance", "own.pop", "--part", "filters", "-o", "a.png"),
    ("covariance", "own.pop", "--part", "filters", "--network", "1", "-o", "a.png"),
    ("covariance", "own.pop", "--exchangeable", "-o", "a.png"),
    ("report", "own.pop", "-o", "a.html"),
    ("fit-init", "own.pop::0", "--structure", "filters", "-o", "a.safetensors"),
    ("fit-init", "own.pop", "--select", "*", "--structure", "exchangeable", "--gain", "auto", "-o", "a.safetensors"),
]
RUN = [
    ("attention-maps", "own.pop", "-o", "a.png"),
    ("collect", "own.pop", "-o", "own.pop", "-n", "8", "--workers", "1"),
    ("collect", "own.pop", "-o", "new.pop", "--workers", "1"),
    ("collect", "own.pop", "-o", "new.pop", "--plan"),
    ("bench", "own.pop", "--init", "default", "--seeds", "2", "-o", "b"),
    ("fit-init", "own.pop", "--select", "*", "--structure", "foreign:Structure", "-o", "a.safetensors"),
    ("bench", "digits-convnext", "--init", "foreign:init", "--seeds", "2", "-o", "b"),
    ("bench", "network.toml", "--init", "default", "--probe", "-o", "b"),
    ("audit", "digits.pt", "--init", "foreign:init"),
    *(("collect", f"{section}.toml", "-o", "new.pop", "--workers", "1") for section in ("network", "data", "init")),
    *(("bench", f"{section}.toml", "--init", "default", "-o", "b") for section in ("network", "data")),
]


@pytest.mark.parametrize("command", READ + LOOK, ids=" ".join)
def test_what_needs_no_code_runs_none(folder, command, capsys):
    code, _, err = run(*command, capsys=capsys)
    assert not (folder / "mark").exists()
    assert code == 0 or command in LOOK, err
    assert err.count("\n") <= 1, err


@pytest.mark.parametrize("command", RUN, ids=" ".join)
def test_what_needs_the_code_of_others_asks_for_trust(folder, command, capsys):
    import torch

    torch.save({"weight": torch.zeros(3)}, "digits.pt")
    code, _, err = run(*command, capsys=capsys)
    assert not (folder / "mark").exists()
    assert (code, err.count("\n")) == (2, 1), err
    digest = hashlib.sha256(MODULE.encode()).hexdigest()[:16]
    for said in ("foreign:", f"{folder}/foreign.py", digest, "--trust"):
        assert said in err
    assert not (folder / "new.pop").exists()


def test_trusted_once_it_runs_again_until_it_changes(folder, capsys, monkeypatch):
    collecting = ("collect", "network.toml", "-o", "new.pop", "--workers", "1", "--device", "cpu")
    assert run(*collecting, "--trust", capsys=capsys)[0] == 0
    state = folder / "state" / "weightscope"
    assert [path.stat().st_mode & 0o777 for path in (state, state / "trusted")] == [0o700, 0o600]
    forget(folder, monkeypatch)
    assert run(*collecting, "-n", "3", capsys=capsys)[0] == 0
    assert (folder / "mark").exists()
    assert type(Population("new.pop")[0]).__name__ == "Sequential"
    assert run("inspect", "new.pop", "--source", capsys=capsys)[1].count("def network(") == 1
    (folder / "foreign.py").write_text(MODULE.replace("nn.Linear", "nn.Linear  "))
    forget(folder, monkeypatch)
    old, new = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (MODULE, Path("foreign.py").read_text()))
    for call in (lambda: Population("new.pop")[0], lambda: Population("new.pop", trust=True).network(1)):
        with pytest.raises(
            DataError, match=f"expected hash {old}, found {new}; `weightscope inspect --source new.pop`"
        ):
            call()
    code, _, err = run(*collecting, "-n", "4", "--trust", capsys=capsys)
    assert (code, old in err, new in err) == (3, True, True), err
    assert run("inspect", "new.pop::0", capsys=capsys)[0] == 0
    tensors, expected = open_network("new.pop::1"), Population("new.pop").weights("1.weight")[1]
    np.testing.assert_array_equal(tensors["1.weight"].numpy().ravel(), expected)
    assert not (folder / "mark").exists()


def test_python_asks_for_trust_too(folder, monkeypatch):
    import torch

    from weightscope import fit_init
    from weightscope.auditing import audit
    from weightscope.init import load_init

    def fit(**given):
        return fit_init("own.pop", "foreign:Structure", select="*", holdout=0.4, **given)

    with trust.trusting():
        fit().save("own.safetensors")
    calls = (
        fit,
        lambda **given: load_init("own.safetensors", **given),
        lambda **given: audit({"weight": torch.zeros(3)}, "foreign:init", **given),
    )
    for call in calls:
        forget(folder, monkeypatch)
        (folder / "state" / "weightscope" / "trusted").unlink(missing_ok=True)
        with pytest.raises((UsageError, DataError), match="--trust"):
            call()
        assert not (folder / "mark").exists()
        with contextlib.suppress(UsageError):  # an initialiser is no function with expectations
            call(trust=True)
        assert (folder / "mark").exists()


def test_an_object_that_is_passed_is_trusted_later_too(folder, monkeypatch):
    import importlib

    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("foreign")
    collect(RECIPE | {"network": module.network}, "new.pop", workers=1, device="cpu", progress=False)
    forget(folder, monkeypatch)
    Population("new.pop").network(0)
    assert (folder / "mark").exists()


def test_without_the_module_the_tensors_are_read(folder):
    (folder / "foreign.py").unlink()
    found = open_network("own.pop::1")
    np.testing.assert_array_equal(found["1.weight"].numpy().ravel(), Population("own.pop").weights("1.weight")[1])
    with pytest.raises(
        UsageError, match=r"^foreign:network: cannot import foreign \(no Python file of this name\); run"
    ):
        Population("own.pop")[0]


def test_bytecode_beside_a_trusted_source_does_not_run(folder, monkeypatch):
    harmless = MODULE.replace('pathlib.Path(os.environ["MARK"]).touch()', "")
    (folder / "foreign.py").write_text(harmless)
    with trust.trusting():
        plugins.imported("foreign:init")
    forget(folder, monkeypatch)
    (folder / "other.py").write_text(MODULE)
    target = folder / "__pycache__" / f"foreign.{sys.implementation.cache_tag}.pyc"
    py_compile.compile("other.py", str(target), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    plugins.imported("foreign:init")
    assert not (folder / "mark").exists()


WAYS = ("never", "changed", "other name", "others write", "others own", "link", "folder", "sha of another")


@pytest.mark.parametrize("seed", range(int(os.environ.get("CASES", "12"))))
def test_no_other_state_lets_code_run(folder, seed, monkeypatch):
    """Random references, files and records of trust: only a private record of this source and name counts."""
    draw = random.Random(seed)
    kind, way = draw.choice(["network", "data", "init", "Structure"]), draw.choice(WAYS)
    reference = f"foreign:{kind}"
    if draw.random() < 0.5:  # in a package
        (folder / "package").mkdir()
        (folder / "package" / "__init__.py").write_text("")
        shutil.move("foreign.py", "package/foreign.py")
        reference = f"package.{reference}"
    monkeypatch.syspath_prepend(folder)
    file = trust.source_file(reference.partition(":")[0])
    assert file is not None
    if way != "never":
        trust.approve(f"{reference}2" if way == "other name" else reference, file.read_bytes())
    state = trust.state_file()
    if way == "changed":
        file.write_text(f"{MODULE}\n#{draw.random()}\n")
    elif way == "others write":
        state.chmod(draw.choice([0o620, 0o606, 0o640, 0o666]))
    elif way == "others own":
        os.chown(state, 12345, -1) if os.geteuid() == 0 else state.unlink()
    elif way == "link":
        state.rename(folder / "elsewhere")
        state.symlink_to(folder / "elsewhere")
    elif way == "folder":
        state.parent.chmod(draw.choice([0o755, 0o777, 0o770]))
    elif way == "sha of another":
        state.write_text(state.read_text().replace(hashlib.sha256(file.read_bytes()).hexdigest(), "0" * 64))
    trust._approved.clear()
    for door in (plugins.imported, plugins.Registry("thing").find):
        with pytest.raises(trust.CannotRun, match="neither run nor trusted before"):
            door(reference)
    assert not (folder / "mark").exists()
    with trust.trusting():
        plugins.imported(reference)
    assert (folder / "mark").exists()
    for name in ("package", "package.foreign"):
        sys.modules.pop(name, None)


def test_another_name_in_a_file_that_is_trusted_is_said_to_be_one(folder):
    with trust.trusting():
        plugins.imported("foreign:network")
    with pytest.raises(trust.CannotRun, match=r"nor trusted before \(only network of it, not netwrok\); read it"):
        plugins.imported("foreign:netwrok")


@pytest.mark.parametrize("reference", ["builtins:eval", "os.path:join", "subprocess:run", "weightscope.init:get"])
def test_what_is_installed_needs_trust_too(folder, reference):
    with pytest.raises(UsageError, match=r"neither run nor trusted|no Python file of this name"):
        plugins.imported(reference)
