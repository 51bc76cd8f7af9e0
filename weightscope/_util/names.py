"""Names of tensors: stripped of wrappers, matched by patterns, listed in messages."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from weightscope.errors import UsageError

# Added by torch.compile, FSDP and activation checkpointing. DataParallel and DDP add `module`, at the start only;
# elsewhere it can be a submodule of that name.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def unwrapped(name: str) -> str:
    """A tensor's name without the components that wrappers add.

    Example:
        >>> unwrapped("module.blocks.0.mlp._orig_mod.fc1.weight")
        'blocks.0.mlp.fc1.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def split_patterns(pattern: str | Sequence[str], argument: str = "select") -> list[str]:
    """Shell patterns (`*`, `?`, `[..]`) given as one comma-separated string or as a sequence.

    Raises:
        UsageError: if there are none, or one is empty or not a string.
    """
    parts = pattern.split(",") if isinstance(pattern, str) else list(pattern)
    if not parts or not all(isinstance(p, str) and p.strip() for p in parts):
        raise UsageError(f"{argument}: expected a pattern such as '*mlp*', found {pattern!r}")
    return [p.strip() for p in parts]


def matching(pattern: str | Sequence[str], names: Iterable[str], argument: str = "select") -> list[str]:
    """The names that match any of the patterns, in the order of `names`.

    Raises:
        UsageError: if one of the patterns matches no name; lists the names, the nearest first.
    """
    names, patterns = list(names), split_patterns(pattern, argument)
    for p in patterns:
        if not any(fnmatchcase(name, p) for name in names):
            found = listing(nearest_first(p, names))
            raise UsageError(f"{argument}: no tensor matches {p!r}; the {len(names)} names are {found}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def nearest_first(name: str, names: Iterable[str]) -> list[str]:
    """The names, those most similar to `name` first, the others in their order."""
    names = list(names)
    return list(dict.fromkeys([*difflib.get_close_matches(name, names, cutoff=0.3), *names]))


def listing(names: Iterable[str], most: int = 8) -> str:
    """The first few names and the number of the others, for a message.

    Example:
        >>> listing(["a", "b", "c"], most=2)
        '`a`, `b` and 1 more'
    """
    names = list(names)
    return ", ".join(f"`{n}`" for n in names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def unverified(source: str, files: Iterable[str]) -> str:
    """What to say of a model at a hub of whose files only byte ranges were read."""
    return (
        f"{source}: {listing(files, most=3)} unverified: only byte ranges were read; "
        "`weightscope verify --download` compares whole files"
    )


def numbered(label: str, taken: Collection[str]) -> str:
    """The label, or with the first free number if it is taken: `vit (2)`."""
    name, n = label, 1
    while name in taken:
        n += 1
        name = f"{label} ({n})"
    return name


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The message about an unknown name, with the nearest known one or all of them.

    Example:
        >>> unknown("initialiser", "mimetic_atention", ["mimetic_attention", "mimetic_mlp"])
        "no initialiser 'mimetic_atention'; did you mean 'mimetic_attention'?"
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75) if isinstance(name, str) else []
    if near:
        return f"no {kind} {name!r}; did you mean {near[0]!r}?"
    return f"no {kind} {name!r}; there are {', '.join(known)}"
