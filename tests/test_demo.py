"""The demo at its smallest size: the whole chain, the report, and the second run."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import fake_training as fake
import pytest

from weightscope.cli.demo import run_demo
from weightscope.errors import UsageError
from weightscope.recipe import Recipe

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_writes_a_report_and_resumes(tmp_path):
    lines: list[str] = []
    options = {"networks": 16, "epochs": 1, "seeds": 3, "workers": 1, "device": "cpu", "progress": False}
    report = run_demo(tmp_path, say=lines.append, **options)
    assert len(lines) == 6  # one before the five steps
    assert not (tmp_path / "population.json").exists()  # that is the name of a population's manifest
    text = report.read_text()
    assert text.count("<img") + text.count("<svg") >= 5
    assert not re.search(r'(src|href)="https?:', text)
    for link in re.findall(r'href="([^"#]+)', text):
        assert (tmp_path / link).exists(), link
    assert ('href="page.html"' in text) is (find_spec("plotly") is not None)
    difference = json.loads((tmp_path / "benchmark" / "results.json").read_text())["summary"][1]["difference"]
    assert f"{abs(100 * difference):.1f}"[:3] in text
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    run_demo(tmp_path, say=lines.append, **options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")} == before
    assert report.read_text() == text


def test_too_few_networks_or_seeds_are_refused_before_anything_is_trained(tmp_path):
    lines: list[str] = []
    for given in ({"networks": 3}, {"seeds": 1}):
        with pytest.raises(UsageError, match=rf"{next(iter(given))}: expected an integer >= \d+, found"):
            run_demo(tmp_path, say=lines.append, **given)
    assert not lines


def test_the_demos_networks_are_those_of_the_population_recipe():
    demo = Recipe.load(ROOT / "weightscope/cli/demo.toml")
    assert demo.network == Recipe.load(ROOT / "populations" / "digits-vit.toml").network


def test_a_population_is_not_overwritten(tmp_path):
    path = tmp_path / "a-folder"
    fake.write_population(path, fake.recipe())
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    for folder in (path, tmp_path / "new.pop"):
        with pytest.raises(UsageError, match="is a population; give another folder"):
            run_demo(folder, networks=16, epochs=1, seeds=3)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "new.pop").exists()
