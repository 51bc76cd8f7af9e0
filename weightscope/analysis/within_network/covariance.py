"""`covariance_within`: one part of one or several networks, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.analysis.within_network.parts import Part, Slices, find, opened
from weightscope.analysis.within_network.result import Layer, Within
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.statistics.slices import KEPT, centre_focus, slice_moments

SAMPLES = 64  # filters of a layer that are kept to be drawn, as in thesis Fig. 2.6
_PATCHES = 1024  # of a patch embedding all are drawn (thesis Fig. 2.4), within reason


def covariance_within(
    *sources: Any,
    part: Part = "filters",
    labels: Sequence[str | None] | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = KEPT,
    seed: int = 0,
) -> Within:
    """Covariances of the filters, rows, columns or patches of networks, layer by layer (thesis Eq. 3.3, Fig. 3.1).

    The samples x_1, ..., x_n are, in every layer,

        filters          the n = C filters of a depthwise convolution, P = kh kw pixels
        mlp-rows         the rows of each MLP matrix in (out, in) layout: P inputs
        mlp-columns      its columns: P outputs
        patch            the filters of a patch embedding, P = channels kh kw, all channels together
        patch-channels   the same for each channel by itself, P = kh kw

    and S = sum_i (x_i - mean)(x_i - mean)^T / (n - 1), in float64. Where samples are images, `Focus` says how their
    variance lies about the centre. Layers are read one after the other: memory is that of the largest tensor, its
    Gram matrix, and the covariances that are kept.

    Args:
        sources: each a path (.safetensors, .pt, .pth, a model folder), `hf://org/name[@revision]`, a `Checkpoint`,
            an `nn.Module` or a state dict.
        part: what the samples are.
        labels: a name for each source, or None for what it calls itself.
        config: hints for state dicts, as in `weightscope.anatomy`.
        keep: the largest P whose covariance matrix is kept; of larger ones the spectrum and the statistics.
        seed: chooses the filters that are kept to be drawn, 64 in each layer.

    Raises:
        AnatomyError: if a network has no such part; lists what it has.
        DataError: if a source cannot be read, or no layer of it has 2 samples that are finite.
        UsageError: if there is no source, or an argument cannot be meant.

    Source: thesis 3.1.1; MLP paper 3 (rows and columns).

    Example:
        >>> found = covariance_within("efficientnet-lite0.pth")
        >>> found.layers[3].shape, round(found.layers[3].focus.central_share, 2)
        ((1, 5, 5), 0.09)
    """
    if not sources:
        raise UsageError("expected at least one network, found none")
    if keep < 1:
        raise UsageError(f"keep: expected at least 1, found {keep}")
    names = _labels(sources, labels)
    layers: list[Layer] = []
    for source, label in zip(sources, names, strict=True):
        network = opened(source)
        try:
            slices = find(network, part, config)
        except AnatomyError as error:
            raise AnatomyError(f"{label}: {error}") from None
        mine = list(_layers(label, slices, keep, seed))
        if all(layer.moments is None for layer in mine):
            raise DataError(f"{label}: no layer has 2 finite samples; `{mine[0].name}`: {mine[0].problem}")
        layers += mine
    return Within(part, tuple(names), tuple(layers))


def _layers(label: str, slices: list[Slices], keep: int, seed: int) -> Iterator[Layer]:
    for piece in slices:
        samples = piece.read()
        shape = piece.image or (samples.shape[1],)
        nonfinite = int(samples.size - np.isfinite(samples).sum())
        common = (label, piece.name, piece.group, piece.layer, piece.depth, piece.stage, piece.stride, shape, nonfinite)
        try:
            moments = slice_moments(samples, keep=keep)
        except DataError as error:
            yield Layer(*common, None, None, None, str(error))
            continue
        if len(shape) == 1:
            yield Layer(*common, moments, None, None, None)
            continue
        focus = centre_focus(samples, shape[1:], moments)
        most = SAMPLES if piece.stage is not None else _PATCHES
        yield Layer(*common, moments, focus, _examples(samples, most, seed).reshape(-1, *shape), None)


def _examples(samples: np.ndarray, most: int, seed: int) -> np.ndarray:
    """At most so many samples, drawn without order being lost."""
    if len(samples) <= most:
        return samples
    return samples[np.sort(np.random.default_rng(seed).choice(len(samples), most, replace=False))]


def _labels(sources: Sequence[Any], labels: Sequence[str | None] | None) -> list[str]:
    """A name for each network; those that we make up are told apart by numbers."""
    if isinstance(labels, str) or (labels is not None and len(labels) != len(sources)):
        raise UsageError(f"labels: expected a list of {len(sources)}, found {labels!r}")
    given = [label for label in labels or () if label is not None]
    if len(set(given)) != len(given):
        raise UsageError(f"labels: expected different ones, found {', '.join(given)}")
    names: list[str] = []
    for source, label in zip(sources, labels or [None] * len(sources), strict=True):
        base = name = label if label is not None else _own_label(source)
        count = 1
        while label is None and (name in names or name in given):
            count += 1
            name = f"{base} ({count})"
        names.append(name)
    return names


def _own_label(source: Any) -> str:
    text = str(source) if isinstance(source, str | Path) else getattr(source, "source", None)
    if not isinstance(text, str):
        return "state dict" if isinstance(source, Mapping) else type(source).__name__
    return text if "://" in text else Path(text).name or text
