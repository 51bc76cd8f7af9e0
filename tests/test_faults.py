"""The table of faults in faults.md is numbered without gaps, and its tests exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "tests/faults.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if re.match(r"\| \d", line)]
TEST = re.compile(r"`(tests/test_\w+\.py)::(test_\w+)`")


@functools.cache
def defined(file: str) -> frozenset[str]:
    """The names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def absent(row: str) -> list[str]:
    """The tests of a row that do not exist."""
    return [f"{file}::{name}" for file, name in TEST.findall(row) if name not in defined(file)]


def test_rows_are_numbered_without_gaps():
    assert len(ROWS) >= 60
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, len(ROWS) + 1))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_each_fault_has_an_expectation_and_tests_that_exist(row):
    _, _, fault, expected, tests, _ = row.split("|")
    assert fault.strip()
    assert expected.strip()
    assert TEST.sub("", tests).replace(",", "").strip() == "", "tests are written as `tests/test_x.py::test_name`"
    assert TEST.findall(tests)
    assert absent(row) == []


def test_a_test_that_does_not_exist_is_found():
    name = "test_rows_are_numbered_without_gaps"
    assert absent(f"`tests/test_faults.py::{name}`, `tests/test_faults.py::{name}_x`") == [
        f"tests/test_faults.py::{name}_x"
    ]
