"""Post hoc comparisons of the two studies at width 32: what sign, energy and other seeds do. Writes post_hoc.json.

python analyses/frozen_filter_inits/post_hoc.py
"""

import json
from pathlib import Path

import numpy as np
from scipy import stats

from weightscope.benchmarking import BenchResult

HERE = Path(__file__).parent
RANDOM, ABSOLUTE = "random_filters", "random_filters (distribution=absolute)"
IMPULSES, SIGNED_IMPULSES = "impulse_filters", "impulse_filters (sign=random)"
BOXES, SIGNED_BOXES = "box_filters (value=0.3333)", "box_filters (value=0.3333, sign=random)"


def accuracies(folder: Path) -> dict[str, np.ndarray]:
    """Accuracies in % by seed (n,) of each arm at width 32 after 10 epochs."""
    found, where = BenchResult.load(folder), {"epochs": 10}
    where |= {"width": 32} if found.arms[0]["cell"] else {}
    return {arm: 100 * values for arm, values in found.by_arm(**where).items()}


def row(comparison: str, mean: float, low: float, high: float, n: int, p: float) -> dict[str, object]:
    return {"comparison": comparison, "difference": mean, "interval": [low, high], "n": n, "p": p}


def paired(comparison: str, x: np.ndarray) -> dict[str, object]:
    """A t-test of the differences of one study, or of both together."""
    test = stats.ttest_1samp(x, 0)
    return row(comparison, float(x.mean()), *map(float, test.confidence_interval()), len(x), float(test.pvalue))


def of_studies(comparison: str, x: np.ndarray, y: np.ndarray) -> dict[str, object]:
    """Welch's test of the differences of one study against those of the other, on other seeds."""
    test = stats.ttest_ind(x, y, equal_var=False)
    ends = map(float, test.confidence_interval())
    return row(comparison, float(x.mean() - y.mean()), *ends, len(x), float(test.pvalue))


def main(out: Path = HERE / "post_hoc.json") -> None:
    first, equal = accuracies(HERE), accuracies(HERE / "equal_energy")
    signs = [equal[one] - equal[other] for one, other in ((ABSOLUTE, RANDOM), (IMPULSES, SIGNED_IMPULSES))]
    impulses = [study[SIGNED_IMPULSES] - study[RANDOM] for study in (first, equal)]
    boxes = equal[BOXES] - equal[ABSOLUTE], first["box_filters"] - first[ABSOLUTE]
    rows = [
        paired("(absolute - random) - (impulses - impulses of random sign)", signs[0] - signs[1]),
        paired("impulses of random sign - random, both studies", np.concatenate(impulses)),
        of_studies("the same, equal_energy - first study", *impulses[::-1]),
        of_studies("boxes - absolute, of 1/3 (equal_energy) - of 1 (first study)", *boxes),
    ]
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
