"""`ScaleControl`: the means and variances that an initialiser gives to the tensors of a network, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from weightscope._util.checks import count
from weightscope.anatomy import ssms
from weightscope.anatomy.effective import plain, writable
from weightscope.anatomy.matrices import matrices
from weightscope.errors import UsageError
from weightscope.init._trained import found_parts
from weightscope.init.base import Generator, Initialiser, M, cpu_generator, normal, put, running

DRAWS = 32
_SAMPLE = 2048  # entries of a tensor in each draw whose distribution is tested
_LEVEL = 1e-6  # of that test; a false alarm costs the pairing of one tensor
_FEWEST = 32  # entries in all draws, below which it does not reject even a constant
_RESOLUTION = 2.0**-25  # half a step of torch's uniform float32 numbers
Moments = dict[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True)
class ScaleControl:
    """Independent Gaussian entries with another initialiser's mean and variance of each tensor.

        w_j ~ N(m_t, s_t^2) independently, for every entry j of a tensor t that the initialiser changes

    It has the scale of that initialiser without its structure, so the difference between the two is what the
    structure adds. Tensors that the initialiser leaves alone, and running statistics, stay as they are. Matrices that
    one tensor packs (queries, keys and values; the projections of Mamba) count separately.

    The network takes the exponential of a state-space layer's A_log, so a Gaussian with its mean and variance has
    rates far beyond the initialiser's. Its entries are drawn, with replacement, from those that the initialiser gives.

    Where the default entries w0_j are independent and uniform in (-b_t, b_t), as those of torch's linear and
    convolutional layers, they are what the control is made of,

        w_j = m_t + s_t Phi^-1((w0_j + b_t) / (2 b_t)),   Phi the standard normal distribution function,

    which is the same law. An initialiser that adds to its default weights then shares their noise with its control,
    so their paired difference varies less. Other tensors are drawn from the generator.

    Example:
        >>> control = ScaleControl.of(mimetic_mlp_, draw=lambda k: (make_network(k), torch.Generator().manual_seed(k)))
        >>> control(make_network(0), generator=torch.Generator().manual_seed(0))
    """

    # Each by (name, i), the i-th matrix of a parameter; i = 0 unless it packs several.
    moments: Moments  # m_t, s_t
    bounds: Mapping[tuple[str, int], float] = field(default_factory=dict)  # b_t of uniform default entries
    entries: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)  # what those of an A_log are drawn from

    @classmethod
    def of(
        cls, init: Initialiser, draw: Callable[[int], tuple[nn.Module, torch.Generator]], draws: int = DRAWS
    ) -> "ScaleControl":
        """The moments of all entries of a tensor in all draws; `draw(k)` is network k by default, and a generator.

        Default entries count as uniform if the bound is that of torch's layers, no entry exceeds it, and a
        Kolmogorov-Smirnov test of 32 or more does not reject it at 1e-6; that they are independent is not tested.
        """
        changed: set[tuple[str, int]] = set()
        sums: dict[tuple[str, int], list[tuple[float, float]]] = {}
        shares: dict[tuple[str, int], list[np.ndarray]] = {}  # (w0 + b) / 2b of some default entries
        bounds: dict[tuple[str, int], float] = {}
        rates: dict[tuple[str, int], list[Tensor]] = {}
        for k in range(count("draws", draws)):
            module, generator = draw(k)
            before = {key: block.clone() for key, block in _blocks(module).items()}
            bounds = _layer_bounds(module, before)
            for key, bound in bounds.items():
                shares.setdefault(key, []).append(_share(before[key], bound))
            found = init(module, generator=generator)
            exponents = {name for part in found_parts(ssms, found) for name in part.parameters["A_log"]}
            for key, block in _blocks(found).items():
                if key not in before or not torch.equal(block, before[key]):
                    changed.add(key)
                values = block.to(torch.float64)
                sums.setdefault(key, []).append((float(values.mean()), float(values.var(correction=0))))
                if key[0] in exponents:
                    rates.setdefault(key, []).append(_quantiles(block))
        moments = {key: _pooled(parts) for key, parts in sums.items() if key in changed}
        uniform = {key: b for key, b in bounds.items() if key in changed and _is_uniform(shares[key])}
        return cls(moments, uniform, {key: torch.cat(parts) for key, parts in rates.items() if key in changed})

    @torch.no_grad()
    def __call__(self, module: M, *, generator: Generator = None) -> M:
        """Set the tensors of a module with its default weights, in place."""
        with running("scale control"), writable(module, "scale control", idle=True) as inner:
            for key, block in _blocks(inner).items():
                if key in self.entries:
                    chosen = torch.randint(len(self.entries[key]), block.shape, generator=cpu_generator(generator))
                    put(block, self.entries[key][chosen])
                elif key in self.moments:
                    mean, std = self.moments[key]
                    fresh = key not in self.bounds
                    z = normal(*block.shape, generator=generator) if fresh else self._scores(key, block)
                    put(block, z.mul_(std).add_(mean))
        return module

    def _scores(self, key: tuple[str, int], default: Tensor) -> Tensor:
        """Standard normal numbers from uniform ones, entry by entry."""
        share = default.to("cpu", torch.float64).div(self.bounds[key]).add(1).div(2)
        if not bool(((share > -1e-6) & (share < 1 + 1e-6)).all()):
            raise UsageError(
                f"scale control: `{key[0]}`: expected default weights in +-{self.bounds[key]:.4g}, found up to "
                f"{float(default.abs().max()):.4g}; call it on a network as its constructor made it"
            )
        return torch.special.ndtri(share.clamp_(_RESOLUTION, 1 - _RESOLUTION))


def _layer_bounds(module: nn.Module, blocks: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], float]:
    """The bound 1 / sqrt(fan in) of the default entries of torch's linear and convolutional layers."""
    out: dict[tuple[str, int], float] = {}
    for path, layer in plain(module)[0].named_modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            names = {f"{path}.{name}".removeprefix(".") for name in ("weight", "bias")}
            bound = max(1, layer.weight[0].numel()) ** -0.5
            out |= {key: bound for key in blocks if key[0] in names}
    return out


def _share(entries: Tensor, bound: float) -> np.ndarray:
    """(w + b) / 2b of the extremes, and of up to `_SAMPLE` entries, evenly spaced."""
    flat = entries.detach().flatten().to("cpu", torch.float64)
    some = flat[:: -(-len(flat) // _SAMPLE)]
    low, high = flat.aminmax()
    return ((torch.cat([torch.stack([low, high]), some]) / bound + 1) / 2).numpy()


def _quantiles(entries: Tensor) -> Tensor:
    """All entries, or from `_SAMPLE` to twice as many of them, at evenly spaced ranks."""
    values = entries.detach().flatten().cpu().sort().values
    step = max(1, len(values) // _SAMPLE)
    return values[step // 2 :: step]


def _is_uniform(parts: list[np.ndarray]) -> bool:
    """Whether entries of networks, each part after its extremes, are uniform in (0, 1)."""
    extremes, some = np.concatenate([p[:2] for p in parts]), np.concatenate([p[2:] for p in parts])
    inside = extremes.min() >= -1e-6 and extremes.max() <= 1 + 1e-6
    return bool(inside and len(some) >= _FEWEST and stats.kstest(some, "uniform").pvalue > _LEVEL)


def _pooled(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of samples of equal size from the (mean, variance) of each."""
    means, variances = torch.tensor(parts, dtype=torch.float64).unbind(1)
    return float(means.mean()), float((variances.mean() + means.var(correction=0)).sqrt())


def _blocks(module: nn.Module) -> dict[tuple[str, int], Tensor]:
    """Views of the parameters, fused projections split."""
    module = plain(module)[0]
    packed = {matrix.name: matrix for matrix in found_parts(matrices, module)}
    heights = {name: rows for part in found_parts(ssms, module) for name, rows in part.packed.items()}

    def split(name: str, value: Tensor) -> Sequence[Tensor]:
        if name in heights:
            return value.detach().split(heights[name])
        return packed[name].split(value) if name in packed else [value.detach()]

    return {(name, i): block for name, value in module.named_parameters() for i, block in enumerate(split(name, value))}
