"""`load_init`: a fitted artifact as an initialiser."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.names import listing, unwrapped
from weightscope._util.threads import one_thread
from weightscope.anatomy import depthwise, self_attention
from weightscope.anatomy.effective import writable
from weightscope.anatomy.places import Source
from weightscope.anatomy.tensors import check_separate
from weightscope.errors import DataError, SpecError, UsageError
from weightscope.fits.artifact import NetworkFit
from weightscope.fits.filters import ScheduleFit
from weightscope.fits.identity_product import ProductFit
from weightscope.fits.population_fit import PopulationFit, load_artifact
from weightscope.fits.pretrained import placed
from weightscope.fits.resizing import resized_fit
from weightscope.init.attention import write_query_key, write_value_output
from weightscope.init.base import Generator, M, normal, opened, running
from weightscope.init.convolution import conv_covariance_, draw_transferred
from weightscope.spec import WeightSpec

__all__ = ["InitReport", "NetworkInit", "PopulationInit", "load_init"]


@dataclass(frozen=True)
class InitReport:
    """What an initialiser did to a module; tensors by name."""

    touched: tuple[str, ...]  # set
    untouched: tuple[str, ...]  # the module's other parameters
    absent: tuple[str, ...] = ()  # in the artifact, and not in the module in that shape (only with `strict=False`)
    notes: tuple[str, ...] = ()  # such as covariances made positive semi-definite, or parts rescaled to another width

    def __str__(self) -> str:
        parts = [("set", self.touched), ("left alone", self.untouched), ("not in the module", self.absent)]
        lines = [f"{what} {len(names)} tensors: {listing(names)}" for what, names in parts if names]
        return "; ".join((*lines, *self.notes))


class FittedInit:
    """A fit as an initialiser; `report` says what the last call did."""

    report: InitReport | None = None

    def __init__(self, result: Any) -> None:
        self.result = result

    @one_thread()
    @torch.no_grad()
    def __call__(self, module: M, *, generator: Generator = None, strict: bool = True) -> M:
        """Set the fitted weights in a module, in place; frozen ones, too.

        With `strict=False`, tensors that are missing or misshapen are listed in the report, otherwise an error.
        """
        generator = opened(generator)
        if not isinstance(module, nn.Module):
            raise UsageError(f"load_init: expected a module, found {type(module).__name__}")
        with running("load_init"), writable(module, "load_init") as inner:
            self.report = self._set(inner, generator, strict)
        return module

    def _set(self, module: nn.Module, generator: Generator, strict: bool) -> InitReport:
        raise NotImplementedError


class PopulationInit(FittedInit):
    """Draws the tensors of a fit to a population into modules: `init(module, generator=g) -> module`.

    Standard normal numbers come from the generator group by group, in float64, and the result is rounded to each
    tensor's own dtype. The structure `exchangeable` applies to networks of other widths and depths, too. A fit by
    `fit_pretrained` sets the tensors at the same places, whatever their names.
    """

    result: PopulationFit
    _last: tuple[WeightSpec, PopulationFit] | None = None

    def _set(self, module: nn.Module, generator: Generator, strict: bool) -> InitReport:
        named = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers()))
        there = dict(zip(map(unwrapped, named), named.values(), strict=True)) | named
        source = None if self.result.scale is None else Source(there, module)
        if source is None:
            tensors = WeightSpec.of(module).tensors
            spec = WeightSpec(replace(tensor, name=unwrapped(tensor.name)) for tensor in tensors)
            if self._last is None or self._last[0] != spec:  # kept for the next module of its shapes
                self._last = spec, resized_fit(self.result, spec)
            found, whole = self._last[1], there
        else:
            found = placed(self.result, source)
            whole = {name: source.whole(name) for name in found.spec.names if name in source.names}
        problems = {t.name: p for t in found.spec.tensors if (p := _problem(whole.get(t.name), t.shape))}
        problems |= found.problems
        fits = [name for name in found.spec.names if name not in problems]
        if problems and (strict or not fits):
            shown: dict[str, list[str]] = {}
            for name, problem in problems.items():
                shown.setdefault(problem, []).append(name)
            texts = [
                f"`{first}` {problem}" + (f", likewise {listing(others, 3)}" if others else "")
                for problem, (first, *others) in shown.items()
            ]
            more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
            raise SpecError(f"the artifact is for another network: {'; '.join(texts[:3])}{more}")

        def draws(shape: tuple[int, ...]) -> np.ndarray:
            return normal(*shape, generator=generator, dtype=torch.float64).numpy()

        values: dict[str, np.ndarray] = {}
        for group in found.groups:
            values |= group.spec.unpack(group.draw(draws, 1)[0])
        values = {name: values[name] for name in fits}
        if source is not None:
            values = {own: part for name, value in values.items() for own, part in source.split(name, value).items()}
            if self.result.scale == "source":  # the maps hold these gains
                for gain in (gain for gain, maps in source.gains().items() if maps):
                    neutral = 1.0 - source.offset(gain)
                    values |= {own: np.full(tuple(there[own].shape), neutral) for own in source.names[gain].values()}
        drawn = {name: torch.from_numpy(np.array(value)).to(there[name].dtype) for name, value in values.items()}
        if bad := next((name for name, value in drawn.items() if not value.isfinite().all()), None):
            raise DataError(
                f"`{bad}`: drew numbers beyond the range of {there[bad].dtype}; the artifact is damaged, or of "
                "such weights; nothing was changed"
            )
        for name, value in drawn.items():
            there[name].copy_(value)
        done = {id(there[name]) for name in drawn}
        others = [name for name, value in module.named_parameters() if id(value) not in done]
        return InitReport(tuple(drawn), tuple(map(unwrapped, others)), tuple(problems), found.resized)

    def __repr__(self) -> str:
        kinds = sorted({group.label for group in self.result.groups})
        return f"PopulationInit({len(self.result.spec)} tensors: {', '.join(kinds)})"


class NetworkInit(FittedInit):
    """Applies a fit to one network to any network that has the part: `init(module, generator=g) -> module`.

    filters            `covariance_transfer_` with the fitted distributions
    conv_schedule      `conv_covariance_` with the fitted numbers
    identity_product   `mimetic_attention_` with alpha and beta interpolated linearly over the relative depth
    """

    result: NetworkFit

    def _set(self, module: nn.Module, generator: Generator, strict: bool) -> InitReport:
        numbers: Any = self.result
        notes = tuple[str, ...]()
        if isinstance(numbers, ProductFit):
            touched = _products(module, numbers, generator=generator, strict=strict)
        else:
            if isinstance(numbers, ScheduleFit):
                conv_covariance_(module, **numbers.options, strict=strict, generator=generator)
            else:
                negative = draw_transferred(module, numbers, generator, strict=strict)
                notes = numbers.remarks()
                if negative:
                    worst = max(negative, key=negative.__getitem__)
                    done = "taken as their absolute values" if numbers.psd == "abs" else "set to zero"
                    share = f"{negative[worst]:.1%} of the spectrum (`{worst}`)"
                    notes += (f"{len(negative)} covariances had negative eigenvalues, at most {share}, {done}",)
            touched = [name for part in depthwise(module) if part.square for name in part.parameters]
        others = tuple(name for name, _ in module.named_parameters() if name not in touched)
        return InitReport(tuple(map(unwrapped, touched)), tuple(map(unwrapped, others)), notes=notes)

    def __repr__(self) -> str:
        return f"NetworkInit({self.result.structure} of {len(self.result.layers)} layers)"


@one_thread()
def load_init(path: str | Path, *, trust: bool = False) -> PopulationInit | NetworkInit:
    """The initialiser in an artifact that `weightscope fit-init` wrote: a file, or `hf://org/name[@revision]`.

    A `PopulationInit` for networks of the population's architecture, or a `NetworkInit` for any network that has the
    part, if it was fitted to one network; both are called alike. With `trust`, an artifact may name a structure
    of another package, as in `load_artifact`. An invalid artifact is a DataError.

    Example:
        >>> init = load_init("digits-mlp.safetensors")
        >>> network = init(network, generator=torch.Generator().manual_seed(0))
        >>> init = load_init("hf://org/digits-mlp@v1")  # that `weightscope publish` uploaded
        >>> print(init.report)
        set 8 tensors: `stages.0.blocks.0.mlp.fc1.weight`, ...; left alone 23 tensors: ...
    """
    found = load_artifact(path, trust=trust)
    return PopulationInit(found) if isinstance(found, PopulationFit) else NetworkInit(found)


def _problem(tensor: Tensor | None, shape: tuple[int, ...]) -> str | None:
    if tensor is None:
        return "is missing"
    if tuple(tensor.shape) != shape:
        return f"expected {shape}, found {tuple(tensor.shape)}"
    return None if tensor.is_floating_point() else f"expected floating point, found {tensor.dtype}"


def _products(module: nn.Module, fit: ProductFit, *, generator: Generator, strict: bool) -> list[str]:
    """Write the products, layer by layer; returns the names of the tensors."""
    parts = self_attention(module, strict=strict, caller="load_init")
    check_separate((part, name) for part in parts for name in {"both": "qkvo"}.get(fit.parts, fit.parts))
    touched: list[str] = []
    depths = [layer.depth for layer in fit.layers]
    for i, part in enumerate(parts):
        for kind, write in (("qk", write_query_key), ("vo", write_value_output)):
            if fit.parts in ("both", kind):
                found = [getattr(layer, kind) for layer in fit.layers]
                values = zip(*((product.alpha, product.beta) for product in found), strict=True)
                alpha, beta = (float(np.interp(i / max(1, len(parts) - 1), depths, x)) for x in values)
                write(part, "svd", alpha, beta if kind == "qk" else -beta, generator)  # `beta_vo` is minus the diagonal
                touched += [name for letter in kind for name in part.parameters[letter]]
    return list(dict.fromkeys(touched))
