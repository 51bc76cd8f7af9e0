"""Compile the kernels in C for this machine on first use, and cache the library.

The compiler is $CC, or else cc, gcc or clang. The name of a cached file is a hash of everything that its code depends
on: compiler, compiler version, flags, processor features, source.
"""

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from weightscope.errors import UsageError

_FOLDER = Path(__file__).parent / "c"
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")
_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler accepts
_TYPES = {"float": ("-DREAL=float",), "double": ("-DREAL=double", "-DDOUBLE=1")}
_OTHERWISE = "or use kernels = 'torch'"


class NotSupported(UsageError):
    """What compiled kernels cannot do here; torch's are used without a warning where the choice is open."""


@lru_cache(maxsize=2)
def library(real: str) -> tuple[ctypes.CDLL, str]:
    """The library for `float` or `double`, compiled if it is not in the cache, and eight hex digits of its build.

    Different builds may round differently.
    """
    command, errors = compiler(), ""
    version = _run([*command, "--version"]).stdout
    texts = [(file.name, file.read_text(encoding="utf-8")) for file in sorted(_FOLDER.glob("*.[ch]"))]
    for machine in _MACHINE:
        full = [*command, *_FLAGS, *machine, *_TYPES[real]]
        identity = hashlib.sha256(repr([full, version, _processor(), texts]).encode()).hexdigest()[:24]
        for folder in (cache_folder, _temporary_folder):
            try:
                return _load_or_compile(folder() / f"kernels-{identity}.so", full), identity[:8]
            except subprocess.CalledProcessError as error:
                errors = error.stderr.strip() or f"exit status {error.returncode}"
                break
            except OSError as error:  # no space, or no executables
                errors = str(error)
    raise UsageError(f"kernels = 'compiled': `{shlex.join(command)}` failed: {errors[-500:]}; {_OTHERWISE}")


def _load_or_compile(file: Path, command: list[str]) -> ctypes.CDLL:
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".kernels-") as there:
            made = Path(there, file.name)
            _run([*command, *map(str, sorted(_FOLDER.glob("*.c"))), "-o", str(made), "-lm"]).check_returncode()
            os.replace(made, file)  # atomic: another process may be writing the same file
    return ctypes.CDLL(str(file))


def compiler() -> list[str]:
    """The command of the C compiler."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise UsageError(f"kernels = 'compiled': CC = {os.environ['CC']!r}: {error}; {_OTHERWISE}") from error
    if given:
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NotSupported(f"kernels = 'compiled': found no C compiler ($CC, cc, gcc, clang); install one, {_OTHERWISE}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"kernels = 'compiled': cannot run `{command[0]}`: {error}; {_OTHERWISE}") from error


def cache_folder() -> Path:
    """The cache folder; a temporary folder of this process if there can be none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "weightscope"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home directory
        return _temporary_folder()
    return folder


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="weightscope-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _processor() -> str:
    """The processor's features, which differ between machines that share a cache folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), " ".join(os.uname()[3:]))
