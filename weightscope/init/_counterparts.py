"""Which tensor of a trained network belongs to which of another network of its family."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from weightscope._util.names import listing
from weightscope.errors import SpecError
from weightscope.init._family_names import Place, Source, places

_REPEATED = ("blocks", "layers", "layer", "h")


def spaced(large: int, small: int) -> Tensor:
    """`floor(i * large / small)` for i = 0 .. small - 1."""
    return torch.arange(small) * large // small


def end_to_end(large: int, small: int) -> Tensor:
    """`round(i * (large - 1) / (small - 1))` for i = 0 .. small - 1: from the first to the last."""
    return torch.linspace(0, large - 1, small, dtype=torch.float64).round().long()


def counterparts(wanted: Iterable[str], student: Iterable[str], source: Source, rule: str) -> dict[str, Place]:
    """Student tensor -> place in the teacher: the same name, with layer numbers mapped where their numbers differ.

    Args:
        wanted: tensors of the student.
        student: all of its tensors.
        source: the teacher.
        rule: "first", "spaced" or "linspace", of a larger teacher; "cycle": layer i is layer i mod T of T.

    Raises:
        SpecError: if the teacher has no such tensor, or fewer layers (unless the rule is "cycle").
    """
    mine = places(student)
    small, large = numbered(place.name for place in mine.values()), numbered(source.names)
    out, missing = {}, []
    for name in wanted:
        place = Place(_path(name, mine[name].name, small, large, rule), mine[name].part)
        if source.has(place):
            out[name] = place
        else:
            missing.append(name)
    if missing:
        raise SpecError(
            f"the teacher has no counterpart of {listing(missing)}; leave them out with exclude= or components="
        )
    return out


def numbered(names: Iterable[str]) -> dict[str, list[int]]:
    """Path -> the numbers that follow it in any name: `blocks` -> [0, 1, 2]."""
    found: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        for i, word in enumerate(words):
            if word.isdigit():
                found.setdefault(".".join(words[:i]), set()).add(int(word))
    return {path: sorted(numbers) for path, numbers in found.items()}


def _path(name: str, place: str, mine: Mapping[str, list[int]], large: Mapping[str, list[int]], rule: str) -> str:
    """The place of a student's tensor with its layer numbers replaced by the teacher's."""
    here: list[str] = []
    there: list[str] = []
    for word in place.split("."):
        mapped = word
        if word.isdigit():
            small, big = mine[".".join(here)], large.get(".".join(there), [])
            i = small.index(int(word))
            if rule == "cycle" and big and (len(small) <= len(big) or here[-1] in _REPEATED):
                mapped = str(big[i % len(big)])
            elif len(small) > len(big):
                raise SpecError(
                    f"`{name}`: the student has {len(small)} layers in `{'.'.join(here)}`, the teacher {len(big)}; "
                    + ("only blocks can be added" if rule == "cycle" else "the teacher must be the larger network")
                )
            else:
                pick = {"first": torch.arange(len(small)), "spaced": spaced(len(big), len(small))}
                mapped = str(big[int(pick.get(rule, end_to_end(len(big), len(small)))[i])])
        here.append(word)
        there.append(mapped)
    return ".".join(there)
