"""Permutation specifications of modules and sources of weights, and the check by function."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from weightscope._util.names import listing
from weightscope._util.plugins import is_reference
from weightscope._util.threads import one_thread
from weightscope.anatomy.operations import Recorder, call, tensors_in
from weightscope.anatomy.permutation_graph import derive_permutations
from weightscope.errors import AnatomyError, SpecError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.permutation_rules import permutations_by_name, read_permutations
from weightscope.statistics.permutations import PermutationSpec, bare

_log = logging.getLogger(__name__)


@one_thread()
def permutation_spec(network: WeightSpec | nn.Module, example_inputs: Any = None) -> PermutationSpec:
    """The permutation specification of a network: which units may be renumbered without changing what it computes.

    With example inputs, that of any module, from the operations of its forward pass: see
    `weightscope.anatomy.permutation_graph`. Without, that of a network whose tensors have known names: a module, which
    also tells which units are of one head, or a spec, of all tensors or some. Renumbering keeps the function; whether
    it keeps the distribution of trained weights depends on their initial values, such as sinusoidal positions.

    Args:
        network: a module, or the spec of its tensors.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, as for the module. A batch of
            two or more, and lengths that differ from the numbers of units, are best.

    Raises:
        AnatomyError: if names are not recognised; with example inputs, if renumbering changes the outputs. Write
            `PermutationSpec.from_axes` of your own then.
        UsageError: if example inputs are given for a spec.

    Example:
        >>> permutation_spec(population.spec).sizes
        {'channels.0': 16, 'hidden.0.0': 32, ...}
        >>> permutation_spec(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64)).sizes
        {'conv1': 64, 'layer1.0.conv1': 64, ...}
    """
    if example_inputs is not None:
        if not isinstance(network, nn.Module):
            raise UsageError(f"example_inputs: expected a module to run on them, found a {type(network).__name__}")
        found = derive_permutations(network, example_inputs)
        if wrong := _not_kept(network, example_inputs, found):
            raise AnatomyError(f"{wrong}; give your own, PermutationSpec.from_axes(spec, {{name: (group, ...)}})")
        return found
    if isinstance(network, WeightSpec):
        return permutations_by_name(network)
    found = permutations_by_name(WeightSpec.of(network))
    return replace(found, heads=dict(found.heads) | _heads(network, found))


def _not_kept(module: nn.Module, inputs: Any, permutations: PermutationSpec) -> str:
    """What is wrong if renumbering changes the outputs."""
    change, tolerance = change_of_function(module, inputs, permutations)
    found = f"found them to change by {change:.1g} of their size"
    return "" if change < tolerance else f"expected renumbering to leave the network's outputs unchanged, {found}"


_HEADS = ("num_heads", "heads", "num_attention_heads")


def _heads(module: nn.Module, permutations: PermutationSpec) -> dict[str, tuple[str | None, int]]:
    """Group -> (name of its heads, H) of units whose heads the nearest module around one of their tensors tells."""
    modules, out = dict(module.named_modules()), dict[str, tuple[str | None, int]]()
    for view in permutations.views:
        for group in {bare(label) for label in view.labels} & permutations.heads.keys() - out.keys():
            kind, _, block = group.partition(".")
            path, names = view.tensor, ("n_groups",) if kind == "state" else _HEADS
            while group not in out and "." in path:
                path = path.rpartition(".")[0]
                heads = next((h for key in names if isinstance(h := getattr(modules.get(path), key, None), int)), None)
                if heads is not None:
                    out[group] = (None if kind in ("state", "inner") else f"heads.{block}", heads)
    return out


@torch.no_grad()
def apply_permutation(
    module: nn.Module, permutations: PermutationSpec | None = None, *, rng: np.random.Generator
) -> nn.Module:
    """Renumber a network's units at random, in place, such that its function stays the same; returns the module.

    By default by the specification of its names. Source: thesis 4.1, as a control.
    """
    permutations = permutations or permutation_spec(module)
    state = module.state_dict()
    if absent := [view.tensor for view in permutations.views if view.tensor not in state]:
        raise SpecError(f"the permutation specification names tensors that the network lacks: {listing(absent)}")
    named = {view.tensor: state[view.tensor].detach().cpu().numpy() for view in permutations.views}
    moved = permutations.apply(named, permutations.random(rng))
    for name, array in moved.items():
        state[name].copy_(torch.from_numpy(array))
    return module


@torch.no_grad()
def check_permutations(
    module: nn.Module, inputs: Any, permutations: PermutationSpec | None = None, *, seed: int = 0
) -> float:
    """How much a network's outputs change, at most, when its units are renumbered at random; its weights are put back.

    The largest absolute difference over the largest absolute value: in float64 and evaluation mode about 1e-15 for a
    right specification. `inputs` are as for `permutation_spec`.
    """
    before = [output.clone() for output in tensors_in(call(module, inputs))]
    state = module.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    try:
        apply_permutation(module, permutations, rng=np.random.default_rng(seed))
        after = tensors_in(call(module, inputs))
    finally:
        for name, value in kept.items():
            state[name].copy_(value)
    changes = [((b - a).abs().max(), a.abs().max()) for a, b in zip(before, after, strict=True)]
    return float(np.max([float(change / size) if change else 0.0 for change, size in changes]))  # NaN stays NaN


OwnPermutations = PermutationSpec | Mapping[str, Sequence[str | None]] | str | Path


def permutations_of(source: Any, given: OwnPermutations | None = None) -> PermutationSpec:
    """The permutation specification of the tensors of a source: that of their names, derived, or one's own, checked.

    Where the names are not known it is derived from the network of a population that has its code. One's own may be
    tensor name -> the group of each axis (`PermutationSpec.from_axes`), for all tensors, or a file of rules
    (`weightscope.statistics.permutation_rules`). It is checked by function if the source is such a population: its
    network with random weights in all its tensors must have the same outputs after renumbering; a SpecError if not.
    """
    spec: WeightSpec = source.spec
    template: Callable[[], Any] = getattr(source, "template", lambda: None)  # builds the network
    if given is None:
        try:
            named = permutation_spec(spec)
        except AnatomyError as error:
            if (built := template()) is not None and built[1] is not None:
                return permutation_spec(*built)
            if not hasattr(source, "template"):
                raise
            raise AnatomyError(
                f"{error}; or import the networks with --network MODULE:FUNCTION that returns the network and example "
                "inputs, to derive it"
            ) from None
        recipe = getattr(source, "recipe", None)
        if recipe is not None and not is_reference(recipe.network.type) and (built := template()) is not None:
            return permutation_spec(built[0])
        return named
    if isinstance(given, str | Path):
        found = read_permutations(given, spec)
    else:
        found = given if isinstance(given, PermutationSpec) else PermutationSpec.from_axes(spec, given)
    described = {view.tensor for view in found.views}
    if missing := [name for name in spec.names if name not in described]:
        raise SpecError(f"permutations: no axes for {listing(missing)}; give each axis a group or None")
    if (built := template()) is not None and built[1] is not None:
        if wrong := _not_kept(built[0], built[1], found):
            raise SpecError(
                f"permutations: {wrong}; axes of units that belong together need one group, and units of attention "
                "heads `PermutationSpec.from_axes(spec, axes, heads)`"
            )
    elif isinstance(given, str | Path):
        _log.warning("%s: not checked by function, since there is no network with example inputs to run", given)
    return found


@torch.no_grad()
def change_of_function(module: nn.Module, inputs: Any, permutations: PermutationSpec) -> tuple[float, float]:
    """`check_permutations` of a copy in float64 whose tensors all differ between units, and the tolerance for it.

    Networks that compute parts in float32, as transformers' softmax and RMSNorm, are compared to its precision.
    """
    generator = torch.Generator().manual_seed(0)
    module = copy.deepcopy(module).double().eval()
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_floating_point():
            noise = 0.2 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(value * noise.exp() if name.endswith("running_var") else value + noise)
    double = tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)
    with Recorder() as recorder:
        call(module, double)
    tolerance = 1e-9 if recorder.dtypes <= {torch.float64} else 1e-4
    changes = [check_permutations(module, double, permutations, seed=seed) for seed in moving_seeds(permutations)]
    return float(np.max(changes)), tolerance


def moving_seeds(permutations: PermutationSpec) -> list[int]:
    """Seeds of renumberings that together move all groups and flip all signs; one leaves two units alone in half."""
    seen: set[tuple[str, bool]] = set()
    seeds: list[int] = []
    for seed in range(64):
        drawn = permutations.random(np.random.default_rng(seed))
        new = {(group, True) for group, (order, _) in drawn.items() if (np.diff(order) != 1).any()}
        new |= {(group, False) for group, (_, signs) in drawn.items() if (signs < 0).any()}
        if not seeds or new - seen:
            seeds.append(seed)
        seen |= new
    return seeds
