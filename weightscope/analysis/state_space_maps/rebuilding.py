"""Mamba and Mamba-2 networks of ours from the tensors of transformers' and mamba_ssm's."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightscope._util.names import listing
from weightscope.anatomy import NamedTensors, named_tensors, ssms
from weightscope.errors import AnatomyError
from weightscope.networks.sequences import Mamba, Mamba2

_EMBEDDING = "backbone.embeddings.weight"


def rebuilt(model: Any, config: Mapping[str, Any] | None = None) -> nn.Module:
    """A `Mamba` or `Mamba2` with a model's weights; sizes are those of its tensors.

    Args:
        model: as for `anatomy`: a module, a mapping of tensors, a `Checkpoint`, a path or `hf://org/name`; with the
            names of `MambaForCausalLM`, `Mamba2ForCausalLM`, their base models, or mamba_ssm. The output projection is
            the embedding unless there is another.
        config: the model's config, for a mapping.

    Raises:
        AnatomyError: if it has no state-space layer, or layers or tensors of other kinds.
    """
    tensors = named_tensors(model, config)
    parts = ssms(tensors)
    ours = {_our_name(name): name for name in tensors.names}
    if _EMBEDDING not in ours:
        raise AnatomyError(f"expected a Mamba model with `{_EMBEDDING}`, found {listing(list(ours), 4)}")
    vocabulary, width = tensors.shape(ours[_EMBEDDING])
    tied = "lm_head.weight" not in ours or tensors.identity(ours["lm_head.weight"]) == tensors.identity(
        ours[_EMBEDDING]
    )
    first, expansion = parts[0], parts[0].channels // width
    with torch.device("meta"):
        if first.version == 1:
            network: nn.Module = Mamba(vocabulary, width, len(parts), state=first.state, expansion=expansion, tied=tied)
        else:
            sizes: dict[str, Any] = {"state": first.state, "groups": first.groups}
            sizes["head_width"] = first.channels // first.heads
            network = Mamba2(vocabulary, width, len(parts), expansion=expansion, tied=tied, **sizes)
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    if tied:
        ours["lm_head.weight"] = ours[_EMBEDDING]
    found = {name: tuple(tensors.shape(theirs)) for name, theirs in ours.items()}
    if odd := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise AnatomyError(
            f"`{odd[0]}`: expected {wanted.get(odd[0], 'no such tensor')} in a Mamba model of these sizes, found "
            f"{found.get(odd[0], 'none')}; hybrids and other variants can be given as modules of weightscope only"
        )
    network.load_state_dict({name: _copied(tensors, theirs) for name, theirs in ours.items()}, assign=True)
    return network


def _our_name(name: str) -> str:
    if not name.startswith(("backbone.", "lm_head.")):
        name = f"backbone.{name}"
    return re.sub(r"^backbone\.embedding\.", "backbone.embeddings.", name)


def _copied(tensors: NamedTensors, name: str) -> nn.Parameter:
    return nn.Parameter(tensors.get(name).detach().cpu().double(), requires_grad=False)
