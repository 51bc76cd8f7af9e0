"""Are differences of a benchmark those of its 128 held-out strings? Its stored networks on many others.

python analyses/copying/other_strings.py FOLDER.bench -o FOLDER/other_strings.json [--multiple 2]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from weightscope.data.sequence_config import TaskConfig
from weightscope.data.sequences import GeneratedTask
from weightscope.errors import UsageError
from weightscope.population import Population

SEED = 20261123


@torch.no_grad()
def accuracies(population: Population, strings: int, multiple: int) -> np.ndarray:
    """Right tokens in % of each network on each string (N, strings), of `multiple` times the training length.

    Strings are drawn as the held-out ones are, with the begin and stop tokens of the training data.
    """
    data = population.recipe.data
    if not isinstance(data, TaskConfig):
        raise UsageError(f"{population.path}: expected networks of a generated task, found data {data.name!r}")
    drawn = GeneratedTask(data).batch(torch.Generator().manual_seed(SEED), strings, multiple * data.length)
    rows = []
    for k in range(len(population)):
        network = population.network(k).eval()
        batches = zip(drawn.tokens.split(256), drawn.targets.split(256), strict=True)
        right = [network(x).argmax(-1) == y for x, y in batches]
        rows.append(torch.cat(right)[:, drawn.mask[0]].double().mean(1).numpy())
    return 100 * np.array(rows)


def difference(one: np.ndarray, other: np.ndarray) -> dict[str, float | list[float]]:
    """The mean over networks with its 95 % interval, and the standard error that strings add."""
    each, strings = (one - other).mean(1), (one - other).mean(0)
    found = stats.ttest_1samp(each, 0)
    error = strings.std(ddof=1) / len(strings) ** 0.5
    return {"difference": each.mean(), "ci95": [*found.confidence_interval()], "p": found.pvalue, "strings": error}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--multiple", type=int, default=1)
    parser.add_argument("--strings", type=int, default=2048)
    given = parser.parse_args()
    (default,), (scale,), (mimetic,) = (
        [*given.folder.glob(f"runs/{name}-epochs.pop")]
        for name in ("default-[0-9]*", "mimetic_ssm-scale-only--[0-9]*", "mimetic_ssm-[0-9]*")
    )
    d, s, m = (accuracies(Population(path), given.strings, given.multiple) for path in (default, scale, mimetic))
    pairs = {"mimetic - scale": (m, s), "mimetic - default": (m, d), "scale - default": (s, d)}
    found = {"seed": SEED, "strings": given.strings, "multiple": given.multiple}
    found |= {name: difference(*pair) for name, pair in pairs.items()}
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
