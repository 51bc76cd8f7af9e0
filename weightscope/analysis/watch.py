"""`watch`: how structure grows in the weights of one network while it trains."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from weightscope._util.checks import count
from weightscope._util.results import Result, row_table
from weightscope._util.threads import one_thread
from weightscope.analysis.describe import STATISTICS, Row, Structure
from weightscope.anatomy import ModuleTensors
from weightscope.anatomy.effective import adapters
from weightscope.errors import UsageError

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

COLUMNS = (*STATISTICS, "norm")
_PANELS = {  # label -> part, column, column that it is divided by
    "beta / alpha of W_Q W_K^T": ("qk", "beta", "alpha"),
    "beta / alpha of W_V W_O": ("vo", "beta", "alpha"),
    "beta / alpha of W_C^T W_B": ("cb", "beta", "alpha"),
    "ratio of column means of fc1": ("fc1", "column_ratio", None),
    "ratio of row means of fc1": ("fc1", "row_ratio", None),
    "spread of filters about their centre": ("filters", "relative_spread", None),
    "norms of weights / those of the first record": ("weight", "norm", None),
}
_EVEN = {label: float(column != "beta") for label, (_, column, _) in _PANELS.items() if column != "norm"}
Log = Callable[[str, float, int], Any]


class watch(Result):
    """Record structure in a model's weights every so many optimiser steps.

    A record has a row for each layer: beta, alpha and z of W_Q W_K^T ("qk", means over heads) and of W_V W_O ("vo"),
    ratios of the stripes of fc1 ("fc1"), the spread of depthwise filters about their centre ("filters"), as defined by
    `weightscope.analysis.describe.Structure`; and the Frobenius norm of each weight matrix ("weight"). The parts are
    found once, by one traced call of the model; a record only computes with the weights. The first is made at once.

    Steps are those of the optimiser, so that passes of an evaluation and of accumulated gradients do not count. With
    `optimizer` its hook counts them until `hook.remove()`; otherwise call `record`, or give the trainer a callback.

    Args:
        model: the module that trains, possibly wrapped (DDP, `torch.compile`).
        every: optimiser steps between records.
        optimizer: a `torch.optim.Optimizer` whose steps are counted.
        log: called with (name, value, step) for each number, such as `SummaryWriter.add_scalar`, `mlflow.log_metric` or
            `lambda name, value, step: run.log({name: value}, step=step)` for wandb. Names are `qk/0/beta` (part, layer,
            statistic), `weight/NAME/norm` and `loss`.
        step: the number of the first record; above 0 if training resumes.

    Raises:
        UsageError: if the model is no module or has adapters (LoRA), or the optimizer is no optimizer.

    Example:
        >>> seen = watch(model, every=100, optimizer=optimizer)
        >>> for images, labels in batches:
        ...     loss = cross_entropy(model(images), labels)
        ...     seen.note(loss=loss)
        ...     loss.backward()
        ...     optimizer.step()
        >>> seen.plot("watch.png")
    """

    @one_thread()
    def __init__(
        self, model: nn.Module, every: int = 100, *, optimizer: Any = None, log: Log | None = None, step: int = 0
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"watch: expected a module, found {type(model).__name__}")
        self.model, self.every, self.log = model, count("every", every), log
        self.step = count("step", step, 0)  # steps made so far
        if found := adapters(name for name, _ in model.named_parameters()):
            raise UsageError(
                f"watch: `{found[0]}` is an adapter's, beside weights that do not train; watch the merged model"
            )
        self._structure = Structure(ModuleTensors(model))
        self._noted: dict[str, list[Any]] = {}
        self._records: dict[int, list[Row]] = {}
        self.scalars: dict[str, dict[int, float]] = {}  # name -> step -> value
        self.hook: Any = None
        if optimizer is not None:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UsageError(
                    f"watch: optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}"
                )
            self.hook = optimizer.register_step_post_hook(lambda *_: self.after(self.step + 1))
        self.record(step)

    def note(self, **scalars: Any) -> None:
        """Keep numbers that belong to the training: the next record has their means since the last one.

        Values are numbers or tensors with one entry, which are not read before then, so that a GPU need not wait.
        """
        for name, value in scalars.items():
            self._noted.setdefault(name, []).append(value.detach() if isinstance(value, torch.Tensor) else value)

    def after(self, step: int, *, last: bool = False) -> None:
        """Record if `step`, the number of steps made so far, is a multiple of `every` or the last, and not recorded."""
        self.step = step
        if (last or step % self.every == 0) and step not in self._records:
            self.record(step)

    @one_thread()
    @torch.no_grad()
    def record(self, step: int | None = None, **scalars: Any) -> None:
        """Record the weights as they are now, after `step` steps (by default those counted), and noted numbers."""
        self.note(**scalars)
        self.step = step = self.step if step is None else step
        self._structure = self._structure.of(ModuleTensors(self.model))
        rows = self._structure.rows()
        rows += [{"part": "weight", "name": name, "norm": norm} for name, norm in self._structure.norms().items()]
        self._records[step] = rows
        for name, values in self._noted.items():
            self.scalars.setdefault(name, {})[step] = sum(map(float, values)) / len(values)
        self._noted.clear()
        if self.log is not None:
            self._send(step)

    def _send(self, step: int) -> None:
        for row in self._records[step]:
            place = f"{row['part']}/{row.get('layer', row['name'])}"
            for column in COLUMNS:
                if row.get(column) is not None:
                    self.log(f"{place}/{column}", row[column], step)  # type: ignore[misc]
        for name, values in self.scalars.items():
            if step in values:
                self.log(name, values[step], step)  # type: ignore[misc]

    def rows(self) -> list[Row]:
        """One row for each record and layer: `step`, `part`, `layer`, `name`, statistics, and what was noted."""
        noted, keys = self.scalars.items(), ("step", "part", "layer", "name", *COLUMNS)
        return [
            {key: row.get(key) for key in keys} | {"step": step} | {name: values.get(step) for name, values in noted}
            for step, rows in sorted(self._records.items())
            for row in rows
        ]

    def to_pandas(self) -> "pandas.DataFrame":
        """`rows()` as a data frame; what a row lacks is missing, such as the layer of a single weight."""
        return super().to_pandas().astype({"layer": "Int64"} | dict.fromkeys(COLUMNS, float))

    def summary(self) -> str:
        steps = sorted(self._records)
        return f"{type(self.model).__name__}: {len(steps)} records, of steps {steps[0]:,} to {steps[-1]:,}"

    def text(self) -> str:
        """Means over layers at the first and the last record."""
        steps = sorted(self._records)
        heads = {"mean over layers": "{0}", f"step {steps[0]:,}": "{1:.4g}", f"step {steps[-1]:,}": "{2:.4g}"}
        table = row_table(heads, [dict(zip("012", change, strict=True)) for change in self._changes()])
        return "\n".join([self.summary(), "", table, *self._structure.notes()])

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Draw what was noted and the statistics against steps, a line for each layer.

        The file (.png, .pdf, .svg) is written if there is a path. Norms are in units of those of the first record.
        """
        from weightscope import plots
        from weightscope.plots.theme import number

        changes = [f"{label} {number(a, 3)} to {number(b, 3)}" for label, a, b in self._changes() if label in _EVEN]
        title = title or f"{type(self.model).__name__}, {max(self._records):,} steps: {'; '.join(changes[:3])}"
        figure = plots.step_curves(sorted(self._records), self._panels(), even=_EVEN, title=title)
        return plots.finished(figure, path)

    def _panels(self) -> dict[str, np.ndarray]:
        """Label -> values (records, layers)."""
        frame = self.to_pandas()
        out = {
            name: np.array([[v.get(step, np.nan)] for step in sorted(self._records)])
            for name, v in self.scalars.items()
        }
        for label, (part, column, over) in _PANELS.items():
            rows = frame[frame["part"] == part]
            drawn = rows.assign(drawn=rows[column] / rows[over] if over else rows[column])
            values = drawn.pivot(index="step", columns="name", values="drawn")[list(dict.fromkeys(rows["name"]))]
            if values.notna().any(axis=None):
                out[label] = values.to_numpy() / (values.to_numpy()[0] if column == "norm" else 1)
        return out

    def _changes(self) -> list[tuple[str, float, float]]:
        """Of each panel, the mean over layers at the first and the last record."""
        return [
            (label, *np.ma.masked_invalid(x[[0, -1]]).mean(1).filled(np.nan)) for label, x in self._panels().items()
        ]

    def for_trainer(self) -> Any:
        """A callback for `transformers.Trainer(callbacks=[...])`, in the main process."""
        try:
            from transformers import TrainerCallback
        except ImportError as error:
            raise UsageError("transformers is not installed; `pip install transformers`") from error
        seen = self

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # after the last one's log
                if state.is_world_process_zero:
                    seen.after(state.global_step)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if state.is_world_process_zero:
                    seen.note(**{name: logs[name] for name in ("loss", "eval_loss") if name in (logs or {})})

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.is_world_process_zero:
                    seen.after(state.global_step, last=True)

        return Watch()

    def for_lightning(self) -> Any:
        """A callback for Lightning's `Trainer(callbacks=[...])`, in the main process."""
        package = next(
            (name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.partition(".")[0])), None
        )
        if package is None:
            raise UsageError("Lightning is not installed; `pip install lightning`")
        Callback: Any = importlib.import_module(package).Callback
        seen = self

        class Watch(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                if trainer.is_global_zero:
                    seen.note(**({} if loss is None else {"loss": loss}))
                    seen.after(trainer.global_step)

            def on_train_end(self, trainer: Any, module: Any) -> None:
                if trainer.is_global_zero:
                    seen.after(trainer.global_step, last=True)

        return Watch()
