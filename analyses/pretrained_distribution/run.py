"""Is the distribution of a pretrained ViT a better start for small ViTs? DESIGN.md says what is compared.

    python analyses/pretrained_distribution/run.py --source A_VIT --work FOLDER --data FOLDER_OF_DATA_SETS

Trains the arms (it resumes), and writes `results.json`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from initialisers import draw_parts_
from torch import nn

from weightscope import load_init
from weightscope._util.environment import environment
from weightscope._util.plugins import reference_to
from weightscope.anatomy import self_attention
from weightscope.benchmarking import bench
from weightscope.benchmarking.statistics import holm, paired
from weightscope.fits.fitting import fit
from weightscope.fits.pretrained import fit_pretrained
from weightscope.init import mimetic_attention_
from weightscope.networks import build_for
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.training.collection import collect

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "populations" / "digits-vit.toml"
NETWORKS, POPULATION_SEED, POPULATION_GAIN = 64, 7_500_000, 30
MATRICES = ("blocks.*.attn.*.weight", "blocks.*.mlp.*.weight")
FASHION: dict[str, Any] = {"data.name": "fashion-mnist", "network.patch_size": 7}
CIFAR: dict[str, Any] = {"data.name": "cifar10", "data.size": 16, "network.patch_size": 4}
PARTS: dict[str, dict[str, str]] = {
    "QK only": {"parts": "qk"},
    "VO only": {"parts": "vo"},
    "MLP only": {"parts": "12"},
    "QK turned": {"turn": "k"},
    "VO turned": {"turn": "v"},
}
BOTH = {"W_V and W_O turned": {"turn": "vo"}, "W_Q and W_K turned": {"turn": "qk"}}  # keep the products
FIRST = (
    ("distribution, gain 4", "default"),
    ("distribution, gain 4", "scale only"),
    ("mimetic", "distribution, gain 4"),
)
SECOND = (
    ("distribution", "uncorrelated"),
    ("mimetic", "distribution"),
    ("distribution", "distribution, VO turned"),
    ("distribution", "distribution, QK turned"),
    ("distribution, first block", "distribution"),
    ("population", "population, uncorrelated"),
)
THIRD = (
    ("distribution, VO only", "distribution"),
    ("mimetic", "distribution, VO only"),
    ("distribution, QK turned", "distribution"),
)
POST_HOC = tuple((arm, "distribution") for arm in BOTH)
FOURTH = (("distribution", "default"), ("mimetic", "distribution"), ("distribution, VO only", "distribution"))
FIFTH = (("distribution, residual x 0.5", "distribution"), ("distribution, residual x 2", "distribution"))
SMALL: dict[str, Any] = {"data.train": 1000, "data.test": 1000}
WIDER: dict[str, Any] = {"data.train": 2000, "data.test": 1000, "network.width": 48, "network.heads": 3}
SETTINGS: dict[str, tuple[dict[str, Any], int, int, tuple[tuple[str, str], ...]]] = {  # changes, seed, n, contrasts
    "digits": ({}, 7_300_000, 32, FIRST),
    "fashion": (FASHION | WIDER, 7_300_000, 32, FIRST),
    "fashion, parts": (FASHION | SMALL, 7_400_000, 64, SECOND),
    "cifar10, parts": (CIFAR | SMALL, 7_400_000, 64, SECOND),
    "digits, parts": ({}, 7_600_000, 32, THIRD),
    "both signs turned": ({}, 7_600_000, 32, POST_HOC),
    "digits, learned positions": ({"network.positions": "learned"}, 7_800_000, 64, FOURTH),
    "digits, residual branches": ({}, 7_800_000, 64, FIFTH),
}


def arms(name: str, source: str, work: Path, networks: int) -> dict[str, InitConfig]:
    """The arms of a setting; artifacts are fitted once and written into the working folder."""

    def fitted(file: str, origin: Any, gain: int, select: str | None = None) -> InitConfig:
        path = (work / f"{file}.safetensors").resolve()
        if not path.exists():
            if isinstance(origin, Population):
                found = fit(origin, select, structure="exchangeable", joint="all", options={"gain": gain})
            else:
                found = fit_pretrained(origin, select, gain=gain)
            found.save(path)
        return InitConfig(artifact=str(path))

    def control(init: InitConfig, kind: str) -> InitConfig:
        return init.model_copy(update={"control": kind})

    mimetic = {"mimetic": InitConfig(name="mimetic_attention")}
    four = fitted("gain-4", source, 4)
    if SETTINGS[name][3] is FIRST:
        gains = {f"distribution, gain {gain}": fitted(f"gain-{gain}", source, gain) for gain in (1, 4, 10)}
        return gains | {"scale only": control(four, "scale")} | mimetic
    changes = {"population.networks": networks, "population.seed": POPULATION_SEED}
    population = collect(Recipe.load(RECIPE).replace(changes), work / "digits.pop", workers=1, device="cpu")
    own = fitted("population", population, POPULATION_GAIN, MATRICES)
    part = {"name": reference_to(draw_parts_), "file": four.artifact}
    if SETTINGS[name][3] is POST_HOC:
        return {"distribution": four} | {
            arm: InitConfig.model_validate(part | options) for arm, options in BOTH.items()
        }
    found = {
        "distribution": four,
        "scale only": control(four, "scale"),
        "uncorrelated": control(four, "uncorrelated"),
        **mimetic,
        **{f"distribution, {key}": InitConfig.model_validate(part | options) for key, options in PARTS.items()},
        "distribution, first block": fitted("first", source, 4, "blocks.0.*"),
        "population": own,
        "population, uncorrelated": control(own, "uncorrelated"),
    }
    found |= {f"distribution, residual x {c:g}": InitConfig.model_validate(part | {"residual": c}) for c in (0.5, 2.0)}
    contrasts = SETTINGS[name][3]
    wanted = [arm for arm in found if "residual" not in arm] if contrasts is SECOND else sum(contrasts, ())
    return {arm: found[arm] for arm in wanted if arm != "default"}


def drawn(init: Callable[..., nn.Module]) -> dict[str, list[float]]:
    """The correlations of W_Q with W_K and of W_V with W_O in each block of one network."""
    torch.manual_seed(0)
    network = init(build_for(Recipe.load(RECIPE)), generator=torch.Generator().manual_seed(0))
    out: dict[str, list[float]] = {"QK": [], "VO": []}
    for part in self_attention(network):
        for what, a, b in (("QK", part.read("q"), part.read("k")), ("VO", part.read("v"), part.read("o").mT)):
            out[what].append(float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)))
    return out


def setting(name: str, configs: dict[str, InitConfig], folder: Path, seeds: int, **options: Any) -> dict[str, Any]:
    """The accuracy of each seed (0 to 1) by arm, the contrasts, and the differences to the default."""
    changes, seed, _, contrasts = SETTINGS[name]
    recipe = Recipe.load(RECIPE).replace(changes | {"training.epochs": 4})
    found = bench(recipe, {"default": InitConfig()} | configs, folder, epochs=[4], seeds=seeds, seed=seed, **options)
    accuracy = {arm: values.tolist() for arm, values in found.by_arm().items()}
    rows = [
        {"arm": one, "against": other} | paired(np.array(accuracy[one]), np.array(accuracy[other]))
        for one, other in contrasts
    ]
    rows = [row | {"p_holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]
    others = [arm for arm in accuracy if arm != "default"]
    over = {arm: paired(np.array(accuracy[arm]), np.array(accuracy["default"])) for arm in others}
    own = {"mimetic": mimetic_attention_} | {
        arm: load_init(init.artifact) for arm, init in configs.items() if init.artifact and not init.control
    }
    drawings = {arm: drawn(init) for arm, init in own.items()}
    return {"n": seeds, "drawn": drawings, "contrasts": rows, "over_default": over, "accuracies": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="the pretrained ViT: a folder, a file or hf://org/name")
    parser.add_argument("--work", type=Path, default=Path("pretrained-distribution"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="networks of each arm; by default those of the design")
    parser.add_argument("--networks", type=int, default=NETWORKS, help="networks of the population")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST and CIFAR-10")
    parser.add_argument("--only", choices=SETTINGS, action="append")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    for name in options.only or SETTINGS:
        configs = arms(name, options.source, options.work, options.networks)
        where = {"workers": options.workers, "device": "cpu", "data": options.data}
        folder = options.work / name.replace(", ", "-")
        found = setting(name, configs, folder, options.seeds or SETTINGS[name][2], **where)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | {name: found, "environment": environment()}, indent=1) + "\n")
        for row in found["contrasts"]:
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
