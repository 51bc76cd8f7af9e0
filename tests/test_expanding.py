"""Small inputs that expand: each command answers soon, in one line and in little memory, or reads only what it uses."""

import os

import pytest
from expanding import KINDS, outcome, preload


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_input_that_expands(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if package := {"table": "pyarrow", "onnx_sizes": "onnx"}.get(kind):
        pytest.importorskip(package)
    preload()
    for seed in range(int(os.environ.get("CASES", "1"))):
        verdict = outcome(seed, tmp_path / str(seed), kind)
        assert not verdict.startswith("WRONG"), verdict
