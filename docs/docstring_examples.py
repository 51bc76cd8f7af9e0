"""A griffe extension: what the API reference needs to know of the sources beyond what griffe reads in them."""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Docstring sections `Example:` are code, as griffe's `Examples:` are; `weightscope.init` exports its imports."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one object's docstring; griffe calls this for all of them."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if obj.path == "weightscope.init":  # its `__all__` is computed from the registry, which griffe cannot follow
            obj.exports = [name for name, member in obj.members.items() if member.is_alias and _exported(name, member)]


def _exported(name: str, member: griffe.Alias) -> bool:
    return member.target_path.endswith(f".{name}") and member.target_path.startswith("weightscope.init.")
