"""Coordinates of a network: tensors, norms folded into the next linear map, and computed ones such as diag(W2 W1)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightscope._util.names import listing
from weightscope.errors import SpecError, UsageError
from weightscope.spec import TensorSpec, WeightSpec

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


def _diagonal(matrix: np.ndarray) -> np.ndarray:
    if matrix.shape[-1] != matrix.shape[-2]:
        raise UsageError(f"diag: expected a square matrix, found {matrix.shape[1:]}")
    return np.diagonal(matrix, axis1=-2, axis2=-1)


# Functions of a matrix or a product of matrices, (N, a, b) -> (N, ...). A tensor with more axes is reshaped to
# (first axis, all others).
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "product": lambda matrix: matrix,
    "diag": _diagonal,
    "trace": lambda matrix: _diagonal(matrix).sum(axis=-1),
    "mean": lambda matrix: matrix.mean(axis=(-2, -1)),
    "row_means": lambda matrix: matrix.mean(axis=-1),
    "column_means": lambda matrix: matrix.mean(axis=-2),
}


@dataclass(frozen=True)
class Computed:
    """One group of computed coordinates of a network."""

    function: str  # a key of `FUNCTIONS`, or `"center"`: the central pixel of every filter
    tensors: tuple[str, ...]  # the names of the factors, multiplied from left to right; one for `"center"`

    @property
    def name(self) -> str:
        """The expression, which is also the name of these coordinates in a spec."""
        return f"{self.function}({' @ '.join(self.tensors)})"

    def tensor_spec(self, spec: WeightSpec) -> TensorSpec:
        """Name and shape of the result."""
        zeros = {name: np.zeros((1, *spec[name].shape), dtype=np.float32) for name in self.tensors}
        return TensorSpec(self.name, self(zeros).shape[1:])

    def __call__(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The values."""
        factors = [tensors[name] for name in self.tensors]
        if self.function == "center":
            return self._center(factors[0])
        matrices = [f.reshape(len(f), f.shape[1] if f.ndim > 1 else 1, -1) for f in factors]
        result = matrices[0]
        for matrix in matrices[1:]:
            if result.shape[2] != matrix.shape[1]:
                shapes = " @ ".join(str(m.shape[1:]) for m in matrices)
                raise UsageError(f"{self.name}: the matrices {shapes} cannot be multiplied")
            result = result @ matrix
        try:
            return FUNCTIONS[self.function](result)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def _center(self, filters: np.ndarray) -> np.ndarray:
        """The middle of the last two axes, (N, ..., k, k) -> (N, ...) without axes of length 1."""
        if len(self.tensors) != 1 or filters.ndim < 4 or not filters.shape[-1] % 2 or not filters.shape[-2] % 2:
            raise UsageError(
                f"{self.name}: expected one convolution with filters of odd side, found {filters.shape[1:]}"
            )
        middle = filters[..., filters.shape[-2] // 2, filters.shape[-1] // 2]
        return middle.reshape(len(middle), *[n for n in middle.shape[1:] if n != 1])


def parse(expression: str, spec: WeightSpec) -> tuple[Computed, ...]:
    """Expand an expression to the computed coordinates of a network, in the spec's order."""
    known = (*FUNCTIONS, "center")
    match = re.fullmatch(r"\s*(\w+)\s*\((.+)\)\s*", expression)
    if match is None or match[1] not in known:
        raise UsageError(
            f"computed: expected FUNCTION(TENSOR @ ...) with FUNCTION one of {', '.join(known)}; found {expression!r}"
        )
    patterns = [part.strip() for part in match[2].split("@")]
    found = []
    for values in _fits(patterns[0], spec):
        names = tuple(_fill(pattern, values, expression) for pattern in patterns)
        if all(name in spec.slices for name in names):
            found.append(Computed(match[1], names))
    if not found:
        raise UsageError(f"computed: {expression!r} matches no tensors; there are {listing(spec.names)}")
    return tuple(found)


def _fits(pattern: str, spec: WeightSpec) -> list[dict[str, str]]:
    """The values of the placeholders for which the pattern is the name of a tensor."""
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        again = match[1] in seen
        seen.add(match[1])
        return f"(?P={match[1]})" if again else f"(?P<{match[1]}>[^.]+)"

    regex = re.sub(r"\\\{([A-Za-z_]\w*)\\\}", group, re.escape(pattern))
    matches = (re.fullmatch(regex, name) for name in spec.names)
    return [match.groupdict() for match in matches if match]


def _fill(pattern: str, values: Mapping[str, str], expression: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"{expression!r}: the placeholder {match[0]} does not occur in the first tensor's name")
        return values[match[1]]

    return re.sub(r"\{(\w+)\}", value, pattern)


class Coordinates:
    """The selected tensors, with norms folded on request, followed by computed coordinates.

    `spec` is that of the result, in which computed coordinates are tensors named by their expression, and `reads` that
    of the tensors that must be read.
    """

    def __init__(
        self,
        spec: WeightSpec,
        select: str | Sequence[str] | None = "*",
        *,
        computed: Sequence[str] = (),
        fold_norms: bool = False,
    ) -> None:
        self._plain = WeightSpec([]) if select is None else spec.select(select)
        self._computed: tuple[Computed, ...] = tuple(c for text in computed for c in parse(text, spec))
        names = {*self._plain.names, *(name for c in self._computed for name in c.tensors)}
        self._pairs = norm_pairs(spec) if fold_norms else ()
        needed = set(names)
        for norm, linear in self._pairs:
            needed |= {f"{norm}.weight"} if f"{linear}.weight" in names else set()
            needed |= {f"{norm}.bias", f"{linear}.weight"} if f"{linear}.bias" in names else set()
        self.reads = WeightSpec(t for t in spec.tensors if t.name in needed)
        self.spec = WeightSpec([*self._plain.tensors, *(c.tensor_spec(spec) for c in self._computed)])

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The coordinates of networks."""
        if self.spec == self.reads and not self._pairs:
            return rows
        # Non-finite networks give non-finite rows, which are counted later.
        with np.errstate(all="ignore"):
            tensors = fold(self.reads.unpack(rows), self._pairs)
            parts = [tensors[name] for name in self._plain.names] + [c(tensors) for c in self._computed]
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)
