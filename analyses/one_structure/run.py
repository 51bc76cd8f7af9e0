"""Are the published schemes entries of one covariance, and does an initialiser drawn from it beat them and scale alone?

    python analyses/one_structure/run.py collect --work one-structure
    python analyses/one_structure/run.py table --work one-structure
    python analyses/one_structure/run.py gains --work one-structure
    python analyses/one_structure/run.py bench --work one-structure --workers 2

`collect` trains a population of each architecture on the digits, `table` writes `table.json` (the entries that the
published schemes are), `gains` writes `gains.json` (what clipping and projection leave of a gain), `bench` fits
initialisers, chooses their gain on seeds and images apart, and writes `results.json`. All can be interrupted and
resume.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from weightscope._util.arms import CONTROLS
from weightscope._util.environment import environment
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.benchmarking import BenchResult, bench, choose_gain
from weightscope.benchmarking.statistics import holm
from weightscope.data.readers import fashion_mnist_at_hand
from weightscope.fits.fitting import fit, fit_each
from weightscope.init.named import labelled
from weightscope.population import Population
from weightscope.recipe import InitConfig, Recipe
from weightscope.statistics.exchangeable import Pair
from weightscope.training.collection import collect

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BENCH_SEED = 2_000_000  # seeds shared neither with the populations nor with the choice of the gain
GAINS, GAIN_SEEDS = (0.0, 1.0, 3.0, 10.0, 30.0), 32
SEEDS = {"short": 64, "long": 32, "other data": 64, "other width": 64}


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        recipe: of the population.
        select: the tensors of the blocks, which the initialisers set.
        hand_made: published initialisers of such networks.
        short: epochs of a short training on the digits.
        long: epochs of a long one.
        patch: patch size on Fashion-MNIST (28 x 28 pixels).
        networks: in the population.
    """

    recipe: Recipe
    select: str
    hand_made: tuple[str | InitConfig, ...]
    short: int
    long: int
    patch: int
    networks: int

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Changes of the recipe under which initialisers are compared."""
        fashion = {
            "data.name": "fashion-mnist",
            "data.train": 3000,
            "data.test": 2000,
            "network.patch_size": self.patch,
        }
        width = self.recipe.network.width
        return {
            "short": {"training.epochs": self.short},
            "long": {"training.epochs": self.long},
            "other data": {"training.epochs": 2, **fashion},
            "other width": {"training.epochs": self.short, "network.width": 2 * width},
        }


MAGNITUDES = {  # thesis Fig. 3.40: scheme -> two computed coordinates of a block
    "central pixel and diag(W2 W1)": ("centre-pixel", "mlp-diagonal"),
    "central pixel and |diag(W2 W1)|": ("centre-pixel", "|mlp-diagonal|"),
    "|central pixel| and |diag(W2 W1)|": ("|centre-pixel|", "|mlp-diagonal|"),
}
COMPUTED = ("centre-pixel", "mlp-diagonal", "abs:centre-pixel", "abs:mlp-diagonal")
FILTERS = InitConfig.model_validate({"name": "conv_covariance", "preset": "cifar-patch2"})
CONVNEXT = ("mimetic_mlp(b=0.3)", FILTERS, "mimetic_conv_mlp", "mimetic_first_last_mlp")
CONVNEXTS = Recipe.load(ROOT / "populations/digits-convnext.toml").replace({"training.epochs": 12})
CASES = {
    "convnext": Case(CONVNEXTS, "stages.*", CONVNEXT, 3, 12, 4, 256),
    "vit": Case(
        Recipe.load(ROOT / "populations/digits-vit.toml"),
        "blocks.*",
        ("mimetic_attention", "mimetic_mlp(b=0.3)", "mimetic_attention+mimetic_mlp(b=0.3)"),
        4,
        16,
        4,
        128,
    ),
    "convmixer": Case(
        Recipe.load(ROOT / "populations/digits-convmixer.toml"),
        "blocks.*.weight,blocks.*.bias",
        (FILTERS,),
        3,
        12,
        4,
        128,
    ),
}


def entries(architecture: str, depth: int) -> Iterator[tuple[str, str, str, int]]:
    """Published schemes, and what crosses layers, as pairs of tensors: (scheme, a, b, axes that are not averaged)."""
    for i in range(depth):
        block = f"stages.0.blocks.{i}." if architecture == "convnext" else f"blocks.{i}."
        if architecture != "convmixer":
            yield "fc1 and fc2, one unit and channel", f"{block}mlp.fc1.weight", f"{block}mlp.fc2.weight", 2
        if architecture == "vit":
            yield "query and key, one unit and channel", f"{block}attn.qkv.weight[q]", f"{block}attn.qkv.weight[k]", 2
            yield "value and output, one unit and channel", f"{block}attn.qkv.weight[v]", f"{block}attn.proj.weight", 2
            yield "norm2 bias and fc1 column means", f"{block}norm2.bias", f"{block}mlp.fc1.weight", 1
        if architecture == "convnext":
            yield "norm bias and fc1 column means", f"{block}norm.bias", f"{block}mlp.fc1.weight", 1
            yield "filter bias and fc1 column means", f"{block}conv_dw.bias", f"{block}mlp.fc1.weight", 1
            yield "across layers: stem bias and fc2 row means", "stem.0.bias", f"{block}mlp.fc2.weight", 1
        for j in range(i if architecture != "convmixer" else 0):
            a, b = (f"{block.replace(f'{i}.', f'{k}.')}mlp.fc2.weight" for k in (j, i))
            yield "across layers: fc2 row means of two blocks", a, b, 1
    if architecture == "convnext":
        yield "across layers: stem and head norm weights", "stem.1.weight", "head.norm.weight", 1


def table(population: Population, architecture: str) -> list[dict[str, Any]]:
    """The schemes as entries of the exchangeable covariance, each with its size and 95 % interval over networks.

    `p` is adjusted for the number of pairs of tensors of the whole network (Holm), `p_unadjusted` is not.
    """
    pairs = {(frozenset((p.a, p.b)), len(p.groups)): p for p in covariance_exchangeable(population).pairs()}
    rows: list[dict[str, Any]] = []
    for scheme, a, b, axes in entries(architecture, population.recipe.network.depth):
        pair = pairs[frozenset((a, b)), axes]
        size = {"value": pair.correlation, "ci95": list(pair.ci95), "z": float(pair.z), "p": pair.p}
        rows.append({"scheme": scheme, "what": "correlation", "a": a, "b": b, "groups": list(pair.groups)} | size)
    if architecture == "convnext":
        for folded in (False, True):
            of = covariance_exchangeable(population, computed=COMPUTED, fold_norms=folded)
            pairs = {(frozenset((p.a, p.b)), len(p.groups)): p for p in of.pairs()}
            for scheme, names in MAGNITUDES.items():
                blocks = [f"stages.0.blocks.{i}" for i in range(population.recipe.network.depth)]
                found = [pairs[frozenset(f"{block}.{name}" for name in names), 1] for block in blocks]
                for block, size in zip([*blocks, "all blocks"], _over_blocks(found, of.n), strict=True):
                    rows.append({"scheme": f"beyond covariances: {scheme}{' (folded)' * folded}", "a": block} | size)
    for tensor in population.spec.tensors:
        shape = tensor.shape
        if len(shape) == 4 and shape[1] == 1 and "blocks" in tensor.name:
            rows.append(_neighbours(_weights(population, tensor.name)) | {"a": tensor.name})
            rows.append(_pixels(population.weights(tensor.name).reshape(-1, *shape)) | {"a": tensor.name})
        elif tensor.name.endswith(("fc1.weight", "fc2.weight")) or (len(shape) == 4 and "blocks" in tensor.name):
            matrices = _weights(population, tensor.name).reshape(len(population), *shape[:2])
            what = tensor.name.split(".")[-2] if len(shape) == 2 else "pointwise"
            for axis, kind in ((1, "column"), (2, "row")):
                scheme = {"scheme": f"stripes: {what} {kind} means", "a": tensor.name}
                rows.append(scheme | _means(matrices, axis))
    return rows


def _over_blocks(pairs: list[Pair], n: int) -> Iterator[dict[str, Any]]:
    """The correlation of each block, and their mean, with blocks of one network as independent."""
    sizes = np.array([pair.correlation for pair in pairs])
    errors = (1 - sizes**2) * np.arctanh(sizes) / [pair.z for pair in pairs]
    for r, error in zip([*sizes, sizes.mean()], [*errors, np.sqrt((errors**2).sum()) / len(errors)], strict=True):
        half = -float(stdtrit(n - 1, 0.025)) * error
        p = float(2 * stdtr(n - 1, -abs(r) / error))
        yield {"what": "correlation", "value": float(r), "ci95": [float(r - half), float(r + half)], "p_unadjusted": p}


def _weights(population: Population, name: str) -> np.ndarray:
    """One tensor of all networks, (N, *shape), less its mean over networks."""
    weights = population.weights(name).reshape(len(population), *population.spec[name].shape).astype(np.float64)
    return weights - weights.mean(0)


def _means(matrices: np.ndarray, axis: int) -> dict[str, Any]:
    """Variance of column or row means, relative to that of independent entries: n mean(means^2) / mean(entries^2)."""
    above = matrices.shape[axis] * np.square(matrices.mean(axis)).mean(1)
    return {"what": "variance ratio"} | _ratio(above, np.square(matrices).mean((1, 2)))


def _neighbours(filters: np.ndarray) -> dict[str, Any]:
    """Correlation of neighbouring positions of depthwise filters (N, channels, 1, k, k)."""
    w = filters[:, :, 0]
    above = (w[..., 1:, :] * w[..., :-1, :]).mean((1, 2, 3)) + (w[..., 1:] * w[..., :-1]).mean((1, 2, 3))
    row = {"scheme": "filters: neighbouring positions", "what": "correlation"}
    return row | _ratio(above, 2 * np.square(w).mean((1, 2, 3)))


def _pixels(filters: np.ndarray) -> dict[str, Any]:
    """Mean of the central pixel of filters (N, channels, 1, k, k); mean and standard deviation of each pixel (k, k)."""
    w, middle = filters[:, :, 0].astype(np.float64), filters.shape[-1] // 2
    networks = w[..., middle, middle].mean(1)
    value, error = float(networks.mean()), float(networks.std(ddof=1) / np.sqrt(len(networks)))
    row = {"scheme": "filters: mean of the central pixel", "what": "mean", "value": value}
    each = {"means": w.mean((0, 1)).round(4).tolist(), "stds": w.std((0, 1)).round(4).tolist()}
    return row | {"ci95": [value - 1.96 * error, value + 1.96 * error]} | each


def _ratio(above: np.ndarray, below: np.ndarray) -> dict[str, Any]:
    """sum(above) / sum(below) over networks, with a 95 % interval by the jackknife."""
    n = len(above)
    value = above.sum() / below.sum()
    left_out = (above.sum() - above) / (below.sum() - below)
    error = float(np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum()))
    return {"value": float(value), "ci95": [float(value - 1.96 * error), float(value + 1.96 * error)]}


def achieved(population: Population, case: Case) -> list[dict[str, Any]]:
    """For each type that keeps correlations, their number, how many are clipped and what is left of each gain."""
    gains = (*GAINS[1:], 100.0)
    options = [{"gain": gain} for gain in gains]
    fits = fit_each(population, case.select.split(","), "exchangeable", options, joint="all")
    rows: dict[str, dict[str, Any]] = {}
    for gain, one in zip(gains, fits, strict=True):
        for label, note in one.groups[0].structure.diagnostics.items():
            if isinstance(note, dict) and note.get("kept"):
                row = rows.setdefault(label, {"type": label, "kept": note["kept"], "clipped": {}, "achieved": {}})
                row["clipped"][f"{gain:g}"], row["achieved"][f"{gain:g}"] = note["clipped"], note["achieved"]
    return list(rows.values())


def fitted(population: Population, case: Case, folder: Path) -> Callable[..., Path]:
    """Artifacts of one structure, each fitted when it is first asked for."""

    def artifact(name: str, structure: str = "exchangeable", joint: Any = "all", **options: Any) -> Path:
        file = folder / f"{name}.safetensors"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            select = case.select.split(",")
            fit(population, select, structure=structure, joint=joint, options=options or None).save(file)
        return file

    return artifact


def benchmarks(case: Case, population: Population, folder: Path, **options: Any) -> dict[str, Any]:
    """Every condition with its arms; a control's label is its initialiser's with "(scale only)" or "(uncorrelated)"."""
    artifact = fitted(population, case, folder)
    choice = choose_gain(
        population, case.select.split(","), folder / "gain", gains=GAINS, seeds=GAIN_SEEDS, epochs=case.short, **options
    )
    derived = str(artifact(f"gain-{choice.gain:g}", gain=choice.gain))
    best = labelled(case.hand_made[0])[1]  # the one that the derived initialiser is combined with
    on_top = best.model_copy(update={"artifact": derived})
    arms = ["default", derived, *(InitConfig(artifact=derived, control=kind) for kind in CONTROLS), best, on_top]
    more: list[Any] = [str(artifact("gain-0", gain=0.0)), str(artifact("gain-1", gain=1.0)), str(artifact("shrunk"))]
    more += [str(artifact("within-blocks", joint="block", gain=choice.gain))]
    more += [best.model_copy(update={"artifact": str(artifact("scale", "isotropic", "tensor"))}), *case.hand_made[1:]]
    more += [labelled(init)[1].model_copy(update={"control": "scale"}) for init in case.hand_made]
    chosen = {"gain": choice.gain, "curve": choice.rows(), "settings": choice.settings}
    out: dict[str, Any] = {"gain": chosen | {"accuracies": accuracies(choice.trainings)}, "conditions": {}}
    conditions = case.conditions()
    if "other data" in SEEDS and not fashion_mnist_at_hand(options.get("data")):
        print("Fashion-MNIST is not at hand: no comparison on other data")
        conditions.pop("other data")
    for condition in (name for name in conditions if name in SEEDS):
        changes = conditions[condition]
        recipe = case.recipe.replace(changes)
        wanted = [*arms, *(init for init in more if init != derived)] if condition == "short" else arms
        found = bench(
            recipe, wanted, folder / condition.replace(" ", "-"), seeds=SEEDS[condition], seed=BENCH_SEED, **options
        )
        out["conditions"][condition] = {
            "recipe": {key: value for key, value in recipe.to_dict().items() if key != "init"},
            "arms": found.arms,
            "contrasts": contrasts(found, Path(derived).stem, labelled(best)[0]),
            "accuracies": accuracies(found),
            "environment": environment(),
        }
        print(f"{condition}\n{found.text()}", flush=True)
    return out


def contrasts(found: BenchResult, derived: str, hand_made: str) -> list[dict[str, Any]]:
    """The study's questions as paired differences of two arms; p-values adjusted for their number (Holm).

    `difference_ci95` is for the test images that were used, `difference_ci95_images` for others as well
    (`weightscope.benchmarking.statistics.over_images`); neither is adjusted.
    """
    scale, uncorrelated = (derived + CONTROLS[kind].suffix for kind in ("scale", "uncorrelated"))
    wanted = {
        "structure beyond scale": (derived, scale),
        "moments of each part": (uncorrelated, scale),
        "correlations": (derived, uncorrelated),
        "moments of each part, gain 0": ("gain-0", scale),
        "correlations, gain 0": (derived, "gain-0"),
        "correlations, not amplified": ("gain-1", "gain-0"),
        "gain": (derived, "gain-1"),
        "across layers": (derived, "within-blocks"),
        "derived or hand-made": (derived, hand_made),
        "hand-made on top of derived": (f"{derived}+{hand_made}", derived),
        "derived below hand-made": (f"{derived}+{hand_made}", hand_made),
        "derived rather than scale below hand-made": (f"{derived}+{hand_made}", f"scale+{hand_made}"),
    }
    known, rows = accuracies(found), []
    for question, (one, other) in wanted.items():
        if one != other and one in known and other in known:
            test = found.contrast([{"init": one}, {"init": other, "weight": -1}])
            row = {"question": question, "arm": one, "against": other, "n": test["pairs"]}
            row |= {"difference": test["difference"], "difference_ci95": test["ci"], "p": test["p"]}
            rows.append(row | {"difference_ci95_images": test["ci_images"]})
    return [row | {"p_holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]


def accuracies(found: BenchResult) -> dict[str, list[float]]:
    """The accuracy of each seed in order, by arm."""
    return {arm: values.tolist() for arm, values in found.by_arm().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("collect", "table", "gains", "bench"))
    parser.add_argument("--work", type=Path, default=Path("one-structure"), help="folder of populations and runs")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data", type=Path, help="where Fashion-MNIST is")
    options = parser.parse_args()
    for name in options.only or CASES:
        case, folder = CASES[name], options.work / name
        recipe = case.recipe.replace({"population.networks": case.networks})
        population = collect(recipe, folder / "population.pop", workers=options.workers, device="cpu")
        if options.part == "table":
            merge(options.out / "table.json", name, {"networks": len(population), "rows": table(population, name)})
        if options.part == "gains":
            merge(options.out / "gains.json", name, {"networks": len(population), "types": achieved(population, case)})
        if options.part == "bench":
            found = benchmarks(case, population, folder, workers=options.workers, device="cpu", data=options.data)
            merge(options.out / "results.json", name, found)


def merge(file: Path, name: str, values: dict[str, Any]) -> None:
    """Put one architecture's values into a file of results."""
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | {name: values, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
