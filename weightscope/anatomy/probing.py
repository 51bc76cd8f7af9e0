"""Measure what a module's own forward pass does with the projections that were read of it.

Names and shapes do not tell how the rows of a packed projection are ordered, whether heads are mixed, how logits are
scaled and masked, or whether positions enter them. So a copy in float64 gets weights through the parsed views, and runs
on tokens that are all alike (a), or all but one (b, token j):

- alike, they are averaged to themselves: every row of the output is `sum_h a V_h O_h`;
- with a V = 0, row i is `sum_h A_h,ij b V_h O_h`, from which follow the weights A_h,ij of all heads;
- Q = 0 shows mask and positions: without them A_ij = 1/n, under a causal mask 1/(i + 1) from i = j on;
- with a K = 0, the log odds of A_h,ij grow by `scale x_i Q_h (b K_h)^T`. Row j is at relative position 0, where
  all heads have one scale; so have the other rows, unless queries and keys are rotated;
- of normalised queries or keys, the length does not matter, and those of one token and head change its weights alone.
"""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import replace
from itertools import chain, repeat
from math import isqrt, prod
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from weightscope.anatomy.attention_modules import find
from weightscope.anatomy.attention_part import AttentionPart, PartName
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, Parts, Unread

_SAME = 1e-3  # relative; modules compute their softmax in float32, and what is misread differs by more than 1e-1
_TOKENS = (4, 16, 49, 64, 196)  # numbers of tokens that are tried, all square
_FEW = 300  # tokens up to which a module is first called as its model calls it
# What keys and values read.
_STREAMS: dict[str, PartName] = {"value": "v", "v": "v"}
_STREAMS |= dict.fromkeys(("key", "k", "context", "memory", "key_value_states", "encoder_hidden_states"), "k")
_UNKNOWN = "could not be run on random tokens, so that its names are not confirmed"

Verdict = dict[str, Any] | str  # what was measured, or why the part is not read
Make = Callable[[tuple[int, ...], int], Any]  # shape and axis of the channels -> an input
Call = Callable[[nn.Module, Make], Any]

_KNOWN: dict[Any, Verdict] = {}  # class, settings, other tensors and inputs of a module -> verdict; many are alike
_INTERNAL = vars(nn.Module()).keys() - {"training"}


def find_attention(tensors: NamedTensors) -> Parts[AttentionPart]:
    """All attention modules, in order, that compute what their names say, as measured; the others are unread.

    Modules without code (a state dict, a file, a container) are read by their names.
    """
    parts, out = find(tensors), Parts[AttentionPart]()
    verdicts = probed(tensors, parts)
    out.unread, out.layers = parts.unread, parts.layers
    for part in parts:
        verdict = verdicts.get(part.name, {})
        if isinstance(verdict, str):
            out.unread += (Unread(part.name, verdict, part.layer),)
        else:
            out.append(replace(part, **verdict))
    return out


def probed(tensors: NamedTensors, parts: Sequence[AttentionPart]) -> dict[str, Verdict]:
    """Name of each part with code -> what was measured of it, or why it cannot be read."""
    out: dict[str, Verdict] = {}
    if not isinstance(tensors, ModuleTensors):
        return out
    found = {part.name: (part, path) for part in parts if (path := _holder(tensors, part)) is not None}
    inputs = _Inputs(tensors.module, [path for _, path in found.values()])
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for name, (part, path) in found.items():
            key = _key(tensors.module.get_submodule(path), path, part, inputs)
            if key not in _KNOWN:
                if len(_KNOWN) > 1000:
                    _KNOWN.clear()
                # in a context of its own: an initialiser need not keep the weights of the copy
                _KNOWN[key] = Context().run(_verdict, tensors.module.get_submodule(path), path, part, inputs)
            out[name] = _KNOWN[key]
    return out


def _holder(tensors: ModuleTensors, part: AttentionPart) -> str | None:
    """The path of the smallest module with code that has all four projections; None without code or numbers."""
    names = [slot.name for slot in part._weights.values()]
    words = [name.split(".")[:-1] for name in names] + [part.name.split(".")]
    shared = next((i for i, w in enumerate(zip(*words, strict=False)) if len(set(w)) > 1), min(map(len, words)))
    paths = [".".join(words[0][:end]) for end in range(shared, -1, -1)]
    coded = (p for p in paths if type(tensors.module.get_submodule(p)).forward is not nn.Module.forward)
    return None if any(tensors.get(name).is_meta for name in names) else next(coded, None)


def _key(holder: nn.Module, path: str, part: AttentionPart, inputs: "_Inputs") -> Any:
    """Equal for parts of which the same is measured: all that is in a module and given to it, but for its weights."""
    own = {slot.name for slot in (*part._weights.values(), *part._biases.values())}
    held = [inputs.others(path, part, plant=plant) for plant in (False, True)] if _takes_more(holder) else []
    for where, inner in holder.named_modules(remove_duplicate=False):
        kept = {key: value for key, value in vars(inner).items() if key not in _INTERNAL}
        both = [*inner._parameters.items(), *inner._buffers.items()]
        tensors = {f"{path}.{where}".strip(".") + f".{key}": value for key, value in both}
        held.append((where, kept, {name: value for name, value in tensors.items() if name.lstrip(".") not in own}))
    try:
        state: Any = pickle.dumps(pytree.tree_map(_as_bytes, held))
    except Exception:  # noqa: BLE001 - sparse, sharded, not to be pickled: not known to be that of another module
        state = object()
    slots = tuple((slot.name[len(path) :], str(slot.rows)) for slot in part._weights.values())
    return type(holder), repr(holder), state, slots, repr(replace(part, layer=0, name=""))


def _takes_more(holder: nn.Module) -> bool:
    """Whether the module above may give more to a module than its tokens: a mask, positions."""
    return len(inspect.signature(holder.forward).parameters) > 1


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(value.dtype), tuple(value.shape), bytes(numbers)


def _verdict(holder: nn.Module, path: str, part: AttentionPart, inputs: "_Inputs") -> Verdict:
    trial = functools.cache(lambda dtype: _Trial(holder, path, part, dtype))
    like_model = zip(inputs.calls(path, part), repeat(True))
    few, more = (zip(_direct(holder, part, counts), repeat(False)) for counts in (_TOKENS[:1], _TOKENS[1:]))
    short = _takes_more(holder) and inputs.few(path, part)
    reason = ""
    for call, decides in chain(like_model, few, more) if short else chain(few, like_model, more):
        for dtype in (torch.float64, torch.float32) if decides else (torch.float64,):  # not all code runs in float64
            try:
                found = trial(dtype).measured(call)
            except _OtherwiseError as error:  # a few tokens may be padded or pooled, so that others are tried
                reason = f"computes something else: {error}"
                if decides or (error.sure and not short):
                    return reason
            except Exception:  # noqa: BLE001 - sharded, quantised, or called in a way that it does not know
                continue
            else:
                if not found["positional"]:
                    planted = next(inputs.calls(path, part, plant=True), call) if decides else call
                    found["positional"] = _biased_if_planted(holder, path, part, inputs, planted, dtype)
                if not decides:  # the module above it may give it a mask or positions
                    found["causal"] = found["causal"] or (None if _takes_more(holder) else False)
                    found["rotary"] = found["rotary"] or part.rotary
                return found
    return reason or _UNKNOWN


def _empty_table(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and not tensor.any()


def _biased_if_planted(
    holder: nn.Module, path: str, part: AttentionPart, inputs: "_Inputs", call: Call, dtype: torch.dtype
) -> bool:
    """Whether tables that are still zero, such as those of relative positions, would enter the map."""
    own = {slot.name for slot in part._weights.values()}
    inside = any(_empty_table(v) for n, v in holder.named_parameters() if f"{path}.{n}".lstrip(".") not in own)
    given = [pytree.tree_map(_as_bytes, inputs.others(path, part, plant=plant)) for plant in (False, True)]
    if not inside and given[0] == given[1]:
        return False
    try:
        return bool(_Trial(holder, path, part, dtype, plant=True).measured(call)["positional"])
    except _OtherwiseError:
        return True


# --- how a module is called -------------------------------------------------------------------------------------------


def _direct(holder: nn.Module, part: AttentionPart, counts: Sequence[int]) -> Iterator[Call]:
    """Calls by the names of the parameters, with few tokens, as a sequence or as a map."""
    named = [p for p in inspect.signature(holder.forward).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    stated = [getattr(holder, name, None) for name in ("window_size", "window_area", "N", "resolution", "grid")]
    hints = [prod(n) for n in stated if isinstance(n, (tuple, list)) and all(isinstance(m, int) for m in n)]
    hints += [n**power for n in stated if isinstance(n, int) for power in (1, 2)]
    special = getattr(holder, "prefix", 0)
    hints += [n + special for n in hints if isinstance(special, int) and special]
    for count in dict.fromkeys([*counts, *(n for n in hints if 0 < n < 1000)]):
        side = isqrt(count)
        layouts: list[tuple[int, ...]] = [(1, count, -1), (count, 1, -1)]
        layouts += [(1, -1, side, side), (1, side, side, -1)] if side**2 == count else []
        for layout in layouts:

            def call(module: nn.Module, make: Make, layout: tuple[int, ...] = layout, count: int = count) -> Any:
                given: dict[str, Any] = {}
                for p in named:
                    needed = p.default is inspect.Parameter.empty
                    if p is named[0] or (p.name in _STREAMS and (needed or part.kind == "cross")):
                        width = part._weights[_STREAMS.get(p.name, "q")].size(part._tensors)[1]
                        given[p.name] = make(tuple(width if n == -1 else n for n in layout), layout.index(-1))
                    elif p.name == "position_embeddings":
                        angles = torch.arange(count)[None, :, None] / torch.arange(1, part.head_width // 2 + 1)
                        given[p.name] = tuple(torch.cat([f(angles)] * 2, -1).double() for f in (torch.cos, torch.sin))
                    elif needed:
                        given[p.name] = None
                return module(**given)

            yield call


class _Stream(NamedTuple):
    """An input of vectors of channels."""

    shape: tuple[int, ...]
    axis: int  # of the channels

    @property
    def around(self) -> list[int]:
        """The shape without the channels."""
        return [n for i, n in enumerate(self.shape) if i != self.axis % len(self.shape)]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.around[0] if prod(self.around[1:]) > 1 else 1

    @property
    def tokens(self) -> int:
        """The number of tokens of one sequence."""
        return prod(self.around) // self.batch


class _Inputs:
    """What the whole model gives to its modules."""

    def __init__(self, module: nn.Module, paths: Sequence[str]) -> None:
        self._module, self._paths, self._runs = module, paths, dict[bool, dict[str, Any]]()

    def _mapped(
        self, path: str, part: AttentionPart, make: Make, dtype: torch.dtype, plant: bool = False
    ) -> tuple[Any, Any]:
        """Arguments like the model's own, in which what has as many channels as the part's stream is made."""

        def value(old: Any) -> Any:
            if not isinstance(old, Tensor) or not old.is_floating_point():
                return old.cpu() if isinstance(old, Tensor) else old
            axis = next((a for a in (old.ndim - 1, 1) if old.ndim > 2 and old.shape[a] == part.width), None)
            return old.cpu().to(dtype) if axis is None else make(tuple(old.shape), axis)

        args, kwargs = pytree.tree_map(value, self._seen(plant)[path])
        return args, {name: None if "past" in name or "cache" in name else v for name, v in kwargs.items()}

    def calls(self, path: str, part: AttentionPart, *, plant: bool = False) -> Iterator[Call]:
        """A call like the model's own, if the model could be run; `plant` fills tables of the model that are zero."""
        if path in self._seen(plant):

            def call(module: nn.Module, make: Make) -> Any:
                dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
                args, kwargs = self._mapped(path, part, make, dtype, plant)
                return module(*args, **kwargs)

            yield call

    def others(self, path: str, part: AttentionPart, *, plant: bool = False) -> Any:
        """The shapes of a module's streams, and what else the model gives to it."""
        return self._mapped(path, part, _Stream, torch.float64, plant) if path in self._seen(plant) else None

    def few(self, path: str, part: AttentionPart) -> bool:
        """Whether the model gives few tokens to a module."""
        streams = pytree.tree_leaves(self.others(path, part), is_leaf=lambda leaf: isinstance(leaf, _Stream))
        return all(stream.tokens <= _FEW for stream in streams if isinstance(stream, _Stream))

    def _seen(self, plant: bool = False) -> dict[str, Any]:
        """Path -> arguments of its first call when the model runs."""
        if plant not in self._runs:
            g = torch.Generator().manual_seed(0)
            tables = {n: v for n, v in self._module.named_parameters() if plant and _empty_table(v)}
            planted = {n: torch.randn(v.shape, generator=g).to(v) for n, v in tables.items()}
            self._runs[plant] = self._run(planted) if planted or not plant else self._seen()
        return self._runs[plant]

    def _run(self, planted: dict[str, Tensor]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        training = [inner for inner in self._module.modules() if inner.training]
        try:
            self._module.eval()
            with ExitStack() as hooks:
                for path in dict.fromkeys(self._paths):

                    def hook(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                        seen.setdefault(path, (args, kwargs))

                    handle = self._module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
                    hooks.callback(handle.remove)
                for given in _model_inputs(self._module) if self._paths else ():
                    with suppress(Exception):  # a foreign model refuses this kind of input
                        args, kwargs = ((), given) if isinstance(given, dict) else ((given,), {})
                        functional_call(self._module, planted, args, kwargs)
                        break
        finally:
            for inner in training:
                inner.training = True
        return seen


def _model_inputs(module: nn.Module) -> Iterator[Any]:
    """Inputs that a whole model may take: what it says, images of its size, token numbers."""
    like = next(p for p in module.parameters() if p.is_floating_point())
    config, ids = getattr(module, "config", None), torch.tensor([[1, 2, 3, 4, 5]], device=like.device)
    stated = [(getattr(module, "pretrained_cfg", None) or {}).get("input_size"), 224, 32]
    holders = (config, getattr(config, "vision_config", None), module, getattr(module, "patch_embed", None))
    stated = [getattr(holder, name, None) for holder in holders for name in ("image_size", "img_size")] + stated
    sizes = [n[-1] if isinstance(n, (tuple, list)) else n for n in stated if n]
    if hasattr(module, "main_input_name"):  # transformers
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        images = like.new_ones(1, getattr(config, "num_channels", 3), sizes[0], sizes[0])
        sound = like.new_ones(1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1))
        words, pixels = {"input_ids": ids, **decoder}, {"pixel_values": images}
        yield from (words, pixels, words | pixels, {"input_features": sound} | decoder)
    for n in dict.fromkeys(sizes):
        yield torch.randn(1, 3, n, n, generator=torch.Generator().manual_seed(0)).to(like)
    yield ids


# --- what is measured -------------------------------------------------------------------------------------------------


class _OtherwiseError(Exception):
    """A module computes something else than the attention that was read; `sure` if its tokens are not the reason."""

    def __init__(self, why: str, *, sure: bool = True) -> None:
        super().__init__(why)
        self.sure = sure


class _Trial:
    """A copy of a module, without biases, whose weights are set so that its output shows what it does."""

    def __init__(
        self, holder: nn.Module, path: str, part: AttentionPart, dtype: torch.dtype, *, plant: bool = False
    ) -> None:
        module = copy.deepcopy(holder).to("cpu", dtype)
        module.eval()  # which returns nothing in some libraries
        for inner in module.modules():
            for hooks in (inner._forward_pre_hooks, inner._forward_hooks):  # torch's own set pruned or normed weights
                for key in [key for key, hook in hooks.items() if not type(hook).__module__.startswith("torch.")]:
                    del hooks[key]
        tensors = ModuleTensors(module)
        tensors._tensors = {f"{path}.{name}".lstrip("."): tensor for name, tensor in tensors._tensors.items()}
        self.module, self.part, self.dtype = module, replace(part, _tensors=tensors), dtype
        self.g = torch.Generator().manual_seed(0)
        self.seen: dict[str, Tensor] = {}
        own = {slot.name for slot in part._weights.values()}
        for name, tensor in tensors._tensors.items() if plant else ():
            if _empty_table(tensor) and name not in own:
                tensor.copy_(torch.randn(tensor.shape, generator=self.g))
        for letter in get_args(PartName):
            if (bias := self.part.read_bias(letter)) is not None:
                self.part.write_bias(letter, torch.zeros_like(bias))
            owner = part._weights[letter].name[len(path) :].lstrip(".").rpartition(".")[0]
            if owner:  # else the module's own parameter
                module.get_submodule(owner).register_forward_hook(functools.partial(self._record, letter))
        self.group = part.heads // part.kv_heads
        self.outputs = self._draw(part.heads, part.value_width, part.width)
        self.widths = [part._weights[letter].size(tensors)[1] for letter in "qkv"] + [part.width]
        self.part.write("o", self.outputs)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).double()

    def _record(self, letter: str, _: nn.Module, given: Any, out: Any) -> None:
        self.seen[letter] = out if letter == "o" else given[0]

    def _run(self, call: Call, *, odd: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows (n, d) that queries, keys and values read, and rows of the output; one token is odd or none is."""
        made: dict[_Stream, Tensor] = {}
        batch = 1

        def make(shape: tuple[int, ...], axis: int) -> Tensor:
            nonlocal batch
            stream = _Stream(shape, axis)
            if stream not in made:
                a, b = torch.randn(2, shape[axis], generator=torch.Generator().manual_seed(1)).double()
                batch = batch if made else stream.batch
                tokens = a.repeat(stream.tokens, 1)
                tokens[2 % len(tokens)] = b if odd else a
                tokens = tokens.to(self.dtype).repeat(stream.batch, 1)
                made[stream] = tokens.reshape(*stream.around, -1).movedim(-1, axis)
            return made[stream]

        self.seen = {}
        outputs = pytree.tree_leaves(call(self.module, make))
        x = [*made.values()]
        read = {letter: x[min(i, len(x) - 1)] for i, letter in enumerate("qkv")}
        read["o"] = next(value for value in outputs if isinstance(value, Tensor))
        q, k, v, y = (_rows(self.seen.get(n, read[n]), w, batch) for n, w in zip("qkvo", self.widths, strict=True))
        return q, k, v, y

    def measured(self, call: Call) -> dict[str, Any]:
        """Facts about the part, or `_OtherwiseError`."""
        part = self.part
        values = self._draw(part.kv_heads, self.widths[2], part.value_width)
        part.write("q", torch.zeros(part.heads, part.width, part.head_width))
        part.write("v", values)
        _, _, v, y = self._run(call, odd=False)
        wanted = torch.einsum("hk,hkd->d", (v[0] @ values).repeat_interleave(self.group, 0), self.outputs)
        if not part.positional and not (_same(v, v[0]) and _same(y, wanted)):
            raise _OtherwiseError("for equal tokens the output is not the sum of x V O over the heads", sure=False)
        q, k, v, _ = self._run(call, odd=True)
        maps = _Maps(self, call, q, k, v)
        start = maps.weights(torch.zeros(part.heads, len(maps.kinds), part.head_width))
        there = start > 1e-6 * start.max()
        j = _odd(q)
        rows = torch.arange(len(q))[:, None]
        causal = part.kind == "self" and j > 0 and len(q) == len(v) and bool((there == (rows >= j)).all())
        flat = (1.0 / (rows + 1) if causal else torch.tensor(1.0 / len(v))).expand_as(start)
        if not bool((there & (start < 1 - _SAME)).any()):
            raise _OtherwiseError("tokens attend to themselves alone", sure=False)
        facts = {"causal": causal, "rotary": False, "normalised": False}
        facts["positional"] = (
            part.positional or not _same(start[there], flat[there]) or not (causal or bool(there.all()))
        )
        here = there & (start < 1 - _SAME) & (rows == j if j >= 0 else rows >= 0)
        pairs = []
        for _ in range(2):
            queries, products = maps.planted()
            now = maps.weights(queries)
            pairs.append((_odds(now) - _odds(start), products))
        grown, products = (torch.stack(values) for values in zip(*pairs, strict=True))
        x, z = products[:, here], grown[:, here]
        scale = float((x * z).sum() / x.square().sum())
        if not part.positional and _same(scale * x, z) and scale > 0:
            valid = there & (start < 1 - _SAME)
            facts["rotary"] = not _same(scale * products[:, valid], grown[:, valid])
            if facts["rotary"] and (j < 0 or part.kind == "cross"):
                raise _OtherwiseError("the weights are not the softmax of the products of queries and keys")
            known = (n for n in (part.head_width**-0.5, 1.0) if abs(scale - n) < _SAME * n)
            return facts | {"scale": next(known, scale)}
        facts["normalised"], facts["rotary"], facts["positional"] = *maps.told_apart(j), part.positional
        if not (facts["normalised"] or part.positional):
            raise _OtherwiseError("the weights are not the softmax of the products of queries and keys")
        return facts


class _Maps:
    """The weights of token b in the maps of all heads, for given queries."""

    def __init__(self, trial: _Trial, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.trial, self.call, part = trial, call, trial.part
        at = _odd(v)
        if at < 0 or len(k) != len(v):
            raise _OtherwiseError("one other token is not one other value", sure=False)
        self.kind = torch.unique((q / q.abs().max()).round(decimals=6), dim=0, return_inverse=True)[1]  # (n,)
        self.kinds = torch.stack([q[self.kind == i][0] for i in range(int(self.kind.max()) + 1)])
        self.inverse = torch.linalg.pinv(self.kinds)  # (d, kinds)
        self.keys = trial._draw(part.kv_heads, part.head_width)
        self.key = torch.linalg.pinv(torch.stack([k[at - 1], k[at]]))[:, 1]  # 0 for a, 1 for b
        values = trial._draw(part.kv_heads, part.value_width)
        part.write("v", torch.linalg.pinv(torch.stack([v[at - 1], v[at]]))[:, 1, None] * values[:, None])
        self.outputs = torch.einsum("hk,hkd->hd", values.repeat_interleave(trial.group, 0), trial.outputs)
        self.solve = torch.linalg.pinv(self.outputs)

    def weights(self, queries: Tensor, keys: Tensor | None = None) -> Tensor:
        """A_ij (n, H) for the queries (H, kinds, k) of each kind of token."""
        keys = self.keys if keys is None else keys
        self.trial.part.write("q", self.inverse @ queries.double())
        self.trial.part.write("k", self.key[:, None] * keys[:, None])
        y = self.trial._run(self.call, odd=True)[3]
        out = y @ self.solve
        if not _same(out @ self.outputs, y) or bool((out < -_SAME).any() and not self.trial.part.positional):
            raise _OtherwiseError("the output is not the sum of weighted values over the heads")
        return out

    def planted(self) -> tuple[Tensor, Tensor]:
        """Random queries (H, kinds, k) and their products with the keys of b, (n, H), of moderate size."""
        keys = self.keys.repeat_interleave(self.trial.group, 0)[:, None]  # (H, 1, k)
        wanted = (torch.rand(len(keys), len(self.kinds), 1, generator=self.trial.g) + 1) * 0.3 * keys.shape[-1] ** 0.5
        wanted = wanted * torch.randn(wanted.shape, generator=self.trial.g).sign()
        other = self.trial._draw(len(keys), len(self.kinds), keys.shape[-1])
        unit = keys / keys.square().sum(-1, keepdim=True)
        queries = other + (wanted - (other * keys).sum(-1, keepdim=True)) * unit
        return queries, wanted[:, self.kind, 0].T.double()

    def told_apart(self, j: int) -> tuple[bool, bool]:
        """Whether lengths do not matter, and whether positions do, although equal queries meet one key.

        `_OtherwiseError` if queries and keys act on other heads or tokens.
        """
        queries = self.trial._draw(len(self.outputs), len(self.kinds), self.keys.shape[-1])
        start = self.weights(queries)
        other, keys = queries.clone(), self.keys.clone()
        kind = slice(None) if j < 0 else int(self.kind[j])
        other[::2, kind] = self.trial._draw(*other[::2, kind].shape)
        keys[::2] = self.trial._draw(*keys[::2].shape)
        heads = torch.arange(len(other)) % 2 == 0
        groups = torch.arange(len(other)) // self.trial.group % 2 == 0
        tokens = torch.ones(len(start), dtype=torch.bool) if j < 0 else self.kind == self.kind[j]
        for changed, where, what in (
            (self.weights(other), tokens[:, None] & heads, "queries of one head and token"),
            (self.weights(queries, keys), groups.expand_as(start), "keys of one head"),
        ):
            moved = (changed - start).abs()
            if bool((moved[~where] > _SAME * moved.max()).any()):
                raise _OtherwiseError(f"{what} change the weights of others")
            if not bool((torch.where(where, moved, 0).amax(0)[where.any(0)] > 1e-9).all()):
                raise _OtherwiseError(f"{what} do not change its weights")
        scaled = _same(self.weights(2 * queries), start) or _same(self.weights(queries, 2 * self.keys), start)
        zero = self.weights(torch.zeros_like(queries))
        rows = (zero > 1e-6 * zero.max()).all(1) & (zero < 1 - _SAME).all(1) & (torch.arange(len(zero)) != j)
        grown = (_odds(start) - _odds(zero))[rows]
        return scaled, not self.trial.part.positional and not _same(grown, grown.mean(0))


def _rows(tensor: Tensor, width: int, batch: int) -> Tensor:
    """Tokens (n, d) of a sequence (.., d) or of a map (1, d, h, w); of several such, the first."""
    if tensor.shape[-1] != width or (tensor.ndim == 4 and tensor.shape[1] == width):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(batch, -1, width)[0].double()


def _odd(rows: Tensor) -> int:
    """The number of the one row that differs from all others; -1 if there is none."""
    apart = ((rows - rows.median(0).values).norm(dim=1) > _SAME * rows.norm(dim=1).max()).nonzero()
    return int(apart) if len(apart) == 1 else -1


def _odds(weights: Tensor) -> Tensor:
    return torch.logit(weights.clamp(1e-30, 1 - 1e-15))


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= _SAME * wanted.expand_as(found).norm())
