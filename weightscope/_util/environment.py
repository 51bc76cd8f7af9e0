"""Versions, machine and device, stored with every result."""

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from weightscope._version import __version__

_PACKAGES = ("torch", "numpy", "scipy", "h5py", "joblib", "scikit-learn")


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions, machine and torch device as plain JSON types; torch is imported for a GPU only."""
    packages = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    found: dict[str, Any] = {
        "weightscope": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "packages": packages,
    }
    if device is not None:
        found["device"] = device
    if device is not None and device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def usable_cores() -> int:
    """The number of cores that this process may use, by its affinity and its container's quota."""
    import joblib

    return int(joblib.cpu_count())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs and MIG slices that this process may use, each as a value of CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        found = [name.strip() for name in given.split(",")]
    else:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):  # as on AMD's GPUs
            listed = ""
        # slices are listed below their GPU, which then cannot be used as a whole
        whole = re.sub(r"(?m)^GPU .*\n(?=\s+MIG )", "", listed)
        found = re.findall(r"\(UUID: (\S+)\)", whole)
    if any(name.startswith("MIG-") for name in found):  # of which CUDA counts one only
        return tuple(found)
    number = torch.cuda.device_count()
    return tuple(found[:number] if given is not None else map(str, range(number)))


def available_memory() -> int:
    """Bytes that can still be allocated on this machine, and in this container."""
    machine, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if machine.is_file():
        lines = dict(line.split(":") for line in machine.read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = group / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, int(most) - int((group / "memory.current").read_text()) + int(held["inactive_file"]))
    return free


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or os.uname().machine
