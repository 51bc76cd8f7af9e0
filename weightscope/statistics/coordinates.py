"""Coordinates of a network: tensors, norms folded into the next linear map, and functions of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations

import numpy as np

from weightscope.errors import DataError, SpecError, UsageError, WeightscopeError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.moments import finite_rows
from weightscope.statistics.permutations import PermutationSpec, View, is_signed

# (normalisation layer, linear map that follows it), as named in timm's and this package's ConvNeXt and ViT.
_READERS: tuple[tuple[str, str], ...] = (
    (r"(.*\.)norm", r"\1mlp.fc1"),
    (r"(.*\.)norm1", r"\1attn.qkv"),
    (r"(.*\.)norm2", r"\1mlp.fc1"),
    (r"(.*\.)downsample\.0", r"\1downsample.1"),
    (r"(.*\.)?head\.norm", r"\1head.fc"),
    (r"norm|fc_norm", r"head"),
)


def norm_pairs(spec: WeightSpec) -> tuple[tuple[str, str], ...]:
    """(normalisation layer, linear map that follows it) of every pair that can be folded, by the modules' names."""
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
            pairs.append((norm, linear))
    return tuple(pairs)


def fold(tensors: Mapping[str, np.ndarray], pairs: tuple[tuple[str, str], ...]) -> dict[str, np.ndarray]:
    """Fold gains and biases: W <- W diag(g), c <- c + W b, g <- 1, b <- 0."""
    out = dict(tensors)
    for norm, linear in pairs:
        gain, shift = (tensors.get(f"{norm}.{part}") for part in ("weight", "bias"))
        weight, bias = (tensors.get(f"{linear}.{part}") for part in ("weight", "bias"))
        if bias is not None and shift is not None and weight is not None:
            # A convolution without padding adds the shift once for each pixel of its filter.
            sums = weight.reshape(*weight.shape[:3], -1).sum(axis=-1)  # (N, out, in)
            out[f"{linear}.bias"] = bias + np.einsum("noi,ni->no", sums, shift)
        if weight is not None and gain is not None:
            out[f"{linear}.weight"] = weight * gain.reshape(len(gain), 1, -1, *[1] * (weight.ndim - 3))
    for norm in {norm for norm, _ in pairs}:
        for part, neutral in (("weight", np.ones_like), ("bias", np.zeros_like)):
            if f"{norm}.{part}" in out:
                out[f"{norm}.{part}"] = neutral(tensors[f"{norm}.{part}"])
    return out


# Computed coordinates: tensors of n networks, name -> (n, *shape), to numbers (n, ...), or several by name.
Function = Callable[[Mapping[str, np.ndarray]], np.ndarray | Mapping[str, np.ndarray]]


class Coordinates:
    """The selected tensors, with norms folded on request, followed by computed coordinates.

    `tensors` are the selected ones, `computed` what the functions give, `spec` is that of both together, and `reads`
    that of the tensors that must be read: all of them for computed coordinates. UsageError if there is nothing to
    compute, or a function raises an error or returns another shape than (n, ...).
    """

    def __init__(
        self,
        spec: WeightSpec,
        select: str | Sequence[str] | None = "*",
        *,
        computed: Mapping[str, Function],
        fold_norms: bool = False,
    ) -> None:
        self.tensors = () if select is None else spec.select(select).tensors
        self._computed, self._pairs = computed, norm_pairs(spec) if fold_norms else ()
        if fold_norms and not self._pairs:
            raise SpecError("fold_norms: no norm of these tensors is known to be read by a linear map; leave it out")
        names = {tensor.name for tensor in (spec.tensors if computed else self.tensors)}
        needed = set(names)
        for norm, linear in self._pairs:
            needed |= {f"{norm}.weight"} if f"{linear}.weight" in names else set()
            needed |= {f"{norm}.bias", f"{linear}.weight"} if f"{linear}.bias" in names else set()
        self.reads = WeightSpec(t for t in spec.tensors if t.name in needed)
        # ones: quotients of zeros are not finite
        found = self._values(self.reads.unpack(np.ones((1, self.reads.size), np.float32))) if computed else {}
        self.computed = tuple(TensorSpec(name, value.shape[1:]) for name, value in found.items())
        self.spec = WeightSpec([*self.tensors, *self.computed])
        if not self.spec.size:
            raise UsageError("select: nothing to compute; expected tensors or computed coordinates, found neither")

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The coordinates of networks; DataError if those computed of a finite network are not."""
        if self.spec == self.reads and not self._pairs:
            return rows
        # Non-finite networks give non-finite rows, which are counted later.
        with np.errstate(all="ignore"):
            tensors = fold(self.reads.unpack(rows), self._pairs)
            parts = {tensor.name: tensors[tensor.name] for tensor in self.tensors} | self._values(tensors)
        out = np.concatenate([part.reshape(len(rows), -1) for part in parts.values()], axis=1)
        if self._computed and (bad := finite_rows(rows) & ~finite_rows(out)).any():
            _refuse_not_finite(self.spec.unpack(out[bad.argmax()]))
        return out

    def _values(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        out, n = {}, len(next(iter(tensors.values())))
        for given, function in self._computed.items():
            try:
                with np.errstate(all="ignore"):  # what is not finite is an error of `__call__`
                    found = function(tensors)
            except WeightscopeError:
                raise
            except Exception as error:
                raise UsageError(f"computed {given}: the function raised {type(error).__name__}: {error}") from error
            for name, value in found.items() if isinstance(found, Mapping) else [(given, found)]:
                out[name] = np.asarray(value)
                if out[name].ndim < 1 or len(out[name]) != n:
                    shape = out[name].shape
                    raise UsageError(f"computed {name}: expected numbers ({n}, ...), one row a network, found {shape}")
        return out

    def permutations(self, whole: PermutationSpec) -> PermutationSpec:
        """The permutation specification of the coordinates, from that of all tensors.

        The axes of computed ones are found by renumbering the units of each group in random weights: they leave it as
        it is, or renumber an axis. UsageError if they do neither.
        """
        kept = {tensor.name for tensor in self.tensors}
        views = [*whole.restrict(kept).views] if kept else []
        if self.computed:
            rng = np.random.default_rng(0)
            weights = {name: x[0] for name, x in self.reads.unpack(rng.standard_normal((1, self.reads.size))).items()}
            signed = {label[1:] for view in whole.views for label in view.labels if is_signed(label)}
            axes = {t.name: [None] * len(t.shape) for t in self.computed}  # type: dict[str, list[str | None]]
            still = {group: (np.arange(n), np.ones(n)) for group, n in whole.sizes.items()}
            before = self._of_one(weights)
            _refuse_not_finite(before)
            for group, n in whole.sizes.items():
                heads, order = whole.heads.get(group, (None, 1))[1], np.arange(n)
                for part in np.split(order.copy(), heads):  # a random cycle in each head, which leaves no unit in place
                    cycle = rng.permutation(part)
                    order[cycle] = np.roll(cycle, 1)
                signs = rng.choice([-1.0, 1.0], n) if group in signed else np.ones(n)
                after = self._of_one(whole.apply(weights, {**still, group: (order, signs)}))
                for name, values in before.items():
                    for axis, label in _renumbered(name, group, values, after[name], order, signs):
                        axes[name][axis] = label
            views += [View(t.name, t.name, t.shape, tuple(axes[t.name])) for t in self.computed]
        return PermutationSpec(tuple(views), whole.heads, whole.notes)

    def _of_one(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The computed coordinates of one network."""
        found = self._values(fold({name: x[None] for name, x in weights.items()}, self._pairs))
        return {name: value[0] for name, value in found.items()}


def _refuse_not_finite(tensors: Mapping[str, np.ndarray]) -> None:
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise DataError(f"computed {name}: expected finite numbers of finite weights, found NaN or infinity")


def _renumbered(
    name: str, group: str, before: np.ndarray, after: np.ndarray, order: np.ndarray, signs: np.ndarray
) -> list[tuple[int, str]]:
    """The axes along which numbers change as the units of a group do, each with its label."""
    alike = [i for i, n in enumerate(before.shape) if n == len(order)]
    for axes in chain.from_iterable(combinations(alike, n) for n in range(3)):
        for label, factors in ((group, np.ones(len(order))), (f"~{group}", signs)):
            expected = before
            for i in axes:
                shape = [-1 if i == j else 1 for j in range(before.ndim)]
                expected = np.take(expected, order, axis=i) * factors.reshape(shape)
            if np.allclose(expected, after, rtol=1e-5, atol=1e-8 * np.abs(before).max(initial=0)):
                return [(i, label) for i in axes]
    raise UsageError(
        f"computed {name}: renumbering the units of {group} changes it otherwise than by renumbering an axis, "
        f"found axes {before.shape}; compute a function that does, or leave out exchangeable"
    )
