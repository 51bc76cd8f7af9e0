"""Does the distribution of ViTs trained on other images beat mimetic attention with equal tuning? See DESIGN.md.

    python analyses/other_source/run.py --work other-source --data FOLDER_OF_DATA_SETS

Trains the source, the candidates and the arms (it resumes), and writes `results.json`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightscope import load_init
from weightscope._util.environment import environment
from weightscope.anatomy import self_attention
from weightscope.benchmarking import BenchResult, bench
from weightscope.benchmarking.statistics import holm, paired
from weightscope.fits.fitting import fit
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.collection import collect

HERE = Path(__file__).parent
MATRICES = ("blocks.*.attn.*.weight", "blocks.*.mlp.*.weight")
GAINS = (1, 3, 10, 30, 100, 300)
NUMBERS = ("alpha_qk", "beta_qk", "alpha_vo", "beta_vo")
MIMETIC = (
    (0.7, 0.7, 0.4, 0.4),
    (0.35, 0.35, 0.4, 0.4),
    (1.4, 1.4, 0.4, 0.4),
    (0.7, 0.7, 0.2, 0.2),
    (0.7, 0.7, 0.8, 0.8),
    (0.7, 0.7, 0.4, 0.8),
)
RATES = (0.003, 0.01)
RATE = "training.learning_rate"
EDGE_MIMETIC = ((0.7, 0.7, 0.2, 0.2), (0.7, 0.7, 0.1, 0.1), (0.35, 0.35, 0.2, 0.2))  # post hoc, see DESIGN.md
EDGE_GAIN, EDGE_RATES = 30, (0.0015, 0.003)
CHOICE_SEED, CHOICE_SEEDS = 9_220_000, 8
SETTINGS = {"short": (2, 9_230_000, 48), "long": (8, 9_240_000, 16)}  # epochs, root seed, n
BLOCK = 8
OWN, UNCORRELATED, START = "distribution", "distribution, uncorrelated", "mimetic"
CONTRASTS = ((OWN, START), (OWN, "default"), (OWN, UNCORRELATED))

Arms = dict[str, tuple[InitConfig, float]]
"""Name -> initialiser and learning rate."""


def tuned_mimetic(numbers: Sequence[tuple[float, ...]]) -> dict[str, InitConfig]:
    """Mimetic attention with each of some numbers."""
    return {
        f"mimetic {', '.join(f'{v:g}' for v in values)}": InitConfig.model_validate(
            {"name": "mimetic_attention", **dict(zip(NUMBERS, values, strict=True))}
        )
        for values in numbers
    }


def candidates(source: Population, work: Path) -> dict[str, dict[str, InitConfig]]:
    """The candidates of each start; artifacts are fitted once and written into the working folder."""
    own = {}
    for gain in GAINS:
        path = (work / f"gain-{gain}.safetensors").resolve()
        if not path.exists():
            options = {"gain": gain}
            fit(source, MATRICES, structure="exchangeable", options=options, joint="all").save(path)
        own[f"gain {gain}"] = InitConfig(artifact=str(path))
    return {"default": {"default": InitConfig()}, OWN: own, START: tuned_mimetic(MIMETIC)}


def choose(
    recipe: Recipe,
    starts: dict[str, dict[str, InitConfig]],
    rates: Sequence[float],
    folder: Path,
    seeds: int,
    **options: Any,
) -> tuple[Arms, dict[str, Any]]:
    """For each start the candidate and rate with the highest mean accuracy on validation images, and all accuracies."""
    images = recipe.images.train
    assert images is not None
    short = recipe.replace(
        {"data.train": 2 * images, "data.validation": images, "training.epochs": SETTINGS["short"][0]}
    )
    every = {name: init for group in starts.values() for name, init in group.items()}
    found: dict[tuple[str, float], list[float]] = {}
    for rate in rates:
        at_rate = bench(
            short.replace({RATE: rate}), every, folder / f"{rate}", seeds=seeds, seed=CHOICE_SEED, **options
        )
        found |= {(arm, rate): values.tolist() for arm, values in at_rate.by_arm().items()}
    chosen, arms = {}, {}
    for start, group in starts.items():
        best = max(((name, rate) for name in group for rate in rates), key=lambda key: np.mean(found[key]))
        arms[start] = (group[best[0]], best[1])
        chosen[start] = {"candidate": best[0], "learning_rate": best[1]}
    accuracies = {f"{name}, rate {rate}": values for (name, rate), values in found.items()}
    return arms, {"n": seeds, "chosen": chosen, "accuracies": accuracies}


def with_controls(chosen: Arms) -> Arms:
    """The arms: what was chosen, and the controls at the rates of their starts."""

    def control(start: str, kind: str) -> tuple[InitConfig, float]:
        init, rate = chosen[start]
        return init.model_copy(update={"control": kind}), rate

    return {
        **chosen,
        UNCORRELATED: control(OWN, "uncorrelated"),
        "distribution, scale only": control(OWN, "scale"),
        "mimetic, scale only": control(START, "scale"),
    }


def setting(name: str, recipe: Recipe, arms: Arms, folder: Path, most: int | None, **options: Any) -> dict[str, Any]:
    """Accuracies (0 to 1) of each seed by arm, trained in blocks of seeds, and paired differences."""
    epochs, seed, count = SETTINGS[name]
    count = min(count, most or count)
    accuracy: dict[str, list[float]] = {}
    path = next(iter(sorted(folder.glob("*/results.json"))), None)
    done = len(next(iter(BenchResult.load(path.parent).by_arm().values()))) if path else 0
    blocks = [seeds for seeds in range(BLOCK, count, BLOCK) if seeds > done] if name == "long" else []
    for seeds in [*blocks, count]:
        for rate in sorted({rate for _, rate in arms.values()}):
            here = {arm: init for arm, (init, at) in arms.items() if at == rate}
            changed = recipe.replace({RATE: rate, "training.epochs": epochs})
            found = bench(changed, here, folder / f"{rate}", seeds=seeds, seed=seed, **options)
            accuracy |= {arm: values.tolist() for arm, values in found.by_arm().items()}
    accuracy = {arm: accuracy[arm] for arm in arms}
    values = {arm: np.array(found) for arm, found in accuracy.items()}
    rows = [{"arm": one, "against": other} | paired(values[one], values[other]) for one, other in CONTRASTS]
    over = {arm: paired(values[arm], values["default"]) for arm in values if arm != "default"}
    return {"epochs": epochs, "n": count, "contrasts": rows, "over_default": over, "accuracies": accuracy}


def beyond_the_edges(
    recipe: Recipe, own: InitConfig, short: dict[str, Any], before: Arms, work: Path, seeds: int, **options: Any
) -> dict[str, Any]:
    """Post hoc: the choice and the short setting with candidates beyond the edges of the first choice."""
    starts = {
        "default": {"default": InitConfig()},
        OWN: {f"gain {EDGE_GAIN}": own},
        START: tuned_mimetic(EDGE_MIMETIC),
    }
    chosen, choice = choose(recipe, starts, EDGE_RATES, work / "edge-choice", seeds, **options)
    epochs, seed, _ = SETTINGS["short"]
    accuracy = {arm: short["accuracies"][arm] for arm in chosen}
    for arm, (init, rate) in chosen.items():
        if (init, rate) != before[arm]:
            changed = recipe.replace({RATE: rate, "training.epochs": epochs})
            folder = work / f"edge-{arm}"
            found = bench(changed, {arm: init}, folder, seeds=short["n"], seed=seed, **options)
            accuracy[arm] = [run["accuracy"] for run in found.runs]
    values = {arm: np.array(found) for arm, found in accuracy.items()}
    pairs = ((OWN, START), (OWN, "default"), (START, "default"))
    rows = [{"arm": one, "against": other} | paired(values[one], values[other]) for one, other in pairs]
    return {"choice": choice, "n": short["n"], "contrasts": rows, "accuracies": accuracy}


def drawn(recipe: Recipe, init: InitConfig) -> dict[str, list[float]]:
    """The correlations of W_Q with W_K and of W_V with W_O in each block of one network drawn from an artifact."""
    torch.manual_seed(0)
    network = build_for(recipe)
    load_init(str(init.artifact))(network, generator=torch.Generator().manual_seed(0))
    out: dict[str, list[float]] = {"QK": [], "VO": []}
    for part in self_attention(network):
        for what, a, b in (("QK", part.read("q"), part.read("k")), ("VO", part.read("v"), part.read("o").mT)):
            out[what].append(float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)))
    return out


def adjusted(results: dict[str, Any]) -> None:
    """Add Holm's p over the five contrasts that do not decide."""
    rows = [row for name in SETTINGS for row in results[name]["contrasts"]][1:]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("other-source"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--recipes", type=Path, default=HERE, help="folder of recipe.toml and source.toml")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--seeds", type=int, help="at most so many networks of each arm; by default those of the design"
    )
    parser.add_argument("--long-seeds", type=int, help="the same, of the long setting")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST and CIFAR-10")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    where = {"workers": options.workers, "device": "cpu", "data": options.data, "progress": False}
    recipe = Recipe.load(options.recipes / "recipe.toml")
    source = collect(Recipe.load(options.recipes / "source.toml"), options.work / "source.pop", **where)
    starts = candidates(source, options.work)
    chosen, choice = choose(
        recipe, starts, RATES, options.work / "choice", min(CHOICE_SEEDS, options.seeds or CHOICE_SEEDS), **where
    )
    arms = with_controls(chosen)
    drawings = {name: drawn(recipe, init) for name, init in starts[OWN].items()}
    results: dict[str, Any] = {"choice": choice, "drawn": drawings}
    for name in SETTINGS:
        most = options.long_seeds or options.seeds if name == "long" else options.seeds
        wanted = {arm: one for arm, one in arms.items() if name == "short" or "scale" not in arm}
        results[name] = setting(name, recipe, wanted, options.work / name, most, **where)
    adjusted(results)
    own, few = starts[OWN][f"gain {EDGE_GAIN}"], choice["n"]
    results["beyond the edges"] = beyond_the_edges(recipe, own, results["short"], chosen, options.work, few, **where)
    text = json.dumps(results | {"environment": environment()}, indent=1) + "\n"
    (options.out / "results.json").write_text(text)
    return results


if __name__ == "__main__":
    main()
