"""Other quarters of a trained network's singular directions than the top one, over default weights."""

import torch
from torch import Generator, nn

from weightscope import init as wi
from weightscope.anatomy.matrices import matrices


def quarter_(
    module: nn.Module, *, source: str = "teacher.pop::0", which: str = "bottom", generator: Generator | None = None
) -> nn.Module:
    """Put a quarter of the source's directions, U_r S_r V_r^T, in place of the module's weights in these directions.

        bottom    those of the smallest singular values, with their values
        raised    those of the smallest singular values, with the largest values
        random    random directions, with the largest values

    as `transfer_singular_(fraction=0.25, remainder="keep")` does with the top quarter.
    """
    found = [matrix for matrix in matrices(module) if matrix.name.startswith("blocks.")]
    mine = [block.clone() for matrix in found for block in matrix.split(matrix.weight)]
    wi.transfer_singular_(module, source, fraction=1, select="blocks.*")
    blocks = [block for matrix in found for block in matrix.split(matrix.weight)]
    for block, own in zip(blocks, mine, strict=True):
        u, s, vh = torch.linalg.svd(block.detach(), full_matrices=False)
        r = len(s) // 4
        values = s[-r:] if which == "bottom" else s[:r]
        if which == "random":
            u, vh = (torch.linalg.qr(torch.randn(len(m), r, generator=generator))[0] for m in (u, vh.T))
            vh = vh.T
        u, vh = u[:, -r:], vh[-r:]
        rest = own - u @ (u.T @ own)
        with torch.no_grad():
            block.copy_((u * values) @ vh + rest - (rest @ vh.T) @ vh)
    return module
