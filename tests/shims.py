"""What the tests need in order to import foreign packages; the package itself depends on none of them."""

import sys
from types import ModuleType

import pytest

_KEPT_ALIVE = []  # a torch.library.Library withdraws its operators when it is collected


def timm() -> ModuleType:
    """Import timm, or skip the test.

    torchvision's wheel registers kernels for operators that only its CUDA build defines, so on a CPU-only
    torch its import fails until the operators' signatures exist.
    """
    _torchvision()
    return pytest.importorskip("timm", reason="timm is not installed")


def transformers() -> ModuleType:
    """Import transformers, or skip the test; parts of it import torchvision where that is installed."""
    _torchvision()
    return pytest.importorskip("transformers", reason="transformers is not installed")


def lightning() -> ModuleType:
    """Import lightning.pytorch, or skip the test."""
    _torchvision()
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def _torchvision() -> None:
    import torch

    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT_ALIVE.append(library)
        import torchvision  # noqa: F401
