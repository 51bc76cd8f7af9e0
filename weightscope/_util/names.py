"""Names of tensors: stripped of wrappers, matched by patterns, listed in messages."""

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weightscope.errors import UsageError

# Added by torch.compile, FSDP and activation checkpointing. DataParallel and DDP add `module`, at the start only;
# elsewhere it can be a submodule of that name.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# The innermost blocks (Swin's stages are `layers`), but of T5, whose blocks have parts `layer.0` and `layer.1`.
BLOCK = re.compile(
    r"(?P<stack>(?:(?!.*\bblock\.\d+\.layer\.).*\.)?(?:blocks|layers?|resblocks|h)\.|(?:.*\.)?block\.(?=\d+\.\w+\.))"
    r"(?P<index>\d+)(?P<rest>\..+)"
)

# Characters of names in a message, which has less than 200 together with the text around them.
_ROOM = 100


def unwrapped(name: str) -> str:
    """A tensor's name without the components that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def block_of(name: str) -> str:
    """The block of a tensor, `stages.0.blocks.2`; empty outside blocks."""
    found = BLOCK.fullmatch(name)
    return f"{found['stack']}{found['index']}" if found else ""


def matching(pattern: str | Sequence[str], names: Iterable[str], argument: str = "select") -> list[str]:
    """The names, in their order, that match any of the shell patterns (`*`, `?`, `[..]`).

    Patterns are one comma-separated string or a sequence; UsageError if one of them matches no name.
    """
    given = pattern.split(",") if isinstance(pattern, str) else pattern
    names, patterns = list(names), list(given) if isinstance(given, Iterable) else [given]
    if not patterns or not all(isinstance(p, str) and p.strip() for p in patterns):
        raise UsageError(f"{argument}: expected a pattern such as '*mlp*', found {shortened(repr(pattern))}")
    patterns = [p.strip() for p in patterns]
    for p in patterns:
        if not any(fnmatchcase(name, p) for name in names):
            bare = re.sub(r"\[[^]]*\]|[*?]", "", p)  # compared with the end of each name that the pattern fixes
            ends = {name: name[-len(bare) :] if p.startswith("*") else name for name in names}
            names.sort(key=lambda name: difflib.SequenceMatcher(None, bare, ends[name]).ratio(), reverse=True)
            raise UsageError(f"{argument}: no tensor matches {shortened(p)!r}; {suggestion(p, names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def listing(names: Iterable[str], most: int = 8) -> str:
    """The first few names and the number of the others, for a message: `a`, `b` and 1 more."""
    return joined((f"`{name}`" for name in names), most)


def split_initialisers(text: str) -> list[str]:
    """The initialisers of a text, joined by `+` outside of parentheses."""
    parts, inside = [""], False
    for piece in reversed(re.split(r"([()+])", text)):
        if piece == "+" and not inside:
            parts.append("")
        else:
            inside = (inside or piece == ")") and piece != "("
            parts[-1] = piece + parts[-1]
    return parts[::-1]


def shortened(text: str, most: int = 60) -> str:
    """The text on one line, with dots in place of its middle if it is long, and `?` for what cannot be printed."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else f"{text[: most - 23]}...{text[-20:]}"


def unique_label(label: str, taken: Collection[str]) -> str:
    """The label, or with the first free number if it is taken: `vit (2)`."""
    names = itertools.chain([label], (f"{label} ({n})" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


_PLAIN = {"model", "pytorch_model", "weights", "checkpoint", "open_clip_pytorch_model"}  # uninformative file names


def label_of(source: Any) -> str:
    """A short label of a network: the last informative part of its path, or its class."""
    address = getattr(source, "source", None)  # of a checkpoint
    source = address if isinstance(address, str | Path) else source
    if not isinstance(source, str | Path):
        return "state dict" if isinstance(source, Mapping) else type(source).__name__
    text = str(source)
    path = Path(text.removeprefix("hf://").partition("@")[0] if text.startswith("hf://") else text)
    stem = path.stem if path.suffix in (".safetensors", ".pt", ".pth", ".bin") else path.name
    return path.absolute().parent.name if stem in _PLAIN else stem or str(source)


def labels_of(names: Sequence[str], given: Sequence[str | None] | None) -> list[str]:
    """A label for each source: the given one, or where it is None its own name, numbered if it is taken."""
    asked = [None] * len(names) if given is None else given
    fixed = [label for label in asked if label is not None]
    if isinstance(asked, str) or len(asked) != len(names) or len(set(fixed)) != len(fixed):
        raise UsageError(f"labels: expected a list of {len(names)} unique names, found {given!r}")
    labels: list[str] = []
    for name, label in zip(names, asked, strict=True):
        labels.append(unique_label(name, [*labels, *fixed]) if label is None else label)
    return labels


def unknown(kind: str, name: object, known: Iterable[str], otherwise: str = "") -> str:
    """The message about an unknown name, in less than 200 characters.

    `otherwise` is what else may be given: "the path of a .toml file".
    """
    shown = repr(shortened(name)) if isinstance(name, str) else shortened(repr(name))
    return f"no {kind} {shown}; {suggestion(name, known, otherwise)}"


def suggestion(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """`did you mean ...?` with the known name nearest to an unknown one, or `there are ...` with as many as fit."""
    known = list(known)
    if near := difflib.get_close_matches(str(name), known, n=1, cutoff=0.7):
        return f"did you mean {near[0]!r}?" + f" Otherwise give {otherwise}" * bool(otherwise)
    lengths = itertools.accumulate(len(name) + 2 for name in known)
    fitting = sum(length <= _ROOM - len(otherwise) for length in lengths)
    return f"there are {joined(known, max(1, fitting))}" + f"; or give {otherwise}" * bool(otherwise)


def joined(found: Iterable[str], most: int) -> str:
    """The first few texts and the number of the others."""
    names = list(found)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# Order of the towers and of the attention modules of a block, where names are sorted (as in safetensors files).
_RANK = dict.fromkeys(("encoder", "text_model", "self_attn"), 0)
_RANK |= dict.fromkeys(("decoder", "vision_model", "encoder_attn", "multihead_attn"), 1)


def numbered(names: Iterable[str]) -> list[str]:
    """The names as they are or, if in alphabetical order as in safetensors files, with `layer.2` before `layer.10`."""
    given = list(names)
    return sorted(given, key=natural) if given == sorted(given) else given


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key: `layer.2` before `layer.10`, encoders before decoders, self- before cross-attention."""
    parts = [piece for word in name.split(".") for piece in re.split(r"(\d+)", word) if piece]
    return [(0, int(p), "") if p.isdecimal() else (1, _RANK.get(p, 0), p if p not in _RANK else "") for p in parts]
