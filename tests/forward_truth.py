"""What a forward pass computes, seen at its ATen operations and without weightscope: the judge of what was read.

    seen = watch(model, call)                  # every linear map, product, softmax and filter of one forward pass
    verdict = attention_verdict(seen, claim)   # matrices of heads against the numbers that meet in the products

A claim's columns are looked up among the rows of the weights that the linear maps used, so it is known which numbers
of the pass they made; those must be the rows of the operands of softmax(q k^T) v, up to a factor, a normalisation or a
rotation. Where something else acts in between, the numbers of one head are changed during another pass, and only the
entries of that head may change.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

FINAL = "called self-attention, but keys or values read another stream than the queries"
TOLERANCE = 2e-4  # of a row; models compute their rotations, norms and softmax in float32
LARGEST = 2**24  # numbers of an operand that are kept


@dataclass
class Linear:
    """y = x w: tokens (T, d), weights (d, r), results (T, r).

    x is (T, 0) where each result reads several tokens, and y where each token makes several results.
    """

    x: Tensor
    w: Tensor
    y: Tensor


@dataclass
class Product:
    """A batched product of activations, (B, N, c) (B, c, M)."""

    left: Tensor
    right: Tensor
    out: Tensor
    pooled: bool  # one operand is made of parameters alone


@dataclass
class Event:
    """softmax(product) applied to values."""

    product: int
    apply: int
    softmax: int
    pooled: bool
    swapped: bool  # the probabilities are the right operand
    keys: int | None  # which operand of the product is of keys, 0 or 1, as the axis of the softmax says
    place: tuple[int, int] = (0, 0)  # the module that computes it, and how many it computed before: equal if run again


class Stop(Exception):
    """What was looked for has been computed."""


class Watch(TorchDispatchMode):
    """Records; `nudges` change results of linear maps: number -> (rows, noise's seed)."""

    def __init__(self, inputs: Any, nudges: dict[int, Any] | None = None, until: int | None = None) -> None:
        super().__init__()
        self.active, self.tags = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.nudges, self.until = nudges or {}, until
        for each in tree_leaves(inputs):
            if isinstance(each, Tensor):
                self.active[each] = True
        self.steps: list[Linear | None] = []
        self.products: dict[int, Product] = {}
        self.written: dict[int, frozenset] = {}  # storages into which results were written
        self.kept: list[Any] = []
        self.ordered: dict[Any, Any] = {}
        self.known: list[Any] = []  # rules of rotations that fitted
        self.softmaxes: list[tuple[frozenset, Tensor, Tensor, int]] = []
        self.events: list[Event] = []
        self.filters: list[Tensor] = []
        self.used: set[int] = set()  # storages of the matrices
        self.inside: list[tuple[nn.Module | None, list[int]]] = [(None, [])]  # modules that run, and their events

    def alive(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs."""
        return tensor in self.active or tensor.untyped_storage()._cdata in self.written

    def labels(self, tensor: Tensor) -> frozenset:
        return self.tags.get(tensor, frozenset()) | self.written.get(tensor.untyped_storage()._cdata, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        out = func(*args, **kwargs)
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        live = [t for t in given if self.alive(t)]
        if not live or not outs:
            if name in ("mm", "addmm"):  # learned queries
                x, w = (t.detach() for t in args[-2:])
                self.steps.append(Linear(x, w, out.detach().clone()))
                self.nudge(len(self.steps) - 1, out, -1)
            return out
        tags = frozenset().union(*map(self.labels, live))
        if name in _MATRICES:
            tags = self.matrices(name, args, out, tags)
        elif name in ("_softmax", "_safe_softmax", "softmax"):
            parents = frozenset(t for t in tags if t >= 0)
            if self.nudges:
                return self.mark(outs, frozenset(), out)
            self.softmaxes.append((parents, given[0].detach().clone(), out.detach().clone(), args[1]))
            tags = frozenset([-len(self.softmaxes)])
        first = func._schema.arguments[0].alias_info
        if first is not None and first.is_write and isinstance(args[0], Tensor):
            storage = args[0].untyped_storage()
            self.kept.append(storage)
            self.written[storage._cdata] = self.written.get(storage._cdata, frozenset()) | tags
        return self.mark(outs, tags, out)

    def mark(self, outs: list[Tensor], tags: frozenset, out: Any) -> Any:
        for each in outs:
            self.active[each] = True
            self.tags[each] = tags
        return out

    def matrices(self, name: str, args: Any, out: Tensor, tags: frozenset) -> frozenset:
        """Record a step; the tags of its output."""
        number, step = len(self.steps), None
        self.used |= {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        if name == "convolution":
            step = self.convolution(number, args, out)
        else:
            x, w = args[:2] if name in ("mm", "bmm") else args[1:3]
            both = self.alive(x) and self.alive(w)
            left, right, result = (t.detach() if t.ndim == 3 else t.detach()[None] for t in (x, w, out))
            if self.nudges and both and number not in self.nudges and number < min(self.nudges):
                self.steps.append(None)
                return frozenset()
            if not both and self.alive(x) and bool((right == right[:1]).all()):
                self.nudge(number, out, -1)
                if self.nudges and number != self.until:
                    self.steps.append(None)
                    return frozenset()
                flat = [t.reshape(-1, t.shape[-1]).clone() for t in (left, result)]
                step = Linear(flat[0], right[0], flat[1])
            elif not both and self.alive(w) and bool((left == left[:1]).all()):
                self.nudge(number, out, -2)
                if self.nudges and number != self.until:
                    self.steps.append(None)
                    return frozenset()
                flat = [t.mT.reshape(-1, t.shape[1]).clone() for t in (right, result)]
                step = Linear(flat[0], left[0].T, flat[1])
            if both or step is None:
                left, right, result = left.clone(), right.clone(), result.clone()
            if number in self.nudges and step is None:
                entries, channels, axis = self.nudges[number]
                moved = out.detach().movedim(axis, -1) if out.ndim == 3 else out.detach()[None].movedim(axis, -1)
                noise = torch.randn(moved.shape, generator=torch.Generator().manual_seed(1)).to(out) * out.std()
                chosen = torch.zeros(moved.shape[0], moved.shape[-1], dtype=torch.bool)
                chosen[entries, channels] = True
                moved += noise * chosen[:, None]
            self.products[number] = Product(left, right, result, not both)
            if not self.nudges:
                self.apply(number, x, w)
        self.steps.append(step)
        if self.until is not None and number >= self.until:
            raise Stop
        sizes = {
            t: self.products[t].out if t >= 0 else self.softmaxes[-t - 1][2]
            for t in tags
            if t in self.products or t < 0
        }
        mixed = (t for t, each in sizes.items() if step is not None and each.numel() == out.numel())  # talking heads
        return frozenset(mixed) | {number}

    def nudge(self, number: int, out: Tensor, axis: int) -> None:
        """Add noise to some channels."""
        rows = self.nudges.get(number)
        if rows is not None:
            moved = out.movedim(axis, -1)
            noise = torch.randn(*moved.shape[:-1], len(rows), generator=torch.Generator().manual_seed(1))
            moved[..., rows] += noise.to(out) * out.std()

    def convolution(self, number: int, args: Any, out: Tensor) -> Linear | None:
        x, w, groups, transposed = args[0], args[1], args[8], args[6]
        if groups == x.shape[1] and groups > 1 and not transposed:
            self.filters.append(w.detach())
        if groups > 1 or not self.alive(x) or self.alive(w):
            return None
        if transposed:  # patches of each token, which overlap
            inner = x.detach().movedim(1, -1).reshape(-1, x.shape[1]).clone()
            return Linear(inner, w.detach().flatten(1), inner.new_zeros(len(inner), 0))
        self.nudge(number, out, 1)
        if self.nudges and number != self.until:
            return None
        y = out.detach().movedim(1, -1).reshape(-1, out.shape[1]).clone()
        if w[0, 0].numel() > 1:
            return Linear(x.new_zeros(len(y), 0), w.detach().flatten(1).T, y)
        inner = x.detach().movedim(1, -1)
        inner = inner[(slice(None), *(slice(None, None, s) for s in args[3]))]
        return Linear(inner.reshape(-1, x.shape[1]).clone(), w.detach().flatten(1).T, y)

    def apply(self, number: int, x: Tensor, w: Tensor) -> None:
        for swapped, probabilities in enumerate((x, w)):
            for tag in self.labels(probabilities):
                if tag >= 0:
                    continue
                parents, given, _result, dim = self.softmaxes[-tag - 1]
                rows = given.numel() // given.shape[dim]
                for parent in parents:
                    one = self.products.get(parent)
                    if one is None or min(one.out.shape[1:]) == 0:
                        continue
                    if given.numel() != one.out.numel() and rows not in {
                        one.out.numel() // n for n in one.out.shape[1:]
                    }:
                        continue
                    if self.alive(w if not swapped else x):
                        keys, (module, mine) = _keys_side(one, given, dim), self.inside[-1]
                        place = id(module), len(mine)
                        mine.append(len(self.events))
                        self.events.append(Event(parent, number, -tag - 1, one.pooled, bool(swapped), keys, place))


def _keys_side(product: Product, given: Tensor, dim: int) -> int | None:
    """The operand over whose rows the softmax runs: the product's columns are those of the right one."""
    logits, found = product.out.double(), {}
    for side, size, mine in ((1, logits.shape[2], logits), (0, logits.shape[1], logits.mT)):
        if given.shape[dim] == size and given.numel() == logits.numel() > 1:
            two = torch.stack([mine.flatten(), given.double().movedim(dim, -1).flatten()])
            two = two[:, (two[1] > -1e4) & two.isfinite().all(0)]
            found[side] = float(torch.corrcoef(two)[0, 1].abs().nan_to_num())
    best = max(found, key=lambda side: found[side]) if found else None
    return best if found and found[best] > max(0.3, 2 * min(found.values()) if len(found) > 1 else 0) else None


_MATRICES = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


def watch(model: nn.Module, inputs: Any, nudges: dict[int, Any] | None = None, until: int | None = None) -> Watch:
    """One forward pass of a model in evaluation mode; `nudges` as of `Watch`, which ends after step `until`."""
    mode = Watch(inputs, nudges, until)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    hooks = (
        register_module_forward_pre_hook(lambda module, given: mode.inside.append((module, []))),
        register_module_forward_hook(lambda module, given, out: (mode.inside.pop(), None)[1]),
    )
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), mode:
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except Stop:
        pass
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for each in hooks:
            each.remove()
    return mode


def attentions(seen: Watch) -> set[int]:
    """Numbers of the events that are softmax(q k^T) v of activations q, k and v, between more than one token."""
    sizes = {n: seen.products[e.product].out.shape[1:] for n, e in enumerate(seen.events) if not e.pooled}
    return {n for n, size in sizes.items() if max(size) > 1}


# -- claims


@dataclass
class Claim:
    """One attention as it was read: q, k, v (heads, d, width of a head), o (heads, width of a head, d)."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    kind: str = "self"
    notes: dict = field(default_factory=dict)


@dataclass
class Verdict:
    """right, or wrong and why; how each letter was found."""

    right: bool
    why: str = ""
    how: dict = field(default_factory=dict)
    events: tuple[int, ...] = ()


def _keys(rows: Tensor) -> Tensor:
    z = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return rows.double() @ z


def lookup(table: Tensor, rows: Tensor, tolerance: float, ordered: Any = None) -> tuple[Tensor, Tensor]:
    """For each row the number of the nearest row of the table, and whether it is equal to it."""
    keys, order = ordered or _ordered(table)
    at = torch.searchsorted(keys, _keys(rows).contiguous())
    best = torch.full((len(rows),), torch.inf, dtype=torch.float64)
    index = torch.zeros(len(rows), dtype=torch.long)
    for shift in (-1, 0, -2, 1, -3, 2):
        each = order[(at + shift).clamp(0, len(order) - 1)]
        far = (table[each].double() - rows.double()).norm(dim=-1)
        index, best = torch.where(far < best, each, index), torch.minimum(far, best)
    return index, best <= tolerance * rows.double().norm(dim=-1).clamp_min(1e-12)


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    return _keys(table).sort()


def sources(seen: Watch, columns: Tensor, side: str) -> Iterator[list[tuple[int, Tensor]]]:
    """Which rows (or inputs) of which linear maps have these weights (n, d): (number of the step, index of each)."""
    groups: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for number, step in enumerate(seen.steps):
        if isinstance(step, Linear):
            table = step.w.T if side == "y" else step.w
            if table.shape[1] == columns.shape[1] and getattr(step, side).shape[1]:
                ordered = seen.ordered.get((number, side)) or seen.ordered.setdefault((number, side), _ordered(table))
                if bool(lookup(table, columns[:: max(1, len(columns) // 7)], 1e-6, ordered)[1].any()):
                    groups.setdefault(len(step.x), []).append((number, *lookup(table, columns, 1e-6, ordered)))
    for found in groups.values():
        whole = [(n, i) for n, i, s in found if bool(s.all())]
        for number, index in whole:
            yield [(number, index)]
        if not whole and bool(torch.stack([s for _, _, s in found]).any(0).all()):
            yield [(n, torch.where(s, i, -1)) for n, i, s in found]


def idle(seen: Watch, model: nn.Module, columns: Tensor) -> bool:
    """Whether these weights (n, d) are rows or columns of a parameter that the pass does not use."""
    for p in model.parameters():
        if p.ndim > 1 and p.numel() and p.untyped_storage()._cdata not in seen.used:
            flat = p.detach().reshape(-1, p.shape[-1]) if p.ndim == 3 else p.detach().flatten(1)
            for table in (flat, flat.T):
                if table.shape[1] == columns.shape[1] and bool(lookup(table, columns.to(table), 1e-6)[1].all()):
                    return True
    return False


def gather(seen: Watch, found: list[tuple[int, Tensor]], side: str, heads: int) -> Tensor:
    """The numbers of the pass (heads, T, width of a head) at these places."""
    out = None
    for number, index in found:
        step = seen.steps[number]
        values = step.y if side == "y" else step.x
        picked = values[:, index.clamp(min=0)].double()
        out = picked if out is None else torch.where(index >= 0, picked, out)
    return out.T.reshape(heads, -1, out.shape[0]).mT


Rule = tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _same(x: Tensor) -> Tensor:
    return x


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _levelled(y: Tensor) -> Tensor:
    """(heads, T, width) without the mean over all heads, as LayerNorm of all of them gives."""
    return y - y.mean((0, 2), keepdim=True)


def rotations(k: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Magnitudes of the planes that a rotation by position may turn."""
    spans = [(0, k)] + [span for r in range(k - 2, 0, -2) for span in ((0, r), (k - r, k))]
    for low, high in spans:
        r = high - low
        for blocks in (1, 2, 3, 4):
            if r % (2 * blocks) or ((low, high) != (0, k) and blocks > 2):
                continue
            each = r // blocks
            for style in ("halves", "neighbours"):
                if style == "neighbours" and blocks > 1:
                    continue

                def planes(x: Tensor, low: int = low, high: int = high, each: int = each, style: str = style) -> Tensor:
                    part = x[..., low:high].unflatten(-1, (-1, each))
                    pair = part.unflatten(-1, (2, -1)) if style == "halves" else part.unflatten(-1, (-1, 2)).mT
                    size = pair.square().sum(-2).sqrt().flatten(-2)
                    return torch.cat([x[..., :low], size, x[..., high:]], -1)

                yield f"rotated {style} {low}:{high} in {blocks}", planes


SIMPLE: list[Rule] = [("exact", _same, _same), ("centred", _centred, _centred)]


def turned(k: int) -> Iterator[Rule]:
    """Rules of rotations: what is done to the rows of the operand and to ours."""
    if k % 2 == 0:
        for name, planes in rotations(k):
            yield name, planes, planes
            yield f"centred, {name}", planes, lambda x, p=planes: p(_centred(x))


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def match(operand: Tensor, table: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (n, k) of an operand in a table of rows (m, k): index, whether found (or empty), factor of each."""
    ours, theirs = rule[2](table), rule[1](operand)
    empty = operand.norm(dim=-1) <= 1e-9 * operand.norm(dim=-1).max().clamp_min(1e-30)
    index, same = lookup(_unit(ours), _unit(theirs), TOLERANCE)
    factor = theirs.norm(dim=-1) / ours[index].norm(dim=-1).clamp_min(1e-30)
    return index, same | empty, torch.where(empty, torch.nan, factor)


def facing(seen: Watch, event: Event, y: Tensor) -> Iterator[tuple[int, Tensor, bool]]:
    """Operands that may be ours, (heads, T, k), as (B, rows, width): side, rows, whether channels are over tokens."""
    product = seen.products[event.product]
    for side, operand in enumerate((product.left, product.right.mT)):
        if operand.shape[-1] == y.shape[-1]:
            yield side, operand.double(), False
        if operand.shape[-2] == y.shape[-1]:
            yield side + 2, operand.mT.double(), False
        if operand.shape[-1] == y.shape[-2]:
            yield side + 4, operand.double(), True


def values_of(seen: Watch, event: Event, width: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Values and outputs of an event, (B, tokens, width), and the axis of the channels in its output."""
    apply = seen.products[event.apply]
    v, y, axis = (apply.left.mT, apply.out.mT, -2) if event.swapped else (apply.right, apply.out, -1)
    if v.shape[-1] == width:
        yield v.double(), y.double(), axis
    if v.shape[-2] == width:
        yield v.mT.double(), y.mT.double(), -3 - axis


def fits(operand: Tensor, table: Tensor, rules: Iterable[Rule]) -> Rule | None:
    """The rule by which a few rows of the operand are those of the table."""
    flat = operand.flatten(0, 1)
    flat = flat[flat.norm(dim=-1) > 1e-9 * flat.norm(dim=-1).max().clamp_min(1e-30)]
    if not len(flat):
        return None
    some = flat[random.Random(0).sample(range(len(flat)), min(5, len(flat)))]
    return next((rule for rule in rules if bool(match(some, table, rule)[1].all())), None)


def constant(factor: Tensor) -> bool:
    known = factor[~factor.isnan()]
    return bool(len(known)) and bool((known - known.mean()).abs().max() <= 1e-3 * known.mean())


def attention_verdict(seen: Watch, claim: Claim, again: Callable[[dict[int, Tensor], int], Watch]) -> Verdict:
    """Whether the numbers that the claimed matrices made are what meets in one attention of the pass."""
    heads, groups, width = len(claim.q), len(claim.k), claim.q.shape[-1]
    if heads % groups or len(claim.v) not in (groups, heads):
        return Verdict(False, f"{heads} heads, {groups} of keys, {len(claim.v)} of values")
    rows = {
        x: list(sources(seen, m.double().mT.flatten(0, 1), "y"))
        for x, m in (("q", claim.q), ("k", claim.k), ("v", claim.v))
    }
    o = None if claim.o is None else list(sources(seen, claim.o.double().flatten(0, 1), "x"))
    missing = [x for x, f in (rows | ({} if o is None else {"o": o})).items() if not f]
    if missing:
        return Verdict(False, f"the weights of {', '.join(missing)} are those of no linear map of the pass")
    why, known = "the numbers of q meet in no product", [r for r in seen.known if r[0].endswith(f" {width}")]
    turns = [(f"{name} of {width}", theirs, ours) for name, theirs, ours in turned(width)] if len(seen.events) else []
    levels = [(rules, near, level) for level in (_same, _levelled) for rules, near in ((SIMPLE, 4), (turns, 2))]
    for rules, near, level in (levels[0], (known, 2, _same), *levels[1:]):
        for nq, q in enumerate(rows["q"]):
            yq = level(gather(seen, q, "y", heads))
            later = [(n, e) for n, e in enumerate(seen.events) if e.product > max(n for n, _ in q)]
            for number, event in later[:near]:
                for side, left, over in facing(seen, event, yq):
                    if event.keys == side % 2:
                        continue
                    table = yq.mT if over else yq  # (heads, rows, their width)
                    rule = fits(left, table.flatten(0, 1), SIMPLE[:1] if over else rules)
                    if rule is None:
                        continue
                    index, found, factor = match(left.flatten(0, 1), table.flatten(0, 1), rule)
                    if not bool(found.all()):
                        why = "some rows of the queries are not those of the claim"
                        continue
                    label = torch.where(factor.isnan(), -1, index // table.shape[1]).view(left.shape[:2])
                    if set(label.unique().tolist()) - {-1} != set(range(heads)):
                        there = sorted(set(label.unique().tolist()) - {-1})
                        why = f"the product has the queries of heads {there} of {heads}"
                        continue
                    how = {"q": rule[0] + ("" if constant(factor) else ", normalised")}
                    reason = _rest(seen, event, side, over, claim, label, rows, o, nq, how, rule, rules, level, again)
                    if not reason:
                        if rule not in seen.known and rules is turns and level is _same:
                            seen.known.append(rule)
                        return Verdict(True, "", how, (number,))
                    why = reason
    return _by_support(seen, claim, rows, o, again, why)


def _rest(seen, event, side, over, claim, label, rows, o, nq, how, rule, rules, level, again) -> str:
    heads, groups = len(claim.q), len(claim.k)
    each = heads // groups
    head_sets = [sorted(set(row.tolist()) - {-1}) for row in label]
    why = "the numbers of k are not the other operand"
    for _nk, k in enumerate(rows["k"]):
        yk = level(gather(seen, k, "y", groups))
        keys = next((operand for s, operand, _ in facing(seen, event, yk) if s == side ^ 1), None)
        yk = yk.mT if over else yk
        if keys is None or (found_rule := fits(keys, yk.flatten(0, 1), [rule, *([] if over else rules)])) is None:
            continue
        if found_rule[0].split("rotated")[1:] != rule[0].split("rotated")[1:]:
            why = f"queries are {rule[0]}, keys {found_rule[0]}"
            continue
        good, factors = True, []
        for b, some in enumerate(head_sets):
            for h in some:
                _, found, factor = match(keys[b], yk[h // each], found_rule)
                good &= bool(found.all())
                factors.append(factor)
            if not good:
                break
        if not good:
            why = "keys of another head than that of the queries"
            continue
        how["k"] = found_rule[0] + ("" if constant(torch.cat(factors)) else ", normalised")
        for v in rows["v"]:
            reason = _values(seen, event, claim, head_sets, v, o, how, again)
            if not reason:
                same = _same_stream(seen, rows["q"][nq], k), _same_stream(seen, rows["q"][nq], v)
                if claim.kind == "self" and not all(same):
                    return FINAL
                return ""
            why = reason
    return why


def _same_stream(seen: Watch, a: list, b: list) -> bool:
    one, two = (seen.steps[each[0][0]].x.double() for each in (a, b))
    if one.shape[1] != two.shape[1]:
        return False
    small, large = sorted((one, two), key=len)
    small = small[small.norm(dim=-1) > 0]
    return bool(lookup(large, small, 1e-6)[1].all())


def _values(seen, event, claim, head_sets, v, o, how, again) -> str:
    each, yv = len(claim.q) // len(claim.v), gather(seen, v, "y", len(claim.v))
    why = "the values have another width"
    for values, outputs, axis in values_of(seen, event, claim.v.shape[-1]):
        aligned = len(values) == len(head_sets)
        good = True
        if aligned:
            for b, some in enumerate(head_sets):
                good &= all(bool(match(values[b], yv[h // each], SIMPLE[0])[1].all()) for h in some)
                if not good:
                    break
        else:
            index, found, _ = match(values.flatten(0, 1), yv.flatten(0, 1), SIMPLE[0])
            good = bool(found.all()) and len(set((index // yv.shape[1]).tolist())) == len(yv)
        if not good:
            why = "values of another head than that of the queries"
            continue
        how["v"] = "exact" if aligned else "exact, in another order"
        if o is None:
            return ""
        why = "outputs of the heads are not what the claimed o reads"
        places = [place for place in o if place[0][0] > event.apply]
        for place in places[:2]:
            xo = gather(seen, place, "x", len(claim.o))
            rule = fits(outputs, xo.flatten(0, 1), SIMPLE)
            if rule and all(
                _outputs_match(outputs[b], xo, s, rule) for b, s in enumerate(head_sets if aligned else [])
            ):
                how["o"] = rule[0]
                return ""
            if aligned and _reaches(seen, event, axis, claim, head_sets, place, again):
                how["o"] = "by changing what is applied"
                return ""
    return why


def _reaches(seen, event, axis, claim, head_sets, place, again) -> bool:
    """Whether a change of channels of some heads, after the values, changes the claimed inputs of o and no others."""
    [(number, index)] = place
    heads, width = claim.o.shape[:2]
    if any(len(each) != 1 for each in head_sets):
        return False
    labels = torch.tensor([each[0] for each in head_sets])
    before = seen.steps[number].x.double()
    for bit in range((heads * width - 1).bit_length()):  # each two units are told apart by one of these
        units = torch.tensor([n for n in range(heads * width) if n >> bit & 1])
        chosen = torch.zeros(heads, width, dtype=torch.bool)
        chosen.view(-1)[units] = True
        entries, channels = chosen[labels].nonzero(as_tuple=True)
        other = again({event.apply: (entries, channels, axis)}, number)
        found = _changed_columns(before, other.steps[number].x.double(), index, units)
        if not found or not found <= set(index[units].tolist()):  # a ReLU may hide some
            return False
    return True


def _own(index: Tensor, heads: int, h: int) -> Tensor:
    mine = index.view(heads, -1)[h]
    return mine[mine >= 0].unique()


def _outputs_match(rows: Tensor, xo: Tensor, some: list[int], rule: Rule) -> bool:
    """Whether all rows of one entry of the product's batch are those of its heads, in equal shares."""
    index, found, factor = match(rows, xo[some].flatten(0, 1), rule)
    share = torch.bincount(index[~factor.isnan()] // xo.shape[1], minlength=len(some))
    return bool(found.all()) and (len(some) == 1 or bool((share > 0).all()))


def _entries(a: Tensor, b: Tensor) -> set[int]:
    return set((a - b).abs().flatten(1).amax(1).gt(1e-9 * a.abs().max().clamp_min(1e-30)).nonzero().flatten().tolist())


def _reordered(operand: Tensor, y: Tensor) -> bool:
    """Whether rows of an operand are rows of y (heads, T, k) but for the order of the columns, or a turn."""
    if operand.shape[-1] != y.shape[-1]:
        return False
    rows, table = operand.double().flatten(0, 1), y.flatten(0, 1)
    rows = rows[rows.norm(dim=-1) > 1e-9 * rows.norm(dim=-1).max()]
    table = table[table.norm(dim=-1) > 1e-9 * table.norm(dim=-1).max()]
    if not len(rows) or not len(table) or fits(rows[None], table, SIMPLE):
        return False
    turn = (rows.norm(dim=-1) / rows.norm(dim=-1).square().mean().sqrt())[:, None]
    ours = (table.norm(dim=-1) / table.norm(dim=-1).square().mean().sqrt())[:, None]
    some = turn[:: max(1, len(turn) // 25)]
    isometric = len(rows) > 3 and float(turn.std()) > 1e-3 and bool(lookup(ours, some, 1e-6)[1].all())
    orders = (("sorted", *[lambda x: x.sort(-1)[0]] * 2), ("centred", *[lambda x: _centred(x).sort(-1)[0]] * 2))
    return isometric or fits(rows[None], table, orders) is not None


def _by_support(seen, claim, rows, o, again, why) -> Verdict:
    """Change what some heads' matrices give, and see which entries of the operands, and inputs of o, change with it."""
    if FINAL in why:
        return Verdict(False, why)
    sizes = {"q": len(claim.q), "k": len(claim.k), "v": len(claim.v)}
    places, heads, groups = {x: rows[x][0] for x in "qkv"}, sizes["q"], sizes["k"]
    first = max(n for p in places.values() for n, _ in p)
    later = [e for e in seen.events if e.product > first]
    later = [e for e in later if e.apply == later[0].apply and seen.steps[e.product] is None]
    if not later:
        return Verdict(False, why)

    def changed(some: list[int], letters: str, event: Event) -> tuple[set[int], ...]:
        nudges: dict[int, Tensor] = {}
        for x in letters:
            own = sorted({h * sizes[x] // heads for h in some})
            for number, index in places[x]:
                mine = torch.cat([_own(index, sizes[x], h) for h in own])
                nudges[number] = torch.cat([nudges[number], mine]).unique() if number in nudges else mine
        other = again(nudges, event.apply)
        a, b = seen.products[event.product], other.products[event.product]
        x, y = seen.products[event.apply], other.products[event.apply]
        values = (x.left, y.left) if event.swapped else (x.right, y.right)
        return _entries(a.left, b.left), _entries(a.right, b.right), _entries(*values)

    every = list(range(heads))
    for event in later:
        q, k, v = (changed(every, x, event) for x in "qkv")
        side = 0 if q[0] else 1
        if (
            event.keys != side
            and q[side]
            and k[1 - side]
            and v[2]
            and not (q[1 - side] or q[2] or k[side] or k[2] or v[0] or v[1])
        ):
            break
    else:
        return Verdict(False, f"{why}; nor are q, k and v what the product and the values depend on")
    product, applied = seen.products[event.product], seen.products[event.apply]
    values = applied.left.mT if event.swapped else applied.right
    for letter, operand in (
        ("q", (product.left, product.right.mT)[side]),
        ("k", (product.right.mT, product.left)[side]),
        ("v", values),
    ):
        y = gather(seen, places[letter], "y", sizes[letter])
        if _reordered(operand, y) or _reordered(operand.mT, y):
            return Verdict(False, f"{why}; {letter} has the same numbers in another order")
    n, each = len(product.left), heads // groups
    for bit in range((claim.q.shape[-1] - 1).bit_length()):
        nudges = {}
        for x in "qk":
            for number, index in places[x]:
                mine = index.view(sizes[x], -1)[:, [j for j in range(claim.q.shape[-1]) if j >> bit & 1]].flatten()
                nudges[number] = torch.cat([nudges[number], mine[mine >= 0]]) if number in nudges else mine[mine >= 0]
        other = again(nudges, event.product).products[event.product]
        wanted = {j for j in range(claim.q.shape[-1]) if j >> bit & 1}
        for a, b in ((product.left, other.left), (product.right.mT, other.right.mT)):
            found = _changed_columns(
                a.double().flatten(0, 1),
                b.double().flatten(0, 1),
                torch.arange(a.shape[-1]),
                torch.tensor(sorted(wanted)),
            )
            if len(found) == len(wanted) and found != wanted:
                return Verdict(False, f"{why}; columns of heads are in another order")
    label = torch.zeros(n, dtype=torch.long)
    for bit in range((groups - 1).bit_length()):  # each two groups are told apart by one of these
        some = [h for h in every if h // each >> bit & 1]
        both = changed(some, "qkv", event)
        q, k, v = both[side], both[1 - side], both[2]
        if len(q) != n * len(some) // heads or not q == k == v:
            return Verdict(False, f"{why}; nor do the entries of some heads change with them")
        label[list(q)] += each << bit
    for bit in range((each - 1).bit_length()):
        some = [h for h in every if h % each >> bit & 1]
        q = changed(some, "q", event)[side]
        if len(q) != n * len(some) // heads:
            return Verdict(False, f"{why}; nor do the entries of some queries change with them")
        label[list(q)] += 1 << bit
    if o is not None:
        later = [place for place in o if place[0][0] > event.apply]
        sets = [[int(h)] for h in label]
        axes = [axis for _, _, axis in values_of(seen, event, claim.v.shape[-1])]
        if not later or not any(_reaches(seen, event, axis, claim, sets, later[0], again) for axis in axes):
            return Verdict(False, f"{why}; nor do the inputs of o change with v")
    return Verdict(True, "", dict.fromkeys("qkv", f"by changing heads ({why})"), (seen.events.index(event),))


# -- MLPs and filters


def mlp_verdict(seen: Watch, fc1: Tensor, fc2: Tensor, gate: Tensor | None, again: Callable[..., Watch]) -> Verdict:
    """Whether hidden unit j of fc1 (p, n), and of the gate, is input j of fc2 (n_out, p), and no other one is."""
    second = next(sources(seen, fc2.double().mT.contiguous(), "x"), None)
    if second is None:
        return Verdict(False, "fc2 is no linear map of the pass")
    for name, weights in (("fc1", fc1), ("gate", gate)):
        if weights is None:
            continue
        first = next(sources(seen, weights.double(), "y"), None)
        if first is None:
            return Verdict(False, f"{name} is no linear map of the pass")
        [(number, index)] = first
        [(later, columns)] = next(
            (s for s in sources(seen, fc2.double().mT.contiguous(), "x") if s[0][0] > number), second
        )
        if later <= number:
            return Verdict(False, f"fc2 comes before {name}")
        for bit in range(max(1, (len(index) - 1).bit_length())):  # each two units are told apart by one of these
            units = torch.tensor([n for n in range(len(index)) if not n >> bit & 1])
            other = again({number: index[units].unique()}, later)
            found = _changed_columns(seen.steps[later].x.double(), other.steps[later].x.double(), columns, units)
            if not found or not found <= set(columns[units].tolist()):
                return Verdict(False, f"units of {name} are other inputs of fc2 than claimed")
    if gate is not None and _exchanged(seen, fc1, gate, second):
        return Verdict(False, "the function acts on the units of fc1, not of the gate")
    return Verdict(True)


def _exchanged(seen: Watch, fc1: Tensor, gate: Tensor, second: list) -> bool:
    """Whether h / u is rather a function of the gate's g than h / g of u: neighbours in g have like values."""
    u, g = (gather(seen, next(sources(seen, w.double(), "y")), "y", 1).flatten() for w in (fc1, gate))
    h = gather(seen, second, "x", 1).flatten()
    if not len(u) == len(g) == len(h):
        return False

    def rough(factor: Tensor, by: Tensor) -> Tensor:
        ratio = (h / factor)[by.argsort()]
        # means, since more than half of what a ReLU gives is zero
        return ratio.diff().abs().mean() / (ratio - ratio.median()).abs().mean().clamp_min(1e-30)

    return not bool(rough(u, g) < rough(g, u))


def _changed_columns(before: Tensor, after: Tensor, columns: Tensor, units: Tensor) -> set[int]:
    """Columns that changed, but for a factor and a shift of each row, as a normalisation of all units makes."""

    def changed(reference: Tensor) -> set[int]:
        far = (after - reference).abs().amax(0) > 1e-6 * before.abs().max().clamp_min(1e-30)
        return set(far.nonzero().flatten().tolist())

    rest = torch.ones(before.shape[1], dtype=torch.bool)
    rest[columns[units]] = False
    plain, wanted = changed(before), set(columns[units].tolist())
    if plain <= wanted or len(plain) == len(wanted) or not bool(rest.any()):
        return plain
    a, b = before[:, rest], after[:, rest]
    mean = a.mean(1, keepdim=True)
    slope = ((a - mean) * b).sum(1, keepdim=True) / (a - mean).square().sum(1, keepdim=True).clamp_min(1e-30)
    return changed((before - mean) * slope + b.mean(1, keepdim=True))


def filters_verdict(seen: Watch, filters: Tensor) -> Verdict:
    """Whether these filters, (C, kh, kw) or (C, 1, k), are those of a convolution with as many groups as channels."""
    same = any(torch.equal((f[:, 0] if f.ndim == 4 else f).double(), filters.double()) for f in seen.filters)
    return Verdict(same, "" if same else "no depthwise convolution of the pass has these filters")
