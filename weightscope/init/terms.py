"""Weights drawn from a distribution that is stated in terms, as `weightscope.fits.terms.explain` finds them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from weightscope._util.checks import number
from weightscope._util.names import listing
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.fits.population_fit import Group, PopulationFit
from weightscope.fits.resizing import depths
from weightscope.fits.terms import structure_of
from weightscope.init.base import Generator, M
from weightscope.init.from_artifact import PopulationInit
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec


def from_terms_(
    module: M,
    *,
    scales: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    terms: Sequence[Sequence[Any]],
    gain: float = 1.0,
    permutations: PermutationSpec | None = None,
    generator: Generator = None,
) -> M:
    """Gaussian weights with stated means, standard deviations and correlations.

    See `weightscope.fits.terms` for the form of terms; `weightscope fit-init POPULATION --explain` writes them.

    Args:
        scales: pattern of a tensor (`"blocks.*.mlp.fc1.weight"`) -> mean and std, each a list of numbers that are
            interpolated over relative depth; of weights and biases of layers, in units of 1 / sqrt(3 fan_in).
        terms: `(a, b, along, where, values)`.
        gain: factor of the correlations, >= 0; they are clipped at +-0.9.
        permutations: of the module's tensors, where their names are not known: `permutation_spec(module, inputs)`.

    Raises:
        SpecError: if the module has no tensor for a pattern or term.
        AnatomyError: if permutations are needed.

    Example:
        >>> one, two = "blocks.*.mlp.fc1.weight", "blocks.*.mlp.fc2.weight"
        >>> term = (one, two, "channels x hidden", "same block", [-0.3, -0.5])  # from the first to the last block
        >>> from_terms_(vit, scales={one: ([0], [1]), two: ([0], [1])}, terms=[term])
    """
    spec = WeightSpec.of(module)
    number("gain", gain, least=0)
    structure = structure_of(spec, permutations or permutation_spec(spec), scales, terms, gain)
    if left := [stack.rstrip(".") for stack in depths(spec) if stack not in depths(structure.spec)]:
        warnings.warn(f"from_terms_: no pattern names {listing(left)}: these blocks keep their start", stacklevel=2)
    group = Group("all", structure.spec, structure)
    found = PopulationFit(structure.spec, (group,), (), 0, 0, {}, {})
    return PopulationInit(found)(module, generator=generator)
