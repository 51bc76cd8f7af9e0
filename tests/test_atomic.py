"""Files that exist only when complete, and recipes as TOML text."""

from pathlib import Path

import pytest

from weightscope._util import atomic
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
    stale = tmp_path / ".00000.h5.weightscope-7-0123456789abcdef.tmp"
    (tmp_path / "notes.tmp").write_bytes(b"mine")
    with atomic.replacing(tmp_path / "f") as stream:
        stream.write(b"whole")
        stale.write_bytes(b"half")
        assert atomic.sweep(tmp_path) == [stale]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "notes.tmp"]
    assert (tmp_path / "f").read_bytes() == b"whole"


def test_every_writer_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    """Of any file in the folder, and nothing but weightscope's own temporary files."""
    stale = tmp_path / ".figure.png.weightscope-7-0123456789abcdef.tmp"
    spared = {
        tmp_path / name for name in (".notes.tmp", "figure.tmp", ".x.0123456789abcdef.tmp", ".x.weightscope-7-0.tmp")
    }
    for file in (stale, *spared):
        file.write_bytes(b"half")
    atomic.write(tmp_path / "other.json", b"{}")
    assert set(tmp_path.iterdir()) == {*spared, tmp_path / "other.json"}


def test_whether_one_may_write_is_known_beforehand(tmp_path: Path) -> None:
    atomic.check_writable(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightscopeError, match=r"cannot write /proc/f: .*name another place"):
        atomic.check_writable("/proc/f")


def test_writing_where_one_may_not_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WeightscopeError, match=r"cannot write .*none/f: No such file or directory"):
        atomic.write(tmp_path / "none/f", b"x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightscopeError, match="cannot make the folder"):
        atomic.make_folder(tmp_path / "file/folder")
