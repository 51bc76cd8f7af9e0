"""Pages and figures of the site that are not in docs/, and links that lead to the same place as in the repository."""

import json
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "analyses/README.md",
    "analyses/claims.md",
    "analyses/papers.md",
    "benchmarks/README.md",
    "benchmarks/results/derived-permutations.md",
    "benchmarks/results/what-is-read.md",
    "benchmarks/results/wrapped-networks.md",
)
_LINK = re.compile(
    r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?://|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and figures under the paths that they have in the repository, and the notebook as text."""
    for picture in sorted((ROOT / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    for page in PAGES:
        files.append(File.generated(config, page, content=(ROOT / page).read_text()))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=_as_text(notebook)))
        files.remove(files.get_file_from_path(f"notebooks/{notebook.name}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their target is on the site; of one that is in the repository only, the text stays."""
    here = page.file.src_uri
    folder = os.path.dirname(here if here in PAGES else f"docs/{here}")

    def replaced(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, link["path"])).removeprefix("docs/")
        if path.endswith(".ipynb"):
            path = str(PurePosixPath(path).with_suffix(".md"))
        if files.get_file_from_path(path) is None:
            return link["text"]
        return f"[{link['text']}]({os.path.relpath(path, os.path.dirname(here) or '.')}{link['anchor'] or ''})"

    return _LINK.sub(replaced, markdown)


def _as_text(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    parts = ["".join(c["source"]) if c["cell_type"] == "markdown" else _fenced("".join(c["source"])) for c in cells]
    return "\n\n".join([*parts, f"*The notebook is `docs/notebooks/{notebook.name}`.*"])


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
