"""The effect of each component of the mimetic start over the settings of the other three, from results.json."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.results import text_table
from weightscope.benchmarking import BenchResult
from weightscope.benchmarking.statistics import holm, holm_levels, paired
from weightscope.init.named import labelled
from weightscope.recipe import Recipe

HERE = Path(__file__).parent
SWITCHES = ("a", "delta", "cb", "convolution")


def effects(result: BenchResult, settings: Sequence[dict[str, bool]], metric: str = "accuracy") -> list[dict[str, Any]]:
    """Main effects of the switches and interactions of pairs of them, with paired t-tests over seeds.

    In each seed the effect of a switch is the mean over the arms with it minus that over the arms without; the
    interaction of two is half the difference of the one's effects with and without the other. p is adjusted by Holm's
    method over all ten.

    Args:
        result: arms in the order of `settings`.
        settings: the switches of each arm, in all combinations.
        metric: key of the runs.
    """
    values = np.array(list(result.by_arm(metric).values()))  # (arms, seeds)
    signs = {name: np.array([1.0 if row[name] else -1.0 for row in settings]) for name in SWITCHES}
    contrasts = {(name,): signs[name] for name in SWITCHES}
    contrasts |= {
        (one, other): signs[one] * signs[other] for i, one in enumerate(SWITCHES) for other in SWITCHES[i + 1 :]
    }
    rows = [
        {
            "switches": list(names),
            "metric": metric,
            "n": values.shape[1],
            **paired(values[sign > 0].mean(0), values[sign < 0].mean(0)),
        }
        for names, sign in contrasts.items()
    ]
    found = [row["p"] for row in rows]
    for row, sign, p, level in zip(rows, contrasts.values(), holm(found), holm_levels(found), strict=True):
        interval = paired(values[sign > 0].mean(0), values[sign < 0].mean(0), level=level)["difference_ci95"]
        row |= {"p_holm": p, "difference_ci_holm": interval}
    return rows


def switches(init: Any) -> dict[str, bool]:
    """The switches of an initialiser of the recipe; `mimetic_ssm` without any has all but the convolution."""
    _, config = labelled(init)
    published = dict.fromkeys(SWITCHES, config.name == "mimetic_ssm") | {"convolution": False}
    return {name: bool(config.parameters.get(name, published[name])) for name in SWITCHES}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Effects in points of accuracy."""
    header = ("switch", "accuracy", "effect", "95 % interval", "p (Holm)")
    lines = []
    for row in rows:
        low, high = (100 * value for value in row["difference_ci95"])
        name = " x ".join(row["switches"])
        number = f"{100 * row['difference']:+.2f}"
        lines.append([name, row["metric"], number, f"{low:+.2f} to {high:+.2f}", f"{row['p_holm']:.2g}"])
    return text_table(header, lines, left=(0, 1))


def main(study: Path = HERE) -> list[dict[str, Any]]:
    design = Recipe.load(study / "recipe.toml").bench
    assert design is not None
    settings = [switches(init) for init in design.init]
    result = BenchResult.load(study / "results.json")
    rows = [row for metric in ("accuracy", "accuracy_2x") for row in effects(result, settings, metric)]
    print(table(rows))
    (study / "effects.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, nargs="?", default=HERE, help="folder of recipe.toml and results.json")
    main(parser.parse_args().study)
