"""The report: self-contained, everything escaped, and every number from a file."""

import base64
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weightscope.errors import DataError, UsageError, WeightscopeError
from weightscope.report import Column, Number, Report, Rows, Sourced, verdict

# One grey pixel.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg==")
NASTY = """<script>alert("1 & 2")</script>'"""
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Parsed(HTMLParser):
    """Tags with their attributes, text by tag, and whether every tag is closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.words.setdefault(tag, []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag: str) -> str:
        return "".join(self.words.get(tag, []))


class Figure:
    """Something with `savefig` that is not a matplotlib figure."""

    def savefig(self, file: Any, **options: Any) -> None:
        assert options["format"] == "png"
        file.write(PNG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bench").mkdir()
    results = {
        "summary": [
            {"init": "default", "mean": 0.9712345, "difference": None, "n": 64},
            {"init": "<mimetic>", "mean": 0.98, "difference": -0.0012, "n": 64},
        ],
        "a/b": {"~c": 1234567},
        "bad": float("nan"),
    }
    (tmp_path / "bench" / "results.json").write_text(json.dumps(results))
    (tmp_path / "digits 1.pop").mkdir()
    return tmp_path


def parsed(report: Report, folder: Path) -> Parsed:
    return Parsed(report.save(folder / "report.html").read_text())


SOURCE = "bench/results.json"


def everything() -> Report:
    report = Report(f"Title {NASTY}", f"Lead {NASTY}")
    report.heading(f"Heading {NASTY}").heading("Smaller", 3)
    report.text("Accuracy ", Number(SOURCE, "/summary/0/mean", ".1f", scale=100), f" % {NASTY}")
    report.text(Sourced(f"better {NASTY}", SOURCE))
    report.numbers(
        {f"Accuracy {NASTY}": [Number(SOURCE, "/summary/1/mean", ".1%")], "Size": Number(SOURCE, "/a~1b/~0c")}
    )
    report.command(f"weightscope {NASTY}")
    report.figure(PNG, f"Caption {NASTY}", alt=f"Alt {NASTY}", source=[SOURCE, "digits 1.pop"])
    report.figure(Figure(), ["Accuracy ", Number(SOURCE, "/summary/0/mean")], alt="Curve", source=SOURCE)
    columns = [Column("init", f"Head {NASTY}"), Column("mean", "Mean", ".2f", 100), Column("difference", "Difference")]
    report.table(Rows(SOURCE, "/summary"), columns, f"Table {NASTY}")
    report.table([{"x": NASTY}], {"x": "X"}, "Plain", source=SOURCE)
    return report


def test_the_page_is_well_formed_and_self_contained(folder: Path) -> None:
    page = parsed(everything(), folder)
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in page.tags)
    assert len(page.all("img")) == 2
    for image in page.all("img"):
        assert image["src"].startswith("data:image/png;base64,")
        assert base64.b64decode(image["src"].split(",")[1]) == PNG
        assert image["alt"].strip()
        assert image["width"] == "1"
    assert page.all("html") == [{"lang": "en"}]
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert any(m.get("name") == "viewport" for m in page.all("meta"))
    style = page.text("style")
    assert "prefers-color-scheme: dark" in style
    for outside in ("url(", "@import", "http:", "https:"):
        assert outside not in style
    scrolling = [div for div in page.all("div") if "scroll" in (div.get("class") or "")]
    assert len(scrolling) == len(page.all("table")) + len(page.all("img"))


def test_every_string_is_escaped(folder: Path) -> None:
    page = parsed(everything(), folder)
    for tag, count in {"h1": 1, "h2": 1, "p": 3, "dt": 1, "code": 1, "figcaption": 2, "th": 1, "td": 1}.items():
        assert page.text(tag).count(NASTY) == count, tag
    assert page.all("img")[0]["alt"] == f"Alt {NASTY}"
    assert "<mimetic>" in page.text("td")
    assert NASTY in page.text("title")


def test_links_are_relative_and_lead_to_files_that_exist(folder: Path) -> None:
    links = [a["href"] for a in parsed(everything(), folder).all("a")]
    assert set(links) == {"bench/results.json", "digits%201.pop"}
    assert all((folder / link.replace("%20", " ")).exists() for link in links)


def test_every_figure_and_table_names_its_source(folder: Path) -> None:
    page = parsed(everything(), folder)
    assert page.text("figcaption").count("Source: ") == len(page.all("figure")) == 4


def test_numbers_are_those_of_the_file(folder: Path) -> None:
    page = parsed(everything(), folder)
    assert "Accuracy 97.1 %" in page.text("p")
    assert page.text("dd") == "98.0%1.23e+06"
    titles = [a.get("title") for a in page.all("a")]
    assert "bench/results.json /summary/0/mean = 0.9712345" in titles
    cells = page.words["td"]
    assert cells[:6] == ["default", "97.12", "–", "<mimetic>", "98.00", "−0.0012"]
    numbers = [c for c in page.all("td") if c.get("class") == "number"]
    assert len(numbers) == 4
    # The file changes, and so does what the same report says.
    (folder / SOURCE).write_text((folder / SOURCE).read_text().replace("0.9712345", "0.5"))
    assert "Accuracy 50.0 %" in parsed(everything(), folder).text("p")


def test_values_that_are_no_finite_numbers_say_so(folder: Path) -> None:
    report = Report("t").text("x ", Number(SOURCE, "/bad"), "!")
    report.table(
        [{"a": True, "b": 12345, "c": float("inf"), "d": -1.5}],
        dict(zip("abcd", "ABCD", strict=True)),
        "c",
        source=SOURCE,
    )
    page = parsed(report, folder)
    assert "x not finite!" in page.text("p")
    assert page.words["td"] == ["yes", "12,345", "not finite", "−1.5"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (Number("bench/none.json", "/a"), "none.json: cannot read this source of the report: No such file"),
        (Number(SOURCE, "/summary/2/mean"), "nothing at /summary/2/mean: no '2' in 2 rows"),
        (Number(SOURCE, "/summary/-1/mean"), "no '-1' in 2 rows"),
        (Number(SOURCE, "/summary/0/median"), "no 'median' in {'init': 'default'"),
        (Number(SOURCE, "/summary/0/mean/x"), "no 'x' in 0.97"),
        (Number(SOURCE, "/summary/0/init"), "expected a number at /summary/0/init, found 'default'"),
        (Number(SOURCE, "/summary/0/difference"), "expected a number .* found None"),
        (Number("digits 1.pop", "/a"), "Is a directory"),
        (Number("text.txt", "/a"), "expected JSON"),
    ],
)
def test_a_number_that_is_not_in_its_file_stops_the_report(folder: Path, number: Number, message: str) -> None:
    (folder / "text.txt").write_text("{")
    (folder / "report.html").write_text("old")
    with pytest.raises(DataError, match=message):
        Report("t").text(number).save(folder / "report.html")
    assert (folder / "report.html").read_text() == "old"


def test_rows_of_a_file_must_be_rows(folder: Path) -> None:
    def report(where: str, key: str = "mean") -> Report:
        return Report("t").table(Rows(SOURCE, where), {key: "M"}, "c")

    with pytest.raises(DataError, match="expected rows at /bad"):
        report("/bad").save(folder / "r.html")
    with pytest.raises(DataError, match="nothing at /none"):
        report("/none").save(folder / "r.html")
    with pytest.raises(UsageError, match=r"results\.json /summary: row 0 lacks median; it has init, mean"):
        report("/summary", "median").save(folder / "r.html")


def test_a_source_that_is_missing_stops_the_report(folder: Path) -> None:
    report = Report("t").figure(PNG, "c", alt="a", source="gone.npz")
    with pytest.raises(DataError, match=r"gone\.npz: a source of the report, not found"):
        report.save(folder / "report.html")
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "source", ["/etc/passwd", "../up.json", "a/../../b", "http://x/y", "javascript:alert(1)", "", "a\\b", "C:x", []]
)
def test_sources_are_relative_paths_below_the_report(source: Any) -> None:
    with pytest.raises(UsageError, match="source: expected"):
        Report("t").figure(PNG, "c", alt="a", source=source)
    if isinstance(source, str):
        with pytest.raises(UsageError, match="source: expected"):
            Report("t").text(Number(source, "/a"))


def test_a_bare_number_has_no_place_in_a_text() -> None:
    with pytest.raises(UsageError, match="found float; numbers need a source"):
        Report("t").text("accuracy ", 0.97)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a pointer like /summary/0/mean, found 'summary'"):
        Report("t").text(Number(SOURCE, "summary"))


def test_pictures_are_checked(tmp_path: Path) -> None:
    report = Report("t")
    picture, drawing = tmp_path / "a.png", tmp_path / "a.svg"
    picture.write_bytes(PNG)
    drawing.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    report.figure(picture, "c", alt="a", source="a.png").figure(str(drawing), "c", alt="a", source="a.svg")
    images = parsed(report, tmp_path).all("img")
    assert [i["src"].split(";")[0] for i in images] == ["data:image/png", "data:image/svg+xml"]
    with pytest.raises(UsageError, match="empty alt"):
        report.figure(PNG, "c", alt=" ", source="a")
    with pytest.raises(UsageError, match=r"expected a \.png or \.svg file"):
        report.figure("a.pdf", "c", alt="a", source="a")
    with pytest.raises(UsageError, match="expected a figure, PNG bytes or a path, found int"):
        report.figure(3, "c", alt="a", source="a")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot read this picture of the report: No such file"):
        report.figure(tmp_path / "none.png", "c", alt="a", source="a")
    with pytest.raises(DataError, match="expected a PNG picture, found bytes that begin with b'GIF89a'"):
        report.figure(b"GIF89a", "c", alt="a", source="a")


def test_other_bad_parts_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="level 2 or 3, found 1"):
        Report("t").heading("h", 1)
    with pytest.raises(UsageError, match="expected columns, found none"):
        Report("t").table([], {}, "c", source="a")
    with pytest.raises(UsageError, match="row 1 lacks x; it has y"):
        Report("t").table([{"x": 1}, {"y": 1}], {"x": "X"}, "c", source="a")
    with pytest.raises(UsageError, match="expected the file that the values come from, found none"):
        Report("t").table([{"x": 1}], {"x": "X"}, "c")
    with pytest.raises(UsageError, match="format: 'd' does not suit"):
        Report("t").text(Number(SOURCE, "/summary/0/mean", "d")).save(folder / "r.html")
    with pytest.raises(WeightscopeError, match="cannot write"):
        Report("t").save(folder / "none" / "report.html")


def test_an_empty_table_is_a_table(folder: Path) -> None:
    page = parsed(Report("t").table([], {"x": "X"}, "Nothing diverged.", source=SOURCE), folder)
    assert page.text("th") == "X"
    assert "td" not in page.words


def test_the_same_report_has_the_same_bytes(folder: Path) -> None:
    first = everything().save(folder / "a.html").read_bytes()
    assert everything().save(folder / "b.html").read_bytes() == first


def test_reports_are_made_without_heavy_imports() -> None:
    code = "import sys, weightscope.report; print([m for m in ('torch', 'matplotlib', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Verdicts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"difference": 0.021, "ci95": (0.015, 0.027), "p": 2e-9, "n": 64},
            "better by 2.1 percentage points (95 % CI 1.5 to 2.7, p = 2e-9, 64 paired seeds)",
        ),
        (
            {"difference": -0.021, "ci95": (-0.027, -0.015), "p": 0.0123},
            "worse by 2.1 percentage points (95 % CI 1.5 to 2.7, p = 0.012)",
        ),
        (
            {"difference": 0.0025, "ci95": (-0.004, 0.009), "p": 0.44, "n": 64},
            "no significant difference: +0.2 percentage points (95 % CI -0.4 to +0.9, p = 0.44, 64 paired seeds)",
        ),
        (
            {"difference": 0.01, "ci95": (0.001, 0.019), "p": 0.09},
            "no significant difference after correction for multiple comparisons: +1.0 percentage points "
            "(uncorrected 95 % CI +0.1 to +1.9, p = 0.09)",
        ),
        (
            {"difference": 12.0, "ci95": (2.0, 22.0), "p": 0.0, "unit": "nats"},
            "better by 12 nats (95 % CI 2 to 22, p < 1e-300)",
        ),
        ({"difference": 0.0, "ci95": (0.0, 0.0), "p": 1.0}, "no significant difference: 0.00 percentage points"),
        ({"difference": None, "ci95": None, "p": None}, "the reference of the comparison"),
        (
            {"difference": 0.02, "ci95": (-float("inf"), float("inf")), "p": float("nan"), "n": 1},
            "cannot be judged: no confidence interval with one seed",
        ),
        ({"difference": 0.02, "ci95": None, "p": None}, "cannot be judged: no confidence interval"),
    ],
)
def test_verdicts_claim_what_the_numbers_do(arguments: dict[str, Any], words: str) -> None:
    assert verdict(**arguments).startswith(words)


def test_verdicts_of_nonsense_are_refused() -> None:
    with pytest.raises(UsageError, match="expected a fraction between -1 and 1 for percentage points, found 2"):
        verdict(2.1, (1.5, 2.7), 0.01)
    with pytest.raises(UsageError, match="expected a value within its interval"):
        verdict(0.1, (0.2, 0.3), 0.01)


def test_no_verdict_claims_more_than_its_interval() -> None:
    """Over a grid of intervals: "better" only when the interval is above zero, "worse" only when below."""
    for low in (-0.03, -0.01, 0.001, 0.02):
        for width in (0.002, 0.02, 0.05):
            for p in (0.001, 0.049, 0.051, 0.9):
                words = verdict(low + width / 2, (low, low + width), p)
                assert words.startswith("better") == (low > 0 and p < 0.05)
                assert words.startswith("worse") == (low + width < 0 and p < 0.05)
                assert ("no significant difference" in words) != words.startswith(("better", "worse"))
