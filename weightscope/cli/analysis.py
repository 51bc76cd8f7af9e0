"""Commands that analyse: `inspect`, `describe`, `verify`, `covariance`, `products`, `attention-maps`, `audit`."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from weightscope._util.sources import is_population, population_member
from weightscope.cli.options import (
    Named,
    OutputFile,
    choice_option,
    command,
    config_options,
    csv_option,
    data_option,
    figure_option,
    file_options,
    heads_option,
    json_option,
    key_option,
    layout_option,
    many_options,
    maybe_partial,
    out_option,
    partial_option,
    permutations_option,
    reading_config,
    refuse_others,
    show,
    spread_options,
    write_csv,
    write_json,
)
from weightscope.errors import DataError, UsageError, WeightscopeError


@command()
@click.argument("source", type=Named())
@click.option(
    "--source", "code", is_flag=True, help="Print the code of one's own that a population names, and run nothing."
)
@heads_option
@layout_option
@file_options
@json_option
def inspect(source: str, code: bool, heads: Any, layout: str | None) -> None:
    """Describe the contents of a population, one of its networks (PATH.pop::k), an artifact, a checkpoint or an export.

    \b
    Examples:
      weightscope inspect digits.pop
      weightscope inspect vit/model.safetensors
    """
    from weightscope.analysis.inspection import inspect as contents
    from weightscope.analysis.inspection import population_contents

    if code:
        member = population_member(source)
        population = population_contents(source if member is None else member[0])
        click.echo(population.code())
        write_json(population.to_dict())
        return
    show(contents(source, reading_config(heads, layout)))


@command()
@click.argument("source", metavar="MODEL", type=Named())
@config_options
@file_options
@csv_option
@json_option
def describe(source: Any, config: Any) -> None:
    """Describe each weight matrix of a model: type, shape, norms, stable rank, diagonals of products, stripes.

    MODEL is a file, a model folder, PATH.pop::k or hf://org/name[@revision]. `inspect` lists what is in a file without
    reading its numbers.

    \b
    Examples:
      weightscope describe vit/model.safetensors
      weightscope describe hf://facebook/dinov2-small --csv layers.csv
    """
    from weightscope.analysis.describe import describe as run

    show(run(source, config))


@command()
@click.argument("source", type=Named())
@spread_options
@key_option
@json_option
def verify(source: str, **options: Any) -> None:
    """Compare a population, an artifact or a model with the checksums that are known of its files.

    SOURCE is a .pop folder, an artifact, a file, a model folder or hf://org/name[@revision]. A file without a checksum
    is reported as unverified. Exits with 3 if a file is damaged.

    \b
    Examples:
      weightscope verify digits.pop
      weightscope verify hf://openai-community/gpt2
    """
    from weightscope.analysis.inspection import verify as run

    found = run(source, **options)
    show(found)
    found.raise_if_damaged()


@command()
@click.argument("source", type=Named())
@out_option("The HDF5 file to write (.h5).", type=OutputFile(".h5", ".hdf5"))
@click.option("--select", default="*", help="Patterns of tensor names, separated by commas.")
@spread_options
@partial_option
def export(source: str, out: Path, select: str, partial: bool, workers: Any) -> None:
    """Write the weights of a population as one (N, D) matrix with its spec.

    \b
    Example:
      weightscope export digits.pop -o digits.h5 --select "*.mlp.*"
    """
    from weightscope.population import export as write
    from weightscope.population import population_in

    click.echo(f"wrote {write(population_in(source, partial=partial), out, select, workers=workers)}")


@command()
@click.argument("source", type=Named())
@out_option("The page.", "page.html", OutputFile(".html"))
@click.option("--select", default="*", help="Patterns of tensor names, separated by commas, whose structure is shown.")
@click.option("--at", type=int, help="For a population with snapshots: the epoch (of sequences, the step) of training.")
@partial_option
def report(source: str, out: Path, select: str, at: int | None, partial: bool) -> None:
    """Write a population as a page: its metrics, a map and a table of correlations, and these over training.

    One HTML file without scripts, for which a browser needs no server and no network.

    \b
    Example:
      weightscope report digits.pop -o page.html
    """
    from weightscope.cli.page import write_page
    from weightscope.population import population_in

    population = population_in(source, partial=partial)
    click.echo(f"wrote {write_page(population if at is None else population.at(at), out, select)}")


_WITHIN = ("part", "init", "network", "picture")
# What `covariance` computes, and the options that it takes besides those of files, populations and workers.
_TABLE: Mapping[str, Sequence[str]] = {
    "with --exchangeable": ("select", "computed", "fold_norms", "permutations"),
    "with --exchangeable --at all": ("select",),
    "with --eigenpairs": ("eigenpairs", "select", "computed", "fold_norms"),
    "across a population": ("select", "computed", "kind", "fold_norms", "cells"),
    "within networks": _WITHIN,
}


@command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@click.option(
    "--select",
    help="For a population: patterns of tensor names.  [default: *.mlp.fc?.weight, with --exchangeable all, with "
    "--computed none]",
)
@click.option(
    "--computed",
    multiple=True,
    metavar="NAME|MODULE:FUNCTION",
    help="For a population: coordinates mlp-diagonal, qk-diagonal, vo-diagonal (of products), centre-pixel (of "
    "filters), or a function of the tensors of n networks; abs:NAME for magnitudes; repeatable.",
)
@choice_option(
    "--kind",
    "covariance correlation",
    "For a population: covariances or correlations.  [default: covariances, of several tensors drawn as correlations]",
)
@click.option("--fold-norms", is_flag=True, help="For a population: fold each normalisation's gain into the next map.")
@click.option(
    "--exchangeable",
    is_flag=True,
    help="Average over permutations of hidden units: what is correlated within and across layers of a whole network.",
)
@click.option(
    "--at",
    help="For a population with snapshots: the epoch (of sequences, the step) of training; with --exchangeable also "
    "all, which draws the strongest entries against training.",
)
@click.option(
    "--cells",
    type=click.IntRange(1),
    help="For a population: draw single entries, averaged over at most so many cells a side.  [default, for matrices: "
    "means of channels]",
)
@click.option(
    "--eigenpairs",
    type=click.IntRange(1),
    help="For a population: list so many leading eigenpairs, without the matrix and a figure.",
)
@click.option(
    "--part",
    type=Named("parts", files=False),
    help="Within networks: filters, mlp-rows, mlp-columns or patch.  [default: the first that exists]",
)
@choice_option(
    "--picture",
    "maps depth samples",
    "Picture of the layers within networks.  [default: maps of one network, depth of several]",
)
@click.option(
    "--init",
    multiple=True,
    type=Named("initialisers"),
    help="Compare with an initialiser: NAME, MODULE:FUNCTION, an artifact or a .toml file; repeatable.",
)
@click.option(
    "--network", type=int, help="Look within this network of a population, counted from 0.  [default, with --part: 0]"
)
@figure_option("covariance.png")
@permutations_option
@spread_options
@partial_option
@file_options
@csv_option
@json_option
def covariance(
    sources: tuple[Any, ...],
    out: Path,
    at: str | None,
    exchangeable: bool,
    partial: bool,
    workers: Any,
    **options: Any,
) -> None:
    """Compute and plot the joint covariance of tensors across a population, or covariances within networks.

    A population is one .pop folder: its table compares the variance of row and column means of each matrix with that
    of independent entries. Anything else (.safetensors, .pt, .pth, a model folder, hf://org/name, one or several) is
    analysed layer by layer: its filters, rows, columns or patches are the samples.

    \b
    Examples:
      weightscope covariance digits.pop --select "stages.0.blocks.1.mlp.fc?.weight" -o block1.png
      weightscope covariance digits.pop --computed centre-pixel --computed abs:mlp-diagonal --exchangeable
      weightscope covariance digits.pop --exchangeable -o exchangeable.png --json pairs.json
      weightscope covariance digits.pop --exchangeable --at all -o emergence.png
      weightscope covariance efficientnet-lite0.pth --part filters -o filters.png
      weightscope covariance efficientnet-lite0.pth --init default --picture depth
    """
    given = {key: x for key, x in options.items() if x is not None and x is not False and x != ()}
    throughout = exchangeable and at == "all"
    if at is not None and not throughout and not (at.isdecimal() and len(at) < 16):
        raise UsageError(f"--at: expected an epoch or a step, or all with --exchangeable, found {at}")
    epoch = None if at is None or throughout else int(at)
    opened = [_opened(source, partial, epoch) for source in sources]
    if exchangeable:
        chosen = "with --exchangeable --at all" if throughout else "with --exchangeable"
        if len(opened) > 1:
            raise UsageError(f"--exchangeable: expected a population or one network, found {len(opened)} sources")
    elif "eigenpairs" in given:
        chosen = "with --eigenpairs"
    elif len(opened) == 1 and hasattr(opened[0], "chunks") and len(opened[0]) > 1 and given.keys().isdisjoint(_WITHIN):
        chosen = "across a population"
    else:
        chosen = "within networks"
    refuse_others(given, _TABLE[chosen], chosen)
    kind = {k: given[k] for k in ("kind",) if k in given}
    drawing = kind | {k: given.pop(k) for k in ("cells", "picture") if k in given}
    found = _covariance(chosen, opened, workers, given)
    show(found)
    if hasattr(found, "plot"):
        _draw(found, out, **drawing)


def _opened(source: Any, partial: bool, at: int | None) -> Any:
    """The population that a source names, if it does so."""
    from weightscope.population import population_in

    source = maybe_partial(source, partial, at)
    return population_in(source) if is_population(source) else source


def _covariance(chosen: str, sources: Sequence[Any], workers: Any, options: dict[str, Any]) -> Any:
    """The result of one row of `_TABLE`."""
    if chosen == "with --exchangeable --at all":
        from weightscope.analysis.exchangeable import emergence
        from weightscope.population import population_in

        return emergence(population_in(sources[0]), workers=workers, **options)
    if chosen == "with --exchangeable":
        from weightscope.analysis.exchangeable import covariance_exchangeable

        return covariance_exchangeable(sources[0], workers=workers, **options)
    if chosen == "within networks":
        from weightscope.analysis.within_network import covariance_within

        index = options.pop("network", None)
        pairs = [_network(source, index) for source in sources]
        pairs += _initialised(pairs[0][0], options.pop("init", ()), options.get("part"))
        return covariance_within(*(one for one, _ in pairs), labels=[label for _, label in pairs], **options)
    from weightscope.analysis.across_networks import covariance_across, eigenpairs

    if chosen == "with --eigenpairs":
        return eigenpairs(sources[0], options.pop("eigenpairs"), workers=workers, **options)
    return covariance_across(sources[0], workers=workers, **options)


def _network(source: Any, index: int | None) -> tuple[Any, str | None]:
    """A trained network, and its label if it is one of a population."""
    if hasattr(source, "opened"):
        return source.opened(index or 0), f"{source.path.name}::{index or 0}"
    if index is not None:
        raise UsageError(f"--network: selects within a population's folder, found {source}")
    return source, None


def _initialised(first: Any, inits: Sequence[str], part: Any) -> list[tuple[Any, str]]:
    """A network with the shapes of the first for each initialiser, and its label."""
    if not inits:
        return []
    import torch

    from weightscope.analysis.within_network import skeleton
    from weightscope.init.named import labelled, resolve
    from weightscope.population import open_network

    first, out = open_network(first), []
    for label, config in map(labelled, inits):
        out.append((resolve(config)(skeleton(first, part), generator=torch.Generator().manual_seed(0)), label))
    return out


def _draw(found: Any, out: Path, **drawing: Any) -> None:
    found.plot(out, **drawing)
    click.echo(f"wrote {out}")


@command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@figure_option("products.png")
@config_options
@click.option("--fold-norms", is_flag=True, help="Fold in the gain of the normalisation before the attention.")
@click.option("--fold-scales", is_flag=True, help="Fold LayerScale into W_V W_O.")
@many_options
@file_options
@csv_option
@json_option
def products(sources: tuple[str, ...], out: Path, **options: Any) -> None:
    """Compute W_Q W_K^T and W_V W_O of every layer and head, and test their diagonals.

    SOURCE is a .safetensors or .pt file, a model folder, PATH.pop::k (network k of a population) or
    hf://org/name[@revision], from which only the attention's tensors are fetched. One model is drawn as a grid of
    matrices, several are compared by depth. In W ~ alpha Z + beta I, beta is the mean of the diagonal; z compares it
    with that of independent Gaussian factors.
    Mamba and Mamba-2 layers have W_C^T W_B.

    \b
    Examples:
      weightscope products vit/ -o products.png --json rows.json
      weightscope products hf://openai-community/gpt2 --fold-norms
      weightscope products vit/ mimetic.pt default.pt --num-heads 6 -o depth.png
      weightscope products qwen2-vl/ --heads visual=16,text=12
    """
    from weightscope.analysis.attention_products import products as compute

    found = compute(*sources, **options)
    show(found)
    _draw(found, out)
    _refuse(found.failed, sources)


def _refuse(failed: Mapping[str, str], sources: Sequence[str]) -> None:
    """The error of models that are left out, after the others were shown."""
    if failed:
        others = "; the others are shown" * (len(failed) < len(sources))
        raise DataError(f"{len(failed)} of {len(sources)} models failed: {', '.join(failed)}{others}")


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    """Whole numbers separated by commas."""
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{parameter.opts[0]}: expected numbers separated by commas, such as 0,3, found {text!r}"
        ) from None


@command("attention-maps")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@figure_option("attention.png")
@choice_option(
    "--kind",
    "maps mean expected offsets ranks",
    "Maps of each head, means over heads of all models in one picture, those that positions predict, means by relative "
    "place, or stable ranks of the inputs.",
    "maps",
)
@click.option("--layers", callback=_numbers, help="Layers, counted from 0, separated by commas.  [default: all]")
@click.option("--corner", type=click.IntRange(1), help="With --kind mean: also draw the maps of the first tokens.")
@click.option(
    "--images",
    type=Named("datasets"),
    help="For a model's folder: a picture, a folder of pictures or a data set.  [default: noise]",
)
@click.option("--count", type=click.IntRange(1), default=64, help="Number of images or sequences.")
@click.option(
    "--size",
    type=click.IntRange(1),
    help="Pixels per side.  [default: 224, or those of config.json]",
)
@click.option(
    "--tokens",
    type=Named("tasks"),
    metavar="FILE|TASK:LENGTH",
    help="For a model of sequences: a file with a sequence of numbers in each line, or a task such as copy:20.  "
    "[default, for a population: the task of its recipe]",
)
@data_option
@many_options
@file_options
@csv_option
@json_option
def attention_maps(
    sources: tuple[str, ...],
    out: Path,
    kind: str,
    layers: list[int] | None,
    corner: int | None,
    workers: Any,
    **options: Any,
) -> None:
    """Draw the mean attention maps of a Transformer's heads, and say where D >= k f^2 fails.

    "target" is the weight on the offset to which a head attends on position codes alone; "peak" is the largest weight
    of a query. k is the stable rank of a layer's input, which is at most the rank: only D < k f^2 shows something.

    Several models are listed, compared in a table, and drawn in files of their own, attention-NAME.png, or with --kind
    mean in one picture, models down and layers across.

    SOURCE is a population, of which one network (PATH.pop::k, by default 0; PATH.pop::k@EPOCH at a snapshot, 0 the
    start) is run on the test images of its recipe, or a folder of transformers (config.json, model.safetensors), run on
    pictures that are scaled to the model's size and normalised as its preprocessor_config.json says, or on noise if
    there are none.

    With --tokens, SOURCE is a causal Transformer (a folder of transformers) or a Mamba or Mamba-2 (weights of
    transformers or mamba_ssm). Of the latter, what each token adds to each later one is drawn in the same way, with the
    mean mask, the product of the decays. Networks of a population of any of these are run on held-out sequences of its
    recipe, at the training length, if no tokens are given.

    \b
    Examples:
      weightscope attention-maps vits.pop::3 -o attention.png
      weightscope attention-maps mambas.pop --count 16 -o maps.png
      weightscope attention-maps vit/ --images pictures/ --kind offsets --count 32 --json heads.json
      weightscope attention-maps mamba/ --tokens copy:20 -o maps.png
      weightscope attention-maps vits.pop::0 vits.pop::1 vits.pop::2 --workers auto
      weightscope attention-maps vits.pop::0@0 vits.pop::0 vit/ --images cifar10 --kind mean --layers 0,3,10
    """
    from weightscope._util.in_order import in_order
    from weightscope._util.names import label_of, labels_of
    from weightscope.analysis.attention_maps import compared, mean_maps

    if corner is not None and kind != "mean":
        raise UsageError(f"--corner: expected --kind mean, found {kind}")
    folders = not all(is_population(source) or population_member(source) for source in sources)
    of_members = options | {"images": None, "size": None} if folders else options
    one = partial(_maps_of, kind, layers, options, of_members)
    drawing = {} if kind == "maps" else {"kind": kind}
    if len(sources) == 1:
        found, notes = one(sources[0])
        show(found)
        for note in notes:
            click.echo(f"warning: {note}")
        if kind == "mean":
            mean_maps({label_of(sources[0]): found}, out, corner=corner)
            click.echo(f"wrote {out}")
        else:
            _draw(found, out, **drawing)
        return
    failed, models, names = {}, {}, labels_of([label_of(source) for source in sources], None)
    files = labels_of([re.sub("[^A-Za-z0-9._-]+", "-", name) for name in names], None)
    for name, file, each in zip(names, files, in_order(one, sources, names, workers), strict=True):
        if isinstance(each, WeightscopeError):
            failed[name] = str(each).removeprefix(f"{name}: ")
            continue
        found, notes = each
        click.echo("\n".join([f"{name}:", found.text(), *(f"warning: {note}" for note in notes)]))
        if kind != "mean":
            _draw(found, out.with_stem(f"{out.stem}-{file}"), **drawing)
        click.echo()
        models[name] = found
    if not models:
        raise DataError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    click.echo(compared(models))
    if kind == "mean":
        mean_maps(models, out, corner=corner)
        click.echo(f"wrote {out}")
    for name, why in failed.items():
        click.echo(f"warning: {name}: left out: {why}")
    write_csv(models)
    write_json({"models": {name: found.to_dict() for name, found in models.items()}, "failed": failed})
    _refuse(failed, sources)


def _maps_of(
    kind: str, layers: list[int] | None, options: Mapping[str, Any], of_members: Mapping[str, Any], source: str
) -> tuple[Any, list[str]]:
    """The attention maps of one model, and notes on what was made up; `of_members` are a population's options."""
    from weightscope.analysis.attention_maps import attention_maps as maps
    from weightscope.analysis.runnable import runnable
    from weightscope.analysis.state_space_maps import has_state_spaces, state_space_maps

    member = is_population(source) or population_member(source) is not None
    model, batch, notes = runnable(source, **(of_members if member else options))
    if has_state_spaces(model):
        if kind != "maps" or layers is not None:
            raise UsageError("a network with state-space layers: expected --kind maps and no --layers")
        return state_space_maps(model, batch), []
    if batch.ndim == 2 and kind in ("expected", "ranks"):
        raise UsageError(f"--kind {kind}: this picture is for images only, found sequences")
    return maps(model, batch, layers=layers), notes


@command()
@click.argument("source", type=Named())
@click.option(
    "--init",
    type=Named("initialisers"),
    help="NAME, NAME+NAME, MODULE:FUNCTION, a .toml file with its parameters, or a fit to networks (.safetensors); "
    "all if not given.",
)
@config_options
@click.option("--no-strict", is_flag=True, help="Audit what can be read, and list what looks alike and cannot.")
@file_options
@csv_option
@json_option
def audit(source: str, init: str | None, config: Any, no_strict: bool) -> None:
    """Check whether a checkpoint has the structure that an initialiser produces.

    SOURCE is a .safetensors or .pt file, a model folder or PATH.pop::k, network k of a population. Tests the effective
    operators layer by layer and head by head, and exits with 1 unless every initialiser named has passed. Without
    --init it says which ones fit, and exits with 0.

    \b
    Example:
      weightscope audit vit/ --init mimetic_attention
      weightscope audit small.pt --init 'select_weights(teacher="large.pt")'
      weightscope audit vit/ --init dinov2.safetensors
    """
    from weightscope.auditing import audit as run
    from weightscope.population import open_network

    model = open_network(source)
    name, parameters = init, {}
    if init is not None and (init.endswith(".toml") or "(" in init):
        from weightscope.init.named import labelled

        parsed = labelled(init)[1]
        name, parameters = parsed.name, parsed.parameters
    report = run(model, name, config=config, **{"strict": not no_strict, **parameters})
    show(report)
    if init is not None and not report.passed:
        raise SystemExit(1)
