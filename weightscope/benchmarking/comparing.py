"""`compare`: the paired statistics of `bench` on runs that were made elsewhere."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weightscope._util.names import joined, unknown
from weightscope._util.sources import reason
from weightscope.benchmarking.result import BenchResult, finding
from weightscope.benchmarking.statistics import summarise
from weightscope.data.metrics import Metric
from weightscope.errors import DataError, UsageError

Better = Literal["higher", "lower"]
PATTERN = r"(?P<arm>.+?)[-_./=]+(?:seed|s)?[-_=]?(?P<pair>\d+)"
_HIGHER = re.compile(r"acc|top-?[15]|auc|(^|[^a-z])f1|bleu|(^|_)map($|_)", re.IGNORECASE)
_LOWER = re.compile(r"loss|err|perplexity|ppl|bits|nll|bpc", re.IGNORECASE)
Table = Sequence[Mapping[str, Any]]


class _Reported(Metric):
    """A metric of somebody else's runs, as they call it and in their unit."""

    @property
    def title(self) -> str:
        return self.label


@dataclass(frozen=True, repr=False)
class Comparison(BenchResult):
    """Arms of runs made elsewhere, paired; tables and figures are those of `BenchResult`."""

    left_out: tuple[str, ...] = ()  # pairs that an arm does not have
    at_end: bool = False  # whether values are those of the last row of each run's file

    def summary(self) -> str:
        return f"{len(self.arms)} arms, {len(self.runs)} runs"

    def notes(self) -> list[str]:
        """The finding, which runs were left out, and what cannot be concluded."""
        out = [*super().notes(), f"{self.metric.label}: {finding(self.arms, self.metric)}"]
        if self.left_out:
            out.append(f"left out, without a partner: {len(self.left_out)} ({joined(self.left_out, 6)})")
        if self.at_end:
            out.append("values are those of the last row of each run, not of its best epoch")
        open_ = [row for row in self.arms if row["p_holm"] is not None and row["p_holm"] >= 0.05]
        for row in open_:
            low, high = row["difference_ci_holm"] or (-math.inf, math.inf)
            most = f"differences of {low:+.3g} to {high:+.3g} agree with these {row['pairs']} pairs"
            out.append(f"not concluded: that {row['init']} equals {row['reference']}; {most}")
        out.append(
            "not concluded: whether a difference is structure or scale, unless an arm has the same means and variances"
        )
        out.append("not concluded: whether it holds with other learning rates, lengths of training or data than here")
        return out


def compare(
    runs: Any,
    *,
    metric: str,
    arm: str = "init",
    pair: str = "seed",
    control: str | None = None,
    better: Better | None = None,
    pattern: str = PATTERN,
) -> Comparison:
    """Compare arms of runs that were made elsewhere, paired by seed, with the statistics of `bench`.

    For each arm, the mean of the paired differences from the control, d_k = x_k - c_k, Student's t and its interval,
    adjusted for the number of arms (Holm 1979); see `summarise`.

    Args:
        runs: a data frame, a list of dictionaries, or files and folders: a CSV with a row for each run, folders of timm
            (`summary.csv`) or TensorBoard logs, of which the last value of each run is taken.
        metric: the column that is compared.
        arm: the column with the arm.
        pair: the column with what runs of different arms share, such as the seed.
        control: the arm that others are compared with, by default the first.
        better: "higher" or "lower"; not needed for accuracies, losses and errors.
        pattern: a regular expression with the groups `arm` and `pair` for the names of runs' folders.

    UsageError for a column or an arm that is not there, DataError for values that are missing or no numbers, repeated
    runs, and fewer than two pairs.

    Example:
        >>> print(compare("runs.csv", metric="top1").text())
    """
    rows, at_end = _rows(runs, metric, arm, pair, pattern)
    for name in (arm, pair, metric):
        if rows and name not in rows[0]:
            raise UsageError(unknown("column", name, map(str, rows[0])))
    values = {}
    for number, row in enumerate(rows, 1):
        place = str(row[arm]), _pair(row[pair])
        if place in values:
            raise DataError(f"row {number}: a second run with {arm} {place[0]} and {pair} {place[1]}; keep one of them")
        values[place] = _number(row[metric], f"row {number}, {arm} {place[0]}, {pair} {place[1]}: `{metric}`")
    arms = list(dict.fromkeys(name for name, _ in values))
    first = arms[0] if control is None and arms else control
    if first not in arms:
        raise UsageError(unknown("arm", first, arms))
    arms = [str(first), *(name for name in arms if name != first)]
    if len(arms) < 2:
        raise DataError(f"expected at least two arms in `{arm}`, found {joined(arms, 3)}")
    for name in arms[1:]:
        common = sum((str(first), seed) in values for at, seed in values if at == name)
        if common < 2:
            raise DataError(f"{name}: expected at least 2 runs with a {pair} of {first}, found {common}")
    own = [(name, seed) for name, seed in values if _alone(values, arms, name, seed)]
    found = [(name, seed) for name in arms for at, seed in values if at == name and (name, seed) not in own]
    spread = np.std([values[place] for place in found]) or 1.0
    shown = _Reported(
        metric,
        metric,
        bounds=(-math.inf, math.inf),
        higher_is_better=_direction(metric, better) == "higher",
        decimals=int(np.clip(2 - math.floor(math.log10(spread)), 1, 8)),
    )
    records: list[dict[str, Any]] = [
        {"init": name, "cell": {}, "numbers": {}, "epochs": 0, "seed": seed, shown.key: values[name, seed]}
        | {"diverged": False}
        for name, seed in found
    ]
    left_out = tuple(f"{name}, {pair} {seed}" for name, seed in own)
    return Comparison(
        records, summarise(records, shown), metric=shown, metrics=(shown,), left_out=left_out, at_end=at_end
    )


def _alone(values: Mapping[tuple[str, Any], float], arms: Sequence[str], name: str, seed: Any) -> bool:
    """Whether a run has no partner: one of the control, or any for the control itself."""
    others = arms[1:] if name == arms[0] else arms[:1]
    return not any((other, seed) in values for other in others)


def _number(value: Any, where: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: expected a number, found {value!r}") from None
    if not math.isfinite(found):
        raise DataError(f"{where}: expected a finite number, found {value}; give what the run reached, or leave it out")
    return found


def _pair(value: Any) -> Any:
    """`3` for 3, 3.0 and "3"; other names as they are."""
    text = str(value)
    return int(float(text)) if re.fullmatch(r"\d+(\.0+)?", text) else text


def _direction(metric: str, better: Better | None) -> Better:
    if better is None and bool(_HIGHER.search(metric)) == bool(_LOWER.search(metric)):
        raise UsageError(f"better: `{metric}` does not say whether higher or lower is better; give one (--better)")
    return better or ("higher" if _HIGHER.search(metric) else "lower")


def _rows(runs: Any, metric: str, arm: str, pair: str, pattern: str) -> tuple[Table, bool]:
    """Records of runs, and whether each is the end of a run's own file."""
    if hasattr(runs, "to_dict") and hasattr(runs, "columns"):
        return runs.to_dict("records"), False
    given: list[Any] = [runs] if isinstance(runs, str | Path) else list(runs)
    if given and isinstance(given[0], Mapping):
        return given, False
    paths = [Path(path) for path in given]
    if len(paths) == 1 and paths[0].suffix == ".csv" and paths[0].name != "summary.csv":
        return _csv(paths[0]), False
    if tables := [path for path in paths if path.suffix == ".csv" and path.name != "summary.csv"]:
        raise DataError(f"{tables[0]}: expected one CSV with all runs, or folders of runs, found {len(paths)} paths")
    out = []
    for folder in _folders(paths):
        match = re.fullmatch(pattern, folder.name)
        if match is None or not {"arm", "pair"} <= match.groupdict().keys():
            raise DataError(
                f"{folder}: expected a name such as mimetic-3, or --pattern with groups "
                "(?P<arm>...) and (?P<pair>...) that matches it"
            )
        last = _csv(folder / "summary.csv")[-1:] if (folder / "summary.csv").exists() else [_scalars(folder)]
        if not last:
            raise DataError(f"{folder / 'summary.csv'}: expected a row for each epoch, found none")
        out.append({**last[0], arm: match["arm"], pair: match["pair"]})
    if not out:
        raise DataError(f"{paths[0]}: expected a CSV, or folders with summary.csv or TensorBoard logs, found neither")
    return out, True


def _folders(paths: Iterable[Path]) -> list[Path]:
    """Folders of runs, in order."""
    names = ("summary.csv", "events.out.tfevents.*")
    found = {file.parent for path in paths for name in names for file in [*path.rglob(name), path] if file.is_file()}
    return sorted(found)


def _csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {reason(error)}") from None


def _scalars(folder: Path) -> dict[str, float]:
    """The last value of each scalar of TensorBoard's logs."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(f"{folder}: to read TensorBoard's logs, install tensorboard") from None
    log = EventAccumulator(str(folder)).Reload()
    return {name: log.Scalars(name)[-1].value for name in log.Tags()["scalars"]}
