"""One thread for small problems: inside every public call one thread is in use, and after it the old number."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import scipy.linalg  # noqa: F401 - has a library of its own
import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

from weightscope._util.threads import LARGE, one_thread, threads_for

ROOT = Path(__file__).parent.parent
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def numbers():
    """The numbers of threads of torch and of the libraries of BLAS, without repetition."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    return {torch.get_num_threads(), *(library.get_num_threads() for library in libraries)}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2, user_api="blas"):
        yield
    torch.set_num_threads(before)


def test_blocks_are_nested_and_end_with_errors(two_threads):
    @one_thread()
    def fail():
        raise ZeroDivisionError

    with one_thread():
        assert numbers() == {1}
        with pytest.raises(ZeroDivisionError):
            fail()
        assert numbers() == {1}
    assert numbers() == {2}
    with pytest.raises(ZeroDivisionError):
        fail()
    assert numbers() == {2}


def test_large_problems_get_the_threads_back(two_threads):
    for kind, size in LARGE.items():
        with one_thread():
            with threads_for(kind, size):
                assert numbers() == {2}
            with threads_for(kind, size - 1):
                assert numbers() == {1}
            assert numbers() == {1}
        with threads_for(kind, size):
            assert numbers() == {2}


def test_calls_in_several_threads_of_python_end_in_any_order(two_threads):
    """The first block ends while the second one is still open, which keeps its limit."""
    opened, ended, seen = threading.Event(), threading.Event(), []

    def second():
        with one_thread():
            opened.set()
            ended.wait(10)
            seen.append(numbers())
        seen.append(numbers())

    other = threading.Thread(target=second)
    with one_thread():
        other.start()
        assert opened.wait(10)
    ended.set()
    other.join()
    assert seen == [{1}, {2}]
    assert numbers() == {2}


# What is called for its use of NumPy and torch; `watched` collects the numbers of threads at calls of their functions.
CALLS = """
import json, sys, tempfile
from functools import partial
from pathlib import Path
import numpy as np
import torch
from threadpoolctl import ThreadpoolController
import weightscope
from weightscope import WeightSpec, TensorSpec, init, plots
from weightscope.analysis.state_space_maps import state_space_maps
from weightscope.networks import ConvMixer, ViT
from weightscope.networks.sequences import Mamba
from weightscope.statistics.samples import WeightArray

torch.set_num_threads(2)
libraries = ThreadpoolController().select(user_api="blas").lib_controllers
for library in libraries:
    library.set_num_threads(2)

def numbers():
    return {torch.get_num_threads(), *(library.get_num_threads() for library in libraries)}

views = {"__instancecheck__", "array", "asarray", "arange", "empty", "reshape"}  # of arguments, before a block begins

def watched(call):
    seen, lines = set(), set()  # each line of code is looked at once
    def profile(frame, event, builtin):
        owner = getattr(builtin, "__module__", None) or type(getattr(builtin, "__self__", None)).__module__ or ""
        ours = frame.f_code.co_filename.endswith("threads.py") or getattr(builtin, "__name__", "") in views
        line = frame.f_code, frame.f_lineno
        if event == "c_call" and str(owner).startswith(("torch", "numpy")) and not ours and line not in lines:
            lines.add(line)
            seen.update(numbers())
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {"inside": sorted(seen), "after": sorted(numbers())}

vit = ViT(image_size=8, patch_size=2, width=24, depth=1, heads=2, num_classes=3, positions="learned")
mixer = ConvMixer(width=8, depth=1, kernel_size=3, patch_size=2, num_classes=3)
mamba = Mamba(vocabulary=5, width=8, depth=1, state=3)
spec = WeightSpec([TensorSpec("a", (3, 2))])
samples = WeightArray(np.random.default_rng(0).standard_normal((40, 6)), spec)
images, tokens = torch.randn(2, 3, 8, 8), torch.zeros(2, 6, dtype=torch.long)
folder = Path(tempfile.mkdtemp())
torch.save(vit.state_dict(), folder / "vit.pt")
weightscope.fit(samples).save(folder / "init.safetensors")
result = weightscope.covariance(samples, "*")

def own(module, *, generator=None):
    torch.ones(2).sum()
    return module

calls = {
    "undecorated": partial(weightscope.products.__wrapped__, vit),
    "products": partial(weightscope.products, vit),
    "audit": partial(weightscope.audit, vit, "mimetic_mlp"),
    "attention_maps": partial(weightscope.attention_maps, vit, images),
    "state_space_maps": partial(state_space_maps, mamba, tokens),
    "covariance": partial(weightscope.covariance, samples, "*"),
    "covariance within": partial(weightscope.covariance, mixer),
    "fit": partial(weightscope.fit, samples),
    "fit_network": partial(weightscope.fit_network, vit, "identity_product"),
    "inspect": partial(weightscope.inspect, folder / "vit.pt"),
    "import": partial(weightscope.Population.of, [folder / "vit.pt"], folder / "zoo.pop", progress=False),
    "load_init": partial(weightscope.load_init, folder / "init.safetensors"),
    "figure": partial(plots.covariance_map, result.matrix, result.blocks),
    "mimetic_attention": partial(init.mimetic_attention_, vit),
    "impulse_attention": partial(init.impulse_attention_, vit),
    "conv_covariance": partial(init.conv_covariance_, mixer, preset="figure-a4"),
    "mimetic_ssm": partial(init.mimetic_ssm_, mamba),
    "own": partial(init.get(own), vit),
}
print(json.dumps({name: watched(call) for name, call in calls.items()}))
"""


@pytest.fixture(scope="module")
def found():
    settings = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", CALLS], env=settings, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_public_calls_use_one_thread_and_give_the_others_back(found):
    without = found.pop("undecorated")
    assert 2 in without["inside"]  # so that this test can fail
    wrong = {name: numbers for name, numbers in found.items() if numbers["after"] != [2] or 2 in numbers["inside"]}
    assert not wrong


LATER = """
from weightscope._util.threads import one_thread
from threadpoolctl import threadpool_info
import numpy as np
with one_thread():
    import scipy.linalg, torch
    with one_thread():
        print(torch.get_num_threads(), *{library["num_threads"] for library in threadpool_info()})
"""


@pytest.mark.slow
def test_libraries_imported_within_a_block_are_limited():
    settings = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    found = subprocess.check_output([sys.executable, "-c", LATER], env=settings | {"OMP_NUM_THREADS": "3"}, text=True)
    assert found.split() == ["1", "1"]


FIRST = """
import sys
import torch
from threadpoolctl import threadpool_info
from weightscope import init
from weightscope.networks import ViT

def profile(frame, event, argument):
    owner = str(frame.f_globals.get("__name__"))
    if event == "call" and owner.startswith("scipy") and frame.f_code.co_name in ("eigh", "_minimize_lbfgsb"):
        print(*{library["num_threads"] for library in threadpool_info()})

vit = ViT(image_size=8, patch_size=2, width=384, depth=1, heads=6, num_classes=3)
sys.setprofile(profile)
init.get(sys.argv[1])(vit)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimetic_attention", "impulse_attention"])
def test_scipy_that_an_initialiser_imports_is_limited(name):
    settings = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    command = [sys.executable, "-c", FIRST, name]
    found = subprocess.check_output(command, env=settings | {"OMP_NUM_THREADS": "3"}, text=True)
    assert set(found.split()) == {"1"}


def test_a_block_takes_less_than_a_tenth_of_a_millisecond_when_nested():
    with one_thread():
        begun = time.process_time()
        for _ in range(1000):
            with one_thread():
                pass
        assert time.process_time() - begun < 0.1
