"""`ScaleControl`: the means and variances that an initialiser gives to the tensors of a network, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightscope._util.checks import count
from weightscope.anatomy.matrices import matrices
from weightscope.errors import AnatomyError
from weightscope.init._common import Initialiser, M, normal, put

DRAWS = 32
Moments = dict[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True)
class ScaleControl:
    """Independent Gaussian entries with another initialiser's mean and variance of each tensor.

        w_j ~ N(m_t, s_t^2) independently, for every entry j of a tensor t that the initialiser changes

    It has the scale of that initialiser without its structure, so the difference between the two is what the
    structure adds. Tensors that the initialiser leaves alone, and running statistics, stay as they are. A fused
    projection of queries, keys and values counts as three tensors.

    Attributes:
        moments: (name, i) -> (m_t, s_t) of the i-th matrix of a parameter, i = 0 unless it is fused.

    Example:
        >>> control = ScaleControl.of(mimetic_mlp_, draw=lambda k: (make_network(k), torch.Generator().manual_seed(k)))
        >>> control(make_network(0), generator=torch.Generator().manual_seed(0))
    """

    moments: Moments

    @classmethod
    def of(
        cls, init: Initialiser, draw: Callable[[int], tuple[nn.Module, torch.Generator]], draws: int = DRAWS
    ) -> "ScaleControl":
        """Estimate the moments from an initialiser's own draws.

        The moments of a tensor are those of all its entries in all the draws, so a mean that differs from draw to
        draw enters the variance.

        Args:
            init: the initialiser.
            draw: k -> network k with its default weights, and the generator that `init` draws from.
            draws: number of networks, k = 0, ..., draws - 1.

        Raises:
            UsageError: if there is no draw.
        """
        changed: set[tuple[str, int]] = set()
        sums: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for k in range(count("draws", draws)):
            module, generator = draw(k)
            before = {key: block.clone() for key, block in _blocks(module).items()}
            found = init(module, generator=generator)
            for key, block in _blocks(found).items():
                if key not in before or not torch.equal(block, before[key]):
                    changed.add(key)
                values = block.to(torch.float64)
                sums.setdefault(key, []).append((float(values.mean()), float(values.var(correction=0))))
        return cls({key: _pooled(parts) for key, parts in sums.items() if key in changed})

    @torch.no_grad()
    def __call__(self, module: M, *, generator: torch.Generator | None = None) -> M:
        """Draw the tensors of a module, in place."""
        for key, block in _blocks(module).items():
            if key in self.moments:
                mean, std = self.moments[key]
                put(block, normal(*block.shape, generator=generator).mul_(std).add_(mean))
        return module


def _pooled(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of samples of equal size from the (mean, variance) of each."""
    means, variances = torch.tensor(parts, dtype=torch.float64).unbind(1)
    return float(means.mean()), float((variances.mean() + means.var(correction=0)).sqrt())


def _blocks(module: nn.Module) -> dict[tuple[str, int], Tensor]:
    """Views of the parameters, fused projections split."""
    try:
        packed = {matrix.name: matrix for matrix in matrices(module)}
    except AnatomyError:  # no linear layer, so nothing is fused
        packed = {}
    return {
        (name, i): block
        for name, value in module.named_parameters()
        for i, block in enumerate(packed[name].split(value) if name in packed else [value.detach()])
    }
