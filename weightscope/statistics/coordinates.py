"""Coordinates of a network: tensors, norms folded into the next linear map, and functions of them."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

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


# A computed coordinate: tensors of n networks, name -> (n, *shape), to numbers (n, ...).
Function = Callable[[Mapping[str, np.ndarray]], np.ndarray]


class Coordinates:
    """The selected tensors, with norms folded on request, followed by computed coordinates.

    `tensors` are the selected ones, `spec` is that of the result, in which computed coordinates are tensors too, and
    `reads` that of the tensors that must be read: all of them for computed coordinates.
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
        names = {tensor.name for tensor in (spec.tensors if computed else self.tensors)}
        needed = set(names)
        for norm, linear in self._pairs:
            needed |= {f"{norm}.weight"} if f"{linear}.weight" in names else set()
            needed |= {f"{norm}.bias", f"{linear}.weight"} if f"{linear}.bias" in names else set()
        self.reads = WeightSpec(t for t in spec.tensors if t.name in needed)
        zeros = self.reads.unpack(np.zeros((1, self.reads.size), np.float32)) if computed else {}
        found = [TensorSpec(name, self._values(name, zeros).shape[1:]) for name in computed]
        self.spec = WeightSpec([*self.tensors, *found])

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The coordinates of networks."""
        if self.spec == self.reads and not self._pairs:
            return rows
        # Non-finite networks give non-finite rows, which are counted later.
        with np.errstate(all="ignore"):
            tensors = fold(self.reads.unpack(rows), self._pairs)
            parts = [tensors[tensor.name] for tensor in self.tensors]
            parts += [self._values(name, tensors) for name in self._computed]
        return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1)

    def _values(self, name: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        found, n = np.asarray(self._computed[name](tensors)), len(next(iter(tensors.values())))
        if found.ndim < 1 or len(found) != n:
            raise UsageError(f"computed {name}: expected numbers ({n}, ...), one row a network, found {found.shape}")
        return found
