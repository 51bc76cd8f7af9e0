"""HTML pages: self-contained, everything escaped, and their numbers are those of the results."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest
import torch

from weightscope import plots
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.cli.page import Section, write_html, write_page
from weightscope.errors import WeightscopeError
from weightscope.population import Population
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

NASTY = """</style><script>alert("1 & 2")</script>'"""
VOID = {"meta", "img"}


class Parsed(HTMLParser):
    """Tags with their attributes, text by tag, and whether every tag is closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.words = [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.words.setdefault(tag, []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag):
        return "".join(self.words.get(tag, []))


def test_a_page_is_well_formed_self_contained_and_escaped(tmp_path):
    drawn = plots.training_curves(np.array([[0.1, 0.5], [0.2, 0.7]]))
    section = Section(NASTY, [NASTY], [(drawn, NASTY)], ([NASTY], [[NASTY]]))
    path = write_html(tmp_path / "page.html", NASTY, [NASTY], [section, Section("empty")])
    found = Parsed(path.read_text())
    assert {tag for tag, _ in found.tags}.isdisjoint(("script", "link", "iframe", "object", "form"))
    for tag in ("title", "h1", "h2", "p", "figcaption", "th", "td"):
        assert NASTY in found.text(tag), tag
    (image,) = found.all("img")
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == plots.render(drawn)
    assert image["alt"] == NASTY
    assert "prefers-color-scheme: dark" in found.text("style")
    assert not re.search(r"url\(|@import|https?:", path.read_text())
    again = write_html(tmp_path / "again.html", NASTY, [NASTY], [section, Section("empty")])
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(WeightscopeError, match="cannot write"):
        write_html(tmp_path / "none" / "page.html", "", [], [])


@pytest.fixture(scope="module")
def population(tmp_path_factory, trained_here):
    """16 networks of two blocks, really trained for two short epochs."""
    recipe = fake.recipe(networks=16, tile=16, network__depth=2, network__width=16, population__snapshots=[0, 2])
    return collect(recipe, tmp_path_factory.mktemp("page") / "a<b>.pop", workers=1)


def test_the_numbers_of_a_population_are_those_of_the_results(population, tmp_path):
    found = Parsed(write_page(population, tmp_path / "page.html").read_text())
    cells, expected = found.words["td"], covariance_exchangeable(population)
    sure = [pair for pair in expected.pairs() if pair.p < 0.05]
    assert sure
    for pair in sure[:30]:
        at = cells.index(expected.words(pair) + ("" if pair.signed else " (largest canonical)"))
        assert float(cells[at + 1].replace("−", "-")) == pytest.approx(pair.correlation, abs=0.006)
    accuracy = cells[cells.index("test_accuracy") + 2]
    assert float(accuracy) == pytest.approx(np.median(population.metrics["test_accuracy"]), rel=1e-3)
    assert "learning_rate" not in cells
    assert found.text("h1") == "a<b>.pop"
    captions = found.words["figcaption"]
    assert len(found.all("img")) == len(captions) == 3  # metrics, map, over training
    assert expected.summary() in found.text("p")


def test_a_page_of_a_snapshot(population, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "render", lambda drawn: plots.theme.render(plots.subplots(width=1, height=1)[0]))
    found = Parsed(write_page(population.at(0), tmp_path / "page.html").read_text())
    assert "The weights are those after epoch 0; the metrics are final." in found.text("p")
    assert covariance_exchangeable(population.at(0)).summary() in found.text("p")


def test_networks_trained_elsewhere_without_metrics_and_permutations(tmp_path):
    random = np.random.default_rng(0)
    networks = [{f"{NASTY}.weight": torch.tensor(random.standard_normal((4, 3)).astype("f4"))} for _ in range(12)]
    population = Population.of(networks, tmp_path / "a.pop", metrics={"x": [1e300, -1e300] * 6}, progress=False)
    found = Parsed(write_page(population, Path(tmp_path / "page.html")).read_text())
    assert "No structure: " in found.text("p")
    assert found.words["td"] == ["x", "−1e+300", "0", "1e+300"]
