"""What in mimetic attention's start of a small ViT does it, and why? DESIGN.md says what is compared.

    python analyses/vit_start/run.py --work vit-start --workers 2

Trains the arms (it resumes), and writes `results.json`.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from centred_vits import centred_vit
from torch import Tensor, nn
from uniform_attention import uniform_attention_

from weightscope._util.environment import environment
from weightscope._util.plugins import reference_to
from weightscope.benchmarking.run import plan_bench
from weightscope.benchmarking.statistics import holm, paired
from weightscope.data import load
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.initial_weights import initial_weights

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "populations" / "digits-vit.toml"
SEED, SEEDS = 4_100_000, 64


def mimetic(**numbers: Any) -> InitConfig:
    """Mimetic attention with some of its numbers."""
    return InitConfig.model_validate({"name": "mimetic_attention"} | numbers)


def uniform(**numbers: Any) -> InitConfig:
    """Uniform attention."""
    return InitConfig.model_validate({"name": reference_to(uniform_attention_)} | numbers)


VO = mimetic(parts="vo")
ARMS = {
    "mimetic": mimetic(),
    "vo": VO,
    "qk": mimetic(parts="qk"),
    "vo, noise only": mimetic(parts="vo", beta_vo=0.0),
    "vo, sign turned": mimetic(parts="vo", beta_vo=-0.4),
    "vo, scale": VO.model_copy(update={"control": "scale"}),
    "uniform, c = 0.2": uniform(c=0.2),
    "uniform, c = 0.4": uniform(c=0.4),
    "uniform, c = 0.7": uniform(c=0.7),
    "uniform, c = 1": uniform(c=1.0),
    "uniform, default vo": uniform(keep=True),
    "uniform, c = -0.4": uniform(c=-0.4),
}
CENTRED = {"centred once": False, "centred in every block": True}
SHORT: dict[str, Any] = {"training.epochs": 4}
CIFAR: dict[str, Any] = {"data.name": "cifar10", "data.size": 16, "data.train": 4000, "data.test": 2000}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "digits": (SHORT, tuple(ARMS), 64),
    "learned positions": (SHORT | {"network.positions": "learned"}, ("mimetic", "vo", "qk", "uniform, c = 0.4"), 64),
    "16 epochs": ({"training.epochs": 16}, ("mimetic", "vo", "uniform, c = 0.4"), 32),
    "cifar10": (CIFAR | {"training.epochs": 5}, ("mimetic", "vo", "uniform, c = 0.4"), 32),
}
CONTRASTS = (
    ("vo", "default"),
    ("mimetic", "vo"),
    ("vo", "vo, noise only"),
    ("uniform, c = 0.4", "default"),
    ("centred in every block", "default"),
)
RATES, OTHER_RATES, OTHER_RATE_SEEDS = "learning rates", (0.006, 0.012), 32  # post hoc
SECOND = (*CONTRASTS, ("centred in every block, vo", "centred in every block"))  # of the second stage


def trained(
    recipe: Recipe, arms: dict[str, InitConfig], folder: Path, seeds: int, **options: Any
) -> tuple[dict[str, list[float]], dict[str, Population]]:
    """The accuracy of each seed, in %, and the population, by arm and for the default."""
    plan = plan_bench(
        recipe, {"default": InitConfig()} | arms, folder, measure=False, seeds=seeds, seed=SEED, **options
    )
    accuracy = {arm: values.tolist() for arm, values in plan.run().by_arm().items()}
    return accuracy, dict(zip(accuracy, (Population(request.path) for request in plan.requests), strict=True))


def common(population: Population) -> dict[str, list[float]]:
    """|mean over tokens|^2 / mean of |token|^2 of what enters each block's attention, at the start and after training.

    Averaged over the test images and the first eight networks.
    """
    recipe = population.recipe
    data = load("digits")
    images = (data.test_images[:64] / 255 - data.mean[:, None, None]) / data.std[:, None, None]
    count = min(8, len(population))
    start = initial_weights(recipe, range(count), partial(build_for, recipe))
    out = {}
    for when, weights in (("start", start), ("trained", population.weights()[:count])):
        shares = []
        for k in range(count):
            network = build_for(recipe)
            network.load_state_dict(
                {name: torch.from_numpy(w.copy()) for name, w in population.spec.unpack(weights[k]).items()}
            )
            shares.append(_shares(network.eval(), images))
        out[when] = np.mean(shares, 0).tolist()
    return out


def _shares(network: nn.Module, images: Tensor) -> list[float]:
    shares: list[float] = []

    def measure(_: nn.Module, inputs: Sequence[Tensor]) -> None:
        x = inputs[0]
        shares.append(float((x.mean(1).square().sum(-1) / x.square().sum(-1).mean(1)).mean()))

    for name, module in network.named_modules():
        if name.endswith("norm1"):
            module.register_forward_pre_hook(measure)
    with torch.no_grad():
        network(images)
    return shares


def setting(name: str, work: Path, seeds: int | None, data: Path | None, **where: Any) -> dict[str, Any]:
    """Accuracies of all arms of one setting, and the tokens' common component where the images are at hand."""
    changes, arms, count = SETTINGS[name]
    recipe = Recipe.load(RECIPE).replace(changes)
    folder, seeds = work / name.replace(" ", "-"), seeds or count
    options: dict[str, Any] = {"seeds": seeds, "data": data, **where}
    accuracy, populations = trained(recipe, {arm: ARMS[arm] for arm in arms}, folder, **options)
    if name != "learned positions":
        sizes = ("width", "depth", "heads", "patch_size", "expansion")
        for arm, every in CENTRED.items():
            network = {key: getattr(recipe.network, key) for key in sizes} | {"type": centred_vit, "every": every}
            own = Recipe.parse(recipe.to_dict() | {"network": network})
            found, more = trained(own, {"vo": ARMS["vo"]}, folder / arm.replace(" ", "-"), **options)
            accuracy |= {arm: found["default"], f"{arm}, vo": found["vo"]}
            populations |= {f"{arm}, {key}": population for key, population in more.items()}
    rows = []
    for one, against in CONTRASTS if name == "digits" else SECOND:
        if one in accuracy and against in accuracy:
            rows.append({"arm": one, "against": against} | paired(np.array(accuracy[one]), np.array(accuracy[against])))
    rows = [row | {"p_holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]
    result: dict[str, Any] = {"n": seeds, "contrasts": rows, "accuracies": accuracy}
    if recipe.data.name == "digits":
        result["common"] = {arm: common(population) for arm, population in populations.items()}
    return result


def other_rates(work: Path, seeds: int | None, **options: Any) -> dict[str, Any]:
    """The default and mimetic attention at other learning rates, on the digits."""
    out, seeds = {}, seeds or OTHER_RATE_SEEDS
    for rate in OTHER_RATES:
        recipe = Recipe.load(RECIPE).replace(SHORT | {"training.learning_rate": rate})
        accuracy, _ = trained(recipe, {"mimetic": ARMS["mimetic"]}, work / f"rate-{rate}", seeds, **options)
        out[str(rate)] = {"n": seeds, "accuracies": accuracy}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("vit-start"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="networks of each arm; by default those of the design")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--only", choices=(*SETTINGS, RATES), action="append")
    options = parser.parse_args()
    file = options.out / "results.json"
    where: dict[str, Any] = {"workers": options.workers, "device": "cpu"}
    for name in options.only or (*SETTINGS, RATES):
        if name == RATES:
            found = other_rates(options.work, options.seeds, **where)
        else:
            found = setting(name, options.work, options.seeds, options.data, **where)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | {name: found, "environment": environment()}, indent=1) + "\n")
        for row in found.get("contrasts", ()):
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
