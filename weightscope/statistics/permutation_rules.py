r"""Permutation specifications by the names of tensors: permutation_rules.toml for known ones, and files of one's own.

A rule is a name and what its axes are. The name is a regular expression in which `.` is a point, `<b>` a number that
is then known as `{b}`, and `@` at the end `.weight` or `.bias`; a bias has the first axes of its weight. Each axis is

- `.`, fixed (filter positions, classes, tokens);
- a group, whose axes are permuted together; `~group` where signs flip with it;
- parts one after another, `q:~qk.{b}+k:~qk.{b}+v:~vo.{b}`, each with a label;
- `=length`, a fixed axis whose length is known to parts of this name elsewhere.

Further axes of length one need nothing. Parts whose group has a length elsewhere have this length; the others share
the rest equally.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from weightscope._util.names import listing, unwrapped
from weightscope.errors import AnatomyError, SpecError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutations import PermutationSpec, View, bare, repeated

Rules: TypeAlias = Sequence[tuple[str, Sequence[str]]]
Heads: TypeAlias = dict[str, tuple[str | None, int]]


@cache
def architectures() -> Mapping[str, Rules]:
    """Architecture -> its rules, in the order in which they are tried."""
    tables = tomllib.loads(Path(__file__).with_name("permutation_rules.toml").read_text(encoding="utf-8"))
    return {name: [(tensor, axes.split()) for tensor, axes in rules.items()] for name, rules in tables.items()}


def permutations_by_name(spec: WeightSpec) -> PermutationSpec:
    """The specification of an architecture whose tensors have known names; AnatomyError for another one.

    Units of attention heads of which the number is not known keep their places, and change their signs only.
    """
    nearest: tuple[str, Sequence[str]] = ("", spec.names)
    for name, rules in architectures().items():
        views, strangers = _matched(spec, rules)
        if not strangers:
            try:
                return _specified(views)
            except SpecError:  # lengths that contradict each other, as of grouped convolutions
                nearest = name, spec.names
        elif len(strangers) < len(nearest[1]):
            nearest = name, strangers
    like = f"nearest is {nearest[0]}, without " if nearest[0] else "this network: "
    raise AnatomyError(
        f"no permutation specification for this network, there are those of {', '.join(architectures())}: "
        f"{like}{listing(nearest[1], 4)}; derive it from the module, permutation_spec(module, example_inputs), or give "
        "your own, PermutationSpec.from_axes(spec, {name: (group, ...)}) or a file of rules"
    )


def read_permutations(path: str | Path, spec: WeightSpec) -> PermutationSpec:
    """The specification of a TOML file: rules in a table `axes`, heads of groups in a table `heads`.

        [axes]
        "layers.<b>.fc1@" = "hidden.{b} channels"
        "layers.<b>.fc2@" = "channels hidden.{b}"

        [heads]
        "qk.0" = ["heads.0", 4]

    `["heads.0", 4]` are 4 heads, which are permuted as all heads of this name; those of the name "." stay in place.

    Raises:
        SpecError: if the file is not of this form, a tensor has no rule, a rule no tensor, or lengths disagree.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if unknown := sorted(content.keys() - {"axes", "heads"}):
            raise SpecError(f"unknown table {unknown[0]!r}; there are axes and heads")
        if not isinstance(content["axes"], dict):
            raise SpecError('expected a table [axes] of lines such as "fc1@" = "hidden ."')
        if odd := [name for name, text in content["axes"].items() if not isinstance(text, str)]:
            raise SpecError(f'{odd[0]!r}: expected a text such as "hidden .", found {content["axes"][odd[0]]!r}')
        rules = [(name, text.split()) for name, text in content["axes"].items()]
        if unused := [name for name, _ in rules if not any(_pattern(name).fullmatch(unwrapped(n)) for n in spec.names)]:
            raise SpecError(f"no tensor matches {listing(unused)}; its names are {listing(spec.names)}")
        views, strangers = _matched(spec, rules)
        if strangers:
            raise SpecError(
                f"no axes that fit {listing(f'{n} {spec[n].shape}' for n in strangers)}; add a rule for each"
            )
        found = _specified(views)
        return PermutationSpec(found.views, _given_heads(content.get("heads", {}), found), found.notes)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except KeyError:
        raise SpecError(f'{path}: no table [axes]; expected lines such as "fc1@" = "hidden ."') from None
    except (SpecError, ValueError, re.error) as error:
        raise SpecError(f"{path}: {error}") from None


def _given_heads(given: Any, found: PermutationSpec) -> Heads:
    out: Heads = {}
    for group, value in given.items() if isinstance(given, dict) else [("heads", given)]:
        match value:
            case [str(name), int(number)] if (
                group in found.sizes and type(number) is int and number > 0 and found.sizes[group] % number == 0
            ):
                out[group] = (None if name == "." else name, number)
            case _:
                there = (
                    f"of {found.sizes[group]} units" if group in found.sizes else f"; groups are {listing(found.sizes)}"
                )
                raise SpecError(f'heads: {group}: expected ["NAME", a number that divides it], found {value!r} {there}')
    return dict(found.heads) | out


def _pattern(name: str) -> re.Pattern[str]:
    text = name.replace(".", r"\.").replace("@", r"\.(?:weight|bias)")
    return re.compile(re.sub(r"<(\w+)>", r"(?P<\1>\\d+)", text))


def _matched(spec: WeightSpec, rules: Rules) -> tuple[list[View], list[str]]:
    """The views of the tensors, and the names of those that no rule fits."""
    general, compiled = _general(spec), [(_pattern(name), name, axes) for name, axes in rules]
    found: list[tuple[TensorSpec, Sequence[str]]] = []
    strangers = []
    lengths: dict[str, int] = {}
    for tensor in spec.tensors:
        axes = next(_fitting(tensor, compiled, general), None)
        if axes is None:
            strangers.append(tensor.name)
            continue
        found.append((tensor, axes))
        lengths |= {bare(a): n for a, n in zip(axes, tensor.shape, strict=True) if a != "." and "+" not in a}
    views: list[View] = []
    for tensor, fitting in found:
        parts = _parts(tensor, fitting, lengths)
        views += parts
        strangers += [] if parts else [tensor.name]
    return views, strangers


def _fitting(
    tensor: TensorSpec, rules: Sequence[tuple[re.Pattern[str], str, Sequence[str]]], general: Mapping[str, Any]
) -> Iterator[list[str]]:
    """The axes that rules give a tensor of this name and number of axes."""
    for pattern, name, axes in rules:
        if match := pattern.fullmatch(unwrapped(tensor.name)):
            values = dict(general) | {key: int(text) for key, text in match.groupdict().items() if text is not None}
            s, b, streams = values.get("s", 0), values.get("b", 0), values["streams"]
            values |= {"before": s - 1, "next": b + 1, "stream": streams.get(s, s)}
            values["entering"] = values["stream"] if b else streams.get(s - 1, s - 1)
            try:
                texts = [_filled(axis, values) for axis in axes]
            except KeyError as error:
                raise SpecError(f"{name!r}: {error} in {' '.join(axes)!r} is not a number of the name") from None
            texts = texts[:1] if tensor.name.endswith("bias") and "@" in name else texts
            rest = tensor.shape[len(texts) :]
            if len(texts) <= len(tensor.shape) and all(n == 1 for n in rest):
                yield [*texts, *("." for _ in rest)]


def _filled(axis: str, values: Mapping[str, Any]) -> str:
    return re.sub(r"\{([^}]*)\}?", lambda found: str(values[found[1]]), axis)


def _general(spec: WeightSpec) -> dict[str, Any]:
    """What rules may refer to beside the numbers of a name."""
    names = [unwrapped(name) for name in spec.names]
    numbers = {
        kind: [int(m[1]) for name in names if (m := re.match(rf"{kind}(\d+)\.", name))]
        for kind in (r"stages\.", r"blocks\.", "layer")
    }
    # the stream of a residual network has other channels from where its shortcut is a convolution
    streams = {0: 0}
    for s in sorted(set(numbers["layer"])):
        streams[s] = s if any(name.startswith(f"layer{s}.0.downsample.") for name in names) else streams.get(s - 1, s)
    last = max(numbers[r"stages\."], default=max(numbers[r"blocks\."], default=-1) + 1)
    pooled = "." if any("pooler.dense" in name for name in names) else "channels"
    return {"last": streams[max(streams)] if numbers["layer"] else last, "streams": streams, "pooled": pooled}


def _parts(tensor: TensorSpec, axes: Sequence[str], lengths: Mapping[str, int]) -> list[View]:
    """The views of a tensor, one for each part of an axis; none if the lengths do not fit."""

    def labels(texts: Sequence[str]) -> tuple[str | None, ...]:
        return tuple(None if text == "." or text.startswith("=") else text for text in texts)

    where = next((i for i, text in enumerate(axes) if "+" in text), None)
    if where is None:
        return [View(tensor.name, tensor.name, tensor.shape, labels(axes))]
    parts = [text.partition(":")[::2] for text in axes[where].split("+")]
    known = [lengths.get(bare(group)) for _, group in parts]
    rest, left = tensor.shape[where] - sum(n or 0 for n in known), known.count(None)
    if rest < left or (rest % left if left else rest):
        return []
    out, start = [], 0
    for (label, group), n in zip(parts, (n or rest // left for n in known), strict=True):
        shape = (*tensor.shape[:where], n, *tensor.shape[where + 1 :])
        offset = tuple(start if i == where else 0 for i in range(len(shape)))
        named = labels([*axes[:where], group, *axes[where + 1 :]])
        out.append(View(f"{tensor.name}[{label}]", tensor.name, shape, named, offset))
        start += n
    return out


def _specified(views: Sequence[View]) -> PermutationSpec:
    """The specification of these views; groups on several axes of one are fixed everywhere, see `repeated`."""
    twice = {group: view.tensor for view in views for group in repeated(view.axes)}
    notes = tuple(f"{group} is on several axes of `{name}`, so it is fixed" for group, name in twice.items())
    kept = tuple(
        View(v.name, v.tensor, v.shape, tuple(None if a and bare(a) in twice else a for a in v.axes), v.offset)
        for v in views
    )
    found = PermutationSpec(kept, notes=notes)
    return PermutationSpec(kept, _heads(found), notes)


def _heads(permutations: PermutationSpec) -> Heads:
    """Group -> (name of its heads, H) where a tensor has an axis of heads; else units of heads stay in their places."""
    out: Heads = {}
    sizes = permutations.sizes
    for group, n in sizes.items():
        kind, _, block = group.partition(".")
        if kind in ("qk", "vo", "head") and f"head.{block}" in sizes:
            out[group] = (f"heads.{block}", sizes[f"head.{block}"])
        elif kind in ("qk", "vo", "state") or (kind == "inner" and f"state.{block}" in sizes):
            out[group] = (None, n)
    return out
