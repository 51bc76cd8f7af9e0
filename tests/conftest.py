"""What all tests share."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# In this process and those that it starts: threads of small problems wait for each other, many times as long on a busy
# machine. NumPy and torch read this when they are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# A shell that starts a job in the background has it ignore SIGINT; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _skip_without_compiler(kernels: str) -> None:
    if kernels != "torch" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")


@pytest.fixture(params=["torch", "compiled"])
def kernels(request):
    """Both kinds of kernels that a recipe can name; the compiled ones where there is a C compiler."""
    _skip_without_compiler(request.param)
    return request.param


@pytest.fixture(params=["torch", "c"])
def kernel_set(request):
    """The kernels that `BatchedNetworks` has layers of its own for."""
    _skip_without_compiler(request.param)
    return request.param


@pytest.fixture(scope="module")
def trained_here() -> Iterator[None]:
    """Tiles are trained in this process, for tests of what is trained: a worker takes seconds to start."""
    import fake_training as fake

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fake.workers.ENGINES, "loky", fake.in_this_process)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A population of 20 networks in three tiles, of which networks 5 and 14 diverged."""
    import fake_training as fake  # h5py, which most tests do not need

    fake.write_population(tmp_path / "a.pop", fake.recipe())
    return tmp_path / "a.pop"


@pytest.fixture
def tensors_read(monkeypatch):
    """The names of the tensors that checkpoints read."""
    from weightscope import Checkpoint

    names, read = [], Checkpoint._read
    monkeypatch.setattr(Checkpoint, "_read", lambda self, name, wide: names.append(name) or read(self, name, wide))
    return names
