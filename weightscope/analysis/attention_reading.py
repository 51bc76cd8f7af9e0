"""Reading the attention of a model: one layer at a time, and what stands before it (norms, rotations)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy import AttentionPart, NamedTensors, SSMPart, attention, chosen_layers, named_tensors
from weightscope.anatomy.attention_modules import find as find_attention
from weightscope.anatomy.ssm import find as find_state_spaces
from weightscope.anatomy.tensors import MappingTensors
from weightscope.checkpoint import Checkpoint
from weightscope.errors import AnatomyError
from weightscope.population import open_network

_PLAIN = {"model", "pytorch_model", "weights", "checkpoint", "open_clip_pytorch_model"}  # uninformative file names


class _Cached(Mapping[str, Tensor]):
    """A checkpoint that keeps fused tensors until `kept.clear()`, because each of their parts asks for the whole."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.kept: dict[str, Tensor] = {}
        self.fused: set[str] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fused:
            return self._checkpoint[name]
        if name not in self.kept:
            self.kept[name] = self._checkpoint[name]
        return self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


class AttentionReader:
    """One model, its self-attention and its state-space layers."""

    def __init__(self, source: Any, config: Mapping[str, Any] | None, layers: Any, cross: bool) -> None:
        source = open_network(source)
        self.checkpoint = source if isinstance(source, Checkpoint) else None
        cached = None
        if self.checkpoint is not None:
            cached = _Cached(self.checkpoint)
            source = MappingTensors(cached, {**self.checkpoint.config, **(config or {})})
        self.tensors: NamedTensors = named_tensors(source, config)
        state_spaces = find_state_spaces(self.tensors)
        found = find_attention(self.tensors) if state_spaces else attention(self.tensors)
        self.skipped = {part.name: why for part in found if (why := _unusable(part, cross))}
        if found and len(self.skipped) == len(found):
            name, why = next(iter(self.skipped.items()))
            raise AnatomyError(f"expected self-attention, found none: `{name}`: {why}")
        usable = [part for part in found if part.name not in self.skipped]
        chosen: list[Any] = chosen_layers([*usable, *state_spaces], layers)
        self.parts: list[AttentionPart] = [part for part in chosen if isinstance(part, AttentionPart)]
        self.state_spaces: list[SSMPart] = [part for part in chosen if isinstance(part, SSMPart)]
        self._kept = {} if cached is None else cached.kept
        if cached is not None:
            for part in chosen:
                groups = [*part.parameters.values(), *getattr(part, "bias_parameters", {}).values()]
                names = [name for group in groups for name in group]
                cached.fused |= {name for name in names if names.count(name) > 1}

    def forget(self) -> None:
        """Drop the tensors of the last part."""
        self._kept.clear()


def _unusable(part: AttentionPart, cross: bool) -> str | None:
    """Why the products of an attention module are left out; None if they are not."""
    if part.width != part.kv_width:
        return (
            f"queries read {part.width} channels and keys {part.kv_width}, so the products are not square "
            "and have no diagonal"
        )
    if part.kind == "cross" and not cross:
        return "cross-attention: queries and keys read two different streams (cross=True includes it)"
    return None


def name_of(source: Any) -> str:
    """A short label of a source: the last informative part of its path."""
    if isinstance(source, Checkpoint):
        source = source.source
    if not isinstance(source, str | Path):
        return "state dict" if isinstance(source, Mapping) else type(source).__name__
    path = Path(str(source).removeprefix("hf://").partition("@")[0])
    stem = path.stem if path.suffix in (".safetensors", ".pt", ".pth", ".bin") else path.name
    return path.absolute().parent.name if stem in _PLAIN else stem or str(source)


# --- the normalisation before an attention module ------------------------------------------------------------------

_NORMS = (
    *("norm1", "ln_1", "layernorm_before", "input_layernorm", "layer_norm1", "self_attn_layer_norm"),
    *("attention_norm", "ln_attn", "attn_norm", "ln1", "norm_1"),
)
# Model types whose norms have the same names but follow the attention.
_POST_NORM = {"bart", "bert", "distilbert", "marian", "fsmt", "blenderbot-small", "swinv2", "wav2vec2", "hubert"}


def gain_before(source: NamedTensors, part: AttentionPart) -> tuple[Tensor, Tensor | None]:
    """Gain (d,) and shift (d,) or None of the normalisation whose output an attention module reads; float64."""
    block = part.name.rpartition(".")[0]
    kind = source.hint(part.name, ("model_type",), str)
    for parent in (block, block.rpartition(".")[0]):
        prefix = f"{parent}." if parent else ""
        candidates = (*_NORMS, "layer_norm") if part.name.endswith("SelfAttention") else _NORMS
        for name in (f"{prefix}{candidate}" for candidate in candidates):
            if f"{name}.weight" not in source or source.shape(f"{name}.weight") != (part.width,):
                continue
            if kind in _POST_NORM or f"{part.name}.logit_scale" in source or _after(source, part, parent):
                break
            gain = source.get(f"{name}.weight").double()
            if kind is not None and kind.startswith("gemma"):
                gain = gain + 1  # Gemma stores gain - 1
            shift = source.get(f"{name}.bias").double() if f"{name}.bias" in source else None
            return gain, shift
    raise AnatomyError(
        f"`{part.name}`: found no normalisation whose gain could be folded into it: the model normalises after the "
        "attention, or under an unknown name; compute without fold_norms"
    )


def _after(source: NamedTensors, part: AttentionPart, parent: str) -> bool:
    """Whether torch's own transformer layer normalises after the attention; a state dict cannot tell, and counts."""
    if f"{part.name}.in_proj_weight" not in source or f"{parent}.linear1.weight" not in source:
        return False
    return source.own(parent, "norm_first") is not True


# --- rotations of queries and keys by position ---------------------------------------------------------------------

# Families whose rotation is of one dimension, over halves of a head, with the frequencies of their config.
_HALVES = {
    *("llama", "mistral", "mixtral", "gemma", "gemma2", "gpt_neox", "phi", "phi3", "qwen2", "qwen3", "qwen2_moe"),
    *("stablelm", "olmo", "olmo2", "starcoder2", "granite", "persimmon", "falcon"),
}
_PAIRS = {"gptj", "codegen", "cohere", "cohere2"}  # the same over neighbouring channels


def mean_rotation(source: NamedTensors, part: AttentionPart, positions: range) -> Tensor:
    """The rotation of queries against keys, averaged over relative positions: (k, k), for `q @ R @ k^T`.

    A query at position m and a key at n give `q R(m - n) k^T`; in the plane of channels (i, j) that turns with
    frequency w, R(t) is [[cos wt, sin wt], [-sin wt, cos wt]]. The mean is over t in `positions`, and over -t as well
    for a model that is not causal.
    """
    k, kind = part.head_width, source.hint(part.name, ("model_type",), str)
    scaling = source.hint(part.name, ("rope_parameters", "rope_scaling"), dict) or {}
    type_ = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _HALVES | _PAIRS or type_ not in ("default", "linear"):
        raise AnatomyError(
            f"`{part.name}`: the rotation of positions of model type {kind!r} with scaling {type_!r} is not known; "
            "use relative position 0 (rotary='zero'), which does not depend on it"
        )
    base = scaling.get("rope_theta")
    base = base or source.hint(part.name, ("rope_theta", "rotary_emb_base"), (int, float)) or 10000.0
    share = scaling.get("partial_rotary_factor")
    share = share or source.hint(part.name, ("partial_rotary_factor", "rotary_pct"), (int, float)) or 1.0
    turned = source.hint(part.name, ("rotary_dim",)) or int(k * share)
    half = turned // 2
    step = torch.arange(half, dtype=torch.float64)
    angles = base ** (-step / half) / (scaling.get("factor", 1.0) if type_ == "linear" else 1.0)
    turns = torch.tensor(list(positions), dtype=torch.float64)[:, None] * angles
    cosine, sine = turns.cos().mean(0), turns.sin().mean(0) * (part.causal is not False)
    first = 2 * step.long() if kind in _PAIRS else step.long()
    second = first + (1 if kind in _PAIRS else half)
    out = torch.eye(k, dtype=torch.float64)
    out[first, first], out[second, second] = cosine, cosine
    out[first, second], out[second, first] = sine, -sine
    return out
