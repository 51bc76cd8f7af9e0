"""Files of `torch.save`, and pickles of arrays: of what they name, only what builds tensors and arrays is called.

Objects of other classes, such as a path or the arguments of a script beside the weights, become inert.
"""

import pickle
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import MAGIC_NUMBER

from weightscope.checkpoint.tensors import Store, open_mapping
from weightscope.errors import DataError

_BUILDERS = {
    *("torch Size", "torch device", "torch.serialization _get_layout", "torch.nn.parameter Parameter"),
    *("torch per_tensor_affine", "torch per_channel_affine", "collections OrderedDict", "collections Counter"),
    *("torch.storage TypedStorage", "torch.storage UntypedStorage"),
    *("numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy._core.numeric _frombuffer"),
    "_codecs encode",  # the bytes of arrays in old pickles
    *(f"torch.distributed.checkpoint.metadata {name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(f"torch.distributed.checkpoint.metadata {kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")),
    *(f"torch.distributed.checkpoint.metadata {name}" for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
}


class _Inert:
    """An object of a class that is not imported: it takes what a pickle gives it, and does nothing."""

    def __new__(cls, *arguments: Any, **options: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...


def _plain_tensor(build: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor with attributes or of a class of its own, without them: `torch._tensor._rebuild_from_type_v2`."""
    return build(*arguments)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # before NumPy 2
        if name == "_rebuild_from_type_v2":
            return _plain_tensor
        # A wrapper, such as a quantised tensor of torchao, has its numbers in its state, which only its class reads.
        rebuilds = module == "torch._utils" and name.startswith("_rebuild_") and "wrapper" not in name
        rebuilds &= name.isidentifier()  # a name with dots reaches what a function has: `f.__builtins__`
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if rebuilds or dtype or f"{module} {name}" in _BUILDERS:
            return super().find_class(module, name)
        return type(f"{module}.{name}", (_Inert,), {})


class _Pickle(types.ModuleType):
    """The module that torch.load unpickles with."""

    Unpickler = _Unpickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def unpickled(path: Path) -> Any:
    """The object in a file of pickle; nothing of it runs."""
    with path.open("rb") as file:
        return _Unpickler(file, encoding="latin1").load()  # Python 2's arrays


def _tensors(value: Any) -> Any:
    """A dictionary with tensors in place of its arrays of numbers."""
    if isinstance(value, dict):
        return {name: _tensors(item) for name, item in value.items()}
    return torch.tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" else value


def open_torch(path: Path, where: str, key: str | None = None) -> Store:
    """The tensors of a file of `torch.save`, or the arrays of a pickle; `key` names the dictionary of weights in it."""
    try:
        archive = zipfile.is_zipfile(path)
        program = archive and any(name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist())
        with warnings.catch_warnings(action="ignore"):  # of old kinds of tensors, which are left out
            value: Any = None if archive else _tensors(unpickled(path))
            if not program and (archive or (isinstance(value, int) and value == MAGIC_NUMBER)):
                value = torch.load(path, "cpu", _Pickle("pickle"), weights_only=False, mmap=archive)
    except Exception as error:  # torch.load raises what its readers happen to raise
        why = " ".join(str(error).split()).partition(". ")[0][:200]  # without what torch advises
        raise DataError(f"{where}: it is truncated, damaged or not a file of torch.save: {why}") from error
    if program:
        raise DataError(f"{where}: TorchScript programs are not read; save its state_dict() with safetensors")
    if isinstance(value, _Inert):
        raise DataError(
            f"{where}: expected a dictionary of tensors, found an object of {type(value).__name__}, whose code is not "
            "run; save model.state_dict() with safetensors.torch.save_file and read that"
        )
    return open_mapping(value, where, key)


def check_records(path: Path) -> bool:
    """Compare every record of a file's zip archive with its CRC-32; whether all of them have one."""
    with zipfile.ZipFile(path) as archive:
        if any(info.file_size and not info.CRC for info in archive.infolist()):
            return False  # torch.serialization.set_crc32_options(False)
        if (bad := archive.testzip()) is not None:
            raise DataError(f"{path}: checksum mismatch of its record {bad}: CRC-32; download it again")
    return True
