"""When in training do correlations appear, and is a distribution of an early epoch as good a start as that of the end?

    python analyses/emergence/emergence.py --work emergence --workers 2

DESIGN.md says what is measured. Trains the networks (it resumes), and writes `results.json`; `--part appearance` and
`--part initialisers` replace one half of it.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.arms import CONTROLS
from weightscope._util.environment import environment
from weightscope.analysis.exchangeable import Emergence, emergence
from weightscope.benchmarking import bench
from weightscope.benchmarking.gain import choose_gain
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.statistics.stripes import stripes
from weightscope.training.collection import collect

HERE = Path(__file__).parent
KINDS = {"convnext": "stages.0.blocks.{}", "vit": "blocks.{}"}
SNAPSHOTS, EARLY = (0, 1, 2, 4, 8, 16), 2
NETWORKS, SEEDS, BENCH_EPOCHS = 128, 96, 2
GAINS, GAIN_SEEDS = (1.0, 2.0, 4.0, 8.0), 16
SEED, BENCH_SEED = 5_200_000, 5_300_000
PARTS = ("appearance", "initialisers")
PAIRS = {
    "norm bias against fc1": ("{norm}.bias", "mlp.fc1.weight", 1),
    "QK": ("attn.qkv.weight[q]", "attn.qkv.weight[k]", 2),
    "VO": ("attn.qkv.weight[v]", "attn.proj.weight", 2),
}
"""Two parts of a block, and the number of groups of their type: means over one axis, or single entries."""


def trained(kind: str, work: Path, networks: int, snapshots: Sequence[int], **options: Any) -> Population:
    """The population of ConvNeXts or ViTs."""
    recipe = Recipe.load(f"digits-{kind}").replace(
        {"training.epochs": snapshots[-1], "training.evaluate": "end", "population.networks": networks}
        | {"population.tile": min(32, networks), "population.seed": SEED, "population.snapshots": list(snapshots)}
    )
    return collect(recipe, work / f"{kind}.pop", progress=False, **options)


def pair_rows(kind: str, found: Emergence, depth: int) -> list[dict[str, Any]]:
    """The correlation of each pair of parts of each block at each snapshot."""
    rows = []
    for block in range(depth):
        for what, (first, second, groups) in PAIRS.items():
            norm = "norm" if kind == "convnext" else "norm2"
            names = {f"{KINDS[kind].format(block)}.{part.format(norm=norm)}" for part in (first, second)}
            curve: list[dict[str, Any] | None] = []
            for one in found.found.values():
                here = [p for p in one.pairs() if {p.a, p.b} == names and len(p.groups) == groups]
                keep = here[0] if here and here[0].signed else None
                curve.append(
                    keep and {"value": keep.correlation, "ci95": list(keep.ci95), "p": keep.p, "sure": keep.p < 0.05}
                )
            if any(curve):
                rows.append({"what": what, "block": block, "curve": curve, **appearance(curve, [*found.found])})
    return rows


def stripe_rows(population: Population) -> list[dict[str, Any]]:
    """The variance of row and column means over that of independent entries, of each matrix, as logarithms."""
    curves: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
    tensors = population.spec.select("*.mlp.fc?.weight")
    for epoch in population.snapshots:
        for tensor in tensors:
            weights = population.at(epoch).weights(tensor.name)[~population.diverged]
            ratios = stripes(weights.reshape(-1, *tensor.shape)).ratios
            for means in ("column", "row"):
                value, low, high = (float(np.log(x)) for x in (ratios[means].value, *ratios[means].ci95))
                entry = {"value": value, "ci95": [low, high], "p": ratios[means].p, "sure": low > 0}
                curves.setdefault((tensor.name, means), []).append(entry)
    return [
        {"what": f"stripes of {tensor.split('.')[-2]}, {means} means", "block": int(tensor.split(".")[-4])}
        | {"curve": curve, **appearance(curve, population.snapshots)}
        for (tensor, means), curve in curves.items()
    ]


def appearance(curve: Sequence[dict[str, Any] | None], epochs: Sequence[int]) -> dict[str, int | None]:
    """The first epoch from which on the value is sure and has the sign of the end, and the first with half of it."""
    end = curve[-1]
    if end is None or not end["sure"]:
        return {"appears": None, "half": None}
    first = len(curve)
    while first and (one := curve[first - 1]) is not None and one["sure"] and one["value"] * end["value"] > 0:
        first -= 1
    half = next(i for i, one in enumerate(curve) if one is not None and one["value"] / end["value"] >= 0.5)
    return {"appears": epochs[first], "half": epochs[half]}


def benchmark(
    population: Population, work: Path, early: int, epochs: int, seeds: int, gain_seeds: int, **options: Any
) -> dict[str, Any]:
    """Networks initialised by distributions of an early epoch and of the end, their controls, and the default."""
    arms, gains = {"default": "default"}, {}
    for arm, epoch in (("early", early), ("end", population.snapshots[-1])):
        training = {"seeds": gain_seeds, "epochs": epochs, **options}
        choice = choose_gain(population.at(epoch), "blocks.*", work / f"gain-{arm}", gains=GAINS, **training)
        choice.fit.save(work / f"{arm}.safetensors")
        gains[arm] = {"epoch": epoch, "gain": choice.gain, "curve": choice.rows(), "settings": choice.settings}
        arms[arm] = str(work / f"{arm}.safetensors")
    recipe = population.recipe.replace({"training.epochs": epochs})
    found = bench(recipe, arms, work / "bench", seeds=seeds, seed=BENCH_SEED, control=tuple(CONTROLS), **options)
    accuracy = {arm: values.tolist() for arm, values in found.by_arm().items()}

    def less(one: str, other: str) -> dict[str, Any]:
        """The paired difference, with its interval for the test images that were used, and for others as well."""
        test = found.contrast([{"init": one}, {"init": other, "weight": -1}])
        row = {"difference": test["difference"], "difference_ci95": test["ci"], "p": test["p"]}
        return row | {"difference_ci95_images": test["ci_images"]}

    scale, uncorrelated = (control.suffix for control in CONTROLS.values())
    std = float((np.array(accuracy["early"]) - accuracy["end"]).std(ddof=1))
    return {
        "epochs": epochs,
        "n": seeds,
        "gains": gains,
        "contrast": less("early", "end") | {"std": std},
        "against default": {arm: less(arm, "default") for arm in accuracy if arm != "default"},
        "correlations": {arm: less(arm, arm + uncorrelated) for arm in gains},
        "moments of each part": {arm: less(arm + uncorrelated, arm + scale) for arm in gains},
        "accuracies": accuracy,
    }


def run(
    work: Path,
    out: Path,
    parts: Sequence[str] = PARTS,
    networks: int = NETWORKS,
    snapshots: Sequence[int] = SNAPSHOTS,
    early: int = EARLY,
    epochs: int = BENCH_EPOCHS,
    seeds: int = SEEDS,
    gain_seeds: int = GAIN_SEEDS,
    **options: Any,
) -> dict[str, Any]:
    """Train what is missing, and write the results."""
    options, file = {"workers": 1, "device": "cpu"} | options, out / "results.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    result |= {"networks": networks, "snapshots": list(snapshots), "seed": SEED}
    for kind in KINDS if "appearance" in parts else ():
        population = trained(kind, work, networks, snapshots, **options)
        found = emergence(population)
        significant = [sum(pair.p < 0.05 for pair in one.pairs()) for one in found.found.values()]
        rows = [*pair_rows(kind, found, population.recipe.network.depth), *stripe_rows(population)]
        result[kind] = {"significant pairs": significant, "pairs": [len(one.pairs()) for one in found.found.values()]}
        result[kind] |= {"accuracy": float(population.metrics["test_accuracy"].mean()), "rows": rows}
    if "initialisers" in parts:
        population = trained("vit", work, networks, snapshots, **options)
        result["initialisers"] = benchmark(population, work, early, epochs, seeds, gain_seeds, **options)
    before = result.get("environment", {})
    result["environment"] = {part: environment() if part in parts else before.get(part, before) for part in PARTS}
    file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("emergence"), help="folder of the networks")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--part", choices=PARTS, action="append", help="of the results; by default all")
    options = parser.parse_args()
    result = run(options.work, options.out, options.part or PARTS, workers=options.workers)
    for kind in KINDS:
        for row in result[kind]["rows"]:
            print(kind, row["block"], row["what"], "appears", row["appears"], "half", row["half"])
    print(result["initialisers"]["contrast"])


if __name__ == "__main__":
    main()
