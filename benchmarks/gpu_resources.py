"""What the kernels for GPUs take of a multiprocessor: registers, spilled bytes, shared memory, resident warps.

    python benchmarks/gpu_resources.py --json benchmarks/results/gpu_resources.json

The kernels are compiled for a GPU that need not be there, for the networks of `population_gpu.py`. No time is measured;
but a kernel that spills, or of which only a few warps fit, is slow on every device. Needs Triton for NVIDIA.
"""

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from reporting import write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from weightscope._util.environment import environment
from weightscope.recipe import AugmentConfig
from weightscope.training.kernels import triton as triton_kernels

REGISTERS, SHARED, WARPS = 65536, 227 * 1024, 64  # of a multiprocessor of an H100
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1", torch.uint8: "*u8", torch.int64: "*i64"}
OPTIONS = {"num_warps", "num_stages", "maxnreg"}
# networks, channels, hidden units (None for a ConvMixer), side of the feature map, batch, filter
CASES = {
    "convnext-16/4": (256, 16, 32, 16, 64, 7),
    "vit-32/4": (256, 32, 128, 8, 64, None),
    "convmixer-32/4": (256, 32, None, 16, 64, 7),
    "convmixer-256/8": (1, 256, None, 16, 512, 9),
}


def compiled(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any], architecture: int) -> Any:
    """A kernel as Triton compiles it for these arguments on a device of compute capability `architecture` / 10."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (name, value) in enumerate(arguments.items()):
        if kernel.params[i].is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel: Any, warps: int) -> dict[str, Any]:
    """What a compiled kernel takes, as NVIDIA's `cuobjdump` reads it from the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    shared = kernel.metadata.shared
    programs = min(REGISTERS // (registers * 32 * warps), SHARED // max(shared, 1), WARPS // warps)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "warps": warps,
        "resident_warps": programs * warps,
        "loop_instructions": longest_loop(code),
        "tensor_core_instructions": len(re.findall(r"\bHG?MMA", code)),
    }


def longest_loop(code: str) -> int:
    """The number of instructions in the longest stretch that a branch goes back over; 0 without a loop."""
    numbered = re.findall(r"/\*([0-9a-f]{4,})\*/ +(\S.*?);", code)
    order = {int(address, 16): k for k, (address, _) in enumerate(numbered)}
    longest = 0
    for address, text in numbered:
        if target := re.search(r"\bBRA(?:\.\S+)? .*?0x([0-9a-f]+)", text):
            start, end = int(target[1], 16), int(address, 16)
            if start < end:  # not the branch to itself that ends every program
                longest = max(longest, order[end] - order[start] + 1)
    return longest


class Launches:
    """Takes the place of launching: compiles and keeps what each kernel takes."""

    def __init__(self, architecture: int) -> None:
        self.architecture, self.found = architecture, {}

    def __enter__(self) -> "Launches":
        self.launch = JITFunction.__getitem__
        JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: self._take(kernel, args, kwargs)
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.__getitem__ = self.launch

    def _take(self, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {"num_warps": 4} | {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        arguments = {name: given[name] for name in kernel.arg_names}
        name = kernel.__name__.removeprefix("_")
        self.found[name] = resources(compiled(kernel, arguments, options, self.architecture), options["num_warps"])


def launch_all(case: str, dtype: torch.dtype) -> None:
    """Every kernel that a step of this network launches, on tensors without values."""
    networks, channels, hidden, side, batch, k = CASES[case]
    x = torch.empty(networks * channels, side, side, batch, dtype=dtype)
    rows = x.view(networks, channels, -1)
    pair = torch.empty(networks, channels), torch.empty(networks, channels)
    if k is not None:
        filters = torch.empty(networks * channels, k, k)
        triton_kernels.convolve(x, filters, filters, 1)
        triton_kernels.convolve_backward(x, filters, x, 1, x)
    if hidden is None:
        triton_kernels.gelu_norm(rows, *pair, 1e-5, rows)
        triton_kernels.gelu_norm_backward(rows, *pair, pair[0], rows)
    else:
        first, bias = torch.empty(networks, hidden, channels), torch.empty(networks, hidden)
        weights = [*pair, first, bias, first.transpose(1, 2).contiguous(), pair[0]]
        triton_kernels.mlp(rows, weights, 1e-6, rows)
        triton_kernels.mlp_backward(rows, weights, rows, 1e-6)
        triton_kernels.norm(rows, *pair, 1e-6)
        triton_kernels.norm_backward(rows, pair[0], rows, 1e-6)
    images, index, draws = torch.empty(50, 3, 32, 32).byte(), torch.empty(networks, batch).long(), torch.empty(1, 1, 3)
    moments = torch.empty(3), torch.empty(3)
    triton_kernels.load_images(images, index, draws, None, moments, AugmentConfig(crop=4, flip=True), dtype)
    entries = torch.empty(networks, 1000)
    rates = torch.empty(networks)
    triton_kernels.adamw(
        entries, entries, (entries, entries), entries[0] > 0, (rates, rates), rates, rates, (0.9, 0.99), 1e-8
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", action="append", choices=CASES, help="only this network; repeat it")
    parser.add_argument("--precision", action="append", choices=["float32", "bfloat16"], help="only this; repeat it")
    parser.add_argument("--architecture", type=int, default=90, help="ten times the compute capability [90, an H100]")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set, so that nothing is compiled; unset it")
    rows = []
    for case in options.case or CASES:
        for precision in options.precision or ("bfloat16", "float32"):
            with Launches(options.architecture) as launches:
                launch_all(case, getattr(torch, precision))
            for kernel, found in launches.found.items():
                rows.append({"row": f"{case}, {precision}: {kernel}", **found})
                numbers = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in found.items())
                print(f"{rows[-1]['row']:<50} {numbers}", flush=True)
    write(options.json, rows, **environment("cpu"), triton=triton.__version__, architecture=options.architecture)


if __name__ == "__main__":
    main()
