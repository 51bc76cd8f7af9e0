"""Files that exist only when complete, and recipes as TOML text."""

import tomllib
from pathlib import Path

import fake_training as fake
import pytest

from weightscope._util import atomic, toml
from weightscope.errors import WeightscopeError


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"old")

    def fail() -> None:
        with atomic.replacing(file) as stream:
            stream.write(b"half")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_sweeping_spares_what_is_being_written(tmp_path: Path) -> None:
    stale = tmp_path / ".00000.h5.0123456789abcdef.tmp"
    stale.write_bytes(b"half")
    (tmp_path / "notes.tmp").write_bytes(b"mine")
    with atomic.replacing(tmp_path / "f") as stream:
        stream.write(b"whole")
        assert atomic.sweep(tmp_path) == [stale]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "notes.tmp"]
    assert (tmp_path / "f").read_bytes() == b"whole"


def test_writing_where_one_may_not_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WeightscopeError, match=r"cannot write .*none/f: No such file or directory"):
        atomic.write(tmp_path / "none/f", b"x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightscopeError, match="cannot make the folder"):
        atomic.make_folder(tmp_path / "file/folder")


def test_toml_reads_back(tmp_path: Path) -> None:
    for values in (
        fake.recipe().to_dict(),
        fake.recipe(init=[{"name": "a", "v": [1e-07, 0.25]}, {"name": "b", "x": {"y": '\x7f"\\\n\u00e9'}}]).to_dict(),
        fake.recipe(init=[{"name": "a", "v": 1e22}, {"name": "b"}], training__learning_rate=[0.1, 1.0]).to_dict(),
        fake.recipe(training__weight_decay={"low": 1e-5, "high": 1.0}).to_dict(),
        {"odd key": 1, "": True, "tables": {"a.b": {"c": []}, "empty": {}}},
    ):
        assert tomllib.loads(toml.dumps(values)) == values
    with pytest.raises(TypeError, match="NoneType"):
        toml.dumps({"a": None})
