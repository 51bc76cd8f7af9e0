"""The command `covariance`: across a population, or within trained networks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from weightscope._util.sources import is_population
from weightscope.cli.shared import (
    Named,
    OutputFile,
    figure_option,
    json_option,
    maybe_partial,
    partial_option,
    write_json,
)
from weightscope.errors import UsageError

_RENAMED = {"--compute": "--computed", "--correlation": "--kind=correlation"}
_ACROSS = ("select", "computed", "kind", "fold_norms", "means", "precision", "device")


class _WithOldOptions(click.Command):
    """Accepts the former names of options, with a note on stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [self._current(argument) for argument in args])

    @staticmethod
    def _current(argument: str) -> str:
        name, equals, value = argument.partition("=")
        if name not in _RENAMED:
            return argument
        click.echo(f"weightscope: {name} is deprecated, use {_RENAMED[name]}", err=True)
        return _RENAMED[name] + equals + value


@click.command(cls=_WithOldOptions)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@click.option("--select", help="Of a population: patterns of tensor names.  [default: *.mlp.fc?.weight]")
@click.option("--computed", multiple=True, metavar="EXPR", help="Of a population: a coordinate, such as 'diag(A @ B)'.")
@click.option(
    "--kind",
    type=click.Choice(["covariance", "correlation"]),
    help="Of a population: covariances or correlations.  [default: covariance]",
)
@click.option("--fold-norms", is_flag=True, help="Of a population: fold each normalisation's gain into the next map.")
@click.option(
    "--exchangeable",
    is_flag=True,
    help="Average over permutations of hidden units: what is correlated within and across layers of a whole network.",
)
@click.option(
    "--means/--entries",
    default=None,
    help="Of a population: draw group means, over hidden units, or single entries.  [default: means of matrices]",
)
@click.option(
    "--part",
    type=Named("parts", files=False),
    help="Within networks: filters, mlp-rows, mlp-columns, patch or patch-channels.  [default: the first that exists]",
)
@click.option(
    "--picture",
    type=click.Choice(["maps", "depth", "samples"]),
    help="Of layers within networks.  [default: maps of one network, depth of several]",
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
    help="Also write the matrix or matrices (.npz). Of a population, .npy is computed on disk, for any size.",
)
@click.option("--precision", type=click.Choice(["float64", "float32"]), help="Of a population.  [default: float64]")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Of a population: where to multiply.  [default: cpu]"
)
@partial_option
@json_option
def covariance(
    sources: tuple[Any, ...], out: Path, matrix: Path | None, partial: bool, json_file: Path | None, **options: Any
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
      weightscope covariance efficientnet-lite0.pth --part filters -o filters.png
      weightscope covariance efficientnet-lite0.pth --init default --picture depth
    """
    from weightscope.analysis.covariances import covariance as compute

    sources = tuple(maybe_partial(source, partial) for source in sources)
    if options.pop("exchangeable"):
        given = ["matrix"] * (matrix is not None) + [key for key, value in options.items() if value and key != "select"]
        given += ["entries"] * (options["means"] is False)
        if given:
            named = "--" + given[0].replace("_", "-").replace("inits", "init")
            raise UsageError(f"{named}: not available with --exchangeable, which takes --select only")
        result = compute(sources[0] if len(sources) == 1 else sources, options["select"] or "auto", exchangeable=True)
        click.echo(result.text())
        result.plot(out)
        click.echo(f"wrote {out}")
        write_json(json_file, result.to_dict())
        return
    across = {key: options[key] for key in _ACROSS if options[key] or (key == "means" and options[key] is not None)}
    within = {key: value for key, value in options.items() if key not in _ACROSS and value not in (None, ())}
    if options["device"] == "cuda":
        from weightscope.training.devices import resolve_device

        across["device"] = resolve_device("cuda")
    drawing = {key: given.pop(key) for given in (across, within) for key in ("means", "picture") if key in given}
    if matrix is not None and matrix.suffix == ".npy":
        across["file"] = matrix
    networks, labels = _with_initialisers(sources, within.pop("inits", ()), within)
    if labels:
        within["labels"] = labels
    found: Any = compute(networks[0] if len(networks) == 1 else networks, **across, **within)
    click.echo(found.text())
    found.plot(out, **drawing)
    click.echo(f"wrote {out}")
    if matrix is not None:
        found.save_matrix(matrix)
        click.echo(f"wrote {matrix}")
    write_json(json_file, found.to_dict())


def _with_initialisers(
    sources: Sequence[Any], inits: Sequence[str], options: dict[str, Any]
) -> tuple[list[Any], list[str | None]]:
    """The sources, and a network of the shapes of the first for each initialiser; labels, if there are any."""
    if not inits:
        return list(sources), []
    import torch

    from weightscope.analysis.within_network import skeleton
    from weightscope.benchmarking.arms import labelled
    from weightscope.population import Population, population_in
    from weightscope.training.initial_weights import resolve

    first: Any = sources[0]
    if isinstance(first, Population) or is_population(first):
        population = first if isinstance(first, Population) else population_in(first)
        first = population.network(options.get("network", 0))
    named = [labelled(init) for init in inits]
    generators = [torch.Generator().manual_seed(0) for _ in named]
    bare = [skeleton(first, options.get("part")) for _ in named]
    networks = [resolve(c)(b, generator=g) for (_, c), b, g in zip(named, bare, generators, strict=True)]
    return [*sources, *networks], [*(None for _ in sources), *(label for label, _ in named)]
