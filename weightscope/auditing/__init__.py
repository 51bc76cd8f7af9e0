"""`audit`: does a model have the weights that an initialiser should have given it?

It checks effective operators (products of queries and keys, covariances of filters, attention maps), not code or
whether weights changed, against those of copies that the initialiser is run on. A correct initialisation fails its
audit with a probability of about 0.1 %; the report states the probability with which an untouched network and
parameters that are off by 20 % would fail. Errors that were found this way in public copies of these initialisers:
exchanged factors, a missing 1/sqrt(d), a root taken twice, and frameworks that overwrite initialised weights.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from weightscope._util.plugins import REQUIRED, Signature, distribute, is_reference, name_of
from weightscope._util.threads import one_thread
from weightscope._util.trust import trusting
from weightscope.anatomy import ModuleTensors, NamedTensors, named_tensors, parts_of
from weightscope.anatomy.effective import unsettable
from weightscope.anatomy.from_code import find_attention

# Imported for their registration.
from weightscope.auditing import attention, baselines, filters, layers, selection  # noqa: F401
from weightscope.auditing.overwritten import track
from weightscope.auditing.report import EXPECTATIONS, AuditReport, Check, error_in
from weightscope.auditing.runs import DRAWS, Copy, Measure, Run, Statistic, Trial, by_tensor, compared, pooled
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init import INITIALISERS, get
from weightscope.init import parameters as init_parameters
from weightscope.population import open_network

__all__ = ["EXPECTATIONS", "AuditReport", "Check", "audit", "track"]

Found = tuple[list[Check], list[str]]  # checks, and the names of what looks like the parts and was not read


@one_thread()
def audit(
    model: Any,
    init: str | Callable[..., Iterable[Check]] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    strict: bool = True,
    trust: bool = False,
    **parameters: Any,
) -> AuditReport:
    """Check a model against the expectations of an initialiser, layer by layer and head by head.

    Args:
        model: a module, a mapping name -> tensor (a state dict, a `Checkpoint`), a path, `"PATH.pop::k"` (network k of
            a population), or a `NamedTensors`.
        init: the initialiser's registered name, or several joined by "+"; None tries every one with its published
            presets. Or the artifact (.safetensors) of a fit to networks. Or an initialiser of your own,
            `f(module, *, generator, **parameters) -> module`, which is run on copies of the model; or expectations of
            your own, `f(tensors: NamedTensors, **parameters) -> list[Check]`. Both may be references to a function,
            `"package.module:function"`.
        config: the model's config, for a mapping.
        strict: whether tensors that look like the parts and cannot be read are an error; if not, they are listed in
            the report's `unparsed`.
        trust: run the code of one's own that `init`, or the population of `model`, names by a text
            (docs/architecture.md).
        parameters: the initialiser's named parameters that differ from its defaults.

    Returns:
        A report: `.passed`, `.outcomes`, `.checks`, `.failures`, `.to_dict()`, and a table if printed.
        `.false_alarm_rate` bounds the probability that a correct initialisation fails, `.powers` that a wrong one does.

    Raises:
        AnatomyError: if the model lacks the part that the initialiser sets, or (strict) some of it cannot be read.
        UsageError: if the name or a parameter is unknown (names the nearest one), or a function does not return checks.
        DataError: if the weights are not what the layers compute with: quantised, or changed by adapters (LoRA).

    Example:
        >>> print(audit(mimetic_attention_(vit), "mimetic_attention"))
        >>> audit(vit, "mimetic_attention", preset="language").passed
        False
        >>> def small_head(tensors, limit=0.01):
        ...     std = float(tensors.get("head.weight").std())
        ...     return [Check("small_head", "weight", None, None, "head.weight", "std", std, 0.0, limit)]
        >>> audit(vit, small_head, limit=0.02).passed
        True
    """
    with trusting(trust), torch.autocast("cpu", enabled=False):
        model = open_network(model)
        tensors = named_tensors(model, config)
        if isinstance(tensors, ModuleTensors) and (why := unsettable(tensors.module)):
            raise DataError(f"audit: {why}")
        if init is None:
            if parameters:
                raise UsageError(f"audit: the parameters {', '.join(parameters)} need the name of an initialiser")
            return _every(tensors, strict)
        wanted: list[Any] = [name.strip() for name in init.split("+")] if isinstance(init, str) else [init]
        if any(str(one).endswith(".safetensors") for one in wanted):
            from weightscope.auditing.pretrained import expectations_of  # fits take half a second to import

            wanted = [expectations_of(one) if str(one).endswith(".safetensors") else one for one in wanted]
        shares = distribute([_signature(one) for one in wanted], parameters)
        network = Copy(tensors)
        return _report(
            tensors, (_checks(network, one, given, strict) for one, given in zip(wanted, shares, strict=True))
        )


def _report(tensors: NamedTensors, found: Iterable[Found], skipped: Mapping[str, str] | None = None) -> AuditReport:
    """The report of the checks; every initialiser was tried if some are given as `skipped`."""
    found = list(found)
    checks = tuple(check for some, _ in found for check in some)
    packed: list[str] = []  # projections whose order of rows follows from a part of the names only
    by_parts = any(check.part in ("qk", "vo", "map", "q") or check.initialiser == "zero_init" for check in checks)
    if by_parts and not isinstance(tensors, ModuleTensors):
        named = {check.name for check in checks}
        parts = [part for part in find_attention(tensors) if part.by_names]
        packed = [part.parameters["q"][0] for part in parts if named & {part.name, *part.parameters["q"]}]
    unread = tuple(dict.fromkeys(name for _, names in found for name in names))
    return AuditReport(checks, dict(skipped or {}), skipped is not None, unparsed=unread, unconfirmed=tuple(packed))


def _signature(init: Any) -> Signature:
    """The parameters of an initialiser, or of a function with expectations."""
    function = EXPECTATIONS.find(init)
    if not callable(function):
        raise UsageError(f"audit: expected a name, 'package.module:function' or a function, found {init!r}")
    found = Signature.of(function, name_of(init))
    if isinstance(init, str) and not is_reference(init):  # the initialiser's parameters
        return Signature(init, init_parameters(init), False, found.text, True)
    if not found.positional:
        raise UsageError(
            f"{found.name}: expected a function `f(tensors, **parameters) -> list[Check]`, found `f({found.text})`"
        )
    return found


def _checks(network: Copy, init: Any, given: Mapping[str, Any], strict: bool, *, every: bool = False) -> Found:
    """The checks of one initialiser, or of a function with expectations; `every` as in `compared`."""
    tensors, function, signature = network.original, EXPECTATIONS.find(init), _signature(init)
    own = Signature.of(function, signature.name)
    if function not in EXPECTATIONS.values() and "generator" in own.defaults:
        users = get(function, **given)  # may replace parameters, and has a copy to itself
        return by_tensor(signature.name, lambda n, g: users(n.target, generator=g), Copy(tensors), every=every), []
    details = EXPECTATIONS.details.get(init, {}) if isinstance(init, str) else {}
    parts, left = _parts(tensors, name_of(init), details, given, strict)
    values = {**signature.defaults, **given}
    if "strict" in values or init not in INITIALISERS:
        values["strict"] = strict
    required = own if function is not by_tensor else signature
    required.require({key: value for key, value in values.items() if value is not REQUIRED})
    if function is by_tensor:
        names = tuple(part.name for part in parts) or ("",)
        return by_tensor(signature.name, _runs(init, values), network, names, every=every), left
    measured = _measure(function, own, values)(tensors)
    found: list[Any] = list(measured) if isinstance(measured, Iterable) else [measured]
    if found and all(isinstance(one, Statistic) for one in found):
        return _by_runs(init, network, found, values, every), left
    if not all(isinstance(check, Check) for check in found):
        raise UsageError(f"{signature.name}: expected a list of weightscope.auditing.Check back, found {measured!r}")
    return found, left


def _parts(
    tensors: NamedTensors, name: str, details: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> tuple[list[Any], list[str]]:
    """The parts that an initialiser sets, and the names of tensors that look like them and were not read."""
    kinds = details.get("reads")
    # Initialisers of all matrices read no parts: what counts for these are weights.
    left = [name for name, why in tensors.every.items() if kinds is None and why and name.endswith("weight")]
    if left and strict:
        raise AnatomyError(
            f"{name}: `{left[0]}` cannot be read: {tensors.every[left[0]]}; strict=False audits the others"
        )
    found: list[Any] = []
    for kind in kinds(given) if callable(kinds) else kinds or ():
        parts = parts_of(kind, tensors, strict=strict or None, caller=name)
        odd = (part for part in parts if details.get("square") and not strict and not part.square)
        left += [
            *(f"{unread.name} {unread.why}" for unread in parts.unread),
            *(one for part in odd for one in part.parameters),
        ]
        found += parts
    return found, left


def _measure(function: Callable[..., Any], own: Signature, values: Mapping[str, Any]) -> Measure:
    """A function of a network's tensors, given those of the parameters that it has."""
    return partial(function, **(values if own.open else {key: values[key] for key in own.defaults}))


def _by_runs(name: str, network: Copy, found: list[Statistic], values: dict[str, Any], every: bool) -> list[Check]:
    """The checks of a registered initialiser by its statistics and its `details`.

    - stand_ins: (tensors, parameters) -> networks to run it on, with their parameters; by default a copy of this one;
    - start: (network, **parameters) -> a function of a generator that sets what it starts from, if this matters;
    - errors: names of parameters, or (parameters) -> these, or {error: parameters, or a change of a network};
    - pooled: whether the means over layers decide;
    - runs: how many.
    """
    details, function = EXPECTATIONS.details[name], EXPECTATIONS[name]
    own = Signature.of(function, name)
    collect = pooled if details.get("pooled") else list

    def trial(network: Copy, parameters: dict[str, Any]) -> Trial:
        network.restored()
        measure, start = _measure(function, own, parameters), details.get("start")
        return Trial(
            network,
            lambda tensors: collect(measure(tensors)),
            _runs(name, parameters),
            _wrong(name, details.get("errors", ()), parameters),
            start and start(network, **parameters),
            details.get("runs", DRAWS),
        )

    stand_ins = details.get("stand_ins")
    networks = stand_ins(network.original, values) if stand_ins else [(network, values)]
    return compared(name, collect(found), (trial(*one) for one in networks), every=every)


def _runs(name: str, parameters: Mapping[str, Any]) -> Run:
    """A registered initialiser of copies, whose weights can be set; initialisers of parts take tensors."""
    get(name, **parameters)  # refuses what it does not take
    function: Any = INITIALISERS[name]
    tensors = "reads" in EXPECTATIONS.details[name]

    def run(network: Copy, g: torch.Generator) -> None:
        function.__wrapped__(network.source if tensors else network.target, generator=g, **parameters)

    return run


def _wrong(name: str, errors: Any, parameters: dict[str, Any]) -> dict[str, Run]:
    """Error -> the initialiser with it: parameters are 1.2 times theirs, correlations beyond +-1 then 0.8 times."""
    found = errors(parameters) if callable(errors) else errors
    if isinstance(found, tuple):
        off = {n: 0.8 if n == "correlation" and abs(parameters[n]) > 1 / 1.2 else 1.2 for n in found if parameters[n]}
        found = {error_in(name): parameters | {name: factor * parameters[name]} for name, factor in off.items()}

    def changed(change: Callable[[NamedTensors], None]) -> Run:
        def run(network: Copy, g: torch.Generator) -> None:
            _runs(name, parameters)(network, g)
            change(network.source)

        return run

    return {error: changed(how) if callable(how) else _runs(name, how) for error, how in found.items()}


def _every(tensors: NamedTensors, strict: bool) -> AuditReport:
    """Every initialiser, with its presets; of the variants of one, that with the smallest share of failures."""
    found: list[Found] = []
    skipped: dict[str, str] = {}
    network = Copy(tensors)
    for name in EXPECTATIONS:
        variants: list[Found] = []
        for variant in EXPECTATIONS.details[name].get("variants", ({},)):
            try:
                variants.append(_checks(network, name, variant, strict, every=True))
            except (AnatomyError, UsageError) as error:
                skipped[name] = str(error)
        if variants:
            skipped.pop(name, None)
            found.append(min(variants, key=lambda one: sum(not c.passed for c in one[0]) / max(1, len(one[0]))))
    return _report(tensors, found, skipped)
