"""The numeric tests as on other machines, and `torch.compile` with its code for a CPU; `make torture` runs it.

python -m pytest tests/torture/other_machines.py
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_gpu import small
from tiny import NETWORKS

from weightscope.data import load
from weightscope.training import spec_of
from weightscope.training.engine import TileRun

TESTS = Path(__file__).parents[1]
MACHINES = {
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL as on any processor": {"MKL_CBWR": "COMPATIBLE"},
    "MKL of its own choice, aligned or not": {"MKL_CBWR": "AUTO,STRICT"},
    "OpenBLAS for Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "OpenBLAS for Prescott": {"OPENBLAS_CORETYPE": "Prescott"},
    "kernels without AVX-512": {"CC": "cc -mno-avx512f"},
    "kernels without AVX": {"CC": "cc -mno-avx"},
}
PLAINEST = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Prescott"}
NUMERIC = ("audit", "batched", "closed_form", "compiled", "covariance", "distillation", "exchangeable")
NUMERIC += ("gain", "group_means", "init", "kernel_check", "kronecker", "moments", "networks", "permutations")
NUMERIC += ("products", "sequences", "shrinkage", "stacked", "state_space", "structures", "train", "within")


def run_tests(files: list[str], machine: dict[str, str], *options: str) -> None:
    """Run test files in a process with the environment of another machine; asserts that all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, env=os.environ | machine)
    lines = done.stdout.splitlines()
    print(lines[-1] if lines else done.stderr)
    assert done.returncode == 0, "\n".join(lines[-60:])


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_on_other_machines(machine: str) -> None:
    files = [str(file) for file in sorted(TESTS.glob("test_*.py")) if file.stem[5:].startswith(NUMERIC)]
    run_tests(files, MACHINES[machine])


@pytest.mark.parametrize("name", NETWORKS)
def test_code_that_torch_generates_trains_as_torchs_operations(name: str) -> None:
    """On a GPU the same step becomes Triton's code and a CUDA graph."""
    # torch 2.13 fails with KeyError when it makes code for CPUs of mixed labels
    data, plan = load("digits", train=48, test=20), small(name).replace({"training.mixup": 0.0})
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        plain, compiled = (
            TileRun(plan, 0, data, torch.device("cpu"), kernels).train() for kernels in ("torch", "inductor")
        )
    spec = spec_of(plan)
    for tensor, values in spec.unpack(plain.weights).items():
        if not tensor.endswith("qkv.bias"):  # a bias of keys has no effect, and AdamW scales its rounding errors up
            np.testing.assert_allclose(spec.unpack(compiled.weights)[tensor], values, rtol=1e-3, atol=1e-4)
