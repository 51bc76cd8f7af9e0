"""The programs of this project, run in a test: the command line, and the scripts of studies and figures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from weightscope.cli import main

ROOT = Path(__file__).parent.parent


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
