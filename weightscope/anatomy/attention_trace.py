"""Attention modules as a forward pass shows them: which parameters are the queries, keys, values and outputs of a head.

An application of softmax(q k^T) to v that a linear map follows is an attention. The codes of its numbers (see
`tracing`) name the row of a parameter for every entry of W_Q, W_K and W_V of every head, and those of what the next
linear map reads the column of W_O. They are compared with the numbers of the same pass.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weightscope.anatomy.attention_part import AttentionPart, Gain
from weightscope.anatomy.tensors import ModuleTensors, Slot, Unread, module_of, span
from weightscope.anatomy.tracing import BITS, ENTRY, OFFSET, SEVERAL, Node, Origin, Tracer, Weight, present

_CHANGES = {"rotated", "normalised", "convolved", "pooled", "positions", "scaled", "added", "centred"}
_BETWEEN = _CHANGES | {"nonlinear", "gated"}


class _UnreadError(Exception):
    """Why an attention is not read."""


def attentions(tensors: ModuleTensors, tracer: Tracer, prefix: str) -> Iterator[AttentionPart | Unread]:
    """The attention modules of one trace, in the order in which they run, or why they are not read."""
    reader = _Reader(tracer, [f"{prefix}{name}" for name in tracer.names], tensors, prefix)
    applied = [(number, node) for number, node in enumerate(tracer.nodes) if node is not None and node.kind == "apply"]
    found = [one for number, node in applied if (one := reader.found(number, node)) is not None]
    columns: dict[str, set[str]] = {}
    for one in found:
        if isinstance(one, AttentionPart):
            columns.setdefault(one._weights["o"].name, set()).add(str(one._weights["o"].rows))
    for one in found:
        if isinstance(one, AttentionPart) and len(columns[(name := one._weights["o"].name)]) > 1:
            why = f"(`{name}` reads several attentions; heads in modules of their own are not read)"
            one = Unread(one._weights["q"].name, why, path=one.name)
        yield one


@dataclass
class _Reader:
    tracer: Tracer
    names: list[str]
    tensors: ModuleTensors
    prefix: str

    def found(self, number: int, apply: Node) -> AttentionPart | Unread | None:
        """The attention of one application; None if there is no softmax of a product.

        What is unread without a reason is none, whatever its names: a softmax over one channel is 1.
        """
        product = self._product(apply)
        if product is None or not product.softmax:
            return None
        if product.out.shape[-2:] == (1, 1):  # one token or channel that sees itself
            q, path = self.tracer.channels(product.sides[0].codes), f"{self.prefix}{apply.path}".rstrip(".")
            return Unread(path, "", path=path) if q.shape[2] > 1 and _constant(q, 2) else None
        found: list[str] = []
        try:
            return self._part(number, apply, product, found)
        except _UnreadError as error:
            path = f"{self.prefix}{apply.path}".rstrip(".")
            name = found[0] if found else path
            return Unread(name, f"({error})", path=path)

    def _product(self, apply: Node) -> Node | None:
        n = int(apply.sides[0].codes.max()) >> BITS
        while n > 0 and self.tracer.node(n).kind == "linear":  # heads are mixed
            inputs = self.tracer.node(n).inputs
            n = -1 if inputs is None else int(inputs.max()) >> BITS
        return self.tracer.node(n) if n > 0 else None

    def _part(self, number: int, apply: Node, product: Node, found: list[str]) -> AttentionPart:
        tracer, (weights, values) = self.tracer, apply.sides
        q, k = product.sides
        mixed = tracer.kind(weights.codes) == "linear"
        qc, kc = tracer.channels(q.codes), tracer.channels(k.codes)
        rows, inner = qc.shape[1], qc.shape[2]
        channels = _constant(qc, 2) and _constant(kc, 1) and (inner > 1 or not _constant(qc, 1))
        if not channels and not (_constant(qc, 1) and _constant(kc, 2)):
            raise _UnreadError("queries or keys are not made of one linear map for each channel")
        qh, kh = (qc.amax(2), kc.amax(1)) if channels else (qc.amax(1), kc.amax(2))
        turned = apply.turned
        vc = tracer.channels(values.codes)
        across = 2 if turned == (not channels) else 1
        if not _constant(vc, across):
            raise _UnreadError("values are not made of one linear map for each channel")
        vh = vc.amax(across)
        if mixed or weights.codes.shape[0] != q.codes.shape[0]:
            firsts, order = _distinct(qh, kh)
            value_firsts, order = _distinct(vh)
            if len(firsts) != len(value_firsts):
                raise _UnreadError(f"{len(firsts)} maps act on the values of {len(value_firsts)} heads")
            qs, ks, vs = qh[firsts], kh[firsts], vh[value_firsts]
        else:
            entry = (weights.codes & ENTRY) // (q.codes.shape[1] * k.codes.shape[2])
            batch = torch.where(weights.codes >= 0, entry, -1).flatten(1).amax(1)
            batch = torch.where(batch < 0, torch.arange(len(batch), device=batch.device), batch)
            firsts, order = _distinct(qh[batch], kh[batch], vh)
            qs, ks, vs = qh[batch][firsts], kh[batch][firsts], vh[firsts]
        nodes: dict[str, Node] = {}
        slots, biases = {}, {}
        for letter, codes in (("q", qs), ("k", ks), ("v", vs)):
            made = self._projection(letter, codes, found)
            slots[letter], biases[letter], nodes[letter] = made
        out, slots["o"], biases["o"] = self._output(number, apply, order, qs, vs, channels, turned)
        keys = replace(k, codes=k.codes.mT), product.values[1].mT
        for what, origin, value in (("queries", q, product.values[0]), ("keys", *keys)):
            if "nonlinear" in origin.marks:
                raise _UnreadError(f"a nonlinear function acts on the {what}")
            if self._differ(origin, value, _CHANGES):
                raise _UnreadError(f"the {what} are not what their matrix gives")
        self._compare_turned((q, product.values[0]), keys)
        logits, reads = product.logits, {x: node.sides[0].factor if node.sides else 1.0 for x, node in nodes.items()}
        assert logits is not None
        if q.factor * k.factor * logits.factor * reads["q"] * reads["k"] < 0:
            raise _UnreadError("the logits are a negative number times the products of queries and keys")
        if "summed" in logits.marks | weights.marks:
            raise _UnreadError("the map is made of a sum of several products of queries and keys")
        kept = not mixed and not {"batch", "normalised"} & weights.marks - logits.marks
        of_map = weights.factor / logits.factor if kept else 1.0
        activated = bool({"nonlinear", "normalised"} & (values.marks | out.marks - {"normalised"}))
        plain = not {"nonlinear", "normalised"} & values.marks
        if plain and self._differ(values, apply.values[1], {"convolved", "pooled"}):
            raise _UnreadError("the values are not what their matrix gives")
        scaled = bool(out.values and out.sides) and self._differ(out.sides[0], out.values[0], _BETWEEN)
        scaled |= "normalised" in out.marks or self._multiplied(out)
        after = out.after
        if after is not None:
            scaled |= bool(after.marks & {"nonlinear", "gated", "convolved"})
            if out.added is not None and (after.gain is None or "batch" in after.marks):
                scaled |= self._differ(after, out.added, {"normalised", "pooled"})
        heads, kv_heads = len(qs), self._groups(slots, ks, vs)
        width, kv_width, v_width = (nodes[x].weight.columns for x in "qkv")  # type: ignore[union-attr]
        streams = {x: self._stream(node) for x, node in nodes.items()}
        marks, memory = q.marks | k.marks, [nodes[x].values[0].data_ptr() for x in "qk"]
        own = {"convolved", "pooled", "tokens mixed"}
        filtered = bool((nodes["q"].marks | nodes["k"].marks) & own)  # each in its own way
        same = streams["q"] == streams["k"] == streams["v"] and kv_width == v_width
        kind: Any = "self" if same and (not filtered or memory[0] == memory[1]) else "cross"
        learned = nodes["q"].inputs is None or bool((nodes["q"].inputs < 0).all())
        if channels:
            kind = "channels"
        elif learned or (rows == 1 and kc.shape[2] > 1):
            kind = "pooled"
        head_width, value_width = qs.shape[1], vs.shape[1]
        scale = abs(q.factor * k.factor * logits.factor)
        known = [n for n in (head_width**-0.5, 1.0) if abs(scale - n) < 1e-3 * n]
        hidden = product.masked
        assert hidden is not None
        square = hidden.shape[-1] == hidden.shape[-2] > 1
        causal = kind == "self" and square and bool((hidden | torch.ones_like(hidden).tril()).all())
        shapes = {"q": (heads, head_width), "k": (kv_heads, head_width), "v": (kv_heads, value_width)}
        shapes["o"] = heads, value_width
        widened = slots["o"][3] != width or not self._returns(out, nodes["q"])
        there = {"heads mixed": mixed, "activated": activated, "gated": "gated" in out.marks}
        there |= {"scaled": scaled and not activated, "widened": widened}

        def rows_of(x: str, lines: Tensor, total: int) -> Any:
            """Of keys and values, which groups of consecutive queries share, those of the first one."""
            return span(lines.reshape(heads, -1)[:: heads // kv_heads].flatten() if x in "kv" else lines, total)

        weights_of, biases_of = {}, {}
        for x, (name, lines, transposed, columns) in slots.items():
            chosen = rows_of(x, lines, self.tensors.shape(name)[1 if transposed else 0])
            weights_of[x] = Slot(name, chosen, transposed, shape=(*shapes[x], columns), swapped=x != "o")
        for x, (name, lines) in ((x, bias) for x, bias in biases.items() if bias is not None):
            chosen = rows_of(x, lines, self.tensors.shape(name)[0])
            biases_of[x] = Slot(name, chosen, vector=True, shape=None if x == "o" else shapes[x])
        return AttentionPart(
            layer=0,
            name=module_of([slots[x][0] for x in "qkv"]),
            kind=kind,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            kv_width=kv_width,
            head_width=head_width,
            value_width=value_width,
            rotary="rotated" in marks,
            causal=causal,
            normalised=bool({"normalised", "scaled"} & (marks | logits.marks)),
            scale=known[0] if known else scale if scale == scale else 1.0,
            positional="biased" in logits.marks | weights.marks
            or bool((hidden.tril() if causal else hidden).any())
            or bool({"convolved", "pooled", "gated"} & (marks | values.marks))
            or bool({"added", "scaled"} & out.marks)
            or ("positions" in marks and "rotated" not in marks),
            notes=frozenset(word for word, yes in there.items() if yes),
            numbers=tuple(range(heads)),
            _tensors=self.tensors,
            _weights=weights_of,
            _biases=biases_of,
            norm=self._norm([nodes[x] for x in "qkv"]),
            layer_scale=self._scale(out, reads["v"] * values.factor * of_map),
        )

    def _projection(self, letter: str, codes: Tensor, found: list[str]) -> tuple[Any, Any, Node]:
        """Parameter, rows, whether transposed and columns of a projection; its bias; one of its nodes."""
        what = {"q": "queries", "k": "keys", "v": "values"}[letter]
        numbers = present(codes)
        nodes = [self.tracer.node(n) for n in numbers if n > 0]
        found += [self.names[p] for node in nodes for p in node.parameters]
        if any(len(row.unique()) < len(row) for row in codes):
            raise _UnreadError(f"one channel of the {what} is used twice")
        if len(nodes) != len(numbers) or not nodes:
            rules = ", ".join(self.tracer.without_rule) or "no linear map"
            raise _UnreadError(f"{what} descend from something unknown: {rules}")
        for node in nodes:
            if node.kind != "linear" or node.weight is None:
                raise _UnreadError(f"{what}: {node.why or f'made by a {node.kind} of activations'}")
        if len({node.weight.columns for node in nodes}) > 1 or len({self._stream(node) for node in nodes}) > 1:  # type: ignore[union-attr]
            raise _UnreadError(f"{what} are made by maps of several streams")
        first = torch.empty(codes.numel(), dtype=torch.long)
        bias = torch.full((codes.numel(),), -1)
        flat = codes.flatten().cpu()
        for n, node in zip([n for n in numbers if n > 0], nodes, strict=True):
            where = flat >> BITS == n
            first[where] = node.weight.first.cpu()[flat[where] & ENTRY]  # type: ignore[union-attr]
            if node.bias is not None:
                bias[where] = node.bias[flat[where] & ENTRY]
        weight = nodes[0].weight
        assert weight is not None
        slot = self._lines(Weight(first, weight.step, weight.columns), what)
        owners = present(bias)
        with_bias = (self.names[owners[0]], bias & ENTRY) if len(owners) == 1 and owners[0] >= 0 else None
        return slot, with_bias, nodes[0]

    def _lines(self, weight: Weight, what: str) -> tuple[str, Tensor, bool, int]:
        """Name of the parameter, numbers of its rows, whether it is stored transposed, columns."""
        owners = present(weight.first)
        if len(owners) != 1:
            raise _UnreadError(f"{what} are in {len(owners)} tensors")
        if (found := self.tracer.rows_of(weight)) is None:
            shape = tuple(self.tracer.parameters[owners[0]].shape)
            raise _UnreadError(f"{what} are not rows or columns of `{self.names[owners[0]]}` {shape}")
        return self.names[owners[0]], *found[1:], weight.columns

    def _output(
        self, number: int, apply: Node, order: Tensor, qs: Tensor, vs: Tensor, channels: bool, turned: bool
    ) -> tuple[Node, Any, Any]:
        """The linear map that reads what attention gives: its node, columns by head, bias."""
        for node in self.tracer.nodes[number + 1 :]:
            if node is None or node.kind != "linear" or node.inputs is None:
                continue
            mine = node.inputs >> BITS == number
            if not bool(mine.any()):
                continue
            if (weight := node.weight or node.patches) is None:
                raise _UnreadError(f"the output: {node.why}")
            entry, size = node.inputs & ENTRY, (1, *apply.out.shape)[-3:]
            batch = entry // (size[1] * size[2])
            channel = entry % size[2] if channels == turned else entry // size[2] % size[1]
            heads, width = len(qs), vs.shape[1]
            if channels:
                width = size[2] if turned else size[1]
            columns = torch.full((heads, width), -1)
            head = order.cpu()[batch[mine]]
            columns[head, channel[mine]] = torch.arange(len(mine))[mine]
            if bool((columns < 0).any()):
                raise _UnreadError("the output reads other channels than those that attention gives")
            steps = weight.first.diff().unique()
            if len(steps) != 1:
                raise _UnreadError("the rows of the output have no regular places")
            first = weight.first[0] + weight.step * columns.flatten()
            slot = self._lines(Weight(first, int(steps), len(weight.first)), "outputs")
            bias = None
            if node.bias is not None and len(owners := present(node.bias)) == 1 and owners[0] >= 0:
                bias = self.names[owners[0]], node.bias & ENTRY
            return node, slot, bias
        raise _UnreadError("no linear map reads what attention gives")

    def _multiplied(self, out: Node) -> bool:
        """Whether activations multiply the output before it is added to a stream; a linear map of it is an error."""
        if out.after is not None or not any(node is not None and node.kind == "sum" for node in self.tracer.nodes):
            return False
        number = self.tracer.nodes.index(out)
        later = [node for node in self.tracer.nodes[number + 1 :] if node is not None]
        for node in later:
            if node.kind != "linear" or node.inputs is None or node.marks & {"nonlinear", "normalised"}:
                continue
            if bool((node.inputs >> BITS == number).all()):
                raise _UnreadError("another linear map follows the output")
        sides = [side.codes for node in later if node.kind == "gate" for side in node.sides]
        return any(bool((codes >> BITS == number).all()) for codes in sides)

    def _groups(self, slots: Any, ks: Tensor, vs: Tensor) -> int:
        """The number of key heads, which consecutive query heads share."""
        n = len(_distinct(ks)[0])
        if len(_distinct(vs)[0]) != n:
            raise _UnreadError(f"{n} different key heads and {len(_distinct(vs)[0])} of values")
        kinds = _distinct(ks)[1].tolist()
        if len(kinds) % n or kinds != sorted(kinds) or len({kinds.count(i) for i in range(n)}) > 1:
            raise _UnreadError("key heads are not shared by consecutive query heads")
        return n

    def _returns(self, out: Node, reads: Node) -> bool:
        """Whether the output is added to the stream that queries read, where it is added to one."""
        axis = None if out.after is None else self.tracer._axis(out.after.codes)
        if axis is not None and not _counts(self.tracer.vector(out.after.codes, axis) & ENTRY):  # type: ignore[union-attr]
            return False
        if out.onto is None or reads.inputs is None:
            return True
        mine, there = out.onto, self.tracer.channels(reads.inputs)
        unknown = bool((mine < 0).any() | (there < 0).any())
        beside = any(self.tracer.node(n).kind == "linear" for n in present(mine) if n > 0)  # of a parallel MLP
        return unknown or beside or self._channels(mine) == self._channels(there)

    def _stream(self, node: Node) -> Any:
        """Equal for maps that read the same channels of the same stream of tokens."""
        return () if node.inputs is None else self._channels(self.tracer.channels(node.inputs))

    def _channels(self, codes: Tensor) -> Any:
        for n in present(codes):
            if n > 0 and (one := self.tracer.node(n)).stream:
                codes = torch.where(codes >> BITS == n, codes & ENTRY | one.stream << BITS, codes)
        return tuple(codes.tolist())

    def _made(self, codes: Tensor) -> Tensor | None:
        """What the maps that the codes name gave, float64, 0 for unknown ones; None if it was overwritten."""
        made, codes = torch.zeros(codes.shape, dtype=torch.float64), codes.cpu()
        for n in present(codes):
            if n > 0:
                node, where = self.tracer.node(n), codes >> BITS == n
                if node.out._version != node.version:
                    return None
                entries = codes[where] & ENTRY
                made[where] = node.out.detach().double().flatten().cpu()[entries]
                if node.later is not None:
                    made[where] += node.later[entries // node.inner % node.rows]
        return made

    def _differ(self, origin: Origin, value: Tensor, changes: Set[str]) -> bool:
        """Whether numbers are not what a map gave, rearranged, times a number, plus a bias; False if so marked."""
        if origin.marks & changes or origin.factor != origin.factor or origin.codes.is_complex():
            return False
        codes = origin.codes
        if codes.shape != value.shape:  # of images, with the channels first
            codes = codes.movedim(1, -1)
        if codes.numel() != value.numel() or (made := self._made(codes.reshape(value.shape))) is None:
            return False
        value = value.detach().double().cpu()
        value, made = (x - x.mean(max(x.ndim - 2, 0), keepdim=True) for x in (value, made))
        return bool((value - origin.factor * made).norm() > 2e-2 * value.norm())

    def _compare_turned(self, q: tuple[Origin, Tensor], k: tuple[Origin, Tensor]) -> None:
        """A rotation leaves the products of the query and the key of one token."""
        (a, x), (b, y) = q, k
        marks = a.marks | b.marks
        if "rotated" not in marks or marks & (_CHANGES - {"rotated", "positions"}) or x.shape != y.shape:
            return
        made = self._made(a.codes), self._made(b.codes)
        if made[0] is None or made[1] is None or a.codes.is_complex() or b.codes.is_complex():
            return
        wanted = a.factor * b.factor * (made[0] * made[1]).sum(-1)
        found = (x.double() * y.double()).sum(-1).cpu()
        factor = (found * wanted).sum() / wanted.square().sum()  # of tables of angles for long texts
        if (found - factor * wanted).norm() > 2e-2 * found.norm():
            raise _UnreadError("queries and keys of one token do not meet as their matrices give them")

    def _norm(self, nodes: Sequence[Node]) -> Gain | str:
        """The gain of what the projections read, unless it is also that of the stream itself."""
        gains = []
        for node in nodes:
            gain = node.gain
            if gain is None or bool((gain < 0).all()):
                return "no normalisation acts right before it (the model has none, or one after the attention)"
            if bool((gain >= SEVERAL).any()) or len((gain >> BITS).unique()) > 1 or not _counts(gain & ENTRY):
                return "what it reads is multiplied by more than one gain"
            gains.append(int(gain[0]))
        if len(set(gains)) > 1:
            return "queries, keys and values read different normalisations"
        parameter = (gains[0] & ~OFFSET) >> BITS
        name = self.names[parameter]
        if parameter in self.tracer.normed:
            return f"`{name}` also normalises the stream that the attention is added to (the model normalises after it)"
        return Gain(name, 1.0 if gains[0] & OFFSET else 0.0)

    def _scale(self, out: Node, times: float) -> Gain | str | None:
        """What multiplies the output before it is added to the stream; `times` is what multiplied the values' sums."""
        after = out.after
        times *= (out.sides[0].factor if out.sides else 1.0) * (1.0 if after is None else after.factor)
        if times != times:
            return "its output is multiplied by more than one number"
        if after is not None and "normalised" in after.marks:
            return "its output is normalised before it is added"
        gain = torch.tensor([-1]) if after is None or after.gain is None else after.gain.flatten().unique()
        if bool((gain < 0).all()):
            return None if abs(times - 1) < 1e-6 else Gain("", times=times)
        if bool((gain >= SEVERAL).any()) or len((gain >> BITS).unique()) > 1:
            return "its output is multiplied by more than one gain"
        return Gain(self.names[(int(gain[0]) & ~OFFSET) >> BITS], 1.0 if int(gain[0]) & OFFSET else 0.0, times)


def _constant(channels: Tensor, axis: int) -> bool:
    return bool(((channels == channels.amax(axis, keepdim=True)) | (channels < 0)).all())


def _counts(entries: Tensor) -> bool:
    return bool((entries == torch.arange(len(entries))).all())


def _distinct(*tables: Tensor) -> tuple[list[int], Tensor]:
    """Numbers of the first row of each kind, in order, and the kind of each row."""
    seen: dict[Any, int] = {}
    kinds = [
        seen.setdefault(tuple(map(tuple, row)), len(seen)) for row in zip(*(t.tolist() for t in tables), strict=True)
    ]
    return [kinds.index(i) for i in range(len(seen))], torch.tensor(kinds)
