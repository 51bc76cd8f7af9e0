"""A griffe extension: the docstrings' sections `Example:` are code, as griffe's own `Examples:` are."""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the sections before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one object's docstring; griffe calls this for all of them."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
