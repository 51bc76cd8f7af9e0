"""The choice of kernels: a compiled kernel that is wrong on this machine is found and not used."""

import logging
import shlex
import shutil
import sys
from pathlib import Path

import fake_training as fake
import h5py
import numpy as np
import pytest
import tiny
import torch
from tiny import NETWORKS

from weightscope._util import workers
from weightscope.errors import UsageError
from weightscope.training import network_check, train_tile
from weightscope.training.collection import collect
from weightscope.training.kernels import build
from weightscope.training.network_check import choose_kernels
from weightscope.training.optimiser import row_norms

CPU = torch.device("cpu")
BASE = {
    "network": NETWORKS["convnext"],
    "data": {"name": "digits", "train": 64, "test": 21},  # one image more than whole vectors
    "training": {"epochs": 1, "batch_size": 16},
    "population": {"networks": 2, "tile": 2},
}
CHECKED = "a training step, evaluation and AdamW: equal to torch's within 1e-04"
MISTAKES = {  # network, text of a C source, what it becomes, message
    "does not build": ("convnext", "int adamw_step(", "int adamw_step(oops", "failed:.*oops"),
    "wrong value": ("convnext", "return larger(", "return 1.001f * larger(", "logits differs"),
    "wrong filter gradient": (
        "convnext",
        "out[j] = total(",
        "out[j] = 0.999f * total(",
        "the gradient of `.*conv_dw.weight`",
    ),
    # a factor would not do: the LayerNorm after the convolution removes it
    "wrong in an evaluation": ("convnext", "to + l] = sum[q]", "to + l] = sum[0]", "the logits of an evaluation"),
    "a norm without eps": ("convnext", "[u] / (REAL)c + eps", "[u] / (REAL)c", "differs"),
    "wrong convolution": ("convmixer", "+ bias;", "+ 0 * bias;", "logits differs"),
    "wrong batch norm": ("convmixer", "- s - get(u + p) * v", "- s", "the gradient of"),
    "wrong gradient of attention": ("vit", "LANES) - mean)", "LANES))", "the gradient of"),
    "wrong gradient of rates": ("mamba", "+ of_exponent * step", "+ of_exponent", "the gradient of `.*A_log`"),
    "wrong decay": ("vit", "eta * decayed[d]", "decayed[d]", "AdamW, weights differs"),
}

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


def recipe(network="convnext", **training):
    changes = {f"training__{name}": value for name, value in training.items()}
    if network == "mamba":
        return tiny.recipe(tiny.COPYING, **changes)
    return tiny.recipe(BASE, network=NETWORKS[network], **changes)


def forget():
    build.library.cache_clear()
    network_check._choices.clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Replaces the compiler by one that makes a mistake, or by none; for tiles in this process."""
    monkeypatch.setitem(workers.ENGINES, "loky", fake.in_this_process)
    monkeypatch.delenv("CC", raising=False)
    forget()

    def make(old, new=""):
        if old is None:
            monkeypatch.setenv("PATH", str(tmp_path))
        else:
            script = Path(__file__).with_name("broken_compiler.py")
            monkeypatch.setenv("CC", shlex.join([sys.executable, str(script), old, new]))
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        forget()

    yield make
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("network", [*NETWORKS, "mamba"])
def test_right_kernels_are_used_without_a_word(compiler, caplog, network):
    found = choose_kernels(recipe(network), CPU)
    assert (found.kernels, found.build) == ("c", build.library("float")[1])
    assert found.comparison == CHECKED
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_named_and_not_used(compiler, caplog, mistake):
    network, old, new, message = MISTAKES[mistake]
    sources = [file.read_text() for file in build._FOLDER.glob("*.[ch]")]
    assert any(old in text for text in sources)
    compiler(old, new)
    with caplog.at_level(logging.WARNING):
        found = [choose_kernels(recipe(network), CPU) for _ in range(2)]
    assert [choice.kernels for choice in found] == ["torch", "torch"]
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("compiled kernels are not used, torch's are: ")
    assert "\n" not in text
    with pytest.raises(UsageError, match=f"(?s){message}"):
        choose_kernels(recipe(network, kernels="compiled"), CPU)


def header(path, name):
    with h5py.File(path / "shards" / "00000.h5") as h5:
        return h5.attrs[name].decode() if name in h5.attrs else None


@pytest.mark.slow
def test_a_population_with_a_wrong_kernel_has_the_bits_of_torchs(compiler, tmp_path, caplog):
    compiler("return larger(", "return 1.01f * larger(")
    population = collect(recipe(), tmp_path / "a.pop", workers=1, device="cpu")
    assert population.recipe.training.kernels == "torch"
    assert "logits differs from torch's" in header(tmp_path / "a.pop", "kernels")
    assert header(tmp_path / "a.pop", "device") == "cpu"
    expected = train_tile(recipe(kernels="torch"), 0, device="cpu").weights
    np.testing.assert_array_equal(population.weights(), expected)
    assert len(caplog.records) == 1


def test_a_population_keeps_its_compiled_kernels_and_says_what_was_checked(compiler, tmp_path, caplog):
    path = tmp_path / "a.pop"
    collect(recipe(), path, workers=1, device="cpu")
    assert collect(recipe(), path, networks=4, workers=1, device="cpu").recipe.training.kernels == "compiled"
    assert header(path, "kernels") == CHECKED
    assert header(path, "device") == f"cpu, kernels {build.library('float')[1]}"
    assert not caplog.records


def test_on_a_machine_without_a_compiler_a_compiled_population_goes_on_with_a_warning(compiler, tmp_path, caplog):
    path = tmp_path / "a.pop"
    made = collect(recipe(), path, workers=1, device="cpu").provenance()
    compiler(None)
    population = collect(recipe(), path, networks=4, workers=1, device="cpu")
    assert population.recipe.training.kernels == "compiled"
    assert set(population.provenance()) == {*made, f"torch {torch.__version__} on cpu"}
    first, second = (record.getMessage() for record in caplog.records)
    assert "what is trained here uses torch's, which round differently: kernels = 'compiled': found no C" in first
    assert f"tile 0 was trained on cpu, kernels {next(iter(made))[-8:]}, new ones are on cpu" in second
    with pytest.raises(UsageError, match="found no C compiler"):
        collect(recipe(kernels="compiled"), path, networks=6, workers=1, device="cpu")


def test_a_population_that_began_without_a_compiler_keeps_torchs_kernels(compiler, tmp_path, monkeypatch, caplog):
    path = tmp_path / "a.pop"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        forget()
        collect(recipe(), path, workers=1, device="cpu")
    forget()
    population = collect(recipe(), path, networks=4, workers=1, device="cpu")
    assert population.recipe.training.kernels == "torch"
    assert population.provenance() == {f"torch {torch.__version__} on cpu": 2}
    assert not caplog.records


@pytest.mark.parametrize("size", [100, 1 << 14, 3 << 14, 100_001, 5_543_716])
def test_the_norm_for_clipping_is_right_for_millions_of_weights(size):
    gradient = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64)
    torch.testing.assert_close(row_norms(gradient).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({"precision": "bfloat16"}, "cpu", "compute in float32"),
        ({}, "meta", "are for a CPU or CUDA"),
        ({}, "cuda", r"need Triton on a GPU.*use kernels = 'torch'"),
        ({"network": "mamba"}, "cuda", "on a GPU are for images, found sequences"),
    ],
)
def test_what_compiled_kernels_do_not_support_takes_torchs(compiler, caplog, monkeypatch, changes, device, message):
    monkeypatch.setattr(network_check, "has_triton", lambda: False)
    assert choose_kernels(recipe(**changes), torch.device(device)).kernels == "torch"
    assert choose_kernels(recipe(engine="loop"), torch.device(device)).kernels == "torch"
    assert not caplog.records
    with pytest.raises(UsageError, match=message):
        choose_kernels(recipe(kernels="compiled", **changes), torch.device(device))
