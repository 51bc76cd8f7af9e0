"""Reading the attention of a model: the parts of one layer at a time, each tensor once."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from weightscope.anatomy import AttentionPart, NamedTensors, SSMPart, attention, named_tensors
from weightscope.anatomy.attention_modules import find as find_attention
from weightscope.anatomy.matrices import Layered
from weightscope.anatomy.ssm import find as find_state_spaces
from weightscope.anatomy.tensors import MappingTensors
from weightscope.checkpoint import Checkpoint
from weightscope.errors import AnatomyError, UsageError
from weightscope.population import open_network

P = TypeVar("P", bound=Layered)
_PLAIN = {"model", "pytorch_model", "weights", "checkpoint", "open_clip_pytorch_model"}  # uninformative file names


class Once(Mapping[str, Tensor]):
    """A checkpoint that caches fused tensors until `forget`, because each of their parts asks for the whole tensor.

    Args:
        checkpoint: to read from.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._kept: dict[str, Tensor] = {}
        self._fused: set[str] = set()

    def keep(self, parts: Iterable[AttentionPart | SSMPart]) -> None:
        """Declare the parts that will be read; tensors that contain several parts are cached."""
        for part in parts:
            names = [name for group in part.parameters.values() for name in group]
            if isinstance(part, AttentionPart):
                names += [name for group in part.bias_parameters.values() for name in group]
            self._fused |= {name for name in names if names.count(name) > 1}

    def forget(self) -> None:
        """Clear the cache."""
        self._kept.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`; nothing is read."""
        return self._checkpoint.shape(name)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        value = self._checkpoint[name]
        if name in self._fused:
            self._kept[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)


class Reader:
    """One model, its self-attention and its state-space layers.

    Args:
        source: a path, `"PATH.pop::k"`, `hf://org/name`, a `Checkpoint`, a module, a mapping of tensors, or
            an anatomy `NamedTensors`.
        config: the model's config, for sources without one.
        layers: indices of layers; None for all.
        cross: include cross-attention between streams of equal width.

    Attributes:
        source: named tensors for the anatomy.
        checkpoint: None for a model in memory.
        parts: attention modules, in order.
        state_spaces: state-space layers, in order.
        skipped: name of an attention module -> why it is left out.

    Raises:
        AnatomyError: if the model has no such attention and no state-space layer.
        UsageError: if a layer does not exist.
    """

    def __init__(self, source: Any, config: Mapping[str, Any] | None, layers: Any, cross: bool) -> None:
        self.checkpoint: Checkpoint | None = None
        self._once: Once | None = None
        source = open_network(source)
        if isinstance(source, Checkpoint):
            self.checkpoint, self._once = source, Once(source)
            source = MappingTensors(self._once, {**source.config, **(config or {})})
        self.source: NamedTensors = named_tensors(source, config)
        self.state_spaces: list[SSMPart] = find_state_spaces(self.source)
        self.parts: list[AttentionPart] = []
        self.skipped: dict[str, str] = {}
        if not self.state_spaces or find_attention(self.source):
            self.parts, self.skipped = _usable(attention(self.source), cross)
        if layers is not None:
            _there(layers, {part.layer for part in self.parts} | {part.layer for part in self.state_spaces})
            self.parts, self.state_spaces = _chosen(self.parts, layers), _chosen(self.state_spaces, layers)
        if self._once is not None:
            self._once.keep((*self.parts, *self.state_spaces))

    @property
    def bytes_read(self) -> int | None:
        """Bytes read from disk or received from a hub; None for a model in memory."""
        return None if self.checkpoint is None else self.checkpoint.bytes_read

    def forget(self) -> None:
        """Drop the tensors of the last part."""
        if self._once is not None:
            self._once.forget()


def _usable(found: list[AttentionPart], cross: bool) -> tuple[list[AttentionPart], dict[str, str]]:
    skipped: dict[str, str] = {}
    for part in found:
        if part.width != part.kv_width:
            skipped[part.name] = (
                f"queries read {part.width} channels and keys {part.kv_width}, so the products are not square "
                "and have no diagonal"
            )
        elif part.kind == "cross" and not cross:
            skipped[part.name] = "cross-attention: queries and keys read two different streams (cross=True includes it)"
    parts = [part for part in found if part.name not in skipped]
    if not parts:
        name, why = next(iter(skipped.items()))
        raise AnatomyError(f"expected self-attention, found none: `{name}`: {why}")
    return parts, skipped


def _chosen(parts: list[P], layers: Any) -> list[P]:
    return [part for part in parts if part.layer in ({layers} if isinstance(layers, int) else set(layers))]


def _there(layers: Any, there: set[int]) -> None:
    """Refuse layers that do not exist."""
    wanted = {layers} if isinstance(layers, int) else set(layers)
    if not wanted or not wanted <= there:
        odd = sorted(wanted - there) or "none"
        raise UsageError(f"layers: expected some of {min(there)} to {max(there)}, found {odd}")


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
    """Gain (d,) and shift (d,) or None of the normalisation whose output an attention module reads; float64.

    Raises:
        AnatomyError: if there is no such normalisation, or it cannot be identified.
    """
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

    Raises:
        AnatomyError: if the model's rotation is unknown.
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
