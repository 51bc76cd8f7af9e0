"""Tensor names shortened for labels."""

import re
from collections.abc import Sequence

_LONG = 22  # characters; longer names are abbreviated, then cut in the middle
_CUT = 30
_NUMBERED = re.compile(r"\b([A-Za-z_]+)\.(\d+)(?=\.)")


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Names without the parts that they all share.

    `stages.0.blocks.0.mlp.fc1.weight` and `stages.0.blocks.1.mlp.fc2.weight` become `blocks.0.mlp.fc1` and
    `blocks.1.mlp.fc2`: a numbered word keeps its number. If names are still long, numbered words are abbreviated,
    `b0.mlp.fc1`. Distinct names stay distinct.

    Returns:
        The short names, and a remark that explains them, empty if nothing was shortened.
    """
    names = list(names)
    parts = [name.split(".") for name in names]
    first = last = 0
    if len(names) > 1 and not any("(" in name for name in names):
        first = _shared(parts, min(map(len, parts)) - 1)
        last = _shared([p[first:][::-1] for p in parts], min(len(p) - first for p in parts) - 1)
    while first and any(p[first].isdigit() for p in parts):
        first -= 1
    short = [".".join(p[first : len(p) - last]) for p in parts]
    remarks = [f"{short[0]} is {names[0]}"] if first or last else []
    if any(len(name) > _LONG for name in short):
        prefixes = _prefixes(short)
        abbreviated = [_NUMBERED.sub(lambda m: f"{prefixes[m[1]]}{m[2]}", name) for name in short]
        if len(set(abbreviated)) == len(set(short)) and prefixes:
            remarks.append(", ".join(f"{prefix} = {word}" for word, prefix in prefixes.items() if word != prefix))
            short = abbreviated
    cut = [_cut(name) for name in short]
    return (cut if len(set(cut)) == len(set(short)) else short), "; ".join(filter(None, remarks))


def _shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """The number of leading parts that all have in common."""
    count = 0
    while count < most and len({p[count] for p in parts}) == 1:
        count += 1
    return count


def _prefixes(names: Sequence[str]) -> dict[str, str]:
    """For each numbered word, the shortest prefix that no other such word begins with."""
    words = sorted({m[1] for name in names for m in _NUMBERED.finditer(name)})
    return {
        word: next((word[:n] for n in range(1, len(word)) if sum(w.startswith(word[:n]) for w in words) == 1), word)
        for word in words
    }


def _cut(name: str) -> str:
    return name if len(name) <= _CUT else f"{name[: _CUT // 2 - 1]}…{name[-_CUT // 2 :]}"


def merged(names: Sequence[str], most: int) -> list[tuple[str, int, int]]:
    """Neighbouring names grouped under their common parent until at most `most` groups remain, if possible.

    Returns:
        (label, index of the first name, index after the last). `a.0.w`, `a.0.b`, `a.1.w` become `a.0 (2)`, `a.1.w`.
    """
    groups = [(name, i, i + 1) for i, name in enumerate(names)]
    depth = max(name.count(".") for name in names)
    while len(groups) > most and depth > 0:
        joined: list[tuple[str, int, int]] = []
        for name, start, stop in ((".".join(names[g[1]].split(".")[:depth]), *g[1:]) for g in groups):
            if joined and joined[-1][0] == name:
                joined[-1] = (name, joined[-1][1], stop)
            else:
                joined.append((name, start, stop))
        groups, depth = joined, depth - 1
    return [(names[a] if b - a == 1 else f"{label} ({b - a})", a, b) for label, a, b in groups]
