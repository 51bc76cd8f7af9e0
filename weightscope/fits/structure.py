"""The contract of a fitted distribution over weight vectors, and the registry of those that there are."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from weightscope._util.plugins import Registry, reference_to, underscored
from weightscope.errors import DataError, UsageError
from weightscope.spec import WeightSpec
from weightscope.statistics.moments import EntryMoments

LOG_2PI = float(np.log(2.0 * np.pi))
Facts = Mapping[str, Any] | None


class Accumulator(NamedTuple):
    """Takes weight vectors in blocks and fits a structure to all of them."""

    # `update` takes rows (n, D), n >= 1, float64 and finite, and leaves them as they are; they may change afterwards.
    # Unless all samples are needed, sums of consecutive parts of the networks add up (`+=`) and can be pickled
    sums: Any
    made: Callable[[Any], Any]  # the structure fitted to all rows of the sums; errors as `Structure.fit`


class _Samples:
    """All rows."""

    def __init__(self) -> None:
        self.held: list[np.ndarray] = []

    def update(self, rows: np.ndarray) -> None:
        self.held.append(rows.copy())


class Structure(ABC):
    """A fitted distribution over vectors of D weights: a mean, and a covariance of some form.

    All structures fit the mean in the same way (see `choose_mean`) and differ in their covariance only. A structure is
    immutable; its arrays are float64. Sampling is a fixed linear map of standard normal noise, so that any generator,
    NumPy's or torch's, can drive it.

    A subclass with `needs_samples = True` implements `fit`; one with `needs_samples = False` implements `accumulator`
    and is fitted from a stream in memory that does not depend on the number of networks; what takes more than multiples
    of D says so in `memory`.

    Args:
        spec: names and shapes of the tensors that the D entries are.
        mean: (D,).
        parameters: the number of fitted numbers, mean included.
        diagnostics: numbers and texts about the fit in JSON types, such as the shrinkage intensity.
    """

    name: ClassVar[str]  # short, in tables; by default the name of the class
    options: ClassVar[tuple[str, ...]] = ()  # names of the arguments of `fit` after data and spec
    unsummed: ClassVar[tuple[str, ...]] = ()  # options that do not change the sums of `accumulator`
    stored: ClassVar[tuple[str, ...]] = ()  # arrays beside the mean: attributes and arguments of the constructor
    needs_samples: ClassVar[bool] = True  # whether fitting needs all samples at once
    uses_permutations: ClassVar[bool] = False  # whether `context` takes a permutation specification of the user's own

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __init__(self, spec: WeightSpec, mean: np.ndarray, parameters: int = 0, diagnostics: Facts = None) -> None:
        self.spec = spec
        self.mean = frozen(mean)
        self.parameters = parameters
        self.diagnostics = dict(diagnostics or {})

    @classmethod
    def fit(cls, data: np.ndarray, spec: WeightSpec, *args: Any, **options: Any) -> Self:
        """Fit to vectors (N, D), finite, N >= 2, each entry of which varies; `options` are those of the structure.

        A UsageError if the structure is not for tensors of these shapes or an option is invalid, a DataError if there
        are too few networks.
        """
        sums, made = cls.accumulator(spec, *args, **options)
        sums.update(checked_data(data, spec))
        return made(sums)

    @classmethod
    def accumulator(cls, spec: WeightSpec, *args: Any, **options: Any) -> Accumulator:
        """Fits the structure to streamed vectors; arguments and errors as `fit`. By default it keeps all samples."""
        return Accumulator(_Samples(), lambda samples: cls.fit(np.concatenate(samples.held), spec, *args, **options))

    @classmethod
    def memory(cls, networks: int, size: int) -> int:
        """About how many bytes a fit to N networks of D entries takes, beyond some vectors of D."""
        return 40 * networks * size if cls.needs_samples else 0  # five copies in float64

    @classmethod
    def context(cls, network: WeightSpec, part: WeightSpec, **own: Any) -> dict[str, Any]:
        """Arguments of `accumulator` that follow from the whole network of the fitted tensors, `part`.

        With `uses_permutations`, `own` are `permutations`, a specification of the user's own, and, where sums of parts
        of the networks are added up, `centre` (D,), which they all subtract. A UsageError or DataError if the structure
        does not apply to the network.
        """
        return {}

    @classmethod
    def candidates(cls, networks: int, size: int) -> tuple[dict[str, Any], ...]:
        """The options to compare when none are given, for N networks and D entries."""
        return ({},)

    @property
    @abstractmethod
    def noise_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the standard normal arrays that one sample takes, in the order in which they are drawn."""

    @abstractmethod
    def apply_root(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Apply a root R of the covariance, R R^T = Cov, to noise arrays (size, *shape): (size, D)."""

    def log_prob(self, x: np.ndarray) -> np.ndarray:
        """Natural logarithm of the density at vectors (..., D), shape (...); by default the normal one."""
        deviations = np.asarray(x, dtype=np.float64) - self.mean
        values = self.squares(deviations.reshape(-1, self.spec.size)) + self.spec.size * LOG_2PI
        return (-0.5 * values).reshape(deviations.shape[:-1])

    def squares(self, deviations: np.ndarray) -> np.ndarray:
        """`e^T C^-1 e + log det C` of deviations e (N, D) from the mean, (N,); unused where `log_prob` is defined."""
        raise NotImplementedError

    @abstractmethod
    def covariance(self) -> np.ndarray:
        """The dense covariance (D, D)."""

    def to_tensors(self) -> dict[str, np.ndarray]:
        """All arrays that sampling and density need; `from_tensors` restores them bit for bit."""
        return {"mean": self.mean, **self._arrays()}

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in self.stored}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], spec: WeightSpec, parameters: int = 0, diagnostics: Facts = None
    ) -> Self:
        """The inverse of `to_tensors`."""
        return cls(spec, **tensors, parameters=parameters, diagnostics=diagnostics)

    def notes(self) -> list[str]:
        """What was shrunk, clipped or projected in the fit, as lines of the report."""
        return []

    def transform(self, noise: Sequence[np.ndarray]) -> np.ndarray:
        """Map standard normal arrays (size, *shape), one for each of `noise_shapes`, to samples (size, D)."""
        return self.mean + self.apply_root(noise)

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Independent samples (size, D)."""
        return self.transform([rng.standard_normal((size, *shape)) for shape in self.noise_shapes])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(D={self.spec.size}, parameters={self.parameters})"


STRUCTURES: Registry[type[Structure]] = Registry("structure")


def structure_class(wanted: str | type[Structure]) -> type[Structure]:
    """The class for a registered name (hyphens count as underscores), `"package.module:Class"`, or a class itself."""
    found = STRUCTURES.find(underscored(wanted))
    if not (isinstance(found, type) and issubclass(found, Structure)):
        raise UsageError(f"structure: expected a subclass of weightscope.fits.Structure, found {wanted!r}")
    return found


def checked_options(structure: str, options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The options of a structure; a UsageError if it has no such option."""
    if unknown := [name for name in options if name not in known]:
        raise UsageError(f"{structure} has no option {unknown[0]!r}; its options are {', '.join(known) or 'none'}")
    return dict(options)


def structure_reference(cls: type[Structure]) -> str:
    """The name under which a class is registered, or `"package.module:Class"`."""
    return next((name for name, known in STRUCTURES.items() if known is cls), None) or reference_to(cls)


def choose_mean(moments: EntryMoments, spec: WeightSpec) -> tuple[np.ndarray, int, dict[str, str]]:
    """The mean that all structures share: for each tensor one number, or one for each entry, by AIC.

    Networks that are exchangeable under permutations of their hidden units have one mean for all entries of a hidden
    tensor, and fitting each of them only adds noise; entries that differ systematically (a bias, a norm's gain,
    a filter's centre) need their own. Under a diagonal normal model a tensor of d entries takes d means when
    sum over j of N/2 log(v0_j / v_j) > d - 1, with v_j and v0_j the variances about the entry's mean and about
    the tensor's. Returns the mean (D,), how many numbers were fitted, and for each tensor `"scalar"` or `"entries"`.
    """
    entries = moments.mean
    own = moments.squares / moments.n
    mean, parameters, kinds = entries.copy(), 0, {}
    for name, part in spec.slices.items():
        size, common = part.stop - part.start, entries[part].mean()
        about = own[part] + (entries[part] - common) ** 2
        varies = own[part] > 0
        gain = moments.n / 2 * float(np.log(about[varies] / own[part][varies]).sum())
        single = gain <= size - 1 and bool(varies.all())
        kinds[name] = "scalar" if single else "entries"
        parameters += 1 if single else size
        if single:
            mean[part] = common
    return mean, parameters, kinds


def fit_mean(data: np.ndarray, spec: WeightSpec) -> tuple[np.ndarray, int, dict[str, str]]:
    """`choose_mean` of data (N, D)."""
    return choose_mean(EntryMoments(spec.size, [data]), spec)


def checked_data(data: Any, spec: WeightSpec) -> np.ndarray:
    """The data (N, D) as float64, N >= 2 and finite; otherwise a DataError."""
    rows = np.asarray(data, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != spec.size:
        raise DataError(f"expected weight vectors (N, {spec.size}), found {rows.shape}")
    if len(rows) < 2:
        raise DataError(f"a structure needs at least 2 networks, found {len(rows)}")
    if not np.isfinite(rows).all():
        raise DataError("expected finite weights, found NaN or infinity; exclude those networks")
    return rows


def frozen(array: Any) -> np.ndarray:
    """An array as read-only float64."""
    # One memory order, because BLAS rounds differently in another, and a stored structure must give the same bits.
    values = np.array(array, dtype=np.float64, order="C")
    values.flags.writeable = False
    return values


def matrix_shapes(spec: WeightSpec) -> tuple[tuple[int, int], ...]:
    """Each tensor as a matrix (p, n): first axis by all others; a vector is one row."""
    return tuple((1, t.size) if len(t.shape) < 2 else (t.shape[0], math.prod(t.shape[1:])) for t in spec.tensors)


def require_variation(variance: np.ndarray, what: str = "entries") -> None:
    """Raise UsageError if a variance is zero: a density does not exist."""
    if not (variance > 0).all():
        raise UsageError(f"{int((variance == 0).sum())} {what} do not vary between the networks of the fit")
