"""Files of other formats, recognised by their content: ONNX, CTranslate2."""

import re
from collections.abc import Iterator

from weightscope.checkpoint.files import LocalFile, read_bytes
from weightscope.errors import DataError

_MAX_FIELDS = 100_000
# Fields of ONNX's ModelProto and their wire types (0: integer, 2: bytes), from onnx.proto.
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GRAPH = 7


def is_onnx(file: LocalFile) -> bool:
    """Whether a file is an ONNX model: the fields of a ModelProto up to its last byte, a graph among them."""
    numbers = []
    for number, wire, stop in _fields(file):
        if _MODEL_FIELDS.get(number) != wire or stop > file.size:
            return False
        numbers.append(number)
    return numbers.count(_GRAPH) == 1


def refuse_ctranslate2(file: LocalFile) -> None:
    """Raise DataError, naming what to read instead, if a file is a `model.bin` of CTranslate2.

    Such a file begins with a version (uint32) and the name of a model specification, such as `WhisperSpec`.
    """
    start = read_bytes(file, 0, min(file.size, 80))
    version, length = int.from_bytes(start[:4], "little"), int.from_bytes(start[4:6], "little")
    name = start[6 : 6 + length]
    if 0 < version < 100 and re.fullmatch(rb"[A-Za-z][A-Za-z0-9]{2,60}\0", name):
        raise DataError(
            f"{file.where}: a CTranslate2 model ({name[:-1].decode()}, version {version}), converted for inference: "
            "its weights are fused and often quantised, and are not read; open the model that it was converted from "
            "(the --model of ct2-transformers-converter or of another ct2-...-converter)"
        )


def _fields(file: LocalFile) -> Iterator[tuple[int, int, int]]:
    """Number, wire type and end of each field of a protobuf message; (0, 0, 0) where it is not one."""
    position = 0
    for _ in range(_MAX_FIELDS):
        if position >= file.size:
            return
        raw = read_bytes(file, position, min(position + 20, file.size))
        tag, used = _varint(raw, 0)
        value, after = _varint(raw, used)
        if not used or not after:
            break
        position += after + (value if tag & 7 == 2 else 0)
        yield tag >> 3, tag & 7, position
    yield 0, 0, 0


def _varint(raw: bytes, start: int) -> tuple[int, int]:
    """The number that starts there, and the position after it; 0 as position if there is none."""
    value = 0
    for i, byte in enumerate(raw[start : start + 10]):
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value, start + i + 1
    return 0, 0
