"""Data and helpers for the tests of benchmarks and figures."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from weightscope.benchmarking import BenchResult
from weightscope.benchmarking.run import Design

LONG = [f"stages.0.blocks.{b}.mlp.{fc}.weight" for b in range(2) for fc in ("fc1", "fc2")]
INIT = "mimetic_attention (alpha_qk=0.7, beta_qk=0.7)+sinusoidal_positions"
PAIRED = "bars: adjusted 95 % intervals (Holm)"
PLAIN: dict[str, Any] = {
    "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2, "expansion": 2},
    "data": {"name": "digits", "train": 64, "test": 40},
    "training": {"epochs": 1, "batch_size": 16},
    "population": {"networks": 3, "tile": 4},
}
ON_CPU: dict[str, Any] = {"workers": 1, "device": "cpu", "progress": False}


def runs_of(init: str, values: Any, key: str = "accuracy", **more: Any) -> list[dict[str, Any]]:
    """Rows of networks whose metric `key` is `values`; `more` replaces the other columns."""
    place = {"init": init, "cell": {}, "numbers": {}, "epochs": 3, "loss": 1.0, "diverged": False}
    return [place | {"seed": k, key: float(value)} | more for k, value in enumerate(values)]


def fake_bench(recipe: Any, inits: Any = (), out: Any = None, **given: Any) -> BenchResult:
    """`bench` of made-up networks: initialisers other than the default are better, the last of four diverged."""
    design, measured = Design.of(recipe, inits, out, **given), []
    for arm in design.arms:
        n, better = arm.recipe.population.networks, arm.recipe.init[0].name != "default"
        accuracy = np.linspace(0.8, 0.9, n) + better * np.linspace(0.01, 0.02, n)
        bits = 2.0 + 0.1 * np.arange(n) - better * (0.1 + 0.01 * np.arange(n)) + np.where(np.arange(n) == 3, np.inf, 0)
        metrics = {"test_accuracy": accuracy, "test_bits": bits, "test_loss": bits * np.log(2)}
        metrics |= {f"{name}_per_epoch": values[:, None] for name, values in metrics.items()}
        measured.append((metrics | {"diverged": ~np.isfinite(bits)}, {"device": "none"}, None))
        (design.folder / "runs" / arm.folder).mkdir(parents=True, exist_ok=True)
    return design.result(measured)


def spd(size: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((2 * size, size))
    return np.cov(x.T)


def blocks_of(names: list[str], size: int) -> dict[str, slice]:
    return {name: slice(i * size, (i + 1) * size) for i, name in enumerate(names)}


def bench_runs(inits: list[str], lengths: list[int]) -> list[dict[str, Any]]:
    """Arms that are 0.02 apart; of the second one, network 2 diverged."""
    g = np.random.default_rng(1)
    base, runs = g.normal(0.7, 0.01, 8), []
    for e in lengths:
        for i, init in enumerate(inits):
            runs += runs_of(init, base + 0.02 * i + 0.01 * e / 8 + g.normal(0, 0.005, 8), epochs=e)
            runs[-6] |= {"diverged": i == 1}
    return runs


def bench_summary(inits: list[str], lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for e in lengths:
        for i, init in enumerate(inits):
            mean = 0.7 + 0.02 * i + 0.01 * np.log2(e + 1)
            row = {"init": init, "epochs": e, "n": 8, "mean": mean, "ci95": [mean - 0.008, mean + 0.008]}
            paired = {"difference": 0.02 * i, "difference_ci_holm": [0.02 * i - 0.005, 0.02 * i + 0.005], "p": 2e-9}
            rows.append(row | (paired if i else dict.fromkeys(paired)))
    return rows


STRIPES = [
    (name, group, ratio * (1 + i / 4), ratio * (1 + i / 4) * 0.9, ratio * (1 + i / 4) * 1.2)
    for i, name in enumerate(LONG)
    for group, ratio in (("column means", 1.5), ("row means", 0.6), ("overall mean", 0.9))
]


def figure_of(drawn: Axes | Figure) -> Figure:
    return drawn if isinstance(drawn, Figure) else drawn.figure


def drawn_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """The texts that are drawn; axes also hold ticks outside their limits."""
    found: list[Text] = []
    draw = Text.draw

    def record(self: Text, renderer: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            found.append(self)
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", record)
    figure.draw_without_rendering()
    return found


def texts_of(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def words(figure: Figure) -> str:
    """Titles, legend's title and labels of the axes of a picture, on one line."""
    ax = figure.axes[0]
    legend = ax.get_legend()
    texts = [figure.get_suptitle(), ax.get_title(), *(text.get_text() for text in figure.texts), ax.get_xlabel()]
    texts += [each.get_ylabel() for each in (ax, *ax.child_axes)]
    return " ".join([*texts, legend.get_title().get_text() if legend else ""]).replace("\n", " ")


def bars_of(ax: Axes) -> list[ErrorbarContainer]:
    return [c for c in ax.containers if isinstance(c, ErrorbarContainer)]


def points_of_bars(ax: Axes) -> list[float]:
    """Where the points of horizontal bars are."""
    return [bar.lines[0].get_xdata()[0] for bar in bars_of(ax)]


def ends_of(bar: ErrorbarContainer) -> list[tuple[float, float]]:
    return [(path.vertices[0, 0], path.vertices[-1, 0]) for path in bar.lines[2][0].get_paths()]


def heights_of(bar: ErrorbarContainer) -> list[np.ndarray]:
    """Lower and upper ends of vertical bars."""
    return [path.vertices[:, 1] for path in bar.lines[2][0].get_paths()]
