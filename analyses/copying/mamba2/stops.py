"""How often networks stop too early on longer strings, and how accurate they are if they may not: writes stops.json.

python analyses/copying/mamba2/stops.py copying-mamba2
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from weightscope.data import load
from weightscope.data.sequence_config import TaskConfig
from weightscope.population import Population

HERE = Path(__file__).parent


def stops(path: Path) -> list[dict[str, Any]]:
    """By length: shares of the answer's tokens (N,) that are the stop token, right, and right among the others."""
    population, rows = Population(path), []
    data = population.recipe.data
    assert isinstance(data, TaskConfig)
    for multiple, (batch,) in load(data).held_out.items():
        row: dict[str, Any] = {"arm": path.stem, "length": multiple, "stop": [], "accuracy": [], "without_stop": []}
        for network in population:
            with torch.no_grad():
                logits = network.eval()(batch.tokens)[batch.mask]
            right, found = batch.targets[batch.mask], logits.argmax(1)
            logits[:, data.task_vocabulary] = -torch.inf
            for key, hit in (("stop", found == data.task_vocabulary), ("accuracy", found == right)):
                row[key].append(float(hit.double().mean()))
            row["without_stop"].append(float((logits.argmax(1) == right).double().mean()))
        rows.append(row)
    return rows


def main(folder: Path, out: Path = HERE) -> list[dict[str, Any]]:
    rows = [row for path in sorted(folder.glob("runs/*.pop")) for row in stops(path)]
    (out / "stops.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        means = [sum(row[key]) / len(row[key]) for key in ("stop", "accuracy", "without_stop")]
        print(f"{row['arm']}, {row['length']}x: stop {means[0]:.3f}, right {means[1]:.3f}, without it {means[2]:.3f}")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the benchmark")
    main(parser.parse_args().folder)
