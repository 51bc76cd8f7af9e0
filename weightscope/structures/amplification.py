"""The correlations that an `Exchangeable` is sampled with: shrunk, or cleaned of noise and amplified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from scipy import stats

from weightscope._util.checks import choice, number
from weightscope.errors import UsageError
from weightscope.statistics.exchangeable import TypeCovariance, design_effect
from weightscope.statistics.shrinkage import amplified, eigenvalues_clipped, nearest_correlation

Gain = float | Mapping[str, float]
_FLOOR = 1e-3  # smallest eigenvalue of a shrunk correlation matrix


@dataclass(frozen=True)
class Amplification:
    """The options `gain` and `denoise` of `Exchangeable.accumulator`.

    Raises:
        UsageError: if one is invalid.
    """

    gain: Gain | None = None
    denoise: str = "threshold"

    def __post_init__(self) -> None:
        if isinstance(self.gain, str):
            raise UsageError(
                f"gain: expected a number >= 0, found {self.gain!r}; `fit-init --gain auto` and "
                "`weightscope.benchmarking.choose_gain` choose it by training networks"
            )
        for name, factor in self.gain.items() if isinstance(self.gain, Mapping) else [("gain", self.gain)]:
            if self.gain is not None:
                number(name, factor, least=0)
        choice("denoise", self.denoise, ("threshold", "eigenvalues"))
        if self.denoise != "threshold" and self.gain is None:
            raise UsageError(f"denoise: {self.denoise!r} needs a gain, found none")

    def check(self, labels: Sequence[str]) -> None:
        """Raise UsageError if a pattern of the gain matches no type."""
        for pattern in self.gain if isinstance(self.gain, Mapping) else ():
            if not any(fnmatchcase(label, pattern) for label in labels):
                raise UsageError(f"gain: {pattern!r} matches no type; there are {', '.join(labels)}")

    def of(self, label: str) -> float | None:
        """The gain of a type, or None if it is left as it is."""
        if isinstance(self.gain, Mapping):
            return next((float(g) for pattern, g in self.gain.items() if fnmatchcase(label, pattern)), None)
        return self.gain

    def correlation(self, found: TypeCovariance) -> tuple[np.ndarray, dict[str, Any]]:
        """The correlation matrix (C, C) to sample from, and what was done to it."""
        correlation, effect = found.correlation(), design_effect(found)
        independent = (1 - correlation**2) * np.sqrt(max(1.0, effect) / found.samples)
        errors = np.where(np.isfinite(found.errors), found.errors, independent)
        notes: dict[str, Any] = {"samples": found.samples, "design_effect": round(effect, 3)}
        gain = self.of(label_of(found.kind.groups))
        if gain is None:
            shrunk, intensities = _shrunk(found, correlation, errors)
            return shrunk, notes | intensities
        if self.denoise == "eigenvalues":
            correlation, notes["eigenvalues"] = eigenvalues_clipped(correlation, found.samples / max(1.0, effect))
            errors = np.zeros_like(errors)
        else:
            # four standard errors, or as much of Student's t where these are estimated from few networks
            wider = float(stats.t.isf(stats.norm.sf(4.0), max(1, found.networks - 1))) / 4
            independent = np.full(errors.shape, np.sqrt(max(1.0, effect) / found.samples))
            errors = np.where(np.isfinite(found.errors), found.errors * wider, independent)
        result = amplified(correlation, errors, gain)
        kept = {key: getattr(result, key) for key in ("kept", "dropped", "clipped", "moved")}
        return result.matrix, notes | {"gain": gain} | kept


def label_of(groups: Sequence[str]) -> str:
    """The name of a type in diagnostics and in the keys of `gain`: `"hidden.0 x channels"`, or `"means"`."""
    return " x ".join(groups) or "means"


def in_words(notes: Mapping[str, Any]) -> str:
    """The diagnostics of one type as a line of a report."""
    start = f"{notes['samples']} samples, design effect {notes['design_effect']:g}; "
    if "gain" not in notes:
        within, between = notes["shrinkage_within"], notes["shrinkage_between"]
        moved = f", projection moved them by {notes['moved']:.1%}" if notes.get("moved") else ""
        return f"{start}correlations shrunk by {within:g} within tensors, {between:g} between them{moved}"
    if "eigenvalues" in notes:
        kept = f"{notes['eigenvalues']} eigenvalues beyond the noise"
    else:
        kept = f"{notes['kept']} of {notes['kept'] + notes['dropped']} correlations beyond 4 standard errors"
    moved = f"{notes['clipped']} clipped at 0.9, projection moved them by {notes['moved']:.1%}"
    return f"{start}gain {notes['gain']:g}: {kept}, {moved}"


def _shrunk(found: TypeCovariance, correlation: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Correlations shrunk towards zero, those of each pair of tensors by an intensity of their own.

    The intensity of a block of correlations r is sum Var(r) / sum r^2, at most 1 (block James-Stein, Cai 1999; for one
    number Breiman's garrote, 1995), so that a strong correlation across layers survives among hundreds that are noise.
    Where the result is not positive definite, the nearest correlation matrix is taken.

    Returns:
        the matrix, and the shares of the sums of squares that were removed within tensors and between them, and
        Frobenius distance of the projection relative to the norm without the diagonal.
    """
    same, weights = np.zeros(correlation.shape, dtype=bool), np.ones(correlation.shape)
    parts = list(found.kind.slices.values())
    for i, a in enumerate(parts):
        same[a, a] = True
        for b in parts[: i + 1]:
            weights[a, b] = 1 - _intensity(correlation[a, b], errors[a, b], diagonal=a is b)
            weights[b, a] = weights[a, b].T
    target = correlation * weights
    np.fill_diagonal(target, 1.0)
    matrix, off = target, ~np.eye(len(target), dtype=bool)
    if np.linalg.eigvalsh(target)[0] < _FLOOR:
        matrix = nearest_correlation(target, floor=_FLOOR)
    norm = float(np.linalg.norm(target[off]))
    return matrix, {
        "shrinkage_within": _removed(correlation, target, same & off),
        "shrinkage_between": _removed(correlation, target, ~same),
        "moved": float(np.linalg.norm(matrix - target)) / norm if norm else 0.0,
    }


def _intensity(correlation: np.ndarray, errors: np.ndarray, *, diagonal: bool) -> float:
    """Sum Var(r) / sum r^2 of a block, from 1e-6 (so that a matrix of rank < C is regular) to 1."""
    mask = ~np.eye(len(correlation), dtype=bool) if diagonal else np.ones(correlation.shape, dtype=bool)
    total = float(np.square(correlation[mask]).sum())
    return float(np.clip(np.square(errors[mask]).sum() / total, 1e-6, 1.0)) if total else 0.0


def _removed(before: np.ndarray, after: np.ndarray, mask: np.ndarray) -> float:
    total = float(np.square(before[mask]).sum())
    return round(1 - float((before * after)[mask].sum()) / total, 4) if total else 0.0
