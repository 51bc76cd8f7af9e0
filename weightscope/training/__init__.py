"""Training of populations: `collect` trains one, `train_tile` trains T networks of it."""

from typing import Any

__all__ = ["spec_of", "train_tile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightscope.training import engine  # torch, without which `status` answers

    return getattr(engine, name)
