"""The contract of a fitted distribution over weight vectors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec


class Structure(ABC):
    """A fitted distribution over vectors of D weights: a mean, and a covariance of some form.

    Every structure has its mean fitted in the same way (see `fit_mean`), so that structures differ in their
    covariance only. A structure is immutable; its arrays are float64. Sampling is a fixed linear map of
    standard normal noise, so that any generator, NumPy's or torch's, can drive it.

    Attributes:
        name: what the registry calls it.
        form: how noise becomes a vector: `"affine"`, `"kronecker"` or `"group_means"`; a standalone
            initialiser knows these and no more.
        summary: one line for a person.
        options: the names of what `fit` takes beside data and spec.
        spec: names and shapes of the tensors that the D entries are.
        mean: (D,).
        diagnostics: plain numbers and texts about the fit, such as an intensity or a floor that was met.
        parameters: the number of fitted numbers, mean included.
    """

    name: ClassVar[str]
    form: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, spec: WeightSpec, mean: np.ndarray, parameters: int = 0, diagnostics: Mapping[str, Any] | None = None
    ) -> None:
        self.spec = spec
        self.mean = checked(mean, "mean", (spec.size,))
        self.parameters = parameters
        self.diagnostics = dict(diagnostics or {})

    @classmethod
    @abstractmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec, **options: Any) -> Self:
        """Fit to vectors.

        Args:
            data: (N, D) finite numbers, N >= 2; each entry varies.
            spec: of the D entries.
            options: the structure's own.

        Raises:
            UsageError: if the structure is not for tensors of these shapes, or an option is wrong.
            DataError: if there are too few networks for it.
        """

    @classmethod
    def candidates(cls, networks: int, size: int) -> tuple[dict[str, Any], ...]:
        """The options to compare when none are given, for N networks and D entries."""
        return ({},)

    @property
    @abstractmethod
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the standard normal arrays that one sample takes, in the order in which they are drawn."""

    @abstractmethod
    def deviation(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Noise arrays (size, *shape) to deviations from the mean (size, D)."""

    @abstractmethod
    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at vectors (..., D), shape (...)."""

    @abstractmethod
    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Everything that sampling and density need, as arrays; `from_tensors` takes them back bit for bit."""
        return {"mean": self.mean, **self._arrays()}

    @abstractmethod
    def _arrays(self) -> dict[str, np.ndarray]:
        """What `to_tensors` stores beside the mean."""

    @classmethod
    @abstractmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, np.ndarray],
        spec: WeightSpec,
        parameters: int = 0,
        diagnostics: Mapping[str, Any] | None = None,
    ) -> Self:
        """The inverse of `to_tensors`.

        Raises:
            DataError: if an array is missing, unknown, misshapen or not finite.
        """

    def transform(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Standard normal arrays (size, *shape), one for each of `noise_shapes`, to samples (size, D)."""
        return self.mean + self.deviation(noise)

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Independent samples (size, D)."""
        return self.transform([rng.standard_normal((size, *shape)) for shape in self.noise_shapes])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(D={self.spec.size}, parameters={self.parameters})"


def fit_mean(data: np.ndarray, spec: WeightSpec) -> tuple[np.ndarray, int, dict[str, str]]:
    """The mean that all structures share: for each tensor one number, or one for each entry, by AIC.

    Networks are exchangeable under permutations of their hidden units, so the entries of a hidden tensor have
    one mean and fitting each of them only adds noise; entries that differ systematically (a bias, a norm's gain,
    a filter's centre) need their own. Under a diagonal normal model a tensor of d entries takes d means when
    sum over j of N/2 log(v0_j / v_j) > d - 1, with v_j and v0_j the variances about the entry's mean and about
    the tensor's.

    Args:
        data: (N, D).
        spec: of the D entries.

    Returns:
        the mean (D,), how many numbers were fitted, and for each tensor `"scalar"` or `"entries"`.
    """
    entries = data.mean(axis=0)
    mean, parameters, kinds = entries.copy(), 0, {}
    for name, part in spec.slices.items():
        size = part.stop - part.start
        if not size:
            continue
        common = entries[part].mean()
        own = np.mean((data[:, part] - entries[part]) ** 2, axis=0)
        about = own + (entries[part] - common) ** 2
        varies = own > 0
        gain = len(data) / 2 * float(np.log(about[varies] / own[varies]).sum())
        single = gain <= size - 1 and bool(varies.all())
        kinds[name] = "scalar" if single else "entries"
        parameters += 1 if single else size
        if single:
            mean[part] = common
    return mean, parameters, kinds


def checked_data(data: Any, spec: WeightSpec) -> np.ndarray:
    """The data (N, D) as float64.

    Raises:
        DataError: if the shape is wrong, there are fewer than 2 rows or a number is not finite.
    """
    rows = np.asarray(data, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != spec.size:
        raise DataError(f"expected weight vectors (N, {spec.size}), found {rows.shape}")
    if len(rows) < 2:
        raise DataError(f"a structure needs at least 2 networks, found {len(rows)}")
    if not np.isfinite(rows).all():
        raise DataError("expected finite weights, found NaN or infinity; leave those networks out")
    return rows


def checked(array: Any, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """An array of an artifact as read-only float64.

    Args:
        array: to check.
        name: for the message.
        shape: expected; None for any length.

    Raises:
        DataError: if its shape is another one or a number is not finite.
    """
    # One memory order, because BLAS rounds differently in another, and a stored structure must give the same bits.
    values = np.array(array, dtype=np.float64, order="C")
    fits = values.ndim == len(shape) and all(e is None or n == e for n, e in zip(values.shape, shape, strict=True))
    if not fits:
        raise DataError(f"`{name}`: expected the shape {shape}, found {values.shape}")
    if not np.isfinite(values).all():
        raise DataError(f"`{name}`: expected finite numbers, found NaN or infinity")
    values.flags.writeable = False
    return values


def checked_names(tensors: Mapping[str, np.ndarray], required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Compare the names of stored arrays with what a structure stores.

    Raises:
        DataError: if one is missing or unknown.
    """
    missing = [name for name in required if name not in tensors]
    unknown = [name for name in tensors if name not in (*required, *optional)]
    if missing or unknown:
        raise DataError(f"a structure's arrays do not fit: missing {missing}, unknown {unknown}")


def matrix_shapes(spec: WeightSpec) -> tuple[tuple[int, int], ...]:
    """Each tensor as a matrix (p, n): first axis by all others; a vector is one row."""
    return tuple((1, t.size) if len(t.shape) < 2 else (t.shape[0], math.prod(t.shape[1:])) for t in spec.tensors)


def require_variation(variance: np.ndarray, what: str) -> None:
    """Raise UsageError if a variance is zero: a density does not exist."""
    if not (variance > 0).all():
        raise UsageError(f"{int((variance == 0).sum())} {what} do not vary between the networks of the fit")
