"""Filters from the covariances of narrow trained networks, and the images that those networks see."""

import torch
from torch import nn

from weightscope import init as wi
from weightscope.anatomy import depthwise
from weightscope.data.dataset import Dataset, load
from weightscope.errors import UsageError
from weightscope.fits.filters import filter_distributions
from weightscope.init.base import normal
from weightscope.population import Population

MODES = ("direct", "kronecker", "scale")
FIRST = 10_000  # the networks that are compared see earlier training images only


def later() -> Dataset:
    """CIFAR-10 without the first 10,000 training images, from ./data or the folder named by WEIGHTSCOPE_DATA."""
    data = load("cifar10")
    train = data.train_images[FIRST:], data.train_labels[FIRST:]
    return Dataset.from_arrays(*train, data.test_images, data.test_labels)


def transferred_(
    module: nn.Module, *, source: str = "teacher.pop", mode: str = "direct", generator: torch.Generator | None = None
) -> nn.Module:
    """Draw every depthwise filter from N(0, Sigma_i) of one network of a population, which `generator` chooses first.

    Modes "direct" and "kronecker" are those of `covariance_transfer_`: Sigma_i, and the nearest A_i (x) A_i. "scale"
    draws independent entries of variance tr(Sigma_i) / k^2, the control. With equal generators, all modes choose the
    same network and scale the same noise.
    """
    if mode not in MODES:
        raise UsageError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    networks = Population(source)
    network = networks.network(int(torch.randint(len(networks), (1,), generator=generator)))
    if mode != "scale":
        return wi.covariance_transfer_(module, network, kronecker=mode == "kronecker", generator=generator)
    for part, layer in zip(depthwise(module), filter_distributions(network), strict=True):
        std = float(layer.covariance.trace() / len(layer.covariance)) ** 0.5
        pixels = part.kernel[0] * part.kernel[1]
        draws = normal(part.channels, pixels, generator=generator, dtype=torch.float64) * std
        part.write(draws.float().reshape(part.channels, *part.kernel))
    return module
