"""What an untouched network has: the initial value of one of its tensors."""

import copy
import inspect

import torch
from torch import Tensor, nn

from weightscope.anatomy import ModuleTensors, NamedTensors


def default_start(source: NamedTensors, name: str, seed: int = 0) -> Tensor | None:
    """The value that the constructor of a module gives a tensor, by `reset_parameters` of a copy of its owner.

    Args:
        source: of the tensor.
        name: of the tensor.
        seed: of the draw, where the start is random.

    Returns:
        The value; None if it is not known: tensors without a module, or a module without `reset_parameters`.
    """
    if not isinstance(source, ModuleTensors):
        return None
    path, _, attribute = name.rpartition(".")
    owner = source.module.get_submodule(path)
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset) or inspect.signature(reset).parameters:
        return None
    fresh = _alone(owner)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        fresh.reset_parameters()  # type: ignore[operator]
    value: Tensor = getattr(fresh, attribute)
    return value.detach()


def _alone(owner: nn.Module) -> nn.Module:
    """A copy of a module with its own tensors, which share no memory, and with its children as they are."""
    out = copy.copy(owner)
    out.__dict__ = dict(owner.__dict__)
    out._parameters = {k: None if v is None else nn.Parameter(v.detach().clone()) for k, v in owner._parameters.items()}
    out._buffers = {k: None if v is None else v.detach().clone() for k, v in owner._buffers.items()}
    return out
