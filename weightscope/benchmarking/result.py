"""`BenchResult`: the runs of a benchmark and their summary."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope._util.results import Result
from weightscope._util.tables import text_table
from weightscope.benchmarking import pictures
from weightscope.benchmarking.axes import point_text
from weightscope.benchmarking.statistics import between_cells, cell_key
from weightscope.benchmarking.tables import paper_table
from weightscope.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = ("initialiser", "epochs", "n", "accuracy %", "95 % interval", "difference", "95 % interval", "p (Holm)", "")
_SCALE_HEADER = (
    *("initialiser", "epochs", "n", "effect of scale", "95 % interval", "p (Holm)"),
    *("beyond scale", "95 % interval", "p (Holm)"),
)


@dataclass(frozen=True, repr=False)
class BenchResult(Result):
    """Result of a benchmark.

    Attributes:
        runs: one row for each network: `init`, `cell` (the recipe's fields that vary, with their values), `numbers`
            (the initialiser's that vary), `epochs`, `seed` (its number), `accuracy`, `loss`, `diverged`, `curve` (test
            accuracy after each epoch) and `seconds` (its share of the time that its tile took).
        arms: one row for each arm: `init`, `cell`, `numbers`, `epochs`, `n`, `mean` accuracy, `ci95` (Student's on the
            log-odds, so inside [0, 1]), `loss`, `seconds`, `diverged`, and relative to the first initialiser in its
            cell at the same length the mean paired `difference`, `difference_ci95` (Student's, inside [-1, 1]), `p` of
            the paired t-test and `p_holm`, adjusted for the number of comparisons in the table. With controls
            (`bench`'s `control`), `control` is the label of the arm's control and `beyond_scale`, `beyond_scale_ci95`,
            `beyond_scale_p` and `beyond_scale_p_holm` compare the arm with it; None elsewhere. `results.json` calls the
            rows `summary`.
        environment: versions, machine, device and the recipe.
    """

    runs: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "BenchResult":
        """The result in a `results.json`, or in the folder that has it.

        Raises:
            DataError: if it is none.
        """
        path = Path(path)
        path = path / "results.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_text())
            return cls(found["runs"], found["summary"], found.get("environment", {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: expected the results.json of a benchmark, found {why}") from error

    def rows(self) -> list[dict[str, Any]]:
        """`arms`, with a column for each field or number that varies."""
        axes = dict.fromkeys(name for row in self.arms for name in (*row.get("cell", {}), *row.get("numbers", {})))
        out = []
        for row in self.arms:
            place = {**row.get("cell", {}), **row.get("numbers", {})}
            plain = {key: value for key, value in row.items() if key not in ("cell", "numbers")}
            out.append({"init": row["init"], **{name: place.get(name) for name in axes}, **plain})
        return out

    def summary(self) -> str:
        """The number of arms and networks, and the data set."""
        recipe = self.environment.get("recipe", {})
        data = f" on {recipe['data']['name']}" if recipe else ""
        return f"{len(self.arms)} arms, {len(self.runs)} networks{data}"

    def text(self) -> str:
        """A table with one line for each arm."""
        cells = any(row.get("cell") for row in self.arms)
        header = ("cell", *_HEADER) if cells else _HEADER
        table = _ruled(header, (_in_cell(row, _cells(row), cells) for row in self.arms))
        controlled = [row for row in self.arms if row.get("control") is not None]
        if not controlled:
            return table
        scale = {(cell_key(row), row["epochs"], row["init"]): row for row in self.arms}
        lines = [_scale_cells(row, scale[cell_key(row), row["epochs"], row["control"]]) for row in controlled]
        lines = [_in_cell(row, line, cells) for row, line in zip(controlled, lines, strict=True)]
        note = (
            "structure beyond scale: an initialiser minus its control, independent Gaussian entries with the same "
            "mean and variance of each tensor"
        )
        return f"{table}\n\n{note}\n{_ruled(('cell', *_SCALE_HEADER) if cells else _SCALE_HEADER, lines)}"

    def table(self, form: str = "text") -> str:
        """A table like those of the papers: initialisers in rows, cells in columns.

        Args:
            form: "text", "markdown" or "latex" (booktabs).

        Raises:
            UsageError: for another form.
        """
        return paper_table(self.arms, form)

    def between(self, field: str) -> list[dict[str, Any]]:
        """Each arm against the same arm at the first value of a field, on the same seeds; see `between_cells`.

        Args:
            field: a field of the recipe that varies.

        Returns:
            One row for each arm: `init`, `cell`, `epochs`, `reference` (the field and its first value), `difference`,
            `difference_ci95`, `p` and `p_holm`, adjusted over these rows.

        Raises:
            UsageError: if the field does not vary.

        Example:
            >>> BenchResult.load("bench/results.json").between("distillation.alpha")
        """
        return between_cells(self.runs, field)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"runs": self.runs, "summary": self.arms, "environment": self.environment}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Accuracy against what was varied: the first axis, else the training length, else the initialiser.

        Args:
            path: a .png, .pdf or .svg file to write; none if None.
            title: of the figure.
        """
        return next(iter(self.figures(title=title, only=1).values()))(path)

    def figures(self, *, title: str | None = None, only: int | None = None) -> "dict[str, Callable[..., Figure]]":
        """The pictures that these results have, by name, each a function of the file to write (or None).

        `convergence` (one cell), `curves` (over epochs), `differences` (paired), `scale` (with controls), `along-AXIS`
        for each axis, `map-X-Y` for each pair of axes, `frontier-qk` and `frontier-vo` for alpha and beta of mimetic
        attention.

        Args:
            title: of all figures; by default each has its own.
            only: how many of them.
        """
        found = pictures.of(self.runs, self.arms, self.environment.get("recipe", {}).get("network", {}))
        return {name: partial(_drawn, draw, title) for name, draw in list(found.items())[:only]}


def _drawn(draw: Callable[[str | None], Any], title: str | None, path: str | Path | None = None) -> "Figure":
    from weightscope import plots

    figure = plots.root_figure(draw(title))
    if path is not None:
        plots.save(figure, path)
    return figure


def _in_cell(row: dict[str, Any], cells: list[str], shown: bool) -> list[str]:
    return [point_text(row.get("cell", {})), *cells] if shown else cells


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["init"], f"{row['epochs']}", f"{row['n']}", f"{100 * row['mean']:.2f}", _percent(row["ci95"], "5.2f")]
    if row["difference"] is None:
        cells += ["", "", ""]
    else:
        cells += [
            f"{100 * row['difference']:+.2f}",
            _percent(row["difference_ci95"], "+5.2f"),
            f"{row['p_holm']:.2g}",
        ]
    return [*cells, f"({row['diverged']} diverged)" if row["diverged"] else ""]


def _ruled(header: tuple[str, ...], rows: Iterable[list[str]]) -> str:
    left = (0, 1) if header[0] == "cell" else (0,)
    head, *lines = text_table(header, rows, left=left).split("\n")
    return "\n".join([head, "-" * len(head), *lines])


def _scale_cells(row: dict[str, Any], control: dict[str, Any]) -> list[str]:
    cells = [row["init"], f"{row['epochs']}", f"{row['n']}"]
    for found, key in ((control, "difference"), (row, "beyond_scale")):
        p = found["p_holm" if key == "difference" else f"{key}_p_holm"]
        if found[key] is None:
            cells += ["", "", ""]
        else:
            cells += [f"{100 * found[key]:+.2f}", _percent(found[f"{key}_ci95"], "+5.2f"), f"{p:.2g}"]
    return cells


def _percent(interval: list[float], form: str) -> str:
    return " to ".join(format(100 * value, form) for value in interval)
