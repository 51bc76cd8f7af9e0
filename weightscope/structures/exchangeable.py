"""Exchangeable: a distribution of whole networks that does not change when hidden units are renumbered."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.spec import WeightSpec
from weightscope.statistics.exchangeable import ExchangeableMoments, assembled, invariant_parts
from weightscope.statistics.permutations import PermutationSpec, View
from weightscope.structures.amplification import Amplification, Gain, in_words, label_of
from weightscope.structures.base import STRUCTURES, Structure, checked_names, checked_root, require_variation

_LOG_2PI = float(np.log(2.0 * np.pi))


@STRUCTURES.register("exchangeable", source="Shah and Chandrasekaran 2012")
class Exchangeable(Structure):
    r"""x = mean + sum over types S of L_S Z_S, with one covariance L_S L_S^T (C_S x C_S) for each type.

    A tensor with permuted axes splits into parts, one for each set S of axes whose deviations it holds; an invariant
    covariance couples parts of one S only, in the same way in each of their d_S dimensions (see
    `weightscope.statistics.exchangeable`). So the whole network, its layers' correlations included, is a handful of
    small matrices that do not depend on its width: `weightscope.structures.resizing.resized` takes it to networks of
    other widths and depths. The correlations of each pair of tensors are shrunk towards zero by an intensity of their
    own (block James-Stein, Cai 1999), or cleaned of noise and amplified by the option `gain`.

    Log-density: the sum over S of d_S normal densities in C_S dimensions.

    Args:
        spec: of the D entries.
        mean: (D,), invariant.
        permutations: the axes' groups.
        factors: for each type in order L_S (C, C), lower triangular.
        parameters: the number of fitted numbers.
        diagnostics: for each type intensities, design effects, and what an amplification did.
        network: of the whole network, which tells fan-ins and depth where the structure is applied to another width
            or depth; `spec` if None.

    Raises:
        DataError: if an array has the wrong shape, is not finite or is singular.
    """

    name = "exchangeable"
    form = "exchangeable"
    options = ("gain", "denoise")
    needs_samples = False
    uses_permutations = True

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        permutations: PermutationSpec,
        factors: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
        network: WeightSpec | None = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.permutations, self.network = permutations, network or spec
        if len(factors) != len(permutations.types):
            raise DataError(f"expected {len(permutations.types)} factors, one for each type, found {len(factors)}")
        self.factors = tuple(
            checked_root(array, f"factor.{i}", kind.copies)
            for i, (array, kind) in enumerate(zip(factors, permutations.types, strict=True))
        )

    @classmethod
    def context(
        cls, network: WeightSpec, part: WeightSpec, *, permutations: PermutationSpec | None = None, **own: Any
    ) -> dict[str, Any]:
        """The permutation specification of the tensors that are fitted, as part of that of their network.

        Raises:
            AnatomyError: if the network's architecture is not known and no specification is given.
            UsageError: if some but not all entries of a tensor vary.
        """
        for tensor in part.tensors:
            if tensor.shape != network[tensor.name].shape:
                whole = network[tensor.name].shape
                raise UsageError(
                    f"`{tensor.name}`: expected all of {whole} to vary, found {tensor.size} entries that do; the "
                    "others are equal in all networks, so the distribution is not invariant under permutations of "
                    "units; leave this tensor out of the selection"
                )
        if permutations is None:
            from weightscope.anatomy.permutation_groups import permutation_spec  # imports torch

            permutations = permutation_spec(network)
        return {"permutations": permutations.restrict(part.names), "network": network}

    @classmethod
    def accumulator(
        cls,
        spec: WeightSpec,
        *,
        gain: Gain | None = None,
        denoise: str = "threshold",
        permutations: PermutationSpec | None = None,
        network: WeightSpec | None = None,
    ) -> "_Accumulator":
        """An accumulator of moments.

        Args:
            spec: of the D entries.
            gain: multiply the correlations that `denoise` leaves by this factor, >= 0, see
                `weightscope.statistics.shrinkage.amplified`; 0 keeps the variances of all parts and no correlation,
                None takes correlations as they are, shrunk. Or a mapping of patterns of types ("channels*",
                "hidden.? x channels", "means") to factors: a type takes the first pattern that matches, and is left
                as it is if none does.
            denoise: "threshold" drops correlations within 4 standard errors of zero; "eigenvalues" replaces the
                eigenvalues inside the Marchenko-Pastur edge by their mean, see
                `weightscope.statistics.shrinkage.eigenvalues_clipped`. Used with a gain only.
            permutations: of the same tensors; by default that of their names.
            network: see the class.

        Raises:
            UsageError: if an option is invalid.
        """
        options = Amplification(gain, denoise)
        permutations = permutations or cls.context(spec, spec)["permutations"]
        return _Accumulator(spec, permutations, options, network)

    @classmethod
    def of_moments(
        cls,
        moments: ExchangeableMoments,
        *,
        gain: Gain | None = None,
        denoise: str = "threshold",
        network: WeightSpec | None = None,
    ) -> Self:
        """Fit to what `ExchangeableMoments` has taken up; the options are those of `accumulator`."""
        permutations = moments.permutations
        found = moments.covariances()
        amplification = Amplification(gain, denoise)
        amplification.check([label_of(covariance.kind.groups) for covariance in found])
        factors, parameters, notes = [], 0, {}
        means: dict[tuple[str, ...], np.ndarray] = {}
        for covariance in found:
            label = label_of(covariance.kind.groups)
            variances = covariance.covariance.diagonal()
            require_variation(variances, f"entries ({label})")
            correlation, notes[label] = amplification.correlation(covariance)
            deviation = np.sqrt(variances)
            factors.append(cholesky(correlation * np.outer(deviation, deviation), lower=True))
            parameters += covariance.kind.copies * (covariance.kind.copies + 1) // 2
            if not covariance.kind.groups:
                means[()] = covariance.mean[None]
                parameters += len(covariance.mean)
        mean = mean_vector(means, moments.spec, permutations)
        return cls(moments.spec, mean, permutations, factors, parameters, notes, network)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(*sizes of S, C) for each type."""
        return tuple((*_places(self.permutations, t.groups), t.copies) for t in self.permutations.types)

    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Noise projected on each type's representation, times its factor, put together: (size, D)."""
        parts = {}
        for kind, factor, z in zip(self.permutations.types, self.factors, noise, strict=True):
            part = np.asarray(z, dtype=np.float64)
            for axis, label in enumerate(kind.groups, 1):
                if not label.startswith("~"):
                    part = part - part.mean(axis=axis, keepdims=True)
            parts[kind.groups] = part @ factor.T
        return assembled(parts, self.spec, self.permutations)

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at (..., D)."""
        values = np.asarray(x, dtype=np.float64)
        rows = values.reshape(-1, self.spec.size) - self.mean
        out = np.full(len(rows), -0.5 * self.spec.size * _LOG_2PI)
        parts = invariant_parts(rows, self.spec, self.permutations)
        for kind, factor, part in zip(self.permutations.types, self.factors, parts, strict=True):
            white = solve_triangular(factor, part.reshape(-1, kind.copies).T, lower=True)  # (C, N * places)
            out -= 0.5 * np.square(white).reshape(kind.copies, len(rows), -1).sum(axis=(0, 2))
            out -= kind.dimension * np.log(np.diag(factor)).sum()
        return out.reshape(values.shape[:-1])

    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""
        dense = np.zeros((self.spec.size, self.spec.size))
        parts = invariant_parts(np.eye(self.spec.size), self.spec, self.permutations)
        for factor, part in zip(self.factors, parts, strict=True):
            loaded = (part @ factor).reshape(self.spec.size, -1)
            dense += loaded @ loaded.T
        return dense

    @cached_property
    def correlations(self) -> tuple[np.ndarray, ...]:
        """The correlation matrix (C, C) of each type."""
        out = []
        for factor in self.factors:
            matrix = factor @ factor.T
            scale = 1 / np.sqrt(matrix.diagonal())
            out.append(matrix * np.outer(scale, scale))
        return tuple(out)

    def notes(self) -> list[str]:
        """How each type was shrunk, or what was dropped, clipped and projected; and what was resized."""
        labels = [label for kind in self.permutations.types if (label := label_of(kind.groups)) in self.diagnostics]
        lines = [f"{label}: {in_words(self.diagnostics[label])}" for label in labels]
        return [*lines, *self.diagnostics.get("resized", ())]

    def _arrays(self) -> dict[str, np.ndarray]:
        text = json.dumps({"views": [asdict(view) for view in self.permutations.views]}, sort_keys=True)
        arrays = {f"factor.{i}": factor for i, factor in enumerate(self.factors)}
        arrays["permutations"] = np.frombuffer(text.encode(), dtype=np.uint8)
        if self.network != self.spec:
            arrays["network"] = np.frombuffer(self.network.to_json().encode(), dtype=np.uint8)
        return arrays

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, np.ndarray],
        spec: WeightSpec,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> Self:
        """The inverse of `to_tensors`."""
        if "permutations" not in tensors:
            raise DataError("a structure's arrays do not fit: missing ['permutations']")
        permutations = _parsed(tensors["permutations"], spec)
        names = [f"factor.{i}" for i in range(len(permutations.types))]
        checked_names(tensors, ["mean", "permutations", *names], ["network"])
        network = _network(tensors["network"], spec) if "network" in tensors else None
        return cls(spec, tensors["mean"], permutations, [tensors[n] for n in names], parameters, diagnostics, network)


class _Accumulator:
    """Takes up blocks of networks and fits to their moments."""

    def __init__(
        self, spec: WeightSpec, permutations: PermutationSpec, options: Amplification, network: WeightSpec | None
    ) -> None:
        self._moments, self._options, self._network = ExchangeableMoments(spec, permutations), options, network

    def update(self, rows: np.ndarray) -> None:
        self._moments.update(rows)

    def finish(self) -> Exchangeable:
        return Exchangeable.of_moments(self._moments, **vars(self._options), network=self._network)


def mean_vector(
    means: Mapping[tuple[str, ...], np.ndarray], spec: WeightSpec, permutations: PermutationSpec
) -> np.ndarray:
    """The invariant mean (D,) whose part of the empty type is given, (1, C); zero if there is no such type."""
    parts = dict(means)
    for kind in permutations.types:
        parts.setdefault(kind.groups, np.zeros((1, *_places(permutations, kind.groups), kind.copies)))
    return assembled(parts, spec, permutations)[0]


def _places(permutations: PermutationSpec, groups: Sequence[str]) -> tuple[int, ...]:
    return tuple(permutations.sizes[group.removeprefix("~")] for group in groups)


def _network(array: np.ndarray, spec: WeightSpec) -> WeightSpec:
    """The stored spec of the whole network, which contains that of the structure."""
    if array.ndim != 1 or array.dtype != np.uint8:
        raise DataError(f"`network`: expected the shape (n,) of uint8, found {array.dtype} {array.shape}")
    try:
        network = WeightSpec.from_json(array.tobytes().decode())
        if strangers := [tensor.name for tensor in spec.tensors if tensor not in network]:
            raise DataError(f"it lacks {strangers[:3]}")
    except (ValueError, WeightscopeError) as error:
        raise DataError(f"`network`: expected the spec of the whole network, found something else: {error}") from error
    return network


def _parsed(array: np.ndarray, spec: WeightSpec) -> PermutationSpec:
    """A stored specification, checked against the tensors that it is about."""
    if array.ndim != 1 or array.dtype != np.uint8:
        raise DataError(f"`permutations`: expected the shape (n,) of uint8, found {array.dtype} {array.shape}")
    try:
        views = json.loads(array.tobytes())["views"]
        permutations = PermutationSpec(
            tuple(View(v["name"], v["tensor"], tuple(v["shape"]), tuple(v["axes"]), v["start"]) for v in views)
        )
        covered = dict.fromkeys(spec.names, 0)
        for view in permutations.views:
            shape = spec[view.tensor].shape
            rows = view.shape[0] if view.shape else 1
            if view.shape[1:] != shape[1:] or not 0 <= view.start <= view.start + rows <= (shape[0] if shape else 1):
                raise DataError(f"`{view.name}`: {view.shape} is no part of {shape}")
            covered[view.tensor] += rows
        wrong = [name for name, rows in covered.items() if rows != (spec[name].shape[0] if spec[name].shape else 1)]
        if wrong:
            raise DataError(f"its views do not cover {wrong[:3]}")
    except (ValueError, KeyError, TypeError, RecursionError, WeightscopeError) as error:
        raise DataError(
            f"`permutations`: expected a permutation specification, found something else: {error}"
        ) from error
    return permutations
