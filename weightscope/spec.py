"""`WeightSpec`: names and shapes of a network's tensors, and their places in a flat weight vector.

The weight vector (D,) of a network is the concatenation of its tensors in the order of the spec, each flattened in
row-major order. `pack` and `unpack` are exact inverses. A missing, misshapen or unknown tensor is an error.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from weightscope._util.names import listing, matching, suggestion
from weightscope.errors import SpecError

Role = Literal["parameter", "statistic"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a network: its key in the state dict, its shape, `()` for a scalar, and its role.

    The role is `"parameter"` (trained) or `"statistic"` (a normalisation layer's running mean or variance).
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "parameter"

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a tensor needs a name, found an empty string")
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in self.shape):
            raise SpecError(f"`{self.name}`: expected a shape of integers >= 0, found {self.shape}")
        if self.role not in get_args(Role):
            raise SpecError(f"`{self.name}`: expected a role of {get_args(Role)}, found {self.role!r}")

    @property
    def size(self) -> int:
        """The number of entries, `prod(shape)`."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightSpec:
    """An immutable, ordered list of a network's tensors, with their slices of the flat weight vector.

    Iterating gives the `TensorSpec`s; `spec[name]` is one of them, and `name in spec` tells whether it exists.

    Example:
        >>> spec = WeightSpec([TensorSpec("fc.weight", (2, 3)), TensorSpec("fc.bias", (2,))])
        >>> spec.size, spec.slices["fc.bias"]
        (8, slice(6, 8, None))
        >>> [t.shape for t in spec]
        [(2, 3), (2,)]
    """

    tensors: tuple[TensorSpec, ...]

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        object.__setattr__(self, "tensors", tuple(tensors))
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise SpecError(f"`{tensor.name}` is duplicated in the spec; names must be unique")
            seen.add(tensor.name)

    @classmethod
    def of(cls, module: Any) -> "WeightSpec":
        """The spec of a `torch.nn.Module`: parameters and floating-point buffers, in state-dict order.

        Tied parameters appear once, under their first name. Integer buffers, such as BatchNorm's
        `num_batches_tracked`, are omitted.
        """
        parameters = {name for name, _ in module.named_parameters()}
        tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - parameters
        return cls(
            TensorSpec(name, tuple(value.shape), "parameter" if name in parameters else "statistic")
            for name, value in module.state_dict().items()
            if value.is_floating_point() and name not in tied
        )

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Name -> the tensor's slice of the flat vector."""
        out, start = {}, 0
        for tensor in self.tensors:
            out[tensor.name] = slice(start, start + tensor.size)
            start += tensor.size
        return out

    @property
    def size(self) -> int:
        """D, the length of the flat vector."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __contains__(self, item: object) -> bool:
        """Whether a name, or exactly this `TensorSpec`, is in the spec."""
        return item in self._by_name if isinstance(item, str) else item in self.tensors

    def __getitem__(self, name: str) -> TensorSpec:
        if name not in self._by_name:
            raise SpecError(f"no tensor {name!r} in this spec of {len(self)}: {suggestion(name, self.names)}")
        return self._by_name[name]

    def __repr__(self) -> str:
        return f"<WeightSpec: {len(self)} tensors, D={self.size}: {listing(self.names, most=4)}>"

    def matching(self, pattern: str | Sequence[str] = "*") -> list[str]:
        """The names that match any of the shell patterns (`*`, `?`, `[..]`), in the spec's order.

        Patterns are comma-separated or a sequence. UsageError if one of them matches no name.
        """
        return matching(pattern, self.names)

    def select(self, pattern: str | Sequence[str] = "*") -> "WeightSpec":
        """The sub-spec of the tensors whose names match, as by `matching`."""
        return WeightSpec(map(self._by_name.__getitem__, self.matching(pattern)))

    def columns(self, sub: "WeightSpec") -> np.ndarray:
        """Indices of the entries of `sub` in this spec's flat vector, in the order of `sub`, shape (sub.size,)."""
        for tensor in sub.tensors:
            if self[tensor.name].shape != tensor.shape:
                raise SpecError(f"`{tensor.name}`: expected {self[tensor.name].shape}, found {tensor.shape}")
        parts = [np.arange(self.slices[name].start, self.slices[name].stop) for name in sub.names]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def pack(self, tensors: Mapping[str, Any], dtype: Any = np.float32) -> np.ndarray:
        """Concatenate named arrays, or torch tensors on the CPU, into one vector (D,).

        SpecError if a tensor is missing, has another shape, or is not in the spec.
        """
        missing = [name for name in self.names if name not in tensors]
        unknown = [name for name in tensors if name not in self.slices]
        if missing or unknown:
            pairs = (("missing", missing), ("not in the spec", unknown))
            found = "; ".join(f"{what} {listing(names)}" for what, names in pairs if names)
            raise SpecError(f"expected exactly the tensors of the spec: {found}")
        out = np.empty(self.size, dtype=dtype)
        for tensor in self.tensors:
            value = np.asarray(tensors[tensor.name])
            if value.shape != tensor.shape:
                raise SpecError(f"`{tensor.name}`: expected {tensor.shape}, found {value.shape}")
            out[self.slices[tensor.name]] = value.reshape(-1)
        return out

    def unpack(self, vector: Any) -> dict[str, Any]:
        """Split vectors (..., D), NumPy or torch, into named arrays (..., *shape); views where possible."""
        if vector.shape[-1] != self.size:
            raise SpecError(f"expected vectors of length {self.size}, found {vector.shape[-1]}")
        lead = tuple(vector.shape[:-1])
        return {t.name: vector[..., self.slices[t.name]].reshape(lead + t.shape) for t in self.tensors}

    def differences(self, other: "WeightSpec") -> list[str]:
        """One line for each tensor that differs in `other`; empty if the specs are equal."""
        mine, theirs = ({t.name: t for t in s.tensors} for s in (self, other))
        lines = [f"`{n}`: expected {t.shape}, found none" for n, t in mine.items() if n not in theirs]
        lines += [f"`{n}`: not expected, found {t.shape}" for n, t in theirs.items() if n not in mine]
        lines += [
            f"`{n}`: expected {t.shape} {t.role}, found {theirs[n].shape} {theirs[n].role}"
            for n, t in mine.items()
            if n in theirs and t != theirs[n]
        ]
        return lines or ["expected the same tensors in another order"] * (self != other)

    def to_json(self) -> str:
        """Compact JSON: `[[name, shape, role], ...]`."""
        return json.dumps([[t.name, list(t.shape), t.role] for t in self.tensors], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "WeightSpec":
        """The inverse of `to_json`; SpecError if the text has another form."""
        try:
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise TypeError(f"a {type(rows).__name__}")
            return cls(TensorSpec(name, tuple(shape), role) for name, shape, role in rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise SpecError(f"expected a JSON list of [name, shape, role], found invalid text: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of `to_json()`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
