"""What the site has and docs/ does not: figures, pages from the root of the repository, the notebook as text."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them; mkdocs calls this before it reads any page."""
    for picture in sorted((ROOT / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    for name in ("CONTRIBUTING", "CHANGELOG"):
        # Links in these files start at the root of the repository.
        text = re.sub(r"\]\(docs/", "](", (ROOT / f"{name}.md").read_text())
        files.append(File.generated(config, f"{name.lower()}.md", content=text))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=_as_text(notebook)))
        files.remove(files.get_file_from_path(f"notebooks/{notebook.name}"))
    return files


def _as_text(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    parts = ["".join(c["source"]) if c["cell_type"] == "markdown" else _fenced("".join(c["source"])) for c in cells]
    return "\n\n".join([*parts, f"*The notebook is `docs/notebooks/{notebook.name}`.*"])


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
