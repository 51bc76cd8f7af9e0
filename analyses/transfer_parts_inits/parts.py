"""Matrices of a trained network's blocks, permuted."""

from torch import Generator, nn

from weightscope import init as wi


def permuted_(
    module: nn.Module, *, source: str = "teacher.pop::0", mode: str = "rows", generator: Generator | None = None
) -> nn.Module:
    """Copy the matrices of the source's blocks and permute the rows or entries of each."""
    wi.transfer_singular_(module, source, fraction=1, select="blocks.*")
    return wi.permute_(module, mode=mode, select="blocks.*", generator=generator)
