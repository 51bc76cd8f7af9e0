"""Random rectangles, as random-resized crops and random erasing draw them, from a fixed number of uniform numbers.

The usual code draws the share s of the image's area uniformly from [low, high] and the logarithm u of the aspect ratio
uniformly from [-l, l], and tries again if the rectangle is larger than the image. Here (s, u) is drawn from the same
distribution without a loop: a rectangle fits a square image if `s <= exp(-|u|)`, so u has a density proportional to
`min(high, exp(-|u|)) - low`, and s is uniform below that bound.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_CELLS = 4096  # of the table of the inverse distribution function


def sides(ratio: Tensor, area: Tensor, low: float, high: float, limit: float, size: int) -> tuple[Tensor, Tensor]:
    """Heights and widths in pixels of random rectangles within square images, at least 1.

    `height = size sqrt(s / r)`, `width = size sqrt(s r)`, rounded.

    Args:
        ratio: (n,) in [0, 1), for the aspect ratio r = width / height.
        area: (n,) in [0, 1), for the share s of the image's area.
        low: smallest share.
        high: largest share, at least low.
        limit: largest aspect ratio, at least 1; the smallest is its inverse.
        size: side of the images, in pixels.

    Returns:
        int64 (n,) each.
    """
    table = _quantiles(low, high, math.log(limit), ratio.device)
    place = ratio.double() * _CELLS  # float64, so that a GPU rounds to the same pixels
    cell = place.long().clamp_(max=_CELLS - 1)
    u = torch.lerp(table[cell], table[cell + 1], place - cell)
    s = low + area.double() * (torch.exp(-u.abs()).clamp(max=high) - low).clamp_(min=0)
    height, width = (s * torch.exp(-u)).sqrt(), (s * torch.exp(u)).sqrt()
    found = [(size * side).round().long().clamp_(1, size) for side in (height, width)]
    return found[0], found[1]


@lru_cache(maxsize=16)
def _quantiles(low: float, high: float, limit: float, device: torch.device) -> Tensor:
    """Quantiles 0, 1 / cells, ..., 1 of u, float64."""
    u = np.linspace(-limit, limit, 16 * _CELLS + 1)
    density = np.maximum(np.minimum(high, np.exp(-np.abs(u))) - low, 0)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    if below[-1] == 0:  # low = high = 1: the whole image
        return torch.zeros(_CELLS + 1, dtype=torch.float64, device=device)
    quantiles = np.interp(np.linspace(0, below[-1], _CELLS + 1), below, u)
    return torch.from_numpy(quantiles).to(device)
