"""What all tests share."""

import shutil
import signal

import pytest

# A shell that starts a job in the background has it ignore SIGINT; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["torch", "compiled"])
def kernels(request):
    """Both kinds of kernels; the compiled ones where there is a C compiler."""
    if request.param == "compiled" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    return request.param
