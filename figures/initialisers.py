"""What the structured initialisers do: QK and VO products and filters, before and after."""

from pathlib import Path

import numpy as np
import torch

import weightscope.init as wi
from weightscope import plots
from weightscope.anatomy import attention, depthwise
from weightscope.networks import ConvMixer, ViT

HERE = Path(__file__).parent


def products(network: torch.nn.Module) -> list[np.ndarray]:
    """W_Q W_K^T of the first head and W_V W_O of all heads, in the first layer: their first 64 rows and columns."""
    part = attention(network)[0]
    q, k, v, o = (part.read(name) for name in "qkvo")
    return [matrix[:64, :64].numpy() for matrix in (q[0] @ k[0].T, (v @ o).sum(0))]


def main(out: Path = HERE / "initialisers.png") -> None:
    torch.manual_seed(0)
    vit = ViT(32, 4, 192, 2, 3, 10)
    mixer = ConvMixer(64, 6, 9, 2, 10)
    before, filters_before = products(vit), [part.read().numpy() for part in depthwise(mixer)]
    generator = torch.Generator().manual_seed(0)
    wi.mimetic_attention_(vit, generator=generator)
    wi.conv_covariance_(mixer, preset="cifar-patch2", generator=generator)
    after, filters_after = products(vit), [part.read().numpy() for part in depthwise(mixer)]
    figure = plots.matrix_grid(
        np.stack([np.stack(pair) for pair in zip(before, after, strict=True)]),
        row_labels=("query-key", "value-output"),
        column_labels=("default", "mimetic"),
        quantity="value, upper left 64 × 64 of 192 × 192",
        title="Mimetic attention: one product towards the identity, the other away from it",
    )
    plots.save(figure, out.with_name(f"{out.stem}_attention{out.suffix}"))
    last = len(filters_before) - 1
    panels = [
        [plots.Panel(filters[layer][:36, None], f"layer {layer + 1} of {last + 1}") for layer in (0, last)]
        for filters in (filters_before, filters_after)
    ]
    title = "Filters from the closed-form covariance lie about the centre and widen with depth"
    figure = plots.filter_page(panels, row_labels=("default", "conv covariance"), title=title)
    plots.save(figure, out.with_name(f"{out.stem}_filters{out.suffix}"))


if __name__ == "__main__":
    main()
