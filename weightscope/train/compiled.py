"""What a training step on a CPU spends its time on, in C: depthwise convolutions, and LayerNorm with the MLP after it.

`kernels.c` is compiled for this machine when it is first needed, by the C compiler that is there ($CC, cc, gcc or
clang), and kept in a cache folder. One pass over memory takes the place of the dozen that separate operations make:
of a block's MLP only the input is kept for the backward pass, and all that lies between is computed again in the
cache. The functions below take float32 and float64, and are differentiable once.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope.errors import UsageError

Pair = tuple[Tensor, Tensor]  # weight and bias

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fPIC", "-shared")
_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_TYPES = {torch.float32: ("-DREAL=float",), torch.float64: ("-DREAL=double", "-DDOUBLE=1")}


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, *, dilation: int = 1) -> Tensor:
    """As `weightscope.train.depthwise.depthwise_conv2d`: x (C, H, W, B), weight (C, k, k), bias (C,).

    Raises:
        UsageError: if there is no C compiler.
    """
    return _DepthwiseConv2d.apply(x, weight, bias, dilation)


def norm_mlp(x: Tensor, norm: Pair, first: Pair, second: Pair, eps: float) -> Tensor:
    """`W2 gelu(W1 norm(x) + b1) + b2` of T networks, norm being LayerNorm over the channels.

    Args:
        x: (T, c, P), P positions.
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.

    Returns:
        (T, c, P).

    Raises:
        UsageError: if there is no C compiler.
    """
    return _NormMlp.apply(x, *norm, *first, *second, eps)


def convnext_block(x: Tensor, filters: Pair, norm: Pair, first: Pair, second: Pair, eps: float) -> Tensor:
    """`x + W2 gelu(W1 norm(conv(x)) + b1) + b2`, the block of T ConvNeXts without their layer scale.

    Args:
        x: (T c, H, W, B).
        filters: weight (T c, k, k) and bias (T c,).
        norm: gain and shift, (T, c) each.
        first: W1 (T, m, c) and b1 (T, m).
        second: W2 (T, c, m) and b2 (T, c).
        eps: added to the variance.

    Raises:
        UsageError: if there is no C compiler.
    """
    return _ConvNeXtBlock.apply(x, *filters, *norm, *first, *second, eps)


class _DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.dilation = dilation
        return _convolve(x, weight, bias, dilation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_convolve_backward(*ctx.saved_tensors, grad.contiguous(), ctx.dilation), None


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        x, *weights = (value.contiguous() for value in (x, *rest[:-1]))
        ctx.save_for_backward(x, *weights)
        ctx.eps = rest[-1]
        return _mlp(x, weights, ctx.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return *_mlp_backward(x, weights, grad.contiguous(), ctx.eps), None


class _ConvNeXtBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        x, weight, *weights = (value.contiguous() for value in (x, weight, *rest[:-1]))
        networks = len(weights[0])
        inner = _convolve(x, weight, bias, 1).view(networks, len(x) // networks, -1)
        ctx.save_for_backward(x, weight, inner, *weights)
        ctx.eps = rest[-1]
        return _mlp(inner, weights, ctx.eps, x.view_as(inner)).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        middle, *of_mlp = _mlp_backward(inner, weights, grad.view_as(inner), ctx.eps)
        return *_convolve_backward(x, weight, middle.view_as(x), 1, grad), *of_mlp, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    y = torch.empty_like(x)
    _call("depthwise_forward", (x, weight, bias.contiguous(), y), (*x.shape, weight.shape[-1], dilation))
    return y


def _convolve_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilation: int, more: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of input, filters and bias; `more` is added to the first."""
    found = torch.empty_like(x), torch.empty_like(weight), x.new_empty(len(x))
    _call("depthwise_backward", (x, weight, grad, more, *found), (*x.shape, weight.shape[-1], dilation))
    return found


def _mlp(x: Tensor, weights: list[Tensor], eps: float, more: Tensor | None = None) -> Tensor:
    y = torch.empty_like(x)
    _call("mlp_forward", (x, *weights, more, y), (*_sizes(x, weights), float(eps)))
    return y


def _mlp_backward(x: Tensor, weights: list[Tensor], grad: Tensor, eps: float) -> list[Tensor]:
    """Derivatives of the input and of the six weights."""
    found = [torch.empty_like(value) for value in (x, *weights)]
    _call("mlp_backward", (x, *weights[:-1], grad, *found), (*_sizes(x, weights), float(eps)))
    return found


def _sizes(x: Tensor, weights: list[Tensor]) -> tuple[int, ...]:
    """T, c, m, P."""
    return x.shape[0], x.shape[1], weights[2].shape[1], x.shape[2]


def _call(name: str, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    values = [ctypes.c_double(n) if isinstance(n, float) else ctypes.c_long(n) for n in numbers]
    if getattr(library(tensors[0].dtype), name)(*pointers, *values):
        raise MemoryError(f"{name}: no memory for the workspace")


@lru_cache(maxsize=2)
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """The compiled functions for float32 or float64; compiles them where that was not done before.

    Raises:
        UsageError: if there is no C compiler here, or it fails.
    """
    compiler = _compiler()
    source, errors = _SOURCE.read_bytes(), ""
    for machine in _MACHINE:
        flags = (*_FLAGS, *machine, *_TYPES[dtype])
        identity = [*compiler, *flags, _run([*compiler, "--version"]).stdout, _processor(), source.decode()]
        name = f"kernels-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.so"
        file = _folder() / name
        if file.is_file():
            return ctypes.CDLL(str(file))
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".kernels-") as there:
            made = Path(there, name)
            done = _run([*compiler, *flags, str(_SOURCE), "-o", str(made), "-lm"])
            if done.returncode == 0:
                os.replace(made, file)  # another process may have put the same there a moment ago
                return ctypes.CDLL(str(file))
        errors = done.stderr.strip()
    raise UsageError(
        f"kernels = 'compiled': `{shlex.join(compiler)}` failed: {errors[-500:]}; or use kernels = 'torch'"
    )


def _compiler() -> list[str]:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise UsageError(
        "kernels = 'compiled': found no C compiler ($CC, cc, gcc, clang); install one, or use kernels = 'torch'"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"kernels = 'compiled': cannot run `{command[0]}`: {error}; or use kernels = 'torch'"
        ) from error


def _folder() -> Path:
    """Where compiled kernels are kept; a temporary folder of this process where that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightscope"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return folder if os.access(folder, os.W_OK) else _temporary_folder()


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="weightscope-"))


def _processor() -> str:
    """What tells machines apart that share a cache folder: the processor's abilities."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), " ".join(os.uname()[3:]))
