"""Controls of an initialiser: networks with the moments that it gives to their tensors, and not its structure."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.checks import count
from weightscope._util.threads import one_thread
from weightscope.anatomy.effective import plain, writable
from weightscope.anatomy.matrices import Matrix, matrices
from weightscope.errors import AnatomyError, UsageError
from weightscope.init._trained import found_parts
from weightscope.init.base import Generator, Initialiser, M, integers, normal, opened, put, running
from weightscope.spec import WeightSpec
from weightscope.statistics.permutations import PermutationSpec

DRAWS = 32
_SAMPLE = 2048  # entries of a tensor in each draw that are kept of an A_log
Draw = Callable[[int], tuple[nn.Module, torch.Generator]]
"""Network k with its default weights, and the generator of its initialiser."""
Key = tuple[str, int]
"""(name, i), the i-th matrix of a parameter; i = 0 unless it packs several."""


@dataclass(frozen=True)
class ScaleControl:
    """Independent Gaussian entries with another initialiser's mean and variance of each tensor.

        w_j ~ N(m_t, s_t^2) independently, for every entry j of a tensor t that the initialiser changes

    The difference from that initialiser is what its structure adds. Where it adds to the default weights w0 what does
    not depend on them, the control keeps w0 and adds w_j - w0_j ~ N(m_t, s_t^2), the moments of what is added. Matrices
    that one tensor packs (queries, keys and values; the projections of Mamba) count separately. Entries of an A_log,
    whose exponential the network takes, are drawn, with replacement, from those that the initialiser gives.

    Example:
        >>> control = ScaleControl.of(mimetic_mlp_, draw=lambda k: (make_network(k), torch.Generator().manual_seed(k)))
        >>> control(make_network(0), generator=torch.Generator().manual_seed(0))
    """

    moments: Mapping[Key, tuple[float, float]]  # m_t, s_t
    added: frozenset[Key] = frozenset()  # of these, the moments of what is added
    entries: Mapping[Key, Tensor] = field(default_factory=dict)  # what those of an A_log are drawn from

    @classmethod
    def of(cls, init: Initialiser, draw: Draw, draws: int = DRAWS) -> "ScaleControl":
        """The moments of all entries of a tensor in draws 0, 1, ..."""
        changed, added = _effects(init, draw, _blocks)
        sums: dict[Key, list[tuple[float, float]]] = {}
        rates: dict[Key, list[Tensor]] = {}
        for k in range(count("draws", draws)):
            module, generator = draw(k)
            before = {key: block.to(torch.float64, copy=True) for key, block in _blocks(module).items() if key in added}
            found = init(module, generator=generator)
            exponents = {name for part in found_parts("state-space layers", found) for name in part.parameters["A_log"]}
            for key, block in _blocks(found).items():
                if key in changed:
                    values = block.to(torch.float64) - before.get(key, 0.0)
                    sums.setdefault(key, []).append((float(values.mean()), float(values.var(correction=0))))
                    if key[0] in exponents:
                        rates.setdefault(key, []).append(_quantiles(block))
        moments = {key: _pooled(parts) for key, parts in sums.items()}
        return cls(moments, frozenset(added), {key: torch.cat(parts) for key, parts in rates.items()})

    @one_thread()
    @torch.no_grad()
    def __call__(self, module: M, *, generator: Generator = None) -> M:
        """Set the tensors of a module with its default weights, in place."""
        generator = opened(generator)
        with running("scale control"), writable(module, "scale control", idle=True) as inner:
            for key, block in _blocks(inner).items():
                if key in self.entries:
                    chosen = integers(len(self.entries[key]), block.shape, generator)
                    put(block, self.entries[key][chosen])
                elif key in self.moments:
                    mean, std = self.moments[key]
                    z = normal(*block.shape, generator=generator).mul_(std).add_(mean)
                    put(block, z + block.to(z) if key in self.added else z)
        return module


@dataclass(frozen=True)
class UncorrelatedControl:
    """An initialiser's distribution without its correlations: the same means and variances of every part.

    Parts are the invariant ones of `weightscope.statistics.exchangeable`: a depthwise filter has its mean and variance
    at each pixel; a matrix those of its column means, row means, overall mean and the rest. It is what the structure
    "exchangeable" draws from with gain 0. The difference between an initialiser and this control is what correlations
    add; that between it and `ScaleControl`, what moments finer than a tensor's add. Default weights are kept as by
    `ScaleControl`. A pattern that is equal in all networks and not invariant counts as variance.
    """

    spec: WeightSpec  # of the tensors that the initialiser changes
    permutations: PermutationSpec  # of the views that it changes
    mean: np.ndarray  # (D,), invariant
    stds: tuple[np.ndarray, ...]  # (C,) for each type
    added: frozenset[str]  # names of views

    @classmethod
    def of(
        cls, init: Initialiser, draw: Draw, permutations: PermutationSpec, draws: int = 4 * DRAWS
    ) -> "UncorrelatedControl":
        """The moments of all parts in draws 0, 1, ..., with the permutation specification of the network."""
        from weightscope.fits.exchangeable import mean_vector  # SciPy: a second to import
        from weightscope.statistics.exchangeable import ExchangeableMoments

        def views(module: nn.Module) -> dict[str, Tensor]:
            tensors = _tensors(module)
            return {
                v.name: torch.from_numpy(v.of(tensors[v.tensor])) for v in permutations.views if v.tensor in tensors
            }

        changed, added = _effects(init, draw, views)
        if not changed:
            raise UsageError("uncorrelated control: expected an initialiser that changes a parameter, found none")
        own = PermutationSpec(tuple(view for view in permutations.views if view.name in changed))
        names = {view.tensor for view in own.views}
        spec = WeightSpec(tensor for tensor in WeightSpec.of(draw(0)[0]).tensors if tensor.name in names)
        moments = ExchangeableMoments(spec, own, index=False)
        for k in range(count("draws", draws)):
            module, generator = draw(k)
            default = _row(module, spec)
            row = _row(init(module, generator=generator), spec)
            for view in own.views:
                if view.name in added:
                    part = spec.unpack(row)[view.tensor]
                    view.write(part, view.of(part) - view.of(spec.unpack(default)[view.tensor]))
            moments.update(row)
        found = moments.covariances("zero")
        means = next((one.mean for one in found if not one.kind.groups), None)
        stds = tuple(np.sqrt(np.maximum(one.covariance.diagonal(), 0)) for one in found)
        return cls(spec, own, mean_vector(means, spec, own), stds, frozenset(added))

    @one_thread()
    @torch.no_grad()
    def __call__(self, module: M, *, generator: Generator = None) -> M:
        """Set the tensors of a module with its default weights, in place."""
        from weightscope.statistics.exchangeable import assembled, projection

        generator = opened(generator)
        with running("uncorrelated control"), writable(module, "uncorrelated control", idle=True) as inner:
            parts = {}
            for kind, std in zip(self.permutations.types, self.stds, strict=True):
                z = normal(1, *kind.sizes, kind.multiplicity, generator=generator).numpy()
                parts[kind.groups] = projection(z, kind) * std
            row = _row(inner, self.spec)
            drawn = self.spec.unpack(assembled(parts, self.spec, self.permutations) + self.mean)
            tensors = self.spec.unpack(row)
            for view in self.permutations.views:
                tensor, value = tensors[view.tensor], view.of(drawn[view.tensor])
                view.write(tensor, value + view.of(tensor) if view.name in self.added else value)
            for name, parameter in plain(inner)[0].named_parameters():
                if name in tensors:
                    put(parameter.detach(), torch.from_numpy(tensors[name][0]))
        return module


Parts = Callable[[nn.Module], Mapping[Any, Tensor]]


def _effects(init: Initialiser, draw: Draw, parts: Parts) -> tuple[set[Any], set[Any]]:
    """The parts that an initialiser changes, and those to which it adds numbers that do not depend on their default."""
    changes: dict[Any, list[Tensor]] = {}
    sizes: dict[Any, float] = {}
    for k in (0, 1):
        (module, _), (_, generator) = draw(k), draw(0)
        before = {key: part.to(torch.float64, copy=True) for key, part in parts(module).items()}
        for key, part in parts(init(module, generator=generator)).items():
            changes.setdefault(key, []).append(part - before[key])
            sizes[key] = max(sizes.get(key, 0.0), float(part.abs().max()), float(before[key].abs().max()))
    changed = {key for key, found in changes.items() if any(bool(change.any()) for change in found)}
    rounding = {key: 4 * torch.finfo(torch.float32).eps * size for key, size in sizes.items()}
    return changed, {key for key in changed if float((changes[key][0] - changes[key][1]).abs().max()) <= rounding[key]}


def _tensors(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters, (1, *shape) float64."""
    return {name: p.detach().double().cpu().numpy()[None] for name, p in plain(module)[0].named_parameters()}


def _row(module: nn.Module, spec: WeightSpec) -> np.ndarray:
    """The weights of a module, (1, D) float64."""
    tensors = _tensors(module)
    return spec.pack({name: tensors[name][0] for name in spec.names}, dtype=float)[None]


def _quantiles(entries: Tensor) -> Tensor:
    """All entries, or from `_SAMPLE` to twice as many of them, at evenly spaced ranks."""
    values = entries.detach().flatten().cpu().sort().values
    step = max(1, len(values) // _SAMPLE)
    return values[step // 2 :: step]


def _pooled(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of samples of equal size from the (mean, variance) of each."""
    means, variances = torch.tensor(parts, dtype=torch.float64).unbind(1)
    return float(means.mean()), float((variances.mean() + means.var(correction=0)).sqrt())


def _blocks(module: nn.Module) -> dict[Key, Tensor]:
    """Views of the parameters, fused projections split."""
    module = plain(module)[0]
    packed: dict[str, Matrix] = {}
    with contextlib.suppress(AnatomyError):  # of a module without such layers
        packed = {matrix.name: matrix for matrix in matrices(module)}
    heights = {name: rows for part in found_parts("state-space layers", module) for name, rows in part.packed.items()}

    def split(name: str, value: Tensor) -> Sequence[Tensor]:
        if name in heights:
            return value.detach().split(heights[name])
        return packed[name].split(value) if name in packed else [value.detach()]

    return {(name, i): block for name, value in module.named_parameters() for i, block in enumerate(split(name, value))}
