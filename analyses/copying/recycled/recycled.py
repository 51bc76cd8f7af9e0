"""Starts of Mambas from a Transformer trained on the same task, one of several at random."""

import torch
from torch import Generator, nn

from weightscope import init as wi
from weightscope.anatomy import ssms
from weightscope.population import Population


def recycled_(
    module: nn.Module,
    *,
    embedding: str = "trained",
    attention: str = "none",
    generator: Generator | None = None,
) -> nn.Module:
    """Copy the embedding of a Transformer, and its queries and keys as W_C and W_B of the layer of the same number.

    The Transformer is one of teacher.pop, the same in all arms of a seed: the first that is drawn. `embedding` is
    "trained", "permuted" (each token has the vector of another) or "none"; `attention` "trained", "permuted" (the
    channels that W_B reads are permuted in each layer) or "none".
    """
    found = Population("teacher.pop")
    source = found.network(int(torch.randint(len(found), (), generator=generator)))
    if embedding != "none":
        wi.transfer_(module, source, select="*embeddings.weight")
    if embedding == "permuted":
        with torch.no_grad():
            table = module.get_submodule("backbone.embeddings").weight
            table.copy_(table[torch.randperm(len(table), generator=generator)])
    if attention != "none":
        wi.ssm_from_attention_(module, source)
    if attention == "permuted":
        for part in ssms(module):
            keys = part.read("B")
            part.write("B", keys[:, torch.randperm(keys.shape[1], generator=generator)])
    return module
