"""One forward pass, in which every number says from which linear map it descends.

Each activation carries codes of its own shape, `node << 32 | entry`: the entry of the output of the linear map (or
product, sum, ...) that a number was made from. Views, permutations, slices and copies are replayed on the codes,
pointwise functions and normalisations hand them on. An activation times a matrix of parameters is a new linear map,
the product of two activations a product, and its product with a third one an application: attention. No names and no
attributes are read.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

BITS = 32
ENTRY = (1 << BITS) - 1
Kind = Literal["input", "linear", "embedding", "sum", "gate", "product", "apply"]


def words(text: str) -> frozenset[str]:
    """The names in a text."""
    return frozenset(text.split())


_MOVES = words(
    "cat _unsafe_view stack clone index index_select gather roll flip repeat im2col pixel_shuffle pixel_unshuffle "
    "_to_copy copy_ lift_fresh tril triu slice_scatter select_scatter copy constant_pad_nd channel_shuffle "
    "repeat_interleave unfold as_strided contiguous _reshape_alias native_channel_shuffle reflection_pad1d "
    "reflection_pad2d replication_pad2d take_along_dim resize_ view_as_complex view_as_real split_with_sizes_copy"
)
_NORMS = words(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit_no_training batch_norm "
    "_native_batch_norm_legit cudnn_batch_norm _fused_rms_norm rms_norm"
)
_MAPS = words("mm addmm bmm baddbmm convolution")
_SOFTMAX = words("_softmax softmax _safe_softmax _log_softmax _masked_softmax")
_SAME = words("native_dropout dropout masked_fill masked_fill_ bernoulli_ cumsum sort")  # hand on, and are linear
_BOUNDS = words("clamp clamp_min clamp_max minimum maximum where nan_to_num hardtanh")
_LINEAR = words("add sub mul div neg _to_copy")  # pointwise functions that may be of a linear map
_REDUCED = words("mean sum amax amin max min logsumexp norm linalg_vector_norm prod var std var_mean")
_POOLED = words(
    "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool1d "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d"
)
_FILLED = words("new_zeros zeros_like new_empty empty_like new_full full_like new_ones ones_like empty_strided")
_INDICES = words("index gather index_select take_along_dim repeat_interleave")
_RANK = {"apply": 3, "product": 2}
_MASKED = -1e3  # logits below are those of a mask


_MOST = 30_000_000  # entries of one map of attention that is traced, at 8 bytes and more each; else a MemoryError


@dataclass(frozen=True)
class Weight:
    """A matrix of parameters: code of the first entry of each row, and the step from one column to the next."""

    first: Tensor  # (rows,) parameter << 32 | entry
    step: int
    columns: int


@dataclass
class Origin:
    """What is known of one activation."""

    codes: Tensor  # of the activation's shape, -1 where nothing is known
    gain: Tensor | None = None  # likewise, the parameter that multiplied each number last, `several` for two of them
    marks: frozenset[str] = frozenset()  # what was done since: "nonlinear", "normalised", "rotated", "convolved", ...
    factor: float = 1.0  # of numbers that multiplied it since


@dataclass(eq=False)
class Node:
    """What made numbers."""

    kind: Kind
    out: Tensor
    path: str = ""  # of the module in whose forward pass it was made
    step: int = 0  # number of maps and products until then
    rows: int = 1  # channels of the output
    inner: int = 1  # numbers after the channel axis
    weight: Weight | None = None  # of a linear map of tokens
    patches: Weight | None = None  # of one that makes patches, which overlap, of each token
    why: str = ""  # if it is no map of tokens, what it is
    inputs: Tensor | None = None  # (columns,) codes of the channels that it reads
    gain: Tensor | None = None  # (columns,) of these
    marks: frozenset[str] = frozenset()  # of what it reads
    bias: Tensor | None = None  # (rows,) codes of parameters
    parameters: tuple[int, ...] = ()
    sides: tuple[Origin, ...] = ()  # the operands of a product, apply, sum or gate
    values: tuple[Tensor, ...] = ()
    softmax: bool = False
    logits: Origin | None = None
    masked: Tensor | None = None  # which tokens a mask keeps from attending to which
    after: Origin | None = None  # of a linear map: what was added to the stream
    added: Tensor | None = None  # the numbers of `after`; None if they were overwritten
    onto: Tensor | None = None  # (channels,) codes of what it was added to
    later: Tensor | None = None  # (rows,) a bias that is not in `out`
    version: int = 0  # of `out`, which is written in place if it changes
    stream: int = 0  # sums of the same operands have one number
    scales: bool = False  # its output multiplies another one's channels
    turned: bool = False  # values times the map, in place of the map times values


SEVERAL, OFFSET = 1 << 62, 1 << 61
"""Codes of gains: several parameters, and a flag of those to which one is added."""


class Dispatch(TorchDispatchMode):
    """Sees each operation of what runs in it."""

    step = 0  # number of maps and products so far

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what runs here is not compiled; else torch imports its compiler, which takes a second


class Rerun(Dispatch):
    """Keeps what maps read and give, by the numbers of their operations, the `ends`.

    Before, `rows` change (operation -> its node and which channels). Ends give what is `known` of an earlier run.
    """

    def __init__(
        self, ends: Collection[int], rows: dict[int, tuple["Node", Tensor]], known: Mapping[int, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.ends, self.rows, self.known = ends, rows, known or {}
        self.read, self.out = dict[int, Tensor](), dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name.partition("::")[2]
        if name not in _MAPS:
            return out
        self.step += 1
        if self.step in self.rows:
            node, chosen = self.rows[self.step]
            out = torch.where(chosen.to(out.device)[_counted(out) // node.inner % node.rows], -out - out.std(), out)
        if self.step in self.ends:
            x = args["add" in name]
            x = x.movedim(1, -1) if name == "convolution" else x
            self.read[self.step], self.out[self.step] = x.reshape(-1, x.shape[-1]).clone(), out.clone()
            known = self.known.get(self.step, out)
            out = known if known.shape == out.shape else out
        return out


class Tracer(Dispatch):
    """Follows the numbers of one forward pass; `nodes` is what it found, in order."""

    def __init__(self, module: nn.Module, run: Callable[[Dispatch], None]) -> None:
        super().__init__()
        self.run = run
        self.nodes: list[Node | None] = [None]
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.without_rule: dict[str, str] = {}  # operation -> path of the module that called it first
        self.path = ""
        self.normed: set[int] = set()  # parameters whose gains are on what is added to: norms of the stream itself
        self._acts, self._made = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._storages: dict[int, list[tuple[int, int, int]]] = {}
        self._streams: dict[Any, int] = {}
        for name, value in module.named_parameters(remove_duplicate=False):
            if any(value is known for known in self.parameters) or not value.is_floating_point():
                continue
            number = len(self.names)
            self.names.append(name)
            self.parameters.append(value)
            if value.is_contiguous():
                spans = self._storages.setdefault(value.untyped_storage().data_ptr(), [])
                start = int(value.storage_offset())
                spans.append((start, start + value.numel(), number))
            else:
                self._made[value] = _counted(value) | number << BITS, 0.0

    # -- parameters

    def _number(self, tensor: Tensor) -> int | None:
        """The parameter that a tensor is a view of."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        spans = self._storages.get(tensor.untyped_storage().data_ptr(), ()) if tensor.is_floating_point() else ()
        start = tensor.storage_offset()
        return next((number for low, high, number in spans if low <= start < high), None)

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor not in self._acts and (tensor in self._made or self._number(tensor) is not None)

    def _weight(self, tensor: Tensor) -> tuple[Tensor, float | None]:
        """Codes of the entries of parameters, and what is added to them (None: they are changed otherwise)."""
        if tensor in self._made:
            return self._made[tensor]
        number = self._number(tensor)
        assert number is not None
        start = self.parameters[number].storage_offset()
        codes = torch.tensor(int(tensor.storage_offset()) - int(start), device=tensor.device)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            codes = codes[..., None] + torch.arange(size, device=tensor.device) * stride
        return codes | number << BITS, 0.0

    def _matrix(self, tensor: Tensor) -> Weight | None:
        """The rows of a (rows, columns) matrix; None if its entries are computed or have no regular places."""
        number = self._number(tensor) if tensor not in self._made else None
        if number is not None:
            start = int(tensor.storage_offset()) - int(self.parameters[number].storage_offset())
            first = torch.arange(tensor.shape[0]) * tensor.stride(0) + start
            return Weight(first | number << BITS, int(tensor.stride(1)), tensor.shape[1])
        codes, offset = self._weight(tensor)
        first = codes[:, 0].cpu()
        step = int(codes[0, 1] - codes[0, 0]) if codes.shape[1] > 1 else 1
        regular = offset == 0 and bool((codes.cpu() == first[:, None] + step * torch.arange(codes.shape[1])).all())
        return Weight(first, step, codes.shape[1]) if regular else None

    def rows_of(self, weight: Weight) -> tuple[int, Tensor, bool] | None:
        """(parameter, rows or columns of it, whether it is stored transposed) of a matrix; None if it is neither."""
        owners = present(weight.first)
        if len(owners) != 1:
            return None
        shape, flat, columns = tuple(self.parameters[owners[0]].shape), weight.first & ENTRY, weight.columns
        total = torch.Size(shape).numel()
        if (weight.step == 1 or columns == 1) and shape[0] * columns == total and not bool((flat % columns).any()):
            return owners[0], flat // columns, False
        matrix = len(shape) > 1 and total == shape[0] * shape[1] and weight.step == shape[1]
        if matrix and bool((flat < shape[1]).all()):
            return owners[0], flat, True
        return None

    # -- codes

    def node(self, number: int) -> Node:
        """A node by its number, which is at least 1."""
        found = self.nodes[number]
        assert found is not None
        return found

    def kind(self, codes: Tensor) -> str:
        """The kind of node that made the last of the numbers; empty if none did."""
        top = int(codes.max()) if codes.numel() else -1
        return self.node(top >> BITS).kind if top >= 0 else ""

    def channels(self, codes: Tensor) -> Tensor:
        """`node << 32 | channel`: the tokens forgotten."""
        there = present(codes)
        if len(there) == 1 and there[0] > 0:
            one = self.node(there[0])
            return ((codes & ENTRY) // one.inner % one.rows) | there[0] << BITS
        out = torch.full_like(codes, -1)
        numbers = codes >> BITS
        for n in there:
            if n > 0:
                one, where = self.node(n), numbers == n
                out[where] = (((codes[where] & ENTRY) // one.inner) % one.rows) | n << BITS
        return out

    def _along(self, codes: Tensor, dims: Any) -> bool:
        """Whether all numbers along these axes have one channel."""
        channels = self.channels(codes)
        return bool(((channels == channels.amax(dims, keepdim=True)) | (channels < 0)).all())

    def _new(self, out: Tensor, node: Node) -> Node:
        node.path, node.step, node.version = self.path, self.step, out._version
        self._acts[out] = Origin(_counted(out) | len(self.nodes) << BITS)
        self.nodes.append(node)
        return node

    def enter(self, given: Any) -> None:
        """Count the floating-point numbers among the arguments of the call as a stream of their own."""
        for x in tree_leaves(given):
            if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x not in self._acts:
                image = x.ndim == 4 and x.shape[2] == x.shape[3]
                rows, inner = (x.shape[1], x[0, 0].numel()) if image else (x.shape[-1], 1)
                self._new(x, Node("input", x, rows=rows, inner=inner))

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.step += func._schema.name.partition("::")[2] in _MAPS
        try:
            self._follow(func, args, kwargs, out)
        except (RuntimeError, IndexError, TypeError, ValueError, KeyError) as error:  # an unusual form of an operation
            name = func._schema.name.partition("::")[2]
            self.without_rule.setdefault(name, f"{self.path}: {error}".splitlines()[0])
            self._unknown(out)
        return out

    def _unknown(self, out: Any) -> None:
        """Nothing is known of what an operation without a rule gives."""
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.is_floating_point():
                self._acts[one] = Origin(torch.full(one.shape, -1, device=one.device), marks=frozenset({"unknown"}))

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not outs:
            return
        acts = [t for t in given if t in self._acts]
        if name in _FILLED or (not given and outs[0].is_floating_point()):  # into which may be written
            if outs[0].is_floating_point() and outs[0].ndim > 1:
                self._acts[outs[0]] = Origin(torch.full(outs[0].shape, -1, device=outs[0].device))
            return
        weights = [] if acts else [t for t in given if self._is_weight(t)]
        if not acts and not weights:
            return
        rule: Callable[..., None] | None = getattr(self, f"_on_{name.lstrip('_')}", None)
        first = func._schema.arguments[0].alias_info
        if rule is not None and not acts and len(weights) < 2 and name != "embedding":  # parameters and constants
            self._made[outs[0]] = torch.full(outs[0].shape, -1, device=outs[0].device), None
        elif rule is not None:
            rule(args, kwargs, outs[0])
        elif (first is not None and func._schema.returns and not first.is_write) or name in _MOVES:
            self._moved(func, name, args, kwargs, given, outs)
        elif not acts:
            self._computed(func, name, args, outs[0], given)
        elif name in _NORMS:
            self._normed(name, args, outs[0])
        elif name in _REDUCED:
            self._reduced(name, args, kwargs, acts[0], outs)
        elif name in _POOLED or name == "col2im":
            self._pooled(name, acts[0], outs[0])
        elif torch.Tag.pointwise in func.tags or name in _SOFTMAX | _SAME or outs[0].shape == acts[0].shape:
            self._pointwise(name, args, kwargs, acts, outs[0])
        else:
            self.without_rule.setdefault(name, self.path)
            self._unknown(out)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], outs: list[Tensor]) -> None:
        acts = [t for t in given if t in self._acts]
        if name == "copy_" and args[0] not in self._acts and acts:
            self._acts[args[0]] = Origin(torch.full(args[0].shape, -1, device=args[0].device))
        if name == "view" and isinstance(args[1], torch.dtype):
            return
        if not acts:
            if any(t in self._made for t in given) or name in _MOVES:  # views of parameters are known by their memory
                offsets = {self._weight(t)[1] for t in given if self._is_weight(t)}
                offset = offsets.pop() if len(offsets) == 1 else None
                codes = self._replayed(
                    func, name, args, kwargs, outs, lambda t: self._weight(t)[0] if self._is_weight(t) else None
                )
                self._made.update({out: (c, offset) for out, c in zip(outs, codes, strict=False)})
            return
        origins = [self._acts[t] for t in acts]
        marks = frozenset().union(*(o.marks for o in origins))
        factors = {o.factor for o in origins if bool((_real(o.codes) >= 0).any())} or {1.0}
        factor = factors.pop() if len(factors) == 1 else float("nan")
        known = dict(zip(acts, origins, strict=True))
        codes = self._replayed(func, name, args, kwargs, outs, lambda t: known[t].codes if t in known else None)
        gains: Iterable[Tensor | None] = [None] * len(codes)
        if any(o.gain is not None for o in origins):
            gains = self._replayed(func, name, args, kwargs, outs, lambda t: known[t].gain if t in known else None)
        for out, one, other in zip(outs, codes, gains, strict=False):
            self._acts[out] = Origin(one, other, marks, factor)

    def _replayed(
        self, func: Any, name: str, args: Any, kwargs: Any, outs: list[Tensor], codes: Callable[[Tensor], Tensor | None]
    ) -> list[Tensor]:
        """What an operation that moves numbers does to their codes, -1 where there are none."""

        def coded(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if (found := codes(x)) is not None:
                return found
            if name in _INDICES and not x.is_floating_point():
                return x
            return torch.full(x.shape, -1, device=x.device)

        if name == "_to_copy":
            return [coded(args[0])]
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            return [coded(args[0]).reshape(outs[0].shape)]
        a, k = tree_map(coded, args), tree_map(coded, kwargs)
        if name == "constant_pad_nd":
            a = (a[0], a[1], -1)
        if name in ("tril", "triu"):
            return [func(a[0] + 1, *a[1:], **k) - 1]
        if name in ("view_as_complex", "im2col") or "_pad" in name:  # known for floating-point numbers only
            found = func(a[0].double() + 1, *a[1:], **k)
            return [found if found.is_complex() else found.round().long() - 1]
        if name == "view_as_real":
            return [func(a[0]).round().long() - 1]
        if a and isinstance(a[0], Tensor) and a[0].is_complex():
            return [t for t in tree_leaves(func(*a, **k)) if isinstance(t, Tensor)]
        if name == "as_strided" and isinstance(a[0], Tensor):
            a = (a[0].contiguous(), *a[1:])
        return [t for t in tree_leaves(func(*a, **k)) if isinstance(t, Tensor)]

    def _computed(self, func: Any, name: str, args: Any, out: Tensor, given: list[Tensor]) -> None:
        """A function of parameters alone: their codes, with what was added, or None for anything else."""
        weights = [t for t in given if self._is_weight(t)]
        like = next((t for t in weights if t.numel() == out.numel()), None)
        if like is None or torch.Tag.pointwise not in func.tags:
            self._made[out] = torch.full(out.shape, -1, device=out.device), None
            return
        codes, offset = self._weight(like)
        numbers = [x for x in args if isinstance(x, int | float) and not isinstance(x, bool)]
        plus = numbers[0] if name == "add" and len(given) == 1 and numbers else None
        moved = None if plus is None or offset is None else offset + plus
        self._made[out] = codes.reshape(out.shape), moved

    def _normed(self, name: str, args: Any, out: Tensor) -> None:
        """A normalisation with a gain along the channels."""
        origin = self._acts.get(args[0])
        if origin is None:
            return
        weights = [t for t in args[1:] if isinstance(t, Tensor)]
        batch = "batch" in name
        gain = None
        if weights and self._is_weight(weights[0]):
            codes, offset = self._weight(weights[0])
            codes = torch.full_like(codes, SEVERAL) if offset not in (0, 1) else codes | (OFFSET if offset else 0)
            last = name in ("native_layer_norm", "_fused_rms_norm", "rms_norm")
            shaped = codes if last else codes.reshape(-1, *[1] * (out.ndim - 2))
            gain = shaped.expand(out.shape)
        marks = origin.marks if batch else origin.marks | {"normalised"}
        marks = marks | {"batch"} if batch else marks
        self._acts[out] = Origin(origin.codes, gain, marks, 1.0)

    def _reduced(self, name: str, args: Any, kwargs: Any, x: Tensor, outs: list[Tensor]) -> None:
        """Over tokens, channels stay; over channels, it is a statistic."""
        origin, out = self._acts[x], outs[0]
        given: Any = args[1] if len(args) > 1 and isinstance(args[1], int | list | tuple) else kwargs.get("dim")
        dims = [given] if isinstance(given, int) and not isinstance(given, bool) else list(given or ())
        codes = origin.codes
        averaged = dims and "norm" not in name and not codes.is_complex() and self.kind(codes) not in ("product", "")
        if averaged and self._along(codes, dims):
            self._acts[out] = Origin(codes.amax(dims, keepdim=out.ndim == x.ndim), None, origin.marks | {"pooled"})
            return
        for one in outs:
            if one.is_floating_point():
                self._acts[one] = Origin(torch.full(one.shape, -1, device=one.device), marks=frozenset({"statistic"}))

    def _pooled(self, name: str, x: Tensor, out: Tensor) -> None:
        origin, around = self._acts[x], out.ndim - 2
        codes = origin.codes
        if name == "col2im":  # (B, C k k, L): overlapping patches are added
            first = codes.view(codes.shape[0], out.shape[1], -1)[..., :1]
            self._acts[out] = Origin(first[..., None].expand(out.shape), None, origin.marks | {"convolved"})
        elif around > 0 and self._along(codes, tuple(range(2, codes.ndim))):
            first = codes.flatten(2)[..., :1].reshape(*codes.shape[:2], *[1] * around)
            gain = origin.gain
            if gain is not None:
                gain = gain.flatten(2)[..., :1].reshape(*codes.shape[:2], *[1] * around).expand(out.shape)
            self._acts[out] = Origin(first.expand(out.shape), gain, origin.marks | {"pooled"})

    # -- entry by entry

    def _pointwise(self, name: str, args: Any, kwargs: Any, acts: list[Tensor], out: Tensor) -> None:
        base = name.rstrip("_")
        times = kwargs.get("alpha", 1) * (-1 if base == "sub" else 1)  # of the second operand of a sum
        operands = [x for x in args if isinstance(x, Tensor)]
        known = [t for t in acts if bool((_real(self._acts[t].codes) >= 0).any())]
        if base in ("mul", "div") and len(known) == 1:
            self._scaled(base, known[0], [x for x in args if x is not known[0]], out)
        elif base in ("add", "sub") and len(known) == 1 and len(operands) > 1:
            other = next(x for x in operands if x is not known[0])
            self._shifted(known[0], other, out, times if known[0] is args[1] else 1)
        elif base == "mul" and len(known) > 1:
            self._multiplied(known[0], known[1], out)
        elif base in ("add", "sub", "addcmul") and len(known) > 1:
            self._added(known[0], known[1], out, times)
        elif known:
            size = torch.Size(out.shape).numel()
            whole = [t for t in known if self._acts[t].codes.numel() == size]
            best = max(whole or [t for t in known if _broadcasts(t.shape, out.shape)], key=self._rank, default=None)
            if best is None:
                return
            origin = self._acts[best]
            marks, gain = origin.marks, origin.gain
            if base in ("maximum", "minimum") and any(
                not torch.equal(self._acts[t].codes, origin.codes) for t in whole
            ):
                self._unknown(out)  # of two maps
                return
            if base in _BOUNDS and best.shape == out.shape and torch.equal(best, out):  # bounds that are not reached
                self._put(out, origin)
                return
            if base in _SOFTMAX:
                self._soften(best)
            elif base not in _LINEAR | _SAME:
                marks, gain = marks | {"nonlinear"}, None
            factor = -origin.factor if base == "neg" else origin.factor
            self._put(out, Origin(_expanded(origin.codes, out.shape), gain, marks, factor))
        elif acts:  # statistics stay such
            marks = frozenset().union(*(self._acts[t].marks for t in acts))
            self._put(out, Origin(torch.full(out.shape, -1, device=out.device), None, marks))

    def _put(self, out: Tensor, origin: Origin) -> None:
        """What is now known of a tensor; of one that is changed in place, its views see the codes as well."""
        old = self._acts.get(out)
        if old is not None and not (old.codes.is_complex() or origin.codes.is_complex()) and (old.codes < 0).all():
            try:
                old.codes.copy_(origin.codes.expand(out.shape))
            except RuntimeError:  # expanded codes share memory
                self._acts[out] = origin
                return
            self._acts[out] = Origin(old.codes, origin.gain, origin.marks, origin.factor)
        else:
            self._acts[out] = origin

    def _rank(self, tensor: Tensor) -> int:
        return _RANK.get(self.kind(_real(self._acts[tensor].codes)), 1)

    def _scaled(self, base: str, x: Tensor, others: list[Any], out: Tensor) -> None:
        """An activation times a number, a parameter, a statistic, or numbers of positions."""
        origin = self._acts[x]
        codes, gain, marks, factor = _expanded(origin.codes, out.shape), origin.gain, origin.marks, origin.factor
        other = next((y for y in others if isinstance(y, Tensor | int | float)), 1.0)
        if isinstance(other, Tensor) and self._is_weight(other):
            (entries, offset), size = self._weight(other), sum(n > 1 for n in other.shape)
            if base == "mul" and offset in (0, 1) and size <= 1:
                new = (entries | (OFFSET if offset else 0)).expand(out.shape)
                gain = new if gain is None else torch.where(gain.expand(out.shape) < 0, new, SEVERAL)
            else:
                gain, marks = torch.full(out.shape, SEVERAL, device=out.device), marks | {"scaled"}
        elif isinstance(other, Tensor) and (own := self._acts.get(other)) is not None and own.marks:
            marks |= {"normalised" if "statistic" in own.marks else "nonlinear"}
            factor = 1.0
        elif isinstance(other, Tensor) and (other.numel() > 1 or other.is_complex()):
            of_logits = self.kind(_real(codes)) == "product"
            marks |= {"rotated" if other.is_complex() else "biased" if of_logits else "positions"}
        else:
            value = float(other) if not isinstance(other, Tensor) else float(other.real)
            factor = factor * value if base == "mul" else factor / value if value else float("nan")
        self._put(out, Origin(codes, gain, marks, factor))

    def _shifted(self, x: Tensor, other: Tensor, out: Tensor, times: float) -> None:
        """An activation, `times` a number, plus a parameter, a mask or numbers of positions."""
        origin = self._acts[x]
        codes, marks = _expanded(origin.codes, out.shape), origin.marks
        kind, mine = self.kind(_real(codes)), _real(codes)
        if self._is_weight(other):
            if kind == "linear" and sum(n > 1 for n in other.shape) <= 1:
                node = self.node(int(mine.max()) >> BITS)
                entries = self._weight(other)[0].flatten().cpu()
                if node.bias is None and entries.numel() == node.rows:
                    node.bias, node.later = entries, other.detach().flatten().double().cpu()
            marks = marks | {"biased"} if kind == "product" else marks
        elif kind == "product" and not _is_mask(other):
            marks = marks | {"biased"}
        if other in self._acts and "statistic" in self._acts[other].marks and "normalised" not in marks:
            marks = marks | {"centred"}
        self._put(out, Origin(codes, origin.gain, marks, origin.factor * times))

    def _added(self, x: Tensor, y: Tensor, out: Tensor, times: float) -> None:
        """The sum of two activations, the second `times` a number: a rotation, a bias of a map, or a new stream."""
        a, b = self._acts[x], self._acts[y]
        b = replace(b, factor=b.factor * times)
        codes = [_expanded(o.codes, out.shape) for o in (a, b)]
        ranks = self._rank(x), self._rank(y)
        if max(ranks) > 1:
            best = a if ranks[0] >= ranks[1] else b
            marks = {"biased" if max(ranks) == _RANK["product"] else "added"}
            if ranks[0] == ranks[1] == _RANK["product"]:  # one of them may be of positions
                of_tokens = [o for o in (a, b) if self._of_tokens(o)]
                best, marks = (of_tokens or [a])[0], marks | ({"summed"} if len(of_tokens) > 1 else set())
            self._put(out, Origin(_expanded(best.codes, out.shape), best.gain, best.marks | marks, best.factor))
            return
        real = [_real(c) for c in codes]
        numbers = [[n for n in present(c) if n > 0] for c in real]
        if len(numbers[0]) == 1 and numbers[0] == numbers[1]:
            node = self.node(numbers[0][0])
            known = (real[0] >= 0) & (real[1] >= 0)
            same = bool((self.channels(real[0]) == self.channels(real[1]))[known].all())
            if node.kind != "sum" or same:
                mixed = same and not torch.equal(*real)
                turned = not same and self._factor(y, real[1]) > self._factor(x, real[0])  # one of cosines and sines
                marks = a.marks | b.marks | ({"tokens mixed"} if mixed else set() if same else {"rotated"})
                self._put(out, replace(b if turned else a, codes=codes[turned], marks=marks))
                return
        axis = self._axis(real[0])
        axis = self._axis(real[1]) if axis is None else axis
        axis = out.ndim - 1 if axis is None else axis
        sides = tuple(self.vector(c, axis) for c in real)
        for one, given, other in ((a, x, sides[1]), (b, y if times == 1 else y * times, sides[0])):
            if one.gain is not None:
                self.normed |= {(n & ~OFFSET) >> BITS for n in one.gain.unique().tolist() if 0 <= n < SEVERAL}
            for n in present(one.codes) if not one.codes.is_complex() else ():
                if n > 0 and self.node(n).kind in ("linear", "apply") and self.node(n).after is None:
                    self.node(n).after, self.node(n).onto = one, other.cpu()
                    self.node(n).added = None if given is out else given
        inner = math.prod(out.shape[axis + 1 :])
        key = tuple(sorted(bytes(s.cpu().numpy()) for s in sides))
        node = Node("sum", out, rows=out.shape[axis], inner=inner, sides=(a, b))
        node.stream = self._streams.setdefault(key, len(self.nodes))
        self._new(out, node)

    def _factor(self, x: Tensor, codes: Tensor) -> tuple[bool, bool, float]:
        """Larger for cosines than for sines, which are zero at the first token and turn halves round; their mean."""
        made = self.node(int(codes.max()) >> BITS).out.flatten()[codes & ENTRY]
        factors = (x.expand(codes.shape) / made).abs()
        axis = self._axis(codes)
        ordered = axis is not None and bool((self.vector(codes, axis).diff() > 0).all())
        return not bool((factors == 0).any()), ordered, float(factors.nanmean())

    def _of_tokens(self, origin: Origin) -> bool:
        """Whether both sides of a product are maps of activations."""
        numbers = [n for side in self.node(int(origin.codes.max()) >> BITS).sides for n in present(_real(side.codes))]
        made = [self.node(n) for n in numbers if n > 0]
        return all(node.inputs is not None and bool((node.inputs >= 0).any()) for node in made)

    def _multiplied(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """The product of two activations entry by entry: a gate."""
        a, b = self._acts[x], self._acts[y]
        small = [o for o, t in ((a, x), (b, y)) if t.numel() < out.numel()]
        if small or max(self._rank(x), self._rank(y)) > 1:  # a factor of channels or tokens, or of what attention gives
            if self._rank(x) == self._rank(y):
                best, other = (a, b) if x.numel() >= y.numel() else (b, a)
            else:
                best, other = (a, b) if self._rank(x) > self._rank(y) else (b, a)
            for n in present(_real(other.codes)):
                if n > 0:
                    self.node(n).scales = True
            constant = self.kind(_real(other.codes)) == "embedding"  # a table of positions
            mark = "biased" if self.kind(_real(best.codes)) == "product" else "positions" if constant else "gated"
            self._put(out, Origin(_expanded(best.codes, out.shape), None, best.marks | {mark}, best.factor))
            return
        if a.codes.is_complex() or b.codes.is_complex() or bool((a.codes == b.codes).all()):  # x sigmoid(x), x x
            best = b if a.codes.is_complex() else a
            self._put(out, Origin(best.codes, None, a.marks | b.marks | {"nonlinear"}, best.factor))
            return
        axis = self._axis(a.codes)
        axis = out.ndim - 1 if axis is None else axis
        inner = math.prod(out.shape[axis + 1 :])
        self._new(out, Node("gate", out, rows=out.shape[axis], inner=inner, sides=(a, b), values=(x, y)))

    def _axis(self, codes: Tensor) -> int | None:
        """The axis of the channels: the one along which all are different and of one node."""
        for axis in dict.fromkeys((codes.ndim - 1, 1 % max(codes.ndim, 1))):
            vector = self.vector(codes, axis)
            if len(vector) > 1 and bool((vector >= 0).all()) and len(vector.unique()) == len(vector):
                return axis
        return None

    def vector(self, codes: Tensor, axis: int) -> Tensor:
        """The channels along one axis, at the last of all other places."""
        last = codes[tuple(slice(None) if i == axis else -1 for i in range(codes.ndim))]
        return self.channels(last)

    def _soften(self, x: Tensor) -> None:
        """A softmax acts on a product, or on heads mixed after it."""
        for n in present(self._acts[x].codes):
            while n > 0:
                one = self.node(n)
                one.softmax, one.logits, one.masked = True, self._acts[x], x < _MASKED
                mixed = one.kind == "linear" and one.inputs is not None and one.inputs.numel()
                n = int(one.inputs.max()) >> BITS if mixed and one.inputs is not None else 0

    # -- linear maps and products

    def _linear(self, x: Tensor, w: Tensor, out: Tensor, node: Node, bias: Any = None) -> None:
        """`x` has the channels along its last axis, `w` is (rows, columns)."""
        origin = self._acts.get(x)
        node.weight = self._matrix(w)
        node.why = "" if node.weight is not None else "its matrix is computed from parameters"
        self._reads(node, origin, -1)
        if isinstance(bias, Tensor) and self._is_weight(bias) and bias.numel() == node.rows:
            node.bias = self._weight(bias)[0].flatten().cpu()
        node.parameters = self._numbers(w)
        node.values = (x,)
        self._new(out, node)

    def _reads(self, node: Node, origin: Origin | None, axis: int) -> None:
        if origin is None:
            return
        flat = origin.codes.movedim(axis, -1).reshape(-1, origin.codes.shape[axis])
        node.inputs = flat.amax(0).cpu()
        node.marks = origin.marks
        if origin.gain is not None:
            node.gain = origin.gain.movedim(axis, -1).reshape(-1, origin.codes.shape[axis]).amax(0).cpu()
        node.sides = (origin,)

    def _numbers(self, w: Tensor) -> tuple[int, ...]:
        if w in self._made:
            return tuple(n for n in (self._made[w][0] >> BITS).unique().tolist() if n >= 0)
        number = self._number(w)
        return () if number is None else (number,)

    def _on_mm(self, args: Any, kwargs: Any, out: Tensor, bias: Any = None) -> None:
        x, w = args[0], args[1]
        if self._is_weight(w) and x.ndim == 2:
            flipped = w.T
            if w in self._made:
                self._made[flipped] = self._made[w][0].T, self._made[w][1]
            self._linear(x, flipped, out, Node("linear", out, rows=out.shape[-1]), bias)
        elif self._is_weight(x) and w in self._acts:
            transposed = w.T
            self._acts[transposed] = self._turned(self._acts[w])
            self._linear(transposed, x, out, Node("linear", out, rows=out.shape[0], inner=out.shape[1]), bias)
        elif x in self._acts and w in self._acts:
            self._product(x[None], w[None], self._acts[x], self._acts[w], out)

    def _turned(self, origin: Origin) -> Origin:
        gain = None if origin.gain is None else origin.gain.mT
        return Origin(origin.codes.mT, gain, origin.marks, origin.factor)

    def _on_addmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._on_mm(args[1:], kwargs, out, args[0])

    def _on_baddbmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._on_bmm(args[1:], kwargs, out)
        if args[0] in self._acts or self._is_weight(args[0]) or not _is_mask(args[0]):
            beta = kwargs.get("beta", 1)
            mine = self._acts.get(out)
            if beta and mine is not None:
                mine.marks |= {"biased"}
        if (alpha := kwargs.get("alpha", 1)) != 1 and out in self._acts:
            self._acts[out].factor *= alpha

    def _on_bmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        x, w = args[0], args[1]
        for weight, act, turned in ((w, x, False), (x, w, True)):
            if not self._is_weight(weight) or act not in self._acts:
                continue
            codes = self._weight(weight)[0]
            rows, inner = (out.shape[-2], out.shape[-1]) if turned else (out.shape[-1], 1)
            node = Node("linear", out, rows=rows, inner=inner)
            if not bool((codes == codes[:1]).all()):
                node.why, node.parameters = "a matrix of its own for each batch entry", self._numbers(weight)
                self._new(out, node)
                return
            origin = self._acts[act]
            flat = act.mT if turned else act
            flat = flat.reshape(-1, flat.shape[-1])
            one = self._turned(origin) if turned else origin
            gain = None if one.gain is None else one.gain.reshape(flat.shape)
            self._acts[flat] = Origin(one.codes.reshape(flat.shape), gain, one.marks, one.factor)
            matrix = weight[0] if turned else weight[0].T
            if weight in self._made:
                self._made[matrix] = codes[0] if turned else codes[0].T, self._made[weight][1]
            self._linear(flat, matrix, out, node)
            return
        if x in self._acts and w in self._acts:
            self._product(x, w, self._acts[x], self._acts[w], out)

    def _product(self, x: Tensor, w: Tensor, a: Origin, b: Origin, out: Tensor) -> None:
        a, b = (Origin(o.codes.reshape(t.shape), None, o.marks, o.factor) for o, t in ((a, x), (b, w)))
        if out.numel() > _MOST:
            raise MemoryError(f"{out.numel():,} products of queries and keys; give fewer tokens")
        kinds = self.source(a.codes), self.source(b.codes)
        if "product" in kinds:
            left = kinds[0] == "product"
            node = Node("apply", out, rows=out.shape[-1 if left else -2], inner=1 if left else out.shape[-1])
            node.sides, node.values = ((a, b), (x, w)) if left else ((b, a), (w, x))
            node.turned = not left
        else:
            node = Node("product", out, rows=out.shape[-1], sides=(a, b), values=(x, w))
        self._new(out, node)

    def source(self, codes: Tensor) -> str:
        """The kind of node that made the numbers; heads that were mixed after a product count as the product."""
        n = (int(codes.max()) if codes.numel() else -1) >> BITS
        first = self.node(n).kind if n > 0 else ""
        while n > 0 and self.node(n).kind == "linear":
            one = self.node(n)
            if one.inputs is None or not one.inputs.numel() or one.rows != len(one.inputs) or one.rows > 64:
                return first
            n = int(one.inputs.max()) >> BITS
        return "product" if n > 0 and self.node(n).kind == "product" else first

    def _on_embedding(self, args: Any, kwargs: Any, out: Tensor) -> None:
        if self._is_weight(args[0]):
            node = self._new(out, Node("embedding", out, rows=out.shape[-1]))
            node.parameters, node.values = self._numbers(args[0]), (args[1],)

    def _on_convolution(self, args: Any, kwargs: Any, out: Tensor) -> None:
        x, w, bias, stride = args[:4]
        groups, turned = args[8], args[6]
        origin = self._acts.get(x)
        if origin is not None and groups == x.shape[1] > 1 and not turned:  # depthwise: hands on
            codes = origin.codes
            if out.shape != x.shape:
                first = codes.flatten(2).amax(2).repeat_interleave(out.shape[1] // groups, 1)
                codes = first.reshape(*first.shape, *[1] * (out.ndim - 2)).expand(out.shape)
            self._acts[out] = Origin(codes, None, origin.marks | {"convolved"}, origin.factor)
            return
        inner = out[0, 0].numel()
        node = Node("linear", out, rows=out.shape[1], inner=inner)
        node.parameters = self._numbers(w) if self._is_weight(w) else ()
        self._reads(node, origin, 1)
        if not self._is_weight(w):
            node.why = "a convolution with computed filters"
        elif turned or groups > 1 or any(n > 1 for n in w.shape[2:]):
            sizes = " x ".join(map(str, w.shape[2:]))
            node.why = f"a convolution of {sizes} pixels" + (f" in {groups} groups" if groups > 1 else "")
            node.patches = self._matrix(w.flatten(1).T) if turned and groups == 1 and self._is_weight(w) else None
        else:
            node.weight = self._matrix(w.flatten(1))
            node.why = "" if node.weight is not None else "its matrix is computed from parameters"
            strided = x[(..., *(slice(None, None, s) for s in stride))] if any(s > 1 for s in stride) else x
            node.values = (strided.movedim(1, -1).reshape(-1, x.shape[1]),)
        if isinstance(bias, Tensor) and self._is_weight(bias):
            node.bias = self._weight(bias)[0].flatten().cpu()
        self._new(out, node)


def present(codes: Tensor) -> list[int]:
    """The numbers of the nodes in codes, and -1 if some are unknown."""
    numbers = (codes >> BITS).flatten()
    if numbers.numel() and int(numbers[0]) == int(numbers.amax()) == int(numbers.amin()):
        return [int(numbers[0])]
    return [n - 1 for n in torch.bincount(numbers + 1).nonzero().flatten().tolist()]


def _counted(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)


def _real(codes: Tensor) -> Tensor:
    return codes.real.round().long() - 1 if codes.is_complex() else codes


def _expanded(codes: Tensor, shape: Any) -> Tensor:
    return codes.expand(shape) if codes.numel() != int(torch.Size(shape).numel()) else codes.reshape(shape)


def _broadcasts(shape: Any, wanted: Any) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in pairs)


def _is_mask(tensor: Tensor) -> bool:
    """Whether numbers that are added to logits leave them or exclude tokens."""
    return bool(((tensor == 0) | (tensor < _MASKED)).all())


@contextmanager
def _paths(module: nn.Module, tracer: Tracer) -> Iterator[None]:
    """The tracer knows the path of the module that runs."""
    handles, stack = [], [""]

    def enter(path: str) -> Any:
        def hook(inner: nn.Module, given: Any) -> None:
            stack.append(path)
            tracer.path = path

        return hook

    def leave(inner: nn.Module, given: Any, out: Any) -> None:
        stack.pop()
        tracer.path = stack[-1]

    for path, inner in module.named_modules():
        handles += [inner.register_forward_pre_hook(enter(path)), inner.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def single_operations() -> Iterator[None]:
    """Without gradients, and without fused kernels for attention and whole Transformer layers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    """The tracer of one call of a module in evaluation mode; errors of the call are the module's own."""

    def run(mode: Dispatch) -> None:
        with single_operations(), torch.random.fork_rng(), mode:
            module(*args, **kwargs)

    tracer = Tracer(module, run)
    tracer.enter((args, kwargs))
    with _paths(module, tracer):
        run(tracer)
    return tracer
