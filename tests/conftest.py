"""What all tests share."""

import os
import shutil
import signal

import pytest
import torch

# Without a GPU, Triton's kernels are run by its interpreter; it reads this when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
    """The sets of kernels for a CPU (tests/test_gpu_kernels.py has those for a GPU)."""
    _skip_without_compiler(request.param)
    return request.param
