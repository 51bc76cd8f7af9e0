"""Starts of all layers from those of a trained network, one of several at random; or from one untrained layer."""

import torch
from torch import Generator, nn

from weightscope import init as wi
from weightscope.anatomy import attention
from weightscope.population import Population


def teacher(generator: Generator | None) -> nn.Module:
    """One network of teacher.pop, the same in all arms of a seed: the first that is drawn."""
    found = Population("teacher.pop")
    return found.network(int(torch.randint(len(found), (), generator=generator)))


def repeated_(module: nn.Module, *, layer: int = 0, generator: Generator | None = None) -> nn.Module:
    """Copy one layer of a teacher to all places."""
    return wi.repeat_layer_(module, teacher(generator), layer=layer)


def placed_(module: nn.Module, *, own: bool = True, generator: Generator | None = None) -> nn.Module:
    """Copy all layers of a teacher, to their own places or in a random order in which none keeps its place."""
    source = teacher(generator)
    order = places = torch.arange(len(attention(module)))
    while not own and len(places) > 1 and (order == places).any():
        order = torch.randperm(len(places), generator=generator)
    for place, layer in enumerate(order.tolist()):
        wi.repeat_layer_(module, source, layer=layer, layers=place)
    return module


def tied_(module: nn.Module, *, generator: Generator | None = None) -> nn.Module:
    """The default's first layer in all places."""
    return wi.repeat_layer_(module, module, layer=0)
