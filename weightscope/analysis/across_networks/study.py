"""What `weightscope covariance` tells of a population: the joint covariance and the stripes of each matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util import atomic
from weightscope.analysis.across_networks.joint_covariance import CovarianceResult, covariance
from weightscope.errors import UsageError
from weightscope.statistics.group_means import StripeRatio, StripeResult, stripes
from weightscope.statistics.samples import WeightSamples, usable_chunks

_MEANS = {"column": "one per input", "row": "one per output", "grand": "whole matrix"}


@dataclass(frozen=True)
class Study:
    """A covariance with the stripe ratios of the matrices in it.

    Attributes:
        covariance: the joint result.
        stripes: name of a tensor with two axes -> its stripe ratios.
    """

    covariance: CovarianceResult
    stripes: dict[str, StripeResult]

    def text(self) -> str:
        """Counts, and a table of stripe ratios."""
        found = self.covariance
        lines = [f"{found.n} networks, {found.spec.size} coordinates in {len(found.spec)} tensors"]
        if found.excluded:
            lines.append(f"{found.excluded} networks are left out: they diverged or hold numbers that are not finite")
        if constant := found.diagnostics.get("constant"):
            lines.append(f"{constant} coordinates do not vary over the networks")
        if self.stripes:
            width = max(map(len, self.stripes))
            lines += ["", "variance of group means, in units of what independent entries would give (95 % interval):"]
            lines.append(f"{'':{width}}  {'column means':>22}  {'row means':>22}  {'grand mean':>22}")
            lines += [
                f"{name:{width}}  " + "  ".join(f"{_ratio(getattr(found, kind)):>22}" for kind in _MEANS)
                for name, found in self.stripes.items()
            ]
            lines.append("column means: over outputs, one per input; row means: over inputs, one per output")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the matrix."""
        found = self.covariance
        return {
            "n": found.n,
            "excluded": found.excluded,
            "kind": found.kind,
            "blocks": {name: [part.start, part.stop] for name, part in found.blocks.items()},
            "diagnostics": {key: _plain(value) for key, value in found.diagnostics.items()},
            "stripes": {
                name: {
                    kind: {"ratio": ratio.value, "ci95": list(ratio.ci95), "p": ratio.p}
                    for kind in _MEANS
                    for ratio in [getattr(result, kind)]
                }
                for name, result in self.stripes.items()
            },
        }

    def plot(self, path: str | Path, *, means: bool = False) -> None:
        """Write the covariance as a picture, its blocks ruled off (MLP paper, Fig. 1).

        Args:
            path: a .png, .pdf or .svg file.
            means: average over hidden units, which shows stripes that single entries bury in noise.
        """
        from weightscope import plots

        found = self.covariance
        title = f"{found.kind.capitalize()} over {found.n} networks" + (", mean over hidden units" if means else "")
        groups = self.groups() if means else None
        axes = plots.covariance_map(found.matrix, found.blocks, kind=found.kind, title=title, groups=groups)
        plots.save(axes.figure, path)

    def groups(self) -> dict[str, np.ndarray]:
        """For `plots.covariance_map`: the entries of each matrix that differ in the hidden unit alone."""
        tensors = self.covariance.spec.tensors
        return {t.name: over_hidden_units(t.shape) if len(t.shape) == 2 else np.arange(t.size) for t in tensors}

    def save_matrix(self, path: str | Path) -> None:
        """Write `matrix`, `mean`, and the blocks' `names` and `stops` as an .npz file.

        A matrix that was made on the disk (`covariance(file=...)`) lies there already, and nothing is written.

        Raises:
            UsageError: if the file's name does not end in .npz.
        """
        if isinstance(self.covariance.matrix, np.memmap):
            return
        if Path(path).suffix != ".npz":
            raise UsageError(f"the matrix is written as .npz, found {path}")
        found = self.covariance
        stops = np.array([part.stop for part in found.blocks.values()])
        with atomic.replacing(path) as file:
            np.savez(file, matrix=found.matrix, mean=found.mean, names=np.array(list(found.blocks)), stops=stops)


def over_hidden_units(shape: Sequence[int]) -> np.ndarray:
    """The number of each entry's row or column, whichever are fewer, for a matrix flattened row by row.

    An MLP's hidden units are the longer side: W1 (p, d) is grouped by its columns, W2 (d, p) by its rows.
    """
    rows, columns = shape
    return np.repeat(np.arange(rows), columns) if rows < columns else np.tile(np.arange(columns), rows)


def study(source: WeightSamples, select: str | Sequence[str] | None = "*.mlp.fc?.weight", **options: Any) -> Study:
    """The covariance of the selected tensors, and the stripe ratios of those with two axes.

    Args:
        source: a population, or an array with a spec.
        select: patterns of tensor names.
        options: passed on to `covariance`.

    Raises:
        UsageError: see `covariance`.
        DataError: if fewer than 3 networks are usable.
    """
    found = covariance(source, select, **options)
    matrices = [t.name for t in found.spec.tensors if len(t.shape) == 2 and t.name in source.spec.slices]
    return Study(found, {name: stripes(_tensor(source, name)) for name in matrices})


def _tensor(source: WeightSamples, name: str) -> np.ndarray:
    """One tensor of all networks that did not diverge, (N, *shape)."""
    rows = np.concatenate([rows for rows, _ in usable_chunks(source, [name])])
    return rows.reshape(-1, *source.spec[name].shape)


def _ratio(found: StripeRatio) -> str:
    return f"{found.value:.2f} ({found.ci95[0]:.2f} to {found.ci95[1]:.2f})"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
