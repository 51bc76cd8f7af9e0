"""What in the start that is drawn from trained ViTs does it, and what is left at each start's best rate? See DESIGN.md.

    python analyses/derived_vit_start/run.py --work derived-vit-start

Trains the populations and the arms (it resumes), and writes `results.json`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_parts import draw_parts_
from torch import Tensor, nn

from weightscope._util.environment import environment
from weightscope._util.plugins import reference_to
from weightscope.benchmarking import bench
from weightscope.benchmarking.statistics import crossed, holm, holm_levels, paired
from weightscope.data import load
from weightscope.fits import Exchangeable
from weightscope.fits.fitting import fit
from weightscope.networks import build_for
from weightscope.networks.layers import Attention
from weightscope.recipe import InitConfig, Recipe
from weightscope.spec import WeightSpec
from weightscope.training.collection import collect
from weightscope.training.engine import TileRun
from weightscope.training.network_check import choose_kernels

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "vit_start"))
from centred_vits import centred_vit  # noqa: E402
from uniform_attention import uniform_attention_  # noqa: E402

RECIPE = HERE.parent.parent / "populations" / "digits-vit.toml"
NETWORKS, SELECT, GAIN = 128, "blocks.*", 30.0  # the gain was chosen in analyses/one_structure
RATE, POSITIONS = "training.learning_rate", "network.positions"
LEARNED = {POSITIONS: "learned"}
PARTS: dict[str, dict[str, str]] = {
    "derived, VO only": {"parts": "vo"},
    "derived, QK only": {"parts": "qk"},
    "derived, rest only": {"parts": "r"},
    "derived, K permuted": {"permute": "k"},
    "derived, K turned": {"turn": "k"},
    "derived, V permuted": {"permute": "v"},
    "derived, V turned": {"turn": "v"},
    "derived, VO only, V permuted": {"parts": "vo", "permute": "v"},
}
CENTRED = {"centred once": False, "centred in every block": True}
STARTS = ("default", "derived", "derived, uncorrelated", "derived, scale", "mimetic")
FOUR, THREE, BEYOND = (0.003, 0.006, 0.012, 0.024), (0.003, 0.006, 0.012), 0.048  # the last where 0.024 is best

Weights = Mapping[str, float]
"""A contrast: the weight of each arm."""


def minus(one: str, other: str) -> Weights:
    """The difference of two arms."""
    return {one: 1.0, other: -1.0}


PART_CONTRASTS: tuple[Weights, ...] = (  # the first decides
    {"derived, VO only": 1.0, "default": -0.5, "derived": -0.5},
    minus("derived", "derived, K permuted"),
    minus("derived", "derived, V permuted"),
    minus("derived", "derived, uncorrelated"),
    minus("derived, VO only", "derived, VO only, V permuted"),
    minus("uniform, c = 0.4", "uniform, c = 0"),
)
RATE_CONTRASTS: tuple[Weights, ...] = (
    minus("derived", "derived, uncorrelated"),
    minus("centred in every block", "default"),
    minus("centred in every block", "mimetic"),
    minus("derived", "mimetic"),
    minus("derived", "derived, scale"),
)
PLAIN = tuple(row for row in RATE_CONTRASTS if not any(arm.startswith("centred") for arm in row))
FEWER = ("derived, scale", "derived, QK only", "derived, K turned", "derived, V turned", "mimetic, VO only", "uniform")
PART_SETTINGS: dict[str, tuple[dict[str, Any], int, int, tuple[str, ...]]] = {  # changes, root seed, n, arms left out
    "parts": ({}, 6_100_000, 64, ()),
    "parts, learned positions": (LEARNED, 6_110_000, 64, FEWER),
}
# changes, rates, root seed and n of the choice, root seed and n of the test, contrasts
RATE_SETTINGS: dict[str, tuple[dict[str, Any], Sequence[float], tuple[int, int], tuple[int, int], Any]] = {
    "rates": ({}, FOUR, (6_200_000, 8), (6_300_000, 64), RATE_CONTRASTS),
    "rates, learned positions": (LEARNED, FOUR, (6_210_000, 8), (6_310_000, 64), PLAIN),
    "rates, 16 epochs": ({"training.epochs": 16}, THREE, (6_220_000, 8), (6_320_000, 32), PLAIN),
}
MEASURED = (
    "default",
    "mimetic",
    "mimetic, VO only",
    "derived",
    "derived, uncorrelated",
    "derived, VO only",
    "uniform, c = 0",
    "uniform, c = 0.4",
)
STEPS, MEASURED_NETWORKS, IMAGES = (0, 5, 10, 20, 40, 88), 8, 64
ORDER = ("parts", "rates", "parts, learned positions", "rates, 16 epochs", "by step", "rates, learned positions")


def fitted(recipe: Recipe, work: Path, networks: int, **options: Any) -> tuple[Path, dict[str, Any]]:
    """The artifact that the starts are drawn from, and what its fit says of each type of part and of all."""
    folder = work / f"population-{recipe.network.positions}"
    file, notes = (folder.resolve() / name for name in ("derived.safetensors", "fit.json"))
    if not notes.exists():
        population = collect(recipe.replace({"population.networks": networks}), folder / "population.pop", **options)
        derived, plain = (
            fit(population, [SELECT], structure="exchangeable", joint="all", options={"gain": gain})
            for gain in (GAIN, 1.0)
        )
        if not file.exists():
            derived.save(file)
        found = achieved(*(each.groups[0].structure for each in (derived, plain)))
        notes.write_text(json.dumps({"networks": networks} | found))
    return file, json.loads(notes.read_text())


def achieved(derived: Exchangeable, plain: Exchangeable) -> dict[str, Any]:
    """What is kept, clipped and achieved, from a fit with the gain and one with gain 1."""
    types = {k: v for k, v in derived.diagnostics.items() if isinstance(v, dict) and "achieved" in v}
    out: dict[str, Any] = {"gain": GAIN} | {key: sum(row[key] for row in types.values()) for key in ("kept", "clipped")}
    # the mean over types, by kept correlations
    out["achieved"] = sum(row["kept"] * row["achieved"] for row in types.values()) / max(out["kept"], 1)
    # of what is wanted, the kept correlations times the gain and clipped, the slope of what is drawn
    products, squares = 0.0, 0.0
    for drawn, correlation in zip(derived.correlations, plain.correlations, strict=True):
        wanted = np.clip(GAIN * np.where(np.eye(len(drawn)), 0.0, correlation), -0.9, 0.9)
        products, squares = products + float((drawn * wanted).sum()), squares + float((wanted**2).sum())
    return out | {"achieved_over_wanted": products / squares if squares else 0.0, "types": types}


def named(name: Any, **numbers: Any) -> InitConfig:
    """An initialiser with its parameters."""
    return InitConfig.model_validate({"name": name if isinstance(name, str) else reference_to(name)} | numbers)


def every_arm(file: Path) -> dict[str, InitConfig]:
    """The arms of the first question; the starts of the others are among them."""
    derived = InitConfig(artifact=str(file))
    arms = {"default": InitConfig(), "derived": derived}
    arms |= {f"derived, {key}": derived.model_copy(update={"control": key}) for key in ("uncorrelated", "scale")}
    arms |= {arm: named(draw_parts_, file=str(file), **options) for arm, options in PARTS.items()}
    arms |= {"mimetic": named("mimetic_attention"), "mimetic, VO only": named("mimetic_attention", parts="vo")}
    # W_Q = W_K = 0 and W_V W_O = -c I
    return arms | {f"uniform, c = {c:g}": named(uniform_attention_, c=c) for c in (0.0, 0.4)}


Found = dict[str, tuple[list[float], np.ndarray]]
"""Of each arm the accuracies (0 to 1) by seed, and which test images each network classifies rightly, (n, images)."""


def trained(
    recipe: Recipe, arms: Mapping[str, InitConfig], folder: Path, seeds: int, seed: int, **options: Any
) -> Found:
    """Train arms with the same seeds."""
    found = bench(recipe, arms, folder, epochs=[recipe.training.epochs], seeds=seeds, seed=seed, **options)
    hits = {init: right for (_, _, init), right in found.hits.items()}
    return {arm: (values.tolist(), hits[arm]) for arm, values in found.by_arm().items()}


def contrasts(found: Found, wanted: Sequence[Weights]) -> list[dict[str, Any]]:
    """Paired differences: the first, which decides, at 5 % by itself, the others with Holm's adjustment.

    `ci_images` is an interval for other test images, too, at the level of the row's test.
    """
    hits = {arm: right for arm, (_, right) in found.items()}
    known = [row for row in wanted if set(row) <= set(found)]
    values = [tuple(_part(found, row, sign) for sign in (1, -1)) for row in known]
    p = [paired(*pair)["p"] for pair in values]
    adjusted, levels = [p[0], *holm(p[1:])], [0.05, *holm_levels(p[1:])]
    rows = []
    for row, pair, p_holm, level in zip(known, values, adjusted, levels, strict=True):
        exact = paired(*pair, level=level)["difference_ci95"]
        images = crossed(row, hits, np.arange(len(pair[0])), exact, level)  # type: ignore[arg-type]
        rows.append(
            {"weights": dict(row), **paired(*pair), "p_holm": p_holm, "ci_holm": exact, "ci_images": images}
            | {"sd": float((pair[0] - pair[1]).std(ddof=1)), "n": len(pair[0])}
        )
    return rows


def _part(found: Found, weights: Weights, sign: int) -> np.ndarray:
    """The weighted sum of the arms whose weights have a sign, (n,)."""
    return np.sum([abs(w) * np.array(found[arm][0]) for arm, w in weights.items() if w * sign > 0], axis=0)


def parts(name: str, recipe: Recipe, file: Path, work: Path, seeds: int | None, **options: Any) -> dict[str, Any]:
    """The first question."""
    changes, seed, count, without = PART_SETTINGS[name]
    arms = {arm: init for arm, init in every_arm(file).items() if not arm.startswith(without)}
    found = trained(recipe.replace(changes), arms, work / _folder(name), seeds or count, seed, **options)
    values = {arm: accuracies for arm, (accuracies, _) in found.items()}
    over = {arm: paired(np.array(values[arm]), np.array(values["default"])) for arm in values if arm != "default"}
    return {"n": seeds or count, "contrasts": contrasts(found, PART_CONTRASTS), "over_default": over} | {
        "accuracies": values
    }


def _best(accuracies: Mapping[float, Sequence[float]]) -> float:
    """The rate with the highest mean accuracy, of equal ones the smaller."""
    return max(accuracies, key=lambda rate: (np.mean(accuracies[rate]), -rate))


def networks_of(recipe: Recipe, file: Path, centred: bool) -> dict[str, tuple[Recipe, InitConfig]]:
    """Starts of the second question: the recipe and the initialiser."""
    arms = every_arm(file)
    starts = {start: (recipe, arms[start]) for start in STARTS}
    if centred:
        sizes = ("width", "depth", "heads", "patch_size", "expansion")
        for start, every in CENTRED.items():
            network = {key: getattr(recipe.network, key) for key in sizes} | {"type": centred_vit, "every": every}
            starts[start] = Recipe.parse(recipe.to_dict() | {"network": network}), InitConfig()
    return starts


def rates(name: str, recipe: Recipe, file: Path, work: Path, seeds: int | None, **options: Any) -> dict[str, Any]:
    """The second question: the best rate of each start on seeds of their own, and the starts at these."""
    changes, tried, choosing, testing, wanted = RATE_SETTINGS[name]
    starts = networks_of(recipe.replace(changes), file, wanted is RATE_CONTRASTS)
    folder, few, many = work / _folder(name), *(min(seeds or n, n) for n in (choosing[1], testing[1]))
    chosen, curves, found = {}, {}, Found()
    for start, (own, init) in starts.items():
        at: dict[float, list[float]] = {}
        for rate in (*tried, BEYOND):
            if rate == BEYOND and _best(at) != FOUR[-1]:
                break
            where = folder / f"choice-{start}-{rate}"
            at[rate], _ = trained(own.replace({RATE: rate}), {start: init}, where, few, choosing[0], **options)[start]
        chosen[start] = _best(at)
        curves |= {f"{start}, rate {rate:g}": values for rate, values in at.items()}
        print(name, start, {rate: round(100 * float(np.mean(values)), 2) for rate, values in at.items()}, flush=True)
    for start, (own, init) in starts.items():
        changed = own.replace({RATE: chosen[start]})
        found |= trained(changed, {start: init}, folder / f"test-{start}", many, testing[0], **options)
    choice = {"n": few, "chosen": chosen, "accuracies": curves}
    values = {arm: accuracies for arm, (accuracies, _) in found.items()}
    return {"choice": choice, "n": many, "contrasts": contrasts(found, wanted), "accuracies": values}


def by_step(recipe: Recipe, file: Path, networks: int) -> dict[str, Any]:
    """The tokens' common component before each block by training step, and the entropy of attention at the start."""
    _, seed, *_ = PART_SETTINGS["parts"]
    arms, out, device = every_arm(file), {}, torch.device("cpu")
    changes = {"population.networks": networks, "population.tile": networks, "population.seed": seed}
    for arm in MEASURED:
        init = {key: value for key, value in arms[arm].model_dump().items() if value is not None}
        own = Recipe.parse(recipe.replace(changes).to_dict() | {"init": [init]})
        run = TileRun(own, 0, own.data.load(None), device, choose_kernels(own, device).kernels)
        run.snapshot_steps = list(STEPS)
        end = run.train()
        spec = WeightSpec.of(build_for(own))
        found = [[measured(own, spec, row) for row in rows] for rows in run.snapshots]  # (steps, networks) pairs
        shares, entropies = (np.array([[pair[i] for pair in rows] for rows in found]) for i in (0, 1))
        out[arm] = {
            "common": shares.mean(1).tolist(),  # (steps, blocks)
            "entropy": entropies[0].mean(0).tolist(),  # (blocks,) at the start, over log N
            "accuracy": float(end.metrics["test_accuracy"].mean()),
        }
    return {"n": networks, "images": IMAGES, "steps": list(STEPS), "arms": out}


@torch.no_grad()
def measured(recipe: Recipe, spec: WeightSpec, row: np.ndarray) -> tuple[list[float], list[float]]:
    """Of a network's blocks the share of the tokens' common component, and the entropy of attention over log N.

    |mean over tokens|^2 / mean of |token|^2 of what enters norm1, the mean over images; entropy over heads, too.
    """
    data = load("digits")
    images = (data.test_images[:IMAGES] / 255 - data.mean[:, None, None]) / data.std[:, None, None]
    network = build_for(recipe).eval()
    network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in spec.unpack(row).items()})
    shares: list[float] = []
    entropies: list[float] = []

    def share(_: nn.Module, inputs: Sequence[Tensor]) -> None:
        x = inputs[0]
        shares.append(float((x.mean(1).square().sum(-1) / x.square().sum(-1).mean(1)).mean()))

    def entropy(module: Attention, inputs: Sequence[Tensor]) -> None:
        q, k, _ = module.qkv(inputs[0]).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
        log = torch.log_softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        entropies.append(float(-(log.exp() * log).sum(-1).mean() / np.log(q.shape[-2])))

    for name, module in network.named_modules():
        if name.endswith("norm1"):
            module.register_forward_pre_hook(share)
        if isinstance(module, Attention):
            module.register_forward_pre_hook(entropy)
    network(images)
    return shares, entropies


def _folder(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("derived-vit-start"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="networks of each arm; by default those of the design")
    parser.add_argument("--networks", type=int, default=NETWORKS, help="networks of a population")
    parser.add_argument("--only", choices=ORDER, action="append")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    where = {"workers": options.workers, "device": "cpu"}
    file = options.out / "results.json"
    for name in options.only or ORDER:
        recipe = Recipe.load(options.recipe)
        own = recipe.replace(LEARNED) if "learned" in name else recipe
        drawn_from, notes = fitted(own, options.work, options.networks, **where)
        short = recipe.replace({"training.epochs": 4})
        if name == "by step":
            found = by_step(short, drawn_from, min(options.seeds or MEASURED_NETWORKS, MEASURED_NETWORKS))
        else:
            stage = parts if name in PART_SETTINGS else rates
            found = stage(name, short, drawn_from, options.work, options.seeds, **where)
        before = json.loads(file.read_text()) if file.exists() else {"fits": {}}
        fits = before["fits"] | {own.network.positions: notes}
        text = json.dumps(before | {name: found, "fits": fits, "environment": environment()}, indent=1)
        file.write_text(text + "\n")
        for row in found.get("contrasts", ()):
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
