"""`covariance`: over the networks of a population, or within trained networks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope._util.sources import is_population
from weightscope.analysis.across_networks import covariance_across
from weightscope.analysis.exchangeable import exchangeable_covariance
from weightscope.errors import UsageError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.samples import WeightArray

if TYPE_CHECKING:
    from weightscope.analysis.across_networks import PopulationCovariance
    from weightscope.analysis.exchangeable import ExchangeableCovariance
    from weightscope.analysis.within_network import NetworkCovariances

ACROSS = ("kind", "computed", "fold_norms", "precision", "device", "chunk", "file", "memory")
WITHIN = ("part", "labels", "config", "keep", "seed", "separability")


def covariance(
    source: Any,
    select: str | Sequence[str] | None = "auto",
    *,
    network: int | None = None,
    exchangeable: bool = False,
    **options: Any,
) -> "PopulationCovariance | NetworkCovariances | ExchangeableCovariance":
    """Covariances over the networks of a population, or within one or several trained networks.

    A population (folder, `Population` or `WeightArray`) gives the joint covariance of its tensors over networks, with
    stripe ratios: a `PopulationCovariance`. Anything else gives the covariances of the filters, rows, columns or
    patches of each layer: a `NetworkCovariances`; so does a population with `network`, or with an option of these.
    With `exchangeable`, either gives the covariance averaged over the permutations of hidden units that leave the
    function unchanged: an `ExchangeableCovariance`, which shows what is correlated within and across layers.

    Args:
        source: a population, a path (.safetensors, .pt, .pth, a model folder), `hf://org/name[@revision]`, a
            `Checkpoint`, an `nn.Module`, a state dict, or a list of such networks.
        select: of a population: patterns of tensor names; "auto" for the MLP matrices (`*.mlp.fc?.weight`) of a
            network that has them and all tensors of another one; None for computed coordinates only.
        network: index of one network of a population's folder, whose layers are analysed.
        exchangeable: average over permutations of hidden units; `select` is then "*" by default.
        options: of a population: `kind`, `computed`, `fold_norms`, `precision`, `device`, `chunk`, `file`, `memory`,
            see `weightscope.analysis.across_networks.joint_covariance`; within networks: `part`, `labels`, `config`,
            `keep`, `seed`, `separability`, see `weightscope.analysis.within_network.covariance_within`.

    UsageError for an invalid option, or one of the other kind of source; DataError if a source cannot be read, or too
    few networks or samples are finite; AnatomyError, with the parts that there are, if a network has no such part.

    Example:
        >>> covariance("digits.pop", "*.mlp.fc1.weight", kind="correlation").plot("stripes.png", means=True)
        >>> print(covariance("efficientnet-lite0.pth", part="filters").text())
    """
    if unknown := sorted(options.keys() - {*ACROSS, *WITHIN}):
        known = ", ".join((*ACROSS, *WITHIN))
        raise UsageError(f"covariance: unknown option {', '.join(unknown)}; expected some of {known}")
    within = [name for name in WITHIN if name in options] + ["network"] * (network is not None)
    population = _population(source)
    if exchangeable:
        if options or network is not None:
            given = ", ".join([*options, *(["network"] if network is not None else [])])
            raise UsageError(f"exchangeable: takes `select` only, found {given}")
        samples = _one_network(source) if population is None else population
        return exchangeable_covariance(samples, "*" if select in ("auto", None) else select)
    if population is not None and not within:
        return covariance_across(population, select, **options)
    if across := [name for name in ACROSS if name in options] + ["select"] * (select != "auto"):
        reason = f"together with {', '.join(within)}" if population is not None else "for a trained network"
        raise UsageError(f"{', '.join(across)}: applies to a population, found {reason}")
    from weightscope.analysis.within_network import covariance_within  # torch

    sources = list(source) if isinstance(source, list | tuple) else [source]
    labels = options.pop("labels", None) or [None] * len(sources)
    pairs = [_network(one, network) for one in sources]
    names = [own if label is None else label for (_, own), label in zip(pairs, labels, strict=False)]
    return covariance_within(*(one for one, _ in pairs), labels=names + list(labels[len(names) :]), **options)


def _population(source: Any) -> Any:
    """The population that a source is or names; None for anything else."""
    if not is_population(source):
        return source if hasattr(source, "chunks") and hasattr(source, "spec") else None
    from weightscope.population import population_in  # h5py

    return population_in(source)


def _one_network(source: Any) -> WeightArray:
    """The floating-point tensors of one network as a population of one, whose channels are the samples."""
    from weightscope.anatomy.tensors import numbered  # torch
    from weightscope.population import open_network  # h5py

    if isinstance(source, list | tuple):
        raise UsageError(f"exchangeable: expected a population or one network, found {len(source)} sources")
    found: Any = open_network(source)
    tensors = found.state_dict() if hasattr(found, "state_dict") else found
    chosen = {name: tensors[name] for name in numbered(tensors)}
    chosen = {
        name: value.detach().double().cpu().numpy() for name, value in chosen.items() if value.is_floating_point()
    }
    spec = WeightSpec(TensorSpec(name, tuple(value.shape)) for name, value in chosen.items())
    return WeightArray(spec.pack(chosen, dtype=float)[None], spec)


def _network(source: Any, index: int | None) -> tuple[Any, str | None]:
    """A network for `covariance_within`, and its label if it is one of a population."""
    population = _population(source)
    if population is None:
        if index is not None:
            raise UsageError(f"network: selects within a population's folder, found {source}")
        return source, None
    if not hasattr(population, "network"):
        raise UsageError(f"expected a population's folder, found {type(source).__name__}: it has no networks to build")
    name = Path(source).name if isinstance(source, str | Path) else "network"
    return population.opened(index or 0), f"{name}::{index or 0}"
