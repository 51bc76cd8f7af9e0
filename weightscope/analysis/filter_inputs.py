"""The rank of what depthwise convolutions see: the condition D >= k f^2 in a ConvMixer or ConvNeXt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.results import Result, text_table
from weightscope.analysis.attention_maps.watching import stable_ranks
from weightscope.anatomy import depthwise
from weightscope.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class FilterInputs(Result):
    """Stable ranks of the inputs of a network's depthwise convolutions.

    Attributes:
        names: of the filters' tensors.
        widths: D of each layer.
        kernels: f of each layer.
        stable_ranks: (L, B), of each layer and image.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    kernels: tuple[int, ...]
    stable_ranks: np.ndarray

    def rows(self) -> list[dict[str, Any]]:
        """One row for each layer.

        Keys: `name`, `stable_rank` (k, mean over images) with `low` and `high` (5 % and 95 %), `filter_size` (f),
        `needed` (k f^2), `width` (D), `holds` (D >= k f^2) and `largest_f`, the largest odd f for which it holds.
        """
        out = []
        for name, d, f, ranks in zip(self.names, self.widths, self.kernels, self.stable_ranks, strict=True):
            k = float(ranks.mean())
            low, high = np.quantile(ranks, [0.05, 0.95])
            reach = math.isqrt(int(d / k))
            row = {"name": name, "stable_rank": k, "low": float(low), "high": float(high), "filter_size": f}
            row |= {"needed": k * f * f, "width": d, "holds": d >= k * f * f}
            out.append(row | {"largest_f": reach - (reach + 1) % 2 if reach else 0})
        return out

    def summary(self) -> str:
        """In how many layers the condition holds."""
        rows = self.rows()
        return f"D >= k f^2 holds in {sum(row['holds'] for row in rows)} of {len(rows)} layers"

    def text(self) -> str:
        """A table with one line for each layer."""
        head = ("layer", "k", "5 %", "95 %", "f", "k f^2", "D", "largest f")
        cells = []
        for row in self.rows():
            numbers = (f"{row[key]:.2f}" for key in ("stable_rank", "low", "high"))
            whole = (str(row["filter_size"]), f"{row['needed']:.1f}", str(row["width"]), str(row["largest_f"]))
            cells.append((row["name"], *numbers, *whole))
        return "\n".join([f"stable rank k of inputs, {self.stable_ranks.shape[1]} images", text_table(head, cells),
                          self.summary()])  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"images": int(self.stable_ranks.shape[1]), "layers": self.rows()}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Draw stable ranks against the layer, with the limits D / f^2."""
        from weightscope import plots

        sizes = tuple(dict.fromkeys(self.kernels))
        title = title or self.summary().replace(">=", "≥").replace("^2", "²")
        axes = plots.rank_condition(list(self.stable_ranks), min(self.widths), filter_sizes=sizes, title=title)
        figure = plots.root_figure(axes)
        if path is not None:
            plots.save(figure, path)
        return figure


def filter_inputs(model: nn.Module, images: Tensor, *, batch_size: int = 32) -> FilterInputs:
    """The stable rank `sum s_i^2 / s_1^2` of the input X (pixels, D) of every depthwise convolution, image by image.

    By Proposition 1 of the impulse paper, mixing channels alone gives any output of f x f filters if D >= k f^2, with
    k the rank of X. The stable rank is at most the rank, and X is not centred (Remark 1).

    The model runs in evaluation mode without gradients; modes are restored and hooks removed even after an error.

    Args:
        model: a network with depthwise convolutions, each called once in a forward pass.
        images: (B, c, height, width), normalised as the model expects.
        batch_size: images at a time; affects memory only.

    Raises:
        AnatomyError: if there is no depthwise convolution.
        DataError: if an input is not finite, or a convolution is not called once.

    Source: impulse paper, Remark 1 and Eq. 3.

    Example:
        >>> print(filter_inputs(convmixer, images).text())
    """
    parts = depthwise(model)
    modules = {name: dict(model.named_modules())[name.rpartition(".")[0]] for name in (_name(part) for part in parts)}
    modes = {module: module.training for module in model.modules()}
    found: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    handles = [module.register_forward_pre_hook(_recorder(name, found[name])) for name, module in modules.items()]
    reference = next(model.parameters())
    batches = images.to(reference).split(batch_size)
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    for name, ranks in found.items():
        if len(ranks) != len(batches):
            raise DataError(f"`{name}`: expected one call in each of {len(batches)} passes, found {len(ranks)}")
    shapes = [part.read().shape for part in parts]
    values = np.stack([np.concatenate(ranks) for ranks in found.values()])
    return FilterInputs(tuple(found), tuple(s[0] for s in shapes), tuple(s[-1] for s in shapes), values)


def _name(part: Any) -> str:
    names: Sequence[str] = part.parameters
    return names[0]


def _recorder(name: str, ranks: list[np.ndarray]) -> Any:
    """A hook that appends the stable ranks of one batch."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(2).mT  # (B, pixels, D)
        if not bool(x.isfinite().all()):
            raise DataError(f"`{name}`: its input is not finite; do weights or images contain NaN or infinity?")
        ranks.append(stable_ranks(x).cpu().numpy())

    return hook
