"""Named tensors of a model in memory or in a file, with what its config or its modules say about them.

The finders of `weightscope.anatomy` ask a `NamedTensors` for names, shapes, tensors and *hints* (the number of heads,
the state size, ...), so that one adapter serves modules and lazily read checkpoints. They rely on names, shapes and
attributes, never on classes.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weightscope._util.names import natural
from weightscope.anatomy.effective import keep, plain
from weightscope.checkpoint import open_checkpoint
from weightscope.checkpoint.tensors import not_weights
from weightscope.errors import AnatomyError, DataError, SpecError, UsageError


class NamedTensors:
    """Tensors by name (a state dict, a `Checkpoint`) with the model's config; of a module: `ModuleTensors`.

    The mapping may have `shape(name)`, so that shapes are known without reading, `skipped` and `config`, a model's
    `config.json`, before which `config` counts; sub-configs (`text_config`, ...) are found by name.
    """

    names: tuple[str, ...]  # of the tensors that can be read, in the model's order
    every: Mapping[str, str]  # name of each tensor, in the model's order -> why it cannot be read, or nothing
    config: dict[str, Any]
    _tensors: Mapping[str, Any]
    _computed: Collection[str] = ()  # tensors of a module that are computed from others

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        self._tensors = tensors
        self._configs = dict(config or {}), getattr(tensors, "config", None) or {}
        self.config = {**self._configs[1], **self._configs[0]}
        skipped: Mapping[str, str] | None = getattr(tensors, "skipped", None)
        if skipped is None:
            values = {} if callable(getattr(tensors, "shape", None)) else tensors
            skipped = not_weights({name: value for name, value in values.items() if isinstance(value, Tensor)})
        packed = {re.sub(r"(qweight|weight_packed)$", "weight", name): why for name, why in skipped.items()}
        skipped = packed | dict(skipped)
        self._know(sorted({*tensors, *skipped}, key=natural), skipped)

    def _know(self, every: Iterable[str], unreadable: Mapping[str, str]) -> None:
        self._alone: dict[frozenset[str], bool] = {}  # parts of a model -> whether all blocks are in them
        self.found: dict[str, Any] | None = None  # kind of parts -> those found, where an audit asks for them often
        self.reading: list[Any] = []  # what the forward pass of a module shows, once it is traced
        self.every = {name: unreadable.get(name, "") for name in every}
        self.names = tuple(name for name, why in self.every.items() if not why)

    def __contains__(self, name: str) -> bool:
        return self.every.get(name) == ""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it if possible."""
        known = getattr(self._tensors, "shape", None)
        return tuple(known(name) if callable(known) else self._tensors[name].shape)

    def known_shape(self, name: str) -> tuple[int, ...]:
        """`shape`, or () of a tensor that cannot be read and whose shape is not known."""
        try:
            return self.shape(name)
        except (KeyError, RuntimeError):
            return ()

    def get(self, name: str) -> Tensor:
        """The tensor, detached; it shares memory with the model if the model is writable."""
        return torch.as_tensor(self._tensors[name]).detach()

    def writable(self, name: str) -> None:
        """Check that writing into `get(name)` changes the model; DataError if it does not."""
        if name in self._computed:
            raise DataError(f"`{name}` is computed from other tensors; set it by an initialiser or through the module")
        value = self._tensors[name]
        kept = isinstance(self._tensors, (dict, MutableMapping)) and self._tensors[name] is value
        if not kept or not isinstance(value, Tensor):
            raise DataError(f"`{name}` is read from a file and cannot be written; load a state dict or a module first")
        keep(value)

    def identity(self, name: str) -> Any:
        """Equal for two names of one tied tensor."""
        return name

    def trained(self, name: str) -> bool:
        """Whether the tensor is a parameter that requires gradients; True if unknown."""
        return True

    def under(self, path: str) -> list[str]:
        """The names of the tensors below a path, relative to it."""
        prefix = f"{path}." if path else ""
        return [name.removeprefix(prefix) for name in self.every if name.startswith(prefix)]

    def hint(self, path: str, keys: Iterable[str], kind: type | tuple[type, ...] = int) -> Any | None:
        """The value of the first of `keys` that is known at `path` or above it, nearest first; None if unknown."""
        keys = tuple(keys)
        values = (_stated(scope, path, keys, kind) for scope, _ in self._scopes(path))
        return next((value for value in values if value is not None), None)

    def of_width(self, path: str, keys: Iterable[str], width: int) -> tuple[int | None, Any]:
        """A number that is stated for the layers of this width at `path`; and where, None if once for each stage.

        No number of a config of another part of the model, or of one that states other widths only.
        """
        keys = tuple(keys)
        for scope, mine in self._scopes(path):
            if not mine or (found := _stated(scope, path, keys, int)) is None:
                continue
            staged = any(isinstance(scope.get(key), list | tuple) for key in keys)
            lists = (value for value in scope.values() if isinstance(value, list | tuple))
            if staged or any(width in value for value in lists):
                return found, None
            if width in scope.values() or not any(key in scope for key in _WIDTHS):
                return found, id(scope)
        return None, None

    def _scopes(self, path: str) -> list[tuple[Mapping[str, Any], bool]]:
        """The configs that may tell about a path, nearest first, and whether they are about its part of the model."""
        part = frozenset(_parts_in(path) - {"text"})
        if part not in self._alone:
            self._alone[part] = not part or all(_parts_in(n) & part for n in self.every if re.search(r"\d", n))
        alone = self._alone[part]
        given, stored = self._configs
        return _scopes(given, path, alone or "model_type" not in given) + _scopes(stored, path, alone)

    def own(self, path: str, key: str) -> Any | None:
        """The attribute `key` of the layer at `path` itself; None if unknown, as of files."""
        return None


Model = nn.Module | Mapping[str, Any] | NamedTensors | str | Path
"""What `named_tensors` accepts."""


_READING: ContextVar[tuple[nn.Module | None, list[Any]]] = ContextVar("_READING", default=(None, []))


@contextmanager
def read_once(module: nn.Module | None, reading: list[Any] | None = None) -> Iterator[None]:
    """Within the block a module is traced once, or not if the `reading` of one with the same code is there."""
    outer = _READING.get()
    same = outer[1] if outer[0] is module else []
    token = _READING.set((module, same if reading is None else reading))
    try:
        yield
    finally:
        _READING.reset(token)


@contextmanager
def foreign_code() -> Iterator[None]:
    """What runs in the block may change what a module computes, which is then traced anew, within and after."""
    _READING.get()[1].clear()
    with read_once(None):
        yield


class ModuleTensors(NamedTensors):
    """The effective parameters and buffers of an `nn.Module`, in order; `config` counts before its attributes.

    An `example` is an input with which it can be traced. It is traced when it is first asked for parts, and what they
    are does not change later.
    """

    def __init__(
        self, module: nn.Module, config: Mapping[str, Any] | None = None, example: Tensor | None = None
    ) -> None:
        self.module, computed = plain(module)
        self.example = example
        self.config, self._computed = dict(config or {}), {one.name for one in computed}
        self._modules = dict(self.module.named_modules(remove_duplicate=False))
        self._tensors = {}
        for path, inner in self._modules.items():
            own = [*inner._parameters.items(), *inner._buffers.items()]
            self._tensors |= {f"{path}.{key}".lstrip("."): value for key, value in own if value is not None}
        self._know(self._tensors, not_weights(self._tensors))
        known, reading = _READING.get()
        self.reading = reading if known is module else []

    def identity(self, name: str) -> Any:
        return id(self._tensors[name])

    def trained(self, name: str) -> bool:
        return bool(self._tensors[name].requires_grad)

    def hint(self, path: str, keys: Iterable[str], kind: type | tuple[type, ...] = int) -> Any | None:
        keys, words = tuple(keys), path.split(".") if path else []
        paths = (".".join(words[:end]) for end in range(len(words), -1, -1))
        above = (self._modules[one] for one in paths if one in self._modules)
        holders = [holder for module in above for holder in (module, getattr(module, "config", None))]
        values = (getattr(holder, key, None) for holder in holders for key in keys)
        known = (value for value in (*map(self.config.get, keys), *values) if _is(value, kind))
        return next(known, None)

    def own(self, path: str, key: str) -> Any | None:
        return getattr(self._modules.get(path), key, None)


# Words of paths and of the names of configs within a config (`vision_config`) -> the part of a model.
_PART_OF = dict.fromkeys(("vision", "visual", "image", "vpm", "img"), "vision")
_PART_OF |= dict.fromkeys(("audio", "speech"), "audio") | dict.fromkeys(("text", "language", "llm", "lm"), "text")
_PART_OF |= dict.fromkeys(("resampler", "qformer", "perceiver", "connector", "projector", "merger"), "connector")
_BACKBONE = re.compile(r"(^|\.)(backbone|pixel_level_module\.encoder)(\.|$)")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "width")
_ASPECTS = ("ssm_cfg", "attn_config", "attn_cfg", "model_args", "model_cfg")  # hold settings of the whole model


def _parts_in(path: str) -> set[str]:
    return {_PART_OF[word] for word in re.split(r"[._]", path) if word in _PART_OF}


def of_part(path: str, name: str) -> bool:
    """Whether a path is in a part of a model such as "vision"; in "text" if it names no other."""
    parts = _parts_in(path)
    return _PART_OF.get(name) in (parts or {"text"})


def _scopes(config: Mapping[str, Any], path: str, mine: bool) -> list[tuple[Mapping[str, Any], bool]]:
    """The config of the part of the model that `path` is in, those around it, and settings inside; see `NamedTensors`.

    Where the config has one for the part, those around it are not about it.
    """
    words = f"_{path.replace('.', '_')}_"
    places: list[tuple[int, Mapping[str, Any]]] = []
    for key, one in config.items():
        if isinstance(one, Mapping) and key not in _ASPECTS:
            name = re.sub(r"_(config|cfg)$", "", key)
            part = _PART_OF.get(name, name)
            alike = [word for word, other in _PART_OF.items() if other == part] or [name]
            at = [words.find(f"_{word}_") for word in alike]
            at += [found.start()] if name == "backbone" and (found := _BACKBONE.search(path)) else []
            at += [len(words)] if part == "text" and not _parts_in(path) else []
            places += [(min(at), one)] if (at := [i for i in at if i >= 0]) else []
    inner = min(places, key=lambda place: place[0])[1] if places else None
    out = [] if inner is None else _scopes(inner, path, True)
    own = mine and (inner is None or not _parts_in(path))
    out.append((config, own))
    for key in _ASPECTS:
        if isinstance(config.get(key), Mapping):
            out += _scopes(config[key], path, own)
    return out


def _stated(scope: Mapping[str, Any], path: str, keys: Iterable[str], kind: type | tuple[type, ...]) -> Any | None:
    side = next((s for s in ("decoder", "encoder") if s in path.split(".")), None)
    for key in keys:
        sided = f"{side}_{key.removeprefix('num_')}" if side else key
        for value in (scope.get(sided), scope.get(key)):
            value = _of_stage(value, path) if kind is int else value
            if _is(value, kind):
                return value
    return None


_STAGE = re.compile(r"(?:^|\.)(?:layers?|stages?|blocks?|down_blocks)[._]?(\d+)(?:\.|$)")
_UP = re.compile(r"(?:^|\.)up_blocks\.(\d+)\.")


def _of_stage(value: Any, path: str) -> Any:
    """The entry of the path's stage, where a config has one for each (`"num_heads": [3, 6, 12, 24]` of Swin).

    U-Nets have theirs from the top to the middle, and back.
    """
    if not isinstance(value, list | tuple):
        return value
    if path.startswith("mid_block."):
        return value[-1]
    if up := _UP.search(path):
        return value[-1 - int(up[1])] if int(up[1]) < len(value) else None
    stage = _STAGE.search(path)
    return value[int(stage[1])] if stage and int(stage[1]) < len(value) else None


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance, without counting a bool as a number."""
    asked = bool in kind if isinstance(kind, tuple) else kind is bool
    return isinstance(value, kind) and (asked or not isinstance(value, bool))


def named_tensors(model: Model, config: Mapping[str, Any] | None = None) -> NamedTensors:
    """The `NamedTensors` of a module, a mapping of tensors (state dict, `Checkpoint`), or what `Checkpoint` opens.

    A file is read lazily. `config` has hints such as `{"num_heads": 3}`, which count before those of the model.
    AnatomyError for anything else.

    Example:
        >>> named_tensors("hf://openai-community/gpt2").shape("h.0.attn.c_attn.weight")
        (768, 2304)
    """
    if not isinstance(config, Mapping | None):
        raise UsageError(f'config: expected names and numbers such as {{"num_heads": 3}}, found {config!r}')
    if isinstance(model, str | Path):
        model = open_checkpoint(model)
    if isinstance(model, NamedTensors):
        return model
    if isinstance(model, nn.Module):
        return ModuleTensors(model, config)
    if isinstance(model, Mapping):
        return NamedTensors(model, config)
    raise AnatomyError(
        f"expected a module, a mapping of tensors, a path or hf://org/name, found {type(model).__name__}"
    )


Rows = slice | Tensor | None
"""Rows of a matrix: a slice, an index tensor, or None for all."""


def span(rows: Tensor, total: int) -> Rows:
    """Rows as a slice where they follow each other, None for all."""
    start, n = int(rows[0]), len(rows)
    if not bool((rows == torch.arange(start, start + n)).all()):
        return rows
    return None if (start, n) == (0, total) else slice(start, start + n)


@dataclass(frozen=True)
class Slot:
    """Rows of a matrix in a tensor."""

    name: str  # of the tensor
    rows: Rows = None  # of the (out, in) matrix
    transposed: bool = False  # the tensor stores (in, out), as transformers' Conv1D does
    vector: bool = False  # the tensor is no matrix (a bias, filters), taken as it is
    shape: tuple[int, ...] | None = None  # in which the rows are read, such as (heads, rows of one, columns)
    swapped: bool = False  # after which the last two axes are exchanged

    def size(self, tensors: NamedTensors) -> tuple[int, int]:
        """(rows, columns) of the (out, in) matrix, without reading it."""
        shape = tensors.shape(self.name)
        rows, columns = (shape[1], shape[0]) if self.transposed else shape[:2]
        if self.rows is None:
            return rows, columns
        return len(range(rows)[self.rows]) if isinstance(self.rows, slice) else len(self.rows), columns

    def count(self, tensors: NamedTensors) -> int:
        """The number of rows of which `rows` are some."""
        shape = tensors.shape(self.name)
        return math.prod(shape[:2]) if self.vector else shape[int(self.transposed)]

    def _view(self, tensors: NamedTensors) -> Tensor:
        tensor = tensors.get(self.name)
        if self.vector:
            return tensor
        return tensor.flatten(1).T if self.transposed else tensor.flatten(1)

    def read(self, tensors: NamedTensors) -> Tensor:
        """A copy of the rows, float32 or better: (rows, columns), (rows,), or the shape of the slot."""
        view = self._view(tensors)
        value = view if self.rows is None else view[self.rows]
        value = value.to(value.dtype if value.itemsize >= 4 else torch.float32, copy=True)
        value = value if self.shape is None else value.reshape(self.shape)
        return value.mT if self.swapped else value

    @torch.no_grad()
    def write(self, tensors: NamedTensors, value: Tensor) -> None:
        """Write rows in place, in the shape of `read`, cast to the tensor's data type and device."""
        tensors.writable(self.name)
        view = self._view(tensors)
        rows = ... if self.rows is None else self.rows  # a tensor may be a single number
        stored = view[rows].shape
        shape = tuple(self.shape or stored)
        expected = (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape
        if tuple(value.shape) != expected:
            raise SpecError(f"`{self.name}`: expected values of shape {expected}, found {tuple(value.shape)}")
        view[rows] = cast(f"`{self.name}`", (value.mT if self.swapped else value).reshape(stored), view)


class OneTensor:
    """A part that is one tensor."""

    _tensors: NamedTensors
    _slot: Slot

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the tensors that `read` and `write` touch."""
        return (self._slot.name,)

    def read(self) -> Tensor:
        """A copy of the numbers, float32 or better."""
        return self._slot.read(self._tensors)

    def write(self, value: Tensor) -> None:
        """Write numbers in place; the exact inverse of `read`."""
        self._slot.write(self._tensors, value)


class InSlots:
    """A part whose matrices and biases are slots, by name: "q" or "fc1"."""

    name: str
    _tensors: NamedTensors
    _weights: dict[str, Slot]
    _biases: dict[str, Slot]

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The names of the tensors that each matrix reads and writes: matrix -> names."""
        return {part: (slot.name,) for part, slot in self._weights.items()}

    @property
    def bias_parameters(self) -> dict[str, tuple[str, ...]]:
        """The names of the bias tensors, for the matrices that have one."""
        return {part: (slot.name,) for part, slot in self._biases.items()}

    def _slot(self, part: str) -> Slot:
        if part not in self._weights:
            there = ", ".join(map(repr, self._weights))
            raise UsageError(f"`{self.name}`: part: expected one of {there}, found {part!r}")
        return self._weights[part]

    def read(self, part: Any) -> Tensor:
        """A copy of one matrix, float32 or better, in torch's (out, in) layout."""
        return self._slot(part).read(self._tensors)

    def write(self, part: Any, value: Tensor) -> None:
        """Write a matrix in place; the exact inverse of `read`."""
        self._slot(part).write(self._tensors, value)

    def read_bias(self, part: Any) -> Tensor | None:
        """A copy of the bias of a matrix, one entry for each row; None if the model has none."""
        self._slot(part)
        return self._biases[part].read(self._tensors) if part in self._biases else None

    def write_bias(self, part: Any, value: Tensor) -> None:
        """Write a bias in place; the exact inverse of `read_bias`."""
        self._slot(part)
        if part not in self._biases:
            raise SpecError(f"`{self.name}` has no bias for {part}")
        self._biases[part].write(self._tensors, value)


def check_separate(matrices: Iterable[tuple[InSlots, str]]) -> None:
    """UsageError if two matrices that are to be written share entries, so that the second would replace the first."""
    known: dict[Any, list[tuple[Slot, Tensor, str]]] = {}
    for part, key in matrices:
        slot, name = part._slot(key), f"{key} of {f'`{part.name}`' if part.name else 'the module itself'}"
        rows = torch.arange(slot.count(part._tensors))
        rows = rows if slot.rows is None else rows[slot.rows]
        others = known.setdefault(part._tensors.identity(slot.name), [])
        for other, theirs, called in others:
            if other.transposed != slot.transposed or bool(torch.isin(rows, theirs).any()):
                raise UsageError(
                    f"expected a tensor for each matrix that is set, found `{slot.name}` as {called} and {name}; "
                    "choose layers or parts that share none, or untie them"
                )
        others.append((slot, rows, name))


def cast(name: str, value: Tensor, target: Tensor) -> Tensor:
    """A value in the type and on the device of the weight that it replaces; a DataError if it overflows there."""
    out = value.detach().to(device=target.device, dtype=target.dtype)
    if out.dtype != value.dtype and bool((out.isinf() & value.to(out.device).isfinite()).any()):
        raise DataError(f"{name}: the values overflow in {target.dtype}; use a wider type or a smaller scale")
    return out


@dataclass(frozen=True)
class Unread:
    """What looks like a part of a network and cannot be read."""

    name: str  # of the tensor at fault, or of the module
    why: str
    layer: int | None = None  # as of a part; None if only its names look like one
    path: str = ""  # of its module

    def __str__(self) -> str:
        return f"`{self.name}` {self.why}"


P = TypeVar("P")


class Parts(list[P]):
    """The parts of one kind in order; `unread` are those that cannot be read, `layers` is the number of both."""

    unread: tuple[Unread, ...] = ()
    layers: int = 0


def path_of(one: Any) -> str:
    """The path of a part, or of the module of what is unread."""
    return one.path if isinstance(one, Unread) else one.name


def tensor_of(one: Any) -> str:
    """The tensor by which a part, or what is unread, has its place in the order of the model."""
    return one.name if isinstance(one, Unread) else next(iter(one._weights.values())).name


def places(tensors: NamedTensors, schemes: Mapping[Any, Sequence[str]], build: Callable[[str, Any], Any]) -> list[Any]:
    """The parts that `build(prefix, scheme)` reads where the names of a scheme occur, or an `Unread`, in order.

    Of several schemes, a prefix has the first one whose tensors all exist. `build` returns None if the shapes do not
    fit. A prefix where they do not, or without some of the tensors, is listed if it differs from the prefix of a part
    in numbers only. Tied tensors are listed once.
    """
    anchors = {(key, scheme) for scheme, keys in schemes.items() for key in keys}
    found: dict[str, tuple[int, set[Any]]] = {}  # prefix -> place in the order of names, schemes
    ends = tuple(key for key, _ in anchors)
    for i, name in enumerate(tensors.every):
        if not name.endswith(ends):
            continue
        for prefix, scheme in ((name.removesuffix(key), scheme) for key, scheme in anchors if name.endswith(key)):
            if not prefix or prefix.endswith("."):
                found.setdefault(prefix, (i, set()))[1].add(scheme)
    out: dict[str, tuple[int, Any]] = {}
    seen: set[Any] = set()
    like: dict[str, Any] = {}  # template of a part's prefix -> its scheme
    members: dict[str, set[str]] = {}  # name of a part's tensor, relative to the prefix -> such templates
    for prefix, (i, possible) in found.items():
        whole = (s for s in schemes if s in possible and all(prefix + key in tensors.every for key in schemes[s]))
        if (scheme := next(whole, None)) is not None:
            one = _read(tensors, prefix, schemes[scheme], partial(build, prefix, scheme))
            out[prefix] = i, one
            if not isinstance(one, Unread | str):
                like[template(prefix)] = scheme
                for slot in (*one._weights.values(), *one._biases.values()):
                    members.setdefault(slot.name.removeprefix(prefix), set()).add(template(prefix))
    for i, name in enumerate(tensors.every):
        for key in [key for key in members if name.endswith(key)]:
            prefix = name.removesuffix(key)
            if prefix not in out and (alike := template(prefix)) in members[key]:
                missing = next(prefix + key for key in schemes[like[alike]] if prefix + key not in tensors.every)
                out[prefix] = i, Unread(missing, "(missing)", path=prefix.removesuffix("."))
    kept = []
    for prefix, (_, one) in sorted(out.items(), key=lambda item: item[1][0]):
        if isinstance(one, str) and template(prefix) in like:
            one = Unread(prefix.removesuffix("."), one, path=prefix.removesuffix("."))
        if isinstance(one, Unread):
            kept.append(one)
        elif not isinstance(one, str):
            tied = tuple((tensors.identity(slot.name), str(slot.rows)) for slot in one._weights.values())
            kept += [one] * (tied not in seen)
            seen.add(tied)
    return kept


def _read(tensors: NamedTensors, prefix: str, keys: Sequence[str], build: Callable[[], Any]) -> Any:
    """The part at a prefix, what is unread there, or the shapes that fit no part."""
    path, names = prefix.removesuffix("."), [prefix + key for key in keys]
    if bad := next((name for name in names if name not in tensors), None):
        return Unread(bad, f"({tensors.every[bad]})", path=path)
    try:
        part = build()
        if (
            part
            and not isinstance(part, Unread)
            and any(0 in tensors.shape(slot.name) for slot in part._weights.values())
        ):
            raise AnatomyError(f"`{path}`: a matrix without entries")
    except AnatomyError as error:
        return Unread(path, f"({str(error).removeprefix(f'`{path}`: ')})", path=path)
    return part or f"(of shapes {', '.join(str(tensors.shape(name)) for name in names)})"


def template(path: str) -> str:
    """A path without its numbers: what layers of one kind have in common."""
    return re.sub(r"\d+", "#", path)


def in_layers(
    found: Iterable[Any],
    tensors: NamedTensors,
    together: Callable[[Any, Any], bool] = lambda last, one: False,
    owner: Callable[[str], str | None] | None = None,
    ran: Collection[str] = (),
) -> Parts[Any]:
    """The parts and what is unread, numbered; `together` says whether one is in the layer of the last one.

    Matrices of modules that are only called like a part, at least two of which `owner` maps to one path in or around
    nothing that was found, are unread, too, but for those that `ran`.
    """
    found, out, unread, last, layer = list(found), Parts[Any](), list[Unread](), None, -1
    for one in found:
        layer += last is None or not together(last, one)
        last = one
        (unread if isinstance(one, Unread) else out).append(replace(one, layer=layer))
    if owner is not None:
        unread += [Unread(name, str(tensors.shape(name))) for name in _resembling(tensors, found, owner, ran)]
    out.unread, out.layers = tuple(unread), layer + 1
    return out


def _resembling(
    tensors: NamedTensors, found: Sequence[Any], owner: Callable[[str], str | None], ran: Collection[str]
) -> list[str]:
    """The matrices that are only called like a part, see `in_layers`, in the order of the model."""
    parts = [one for one in found if not isinstance(one, Unread)]
    done = {tensors.identity(slot.name) for part in parts for slot in part._weights.values()}
    modules: dict[str, list[str]] = {}
    once = {tensors.identity(name): name for name in reversed(tensors.names)}  # of tied tensors, the first name
    for name in (name for name in tensors.names if once[key := tensors.identity(name)] == name and key not in done):
        shape = tensors.shape(name)
        stack = len(shape) == 3 and min(shape[1:]) > 1  # of matrices (experts)
        matrix = len(shape) >= 2 and min(shape[:2]) > 1 and all(n == 1 for n in shape[2:])  # or a 1 x 1 convolution
        if (stack or matrix) and (module := owner(name)) is not None:
            modules.setdefault(module, []).append(name)
    alike = set[str]()
    for module, names in modules.items():
        pairs = (pair for path in map(path_of, found) for pair in ((module, path), (path, module)))
        nested = any(outer == "" or f"{inner}.".startswith(f"{outer}.") for inner, outer in pairs)
        if (len(names) > 1 or "qkv" in names[0].split(".")) and not nested:
            alike.update(names)
    return [name for name in tensors.names if name in alike and name not in ran]


def module_of(names: Sequence[str]) -> str:
    """The path of the module that has some weights: `attn` of `attn.q.weight`, `attn.qkv.weight`, `attn.in_proj`."""
    words = [name.split(".") for name in names]
    return ".".join(shared(w[:-2] if w[-1] in ("weight", "kernel") else w[:-1] for w in words))


def shared(paths: Iterable[Sequence[str]]) -> list[str]:
    """The components with which all of some paths begin."""
    return [w[0] for w in takewhile(lambda w: len(set(w)) == 1, zip(*paths, strict=False))]


def deepest(name: str, pattern: re.Pattern[str]) -> str | None:
    """The path of a tensor up to its last module whose name matches."""
    words = name.split(".")
    return next((".".join(words[: i + 1]) for i in range(len(words) - 2, -1, -1) if pattern.search(words[i])), None)
