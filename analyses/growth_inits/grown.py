"""Growth from a small trained network, one of several at random."""

import torch
from torch import Generator, nn

from weightscope import init as wi
from weightscope.population import Population


def grown_(
    module: nn.Module, *, width: str = "split", depth: str = "identity", generator: Generator | None = None
) -> nn.Module:
    """Grow one network of teacher.pop, the same in all arms of a seed: the first that is drawn."""
    found = Population("teacher.pop")
    small = found.network(int(torch.randint(len(found), (), generator=generator)))
    return wi.grow_(module, small, width=width, depth=depth, generator=generator)


def identity_(module: nn.Module, *, generator: Generator | None = None) -> nn.Module:
    """Set the last matrices of the branches of every second block to zero, as growth does, and change nothing else."""
    with torch.no_grad():
        for block in module.get_submodule("blocks")[1::2]:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
    return module
