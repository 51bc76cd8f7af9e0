"""Mean maps of state-space layers: statistics, text and pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope._util.results import Result, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class StateSpaceLayer:
    """One state-space layer on sequences of n tokens.

    Attributes:
        layer: number of the network's layer, from its path: 1 and 3 in a hybrid with attention in 0 and 2; the index
            among the state-space layers if their paths have no growing numbers.
        name: path of the mixer.
        map: (n, n), (1/D) sum_d M_d, mean over sequences; rows are outputs, columns inputs.
        mask: (n, n), (1 / D N) sum_d sum_n prod_k exp(Delta[k, d] A[d, n]), mean over sequences: 1 on the diagonal.
        error: largest difference of the layer's output from the one that its maps give, over the largest output.
    """

    layer: int
    name: str
    map: np.ndarray
    mask: np.ndarray
    error: float

    def statistics(self) -> dict[str, Any]:
        """Numbers of the maps.

        - reach: mean of the mask below the diagonal, 1 if no state decays (linear attention), 0 if all do at once;
        - self: share of sum |map| on the diagonal;
        - offset: the distance i - j > 0 with the largest mean |map|, None for a single token;
        - offset_share: share of sum |map| at this distance.
        """
        weights, n = np.abs(self.map), len(self.map)
        total = float(weights.sum()) or 1.0
        means = [float(weights.diagonal(-k).mean()) for k in range(1, n)]
        offset = 1 + int(np.argmax(means)) if means else None
        return {
            "layer": self.layer,
            "reach": float(self.mask[np.tril_indices(n, -1)].mean()) if n > 1 else 1.0,
            "self": float(np.trace(weights)) / total,
            "offset": offset,
            "offset_share": 0.0 if offset is None else float(weights.diagonal(-offset).sum()) / total,
        }


@dataclass(frozen=True, eq=False, repr=False)
class StateSpaceMaps(Result):
    """Mean maps and masks of every state-space layer of a model.

    Attributes:
        layers: in order.
        sequences: B.
        tokens: n.
    """

    layers: tuple[StateSpaceLayer, ...]
    sequences: int
    tokens: int

    def summary(self) -> str:
        """Numbers of layers, sequences and tokens."""
        return f"maps of {len(self.layers)} state-space layers on {self.sequences} sequences of {self.tokens} tokens"

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer; see `StateSpaceLayer.statistics`."""
        return [layer.statistics() for layer in self.layers]

    def text(self) -> str:
        """A table with one line for each layer."""
        table = [
            [
                *(str(row["layer"]), f"{row['reach']:.3f}", f"{row['self']:.1%}"),
                *("-" if row["offset"] is None else str(row["offset"]), f"{row['offset_share']:.1%}"),
            ]
            for row in self.rows()
        ]
        names = ("layer", "reach", "on itself", "strongest distance", "share")
        return f"{self.summary()}\n\n{text_table(names, table, left=())}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types, without the maps."""
        layers = [{"name": layer.name, "error": layer.error, **layer.statistics()} for layer in self.layers]
        return {"sequences": self.sequences, "tokens": self.tokens, "layers": layers}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Draw the mean maps and, below them, the mean masks, layers across (thesis Fig. 3.24 and 3.34).

        Args:
            path: a .png, .pdf or .svg file to write; None to return the figure only.
            title: instead of the one in numbers.
        """
        from weightscope import plots

        if title is None:
            reach = [row["reach"] for row in self.rows()]
            title = f"State-space maps over {self.sequences} sequences; mean of the masks {np.mean(reach):.2f}"
        figure = plots.matrix_grid(
            [[layer.map for layer in self.layers], [layer.mask for layer in self.layers]],
            row_labels=["map", "mask"],
            column_labels=[f"layer {layer.layer}" for layer in self.layers],
            clip=None,
            quantity="what a token (across) adds to a later one (down), mean over channels",
            title=title,
        )
        if path is not None:
            plots.save(figure, path)
        return figure
