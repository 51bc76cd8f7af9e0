"""Files that are cut off, damaged or of another kind are refused with one line, and no pickle runs code."""

import io
import os
import pickle
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from weightscope import Checkpoint
from weightscope.errors import DataError


def packed(header):
    return struct.pack("<Q", len(header)) + header + bytes(8)


SOUND = save({"a": torch.ones(4), "b": torch.ones(3, 3)})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
HEADERS = {
    "truncated": (SOUND[:-5], "it is truncated, damaged or not a safetensors file.*not fully covered"),
    "git LFS": (POINTER, "found a pointer file of git LFS; run `git lfs pull`"),
    "no JSON": (packed(b"hello world"), "not a safetensors file.*header"),
    "unknown dtype": (
        packed(b'{"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}'),
        "unknown variant `F33`",
    ),
}


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
BESIDE = {
    "missing shard": (INDEX, b'{"weight_map": {"a": "x.safetensors"}}', "x.safetensors: cannot be read"),
    "missing tensor": (INDEX, b'{"weight_map": {"z": "m.safetensors"}}', "'z' is mapped to m.safetensors"),
    "config: not JSON": (CONFIG, b"{", r"config\.json.*not valid JSON"),
}


@pytest.mark.parametrize("row", BESIDE)
def test_a_damaged_index_or_config_is_named(tmp_path, row):
    name, raw, message = BESIDE[row]
    (tmp_path / "m.safetensors").write_bytes(SOUND)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=message):
        Checkpoint(tmp_path)


EXECUTED = Path(tempfile.gettempdir(), f"weightscope-was-executed-{os.getpid()}")  # a file that appears if code runs


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {EXECUTED}",)


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def torch_script():
    """A sound archive with the record that TorchScript has."""
    out = io.BytesIO(saved({"a": torch.ones(3)}))
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("archive/constants.pkl", b"")
    return out.getvalue()


def attribute_of_a_function():
    """A pickle that asks an allowed function for the dictionary that has `eval`."""
    name = b"_rebuild_tensor_v2.__builtins__.__getitem__"
    code = f"__import__('pathlib').Path({str(EXECUTED)!r}).touch()".encode()
    out = b"\x80\x04\x8c\x0ctorch._utils\x8c" + bytes([len(name)]) + name + b"\x93"
    return out + b"\x8c\x04eval\x85R\x8c" + bytes([len(code)]) + code + b"\x85R."


MODULE = nn.Sequential(nn.Linear(2, 2))
DAMAGED = "truncated, damaged or not a file of torch.save"
PICKLES = {
    "os.system": (saved({"a": Evil()}), "none under a"),
    "os.system, old layout": (saved({"a": Evil()}, _use_new_zipfile_serialization=False), "none under a"),
    "os.system, bare pickle": (pickle.dumps(Evil()), r"an object of posix\.system"),
    "attribute of a function": (attribute_of_a_function(), DAMAGED),
    "whole module": (saved(MODULE), r"an object of torch\.nn\.modules\.container\.Sequential.*save model\.state_dict"),
    "text": (b"hello world", DAMAGED),
    "git LFS": (POINTER, "found a pointer file of git LFS"),
    "list": (saved([torch.ones(2)]), "expected a dictionary of tensors, found list"),
    "TorchScript": (torch_script(), "TorchScript"),
    "truncated": (saved({"a": torch.ones(300)})[:-400], DAMAGED),
    "damaged directory": (saved({"a": torch.ones(300)}).replace(b"PK\x01\x02", b"PK\xff\xff"), DAMAGED),
    "truncated, old layout": (saved({"a": torch.ones(9)}, _use_new_zipfile_serialization=False)[:-4], DAMAGED),
}  # fmt: skip


REFUSED = {"m.safetensors": HEADERS, "m.pt": PICKLES}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_a_damaged_file_is_refused_with_one_line(tmp_path, name, row):
    """A header accounts for every byte; nothing of a pickle runs."""
    raw, message = REFUSED[name][row]
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message) as error:
        Checkpoint(path)
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 600
    assert not EXECUTED.exists()
