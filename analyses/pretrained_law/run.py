"""Is the distribution of a pretrained ViT a better start for small ViTs? DESIGN.md says what is compared.

    python analyses/pretrained_law/run.py --source FOLDER_OF_A_VIT --work pretrained-law --data FOLDER_OF_DATA_SETS

Trains the arms (it resumes), and writes `results.json`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from weightscope._util.environment import environment
from weightscope.benchmarking import bench
from weightscope.benchmarking.design import labelled
from weightscope.benchmarking.statistics import holm, paired
from weightscope.fits.fitting import fit_init
from weightscope.recipe import InitConfig, Recipe

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "populations" / "digits-vit.toml"
SEED, SEEDS = 7_300_000, 32
GAINS = (1, 4, 10)
FASHION = {"name": "fashion-mnist", "train": 2000, "test": 1000}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {},
    "fashion": {f"data.{key}": value for key, value in FASHION.items()}
    | {"network.width": 48, "network.heads": 3, "network.patch_size": 7},
}
CONTRASTS = (("law, gain 4", "default"), ("law, gain 4", "scale only"), ("mimetic", "law, gain 4"))


def arms(source: str, work: Path) -> dict[str, InitConfig]:
    """The arms; their artifacts are fitted to the source and written into the working folder."""
    out = {}
    for gain in GAINS:
        file = work / f"law-{gain}.safetensors"
        if not file.exists():
            fit_init(source, "exchangeable", options={"gain": gain}).save(file)
        out[f"law, gain {gain}"] = InitConfig.model_validate({"artifact": str(file)})
    out["scale only"] = out["law, gain 4"].model_copy(update={"control": "scale"})
    out["mimetic"] = InitConfig.model_validate({"name": "mimetic_attention"})
    return out


def setting(name: str, configs: dict[str, InitConfig], folder: Path, seeds: int, **options: Any) -> dict[str, Any]:
    """The accuracy of each seed (0 to 1) by arm, the contrasts, and the differences to the default."""
    recipe = Recipe.load(RECIPE).replace(SETTINGS[name] | {"training.epochs": 4})
    wanted = ["default", *configs.values()]
    found = bench(recipe, wanted, folder, epochs=[4], seeds=seeds, seed=SEED, **options)
    names = {labelled(config)[0]: arm for arm, config in configs.items()}
    accuracy: dict[str, list[float]] = {}
    for run in sorted(found.runs, key=lambda run: run["seed"]):
        accuracy.setdefault(names.get(run["init"], run["init"]), []).append(run["accuracy"])
    rows = [
        {"arm": one, "against": other} | paired(np.array(accuracy[one]), np.array(accuracy[other]))
        for one, other in CONTRASTS
    ]
    rows = [row | {"p_holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]
    others = [arm for arm in accuracy if arm != "default"]
    over = {arm: paired(np.array(accuracy[arm]), np.array(accuracy["default"])) for arm in others}
    return {"n": seeds, "contrasts": rows, "over_default": over, "accuracies": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="the pretrained ViT: a folder, a file or hf://org/name")
    parser.add_argument("--work", type=Path, default=Path("pretrained-law"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks of each arm")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST")
    parser.add_argument("--only", choices=SETTINGS, action="append")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    configs, file = arms(options.source, options.work), options.out / "results.json"
    for name in options.only or SETTINGS:
        where = {"workers": options.workers, "device": "cpu", "data": options.data}
        found = setting(name, configs, options.work / name, options.seeds, **where)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | {name: found, "environment": environment()}, indent=1) + "\n")
        for row in found["contrasts"]:
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
