"""`fit_pretrained`: the exchangeable distribution of one network, or of a few of any widths and depths.

A population gives N samples of a network; one network gives its units. Parts that are not invariant under renumbering
have mean zero, so the covariance of a type S is estimated about zero from d_S samples (see
`weightscope.statistics.exchangeable`). Only the means over all units have one sample; they are as independent entries
would have them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weightscope._util.checks import choice
from weightscope._util.names import block_of, listing, matching
from weightscope._util.threads import one_thread
from weightscope._version import __version__
from weightscope.anatomy.permutation_groups import permutation_spec
from weightscope.anatomy.places import Source, tensors_of
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits.exchangeable import Amplification, Exchangeable
from weightscope.fits.one_network import origin
from weightscope.fits.population_fit import Group, PopulationFit
from weightscope.fits.resizing import default_stds, depths, in_blocks, resized_fit, tensors_by_depth, type_of
from weightscope.population import open_network
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.exchangeable import TypeCovariance, invariant_parts
from weightscope.statistics.permutations import InvariantType, PermutationSpec, freedom


class _Measured(NamedTuple):
    """The covariances of one network's weights, in units of their default stds."""

    where: str
    spec: WeightSpec
    permutations: PermutationSpec
    types: list[TypeCovariance]


@one_thread()
def fit_pretrained(
    sources: Any,
    select: str | Sequence[str] | None = None,
    *,
    scale: str = "default",
    gain: float = 1.0,
    denoise: str = "threshold",
) -> PopulationFit:
    r"""Fit `Exchangeable` to one network, or to several pooled, for networks of any width and depth.

    Weights are taken at their places in timm's scheme with the gains around them multiplied in (LayerScale, norms,
    norms of queries and keys), see `weightscope.anatomy.places`. For a type with d_S dimensions, and parts x_a,
    x_b (d_S,) of one network,

        C_ab = x_a . x_b / d_S,   r_ab = C_ab / sqrt(C_aa C_bb)

    Correlations beyond 4 standard errors are kept and multiplied by the gain, the others are dropped. The standard
    error is that over all renumberings of one part against the other, the largest over the type's groups g of n units
    with centred parts A, B (n, rest):

        Var r = |A B^T|^2 / ((n - 1) |A|^2 |B|^2)      (n in place of n - 1 where signs flip)

    so that a pair of independent parts is kept with a probability of 6e-5, whatever its spectrum. Correlations and
    variances of several networks are averaged, weighted by the numbers of samples d_S. The result has the blocks of the
    deepest network (the largest of several), to which the other networks contribute their blocks of nearest relative
    depth. A network that contributes one block to two of them is left out of the correlation between these two.

    Args:
        sources: a module, a mapping of tensors, a `Checkpoint`, a path, `hf://org/name`; or a list of those.
        select: patterns of places in timm's scheme; by default all matrices and filters of the repeated blocks.
            Vectors (biases, norms) are never set.
        scale: of the network that is initialised: "default", each tensor keeps the std that it has, and only
            correlations and ratios between parts come from the sources; or "source", stds are those of the
            sources in units of 1 / sqrt(3 fan_in), and gains that are multiplied in become one.
        gain: factor of the correlations that are kept, as of `Exchangeable`.
        denoise: as of `Exchangeable`.

    Raises:
        UsageError: if an option is invalid or a pattern matches nothing.
        AnatomyError: if the permutations of a network's tensors are not known.
        DataError: if a weight is not finite or constant, or networks do not have the same tensors.

    Example:
        >>> fit_pretrained("hf://facebook/dinov2-small", gain=4).save("vit.safetensors")
        >>> load_init("vit.safetensors")(timm.create_model("vit_tiny_patch16_224"))

    Source: Hoeffding 1951, "A combinatorial central limit theorem", for the variance.
    """
    choice("scale", scale, ("default", "source"))
    options = Amplification(gain, denoise)
    opened = [open_network(one) for one in (sources if isinstance(sources, list | tuple) else [sources])]
    if not opened:
        raise UsageError("sources: expected at least one network, found none")
    networks = [_measured(one, select) for one in opened]
    reference = max(networks, key=lambda network: (sum(depths(network.spec).values()), network.spec.size))
    spec, permutations = reference.spec, reference.permutations
    covariances = [_pooled(kind, reference, networks) for kind in permutations.types]
    structure = Exchangeable.of_covariances(covariances, spec, permutations, options)
    settings = {"select": select if select is None or isinstance(select, str) else ",".join(select), "scale": scale}
    provenance = {"weightscope": __version__, "sources": [origin(one) for one in opened]}
    chosen = {"gain": gain} | ({"denoise": denoise} if denoise != "threshold" else {})
    groups = (Group("all", spec, structure, chosen),)
    return PopulationFit(spec, groups, (), len(networks), 0, settings, provenance)


def placed(fit: PopulationFit, model: Source) -> PopulationFit:
    """A fit by `fit_pretrained` for the tensors of another model, at their places.

    With the scale "default", each matrix keeps the root mean square that it has in the model; a DataError if that is 0.
    """
    whole = {name: model.whole(name) for name in model.names if model.complete(name)}
    every = WeightSpec(TensorSpec(name, tuple(value.shape)) for name, value in whole.items())
    taken = tensors_by_depth(fit.spec, every)
    spec = WeightSpec(tensor for tensor in every.tensors if tensor.name in taken)
    if not spec.tensors:
        raise SpecError(f"expected tensors like {listing(fit.spec.names)}, found {listing(every.names)}")
    if fit.scale == "source":
        return resized_fit(fit, spec)
    stds = {}
    for view in permutation_spec(spec).parts:
        values = view.of(whole[view.tensor].double().numpy())
        stds[view.name] = float(np.sqrt(np.square(values).mean()))
        if not 0 < stds[view.name] < np.inf:
            raise DataError(
                f"`{view.name}`: expected weights whose scale is kept, found {'zeros' if not values.any() else 'NaN'}; "
                "initialise it otherwise first, or fit with scale='source'"
            )
    return resized_fit(fit, spec, stds)


def _measured(network: Any, select: str | Sequence[str] | None) -> _Measured:
    source, where = Source(tensors_of(network), network), origin(network).get("source", "a network in memory")
    names = [name for name in source.names if source.complete(name)]
    wanted = in_blocks(names) if select is None else matching(select, names)
    folded = {name: value for name, value in source.folded(wanted).items() if value.ndim > 1}
    if not folded:
        raise UsageError(f"{where}: no matrices in numbered blocks; choose some of {listing(names)} by select")
    for name, value in folded.items():
        if not np.abs(value).max() < 1e60:  # fourth powers are summed
            raise DataError(f"{where}: `{name}`: expected finite weights, found NaN, infinity or numbers beyond 1e60")
        if not value.std() > 0:
            raise DataError(f"{where}: `{name}`: expected trained weights, found {value.size} equal ones")
    spec = WeightSpec(TensorSpec(name, value.shape) for name, value in folded.items())
    permutations, stds = permutation_spec(spec), default_stds(spec)
    units = {name: value / (stds[name] or 1.0) for name, value in folded.items()}
    squares = {v.name: float(np.square(v.of(units[v.tensor])).mean()) for v in permutations.parts}
    parts = invariant_parts(spec.pack(units, np.float64)[None], spec, permutations)
    types = [_covariance(kind, part[0], squares) for kind, part in zip(permutations.types, parts, strict=True)]
    return _Measured(where, spec, permutations, types)


def _covariance(kind: InvariantType, part: np.ndarray, squares: Mapping[str, float]) -> TypeCovariance:
    """Of a part (*sizes of S, C) about zero, with standard errors over renumberings; means as independent entries."""
    zero, c = np.zeros(kind.multiplicity), kind.multiplicity
    if not kind.groups:
        variances = np.concatenate([np.full(view.multiplicity, squares[view.name]) for view in kind.views])
        return TypeCovariance(kind, 1, np.diag(variances), zero, np.ones((c, c)), 1)
    rows = part.reshape(-1, c)
    products = rows.T @ rows
    norms = np.outer(products.diagonal(), products.diagonal())
    variance = np.full((c, c), 1 / kind.dimension)
    for axis, label in enumerate(kind.groups if len(kind.groups) > 1 else ()):
        units = np.moveaxis(part, (axis, -1), (1, 0)).reshape(c, part.shape[axis], -1)  # (C, n, rest)
        grams = (units.swapaxes(1, 2) @ units).reshape(c, -1)  # |A B^T|^2 = <A^T A, B^T B>
        dimension = freedom(label, part.shape[axis])
        variance = np.maximum(
            variance, np.divide(grams @ grams.T / dimension, norms, out=np.ones((c, c)), where=norms > 0)
        )
    return TypeCovariance(kind, kind.dimension, products / kind.dimension, zero, np.sqrt(variance), 1)


def _pooled(kind: InvariantType, reference: _Measured, networks: Sequence[_Measured]) -> TypeCovariance:
    """The covariance of a type of the reference, averaged over networks."""
    c = kind.multiplicity
    weight, products, noise = np.zeros((3, c, c))
    variances = np.zeros(c)
    for network in networks:
        types, origins = network.types, _origins(kind, reference, network)
        correlations = {at: types[at].correlation() for at, *_ in origins}
        for one, (at, a, block, taken) in zip(kind.views, origins, strict=True):
            found, mine = types[at], kind.slices[one.name]
            variances[mine] += found.samples * found.covariance.diagonal()[a]
            for other, (too, b, another, others) in zip(kind.views, origins, strict=True):
                if at == too and (block == another or taken != others):  # of one type, no block taken twice
                    pair = mine, kind.slices[other.name]
                    weight[pair] += found.samples
                    products[pair] += found.samples * correlations[at][a, b]
                    noise[pair] += (found.samples * np.nan_to_num(found.errors[a, b])) ** 2
    known = np.where(weight > 0, weight, np.nan)
    units = default_stds(reference.spec)
    std = np.sqrt(variances / weight.diagonal())
    std *= np.concatenate([np.full(view.multiplicity, units[view.tensor] or 1.0) for view in kind.views])
    covariance = np.nan_to_num(products / known) * np.outer(std, std)
    samples = round(float(weight.diagonal().max()))
    # `networks` is 1: the errors are not estimated from how networks differ
    return TypeCovariance(kind, samples, covariance, np.zeros(c), np.sqrt(noise) / known, 1)


def _origins(kind: InvariantType, reference: _Measured, network: _Measured) -> list[tuple[int, slice, str, str]]:
    """For each view of the reference: type and slice of its counterpart in a network, its block, the counterpart's."""
    tensors = tensors_by_depth(network.spec, reference.spec)
    views, types = {view.name: view for view in network.permutations.parts}, network.permutations.types
    origins = []
    for view in kind.views:
        name = tensors.get(view.tensor, view.tensor) + view.name[len(view.tensor) :]
        if (origin := views.get(name)) is None or origin.multiplicity != view.multiplicity:
            found = "none" if origin is None else f"fixed axes of {origin.shape}"
            raise DataError(
                f"{network.where}: `{name}`: expected the tensors of {reference.where}, fixed axes of {view.shape}, "
                f"found {found}; choose common ones by select"
            )
        at = type_of(kind, view, origin, types)
        origins.append((at, types[at].slices[name], block_of(view.tensor), block_of(origin.tensor)))
    return origins
