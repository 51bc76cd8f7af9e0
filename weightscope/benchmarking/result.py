"""`BenchResult`: the runs of a benchmark and their summary."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope._util.results import Result
from weightscope._util.tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = ("initialiser", "epochs", "n", "accuracy %", "95 % interval", "difference", "95 % interval", "p (Holm)", "")


@dataclass(frozen=True, repr=False)
class BenchResult(Result):
    """Result of a benchmark.

    Attributes:
        runs: one row for each network: `init`, `epochs`, `seed` (its number), `accuracy`, `loss`, `diverged`.
        arms: one row for each arm: `init`, `epochs`, `n`, `mean` accuracy, `ci95` (Student's on the log-odds, so inside
            [0, 1]), `loss`, `diverged`, and relative to the first initialiser at the same length the mean paired
            `difference`, `difference_ci95` (Student's, inside [-1, 1]), `p` of the paired t-test and `p_holm`, adjusted
            for the number of comparisons in the table. `results.json` calls them `summary`.
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
        header, *lines = text_table(_HEADER, map(_cells, self.arms)).split("\n")
        return "\n".join([header, "-" * len(header), *lines])

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


def _percent(interval: list[float], form: str) -> str:
    return " to ".join(format(100 * value, form) for value in interval)
