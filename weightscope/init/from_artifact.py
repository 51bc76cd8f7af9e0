"""`load_init`: a fitted artifact as an initialiser."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.names import unwrapped
from weightscope.artifacts.network_fit import load_any
from weightscope.artifacts.population_fit import FitResult, Group
from weightscope.errors import SpecError
from weightscope.init._common import M, cpu_generator
from weightscope.init._report import InitReport
from weightscope.init.from_network_fit import PortableInit

__all__ = ["ArtifactInit", "InitReport", "PortableInit", "draw", "load_init"]


class ArtifactInit:
    """Draws a fitted artifact's tensors into modules: `init(module, generator=g) -> module`.

    Standard normal numbers come from the torch generator, in float64 on the CPU, group by group in the
    order of `noise_shapes`; the artifact's linear maps are applied in NumPy float64, and the result is rounded to each
    tensor's own dtype. So a generator's state decides every number, on any device.

    Args:
        result: the artifact, or a fit that was not saved.

    Attributes:
        result: as given.
        report: what the last call did; None before the first.
    """

    def __init__(self, result: FitResult) -> None:
        self.result = result
        self.report: InitReport | None = None

    @torch.no_grad()
    def __call__(self, module: M, *, generator: torch.Generator | None = None, strict: bool = True) -> M:
        """Set the artifact's tensors in a module, in place, by name.

        Wrappers' prefixes (`module.` of parallel wrappers, `_orig_mod.` of `torch.compile`) do not count. Parameters
        that are frozen are set too; other tensors are left alone.

        Args:
            module: of the architecture that the artifact was fitted to.
            generator: of the CPU; None for torch's global one.
            strict: every tensor of the artifact must be there in its shape. Otherwise those that are there
                are set and the others are listed in the report.

        Raises:
            SpecError: if tensors are missing, misshapen or without memory; names them. Nothing is changed then.
            UsageError: if the generator is not one of the CPU.
        """
        there = _tensors(module)
        problems = {t.name: p for t in self.result.spec.tensors if (p := _problem(there.get(t.name), t.shape))}
        fits = [name for name in self.result.spec.names if name not in problems]
        if problems and (strict or not fits):
            shown = [f"`{name}` {problem}" for name, problem in list(problems.items())[:6]]
            more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise SpecError(f"the artifact is for another network: {'; '.join(shown)}{more}")
        generator = cpu_generator(generator)
        values: dict[str, np.ndarray] = {}
        for group in self.result.groups:
            values |= group.spec.unpack(draw(group, generator))
        for name in fits:
            there[name].copy_(torch.from_numpy(values[name]))
        done = {id(there[name]) for name in fits}
        others = tuple(unwrapped(name) for name, value in module.named_parameters() if id(value) not in done)
        self.report = InitReport(tuple(fits), others, tuple(problems))
        return module

    def __repr__(self) -> str:
        kinds = sorted({group.label for group in self.result.groups})
        return f"ArtifactInit({len(self.result.spec)} tensors: {', '.join(kinds)})"


def load_init(path: str | Path) -> "ArtifactInit | PortableInit":
    """The initialiser that `weightscope fit-init` wrote.

    Args:
        path: of the artifact.

    Returns:
        An `ArtifactInit` for networks of the population's architecture, or a `PortableInit` for any network that
        has the part, if it was fitted to one network; both are called alike.

    Raises:
        DataError: if it is not a sound artifact.

    Example:
        >>> init = load_init("digits-mlp.safetensors")
        >>> network = init(network, generator=torch.Generator().manual_seed(0))
        >>> print(init.report)
        set 8 tensors: `stages.0.blocks.0.mlp.fc1.weight`, ...; left alone 23 tensors: ...
    """
    found = load_any(path)
    return ArtifactInit(found) if isinstance(found, FitResult) else PortableInit(found)


def draw(group: Group, generator: torch.Generator | None) -> np.ndarray:
    """One sample (D,) float64 of a group, from a torch generator of the CPU."""
    noise = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()[None] for shape in group.noise_shapes
    ]
    return group.transform(noise, 1)[0]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones under each of their names) and buffers, by their name and by that without wrappers."""
    named = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers()))
    return {unwrapped(name): value for name, value in named.items()} | named


def _problem(tensor: Tensor | None, shape: tuple[int, ...]) -> str | None:
    if tensor is None:
        return "is missing"
    if tuple(tensor.shape) != shape:
        return f"expected {shape}, found {tuple(tensor.shape)}"
    if tensor.is_meta:
        return "has no memory yet (meta device)"
    return None if tensor.is_floating_point() else f"expected floating point, found {tensor.dtype}"
