"""Folding a normalisation layer's gain and bias into the linear map that follows it.

LayerNorm's output is g * z + b with z normalised. A linear map after it, W (g * z + b) + c, equals
W diag(g) z + (c + W b): the same function with g = 1 and b = 0. Networks that differ only in how a gain is
divided between the two layers then have equal weights, so that a covariance compares functions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightscope.errors import SpecError
from weightscope.spec import WeightSpec

# (normalisation layer, linear map that follows it), as named in timm's and this package's ConvNeXt and ViT.
_READERS: tuple[tuple[str, str], ...] = (
    (r"(.*\.)norm", r"\1mlp.fc1"),
    (r"(.*\.)norm1", r"\1attn.qkv"),
    (r"(.*\.)norm2", r"\1mlp.fc1"),
    (r"(.*\.)downsample\.0", r"\1downsample.1"),
    (r"(.*\.)?head\.norm", r"\1head.fc"),
    (r"norm|fc_norm", r"head"),
)


@dataclass(frozen=True)
class NormPair:
    """A normalisation layer and the linear map that follows it, by the names of their modules."""

    norm: str
    linear: str


def norm_pairs(spec: WeightSpec) -> tuple[NormPair, ...]:
    """The pairs that can be folded in a network, found by name.

    Raises:
        SpecError: if a linear map has no bias to absorb the norm's bias.
    """
    pairs, names = [], set(spec.names)
    for tensor in spec.tensors:
        norm = tensor.name.removesuffix(".weight")
        if norm == tensor.name or len(tensor.shape) != 1:
            continue
        for pattern, replacement in _READERS:
            match = re.fullmatch(pattern, norm)
            linear = match.expand(replacement) if match else ""
            shape = spec[f"{linear}.weight"].shape if f"{linear}.weight" in names else ()
            if len(shape) < 2 or shape[1] != tensor.size:
                continue
            if f"{norm}.bias" in names and f"{linear}.bias" not in names:
                raise SpecError(f"`{linear}` has no bias to absorb that of `{norm}`; compute without fold_norms")
            pairs.append(NormPair(norm, linear))
    return tuple(pairs)


def needed_for_folding(names: set[str], spec: WeightSpec, pairs: tuple[NormPair, ...]) -> set[str]:
    """The names of the tensors that `fold` needs in order to fold those in `names`."""
    needed = set(names)
    for pair in pairs:
        wanted = []
        if f"{pair.linear}.weight" in names:
            wanted += [f"{pair.norm}.weight"]
        if f"{pair.linear}.bias" in names:
            wanted += [f"{pair.norm}.bias", f"{pair.linear}.weight"]
        needed |= {name for name in wanted if name in spec.slices}
    return needed


def fold(tensors: Mapping[str, np.ndarray], pairs: tuple[NormPair, ...]) -> dict[str, np.ndarray]:
    """Fold gains and biases: W <- W diag(g), c <- c + W b, g <- 1, b <- 0.

    Args:
        tensors: name -> (N, *shape), with all names of `needed_for_folding`.
        pairs: layers to fold.

    Returns:
        new arrays for the tensors that change, the given arrays for the others.
    """
    out = dict(tensors)
    for pair in pairs:
        gain, shift = (tensors.get(f"{pair.norm}.{part}") for part in ("weight", "bias"))
        weight, bias = (tensors.get(f"{pair.linear}.{part}") for part in ("weight", "bias"))
        if bias is not None and shift is not None and weight is not None:
            # A convolution without padding adds the shift once for each pixel of its filter.
            sums = weight.reshape(*weight.shape[:3], -1).sum(axis=-1)  # (N, out, in)
            out[f"{pair.linear}.bias"] = bias + np.einsum("noi,ni->no", sums, shift)
        if weight is not None and gain is not None:
            out[f"{pair.linear}.weight"] = weight * gain.reshape(len(gain), 1, -1, *[1] * (weight.ndim - 3))
    for norm in {pair.norm for pair in pairs}:
        if f"{norm}.weight" in out:
            out[f"{norm}.weight"] = np.ones_like(tensors[f"{norm}.weight"])
        if f"{norm}.bias" in out:
            out[f"{norm}.bias"] = np.zeros_like(tensors[f"{norm}.bias"])
    return out


def fold_norms(vectors: np.ndarray, spec: WeightSpec) -> np.ndarray:
    """Fold every norm that `norm_pairs` finds in whole weight vectors.

    Args:
        vectors: (N, D), or (D,) for one network.
        spec: names and shapes of the D columns.

    Returns:
        new vectors of the same shape and dtype: the same functions with unit gains and zero biases.

    Raises:
        SpecError: if a linear map has no bias to absorb the norm's bias.

    Example:
        >>> folded = fold_norms(population.weights(), population.spec)
    """
    rows = np.atleast_2d(vectors)
    folded = fold(spec.unpack(rows), norm_pairs(spec))
    flat = [folded[name].reshape(len(rows), -1) for name in spec.names]
    return np.concatenate(flat, axis=1).reshape(vectors.shape).astype(vectors.dtype, copy=False)
