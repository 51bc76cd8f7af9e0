"""Checks of an initialiser of one's own: it is run on copies of the network, and its statistics are compared."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from weightscope._util.torch_random import seeded
from weightscope.anatomy import ModuleTensors, NamedTensors
from weightscope.auditing.intervals import RUNS, UNTOUCHED, compared, error_in
from weightscope.auditing.report import Check, checks_of
from weightscope.errors import UsageError
from weightscope.init import get

MEANS = 8  # runs before those whose statistics are compared, which make the mean of each tensor


def own_checks(
    name: str, init: Callable[..., Any], source: NamedTensors, parameters: Mapping[str, Any]
) -> Iterator[Check]:
    """Checks of every parameter that the initialiser sets, against `RUNS` runs of it on the default start of a copy.

    - mean, std, largest: of the entries;
    - likeness: the cosine between the tensor and its mean over other runs, near 1 if a structure is always the same;
    - difference: of a tensor that is the same in all runs, the largest from its value, relative to the largest entry.

    Raises:
        UsageError: if the source is no module, or the initialiser sets nothing.
    """
    if not isinstance(source, ModuleTensors):
        raise UsageError(f"{name}: expected a module, on copies of which it can be run, found tensors only")
    run, model = get(init, **parameters), copy.deepcopy(source.module)
    present = copy.deepcopy(model.state_dict())
    known = ((part, getattr(part, "reset_parameters", None)) for part in model.modules())
    resets: list[Any] = [part for part, reset in known if reset and not inspect.signature(reset).parameters]

    def made(seed: int, initialise: bool = True) -> dict[str, Tensor]:
        """The parameters of a copy after its default start, and after the initialiser."""
        with seeded(seed), torch.no_grad():
            model.load_state_dict(present)
            for part in resets:
                part.reset_parameters()
        if initialise:
            run(model, generator=torch.Generator().manual_seed(seed))
        return {key: tensor.detach().cpu().double().clone() for key, tensor in model.named_parameters()}

    start, first = made(0, initialise=False), made(0)
    chosen = [key for key in first if not torch.equal(start[key], first[key])]
    if not chosen:
        raise UsageError(f"{name}: expected an initialiser that changes the default start, found no changed parameter")
    means = {key: first[key] / MEANS for key in chosen}
    fixed = dict.fromkeys(chosen, True)
    for seed in range(1, MEANS):
        for key, tensor in made(seed).items():
            if key in means:
                means[key] += tensor / MEANS
                fixed[key] &= torch.equal(tensor, first[key])

    def measured(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        return {key: _statistics(tensors[key], means[key], fixed[key]) for key in chosen}

    right = [measured(made(MEANS + seed)) for seed in range(RUNS)]
    untouched = [measured(made(MEANS + seed, initialise=False)) for seed in range(RUNS // 4)]
    found = measured({key: source.get(key).detach().cpu().double() for key in chosen})
    for i, key in enumerate(chosen):
        draws, scaling = [run[key] for run in right], () if fixed[key] else ("mean", "std", "largest")
        scaled = [draw | {what: 1.2 * draw[what] for what in scaling} for draw in draws]
        wrong = {UNTOUCHED: [run[key] for run in untouched]}
        wrong[error_in("scale")] = [{"difference": 0.2}] * RUNS if fixed[key] else scaled
        # Half precision rounds entries by 0.2 %.
        sizes = dict.fromkeys(draws[0], 1.0) | {what: max(abs(draw[what]) for draw in draws) for what in scaling}
        slack = {what: 4e-3 * size for what, size in sizes.items()}
        yield from checks_of(name, "weight", i, None, key, compared(found[key], draws, wrong, slack))


def _statistics(x: Tensor, mean: Tensor, fixed: bool) -> dict[str, float]:
    largest = float(x.abs().max())
    if fixed:
        return {"difference": float((x - mean).abs().max()) / max(float(mean.abs().max()), 1e-30)}
    likeness = float((x * mean).sum() / (x.norm() * mean.norm()).clamp_min(1e-300))
    return {"mean": float(x.mean()), "std": float(x.std(correction=0)), "largest": largest, "likeness": likeness}
