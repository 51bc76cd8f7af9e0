"""Inputs with which any module can be run, so that it can be traced."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weightscope.anatomy.tracing import Tracer, traced

R = TypeVar("R")
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_TOKENS, _IDS = 16, 5
_SIZES = (64, 32, 224, 28, 16, 8, 96, 128, 256, 384, 512)
_KEYS = ("key", "value", "k", "v")
_LIKE_TOKENS = (*_KEYS, "context", "memory", "encoder_hidden_states", "key_value_states")


def traces(
    module: nn.Module,
    path: str,
    failed: dict[str, str],
    example: Tensor | None = None,
    used: set[int] | None = None,
    alone: bool = False,
) -> Iterator[tuple[str, Tracer]]:
    """The traces, with their paths, of a module and of those in it that it did not call (all if no input is known).

    What could be called with a second stream or without, and is run `alone` here, has a trace of both.
    `failed` gets the first line of the first error of each module that no input suits; an `example` is tried first.
    Parameters in `used` were seen in other traces.
    """
    used = set() if used is None else used
    if sum(p.ndim > 1 for p in module.parameters()) < 2:  # a lone layer
        return
    called = used.intersection(map(id, module.parameters()))
    coded = type(module).forward is not nn.Module.forward  # else a container, which is never called
    own = coded and type(module) is not nn.Sequential  # code that would say how its parts are called
    copied = without_hooks(module)
    for streams in [] if called or not coded else [True, False] if alone and _streams(module) else [False]:
        tracer, why = first_run(copied, partial(traced, copied), example, streams)
        if tracer is None:
            failed.setdefault(path, why)
            break
        yield path, tracer
        used |= {id(tracer.parameters[n]) for node in tracer.nodes if node is not None for n in node.parameters}
    for name, child in module.named_children():  # what was not called, such as the other tower
        yield from traces(child, f"{path}.{name}".lstrip("."), failed, used=used, alone=alone or own)


def first_run(module: nn.Module, call: Callable[..., R], *given: Any) -> tuple[R | None, str]:
    """`call(args, kwargs)` of the first `inputs(module, *given)` that raise nothing, and the first error, one line."""
    why = ""
    for args, kwargs in inputs(module, *given):
        try:
            return call(args, kwargs), why
        except Exception as error:  # noqa: BLE001 - a foreign module refuses this kind of input
            why = why or f"{type(error).__name__}: {error}".splitlines()[0]
    return None, why


def without_hooks(module: nn.Module, seen: dict[int, nn.Module] | None = None) -> nn.Module:
    """The same module in evaluation mode with the same parameters, but for hooks, which are a user's own."""
    seen = {} if seen is None else seen
    if id(module) not in seen:
        new = seen[id(module)] = nn.Module.__new__(type(module))
        new.__dict__ = dict(module.__dict__)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            kept = {k: v for k, v in getattr(module, hooks).items() if type(v).__module__.startswith("torch.")}
            new.__dict__[hooks] = type(getattr(module, hooks))(kept)
        new.__dict__ |= {"training": False, "_buffers": dict(module._buffers), "_parameters": dict(module._parameters)}
        new.__dict__["_modules"] = {
            name: None if child is None else without_hooks(child, seen) for name, child in module._modules.items()
        }
    return seen[id(module)]


def _streams(module: nn.Module) -> bool:
    """Whether a layer may be called with another stream of tokens than its first one."""
    named = inspect.signature(module.forward).parameters.values()
    return any(p.name in _LIKE_TOKENS and (p.default is not p.empty or p.name in _KEYS) for p in named)


def inputs(module: nn.Module, example: Any = None, streams: bool = False) -> Iterator[Inputs]:
    """What a module may take: an example, its own one (Lightning's `example_input_array`), what it states, tokens."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(1))
    draw = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(like)

    for given in (example, getattr(module, "example_input_array", None)):
        if isinstance(given, Mapping):
            yield (), dict(given)
        elif given is not None:
            yield (given,) if isinstance(given, Tensor) else given, {}
    if hasattr(module, "main_input_name") and hasattr(module, "config"):
        yield from _of_transformers(module, noise, like.device)
        return
    ids = torch.arange(1, _IDS + 1, device=like.device)[None]
    sequence_first = any(getattr(inner, "batch_first", None) is False for inner in module.modules())
    first = next((inner for inner in module.modules() if isinstance(inner, _FIRST) and inner._parameters), None)
    if isinstance(first, nn.Embedding):
        yield (ids,), {}
    channels = getattr(first, "in_channels", 3)
    spread = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    axes = next((n for kind, n in spread.items() if isinstance(first, kind)), 0)
    stated = (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
    for size in _sizes(module):
        shape = (channels, *size) if len(size) > 1 or axes < 2 else (channels, *size * axes)
        if axes > 1 or first is None:
            yield (noise(1, *shape),), {}
        elif stated is not None:  # of timm, whose first layer takes patches
            yield (noise(1, stated[0], *size),), {}
    widths = [p.shape[-1] for p in module.parameters() if p.ndim == 2] + [
        p.numel() for p in module.parameters() if p.ndim == 1
    ]
    for width in dict.fromkeys(widths[:1] + [n for n in widths if n > 1][:3]):
        for count in dict.fromkeys((*_counts(module), _TOKENS, 49, 64, 196)):
            side = int(count**0.5)
            maps = [(1, width, side, side), (1, side, side, width)] if side**2 == count else []
            for shape in [(count, 1, width) if sequence_first else (1, count, width), *maps]:
                yield from _called(module, noise, shape, streams)
    if not isinstance(first, nn.Embedding):
        yield (ids,), {}


_FIRST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def _sizes(module: nn.Module) -> list[tuple[int, ...]]:
    """Sizes of images that a module states, and usual ones."""
    stated = (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
    found = [tuple(stated[-2:])] if stated else []
    for holder in (module, getattr(module, "patch_embed", None), getattr(module, "config", None)):
        for name in ("image_size", "img_size"):
            size = getattr(holder, name, None)
            found += (
                [(size, size)] if isinstance(size, int) else [tuple(size)] if isinstance(size, tuple | list) else []
            )
    return list(dict.fromkeys([*found, *((n, n) for n in _SIZES)]))


def _counts(module: nn.Module) -> list[int]:
    """Numbers of tokens that a lone layer states."""
    out: list[int] = []
    for name in ("window_size", "window_area", "N", "resolution", "grid", "seq_len", "feat_size"):
        value = getattr(module, name, None)
        if isinstance(value, tuple | list) and all(isinstance(n, int) for n in value):
            value = torch.Size(value).numel()
        if isinstance(value, int) and not isinstance(value, bool):
            out += [n for n in (value, value**2) if 0 < n < 1000]
    return out


def _called(module: nn.Module, noise: Any, shape: tuple[int, ...], streams: bool) -> Iterator[Inputs]:
    """A layer called with tokens, what else its parameters ask for by name, and if so all `streams` that it takes."""
    named = list(inspect.signature(module.forward).parameters.values())
    named = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named:
        yield (noise(*shape),), {}
        return
    x, given = noise(*shape), {}
    for p in named:
        needed = p.default is inspect.Parameter.empty
        if p is named[0]:
            given[p.name] = x
        elif p.name in _LIKE_TOKENS and (needed or streams):
            width = getattr(module, {"key": "kdim", "value": "vdim"}.get(p.name, ""), None) or shape[-1]
            same = p.name in _KEYS and width == shape[-1] and not streams
            given[p.name] = x if same else noise(*shape[:-1], width)
        elif p.name == "position_embeddings" and needed:
            width = getattr(module, "head_dim", None) or getattr(getattr(module, "self_attn", None), "head_dim", None)
            angles = torch.arange(shape[1])[None, :, None] / torch.arange(1, (width or 2) // 2 + 1)
            given[p.name] = tuple(torch.cat([f(angles)] * 2, -1).to(x) for f in (torch.cos, torch.sin))
        elif needed:
            given[p.name] = noise(*shape) if p.name in ("tgt", "target") else None
    yield (), given


def _of_transformers(module: nn.Module, noise: Any, device: Any) -> Iterator[Inputs]:
    config: Any = module.config
    named = inspect.signature(module.forward).parameters
    vision, sound = (getattr(config, f"{name}_config", None) or config for name in ("vision", "audio"))
    ids = torch.arange(1, _IDS + 1, device=device)[None]
    size = getattr(vision, "image_size", None) or 224
    size = size if isinstance(size, tuple | list) else (size, size)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    bins = getattr(sound, "num_mel_bins", None) or getattr(sound, "feature_size", None) or 80
    length = 2 * (getattr(sound, "max_source_positions", None) or 50)
    known: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": noise(1, channels, *size) if isinstance(channels, int) else None,
        "input_features": noise(1, bins, length) if isinstance(bins, int) else None,
        "input_values": noise(1, 4000),
        "decoder_input_ids": ids,
    }
    here = {name: value for name, value in known.items() if name in named and value is not None}
    hidden = noise(1, _IDS, getattr(config, "hidden_size", None) or getattr(config, "d_model", 8))
    beside: dict[str, Any] = {"decoder_input_ids": ids} if "decoder_input_ids" in named else {}
    stream = "encoder_hidden_states" if "encoder_hidden_states" in named and not beside else None
    main = getattr(module, "main_input_name", "input_ids")
    if main in known:
        if stream:
            yield (), {main: known[main], stream: hidden}
        yield (), {main: known[main]} | beside
    yield (), here
    for name in here:
        yield (), {name: here[name]} | beside
    if "input_features" in here:
        yield (), {"input_features": here["input_features"].mT} | beside
    yield (), {"inputs_embeds": hidden}
    patch = next((p for p in module.parameters() if p.ndim in (4, 5)), None)
    if "grid_thw" in named and patch is not None:  # patches of an image, as rows
        grid = torch.tensor([[1, 4, 4]], device=device)
        yield (noise(16, patch[0].numel()),), {"grid_thw": grid}
