"""Recipes and stored results of the studies, which run in tests/torture/studies.py, with `make torture`."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import ROOT, script
from scipy import stats

from weightscope import init as wi
from weightscope.benchmarking import BenchResult, plan_arms
from weightscope.errors import UsageError
from weightscope.recipe import Recipe


def check_p_values(rows: list[dict[str, Any]]) -> None:
    """`p` is adjusted for all pairs, so it belongs to pairs alone; other tests have `p_unadjusted`."""
    pairs = [row for row in rows if "b" in row]
    single = [row for row in rows if row["scheme"].startswith("beyond covariances")]
    assert all("p" in row and "p_unadjusted" not in row for row in pairs)
    assert all("p" not in row and 0 <= row["p_unadjusted"] <= 1 for row in single)
    assert not any("p" in row for row in rows if row not in pairs)


def test_the_stored_table_of_one_structure_names_its_p_values() -> None:
    table = json.loads((ROOT / "analyses/one_structure/table.json").read_text())
    found = [table[name]["rows"] for name in table if name != "environment"]
    for rows in found:
        check_p_values(rows)
    assert sum("p_unadjusted" in row for rows in found for row in rows) == 6 * (4 + 1)  # of each kind, blocks and all


RECIPES = sorted(p for p in ROOT.glob("analyses/**/*.toml") if p.parent != ROOT / "analyses")
BENCHMARKS = [path for path in RECIPES if Recipe.load(path).bench is not None]  # an invalid recipe is an error here
IMAGES = [path for path in BENCHMARKS if Recipe.load(path).data.what == "images"]
COPYING = [path for path in BENCHMARKS if "copying" in path.parts]


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("recipe", BENCHMARKS, ids=named)
def test_results_of_studies_are_those_of_their_recipes(recipe: Path) -> None:
    """Every arm in the declared number of paired seeds, else 8 or more at two lengths; the README has the table."""
    if not recipe.with_name("results.json").exists() and any((f / "DESIGN.md").exists() for f in recipe.parents[:2]):
        pytest.skip("designed, not yet run")
    planned, result = Recipe.load(recipe), BenchResult.load(recipe.parent)
    assert planned.bench is not None
    options = planned.bench.model_dump(exclude={"init", "seed", "metric", "contrasts"})
    arms = plan_arms(planned, planned.bench.init, **options)
    found = {(row["init"], json.dumps(row["cell"]), row["epochs"]): row["n"] for row in result.arms}
    assert set(found) == {(arm.init, json.dumps(dict(arm.cell)), arm.epochs) for arm in arms}
    declared = planned.population.networks if planned.bench.contrasts else None
    assert min(found.values()) >= (declared or 8)
    trained = Recipe.parse(result.environment["recipe"])
    assert not [line for line in trained.differences(planned) if not line.startswith(("population.seed", "bench"))]
    if recipe in COPYING:
        metrics = {"test_accuracy", "test_accuracy_2x", "test_accuracy_4x"}
        assert metrics <= {metric.name for metric in result.metrics}
    elif not declared:
        assert len(planned.bench.epochs) == 2
    readme = next(folder / "README.md" for folder in recipe.parents if (folder / "README.md").exists())
    assert result.text() in readme.read_text()


CONTRASTS = [
    p
    for p in sorted(ROOT.glob("analyses/**/results.json"))
    if {"runs", "contrasts"} <= json.loads(p.read_text()).keys()
]


OPERATORS: dict[type, Any] = {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide}


@pytest.mark.parametrize("file", CONTRASTS, ids=named)
def test_contrasts_of_studies_are_recomputed(file: Path) -> None:
    """Differences, intervals and Holm's p, by other code than wrote them: the expression is one of means by seed."""
    results = json.loads(file.read_text())
    runs = [
        (run["init"], run["seed"], {key.rpartition(".")[2]: v for key, v in (run.get("cell") or {}).items()}
         | (run.get("numbers") or {}) | {"epochs": run["epochs"]}, run)
        for run in results["runs"]
    ]  # fmt: skip
    key = results["metric"].removeprefix("test_")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call):
            inits, where = {value(arg) for arg in node.args}, {k.arg: value(k.value) for k in node.keywords}
            by_seed: dict[int, list[float]] = {}
            for init, seed, cell, run in runs:
                if init in inits and all(str(cell[name]) == str(wanted) for name, wanted in where.items()):
                    by_seed.setdefault(seed, []).append(run[key])
            assert by_seed, ast.unparse(node)
            return np.array([np.mean(by_seed[seed]) for seed in sorted(by_seed)])
        if isinstance(node, ast.BinOp):
            one, other = value(node.left), value(node.right)
            return OPERATORS[type(node.op)](one, other)
        return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)

    rows = results["contrasts"]
    for row in rows:
        differences = value(ast.parse(row["contrast"], mode="eval").body)
        spread = stats.t.ppf(1 - row["level"] / 2, len(differences) - 1) * stats.sem(differences)
        assert row["difference"] == pytest.approx(differences.mean(), abs=1e-9)
        assert row["ci"] == pytest.approx([differences.mean() - spread, differences.mean() + spread], abs=1e-9)
        assert row["p"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=1e-6)
    ordered = sorted(rows, key=lambda row: row["p"])
    adjusted = np.minimum(1, np.maximum.accumulate([(len(rows) - k) * row["p"] for k, row in enumerate(ordered)]))
    assert [row["p_holm"] for row in ordered] == pytest.approx(list(adjusted), rel=1e-6)


@pytest.mark.parametrize("recipe", BENCHMARKS, ids=named)
def test_initialisers_of_studies_have_their_parameters(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is taken away here, and one that is misspelt, is an error."""
    for folder in recipe.parents[1::-1]:  # where functions of its own are
        monkeypatch.syspath_prepend(folder)
    planned = Recipe.load(recipe)
    assert planned.bench is not None
    for arm in plan_arms(planned, planned.bench.init, grid=planned.bench.grid):
        (config,) = arm.recipe.init
        wi.get(config.name, **config.parameters)
        with pytest.raises(UsageError, match="misspelt"):
            wi.get(config.name, **config.parameters, misspelt=1)


def test_effects_of_components_are_found() -> None:
    """A planted effect of one switch and one interaction; the other eight contrasts are zero but for noise."""
    study, noise = script("analyses/copying/components/effects.py"), np.random.default_rng(0)
    settings = [dict(zip(study.SWITCHES, map(bool, row), strict=True)) for row in np.ndindex(2, 2, 2, 2)]
    values = [0.2 + 0.3 * row["a"] + 0.1 * (row["a"] and row["cb"]) for row in settings]
    arms = [{"init": str(i)} for i in range(16)]
    runs = [
        {"init": str(i), "epochs": 1, "seed": k, "accuracy": v + 0.01 * noise.normal()}
        for i, v in enumerate(values)
        for k in range(8)
    ]
    rows = {tuple(row["switches"]): row for row in study.effects(BenchResult(runs, arms), settings)}
    assert rows["a",]["difference"] == pytest.approx(0.35, abs=0.01)
    assert rows["cb",]["difference"] == pytest.approx(0.05, abs=0.01)
    assert rows["a", "cb"]["difference"] == pytest.approx(0.05, abs=0.01)
    assert {names for names, row in rows.items() if row["p_holm"] < 0.01} == {("a",), ("cb",), ("a", "cb")}


def test_whether_layers_differ() -> None:
    """With two arms F is the square of the paired t, and epsilon is 1; of eight alike ones few are called different."""
    study, noise = script("analyses/one_layer_transfer/summary.py"), np.random.default_rng(0)
    two = noise.normal(size=(2, 12))
    found, paired = study.repeated_measures(two), stats.ttest_rel(*two)
    assert found["f"] == pytest.approx(paired.statistic**2)
    assert (found["epsilon"], found["p"]) == pytest.approx((1, paired.pvalue))
    alike = noise.normal(size=(400, 8, 12)) * np.linspace(0.5, 2, 8)[:, None] + 5 * noise.normal(size=(400, 1, 12))
    assert sum(study.repeated_measures(values)["p"] < 0.05 for values in alike) < 0.08 * len(alike)
    assert study.repeated_measures(alike[0] + 4 * np.eye(8, 1))["p"] < 0.01  # one layer that is better


def test_when_a_correlation_appears() -> None:
    appearance = script("analyses/emergence/emergence.py").appearance

    def curve(*values: float) -> list[dict[str, Any] | None]:
        return [{"value": value, "sure": abs(value) > 0.1} if value else None for value in values]

    epochs = (0, 1, 2, 4)
    assert appearance(curve(0, 0.01, 0.2, 0.5), epochs) == {"appears": 2, "half": 4}
    assert appearance(curve(0.3, 0.01, 0.4, 0.5), epochs) == {"appears": 2, "half": 0}
    assert appearance(curve(0, -0.2, -0.2, 0.5), epochs) == {"appears": 4, "half": 4}
    assert appearance(curve(0.5, 0.2, 0.2, 0.05), epochs) == {"appears": None, "half": None}
    assert appearance(curve(0.2, 0.2, 0.2, 0.2), epochs) == {"appears": 0, "half": 0}


READMES = sorted(ROOT.glob("analyses/*/README.md"))
PAGES = [*READMES, ROOT / "analyses" / "README.md", ROOT / "docs" / "whole-network.md"]
INTERVAL = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?) \(([-+]?\d+(?:\.\d+)?) to ([-+]?\d+(?:\.\d+)?)[,)]")


def stored_intervals(results: Any) -> Iterator[tuple[float, float, float]]:
    """Numbers beside an interval in one object, and the paired differences of any two arms of a study."""
    for item in results if isinstance(results, list) else ():
        yield from stored_intervals(item)
    if not isinstance(results, dict):
        return
    numbers = [value for value in results.values() if isinstance(value, float)]
    pairs = [value for value in results.values() if isinstance(value, list) and len(value) == 2]
    yield from ((n, *pair) for n in numbers for pair in pairs if all(isinstance(end, float) for end in pair))
    arms: dict[Any, list[float]] = dict(results.get("accuracies", {}))
    for run in results.get("runs", ()):
        for metric in run:
            if metric.startswith(("accuracy", "area")):
                key = (run["init"], json.dumps([run.get("cell"), run.get("numbers"), run["epochs"]]), metric)
                arms.setdefault(key, []).append(run[metric])
    values = np.array([values for values in arms.values() if isinstance(values[0], float)])
    for i in range(len(values)):
        differences = values[i] - values
        spread = stats.t.ppf(0.975, values.shape[1] - 1) * differences.std(1, ddof=1) / values.shape[1] ** 0.5
        yield from zip(differences.mean(1), differences.mean(1) - spread, differences.mean(1) + spread, strict=True)
    for key, value in results.items():
        if key not in ("runs", "accuracies", "environment"):
            yield from stored_intervals(value)


@cache
def known_intervals(study: str) -> np.ndarray:
    """What is stored of a study, (n, 3), up to signs and %, and the page of claims says of it, which is recomputed."""
    files = [json.loads(path.read_text()) for path in (ROOT / "analyses" / study).rglob("*.json")]
    stored = np.array([*{row for file in files for row in stored_intervals(file)}, (np.nan,) * 3])
    rows = [row for row in (ROOT / "analyses" / "claims.md").read_text().split("\n") if f"`{study}`" in row]
    claimed = np.array([match.groups() for row in rows for match in INTERVAL.finditer(row)], float).reshape(-1, 3)
    return np.abs(np.concatenate([stored, 100 * stored, claimed]))


def blocks(page: Path) -> Iterator[tuple[list[str], str]]:
    """A README, which is about its study; paragraphs, items and rows of other pages with the studies that they name."""
    if page in READMES:
        yield [page.parent.name], page.read_text()
        return
    for block in re.split(r"\n\s*\n|\n(?=\||- )", page.read_text()):
        yield [readme.parent.name for readme in READMES if re.search(rf"\b{readme.parent.name}\b", block)], block


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_intervals_in_texts_are_in_the_results(page: Path) -> None:
    """Every "value (low to high)", also over the end of a line, and hardly any with the last digit changed by 3."""
    found, changed = [], []
    for studies, block in blocks(page):
        stored = np.concatenate([np.full((1, 3), np.nan), *map(known_intervals, studies)])
        for match in INTERVAL.finditer(" ".join(block.split())):
            units = np.array([10.0 ** -len(text.partition(".")[2]) for text in match.groups()])
            said = np.abs([float(text) for text in match.groups()])
            for where, shift in ((found, 0), (changed, 3)):
                near = np.abs(stored - said - shift * np.array([units[0], 0, 0])) <= 0.501 * units
                where.append(bool(near.all(1).any()) or match[0])
    missing = [row for row in found if row is not True]
    assert not missing, missing
    assert sum(row is True for row in changed) <= 0.1 * len(changed)


def test_false_alarms_of_whole_networks_are_counted_as_in_the_file() -> None:
    study = script("analyses/one_structure/whole_network.py")
    stored = json.loads((ROOT / "analyses" / "one_structure" / "whole_network.json").read_text())
    assert set(study.false_alarms("nothing", 8, 2)) == set(stored["false_alarms"][0])


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_commands_in_readmes_name_files_that_exist(readme: Path) -> None:
    named = re.findall(r"\b(?:analyses|figures|populations)/[\w/]+\.(?:py|toml|png|json|md)\b", readme.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_difference_on_other_strings_is_that_of_the_networks() -> None:
    study, noise = script("analyses/copying/other_strings.py"), np.random.default_rng(0)
    one, other = noise.normal(50, 1, (2, 8, 500))
    low, high = study.difference(one + 1, other)["ci95"]
    assert 0 < low < 1 < high  # planted; an interval of 95 %, fixed seed
    low, high = study.difference(one, other)["ci95"]
    assert low < 0 < high
    assert study.difference(one, other)["strings"] == pytest.approx((2 / 8 / 500) ** 0.5, rel=0.1)


def test_the_page_of_claims_is_what_the_results_say() -> None:
    claims = script("analyses/claims.py")
    assert claims.table() in claims.PAGE.read_text(), "run python analyses/claims.py"


def test_a_verdict_follows_from_the_interval_and_the_published_effect() -> None:
    """Planted differences of 2 with deviation 1, n = 16; the power is the noncentral t's."""
    claims = script("analyses/claims.py")
    noise = np.random.default_rng(0).standard_normal(16)
    noise = (noise - noise.mean()) / noise.std(ddof=1)

    def verdict(shift: float, **options: Any) -> str:
        return claims.summary(claims.Claim("", "", "", "", noise + shift, **options))["verdict"]

    found = [verdict(shift, published=2.0) for shift in (2, 0.6, 0.2, -2)]
    assert found == ["holds", "holds", "smaller or none", "refuted"]
    assert [verdict(shift, published=4.0) for shift in (2, 0.8)] == ["holds", "holds, smaller"]
    assert [verdict(shift, published=1.0) for shift in (0.2, -0.2)] == ["undecided", "smaller or none"]
    assert [verdict(shift) for shift in (0.2, -0.2, -2)] == ["undecided", "undecided", "refuted"]
    assert [verdict(shift, sign=0) for shift in (0.2, 0.8, 2)] == ["holds", "undecided", "refuted"]
    t = stats.t.ppf(0.975, 15)  # the noncentrality is sqrt(16) 1 / 1
    power = stats.nct.sf(t, 15, 4) + stats.nct.cdf(-t, 15, 4)
    assert claims.summary(claims.Claim("", "", "", "", noise, 1.0))["power"] == pytest.approx(power, abs=1e-6)


def test_equivalence_needs_an_interval_within_the_margin() -> None:
    """Planted differences of deviation 1, n = 36: the 90 % interval is the mean +- 0.28."""
    study, noise = script("analyses/transfer_narrow_inits/summary.py"), np.random.default_rng(0).standard_normal(36)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    found = {shift: study.equivalence(noise + shift) for shift in (-0.4, 0.0, 0.4)}
    assert found[0.0]["ci90"] == pytest.approx([-0.2816, 0.2816], abs=1e-4)
    assert [row["p_equivalent"] < 0.05 for row in found.values()] == [False, True, False]
    assert [row["p_no_worse"] < 0.05 for row in found.values()] == [False, True, True]
    for row in found.values():  # the tests and the interval agree
        assert (row["p_equivalent"] < 0.05) == (row["ci90"][0] > -0.5 and row["ci90"][1] < 0.5)
        assert (row["p_no_worse"] < 0.05) == (row["ci90"][0] > -0.5)
    one = [{"init": "a", "seed": k, "accuracy": 0.5 + 0.01 * k} for k in (2, 0, 1)]
    other = [{"init": "b", "seed": k, "accuracy": 0.5} for k in range(3)]
    assert study.compared(BenchResult(one + other, []), "a", "b") == pytest.approx([0, 1, 2])


def test_correlations_of_filters_follow_from_sums_over_channels() -> None:
    """Means and covariances of sums give what all channels of all networks give, for single blocks and all of them."""
    study = script("analyses/cifar_structure/run.py")
    recipe = Recipe.load(ROOT / "populations" / "cifar10-convnext-16px.toml").replace({"network.depth": 2})
    sums = study.Sums("none", recipe, Path("none"), sums_only=True)
    weights = np.random.default_rng(0).normal(size=(30, sums.spec.size)) ** 3
    for rows in (weights[:7], weights[7:]):
        sums.add(rows, np.zeros(len(rows)), np.zeros(len(rows), bool))
    tensors, pairs = sums.spec.unpack(weights), []
    for block in ("stages.0.blocks.0.", "stages.0.blocks.1."):
        product = tensors[f"{block}mlp.fc2.weight"] @ tensors[f"{block}mlp.fc1.weight"]
        diagonal, pixel = (
            np.abs(np.diagonal(product, axis1=1, axis2=2)),
            tensors[f"{block}conv_dw.weight"][:, :, 0, 3, 3],
        )
        pairs.append([x - x.mean() for x in (pixel, diagonal)])
    for blocks in ([0], [1], [0, 1]):
        f, d = (np.concatenate([pairs[block][i] for block in blocks], axis=1) for i in (0, 1))
        a, b, c = (f * d).sum(1), (f * f).sum(1), (d * d).sum(1)
        r = a.sum() / np.sqrt(b.sum() * c.sum())
        psi = a / np.sqrt(b.sum() * c.sum()) - r / 2 * (b / b.sum() + c / c.sum())
        found = study.of_filters(sums.filters, 16, study.MAGNITUDE, blocks, 0.05)
        assert found["correlation"] == pytest.approx(r, abs=1e-9)
        assert found["error"] == pytest.approx(np.sqrt(30 / 29 * np.square(psi).sum()), rel=1e-6)


def test_planted_correlations_of_cifar_structure_are_found() -> None:
    """Large ones in every population, in untouched networks in hardly any: 3 populations, fixed seeds."""
    study = script("analyses/cifar_structure/run.py")
    recipe = Recipe.load(ROOT / "populations" / "cifar10-convnext-16px.toml").replace({"network.depth": 2})
    study.PLANTED = (-0.5, -0.4)
    none, planted = study.errors(recipe, 30, 3, 0.005)
    assert (none["called"], planted["called"]) == ([0, 0], [1, 1])
