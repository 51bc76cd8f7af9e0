"""`initialise`: initialisers by name, applied to a module, with a report of what each of them set."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weightscope._util.names import joined
from weightscope._util.plugins import name_of
from weightscope._util.results import Result
from weightscope._util.threads import one_thread
from weightscope.anatomy.effective import all_or_nothing
from weightscope.anatomy.tensors import read_once
from weightscope.errors import UsageError
from weightscope.init.base import M, get, opened
from weightscope.init.named import Init, labelled, resolved_steps
from weightscope.recipe import InitConfig


@dataclass(frozen=True, repr=False)
class Initialised(Result):
    """What the initialisers of `initialise` set in a module; tensors by their names in its state dict."""

    module: str  # its class
    initialisers: tuple[str, ...]
    changed: tuple[Mapping[str, int], ...]  # by each of them: tensor -> number of its entries that changed
    again: tuple[tuple[str, str, tuple[str, ...]], ...]  # earlier, later, tensors of which both changed some entries
    untouched: tuple[str, ...]

    columns: ClassVar[Mapping[str, str]] = {
        "initialiser": "{initialiser}",
        "set": "{tensors}",
        "tensors": "{number}",
        "entries": "{entries:,}",
    }
    left: ClassVar[Collection[int]] = (0, 1)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each initialiser and kind of tensor: `initialiser`, `tensors`, `number`, `entries`."""
        out = []
        for name, changed in zip(self.initialisers, self.changed, strict=True):
            for pattern, names in _patterns(changed).items():
                entries = sum(changed[one] for one in names)
                out.append({"initialiser": name, "tensors": pattern, "number": len(names), "entries": entries})
        return out

    def summary(self) -> str:
        """How many tensors were set, of how many."""
        number = len(set().union(*self.changed))
        return f"{self.module}: {number} of {number + len(self.untouched)} tensors set"

    def notes(self) -> list[str]:
        """What was left as it was, and what was changed twice."""
        out = []
        if self.untouched:
            kinds = (f"{p} ({len(names)})" if len(names) > 1 else p for p, names in _patterns(self.untouched).items())
            out.append(f"left as they were: {joined(kinds, 12)}")
        for earlier, later, names in self.again:
            out.append(f"warning: {later} changed again what {earlier} had set: {joined(_patterns(names), 8)}")
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON types: the names of all tensors."""
        steps = zip(self.initialisers, self.changed, strict=True)
        return {
            "module": self.module,
            "initialisers": [{"name": name, "set": dict(changed)} for name, changed in steps],
            "changed_again": [{"earlier": a, "later": b, "tensors": list(names)} for a, b, names in self.again],
            "untouched": list(self.untouched),
        }


@one_thread()
@all_or_nothing()
def initialise(
    model: M,
    init: Init,
    *,
    seed: int | torch.Generator | None = 0,
    report: Callable[[Initialised], Any] | None = None,
    **parameters: Any,
) -> M:
    """Initialise a module in place by one or several initialisers, and return it.

    Args:
        model: a module of any library.
        init: as of `bench`: a name, several joined by "+", `"mimetic_attention(preset='language')"`, a reference
            `"package.module:function"`, an artifact (.safetensors, `hf://org/name`), a .toml file, a function.
        seed: of the one generator from which all of them draw in turn, or the generator; None for torch's global one.
        report: is called with the `Initialised`, which says what each initialiser set: `report=print`.
        parameters: of the initialisers; each goes to the one that has it.

    Raises:
        UsageError: if a name or a parameter is unknown, or an initialiser sets nothing.
        AnatomyError: if the model has no such part.

    Example:
        >>> initialise(vit, "mimetic_attention+mimetic_mlp", seed=0, report=print)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialise: expected a module, found {type(model).__name__}")
    if callable(init) and not isinstance(init, InitConfig):
        steps = [(name_of(init), get(init, **parameters))]
    else:
        config = labelled(init)[1]
        if config.control is not None:
            raise UsageError(f"initialise: expected an initialiser, found a control ({config.control}) of `bench`")
        steps = resolved_steps(config.model_copy(update=parameters) if parameters else config)
    generator, changed, masks = opened(seed), list[dict[str, int]](), list[dict[str, Tensor]]()
    again, reading = [], list[Any]()
    for name, step in steps:
        before = {key: (tensor._version, tensor.detach().clone()) for key, tensor in _tensors(model).items()}
        with read_once(model, reading):
            step(model, generator=generator)
        mine: dict[str, Tensor] = {}
        for key, tensor in _tensors(model).items():
            version, old = before.get(key, (None, tensor))
            if version != tensor._version or not torch.equal(old, tensor):
                mine[key] = old != tensor
        if not mine and name != "default":
            raise UsageError(f"{name}: no tensor of {type(model).__name__} was set")
        for (earlier, _), other in zip(steps, masks, strict=False):
            if both := tuple(key for key in mine if key in other and bool((mine[key] & other[key]).any())):
                again.append((earlier, name, both))
        masks.append(mine)
        changed.append({key: int(mask.sum()) for key, mask in mine.items()})
    done = set().union(*changed)
    untouched = tuple(key for key in _tensors(model) if key not in done)
    if report is not None:
        names = tuple(name for name, _ in steps)
        report(Initialised(type(model).__name__, names, tuple(changed), tuple(again), untouched))
    return model


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ in the numbers of layers only, by their pattern: `blocks.*.mlp.fc1.weight`."""
    names = list(names)
    alike = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
    number = Counter(alike.values())
    out: dict[str, list[str]] = {}
    for name, pattern in alike.items():
        out.setdefault(pattern if number[pattern] > 1 else name, []).append(name)
    return out
