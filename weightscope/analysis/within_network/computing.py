"""Covariances of one part of one or several networks, layer by layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.checks import count
from weightscope._util.names import labels_of
from weightscope.analysis.within_network.layers import KroneckerShare, Layer
from weightscope.analysis.within_network.parts import Part, Slices, find, first_part
from weightscope.analysis.within_network.result import NetworkCovariances
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.population import open_network
from weightscope.statistics.kronecker.separability import separability_test
from weightscope.statistics.kronecker.sums import explained_variance, kronecker_sum
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.slices import KEPT, centre_focus, slice_moments

SAMPLES = 64  # filters of a layer that are kept for pictures, as in thesis Fig. 2.6
_PATCHES = 1024  # a patch embedding is drawn whole (thesis Fig. 2.4) up to this number of filters


def covariance_within(
    *sources: Any,
    part: Part | None = None,
    labels: Sequence[str | None] | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = KEPT,
    seed: int = 0,
    separability: int = 0,
) -> NetworkCovariances:
    """Covariances of the filters, rows, columns or patches of networks, layer by layer (thesis Eq. 3.3, Fig. 3.1).

    The samples x_1, ..., x_n are, in every layer,

        filters          the n = C filters of a depthwise convolution, P = kh kw pixels
        mlp-rows         the rows of each MLP matrix in (out, in) layout: P inputs
        mlp-columns      its columns: P outputs
        patch            the filters of a patch embedding, P = channels kh kw, all channels together
        patch-channels   the same for each channel by itself, P = kh kw

    and S = sum_i (x_i - mean)(x_i - mean)^T / (n - 1), in float64. Where samples are images, `Focus` describes
    how their variance is distributed about the centre, and for single channels `kronecker` is the share of S that one
    Kronecker product A (x) B explains. Layers are read one after the other: memory is that of the largest tensor, its
    Gram matrix, and the covariances that are kept.

    Args:
        sources: each a path (.safetensors, .pt, .pth, a model folder), `hf://org/name[@revision]`, a `Checkpoint`,
            an `nn.Module` or a state dict.
        part: defines the samples, see above; None for the first of them that the first network has.
        labels: a name for each source; None for its own name.
        config: hints for state dicts, as in `weightscope.anatomy`.
        keep: the largest P for which the covariance matrix is kept; above it, only the spectrum and the statistics.
        seed: of the random choice of filters that are kept for pictures, 64 in each layer, and of the test.
        separability: simulations of a Monte Carlo test of S = A (x) B in each layer of filters or patches of one
            channel (`separability_test`; 199 are usual, and take seconds per layer); 0 for no test.

    Raises:
        AnatomyError: if a network has no such part; lists what it has.
        DataError: if a source cannot be read, no layer of it has 2 finite samples, or a layer's filters do not admit
            the test.
        UsageError: if there is no source, or an argument is invalid.

    Source: thesis 3.1.1; MLP paper 3 (rows and columns).

    Example:
        >>> found = covariance_within("efficientnet-lite0.pth")
        >>> found.layers[3].shape, round(found.layers[3].focus.central_share, 2)
        ((1, 5, 5), 0.09)
    """
    if not sources:
        raise UsageError("expected at least one network, found none")
    count("keep", keep)
    names = labels_of([_own_label(source) for source in sources], labels)
    layers: list[Layer] = []
    unverified: dict[str, tuple[str, ...]] = {}
    for source, label in zip(sources, names, strict=True):
        network = open_network(source)
        try:
            part = first_part(network, config) if part is None else part
            slices = find(network, part, config)
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from None
        mine = [_layer(label, piece, keep, seed, separability) for piece in slices]
        if all(layer.moments is None for layer in mine):
            raise DataError(f"{label}: no layer has 2 finite samples; `{mine[0].name}`: {mine[0].problem}")
        layers += mine
        if files := getattr(network, "unverified", ()):
            unverified[label] = files
    assert part is not None
    return NetworkCovariances(part, tuple(names), tuple(layers), unverified)


def _layer(label: str, piece: Slices, keep: int, seed: int, draws: int) -> Layer:
    samples = piece.read()
    shape = piece.image or (samples.shape[1],)
    nonfinite = int(samples.size - np.isfinite(samples).sum())
    layer = Layer(label, piece.name, piece.group, piece.layer, piece.depth, piece.stage, piece.stride, shape, nonfinite)
    try:
        moments = slice_moments(samples, keep=keep)
    except DataError as error:
        return replace(layer, problem=str(error))
    if len(shape) == 1:
        return replace(layer, moments=moments)
    square = shape[0] == 1 and min(shape[1:]) > 1  # single-channel images: rows and columns of pixels
    test = None
    if square and draws:
        matrices = samples[finite_rows(samples)].reshape(-1, *shape[1:])
        try:
            test = separability_test(matrices, draws=draws, seed=seed)
        except DataError as error:
            raise DataError(f"{label}: `{piece.name}`: separability: {error}") from None
    most = SAMPLES if piece.stage is not None else _PATCHES
    return replace(
        layer,
        moments=moments,
        focus=centre_focus(samples, (shape[1], shape[2]), moments),
        kronecker=_kronecker(moments.covariance, *shape[1:]) if square else None,
        separability=test,
        examples=_examples(samples, most, seed).reshape(-1, *shape),
    )


def _kronecker(covariance: np.ndarray | None, p: int, n: int) -> KroneckerShare | None:
    if covariance is None or not covariance.any():
        return None
    fit = kronecker_sum(covariance, p, n)
    off = np.count_nonzero(covariance - np.diag(np.diagonal(covariance)))
    dependence = explained_variance(covariance, fit.matrix(), diagonal=False) if off else math.nan
    return KroneckerShare(fit.explained, dependence)


def _examples(samples: np.ndarray, most: int, seed: int) -> np.ndarray:
    """At most so many samples, chosen at random and in their order."""
    if len(samples) <= most:
        return samples
    return samples[np.sort(np.random.default_rng(seed).choice(len(samples), most, replace=False))]


def _own_label(source: Any) -> str:
    text = str(source) if isinstance(source, str | Path) else getattr(source, "source", None)
    if not isinstance(text, str):
        return "state dict" if isinstance(source, Mapping) else type(source).__name__
    return text if "://" in text else Path(text).name or text
