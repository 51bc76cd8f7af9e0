"""The metrics of tiles as TensorBoard shows them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from weightscope._util.atomic import make_folder
from weightscope.data.metrics import at_end
from weightscope.errors import UsageError
from weightscope.training.collection import TileResult

_MOST = 9e19  # TensorBoard's last bin ends at 9.9e19


def tensorboard(folder: str | Path) -> Callable[[TileResult], None]:
    """A function for `on_tile` that writes event files, one run for each population, or arm of a benchmark.

    The step is the tile. A metric's mean over the networks of the tile that did not diverge is a scalar, and their
    values a histogram; `seconds` and `diverged`, the share that did, are scalars. The value of a metric that is
    measured after each epoch is that of the last one; histograms leave out those beyond 9e19.

    UsageError if the package tensorboard is not installed, WeightscopeError if the folder cannot be made.

    Example:
        >>> collect(recipe, "digits.pop", on_tile=tensorboard("logs"))
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("tensorboard is not installed; `pip install tensorboard`") from error
    make_folder(Path(folder))

    @cache
    def writer(run: str) -> Any:
        return SummaryWriter(str(Path(folder) / run))

    def write(result: TileResult) -> None:
        run = writer(result.name)
        kept = ~result.metrics["diverged"]
        run.add_scalar("seconds", result.seconds, result.tile)
        run.add_scalar("diverged", 1 - kept.mean(), result.tile)
        for name, values in at_end(result.metrics).items():
            if name.startswith("test_") and kept.any():
                run.add_scalar(name, values[kept].mean(), result.tile)
                if len(shown := values[kept & (abs(values) < _MOST)]):
                    run.add_histogram(name, shown, result.tile)
        run.flush()

    return write
