"""The demo's page: self-contained, everything escaped, and every number linked to its file."""

import base64
import itertools
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightscope.cli.demo import FITTED, verdict, write_report
from weightscope.errors import WeightscopeError

# One grey pixel.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg==")
NASTY = """<script>alert("1 & 2")</script>'"""
VOID = {"meta", "img", "br", "hr", "link", "input"}


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
        for tag in self.open:
            self.words.setdefault(tag, []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag):
        return "".join(self.words.get(tag, []))


def arm(init: str, difference: float | None, beyond: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"init": init, "epochs": 3, "n": 64, "mean": 0.97123, "pairs": 64, "difference": difference}
    row |= {
        "difference_ci_holm": difference and [difference - 0.001, difference + 0.001],
        "difference_ci_images": difference and [difference - 0.025, difference + 0.025],
        "p_holm": difference and 1e-9,
    }
    interval = beyond and [beyond - 0.01, beyond + 0.01]
    for key in ("beyond_scale", "correlations"):
        row |= {key: beyond, f"{key}_ci_holm": interval, f"{key}_p_holm": beyond and 0.4, f"{key}_pairs": beyond and 64}
        row[f"{key}_ci_images"] = None
    return row


def page(path: Path, pairs: int = 20) -> Parsed:
    score = {"group": "all", "structure": NASTY, "parameters": 12345, "log_prob": -1.5, "difference": 0.0}
    failed = dict.fromkeys(("parameters", "log_prob", "difference", "difference_se"))
    table = [score | {"difference_se": 0.0, "failed": None}]
    table.append({"group": "all", "structure": "failed one", "failed": "why", **failed})
    pair = {"correlation": -0.5, "low": -0.6, "high": -0.4, "z": float("inf")}
    arms = {"benchmark": 0.021, "benchmark-longer": -0.021}
    write_report(
        path,
        pictures=dict.fromkeys(("training", "raw", "whole", "scores", "benchmark", "benchmark-longer"), PNG),
        contents={"done": 256, "dimension": 1234567, "quantiles": {"test_accuracy": {"0.5": 0.9871}}, "diverged": 0},
        pairs=[pair | {"in words": f"{i} {NASTY}", "p": p} for i, p in enumerate([0.01] * pairs + [0.5])],
        effects=f"not exchangeable: {NASTY}",
        fits={"networks": 204, "settings": {"held_out": 51}, "table": table},
        benchmarks={folder: [arm("default", None), arm(FITTED, d, 0.0025)] for folder, d in arms.items()},
        gain=3.0,
        page="page.html",
        drawn=-1.8e8,
    )
    return Parsed(path.read_text())


def test_the_page_is_well_formed_and_self_contained(tmp_path):
    found = page(tmp_path / "report.html")
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in found.tags)
    assert len(found.all("img")) == 6
    for image in found.all("img"):
        assert image["src"].startswith("data:image/png;base64,")
        assert base64.b64decode(image["src"].split(",")[1]) == PNG
        assert image["alt"].strip()
        assert image["width"] == "1"
    assert found.all("html") == [{"lang": "en"}]
    style = found.text("style")
    assert "prefers-color-scheme: dark" in style
    assert not [outside for outside in ("url(", "@import", "http:", "https:") if outside in style]
    scrolling = [div for div in found.all("div") if "scroll" in (div.get("class") or "")]
    assert len(scrolling) == len(found.all("table")) + len(found.all("img"))


def test_numbers_are_formatted_and_linked_and_texts_escaped(tmp_path):
    found = page(tmp_path / "report.html")
    assert found.text("dd") == "2561,234,56798.70"
    cells = found.words["td"]
    assert "".join(cells).count(NASTY) == 12 + 1, "twelve pairs and one structure; the failed one is left out"
    assert {"−0.50", "−0.60", "no spread", "12,345", "97.12", "+2.10", "−2.10", "–"} <= set(cells)
    assert "failed one" not in cells
    lead = next(text for text in found.words["a"] if text.startswith("better"))
    images = "−0.4 to +4.6 for other test images as well"
    assert lead == f"better: +2.10 percentage points (95 % CI +2.00 to +2.20, {images}, p = 1×10⁻⁹, 64 paired seeds)"
    assert "subtract the mean of their tokens gain more" in found.text("header")
    assert "is not significantly different: +0.2 percentage points" in found.text("p")
    links = {a["href"] for a in found.all("a")}
    assert {"benchmark/results.json", "benchmark-longer/results.json", "digits.pop", "page.html"} <= links
    assert found.text("figcaption").count("Source: ") == len(found.all("figure")) == 6 + 4


def test_without_correlated_pairs_there_is_a_sentence_in_place_of_their_table(tmp_path):
    found = page(tmp_path / "report.html", pairs=0)
    assert "No pair of tensors is significantly correlated" in found.text("p")
    assert len(found.all("table")) == 3


def test_the_same_values_give_the_same_bytes_and_a_page_that_cannot_be_written_is_an_error(tmp_path):
    for name in ("a.html", "b.html"):
        page(tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    with pytest.raises(WeightscopeError, match="cannot write"):
        page(tmp_path / "none" / "report.html")


VERDICTS = [
    (
        0.021,
        (0.015, 0.027),
        2e-9,
        64,
        "better: +2.1 percentage points (95 % CI +1.5 to +2.7, p = 2×10⁻⁹, 64 paired seeds)",
    ),
    (-0.021, (-0.027, -0.015), 0.0123, None, "worse: −2.1 percentage points (95 % CI −2.7 to −1.5, p = 0.012)"),
    (0.0025, (-0.004, 0.009), 0.44, 64, "not significantly different: +0.2 percentage points (95 % CI −0.4 to +0.9"),
    (0.12, (0.02, 0.22), 0.0, None, "better: +12 percentage points (95 % CI +2 to +22, p < 10⁻³⁰⁰)"),
    (0.0, (0.0, 0.0), 1.0, None, "not significantly different: 0.0 percentage points"),
    (None, None, None, None, "the reference of the comparison"),
    (0.02, (-np.inf, np.inf), np.nan, 1, "not comparable: too few seeds (1)"),
    (0.02, (-1.0, 1.0), 0.4, 2, "not comparable: too few seeds (2)"),
    (0.02, None, None, None, "not comparable: too few seeds"),
    (0.02, None, 0.01, 7, "not comparable: networks diverged (7)"),
    (None, None, 0.01, 0, "not comparable: networks diverged (0)"),
]


@pytest.mark.parametrize(("difference", "ci95", "p", "n", "words"), VERDICTS)
def test_verdicts_claim_what_the_numbers_do(difference, ci95, p, n: int | None, words):
    assert verdict(difference, ci95, p, n).startswith(words)


def test_no_verdict_claims_more_than_its_interval():
    """Over a grid of intervals: "better" only when the interval is above zero, "worse" only when below."""
    for low, width, p in itertools.product(
        (-0.03, -0.01, 0.001, 0.02), (0.002, 0.02, 0.05), (0.001, 0.049, 0.051, 0.9)
    ):
        words = verdict(low + width / 2, (low, low + width), p, None)
        assert words.startswith("better") == (low > 0 and p < 0.05)
        assert words.startswith("worse") == (low + width < 0 and p < 0.05)
        assert words.startswith("not significantly") != words.startswith(("better", "worse"))
