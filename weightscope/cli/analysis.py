"""Commands that analyse: `inspect`, `verify`, `export`, `covariance`, `products`, `attention-maps`, `audit`."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from weightscope._util.sources import population_member
from weightscope.cli.options import (
    Named,
    OutputFile,
    choice_option,
    command,
    data_option,
    figure_option,
    json_option,
    many_options,
    maybe_partial,
    out_option,
    partial_option,
    permutations_option,
    spread_options,
    write_json,
)
from weightscope.errors import DataError, UsageError, WeightscopeError


@command()
@click.argument("source", type=Named())
@click.option(
    "--source", "code", is_flag=True, help="Print the code of one's own that a population names, and run nothing."
)
@json_option
def inspect(source: str, code: bool, json_file: Path | None) -> None:
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
        write_json(json_file, population.to_dict())
        return
    description = contents(source)
    click.echo(description.text())
    write_json(json_file, description.to_dict())


@command()
@click.argument("source", type=Named())
@click.option("--download", is_flag=True, help="For a model on the hub: fetch the missing parts of its files.")
@spread_options
@json_option
def verify(source: str, json_file: Path | None, **options: Any) -> None:
    """Compare a population, an artifact or a model with the checksums that are known of its files.

    SOURCE is a .pop folder, an artifact, a file, a model folder or hf://org/name[@revision]. A file without a checksum,
    and one of a model at the hub of which only byte ranges were read, is reported as unverified. Exits with 3 if a file
    is damaged.

    \b
    Examples:
      weightscope verify digits.pop
      weightscope verify hf://openai-community/gpt2 --download
    """
    from weightscope.analysis.inspection import verify as run

    found = run(source, **options)
    click.echo(found.text())
    write_json(json_file, found.to_dict())
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
    """Write a population as a page to look into: metrics, a map of correlations, pairs to sort and filter.

    One HTML file, for which a browser needs no server and no network.

    \b
    Example:
      weightscope report digits.pop -o page.html
    """
    from weightscope.cli.page import write_page
    from weightscope.population import population_in

    population = population_in(source, partial=partial)
    click.echo(f"wrote {write_page(population if at is None else population.at(at), out, select)}")


@command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@click.option("--select", help="For a population: patterns of tensor names.  [default: *.mlp.fc?.weight]")
@click.option(
    "--computed", multiple=True, metavar="EXPR", help="For a population: a coordinate, such as 'diag(A @ B)'."
)
@choice_option(
    "--kind", "covariance correlation", "For a population: covariances or correlations.  [default: covariance]"
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
    "--means/--entries",
    default=None,
    help="For a population: draw group means, over hidden units, or single entries.  [default: means of matrices]",
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
    "inits",
    multiple=True,
    type=Named("initialisers"),
    help="Compare with an initialiser: NAME, MODULE:FUNCTION, an artifact or a .toml file; repeatable.",
)
@click.option(
    "--network", type=int, help="Look within this network of a population, counted from 0.  [default, with --part: 0]"
)
@click.option(
    "--keep", type=int, help="Within networks: keep matrices of at most this many coordinates.  [default: 1024]"
)
@figure_option("covariance.png")
@click.option(
    "--matrix",
    type=OutputFile(".npz", ".npy"),
    help="Also write the matrix or matrices (.npz). For a population, .npy is computed on disk, for any size.",
)
@choice_option("--precision", "float64 float32", "For a population.  [default: float64]")
@choice_option("--device", "cpu cuda", "For a population: where to multiply.  [default: cpu]")
@permutations_option
@spread_options
@click.option(
    "--no-keep-sums",
    "keep_sums",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Do not keep sums over networks in NAME.pop/sums for when the population has grown.",
)
@partial_option
@json_option
def covariance(
    sources: tuple[Any, ...],
    out: Path,
    matrix: Path | None,
    at: str | None,
    partial: bool,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Compute and plot the joint covariance of tensors across a population, or covariances within networks.

    A population is one .pop folder: its table compares the variance of row and column means of each matrix with that
    of independent entries. Anything else (.safetensors, .pt, .pth, a model folder, hf://org/name, one or several) is
    analysed layer by layer: its filters, rows, columns or patches are the samples.

    \b
    Examples:
      weightscope covariance digits.pop --select "stages.0.blocks.1.mlp.fc?.weight" -o block1.png
      weightscope covariance digits.pop --select "stages.0.blocks.0.mlp.fc1.weight" \\
          --computed "center(stages.0.blocks.0.conv_dw.weight)" --kind correlation
      weightscope covariance digits.pop --exchangeable -o exchangeable.png --json pairs.json
      weightscope covariance digits.pop --exchangeable --at all -o emergence.png
      weightscope covariance efficientnet-lite0.pth --part filters -o filters.png
      weightscope covariance efficientnet-lite0.pth --init default --picture depth
    """
    from weightscope.analysis.across_networks import covariance as compute

    found: Any
    throughout = at == "all" and options["exchangeable"]
    if at is not None and not (at.isdecimal() and len(at) < 16) and not throughout:
        raise UsageError(f"--at: expected an epoch or a step, or all with --exchangeable, found {at}")
    moment = None if at is None or throughout else int(at)
    sources = tuple(maybe_partial(source, partial, moment) for source in sources)
    over = {"workers": options.pop("workers"), "keep_sums": options.pop("keep_sums")}
    means = options.pop("means")
    given = {key: x for key, x in options.items() if x is not None and x is not False and x != ()}
    if given.pop("exchangeable", False):
        select, own = given.pop("select", None), given.pop("permutations", None)
        given |= {"matrix": matrix} if matrix is not None else {}
        given |= {} if means is None else {"means" if means else "entries": means}
        if given:
            named = "--" + next(iter(given)).replace("_", "-").replace("inits", "init")
            raise UsageError(
                f"{named} cannot be combined with --exchangeable, which takes --select and --permutations only"
            )
        if throughout:
            from weightscope.analysis.exchangeable import emergence
            from weightscope.population import population_in

            if own is not None:
                raise UsageError("--permutations requires --exchangeable, without --at all")
            if len(sources) > 1:
                raise UsageError(f"--at all: expected one population, found {len(sources)} sources")
            found = emergence(population_in(sources[0]), select or "*", **over)
        else:
            one = sources[0] if len(sources) == 1 else sources
            found = compute(one, select or "auto", exchangeable=True, permutations=own, **over)
        _show(found, out, json_file)
        return
    if "permutations" in given:
        raise UsageError("--permutations requires --exchangeable, without --at all")
    drawing = {} if means is None else {"means": means}
    drawing |= {"picture": given.pop("picture")} if "picture" in given else {}
    if given.get("device") == "cuda":
        from weightscope.training.devices import resolve_device

        given["device"] = resolve_device("cuda")
    if matrix is not None and matrix.suffix == ".npy":
        given["file"] = matrix
    networks, labels = _with_initialisers(sources, given.pop("inits", ()), given)
    if labels:
        given["labels"] = labels
    found = compute(networks[0] if len(networks) == 1 else networks, **over, **given)
    _show(found, out, json_file, **drawing)
    if matrix is not None:
        found.save_matrix(matrix)
        click.echo(f"wrote {matrix}")


def _show(found: Any, out: Path, json_file: Path | None, notes: Sequence[str] = (), **drawing: Any) -> None:
    """Print a result, draw it and write it as JSON."""
    click.echo(found.text())
    for note in notes:
        click.echo(f"warning: {note}")
    found.plot(out, **drawing)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())


def _with_initialisers(
    sources: Sequence[Any], inits: Sequence[str], options: dict[str, Any]
) -> tuple[list[Any], list[str | None]]:
    """The sources, and a network of the shapes of the first for each initialiser; labels, if there are any."""
    if not inits:
        return list(sources), []
    import torch

    from weightscope.analysis.within_network import skeleton
    from weightscope.benchmarking.design import labelled
    from weightscope.population import Population, open_source
    from weightscope.training.initial_weights import resolve

    first = open_source(sources[0])
    if isinstance(first, Population):
        first = first.opened(options.get("network", 0))
    named = [labelled(init) for init in inits]
    generators = [torch.Generator().manual_seed(0) for _ in named]
    bare = [skeleton(first, options.get("part")) for _ in named]
    networks = [resolve(c)(b, generator=g) for (_, c), b, g in zip(named, bare, generators, strict=True)]
    return [*sources, *networks], [*(None for _ in sources), *(label for label, _ in named)]


@command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@figure_option("products.png")
@choice_option("--view", "auto grid depth", "Matrices in a grid, or alpha and beta against depth.", "auto")
@click.option("--layer", "layers", type=int, multiple=True, help="Only this layer, counted from 0; repeatable.")
@click.option("--num-heads", type=click.IntRange(1), help="Number of heads, in place of the config's.")
@click.option("--clip", type=click.IntRange(1), default=64, help="Rows and columns drawn, from the upper left.")
@click.option("--fold-norms", is_flag=True, help="Fold in the gain of the normalisation before the attention.")
@click.option("--fold-scales", is_flag=True, help="Fold LayerScale into W_V W_O.")
@many_options
@json_option
def products(
    sources: tuple[str, ...],
    out: Path,
    view: Literal["auto", "grid", "depth"],
    num_heads: int | None,
    layers: tuple[int, ...],
    json_file: Path | None,
    **options: Any,
) -> None:
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
    """
    from weightscope.analysis.attention_products import products as compute

    config = None if num_heads is None else {"num_attention_heads": num_heads}
    found = compute(*sources, config=config, layers=layers or None, **options)
    _show(found, out, json_file, view=view)
    _refuse(found.failed, sources)


def _refuse(failed: Mapping[str, str], sources: Sequence[str]) -> None:
    """The error of models that are left out, after the others were shown."""
    if failed:
        others = "; the others are shown" * (len(failed) < len(sources))
        raise DataError(f"{len(failed)} of {len(sources)} models failed: {', '.join(failed)}{others}")


@command("attention-maps")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@figure_option("attention.png")
@choice_option(
    "--kind",
    "maps expected offsets ranks",
    "Mean maps, those that positions predict, means by relative place, or stable ranks of the inputs.",
    "maps",
)
@click.option(
    "--images",
    type=Named("datasets"),
    help="For a model's folder: a picture, a folder of pictures or a data set.  [default: noise]",
)
@click.option("--count", type=click.IntRange(1), default=64, help="Number of images or sequences.")
@click.option("--size", type=click.IntRange(1), help="Pixels per side.  [default: that of config.json]")
@click.option(
    "--tokens",
    type=Named("tasks"),
    metavar="FILE|TASK:LENGTH",
    help="For a model of sequences: a file with a sequence of numbers in each line, or a task such as copy:20.  "
    "[default, for a population: the task of its recipe]",
)
@click.option("--filter-size", type=int, default=3, help="f of the neighbourhood and of D >= k f^2.")
@data_option
@many_options
@json_option
def attention_maps(
    sources: tuple[str, ...], out: Path, kind: str, json_file: Path | None, workers: Any, **options: Any
) -> None:
    """Draw the mean attention maps of a Transformer's heads, and say where D >= k f^2 fails.

    "target" is the weight on the offset to which a head attends on position codes alone; "peak" is the largest weight
    of a query. k is the stable rank of a layer's input, which is at most the rank: only D < k f^2 shows something.

    Several models are listed, compared in a table, and drawn in files of their own, attention-NAME.png.

    SOURCE is a population, of which one network (PATH.pop::k, by default 0) is run on the test images of its recipe, or
    a folder of transformers (config.json, model.safetensors), run on pictures that are scaled to the model's size and
    normalised as its preprocessor_config.json says, or on noise if there are none.

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
    """
    from weightscope._util.names import label_of, labels_of
    from weightscope._util.workers import in_order
    from weightscope.analysis.attention_maps import compared

    one, drawing = partial(_maps_of, kind, options), {} if kind == "maps" else {"kind": kind}
    if len(sources) == 1:
        found, notes = one(sources[0])
        _show(found, out, json_file, notes, **drawing)
        return
    failed, models, names = {}, {}, labels_of([label_of(source) for source in sources], None)
    files = labels_of([re.sub("[^A-Za-z0-9._-]+", "-", name) for name in names], None)
    for name, file, each in zip(names, files, in_order(one, sources, names, workers), strict=True):
        if isinstance(each, WeightscopeError):
            failed[name] = str(each).removeprefix(f"{name}: ")
            continue
        found, notes = each
        click.echo(f"{name}:")
        _show(found, out.with_stem(f"{out.stem}-{file}"), None, notes, **drawing)
        click.echo()
        models[name] = found
    if not models:
        raise DataError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    click.echo(compared(models))
    for name, why in failed.items():
        click.echo(f"warning: {name}: left out: {why}")
    write_json(json_file, {"models": {name: found.to_dict() for name, found in models.items()}, "failed": failed})
    _refuse(failed, sources)


def _maps_of(kind: str, options: Mapping[str, Any], source: str) -> tuple[Any, list[str]]:
    """The attention maps of one model, and notes on what was made up."""
    from weightscope.analysis.attention_maps import attention_maps as maps
    from weightscope.analysis.runnable import runnable
    from weightscope.analysis.state_space_maps import has_state_spaces, state_space_maps

    inputs = dict(options)
    filter_size = inputs.pop("filter_size")
    model, batch, notes = runnable(source, **inputs)
    if has_state_spaces(model):
        if kind != "maps":
            raise UsageError(f"--kind: expected maps for a network with state-space layers, found {kind}")
        return state_space_maps(model, batch), []
    if batch.ndim == 2 and kind in ("expected", "ranks"):
        raise UsageError(f"--kind {kind}: this picture is for images only, found sequences")
    return maps(model, batch, filter_size=filter_size), notes


@command()
@click.argument("source", type=Named())
@click.option(
    "--init",
    type=Named("initialisers"),
    help="NAME, NAME+NAME, MODULE:FUNCTION, a .toml file with its parameters, or a fit to networks (.safetensors); "
    "all if not given.",
)
@click.option("--num-heads", type=click.IntRange(1), help="Number of heads, in place of the config's.")
@click.option("--no-strict", is_flag=True, help="Audit what can be read, and list what looks alike and cannot.")
@json_option
def audit(source: str, init: str | None, num_heads: int | None, no_strict: bool, json_file: Path | None) -> None:
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
        from weightscope.benchmarking.design import labelled  # and, with it, all of training

        parsed = labelled(init)[1]
        name, parameters = parsed.name, parsed.parameters
    config = None if num_heads is None else {"num_attention_heads": num_heads}
    report = run(model, name, config=config, **{"strict": not no_strict, **parameters})
    click.echo(str(report))
    write_json(json_file, report.to_dict())
    if init is not None and not report.passed:
        raise SystemExit(1)
