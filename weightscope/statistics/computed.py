"""Computed coordinates: functions of a network's weights, such as the diagonal of fc2 @ fc1.

An expression is a function's name and tensors joined by `@`, for instance
`diag(stages.0.blocks.{i}.mlp.fc2.weight @ stages.0.blocks.{i}.mlp.fc1.weight)` (thesis Fig. 3.40). `{i}` is a
placeholder for one piece of a name without dots; the expression is expanded to one group of coordinates for
each value for which all its tensors exist.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from weightscope._util.names import listing
from weightscope.errors import UsageError
from weightscope.spec import TensorSpec, WeightSpec


def _product(matrix: np.ndarray) -> np.ndarray:
    return matrix


def _diagonal(matrix: np.ndarray) -> np.ndarray:
    if matrix.shape[-1] != matrix.shape[-2]:
        raise UsageError(f"diag: expected a square matrix, found {matrix.shape[1:]}")
    return np.diagonal(matrix, axis1=-2, axis2=-1)


def _trace(matrix: np.ndarray) -> np.ndarray:
    return _diagonal(matrix).sum(axis=-1)


def _mean(matrix: np.ndarray) -> np.ndarray:
    return matrix.mean(axis=(-2, -1))


def _row_means(matrix: np.ndarray) -> np.ndarray:
    return matrix.mean(axis=-1)


def _column_means(matrix: np.ndarray) -> np.ndarray:
    return matrix.mean(axis=-2)


# Functions of a matrix or a product of matrices, (N, a, b) -> (N, ...). A tensor with more axes is reshaped to
# (first axis, all others).
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "product": _product,
    "diag": _diagonal,
    "trace": _trace,
    "mean": _mean,
    "row_means": _row_means,
    "column_means": _column_means,
}


@dataclass(frozen=True)
class Computed:
    """One group of computed coordinates of a network.

    Attributes:
        function: a key of `FUNCTIONS`, or `"center"`: the central pixel of every filter.
        tensors: the names of the factors, multiplied from left to right; one for `"center"`.
    """

    function: str
    tensors: tuple[str, ...]

    @property
    def name(self) -> str:
        """The expression, which is also the name of these coordinates in a spec."""
        return f"{self.function}({' @ '.join(self.tensors)})"

    def tensor_spec(self, spec: WeightSpec) -> TensorSpec:
        """Name and shape of the result.

        Raises:
            UsageError: if the shapes do not match.
        """
        zeros = {name: np.zeros((1, *spec[name].shape), dtype=np.float32) for name in self.tensors}
        return TensorSpec(self.name, self(zeros).shape[1:])

    def __call__(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The values.

        Args:
            tensors: name -> (N, *shape).

        Returns:
            (N, ...).

        Raises:
            UsageError: if the shapes do not match.
        """
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
        if len(self.tensors) != 1 or filters.ndim < 4 or filters.shape[-1] % 2 == 0 or filters.shape[-2] % 2 == 0:
            raise UsageError(
                f"{self.name}: expected one convolution with filters of odd side, found {filters.shape[1:]}"
            )
        middle = filters[..., filters.shape[-2] // 2, filters.shape[-1] // 2]
        return middle.reshape(len(middle), *[n for n in middle.shape[1:] if n != 1])


def parse(expression: str, spec: WeightSpec) -> tuple[Computed, ...]:
    """Expand an expression to the computed coordinates of a network, in the spec's order.

    Args:
        expression: for instance `"center(stages.0.blocks.{i}.conv_dw.weight)"`.
        spec: of the network.

    Raises:
        UsageError: if the expression is invalid, or matches no tensors.

    Example:
        >>> parse("center(blocks.{i}.conv_dw.weight)", spec)[0].name
        'center(blocks.0.conv_dw.weight)'
    """
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
    pieces, seen = re.split(r"(\{\w+\})", pattern), set()
    regex = ""
    for piece in pieces:
        key = piece[1:-1]
        if not re.fullmatch(r"\{[A-Za-z_]\w*\}", piece):
            regex += re.escape(piece)
        elif key in seen:
            regex += f"(?P={key})"
        else:
            seen.add(key)
            regex += f"(?P<{key}>[^.]+)"
    matches = (re.fullmatch(regex, name) for name in spec.names)
    return [match.groupdict() for match in matches if match]


def _fill(pattern: str, values: Mapping[str, str], expression: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"{expression!r}: the placeholder {match[0]} does not occur in the first tensor's name")
        return values[match[1]]

    return re.sub(r"\{(\w+)\}", value, pattern)
