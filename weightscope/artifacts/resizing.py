"""Fits to a population for networks of other widths and depths."""

from dataclasses import dataclass, replace

from weightscope.artifacts.population_fit import Group, PopulationFit
from weightscope.errors import AnatomyError
from weightscope.spec import WeightSpec
from weightscope.structures import Exchangeable
from weightscope.structures.resizing import resized, tensors_by_depth


@dataclass(frozen=True)
class ResizedFit:
    """A fit for another network.

    Attributes:
        fit: its spec has the other network's shapes wherever a tensor could be resized.
        problems: tensor -> why it could not be resized.
        notes: what was rescaled, taken from another depth, and dropped; empty if nothing was.
    """

    fit: PopulationFit
    problems: dict[str, str]
    notes: tuple[str, ...] = ()


def resized_fit(result: PopulationFit, network: WeightSpec) -> ResizedFit:
    """A fit for a network of another width or depth; see `weightscope.structures.resizing.resized`.

    Groups with the structure `exchangeable` are resized; all others, and those that fit already, stay as they are.
    The result can be saved and exported like any other fit.

    Args:
        result: fitted to a population.
        network: of all tensors of the other network.

    Raises:
        SpecError: if the depth differs and the permutation specification is not that of a known architecture.

    Example:
        >>> wide = resized_fit(load_artifact("digits.safetensors"), WeightSpec.of(network))
        >>> print(wide.notes)
    """
    groups: list[Group] = []
    problems: dict[str, str] = {}
    notes: list[str] = []
    for group in result.groups:
        structure = group.structure
        if not isinstance(structure, Exchangeable) or group.varying is not None or not _differs(structure, network):
            groups.append(group)
            continue
        try:
            found = resized(structure, network)
        except AnatomyError as error:
            problems |= dict.fromkeys(structure.spec.names, f"cannot be resized: {error}")
            groups.append(group)
            continue
        problems |= found.problems
        if found.structure is None:
            groups.append(group)
        else:
            groups.append(replace(group, spec=found.structure.spec, structure=found.structure))
            notes += found.structure.diagnostics["resized"]
    tensors = {tensor.name: tensor for group in groups for tensor in group.spec.tensors}
    order = [name for name in network.names if name in tensors] + [name for name in tensors if name not in network]
    fit = replace(result, spec=WeightSpec(tensors[name] for name in order), groups=tuple(groups))
    return ResizedFit(fit, problems, tuple(dict.fromkeys(notes)))


def _differs(structure: Exchangeable, network: WeightSpec) -> bool:
    """Whether the network has the fitted tensors in other shapes, or in more blocks."""
    taken = {new: old for new, old in tensors_by_depth(structure.network, network).items() if old in structure.spec}
    return any(new != old or network[new].shape != structure.spec[old].shape for new, old in taken.items())
