"""`compare`: bench's statistics on runs made elsewhere."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run
from scipy import stats

import weightscope
from weightscope.errors import DataError, UsageError


def rows(n: int = 6) -> list[dict[str, Any]]:
    g = np.random.default_rng(1)
    base = 70 + 3 * g.standard_normal(n)
    gains = {"default": 0.0, "mimetic": 1.5, "other": 0.0}
    return [
        {"init": arm, "seed": k, "top1": x + gain + 0.3 * g.standard_normal()}
        for arm, gain in gains.items()
        for k, x in enumerate(base)
    ]


def written(path: Path, table: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


def test_differences_are_those_of_a_paired_t_test(tmp_path: Path) -> None:
    table = rows()
    found = weightscope.compare(written(tmp_path / "runs.csv", table), metric="top1")
    arms = {name: np.array([row["top1"] for row in table if row["init"] == name]) for name in ("default", "mimetic")}
    row = found.arms[1]
    assert row["difference"] == pytest.approx((arms["mimetic"] - arms["default"]).mean())
    assert row["p"] == pytest.approx(stats.ttest_rel(arms["mimetic"], arms["default"]).pvalue)
    text = found.text()
    assert "top1: mimetic is 1." in text
    assert "better than default" in text
    assert "not concluded: that other equals default" in text
    assert "epochs" not in text
    loss = weightscope.compare([row | {"loss": row["top1"]} for row in table], metric="loss")
    assert "mimetic is 1." in loss.text()
    assert "worse than default" in loss.text()
    again = weightscope.compare(table, metric="top1", control="other").arms
    assert [row["init"] for row in again] == ["other", "default", "mimetic"]


def test_data_frames_and_partners_that_are_missing() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows()).drop(index=[7])  # mimetic, seed 1
    frame.loc[len(frame) + 9] = ["mimetic", 77, 70.0]
    found = weightscope.compare(frame, metric="top1")
    assert [row["pairs"] for row in found.arms] == [None, 5, 6]
    assert "left out, without a partner: 1 (mimetic, seed 77)" in found.text()


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"metric": "top2"}, UsageError, "top1"),
        ({}, {"metric": "top1", "pair": "sed"}, UsageError, "seed"),
        ({}, {"metric": "top1", "control": "defualt"}, UsageError, "default"),
        (
            {"top1": "nan"},
            {"metric": "top1"},
            DataError,
            "row 1, init default, seed 0: `top1`: expected a finite number",
        ),
        ({"top1": "high"}, {"metric": "top1"}, DataError, "expected a number, found 'high'"),
        ({"seed": 3}, {"metric": "top1"}, DataError, "row 4: a second run with init default and seed 3"),
        ({"score": 1.0}, {"metric": "score"}, UsageError, "better: `score`"),
    ],
)
def test_errors(change: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str) -> None:
    table = [row | {"score": 0.0} for row in rows()]
    table[0] |= change
    with pytest.raises(error, match=message.replace("(", r"\(")):
        weightscope.compare(table, **options)


def test_fewer_than_two_pairs() -> None:
    with pytest.raises(DataError, match="mimetic: expected at least 2 runs with a seed of default, found 1"):
        weightscope.compare(rows(1), metric="top1")


def test_one_csv_has_all_runs(tmp_path: Path) -> None:
    both = [written(tmp_path / name, rows(3)) for name in ("a.csv", "b.csv")]
    with pytest.raises(DataError, match=r"a\.csv: expected one CSV with all runs, or folders of runs, found 2 paths"):
        weightscope.compare(both, metric="top1")


def test_folders_of_timm_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(3):
        folder = tmp_path / "runs" / f"{row['init']}-{row['seed']}"
        folder.mkdir(parents=True)
        written(folder / "summary.csv", [{"epoch": 0, "eval_top1": 1.0}, {"epoch": 1, "eval_top1": row["top1"]}])
    code, out, err = run("compare", tmp_path / "runs", "--metric", "eval_top1", "-o", tmp_path / "c.png", capsys=capsys)
    assert (code, err) == (0, "")
    assert "eval_top1: mimetic is 1." in out
    assert "values are those of the last row of each run" in out
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_folders_of_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for row in rows(2):
        with tensorboard.SummaryWriter(str(tmp_path / f"{row['init']}_{row['seed']}")) as log:
            log.add_scalar("acc/val", 0.0, 0)
            log.add_scalar("acc/val", row["top1"], 1)
    found = weightscope.compare(tmp_path, metric="acc/val")
    assert found.arms[1]["difference"] == pytest.approx(
        weightscope.compare(rows(2), metric="top1").arms[1]["difference"]
    )
