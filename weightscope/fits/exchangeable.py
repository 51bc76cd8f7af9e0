"""Exchangeable: a distribution of whole networks that is assumed not to change when units are permuted."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, Self

import numpy as np
from scipy import special
from scipy.linalg import cholesky, solve_triangular

from weightscope._util.checks import choice, number
from weightscope._util.names import natural
from weightscope._util.results import text_table
from weightscope.errors import UsageError
from weightscope.fits.structure import (
    Accumulator,
    Facts,
    Structure,
    frozen,
    require_variation,
)
from weightscope.spec import WeightSpec
from weightscope.statistics.exchangeable import (
    ExchangeableMoments,
    TypeCovariance,
    assembled,
    design_effect,
    invariant_parts,
    projection,
)
from weightscope.statistics.index_effects import described
from weightscope.statistics.permutations import PermutationSpec, View
from weightscope.statistics.shrinkage import amplified, eigenvalues_clipped, nearest_correlation

_FLOOR = 1e-3  # smallest eigenvalue of a shrunk correlation matrix


class Amplification:
    """The options of `Exchangeable`, checked.

    `gain` multiplies the correlations that `denoise` leaves by a factor >= 0, see
    `weightscope.statistics.shrinkage.amplified`; 0 keeps the variances of all parts and no correlation, None takes
    correlations as they are, shrunk.

    `denoise` is used with a gain only: "threshold" drops correlations within 4 standard errors of zero; "eigenvalues"
    replaces the eigenvalues inside the Marchenko-Pastur edge by their mean (`eigenvalues_clipped`).
    """

    def __init__(self, gain: float | None = None, denoise: str = "threshold") -> None:
        if isinstance(gain, str):
            raise UsageError(
                f"gain: expected a number >= 0, found {gain!r}; `fit-init --gain auto` and "
                "`weightscope.benchmarking.choose_gain` choose it by training networks"
            )
        self.gain = None if gain is None else number("gain", gain, least=0)
        self.denoise = choice("denoise", denoise, ("threshold", "eigenvalues"))
        if denoise != "threshold" and gain is None:
            raise UsageError(f"denoise: {denoise!r} needs a gain, found none")

    def correlation(self, found: TypeCovariance) -> tuple[np.ndarray, dict[str, Any]]:
        """The correlation matrix (C, C) to sample from, and what was done to it."""
        correlation, effect = found.correlation(), design_effect(found)
        independent = (1 - correlation**2) * np.sqrt(max(1.0, effect) / found.samples)
        errors = np.where(np.isfinite(found.errors), found.errors, independent)
        notes: dict[str, Any] = {"samples": found.samples, "design_effect": round(effect, 3)}
        if self.gain is None:
            shrunk, intensities = _shrunk(found, correlation, errors)
            return shrunk, notes | intensities
        if self.denoise == "eigenvalues":
            correlation, notes["eigenvalues"] = eigenvalues_clipped(correlation, found.samples / max(1.0, effect))
            errors = np.zeros_like(errors)
        else:
            # four standard errors, or as much of Student's t where these are estimated from few networks; those of
            # one or two networks are no estimates over networks
            wider = 1.0 if found.networks < 3 else -float(special.stdtrit(found.networks - 1, special.ndtr(-4.0))) / 4
            independent = np.full(errors.shape, np.sqrt(max(1.0, effect) / found.samples))
            errors = np.where(np.isfinite(found.errors), found.errors * wider, independent)
        matrix, done = amplified(correlation, errors, self.gain)
        return matrix, notes | {"gain": self.gain} | done


def _tables(diagnostics: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The diagnostics of types: a table of those that were shrunk, and one of those that were multiplied by a gain."""
    shrunk, multiplied = [], []
    for label in sorted(diagnostics, key=natural):
        notes = diagnostics[label]
        row = [label, notes["samples"], f"{notes['design_effect']:g}"]
        projection = f"{notes['projection']:.1%}"
        if "gain" not in notes:
            shrunk.append((*row, f"{notes['shrinkage_within']:g}", f"{notes['shrinkage_between']:g}", projection))
            continue
        if "eigenvalues" in notes:
            kept = f"{notes['eigenvalues']} eigenvalues beyond the noise"
        else:
            kept = f"{notes['kept']} of {notes['kept'] + notes['dropped']}"
        numbers = f"{notes['gain']:g}", notes["clipped"], projection, f"{notes['achieved']:.3g}"
        multiplied.append((*row, kept, *numbers))
    head = ("type", "samples", "design effect")
    if shrunk:
        yield "correlations shrunk within tensors and between them, and changed by the projection"
        yield from text_table((*head, "within", "between", "projection"), shrunk).splitlines()
    if multiplied:
        yield "correlations kept (beyond 4 standard errors), times the gain, clipped at 0.9, changed by the projection"
        yield from text_table((*head, "kept", "gain", "clipped", "projection", "achieved"), multiplied).splitlines()


def _shrunk(found: TypeCovariance, correlation: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    """Correlations shrunk towards zero, those of each pair of tensors by an intensity of their own.

    Of a block r it is sum Var(r) / sum r^2 (block James-Stein, Cai 1999), from 1e-6, so that a matrix of rank < C is
    regular, to 1. The nearest correlation matrix, the shares of squares removed, and what the projection changed.
    """
    off, same = ~np.eye(len(correlation), dtype=bool), np.zeros(correlation.shape, dtype=bool)
    target, parts = np.where(off, correlation, 0.0), list(found.kind.slices.values())
    squares, noise = target**2, np.where(off, errors, 0.0) ** 2
    for a in parts:
        same[a, a] = True
        for b in parts:
            total = squares[a, b].sum()
            target[a, b] *= 1 - np.clip(noise[a, b].sum() / total, 1e-6, 1.0) if total else 1.0
    norm = float(np.linalg.norm(target))
    removed = {}
    for name, mask in (("within", same), ("between", ~same)):
        total = float(squares[mask].sum())
        removed[f"shrinkage_{name}"] = round(1 - float((correlation * target)[mask].sum()) / total, 4) if total else 0.0
    np.fill_diagonal(target, 1.0)
    matrix = target
    if np.linalg.eigvalsh(target)[0] < _FLOOR:
        matrix = nearest_correlation(target, floor=_FLOOR)
    return matrix, removed | {"projection": float(np.linalg.norm(matrix - target)) / norm if norm else 0.0}


class Exchangeable(Structure):
    r"""x = mean + sum over types S of L_S Z_S, with one covariance L_S L_S^T (C_S x C_S) for each type.

    A tensor with permuted axes splits into parts, one for each set S of axes whose deviations it holds; an invariant
    covariance couples parts of one S only, in the same way in each of their d_S dimensions (see
    `weightscope.statistics.exchangeable`). So the whole network, its layers' correlations included, is a handful of
    small matrices that do not depend on its width: `weightscope.fits.resizing.resized` takes it to networks of
    other widths and depths. The correlations of each pair of tensors are shrunk towards zero by an intensity of their
    own (block James-Stein, Cai 1999), or cleaned of noise and amplified by the option `gain`.

    Log-density: the sum over S of d_S normal densities in C_S dimensions.

    The mean is invariant, so means of single units, such as those that sinusoidal positions cause, are averaged.
    `permutations` are the axes' groups; `factors` has L_S (C, C), lower triangular, for each type in order; `network`
    is the spec of the whole network (`spec` if None), which tells fan-ins and depth where the structure is applied to
    another width or depth. The options of `fit` are those of `Amplification`.
    """

    name = "exchangeable"
    options = unsummed = ("gain", "denoise")
    needs_samples = False
    uses_permutations = True

    def __init__(
        self,
        spec: WeightSpec,
        mean: np.ndarray,
        permutations: PermutationSpec,
        factors: Sequence[np.ndarray],
        parameters: int = 0,
        diagnostics: Facts = None,
        network: WeightSpec | None = None,
    ) -> None:
        super().__init__(spec, mean, parameters, diagnostics)
        self.permutations, self.network = permutations, network or spec
        self.factors = tuple(map(frozen, factors))

    @classmethod
    def context(
        cls, network: WeightSpec, part: WeightSpec, *, permutations: PermutationSpec | None = None, **centre: Any
    ) -> dict[str, Any]:
        """The part of the network's permutation specification for the tensors that are fitted."""
        if partial := next((t for t in part.tensors if t.shape != network[t.name].shape), None):
            raise UsageError(
                f"`{partial.name}`: expected all of {network[partial.name].shape} to vary, found {partial.size} "
                "entries that do; the others are equal in all networks, so the distribution is not invariant under "
                "permutations of units; leave this tensor out of the selection"
            )
        if permutations is None:
            from weightscope.anatomy.permutation_groups import permutation_spec  # imports torch

            permutations = permutation_spec(network)
        return {"permutations": permutations.restrict(part.names), "network": network, **centre}

    @classmethod
    def accumulator(
        cls,
        spec: WeightSpec,
        *,
        gain: float | None = None,
        denoise: str = "threshold",
        permutations: PermutationSpec | None = None,
        network: WeightSpec | None = None,
        centre: np.ndarray | None = None,
    ) -> Accumulator:
        """Accumulates moments; see `Amplification` and the class for the arguments. Permutations follow from names.

        Sums that are added to others have the same `centre` (D,), see `ExchangeableMoments`.
        """
        amplification = Amplification(gain, denoise)
        permutations = permutations or cls.context(spec, spec)["permutations"]

        def made(moments: ExchangeableMoments) -> "Exchangeable":
            facts = {"exchangeability": described(moments.index.effects())}
            return cls.of_covariances(moments.covariances(), spec, permutations, amplification, network, facts)

        return Accumulator(ExchangeableMoments(spec, permutations, centre=centre), made)

    @classmethod
    def of_covariances(
        cls,
        found: Sequence[TypeCovariance],
        spec: WeightSpec,
        permutations: PermutationSpec,
        options: Amplification,
        network: WeightSpec | None = None,
        facts: Facts = None,
    ) -> Self:
        """Fit to the covariance of each type, in the order of the specification; `facts` are further diagnostics."""
        factors, parameters, means = [], 0, None
        notes = dict(facts or {})
        for covariance in found:
            label = covariance.kind.label
            variances = covariance.covariance.diagonal()
            require_variation(variances, f"entries ({label})")
            correlation, notes[label] = options.correlation(covariance)
            std = np.sqrt(variances)
            factors.append(cholesky(correlation * np.outer(std, std), lower=True))
            parameters += covariance.kind.multiplicity * (covariance.kind.multiplicity + 1) // 2
            if not covariance.kind.groups:
                means = covariance.mean
                parameters += len(means)
        return cls(spec, mean_vector(means, spec, permutations), permutations, factors, parameters, notes, network)

    @property
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(*sizes of S, C) for each type."""
        return tuple((*kind.sizes, kind.multiplicity) for kind in self.permutations.types)

    def apply_root(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Noise projected on each type's representation, times its factor, put together: (size, D)."""
        drawn = zip(self.permutations.types, self.factors, noise, strict=True)
        parts = {kind.groups: projection(z, kind) @ factor.T for kind, factor, z in drawn}
        return assembled(parts, self.spec, self.permutations)

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """See `Structure.squares`."""
        out, n = np.zeros(len(deviations)), len(deviations)
        parts = invariant_parts(deviations, self.spec, self.permutations)
        for kind, factor, part in zip(self.permutations.types, self.factors, parts, strict=True):
            white = solve_triangular(factor, part.reshape(-1, kind.multiplicity).T, lower=True)  # (C, N * units)
            out += np.square(white).reshape(kind.multiplicity, n, -1).sum(axis=(0, 2))
            out += 2 * kind.dimension * np.log(np.diag(factor)).sum()
        return out

    def covariance(self) -> np.ndarray:
        parts = invariant_parts(np.eye(self.spec.size), self.spec, self.permutations)
        loaded = ((part @ f).reshape(self.spec.size, -1) for f, part in zip(self.factors, parts, strict=True))
        return np.asarray(sum(root @ root.T for root in loaded))

    @cached_property
    def correlations(self) -> tuple[np.ndarray, ...]:
        """The correlation matrix (C, C) of each type."""
        matrices = [factor @ factor.T for factor in self.factors]
        scales = [1 / np.sqrt(matrix.diagonal()) for matrix in matrices]
        return tuple(m * np.outer(scale, scale) for m, scale in zip(matrices, scales, strict=True))

    def notes(self) -> list[str]:
        """How each type was shrunk, or what was dropped, clipped and projected; and what was resized."""
        labels = [kind.label for kind in self.permutations.types]
        lines = [*_tables({label: self.diagnostics[label] for label in labels if label in self.diagnostics})]
        if any(self.diagnostics.get(label, {}).get("gain", 0) > 1 for label in labels):
            lines.append(
                "correlations were enlarged on purpose: what is drawn from is no density of trained networks, so it "
                "has no held-out likelihood; `--gain auto` and `bench` tell how well it initialises"
            )
        lines += [line] if (line := self.diagnostics.get("exchangeability")) else []
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
        cls, tensors: Mapping[str, np.ndarray], spec: WeightSpec, parameters: int = 0, diagnostics: Facts = None
    ) -> Self:
        """The inverse of `to_tensors`."""
        text = {key: tensors[key].tobytes().decode() for key in ("permutations", "network") if key in tensors}
        permutations = PermutationSpec(tuple(map(View.from_dict, json.loads(text["permutations"])["views"])))
        factors = [tensors[f"factor.{i}"] for i in range(len(permutations.types))]
        network = WeightSpec.from_json(text["network"]) if "network" in text else None
        return cls(spec, tensors["mean"], permutations, factors, parameters, diagnostics, network)


def mean_vector(part: np.ndarray | None, spec: WeightSpec, permutations: PermutationSpec) -> np.ndarray:
    """The invariant mean (D,) whose part of the empty type is given, (C,); zero if there is no such type."""
    shapes = {kind.groups: (1, *kind.sizes, kind.multiplicity) for kind in permutations.types}
    own = {} if part is None else {(): part[None]}
    return assembled({key: np.zeros(shape) for key, shape in shapes.items()} | own, spec, permutations)[0]
