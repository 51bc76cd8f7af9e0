"""`BenchResult`: the runs of a benchmark and their summary."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope._util.results import Result
from weightscope._util.tables import text_table

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
        runs: one row for each network: `init`, `epochs`, `seed` (its number), `accuracy`, `loss`, `diverged`.
        arms: one row for each arm: `init`, `epochs`, `n`, `mean` accuracy, `ci95`, `loss`, `diverged`, and relative
            to the first initialiser at the same length the mean paired `difference`, `difference_ci95`, `p` of the
            paired t-test and `p_holm`, adjusted for the number of comparisons in the table. With controls (`bench`'s
            `control`), `control` is the label of the arm's control and `beyond_scale`, `beyond_scale_ci95`,
            `beyond_scale_p` and `beyond_scale_p_holm` compare the arm with it; None elsewhere. `results.json` calls
            the rows `summary`.
        environment: versions, machine, device and the recipe.
    """

    runs: list[dict[str, Any]]
    arms: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """`arms`."""
        return self.arms

    def summary(self) -> str:
        """The number of arms and networks, and the data set."""
        recipe = self.environment.get("recipe", {})
        data = f" on {recipe['data']['name']}" if recipe else ""
        return f"{len(self.arms)} arms, {len(self.runs)} networks{data}"

    def text(self) -> str:
        """A table with one line for each arm."""
        table = _ruled(_HEADER, map(_cells, self.arms))
        controlled = [row for row in self.arms if row.get("control") is not None]
        if not controlled:
            return table
        scale = {(row["epochs"], row["init"]): row for row in self.arms}
        cells = [_scale_cells(row, scale[row["epochs"], row["control"]]) for row in controlled]
        note = (
            "structure beyond scale: an initialiser minus its control, independent Gaussian entries with the same "
            "mean and variance of each tensor"
        )
        return f"{table}\n\n{note}\n{_ruled(_SCALE_HEADER, cells)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {"runs": self.runs, "summary": self.arms, "environment": self.environment}

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """Accuracy against training length, or against the initialiser if there is one length.

        Args:
            path: a .png, .pdf or .svg file to write; none if None.
            title: of the figure.
        """
        from weightscope import plots

        figure = plots.root_figure(plots.convergence(self.arms, title=title))
        if path is not None:
            plots.save(figure, path)
        return figure

    def plot_scale(self, path: str | Path | None = None, *, title: str | None = None) -> "Figure":
        """The effect of each initialiser's scale, and what its structure adds; needs controls.

        Args:
            path: a .png, .pdf or .svg file to write; none if None.
            title: of the figure; the finding if None.

        Raises:
            UsageError: if the benchmark has no control arms.
        """
        from weightscope import plots

        figure = plots.root_figure(plots.scale_and_structure(self.arms, title=title or _finding(self.arms)))
        if path is not None:
            plots.save(figure, path)
        return figure


def _finding(arms: list[dict[str, Any]]) -> str | None:
    """In one sentence, which structures add something to their scale at an adjusted level of 0.05."""
    rows = [row for row in arms if row.get("beyond_scale_p_holm") is not None]
    better = [row["init"] for row in rows if row["beyond_scale_p_holm"] < 0.05 and row["beyond_scale"] > 0]
    better = list(dict.fromkeys(better))
    if not rows:
        return None
    if not better:
        return "No initialiser is significantly better than its scale alone"
    return f"Better than {'its' if len(better) == 1 else 'their'} scale alone: {', '.join(better)}"


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
    head, *lines = text_table(header, rows).split("\n")
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
