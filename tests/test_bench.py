"""The benchmark's statistics against scipy, its pairing, its arms, and that it goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from weightscope.benchmarking.run import arms, bench, summarise
from weightscope.errors import UsageError
from weightscope.recipe import InitConfig, Recipe

RECIPE = Recipe.parse(
    {
        "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2, "expansion": 2},
        "data": {"name": "digits", "train": 64, "test": 40},
        "training": {"epochs": 1, "batch_size": 16},
        "population": {"networks": 3, "tile": 4},
    }
)


def rows(values: dict[str, list[float]], epochs: int = 3) -> list[dict[str, Any]]:
    return [
        {"init": init, "epochs": epochs, "seed": k, "accuracy": a, "loss": 1.0, "diverged": False}
        for init, accuracies in values.items()
        for k, a in enumerate(accuracies)
    ]


def test_the_summary_equals_scipys_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(0.9, 0.02, (3, 20))
    found = summarise(rows({"default": list(a), "x": list(b), "y": list(c)}))
    assert found[0]["difference"] is None
    for row, values in zip(found[1:], (b, c), strict=True):
        peer = stats.ttest_rel(values, a)
        assert row["difference"] == pytest.approx((values - a).mean())
        assert row["p"] == pytest.approx(peer.pvalue)
        np.testing.assert_allclose(row["difference_ci95"], peer.confidence_interval(0.95))
        assert row["reference"] == "default"
    interval = stats.t.interval(0.95, 19, a.mean(), stats.sem(a))
    np.testing.assert_allclose(found[0]["ci95"], interval)


def test_holm_adjustment_is_that_of_the_step_down_procedure() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(0.9, 0.02, 30)
    shifts = {f"i{j}": list(base + rng.normal(0.002 * j, 0.01, 30)) for j in range(4)}
    found = [row for row in summarise(rows({"default": list(base)} | shifts)) if row["p"] is not None]
    p = np.array([row["p"] for row in found])
    order = np.argsort(p)
    expected = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    np.testing.assert_allclose([found[i]["p_holm"] for i in order], expected)


def test_equal_arms_are_no_evidence_and_constant_shifts_are() -> None:
    same = summarise(rows({"default": [0.5, 0.6, 0.7], "x": [0.5, 0.6, 0.7]}))[1]
    assert (same["difference"], same["p"]) == (0, 1)


def test_each_length_and_each_freezing_has_its_own_reference() -> None:
    values = {"default": [0.5, 0.6], "x": [0.6, 0.8], "default (frozen)": [0.1, 0.2], "x (frozen)": [0.4, 0.5]}
    found = {(r["epochs"], r["init"]): r for r in summarise(rows(values) + rows(values, epochs=9))}
    assert found[9, "x"]["reference"] == "default"
    assert found[3, "x (frozen)"]["difference"] == pytest.approx(0.3)
    assert found[9, "default (frozen)"]["difference"] is None


def test_arms_cross_initialisers_lengths_and_freezing() -> None:
    planned = arms(RECIPE, ["default", "mimetic_mlp"], epochs=[1, 4], seeds=5, frozen="*.conv_dw.weight")
    assert [(a.init, a.epochs) for a in planned][:4] == [
        ("default", 1),
        ("mimetic_mlp", 1),
        ("default (frozen)", 1),
        ("mimetic_mlp (frozen)", 1),
    ]
    assert len(planned) == 8
    assert planned[3].recipe.training.frozen == ("*.conv_dw.weight",)
    assert planned[5].recipe.training.epochs == 4
    assert len({a.folder for a in planned}) == 8
    with pytest.raises(UsageError, match="at least 2 seeds"):
        arms(RECIPE, ["default"], seeds=1)
    with pytest.raises(UsageError, match="different names"):
        arms(RECIPE, ["default", "default"])
    with pytest.raises(UsageError, match="different names"):
        arms(RECIPE, [])


def test_arms_are_paired_and_a_second_run_trains_nothing(tmp_path: Path) -> None:
    options = {"workers": 1, "device": "cpu", "progress": False}
    tables = [InitConfig(name="default"), InitConfig.model_validate({"name": "kaiming_uniform"})]
    result = bench(RECIPE, tables, tmp_path, epochs=[1, 2], **options)
    assert {(r["init"], r["epochs"], r["seed"]) for r in result.runs} == {
        (i, e, k) for i in ("default", "kaiming_uniform") for e in (1, 2) for k in range(3)
    }
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["runs"] == result.runs
    assert written["environment"]["recipe"]["data"]["name"] == "digits"
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.h5")}
    assert len(before) == 4
    again = bench(RECIPE, tables, tmp_path, epochs=[1, 2], **options)
    assert again.runs == result.runs
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.h5")} == before
    assert "kaiming_uniform" in result.table()


def test_an_initialiser_that_changes_nothing_gives_equal_bits(tmp_path: Path) -> None:
    """Pairing: two arms whose initialisers leave the default weights alone agree in every run."""
    twice = [InitConfig(name="default"), InitConfig(name="default+default")]
    result = bench(RECIPE, twice, tmp_path, workers=1, device="cpu", progress=False)
    assert [r["accuracy"] for r in result.runs[:3]] == [r["accuracy"] for r in result.runs[3:]]
    assert result.summary[1]["p"] == 1


def test_an_initialiser_with_numbers_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "strong.toml").write_text('name = "mimetic_mlp"\nsigma = 0.5\n')
    arm = arms(RECIPE, ["default", str(tmp_path / "strong.toml")])[1]
    assert arm.init == "strong"
    assert arm.recipe.init[0].parameters == {"sigma": 0.5}
    (tmp_path / "bad.toml").write_text("name = 3\n")
    with pytest.raises(UsageError, match=r"bad.toml: name: input should be a valid string"):
        arms(RECIPE, [str(tmp_path / "bad.toml")])
    with pytest.raises(UsageError, match="cannot read the recipe"):
        arms(RECIPE, ["none.toml"])


def test_an_unknown_initialiser_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mimetic_mlp"):
        bench(RECIPE, ["mimetic"], tmp_path, workers=1, device="cpu", progress=False)
    assert not any(tmp_path.rglob("*.h5"))
