"""What the filters of the trained ViTs have become: |c C|, and the weight of softmax(c C) on the filter's tokens.

python analyses/convolution_biases/filters.py convolution-biases
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.population import Population

HERE = Path(__file__).parent
TOKENS = 65  # with the class token


def filters(runs: Path) -> list[dict[str, Any]]:
    """A row for each kind of attention and block; means are over networks, heads and entries."""
    rows = []
    for path in sorted(runs.glob("network.attention-conv-*/*.pop")):
        population = Population(path)
        for block in range(population.recipe.network.depth):
            scale, raw = (population.weights(f"blocks.{block}.attn.{name}") for name in ("filter_scale", "filters"))
            entries = (scale * raw).astype(np.float64).reshape(len(population), -1, 9)
            row = {"attention": population.recipe.network.attention, "block": block}
            row |= {"largest": np.abs(entries).max(), "mean": np.abs(entries).mean(), "negative": (entries < 0).mean()}
            if row["attention"] == "conv-softmax-map":
                powers = np.exp(entries).sum(2)
                row |= {"weight": (powers / (powers + TOKENS - 9)).mean(), "uniform": 9 / TOKENS}
            rows.append(row)
    return rows


if __name__ == "__main__":
    (HERE / "filters.json").write_text(json.dumps(filters(Path(sys.argv[1]) / "runs"), indent=1) + "\n")
