"""`describe`: one row for each weight matrix of a model, and the statistics of structure that `watch` follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, svds
from torch import Tensor

from weightscope._util.names import joined, label_of
from weightscope._util.results import Result, finite_or_none, row_table
from weightscope._util.threads import one_thread, threads_for
from weightscope.analysis.attention_products import ModelProducts, compute, read_once
from weightscope.anatomy import FINDERS, Model, ModuleTensors, NamedTensors, parts_of
from weightscope.errors import AnatomyError, DataError
from weightscope.population import open_network
from weightscope.statistics.slices import centre_focus, slice_moments
from weightscope.statistics.stripes import stripe_terms

Row = dict[str, Any]
STATISTICS = ("beta", "alpha", "z", "column_ratio", "row_ratio", "relative_spread")
_OF = {"qk": "q", "vo": "o", "cb": "C"}  # product -> the factor on whose tensor's row it stands


class Structure:
    """The parts of a model, found once; `rows` then only computes with its present weights.

    A row has `part`, `layer`, `name` of the module, `tensor` and those of `STATISTICS` that the part has:

    - "qk": means over heads of beta, alpha and z of W_Q W_K^T; "vo": those of W_V W_O of the layer; "cb": means over
      groups of W_C^T W_B of a state-space layer; see `products`;
    - "fc1": `column_ratio` and `row_ratio` of fc1 W (p, n), as of `stripes` with a mean over networks of zero,
      p mean_j((mean_i W_ij)^2) / mean(W^2) and n mean_i((mean_j W_ij)^2) / mean(W^2): 1 in expectation for independent
      entries of mean zero, p or n where all rows or columns are equal;
    - "filters": `relative_spread` of a depthwise convolution, the mean squared distance of its filters' variance from
      their centre in units of that of even variance; see `covariance_within`.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        self.tensors = tensors
        self.parts: dict[str, Sequence[Any]] = dict.fromkeys(FINDERS, ())
        self.unread: dict[str, str] = {}  # what looks like a part and cannot be read -> why
        for kind in FINDERS:
            try:
                self.parts[kind] = found = parts_of(kind, tensors, strict=None)
                self.unread |= {one.name: one.why for one in found.unread}
            except AnatomyError as error:
                self.unread[kind] = str(error)
        self._products: ModelProducts | None = None
        self._tensor: dict[tuple[str, str], str] = {}  # part and name of a module -> tensor
        if self.parts["attention modules"] or self.parts["state-space layers"]:
            try:
                self._products = ModelProducts(tensors)
            except AnatomyError as error:  # cross-attention alone
                self.unread["attention modules"] = str(error)
        for part in (*self._products.parts, *self._products.state_spaces) if self._products else ():
            factors = part.parameters
            self._tensor |= {(key, part.name): factors[name][0] for key, name in _OF.items() if name in factors}

    def of(self, tensors: ModuleTensors) -> "Structure":
        """This structure with the present weights of its module; found anew if the module has other tensors."""
        sizes = ([(name, one.shape(name)) for name in one.names] for one in (self.tensors, tensors))
        if next(sizes) != next(sizes):
            return Structure(tensors)
        self.tensors._tensors = tensors._tensors
        return self

    def rows(self) -> list[Row]:
        """One row for each part; None for numbers that are not finite."""
        out = [*self._of_products()]
        for part in self.parts["MLPs"]:
            matrix, ratios = part.read("fc1").cpu().double().numpy(), {}
            if np.isfinite(matrix).all() and matrix.any():
                total, column, row, _ = stripe_terms(matrix[None])[0]
                ratios = {"column_ratio": column / total, "row_ratio": row / total}
            out.append(_row("fc1", part, part.parameters["fc1"][0], ratios))
        for part in self.parts["depthwise convolutions"]:
            samples = part.read().cpu().flatten(1).numpy()
            try:
                spread = {"relative_spread": centre_focus(samples, part.kernel, slice_moments(samples)).relative_spread}
            except DataError:  # fewer than two filters are finite
                spread = {}
            out.append(_row("filters", part, part.parameters[0], spread))
        return out

    def _of_products(self) -> list[Row]:
        if self._products is None:
            return []
        compute(self._products, value_heads=False)
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self._products.rows:
            found.setdefault((row["part"], row["name"]), []).append(row)
        return [
            {"part": key[0], "layer": rows[0]["layer"], "name": key[1], "tensor": self._tensor.get(key)}
            | {column: _mean([row[column] for row in rows]) for column in STATISTICS[:3]}
            for key, rows in found.items()
        ]

    def norms(self) -> dict[str, float | None]:
        """Frobenius norm of each weight matrix, by the tensor's name."""
        names = self.matrices()
        values = [torch.linalg.vector_norm(self.tensors.get(name), dtype=torch.float32).cpu() for name in names]
        return {name: finite_or_none(float(value)) for name, value in zip(names, values, strict=True)}

    def matrices(self) -> list[str]:
        """The weights with two axes or more, tied ones once; not vectors with further axes of 1 entry."""
        once: dict[Any, str] = {}
        for name in self.tensors.names:
            shape = self.tensors.shape(name)
            if len(shape) == 2 or (len(shape) > 2 and max(shape) < math.prod(shape)):
                once.setdefault(self.tensors.identity(name), name)
        return list(once.values())

    def notes(self) -> list[str]:
        """What looks like a part and cannot be read."""
        why = joined((f"`{name}` {why}" for name, why in self.unread.items()), 1)
        return [f"without statistics of structure: {why}"] * bool(self.unread)


def _row(kind: str, part: Any, tensor: str, values: Mapping[str, float]) -> Row:
    numbers = {key: finite_or_none(float(value)) for key, value in values.items()}
    return {"part": kind, "layer": part.layer, "name": part.name, "tensor": tensor} | numbers


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value of a matrix (m, n), to about 1e-6 of it, by Lanczos' method (ARPACK) in float32."""
    w = matrix.float().cpu().numpy()
    scale, least = float(np.abs(w).max(initial=0)), min(w.shape)
    if scale == 0 or least < 3:
        return float(np.linalg.norm(w, 2)) if scale else 0.0
    start = np.random.default_rng(0).standard_normal(least).astype(w.dtype)
    with threads_for("product", least):
        try:
            return scale * float(svds(w / scale, k=1, tol=1e-6, v0=start, return_singular_vectors=False)[0])
        except ArpackError:  # of singular values that are all equal
            return float(np.linalg.norm(w, 2))


@dataclass(frozen=True, repr=False)
class Description(Result):
    """One row for each weight matrix of a model: its size, and the structure of the part that it is in.

    `name` of the tensor, `type`, `layer` among those of the type (None outside of known parts), `shape` as text, `norm`
    (Frobenius), `spectral_norm` s, `stable_rank` norm^2 / s^2 (None of zeros and of numbers that are not finite), and
    those of `Structure`: on the row of the queries those of W_Q W_K^T, on that of the outputs those of W_V W_O.
    """

    source: str  # label of the model
    records: list[Row]
    weights: int  # number of entries of these matrices
    unread: list[str]  # what looks like a part and cannot be read

    def rows(self) -> list[Row]:
        return self.records

    def summary(self) -> str:
        return f"{self.source}: {len(self.records)} weight matrices, {self.weights:,} weights"

    def notes(self) -> list[str]:
        return [*(meaning for key, _, _, meaning in _COLUMNS if meaning and self._has(key)), *self.unread]

    def _has(self, key: str) -> bool:
        return any(row[key] is not None for row in self.records)

    def text(self) -> str:
        """The table without columns that no matrix has, and what they mean."""
        columns = {head: f"{{{key}:{form}}}" for key, head, form, _ in _COLUMNS if self._has(key)}
        table = row_table(columns, self.records, left=(0, 1))
        return "\n".join([self.summary(), "", table, *[""] * bool(self.notes()), *self.notes()])


# Key, head and format of a column of the table, and what it means.
_COLUMNS = (
    ("name", "tensor", "", ""),
    ("type", "type", "", ""),
    ("shape", "shape", "", ""),
    ("norm", "norm", ".4g", ""),
    ("spectral_norm", "spectral", ".4g", ""),
    ("stable_rank", "stable rank", ".1f", ""),
    ("beta", "beta", "+.3g", "beta, alpha: W_Q W_K^T ~ alpha Z + beta I; of outputs W_V W_O, of B C W_C^T W_B"),
    ("alpha", "alpha", ".3g", ""),
    ("z", "z", "+.1f", "z: beta in standard deviations of that of independent Gaussian factors"),
    ("column_ratio", "columns", ".2f", "columns, rows: mean square of fc1's column and row means, 1 if independent"),
    ("row_ratio", "rows", ".2f", ""),
    ("relative_spread", "spread", ".2f", "spread: of the filters' variance about their centre, 1 if even"),
)


@one_thread()
def describe(model: Model, config: Mapping[str, Any] | None = None) -> Description:
    """Describe each weight matrix of a model: type, shape, norms, stable rank, diagonals of products, stripes.

    Convolutions are matrices (C_out, C_in k^2). What is in a file, without reading its numbers, tells `inspect`.

    Args:
        model: a path, `"PATH.pop::k"`, `hf://org/name[@revision]`, a `Checkpoint`, a module, a mapping of tensors.
        config: of the model, for mappings and files without one; see `products`.

    Raises:
        DataError: if it cannot be read.

    Example:
        >>> print(describe("vit/"))
        >>> describe(vit).to_pandas().sort_values("stable_rank")
    """
    source = open_network(model)
    structure = Structure(read_once(source, config))
    found: dict[str, Row] = {}
    for row in structure.rows():
        found.setdefault(row["tensor"], {}).update({key: row[key] for key in STATISTICS if key in row})
    types: dict[str, tuple[str, int | None, list[str]]] = {}  # tensor -> kind of part, layer, matrices of the part
    for kind, parts in structure.parts.items():
        for part in parts:
            own = part.parameters
            named = own.items() if isinstance(own, Mapping) else [("", own)]
            for matrix, names in named:
                for name in names:
                    types.setdefault(name, (kind, getattr(part, "layer", None), []))[2].append(matrix)
    rows, weights = [], 0
    for name in structure.matrices():
        value = structure.tensors.get(name)
        weights += value.numel()
        kind, layer, own = types.get(name, ("matrix" if value.ndim == 2 else "convolution", None, []))
        text = " ".join([kind.removesuffix(" modules").removesuffix("s"), *own]).strip()
        row = {"name": name, "type": text, "layer": layer, "shape": "x".join(map(str, value.shape))}
        rows.append(row | _sizes(value) | dict.fromkeys(STATISTICS) | found.get(name, {}))
    return Description(label_of(model), rows, weights, structure.notes())


def _sizes(value: Tensor) -> Row:
    """Norms of a weight as a matrix, without the leading axes of one entry."""
    while value.ndim > 2 and len(value) == 1:
        value = value[0]
    norm = finite_or_none(float(torch.linalg.vector_norm(value, dtype=torch.float64)))
    largest = None if norm is None else spectral_norm(value.flatten(1))
    return {"norm": norm, "spectral_norm": largest, "stable_rank": (norm / largest) ** 2 if norm and largest else None}
