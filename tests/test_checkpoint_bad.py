"""Files that lie: each is refused with one line, before anything of it is believed, and nothing runs."""

import io
import json
import os
import pickle
import struct
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from weightscope import Checkpoint
from weightscope.errors import DataError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def packed(header, data=bytes(8), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(**change):
    return packed({"a": F32 | change})


SOUND = save({"a": torch.ones(4), "b": torch.ones(3, 3)})
HEADERS = {
    "empty": (b"", "only 0 bytes"),
    "truncated": (SOUND[:-5], "5 bytes are missing: it is truncated"),
    "trailing bytes": (SOUND + bytes(3), "3 bytes are left over"),
    "header of 2^62 bytes": (packed({"a": F32}, length=2**62), "claims 4611686018427387904 bytes"),
    "no JSON": (packed(b"hello world"), "not valid JSON"),
    "a list": (packed([1, 2]), "expected a JSON object, found list"),
    "400 levels": (packed(b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}"), "expected dtype, shape"),
    "100,000 levels": (packed(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "duplicate key": (packed(b'{"a": 1, "a": 2}'), "'a' is duplicated"),
    "duplicate field": (
        packed(b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}'),
        "'shape' is duplicated",
    ),
    "overlap": (packed({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12)), "overlaps"),
    "hole": (packed({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20)), "leaves a gap"),
    "negative shape": (entry(shape=[-2]), "shape of integers >= 0"),
    "true as shape": (entry(shape=[True, 2]), "shape of integers >= 0"),
    "huge shape": (entry(shape=[2**63, 2]), "shape of integers >= 0"),
    "overflowing shape": (entry(shape=[2**40, 2**40]), "overflows"),
    "empty and overflowing": (packed({"a": F32 | {"shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}), "overflows"),
    "65 dimensions": (entry(shape=[1] * 65), "shape of integers"),
    "wrong size": (entry(shape=[3]), "takes 12 bytes"),
    "negative offset": (entry(data_offsets=[-8, 0]), "two offsets >= 0"),
    "reversed offsets": (entry(data_offsets=[8, 0]), "takes 8 bytes"),
    "offset beyond the file": (entry(data_offsets=[2**60, 2**60 + 8]), "leaves a gap"),
    "unknown dtype": (entry(dtype="F33"), "unknown dtype 'F33'"),
    "half a byte": (
        packed({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)),
        r"takes 1\.5 bytes",
    ),
    "missing field": (packed({"a": {"dtype": "F32", "shape": [2]}}), "expected dtype, shape"),
    "metadata of numbers": (packed({"__metadata__": {"a": 3}, "a": F32}), "__metadata__"),
    "number of 10,000 digits": (packed(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "name that rewrites the terminal": (packed({"a\x1b[2Jb": F32}), r"not printable: 'a\\x1b"),
    "half a character": (packed(b'{"\\ud800": ' + json.dumps(F32).encode() + b"}"), "not printable"),
    "name of nothing": (packed({"": F32}), "empty, too long or not printable"),
    "number that Python does not read": (packed({"layer." + "9" * 5000: F32}), "too long"),
}


def test_empty_tensors_leave_no_gaps_and_names_never_become_paths(tmp_path):
    raw = packed({"../../etc/passwd": F32, "b": F32 | {"shape": [0, 5], "data_offsets": [8, 8]}})
    (tmp_path / "m.safetensors").write_bytes(raw)
    assert Checkpoint(tmp_path / "m.safetensors")["b"].shape == (0, 5)
    assert Checkpoint(tmp_path / "m.safetensors")["../../etc/passwd"].tolist() == [0, 0]


def test_a_file_that_shrinks_is_an_error_and_one_that_is_replaced_is_read_to_its_end(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(SOUND)
    checkpoint = Checkpoint(path)
    path.with_name("new").write_bytes(save({"z": torch.zeros(100)}))
    path.with_name("old").hardlink_to(path)
    path.with_name("new").rename(path)
    assert checkpoint["b"].tolist() == torch.ones(3, 3).tolist()
    os.truncate(path.with_name("old"), len(SOUND) - 20)
    with pytest.raises(DataError, match="truncated"):
        checkpoint["b"]


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for name in ("m", "zero"):
        with pytest.raises(DataError, match=r"found a (pipe|device)"):
            Checkpoint(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    "shard",
    ["../../etc/passwd", "../m.safetensors", "/etc/passwd", "a/m.safetensors", "a\\m.safetensors", "..", ".", "", 3,
     None, ".m.safetensors", "m.safetensors\n", "c:m.safetensors", "m.bin", ["m.safetensors"]],
)  # fmt: skip
def test_an_index_names_plain_files_only(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(DataError, match="expected the plain name") as error:
        Checkpoint(tmp_path)
    assert "\n" not in str(error.value)


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
BESIDE = {
    "not JSON": (INDEX, b"{", "not valid JSON"),
    "no map": (INDEX, b"{}", "expected a `weight_map`"),
    "missing shard": (INDEX, b'{"weight_map": {"a": "x.safetensors"}}', "x.safetensors: cannot be read"),
    "missing tensor": (INDEX, b'{"weight_map": {"z": "m.safetensors"}}', "'z' is mapped to m.safetensors"),
    "twice": (INDEX, b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "is duplicated"),
    "config: not JSON": (CONFIG, b"{", r"config\.json.*not valid JSON"),
    "config: twice": (CONFIG, b'{"a": 1, "a": 2}', r"config\.json.*is duplicated"),
}


@pytest.mark.parametrize("row", BESIDE)
def test_an_index_and_a_config_are_never_trusted(tmp_path, row):
    name, raw, message = BESIDE[row]
    (tmp_path / "m.safetensors").write_bytes(SOUND)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=message):
        Checkpoint(tmp_path)


def test_tensors_that_the_index_forgets_are_named(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(SOUND)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m.safetensors"}}')
    assert Checkpoint(tmp_path).skipped == {"b": "in m.safetensors, but the index does not map it there"}


EXECUTED = Path(tempfile.gettempdir(), f"weightscope-was-executed-{os.getpid()}")  # a file that appears if code runs


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {EXECUTED}",)


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def rezipped(change, compression=zipfile.ZIP_STORED):
    """A sound archive with its records changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(3)}))) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in change(records).items():
            archive.writestr(name, data)
    return out.getvalue()


def with_pickle(data):
    return rezipped(lambda r: {n: data if n.endswith("data.pkl") else raw for n, raw in r.items()})


def view(shape, stride, offset=0, count=3):
    """A sound archive whose pickle describes this view of a storage of `count` floats."""

    def integers(values):
        return b"(" + b"".join(b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in values) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    storage += b"\x8a\x09" + count.to_bytes(9, "little", signed=True) + b"tQ"
    offset = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True)
    body = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + integers(shape) + integers(stride) + b"\x89}tR"
    return with_pickle(b"\x80\x02}X\x01\0\0\0a" + body + b"s.")


MODULE = nn.Sequential(nn.Linear(2, 2))
PICKLES = {
    "os.system": (saved({"a": Evil()}), r"needs posix\.system, which is not run.*safetensors"),
    "os.system, old layout": (saved({"a": Evil()}, _use_new_zipfile_serialization=False), r"needs posix\.system"),
    "os.system, protocol 4": (saved({"a": Evil()}, pickle_protocol=4), r"needs posix\.system"),
    "os.system, bare pickle": (pickle.dumps(Evil()), "found neither"),
    "eval": (with_pickle(b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R."), r"needs builtins\.eval"),
    "a name of two lines": (with_pickle(b"\x80\x04X\x03\0\0\0a\nbX\x01\0\0\0c\x93."), r"needs a\\nb\.c"),
    "a dotted name": (with_pickle(b"\x80\x04X\x05\0\0\0torchX\x10\0\0\0serialization.os\x93."), "serialization"),
    "whole module": (saved(MODULE), r"needs torch\.nn\.modules\.container\.Sequential.*whole pickled module"),
    "whole module, old layout": (saved(MODULE, _use_new_zipfile_serialization=False), r"Sequential|no storage"),
    "text": (b"hello world", "found neither a zip archive nor its pickles"),
    "empty": (b"", "found neither"),
    "list": (saved([torch.ones(2)]), "expected a dictionary of tensors, found list"),
    "one tensor": (saved(torch.ones(2)), "expected a dictionary of tensors, found one tensor"),
    "another zip": (rezipped(lambda r: {"a/b": b"1"}), "expected one data.pkl, found 0"),
    "TorchScript": (rezipped(lambda r: r | {"archive/constants.pkl": b""}), "TorchScript"),
    "compressed": (rezipped(lambda r: r, zipfile.ZIP_DEFLATED), "is compressed"),
    "big endian": (rezipped(lambda r: r | {"archive/byteorder": b"big"}), "little-endian"),
    "missing storage": (rezipped(lambda r: {n: d for n, d in r.items() if "/data/" not in n}), "found none"),
    "short storage": (rezipped(lambda r: r | {"archive/data/0": bytes(8)}), "found 8 bytes"),
    "truncated": (saved({"a": torch.ones(300)})[:-400], "damaged zip"),
    "truncated, old layout": (saved({"a": torch.ones(9)}, _use_new_zipfile_serialization=False)[:-4], "truncated"),
    "longer, old layout": (saved({"a": torch.ones(9)}, _use_new_zipfile_serialization=False) + b"0", "left over"),
    "outside the storage": (view((4,), (1,)), "outside its storage"),
    "stride outside": (view((2,), (3,)), "outside its storage"),
    "offset outside": (view((1,), (1,), offset=3), "outside its storage"),
    "negative offset": (view((1,), (1,), offset=-1), "builds a tensor of shape"),
    "negative stride": (view((2,), (-1,), offset=2), "builds a tensor of shape"),
    "huge shape": (view((2**62, 0), (0, 0)), "outside its storage"),
    "huge storage": (view((3,), (1,), count=2**60), "found 12 bytes"),
    "negative storage": (view((3,), (1,), count=-1), "not a storage of numbers"),
    "no end": (with_pickle(b"\x80\x02}"), "pickle"),
    "unknown instruction": (with_pickle(b"\x80\x02\xff."), "pickle"),
    "tuple as key": (with_pickle(b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s."), "unusual keys"),
    "tuples that hold each other": (
        with_pickle(b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"K\x01s."),
        "unusual keys",
    ),
    "a call that allocates": (with_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\xe8vH\x17\x85R."), "bytearray"),
    "100,000 levels": (with_pickle(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."), "found list"),
    "claimed length": (with_pickle(b"\x80\x02\x8d" + struct.pack("<Q", 2**62) + b"a."), "pickle"),
    "huge memo": (with_pickle(b"\x80\x02}r\xff\xff\xff\xff0."), "pickle"),
}  # fmt: skip


REFUSED = {"m.safetensors": HEADERS, "m.pt": PICKLES}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_a_file_that_lies_is_refused_with_one_line(tmp_path, name, row):
    """A header must account for every byte; a pickle is followed as data, and nothing of it runs."""
    raw, message = REFUSED[name][row]
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message) as error:
        Checkpoint(path)
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 600
    assert not EXECUTED.exists()


def test_a_tensor_larger_than_its_storage_is_skipped(tmp_path):
    (tmp_path / "m.pt").write_bytes(view((2**40,), (0,)))
    assert "expanded" in Checkpoint(tmp_path / "m.pt").skipped["a"]


def test_millions_of_values_in_a_header_are_refused_unparsed(tmp_path):
    line = b'"layer":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    (tmp_path / "m.safetensors").write_bytes(packed(b"{" + line * 10**6 + b"}"))
    began = time.process_time()
    with pytest.raises(DataError, match=r"its header has [78],\d{3},\d{3} values, more than 3,000,000"):
        Checkpoint(tmp_path / "m.safetensors")
    assert time.process_time() - began < 5
