r"""Permutation specifications by the names of tensors: tables for known architectures, and files of one's own.

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
from pathlib import Path
from typing import Any, TypeAlias

from weightscope._util.names import listing, unwrapped
from weightscope.errors import AnatomyError, SpecError
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.permutations import PermutationSpec, View, bare, repeated

Rules: TypeAlias = Sequence[tuple[str, Sequence[str]]]
Heads: TypeAlias = dict[str, tuple[str | None, int]]

_VIT = """
(cls_token|pos_embed|reg_token|dist_token)                      . . channels
patch_embed.proj@                                               channels . . .
(fc_norm|norm|norm_pre)@                                        channels
blocks.<b>.(norm[12]@|ls[12].gamma|gamma_[12]|skip_scale)       channels
blocks.<b>.attn.qkv@                                            q:~qk.{b}+k:~qk.{b}+v:~vo.{b} channels
blocks.<b>.attn.[qk](_proj)?@                                   ~qk.{b} channels
blocks.<b>.attn.v(_proj)?@                                      ~vo.{b} channels
blocks.<b>.attn.proj@                                           channels ~vo.{b}
blocks.<b>.attn.gating_param                                    head.{b}
blocks.<b>.attn.position_vectors                                head.{b} .
blocks.<b>.attn.filters                                         head.{b} . .
blocks.<b>.(attn.filter_scale|mlp.fc1.sum_weight)               .
blocks.<b>.mlp.fc1@                                             hidden.{b} channels
blocks.<b>.mlp.fc2@                                             channels hidden.{b}
(head|head_dist)@                                               . channels
"""
# ViT, DINOv2, BERT, RoBERTa. The output of `transform` is multiplied by the tied embeddings, so its rows are channels.
_ENCODER = """
(P.)?embeddings.(cls_token|position_embeddings|distillation_token|register_tokens)  . . channels
(P.)?embeddings.(mask_token|(word|position|token_type)_embeddings.weight)  . channels
(P.)?embeddings.patch_embeddings.projection@                    channels . . .
(P.)?(layernorm|embeddings.LayerNorm)@                          channels
(P.)?L.<b>.(norm[12]|layernorm_(before|after)|(attention.)?output.LayerNorm)@  channels
(P.)?L.<b>.layer_scale[12].lambda1                              channels
(P.)?L.<b>.attention.((attention|self).(query|key)|[qk]_proj)@  ~qk.{b} channels
(P.)?L.<b>.attention.((attention|self).value|v_proj)@           ~vo.{b} channels
(P.)?L.<b>.attention.(output.dense|o_proj)@                     channels ~vo.{b}
(P.)?L.<b>.(mlp.fc1|intermediate.dense)@                        hidden.{b} channels
(P.)?L.<b>.(mlp.fc2|output.dense)@                              channels hidden.{b}
(P.)?pooler.dense@                                              . channels
(classifier|qa_outputs)@                                        . {pooled}
(cls.seq_relationship)@                                         . .
(cls.predictions.transform|lm_head).dense@                      channels channels
(cls.predictions.transform.LayerNorm|lm_head.layer_norm)@       channels
(cls.predictions|lm_head).decoder.weight                        . channels
(cls.predictions|lm_head).(decoder.)?bias                       .
""".replace("P.", "(bert|roberta|vit|dinov2|deit).").replace("L.<b>", "(encoder.layer|layers).<b>")
_GPT_2 = """
(transformer.)?(wte|wpe).weight                                 . channels
(transformer.)?(h.<b>.ln_[12]|ln_f)@                            channels
(transformer.)?h.<b>.attn.c_attn.weight                         channels q:~qk.{b}+k:~qk.{b}+v:~vo.{b}
(transformer.)?h.<b>.attn.c_attn.bias                           q:~qk.{b}+k:~qk.{b}+v:~vo.{b}
(transformer.)?h.<b>.attn.c_proj.weight                         ~vo.{b} channels
(transformer.)?h.<b>.mlp.c_fc.weight                            channels hidden.{b}
(transformer.)?h.<b>.mlp.c_fc.bias                              hidden.{b}
(transformer.)?h.<b>.mlp.c_proj.weight                          hidden.{b} channels
(transformer.)?h.<b>.(attn|mlp).c_proj.bias                     channels
(transformer.)?h.<b>.attn.bias                                  . . . .
(transformer.)?h.<b>.attn.masked_bias
lm_head.weight                                                  . channels
"""
# Queries, keys and values of one head lie together, and queries and keys are rotated: their rows are fixed.
_GPT_NEOX = """
((gpt_neox.)?embed_in|embed_out|lm_head).weight                 . channels
(gpt_neox.)?(layers.<b>.(input|post_attention)_layernorm|final_layer_norm)@  channels
(gpt_neox.)?layers.<b>.attention.query_key_value@               . channels
(gpt_neox.)?layers.<b>.attention.dense@                         channels .
(gpt_neox.)?layers.<b>.mlp.dense_h_to_4h@                       hidden.{b} channels
(gpt_neox.)?layers.<b>.mlp.dense_4h_to_h@                       channels hidden.{b}
(gpt_neox.)?layers.<b>.attention.bias                           . . . .
(gpt_neox.)?layers.<b>.attention.rotary_emb.inv_freq            .
(gpt_neox.)?layers.<b>.attention.masked_bias
"""
_CONVNEXT = """
stem.0@                                                         channels.0 . . .
stem.1@                                                         channels.0
stages.<s>.downsample.0@                                        channels.{before}
stages.<s>.downsample.1@                                        channels.{s} channels.{before} . .
stages.<s>.blocks.<b>.(gamma|norm.(weight|bias))                channels.{s}
stages.<s>.blocks.<b>.conv_dw@                                  channels.{s} . . .
stages.<s>.blocks.<b>.mlp.fc1@                                  hidden.{s}.{b} channels.{s}
stages.<s>.blocks.<b>.mlp.fc1.sum_weight                        .
stages.<s>.blocks.<b>.mlp.fc2@                                  channels.{s} hidden.{s}.{b}
(norm_pre|head.norm)@                                           channels.{last}
head.fc@                                                        . channels.{last}
"""
_CONVMIXER = """
stem.0@                                                         channels.0 . . .
stem.2.STATISTICS                                               channels.0
blocks.<b>.0.fn.0@                                              channels.{b} . . .
blocks.<b>.0.fn.2.STATISTICS                                    channels.{b}
blocks.<b>.1@                                                   channels.{next} channels.{b}
blocks.<b>.3.STATISTICS                                         channels.{next}
head@                                                           . channels.{last}
"""
_RESNET = """
conv1.weight                                                    channels.0 . . .
bn1.STATISTICS                                                  channels.0
layer<s>.<b>.conv1.weight                                       hidden.{s}.{b}.1 channels.{entering} . .
layer<s>.<b>.bn1.STATISTICS                                     hidden.{s}.{b}.1
layer<s>.<b>.downsample.[01].weight                             channels.{stream} channels.{entering} . .
layer<s>.<b>.downsample.[12].STATISTICS                         channels.{stream}
fc@                                                             . channels.{last}
"""
_BASIC = """
layer<s>.<b>.conv2.weight                                       channels.{stream} hidden.{s}.{b}.1 . .
layer<s>.<b>.bn2.STATISTICS                                     channels.{stream}
"""
_BOTTLENECK = """
layer<s>.<b>.conv2.weight                                       hidden.{s}.{b}.2 hidden.{s}.{b}.1 . .
layer<s>.<b>.bn2.STATISTICS                                     hidden.{s}.{b}.2
layer<s>.<b>.conv3.weight                                       channels.{stream} hidden.{s}.{b}.2 . .
layer<s>.<b>.bn3.STATISTICS                                     channels.{stream}
"""
# Rotary positions tie the coordinates of queries and keys to each other, so these are fixed; values are free.
_RMS_GATED = """
(model.)?embed_tokens.weight                                    . ~channels
(model.)?(layers.<b>.(input|post_attention)_layernorm|norm).weight  channels
(model.)?layers.<b>.self_attn.[qkv]_proj.weight                 . ~channels
(model.)?layers.<b>.self_attn.o_proj.weight                     ~channels .
(model.)?layers.<b>.mlp.up_proj.weight                          ~hidden.{b} ~channels
(model.)?layers.<b>.mlp.gate_proj.weight                        hidden.{b} ~channels
(model.)?layers.<b>.mlp.down_proj.weight                        ~channels ~hidden.{b}
lm_head.weight                                                  . ~channels
"""
_MAMBAS = """
(backbone.embeddings|lm_head).weight                            . ~channels
backbone.(layers.<b>.norm|norm_f).weight                        channels
MIXER.[qk]_proj.weight                                          ~qk.{b} ~channels
MIXER.v_proj.weight                                             ~vo.{b} ~channels
MIXER.o_proj.weight                                             ~channels ~vo.{b}
MIXER.out_proj.weight                                           ~channels inner.{b}
"""
# Inner channels only: states start at different rates (S4D), and rows of the low-rank step are not renumbered.
_MAMBA = """
MIXER.in_proj.weight                                            x:inner.{b}+z:inner.{b} ~channels
MIXER.D                                                         inner.{b}
MIXER.conv1d@                                                   inner.{b} . .
MIXER.x_proj.weight                                             . inner.{b}
MIXER.dt_proj@                                                  inner.{b} .
MIXER.A_log                                                     inner.{b} .
"""
# Within heads and groups of states; heads start at different rates, as the states of Mamba do.
_MAMBA_2 = """
MIXER.in_proj.weight          z:inner.{b}+x:inner.{b}+B:state.{b}+C:state.{b}+Delta:=heads.{b} ~channels
MIXER.conv1d@                 x:inner.{b}+B:state.{b}+C:state.{b} . .
MIXER.(A_log|D|dt_bias)       =heads.{b}
MIXER.norm.weight             inner.{b}
"""
_MLP = r"""
(\w+.)*fc1@                                                     hidden .
(\w+.)*fc2@                                                     . hidden
"""


def _table(*texts: str) -> Rules:
    text = "".join(texts).replace("STATISTICS", "(weight|bias|running_mean|running_var)")
    rows = (line.split() for line in text.replace("MIXER", "backbone.layers.<b>.mixer").splitlines())
    return [(name, axes) for name, *axes in filter(None, rows)]


ARCHITECTURES: Mapping[str, Rules] = {
    "ConvNeXt": _table(_CONVNEXT),
    "ConvMixer": _table(_CONVMIXER),
    "ViT": _table(_VIT),
    "transformers' ViT and BERT": _table(_ENCODER),
    "GPT-2": _table(_GPT_2),
    "GPT-NeoX": _table(_GPT_NEOX),
    "ResNet": _table(_RESNET, _BASIC),
    "ResNet with bottlenecks": _table(_RESNET, _BOTTLENECK),
    "RMSNorm with gated MLPs": _table(_RMS_GATED),
    "Mamba": _table(_MAMBAS, _MAMBA),
    "Mamba-2": _table(_MAMBAS, _MAMBA_2),
    "MLP": _table(_MLP),
}


def permutations_by_name(spec: WeightSpec) -> PermutationSpec:
    """The specification of an architecture whose tensors have known names; AnatomyError for another one.

    Units of attention heads of which the number is not known keep their places, and change their signs only.
    """
    nearest: tuple[str, Sequence[str]] = ("", spec.names)
    for name, rules in ARCHITECTURES.items():
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
        f"no permutation specification for this network, there are those of {', '.join(ARCHITECTURES)}: "
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
