"""The page of `report`: its numbers are those of the results, and a browser can look into it."""

import json
import os
import re
import sys
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest
import torch

from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.cli import page as module
from weightscope.cli.page import write_page
from weightscope.errors import UsageError
from weightscope.population import Population
from weightscope.training.collection import collect

HOSTILE = "</script><img src=x onerror=alert(1)>.weight"


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    """16 networks of two blocks, really trained for two short epochs."""
    pytest.importorskip("plotly", reason="plotly is not installed")
    recipe = fake.recipe(networks=16, tile=16, network__depth=2, network__width=16, population__snapshots=[0, 2])
    return collect(recipe, tmp_path_factory.mktemp("page") / "a<b>.pop", workers=1)


def data_of(text: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_its_numbers_are_those_of_the_results(population, tmp_path):
    text = write_page(population, tmp_path / "page.html").read_text()
    values, found = data_of(text), covariance_exchangeable(population)
    assert len(values["pairs"]) == len(found.pairs()) > 0
    for row, pair in zip(values["pairs"], found.pairs(), strict=True):
        assert (row["a"], row["b"], row["words"]) == (pair.a, pair.b, found.words(pair))
        assert (row["r"], row["low"]) == pytest.approx((pair.correlation, pair.ci95[0]), rel=1e-3)
    types = {one.kind.label: one for one in found.types}
    for one in values["types"]:
        expected = types[one["groups"]].correlation()
        np.testing.assert_allclose(np.array(one["matrix"], float), expected, atol=5e-4)
        assert len(one["labels"]) == len(expected)
    metric = values["metrics"][0]
    assert (sum(metric["counts"]), metric["name"]) == (16, "test_accuracy")
    assert metric["median"] == pytest.approx(np.median(population.metrics["test_accuracy"]), rel=1e-3)
    curve = np.median(population.metrics["test_accuracy_per_epoch"], axis=0)
    assert metric["middle"] == pytest.approx(curve, rel=1e-3)
    depth, training = values["curves"]
    assert depth["order"] == [f"stages.0.blocks.{i}" for i in range(2)]
    assert (training["axis"], training["lines"][0]["x"]) == ("epoch", [0, 2])
    pairs = {found.words(pair): pair.correlation for pair in found.pairs()}
    assert pairs[training["lines"][0]["name"]] == pytest.approx(training["lines"][0]["r"][1], rel=1e-3)
    for line in depth["lines"]:
        assert line["x"] == depth["order"]
        for block, r in zip(line["x"], line["r"], strict=True):
            assert r == pytest.approx(pairs[f"{block}: {line['name']}"], rel=1e-3)
    assert depth["lines"]
    assert [moment["title"] for moment in values["filters"]] == ["epoch 0", "epoch 2"]  # the last one is the end
    assert [(one["name"], np.shape(one["grid"])) for one in values["filters"][0]["layers"][1:]] == [
        (f"stages.0.blocks.{i}.conv_dw.weight", (3, 3)) for i in range(2)
    ]
    start, end = (moment["layers"] for moment in values["filters"])
    assert start != end
    assert len(text) < 5e6
    assert not re.search(r'(src|href)="(?!data:)', text.partition('id="library"')[0])
    assert "<h1>a&lt;b&gt;.pop</h1>" in text


def test_a_page_of_a_moment_of_training(population, tmp_path):
    ends = {}
    for at in (0, 2, None):
        moment = population if at is None else population.at(at)
        ends[at] = data_of(write_page(moment, tmp_path / "page.html").read_text())
    expected = covariance_exchangeable(population.at(0)).pairs()[0]
    assert ends[0]["pairs"][0]["r"] == pytest.approx(expected.correlation, rel=1e-3)
    assert ends[0]["pairs"] != ends[None]["pairs"] == ends[2]["pairs"]
    assert ends[0]["filters"] == ends[None]["filters"]
    assert "The structure is that of epoch 0;" in ends[0]["notes"][0]


def test_what_is_too_large_is_left_out_in_words(population, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ENTRIES", 3)
    monkeypatch.setattr(module, "_PAIRS", 2)
    text = write_page(population, tmp_path / "page.html").read_text()
    values = data_of(text)
    assert len(values["pairs"]) == 2
    assert max(len(one["labels"]) for one in values["types"]) <= 3
    assert "The table has the 2 largest effects of" in text
    assert re.search(r"the map shows \d of \d+ tensors", text)


def imported(path: Path) -> Population:
    """Networks whose tensors have hostile names and whose permutations nobody knows, without metrics."""
    random = np.random.default_rng(0)
    networks = [{HOSTILE: random.standard_normal((4, 3)).astype("f4")} for _ in range(12)]
    return Population.of([{k: torch.tensor(v) for k, v in one.items()} for one in networks], path, progress=False)


def test_networks_trained_elsewhere_and_hostile_names(tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    population = imported(tmp_path / "zoo.pop")
    text = write_page(population, tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 3
    assert data_of(text)["metrics"] == []
    assert "No structure: " in text


@pytest.mark.parametrize(
    "values", [[1e17] * 4, [1e17, 1e17 + 16] * 2, [0.98123, 0.98124, 0.98125, 0.98126], [-1.7e308, 0.0, 1.0, 1.7e308]]
)
def test_bins_of_metrics_that_are_near_each_other(tmp_path, values):
    pytest.importorskip("plotly", reason="plotly is not installed")
    networks = [{HOSTILE: torch.full((4, 3), float(k))} for k in range(4)]
    population = Population.of(networks, tmp_path / os.fsdecode(b"\xff.pop"), metrics={"x": values}, progress=False)
    metric = data_of(write_page(population, tmp_path / "page.html").read_text())["metrics"][0]
    assert sum(metric["counts"]) == 4
    assert metric["edges"][0] <= min(values) <= max(values) <= metric["edges"][-1] + 1e-9
    assert metric["edges"][0] < metric["edges"][-1]
    if len(set(values)) == 4:
        assert len(set(metric["edges"])) == len(metric["edges"]) > 4


@pytest.mark.parametrize(("known", "points"), [(0, 0), (1, 0), (2, 3)])
def test_a_curve_needs_two_epochs(population, tmp_path, monkeypatch, known, points):
    curve = np.full((16, 3), np.nan)
    curve[:, 3 - known :] = 0.5
    metrics = {"diverged": np.zeros(16, bool), "test_accuracy": np.full(16, 0.5), "test_accuracy_per_epoch": curve}
    monkeypatch.setattr(Population, "metrics", metrics)
    (metric,) = data_of(write_page(population, tmp_path / "page.html").read_text())["metrics"]
    assert len(metric["middle"]) == points


def test_without_plotly_one_line_says_what_to_install(population, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match="pip install plotly"):
        write_page(population, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_a_browser_can_look_into_it(population, tmp_path):
    """Hover, keys, sort and filter, in light and dark, without an error or a serious violation that axe-core finds."""
    browser, axe = (os.environ.get(name) for name in ("WEIGHTSCOPE_CHROMIUM", "WEIGHTSCOPE_AXE"))
    if not (browser and axe):
        pytest.skip("WEIGHTSCOPE_CHROMIUM and WEIGHTSCOPE_AXE do not name a Chromium and axe.min.js")
    api = pytest.importorskip("playwright.sync_api")
    path, said = write_page(population, tmp_path / "page.html"), []
    path.write_text(path.read_text().replace('"stem.1.bias', '"\\u003cimg src=x onerror=alert(1)>'))  # a tensor's name
    values = data_of(path.read_text())
    assert any(label.startswith("<img") for label in values["types"][0]["labels"])
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--no-zygote", "--single-process", "--headless=shell"]
        chromium = playwright.chromium.launch(executable_path=browser, args=options)
        for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(21, 24, 28)")):
            page = chromium.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: said.append(request.url) if "page.html" not in request.url else None)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]", timeout=120_000)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
            page.locator("#map").scroll_into_view_if_needed()
            box = page.locator("#map .nsewdrag").bounding_box()
            labels = values["types"][0]["labels"]
            side = min(box["width"], box["height"]) / len(labels)
            page.mouse.move(box["x"] + 1.5 * side, box["y"] + 0.5 * side)
            page.wait_for_selector("#map .hovertext")
            shown = page.inner_text("#cell")
            assert shown.startswith(f"{labels[0]}; {labels[1]}; correlation ")
            assert labels[1] in page.locator("#map .hovertext").text_content()
            page.focus("#map")
            page.keyboard.press("ArrowDown")
            assert page.inner_text("#cell").startswith(f"{labels[1]}; {labels[1]}; ")
            width = "Math.abs(document.getElementById('map').layout.xaxis.range.reduce((a, b) => a - b))"
            page.keyboard.press("+")
            page.wait_for_function(f"{width} < {len(labels) * 0.6}")
            page.uncheck("#sure")
            assert page.locator("#pairs tbody tr").count() == len(values["pairs"])
            page.locator("#pairs th[data-key=r] button").focus()
            page.keyboard.press("Enter")
            assert page.get_attribute("#pairs th[data-key=r]", "aria-sort") == "descending"
            cells = page.locator("#pairs tbody tr td:nth-child(3)").all_inner_texts()
            numbers = [float(text.split()[0].replace("\u2212", "-")) for text in cells]
            assert numbers == sorted(numbers, reverse=True)
            assert len(set(numbers)) > 1
            page.fill("#filter", "blocks.1.conv_dw")
            wanted = [row for row in values["pairs"] if "blocks.1.conv_dw" in row["a"] + row["b"]]
            assert page.locator("#pairs tbody tr").count() == len(wanted) > 0
            page.evaluate(Path(axe).read_text())
            found = page.evaluate("axe.run()")["violations"]
            assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
            assert page.locator("img").count() == 0
        chromium.close()
    assert said == []
