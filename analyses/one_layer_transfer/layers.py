"""Layers of a trained network in another order, and one untrained layer in all places."""

import torch
from torch import Generator, nn

from weightscope import init as wi
from weightscope.anatomy import attention


def displaced_(module: nn.Module, *, source: str = "teacher.pop::0", generator: Generator | None = None) -> nn.Module:
    """Copy the source's layers in a random order in which none keeps its place."""
    order = places = torch.arange(len(attention(module)))
    while len(places) > 1 and (order == places).any():
        order = torch.randperm(len(places), generator=generator)
    for place, layer in enumerate(order.tolist()):
        wi.repeat_layer_(module, source, layer=layer, layers=place)
    return module


def tied_(module: nn.Module, *, generator: Generator | None = None) -> nn.Module:
    """The default's first layer in all places."""
    return wi.repeat_layer_(module, module, layer=0)
