"""Modules with their effective weights: those that the layers compute with, whatever wraps or parametrises them.

Wrappers (DataParallel, DDP, `torch.compile`, checkpointing, averaging) and adapters (LoRA) are looked through: a layer
has its own name and its base weight. A weight that is computed from other tensors (`torch.nn.utils.parametrize`,
`prune`, the older hooks of weight and spectral norm) is one tensor with its present value. It is set by the inverse of
the computation, and only if the layer then has the weight that was wanted.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, norm_except_dim
from torch import _weight_norm as weight_of
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightscope.checkpoint.tensors import not_weights
from weightscope.errors import DataError, UsageError
from weightscope.networks.layers import SumLinear

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "AveragedModel")  # with the attribute `module`
_INSIDE = ("_orig_mod", "_checkpoint_wrapped_module", "base_layer")  # of torch.compile, checkpointing, adapters
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MARKS = {*_INSIDE, "parametrizations"}
_LORA = re.compile(r"(^|\.)lora[^.]*", re.IGNORECASE)  # tensors and modules of adapters, beside what they adapt
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


class Computed(NamedTuple):
    """A weight that a layer computes from other tensors."""

    name: str  # from the root of the plain module
    value: Tensor  # at present
    trial: Callable[[Tensor], tuple[Tensor, Tensor]]  # new value -> what is expected, and what the layer would have
    write: Callable[[Tensor], None]
    hides: tuple[str, ...]  # tensors and modules of the layer that take part in the computation


def plain(module: nn.Module) -> tuple[nn.Module, list[Computed]]:
    """The module without wrappers, and its computed weights; it shares the memory of all other tensors."""
    computed: list[Computed] = []
    if not any(map(_is_wrapped, module.modules())):
        return module, computed
    return _plain(module, "", {}, computed), computed


_before: ContextVar[dict[Any, tuple[Tensor, Tensor]] | None] = ContextVar("_before", default=None)


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Within the block, `keep` remembers the values of tensors, which get them back if the block fails."""
    if _before.get() is not None:  # within another one
        yield
        return
    kept: dict[Any, tuple[Tensor, Tensor]] = {}
    token = _before.set(kept)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, values in kept.values():
                tensor.copy_(values)
        raise
    finally:
        _before.reset(token)


def keep(tensor: Tensor) -> None:
    """Remember the values of a tensor that is about to be written, see `all_or_nothing`."""
    kept, tensor = _before.get(), tensor.detach()
    if kept is not None and not tensor.is_meta:
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in kept:
            kept[key] = tensor, tensor.clone()


@contextmanager
def writable(module: nn.Module, caller: str, *, idle: bool = False) -> Iterator[nn.Module]:
    """The module with its effective weights as plain tensors, which the block sets in place.

    Weights that the module computes (by a parametrisation or an adapter) get their new values when the block ends, and
    nothing is changed if the block raises an error. DataError if weights cannot be set (quantised, sharded, without
    memory) or a computed weight cannot take its value; UsageError if no tensor was set, unless `idle`.
    """
    inner, computed = plain(module)
    if why := unsettable(inner, writing=True):
        raise DataError(f"{caller}: {why}")
    work = copy.deepcopy(inner) if computed else inner
    versions = {name: value._version for name, value in _tensors(work).items()}
    with all_or_nothing():
        yield work
    new = {name: value.detach() for name, value in _tensors(work).items() if value._version != versions.get(name)}
    if not (new or idle):
        raise UsageError(f"{caller}: no tensor of {type(module).__name__} was set")
    if not computed:
        return
    todo = [(one, new.pop(one.name)) for one in computed if one.name in new]
    todo = [(one, value) for one, value in todo if not torch.equal(value, one.value)]
    for one, value in todo:
        try:
            expected, found = one.trial(value)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            raise DataError(f"{caller}: `{one.name}` is computed and cannot be set: {error}".split("\n")[0]) from error
        size = torch.finfo(value.dtype).eps * float(expected.abs().max())
        if not torch.allclose(found, expected, rtol=0, atol=64 * size):
            raise DataError(
                f"{caller}: `{one.name}` is computed from other tensors and would not have the weights drawn; "
                "do this before it is parametrised, or leave this layer out"
            )
    there = _tensors(inner)
    with torch.no_grad():
        for name, value in new.items():
            there[name].copy_(value)
        for one, value in todo:
            one.write(value.clone())


def unsettable(module: nn.Module, *, writing: bool = False) -> str | None:
    """Why the weights of a plain module cannot be read (or written), if so."""
    for path, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            return f"`{path}` is compiled by TorchScript; do this before compiling"
        kind, own = type(inner), {**inner._parameters, **inner._buffers}
        if kind.__module__.startswith(_QUANTISED) or "_packed_params" in inner._modules:
            return f"`{path}` ({kind.__name__}) is quantised; do this before quantising"
        if kind.__name__ == "FullyShardedDataParallel":
            return f"`{path}` is sharded (FSDP); do this before sharding"
        if "base_layer" in inner._modules and getattr(inner, "merged", False) is True:
            return f"`{path}`: its adapter is merged into the weight; unmerge it first"
        weights = {key: value for key, value in own.items() if value is not None}
        odd = {key: value for key, value in weights.items() if "weight" in key and value.dtype != torch.float32}
        bad = not_weights(odd | {key: value for key, value in weights.items() if value.layout != torch.strided})
        for key, value in weights.items():
            name = f"{path}.{key}".removeprefix(".")
            if is_lazy(value):
                return f"`{name}` has no shape yet (a lazy layer); run the module once first"
            if is_traceable_wrapper_subclass(value):
                return f"`{name}` is a {type(value).__name__}, sharded or quantised; do this before that"
            if value.is_meta:
                return f"`{name}` is on the meta device and holds no numbers; materialise the module first"
            if key in bad:
                return f"`{name}` ({bad[key]}) cannot be read as weights; convert it first"
            if writing and value.is_inference():
                return f"`{name}` was made in inference mode and cannot be written; make the module outside of it"
        if why := _uses_others(inner):
            return f"`{path}` ({kind.__name__}) {why}; use a plain layer"
    return None


@torch.no_grad()
def _uses_others(layer: nn.Module) -> str:
    """How the forward pass of a linear or convolutional layer differs from its weight's; empty if it does not."""
    stock: Any = next((one for one in _LINEAR if isinstance(layer, one)), None)
    if isinstance(layer, SumLinear):  # its sum has a weight of its own, which populations and Net2Net know by name
        return ""
    if stock is None or all(
        getattr(type(layer), key, 0) is getattr(stock, key, 0) for key in ("forward", "_conv_forward")
    ):
        return ""
    copied: Any = copy.deepcopy(layer).cpu().float().eval()
    weight, groups = copied.weight, getattr(layer, "groups", 1)
    x = torch.randn(weight.shape[1] * groups, generator=torch.Generator().manual_seed(0))
    # Of an image of one colour, padding does not reach the middle, where the kernel's entries are added up.
    sides = zip(weight.shape[2:], getattr(layer, "stride", ()), getattr(layer, "dilation", ()), strict=True)
    image = x.reshape(1, -1, *(1 for _ in weight.shape[2:]))
    image = image.expand(1, -1, *(4 * dilation * (k - 1) + 2 * stride + 1 for k, stride, dilation in sides))
    try:
        found = copied(image)[0]
    except Exception:  # noqa: BLE001 - a layer that takes something else
        return "could not be called on one input, so that it is not known whether it computes with its weight"
    sums = weight.reshape(*weight.shape[:2], -1).sum(-1, keepdim=True)
    wanted = nn.functional.conv1d(x[None, :, None], sums, copied.bias, groups=groups).flatten()
    middle = found[(slice(None), *(n // 2 for n in found.shape[1:]))]
    same = middle.shape == wanted.shape and torch.allclose(
        middle, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())
    )
    return "" if same else "computes with other numbers than its weight"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def _plain(module: nn.Module, path: str, seen: dict[int, nn.Module], computed: list[Computed]) -> nn.Module:
    inner = module if isinstance(module, torch.jit.ScriptModule) else _inside(module)
    if inner is module and not any(map(_is_wrapped, module.modules())):
        return module
    if id(inner) in seen:
        return seen[id(inner)]
    seen[id(inner)] = inner  # a module may contain itself
    own = [*_parametrised(inner, path), *_hooked(inner, path)]
    hidden = {key for key in (*inner._parameters, *inner._buffers, *inner._modules) if _LORA.match(key)}
    hidden |= {key for one in own for key in one.hides}
    kept = ((key, child) for key, child in inner._modules.items() if key not in hidden)
    children = {key: None if child is None else _plain(child, f"{path}{key}.", seen, computed) for key, child in kept}
    if own or hidden or any(child is not inner._modules[key] for key, child in children.items()):
        made = {one.name.removeprefix(path): nn.Parameter(one.value.clone()) for one in own}
        new: nn.Module = nn.Module.__new__(parametrize.type_before_parametrizations(inner))
        new.__dict__ = {key: value for key, value in inner.__dict__.items() if key not in made}
        for what in ("_parameters", "_buffers"):
            new.__dict__[what] = {k: v for k, v in inner.__dict__[what].items() if k not in hidden}
        new._parameters, new._modules = {**made, **new._parameters}, children
        new._forward_pre_hooks = type(inner._forward_pre_hooks)(
            (key, hook) for key, hook in inner._forward_pre_hooks.items() if _key(hook) not in made
        )
        seen[id(inner)] = new
    computed += own
    return seen[id(inner)]


def _is_wrapped(module: nn.Module) -> bool:
    """Whether the rest of this file has anything to do with a layer, by the names in it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    keys = (*module._parameters, *module._modules)
    marks = any(key in _MARKS or key.endswith(("_orig", "_g")) or _LORA.match(key) for key in keys)
    return marks or type(module).__name__ in _WRAPPERS


def _inside(module: nn.Module) -> nn.Module:
    """The module in wrappers and adapters."""
    while True:
        inside = {key: module._modules[key] for key in _INSIDE if isinstance(module._modules.get(key), nn.Module)}
        key = next((key for key, child in inside.items() if not isinstance(child, nn.Sequential)), None)  # timm's DLA
        key = "module" if key is None and type(module).__name__ in _WRAPPERS else key
        if key is None and any(map(_LORA.match, (*module._modules, *module._parameters))):
            held = ((k, child) for k, child in module._modules.items() if child and not _LORA.match(k))
            others = [k for k, child in held if any(True for _ in child.parameters())]
            key = others[0] if len(others) == 1 and "weight" not in module._parameters else None
        if key is None or getattr(module, "merged", False) is True:
            return module
        module = module._modules[key]  # type: ignore[assignment]


def adapters(names: Iterable[str]) -> list[str]:
    """The tensors of adapters: those called LoRA's, and those beside a `base_layer`."""
    words = {name: name.split(".") for name in names}
    adapted = {tuple(parts[:-2]) for parts in words.values() if parts[-2:-1] == ["base_layer"]}
    return [
        name
        for name, parts in words.items()
        if _LORA.search(name)
        or any(part != "base_layer" and tuple(parts[:i]) in adapted for i, part in enumerate(parts))
    ]


def refuse_adapters(model: Any) -> None:
    """A DataError if an adapter (`fc1.lora_A`, `fc1.lora_B`) changes a weight, as it does unless one factor is zero.

    What lies beside a `base_layer` is an adapter under any name, and changes it.
    """
    named = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
    names = [n for n in getattr(named, "names", named if isinstance(named, Mapping) else ()) if isinstance(n, str)]
    adapting = adapters(names)
    factors = {name: value.any() for name in adapting if isinstance(value := named.get(name), Tensor)}
    idle = {_LORA.sub("", name, count=1) for name, changes in factors.items() if not changes and _LORA.search(name)}
    if changing := next((name for name in factors if _LORA.sub("", name, count=1) not in idle), None):
        config = getattr(model, "config", None)
        if isinstance(config, Mapping) and "peft_type" in config:
            base = config.get("base_model_name_or_path") or "its base"
            raise DataError(
                f"{model.source}: a LoRA adapter without the weights that it changes; give {base}, and this folder as "
                "--adapter (adapter= of Checkpoint)"
            )
        raise DataError(
            f"the adapter `{changing}` changes a weight; merge it into the weight for good (in peft, "
            "merge_and_unload), or use the model without it"
        )


def _parametrised(inner: nn.Module, path: str) -> Iterator[Computed]:
    for key in getattr(inner, "parametrizations", {}) if parametrize.is_parametrized(inner) else {}:
        real: Any = inner.parametrizations[key]  # type: ignore[index]

        def trial(value: Tensor, real: Any = real) -> tuple[Tensor, Tensor]:
            changed = copy.deepcopy(real).eval()  # the power iterations of spectral norm run in training mode
            changed.right_inverse(value.clone())
            return value, changed().detach()

        present = copy.deepcopy(real).eval()().detach()
        yield Computed(f"{path}{key}", present, trial, real.right_inverse, ("parametrizations",))


def _hooked(inner: nn.Module, path: str) -> Iterator[Computed]:
    """The weights that `prune` or a hook of the older weight and spectral norm sets before each forward pass."""
    hooks = {_key(hook): hook for hook in inner._forward_pre_hooks.values()}
    own = {**inner._parameters, **inner._buffers}
    for key in [key for key, value in inner.__dict__.items() if isinstance(value, Tensor)]:
        hides = tuple(name for end in _ENDS if own.get(name := f"{key}_{end}") is not None)
        kind = _KINDS.get(tuple(name.removeprefix(f"{key}_") for name in hides))
        if kind is not None:
            present, trial, store = kind(hooks.get(key), *(own[name].detach() for name in hides))  # type: ignore[union-attr]

            def write(value: Tensor, key: str = key, store: Any = store, trial: Any = trial) -> None:
                store(value)
                setattr(inner, key, trial(value)[1])

            yield Computed(f"{path}{key}", present, trial, write, hides)


def _key(hook: Any) -> Any:
    """The weight that a hook computes."""
    return getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)


def _pruned(hook: Any, weight: Tensor, mask: Tensor) -> tuple[Tensor, Any, Any]:
    def trial(value: Tensor) -> tuple[Tensor, Tensor]:
        kept = value * mask.to(value)
        used, wanted, left = (x.flatten(1).any(1) if x.ndim > 1 else x.bool() for x in (mask, value, kept))
        if dead := (used & wanted & ~left).nonzero().flatten().tolist():
            raise ValueError(f"its mask leaves {len(dead)} of {len(value)} units at zero, number {dead[0]} first")
        return kept, kept

    return weight * mask.to(weight), trial, weight.copy_


def _weight_norm(hook: Any, size: Tensor, direction: Tensor) -> tuple[Tensor, Any, Any]:
    def store(value: Tensor) -> None:
        direction.copy_(value)
        size.copy_(norm_except_dim(value, 2, hook.dim))

    def trial(value: Tensor) -> tuple[Tensor, Tensor]:
        return value, weight_of(value, norm_except_dim(value, 2, hook.dim), hook.dim)

    return weight_of(direction, size, hook.dim), trial, store


def _spectral_norm(hook: Any, weight: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Any, Any]:
    def trial(value: Tensor) -> tuple[Tensor, Tensor]:
        return value, value / torch.dot(left, torch.mv(hook.reshape_weight_to_matrix(value), right))

    return trial(weight)[1], trial, weight.copy_


_ENDS = ("orig", "mask", "g", "u", "v")  # of the names of the tensors from which such a weight is computed
_KINDS: dict[tuple[str, ...], Callable[..., tuple[Tensor, Any, Any]]] = {
    ("orig", "mask"): _pruned,
    ("g", "v"): _weight_norm,
    ("orig", "u", "v"): _spectral_norm,
}
