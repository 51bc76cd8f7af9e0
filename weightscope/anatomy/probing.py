"""Compare what was read of an attention module with the module's own forward pass.

Names and shapes do not tell how the rows of a packed projection are ordered, whether heads are mixed, or what stands
between the projections. So a copy in float64 gets random weights through the parsed views, and runs:

- tokens that are all alike are averaged to themselves: the output is `x sum_h V_h O_h`, whatever queries and keys are;
- of other tokens, the queries and the keys of head h only change what is in the span of O_h;
- `Q_h G` and `K_h G^-T` give the same output as `Q_h` and `K_h`, unless they are rotated or normalised;
- queries that only one token has change the output of this token alone.

Then the map is measured: with queries of zero it is flat below its mask, or positions enter it; random queries and keys
give the factor on the logits; and where all queries and all keys are alike, only a rotation makes logits differ.
"""

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, repeat
from math import isqrt, prod
from typing import Any, get_args

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weightscope.anatomy.attention_modules import AttentionPart, PartName, find
from weightscope.anatomy.tensors import ModuleTensors, NamedTensors, Parts, Unread, template

_SAME = 1e-3  # relative; modules compute their softmax in float32, and what is misread differs by more than 1e-1
_TOKENS = (4, 16, 49, 64, 196)  # numbers of tokens that are tried, all square
# What keys and values read.
_STREAMS: dict[str, PartName] = {"value": "v", "v": "v"}
_STREAMS |= dict.fromkeys(("key", "k", "context", "memory", "key_value_states", "encoder_hidden_states"), "k")
_MANY = 1000  # tokens or channels beyond which only one head of a module is changed
_UNKNOWN = "could not be run on random tokens, so that its names are not confirmed"
_QK: tuple[PartName, PartName] = ("q", "k")

# Parameters of a forward pass that say which tokens are seen and where they are; a module alone does not know them.
_CONTEXT = re.compile(r"mask|causal|pos|rope|rotar|freqs|bias|alibi")

Measured = dict[str, Any]  # `scale`, `causal`, `rotary` and `positional` of a part, as far as its module tells
_KNOWN: dict[Any, str | Measured] = {}  # class, settings and other tensors of a module -> what was found

_INTERNAL = vars(nn.Module()).keys() - {"training"}

Make = Callable[[tuple[int, ...], int], Tensor]  # shape and axis of the channels -> an input
Call = Callable[[nn.Module, Make], Any]


def find_attention(tensors: NamedTensors) -> Parts[AttentionPart]:
    """All attention modules, in order, that compute what their names say, as measured; the others are unread.

    Modules without code (a state dict, a file, a container) are read by their names and config.
    """
    parts, out = find(tensors), Parts[AttentionPart]()
    out.unread, out.layers = parts.unread, parts.layers
    found = _probed(tensors, parts)
    for part in parts:
        if isinstance(what := found.get(part.name, {}), str):
            out.unread += (Unread(part.name, what, part.layer),)
        else:
            out.append(replace(part, **what))
    return out


def _probed(tensors: NamedTensors, parts: Sequence[AttentionPart]) -> dict[str, str | Measured]:
    """Name of each part with code -> what its module computes, or how it contradicts the part or could not be run."""
    out: dict[str, str | Measured] = {}
    if not isinstance(tensors, ModuleTensors):
        return out
    found = {part.name: (part, path) for part in parts if (path := _holder(tensors, part)) is not None}
    runs = _Inputs(tensors.module, [path for _, path in found.values()])
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for name, (part, path) in found.items():
            holder = tensors.module.get_submodule(path)
            slots = tuple((slot.name[len(path) :], str(slot.rows)) for slot in part._weights.values())
            key: tuple[Any, ...] = type(holder), repr(holder), _state(holder, path, part), slots
            key += (repr(replace(part, layer=0, name="")),)
            if _context(holder):
                key += type(tensors.module), template(path), repr(getattr(tensors.module, "config", None))
            if key not in _KNOWN:
                if len(_KNOWN) > 1000:
                    _KNOWN.clear()
                # in a context of its own: an initialiser need not keep the weights of the copy
                _KNOWN[key] = Context().run(_verdict, holder, path, part, runs)
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


def _state(holder: nn.Module, path: str, part: AttentionPart) -> str:
    """A digest of all that is in a module, except for the weights and biases of the part."""
    own = {slot.name for slot in (*part._weights.values(), *part._biases.values())}
    digest = hashlib.sha256()
    for where, inner in holder.named_modules(remove_duplicate=False):
        held = {key: value for key, value in vars(inner).items() if key not in _INTERNAL}
        for key, value in (*inner._parameters.items(), *inner._buffers.items(), *held.items()):
            name = ".".join(filter(None, (where, key)))
            for leaf in () if f"{path}.{name}".lstrip(".") in own else pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    try:
                        numbers = bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
                    except Exception:  # noqa: BLE001 - sparse or sharded: not known to be that of another module
                        numbers = repr(object()).encode()
                    digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)} ".encode())
                    digest.update(numbers)
                elif isinstance(leaf, (bool, int, float, str)):
                    digest.update(f"{name} {leaf!r} ".encode())
    return digest.hexdigest()


def _context(holder: nn.Module) -> list[str]:
    """The parameters by which a module is told about the positions of tokens."""
    return [name for name in inspect.signature(holder.forward).parameters if _CONTEXT.search(name)]


def _untold(told: Sequence[str], found: Measured) -> Measured:
    """What is not known of a module that takes masks or positions and was run without them."""
    masks = [name for name in told if "mask" in name or "causal" in name]
    unknown: Measured = {"causal": None} if masks and not found.get("causal") else {}
    return unknown | ({"positional": True} if len(masks) < len(told) else {})


def _verdict(holder: nn.Module, path: str, part: AttentionPart, inputs: "_Inputs") -> str | Measured:
    try:
        copied = copy.deepcopy(holder).to("cpu", torch.float64)
        copied.eval()  # which returns nothing in some libraries
        for inner in copied.modules():
            for hooks in (inner._forward_pre_hooks, inner._forward_hooks):  # torch's own set pruned or normed weights
                for key in [key for key, hook in hooks.items() if not type(hook).__module__.startswith("torch.")]:
                    del hooks[key]
        trial = _Trial(copied, path, part)
    except Exception:  # noqa: BLE001 - sharded or quantised modules, of whatever library
        return _UNKNOWN
    told, reason = _context(holder), ""
    model = zip(inputs.calls(path, part), repeat(True))
    few, more = (zip(_direct(copied, part, counts), repeat(False)) for counts in (_TOKENS[:1], _TOKENS[1:]))
    for call, decides in chain(model, few, more) if told else chain(few, model, more):
        with suppress(Exception):  # a foreign module was called in a way that it does not know
            trial.call = call
            trial.run(trial.random())
            found = trial.contradiction() or trial.measured()
            if not isinstance(found, str):
                return found if decides else found | _untold(told, found)
            reason = found  # a few tokens may be padded or pooled, so that others are tried
            if decides:
                break
    return f"computes something else: {reason}" if reason else _UNKNOWN


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
                    elif p.name == "position_embeddings":  # a rotation by nothing
                        given[p.name] = torch.ones(1, count, part.head_width), torch.zeros(1, count, part.head_width)
                    elif needed:
                        given[p.name] = None
                return module(**given)

            yield call


class _Inputs:
    """What the whole model gives to its modules."""

    def __init__(self, module: nn.Module, paths: Sequence[str]) -> None:
        self._module, self._paths = module, paths

    def calls(self, path: str, part: AttentionPart) -> Iterator[Call]:
        """A call like the model's own, in which what has as many channels as the part's stream is replaced."""
        if path in self._seen:
            given = self._seen[path]

            def call(module: nn.Module, make: Make) -> Any:
                def value(old: Any) -> Any:
                    if not isinstance(old, Tensor) or not old.is_floating_point():
                        return old.cpu() if isinstance(old, Tensor) else old
                    axis = next((a for a in (old.ndim - 1, 1) if old.ndim > 2 and old.shape[a] == part.width), None)
                    return old.cpu().double() if axis is None else make(tuple(old.shape), axis)

                args, kwargs = pytree.tree_map(value, given)
                kwargs = {name: None if "past" in name or "cache" in name else v for name, v in kwargs.items()}
                return module(*args, **kwargs)

            yield call

    @cached_property
    def _seen(self) -> dict[str, Any]:
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
                for given in _model_inputs(self._module):
                    with suppress(Exception):  # a foreign model refuses this kind of input
                        self._module(**given) if isinstance(given, dict) else self._module(given)
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
    holders = (config, getattr(config, "vision_config", None), module)
    stated = [getattr(holder, name, None) for holder in holders for name in ("image_size", "img_size")] + stated
    sizes = [n[-1] if isinstance(n, (tuple, list)) else n for n in stated if n]
    if hasattr(module, "main_input_name"):  # transformers
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        images = like.new_ones(1, getattr(config, "num_channels", 3), sizes[0], sizes[0])
        sound = like.new_ones(1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1))
        words = {"input_ids": ids, **decoder}
        yield from (
            words,
            {"pixel_values": images},
            words | {"pixel_values": images},
            {"input_features": sound} | decoder,
        )
    for n in dict.fromkeys(sizes):
        yield torch.randn(1, 3, n, n, generator=torch.Generator().manual_seed(0)).to(like)
    yield ids


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mask:
    """Which of m tokens some of n see: those in the same one of some batches of tokens, only earlier ones if causal."""

    n: int
    m: int
    batches: int
    causal: bool
    rows: Tensor

    @property
    def allowed(self) -> Tensor:
        """(rows, m)."""
        row, column = self.rows[:, None], torch.arange(self.m)
        together = row // (self.n // self.batches) == column // (self.m // self.batches)
        return together & (column <= row) if self.causal else together


class _Trial:
    """A copy of a module with random weights, and what it computes."""

    call: Call
    mixes: bool  # whether coordinates of queries and keys may be mixed, Q G and K G^-T: they are not rotated

    def __init__(self, module: nn.Module, path: str, part: AttentionPart) -> None:
        tensors = ModuleTensors(module)
        tensors._tensors = {f"{path}.{name}".lstrip("."): tensor for name, tensor in tensors._tensors.items()}
        self.module, self.part = module, replace(part, _tensors=tensors)
        self.g = torch.Generator().manual_seed(0)
        self.weights: dict[PartName, Tensor] = {}
        self.now: dict[str, Tensor] = {}  # what was written last
        self.seen: dict[str, Tensor] = {}
        for letter in get_args(PartName):
            old = self.part.read(letter)
            self.weights[letter] = self._draw(*old.shape) / old.shape[1] ** 0.5
            owner = part._weights[letter].name[len(path) :].lstrip(".").rpartition(".")[0]
            if owner:  # else the module's own parameter
                hook = partial(self._record, letter)
                module.get_submodule(owner).register_forward_hook(hook)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def _record(self, letter: str, _: nn.Module, given: Any, out: Any) -> None:
        self.seen[letter] = out if letter == "o" else given[0]

    def run(self, make: Make, **weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that queries and values read, and rows of the output, with other weights for some letters."""
        made: dict[tuple[tuple[int, ...], int], Tensor] = {}

        def once(shape: tuple[int, ...], axis: int) -> Tensor:
            return made.setdefault((shape, axis), make(shape, axis))

        self.seen = {}
        for letter, value in (self.weights | weights).items():
            if self.now.get(letter) is not value:
                self.part.write(letter, value)  # type: ignore[arg-type]
        self.now = self.weights | weights
        outputs = pytree.tree_leaves(self.call(self.module, once))
        out = next(value for value in outputs if isinstance(value, Tensor))
        q, *streams = made.values()
        k, v = streams * 2 if len(streams) == 1 else streams or (q, q)
        self.seen.setdefault("k", k)
        q, v, y = self.seen.get("q", q), self.seen.get("v", v), self.seen.get("o", out)
        return _rows(q, self.part.width), _rows(v, self.weights["v"].shape[1]), _rows(y, self.weights["o"].shape[2])

    def random(self) -> Make:
        """Random tokens, the same ones in every run."""
        seed = int(torch.randint(2**31, (), generator=self.g))
        return lambda shape, _: torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def alike(self, but: int | None = None) -> Make:
        """Tokens that are all alike, except for one of them."""
        seed = int(torch.randint(2**31, (), generator=self.g))

        def make(shape: tuple[int, ...], axis: int) -> Tensor:
            g = torch.Generator().manual_seed(seed)
            one, other = torch.randn(2, shape[axis], generator=g, dtype=torch.float64)
            tokens = one.expand(prod(shape) // shape[axis], -1).clone()
            if but is not None:
                tokens[but % len(tokens)] = other
            around = [n for i, n in enumerate(shape) if i != axis % len(shape)]
            return tokens.reshape(*around, -1).movedim(-1, axis)

        return make

    def contradiction(self) -> str:
        """The first contradiction, or ""."""
        part, w = self.part, self.weights
        equal, mixed = self.alike(), self.random()
        (_, v1, y1), (_, v2, y2) = self.run(equal), self.run(self.alike())
        values = ((v1 - v2)[0] @ w["v"]).repeat_interleave(part.heads // part.kv_heads, 0)  # (H, k)
        wanted = torch.einsum("hk,hkd->d", values, w["o"])
        if not part.positional and not (_same(v1, v1[0]) and _same(y1 - y2, wanted)):
            return "for equal tokens the output is not the sum of x V O over the heads"
        y = self.run(mixed)[2]
        large = len(y) > _MANY or part.width > _MANY
        for head in dict.fromkeys((part.heads - 1,) if large else (0, part.heads // 2, part.heads - 1)):
            key = part.kv_head(head)
            group = [h for h in range(part.heads) if part.kv_head(h) == key]
            for letter, at, heads in (("q", head, [head]), ("k", key, group)):
                what = f"the {'queries' if letter == 'q' else 'keys'} of head {head}"
                other = w[letter].clone()  # type: ignore[index]
                other[at] += self._draw(*other[at].shape) / other.shape[1] ** 0.5
                change = self.run(mixed, **{letter: other})[2] - y
                if float(change.norm()) < 1e-2 * _SAME * float(y.norm()):
                    return f"{what} do not change the output"
                if not part.positional and not _same(self.run(equal, **{letter: other})[2], y1):
                    return f"{what} change the output for equal tokens"
                span = torch.linalg.qr(w["o"][heads].flatten(0, 1).T)[0]  # (d, rows)
                if not _same(change @ span @ span.T, change):
                    return f"{what} change what other heads put out"
            if not part.normalised:
                k = part.head_width
                number = 2.0 * torch.eye(k, dtype=torch.float64)
                self.mixes = self._same_products(number + self._draw(k, k) / k**0.5 / 2, group, key, mixed, y)
                if not self.mixes and not self._same_products(number, group, key, mixed, y):  # if rotated, by a number
                    return f"the output is not a function of the product of queries and keys of head {head}"
        return "" if self._own_queries() else "queries of one token change the outputs of others"

    def _same_products(self, turn: Tensor, group: list[int], key: int, make: Make, y: Tensor) -> bool:
        """Whether Q G and K G^-T, with biases, give the same output."""
        before = {letter: bias for letter in _QK if (bias := self.part.read_bias(letter)) is not None}
        weights: dict[str, Tensor] = {}
        for letter, at, matrix in zip(_QK, (group, [key]), (turn, torch.linalg.inv(turn).mT), strict=True):
            weights[letter] = self.weights[letter].clone()
            weights[letter][at] = weights[letter][at] @ matrix
            if letter in before:
                bias = before[letter].clone()
                bias[at] = bias[at] @ matrix
                self.part.write_bias(letter, bias)
        found = self.run(make, **weights)[2]
        for letter, bias in before.items():
            self.part.write_bias(letter, bias)
        return _same(found, y)

    def measured(self) -> str | Measured:
        """The factor on the logits, whether later tokens are masked, and whether positions enter; changes the copy."""
        part, w, make = self.part, self.weights, self.random()
        if part.positional:
            return {}
        for letter in _QK:
            if (bias := part.read_bias(letter)) is not None:
                part.write_bias(letter, torch.zeros_like(bias))
        v, y = self.run(make, q=torch.zeros_like(w["q"]))[1:]
        n, m = len(y), len(v)
        if m < 2:
            return {}
        rows = torch.linspace(0, n - 1, min(n, 8 if m > _MANY else 32)).long()
        batches = [1, *(b for b in (self.seen.get("v", v).shape[0],) if b > 1 and n % b == m % b == 0)]
        masks = [_Mask(n, m, b, causal, rows) for b in batches for causal in (False, True)[: 1 + (n == m)]]
        if (mask := next((one for one in masks if _same(self._computed(one, v)(0), y[rows])), None)) is None:
            return {"positional": True, "causal": None}
        found: Measured = {"causal": mask.causal, "rotary": False}
        if not part.normalised:
            x, v, y = self.run(make)
            if scale := _fitted(self._computed(mask, v, x, w["q"], w["k"]), y[rows]):
                return found | {"scale": scale}
        if part.kind == "self" and not self._flat_if_alike(mask, make):
            return found | {"rotary": True} | ({} if part.normalised else {"scale": self._own_scale(mask)})
        if part.normalised:
            return found
        return found | {"positional": True} if self.mixes else "the map is not softmax(s Q K^T)"

    def _flat_if_alike(self, mask: _Mask, make: Make) -> bool:
        """Whether the map is flat where all queries are one vector and all keys another, of tokens that differ."""
        part, u = self.part, nn.functional.normalize(self._draw(self.part.width), dim=0)
        g = self._draw(2, part.heads, 1, part.head_width)

        def with_u(shape: tuple[int, ...], axis: int) -> Tensor:
            tokens = make(shape, axis).movedim(axis, -1)
            return (tokens + (1 - tokens @ u)[..., None] * u).movedim(-1, axis)

        _, v, y = self.run(with_u, q=u[:, None] * g[0], k=u[:, None] * g[1][: part.kv_heads])
        return _same(self._computed(mask, v)(0), y[mask.rows])

    def _own_scale(self, mask: _Mask) -> float:
        """The factor on rotated logits: one token alone has keys, so that its own logit is at relative position 0."""
        odd, w = self.alike(2), self.weights
        x, v, y = self.run(odd)
        at = (x - x[0]).norm(dim=1).argmax()
        own = nn.functional.normalize(x[at] - x[0] * (x[at] @ x[0]) / (x[0] @ x[0]), dim=0)
        k = own[:, None] * w["k"][:, :1]
        x, v, y = self.run(odd, k=k)
        return _fitted(self._computed(replace(mask, rows=at[None]), v, x, w["q"], k), y[at[None]]) or self.part.scale

    def _computed(
        self, mask: _Mask, v: Tensor, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> Callable[[float], Tensor]:
        """The output at some rows as a function of the factor on the logits."""
        part, each = self.part, self.part.heads // self.part.kv_heads
        values, bias, end = v @ self.weights["v"], part.read_bias("v"), part.read_bias("o")
        values = (values if bias is None else values + bias[:, None]).repeat_interleave(each, 0)  # (H, m, k)
        logits = torch.zeros(1, 1, 1, dtype=torch.float64)
        if x is not None and q is not None and k is not None:
            keys = _rows(self.seen["k"], part.kv_width) @ k
            logits = (x[mask.rows] @ q) @ keys.repeat_interleave(each, 0).mT  # (H, rows, m)

        def output(scale: float) -> Tensor:
            maps = (scale * logits).masked_fill(~mask.allowed, -torch.inf).softmax(-1)
            out = torch.einsum("hnk,hkd->nd", maps.expand(part.heads, -1, -1) @ values, self.weights["o"])
            return out if end is None else out + end

        return output

    def _own_queries(self) -> bool:
        """Whether a change of the queries of one token changes one row of the output."""
        make = self.alike(2)
        x, _, y = self.run(make)
        odd = (x - x[0]).norm(dim=1) > _SAME * float(x.norm())
        if int(odd.sum()) != 1:
            return True  # the module adds tokens or positions of its own
        direction = x[odd][0] - x[0] * (x[odd][0] @ x[0]) / (x[0] @ x[0])
        other = self.weights["q"] + direction[:, None] * self._draw(*self.weights["q"][:, :1].shape)
        change = (self.run(make, q=other)[2] - y).norm(dim=1)
        return int((change > _SAME * float(change.max())).sum()) <= 1


def _fitted(output: Callable[[float], Tensor], wanted: Tensor) -> float | None:
    """The factor on the logits that gives an output; None if none does."""

    def distance(power: float) -> float:
        return float((output(10**power) - wanted).norm())

    nearest = min((i / 4 for i in range(-12, 9)), key=distance)
    best = minimize_scalar(distance, bounds=(nearest - 0.25, nearest + 0.25), method="bounded", options={"xatol": 1e-9})
    scale = 10 ** float(best.x)
    return scale if _same(output(scale), wanted) else None


def _rows(tensor: Tensor, width: int) -> Tensor:
    """Tokens (n, d) of a sequence (.., d) or of a map (1, d, h, w)."""
    if tensor.shape[-1] != width or (tensor.ndim == 4 and tensor.shape[1] == width):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, width).double()


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= _SAME * wanted.expand_as(found).norm())
