"""The programs of this project, run in a test: the command line, and the scripts of studies and figures."""

import importlib.util
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from weightscope.cli import main
from weightscope.errors import DataError
from weightscope.fits.artifact import digest

ROOT = Path(__file__).parent.parent
# Processes of their own that start with everything imported, in milliseconds; a fresh Python takes seconds.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "fake_training",
        "sklearn.datasets",
        "weightscope.benchmarking",
        "weightscope.plots",
        "weightscope.training.collection",
    ]
)


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code of a `weightscope` command, and what it wrote to stdout and stderr."""
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def script(path: str) -> ModuleType:
    """A script as a module, by its path in the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewritten(path: Path, header: Callable[[Any], Any]) -> Path:
    """An artifact with its header changed, in place or by returning another, and a digest that fits."""
    with safe_open(path, "numpy") as file:
        values = json.loads(file.metadata()["weightscope"])
    text = json.dumps(header(values) or values)
    stored = load_file(path)
    save_file(stored, path, metadata={"weightscope": text, "sha256": digest(text, stored)})
    return path


def refused(load: Callable[[Path], Any], path: Path, message: str) -> None:
    """A damaged file is a DataError of one line that begins with its path."""
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
