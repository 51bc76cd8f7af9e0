"""Commands that analyse: `inspect`, `verify`, `export`, `products`, `audit`, `list`."""

from pathlib import Path
from typing import Any, Literal

import click

from weightscope.cli.shared import (
    Named,
    OutputFile,
    figure_option,
    json_option,
    out_option,
    partial_option,
    write_json,
)


@click.command()
@click.argument("source", type=Named())
@json_option
def inspect(source: str, json_file: Path | None) -> None:
    """Describe the contents of a population, one of its networks (PATH.pop::k), an artifact, a checkpoint or an export.

    \b
    Examples:
      weightscope inspect digits.pop
      weightscope inspect vit/model.safetensors
    """
    from weightscope.analysis.inspection import inspect as contents

    description = contents(source)
    click.echo(description.text())
    write_json(json_file, description.to_dict())


@click.command()
@click.argument("source", type=Named())
@click.option("--download", is_flag=True, help="Of a model at the hub: fetch what is missing of its files.")
@json_option
def verify(source: str, download: bool, json_file: Path | None) -> None:
    """Compare a population, an artifact or a model with the checksums that are known of its files.

    SOURCE is a .pop folder, an artifact, a file, a model folder or hf://org/name[@revision]. A file without a checksum,
    and one of a model at the hub of which only byte ranges were read, is reported as unverified. Exits with 3 if a file
    is damaged.

    \b
    Examples:
      weightscope verify digits.pop
      weightscope verify hf://openai-community/gpt2 --download
    """
    from weightscope.analysis.verification import verify as run

    found = run(source, download=download)
    click.echo(found.text())
    write_json(json_file, found.to_dict())
    found.raise_if_damaged()


@click.command()
@click.argument("source", type=Named())
@out_option("The HDF5 file to write (.h5).", type=OutputFile(".h5", ".hdf5"))
@click.option("--select", default="*", show_default=True, help="Patterns of tensor names, separated by commas.")
@partial_option
def export(source: str, out: Path, select: str, partial: bool) -> None:
    """Write the weights of a population as one (N, D) matrix with its spec.

    \b
    Example:
      weightscope export digits.pop -o digits.h5 --select "*.mlp.*"
    """
    from weightscope.population import export as write
    from weightscope.population import population_in

    click.echo(f"wrote {write(population_in(source, partial=partial), out, select)}")


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@figure_option("products.png")
@click.option(
    "--view",
    type=click.Choice(["auto", "grid", "depth"]),
    default="auto",
    show_default=True,
    help="Matrices in a grid, or alpha and beta against depth.",
)
@click.option("--layer", "layers", type=int, multiple=True, help="Only this layer, counted from 0; repeatable.")
@click.option("--num-heads", type=int, help="Number of heads, for files without a config.json.")
@click.option("--clip", type=int, default=64, show_default=True, help="Rows and columns drawn, from the upper left.")
@click.option("--draw-heads", type=int, default=8, show_default=True, help="Maximum number of heads drawn.")
@click.option(
    "--values",
    type=click.Choice(["layers", "heads", "both"]),
    default="layers",
    show_default=True,
    help="Draw W_V W_O of whole layers, of single heads, or both.",
)
@click.option("--cross", is_flag=True, help="Include cross-attention.")
@click.option("--fold-norms", is_flag=True, help="Fold in the gain of the normalisation before the attention.")
@click.option("--fold-scales", is_flag=True, help="Fold LayerScale into W_V W_O.")
@click.option("--biases", is_flag=True, help="Add columns for the contribution of biases.")
@click.option("--rotary", default="zero", show_default=True, help="zero, average, or a relative position.")
@click.option(
    "--spectra",
    type=click.Choice(["heads", "all", "none"]),
    default="heads",
    show_default=True,
    help="Which singular values are computed.",
)
@json_option
def products(
    sources: tuple[str, ...],
    out: Path,
    view: Literal["auto", "grid", "depth"],
    draw_heads: int,
    values: Literal["layers", "heads", "both"],
    num_heads: int | None,
    layers: tuple[int, ...],
    rotary: str,
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
    position = int(rotary) if rotary.lstrip("-").isdigit() else rotary
    found = compute(*sources, config=config, layers=layers or None, rotary=position, **options)
    click.echo(found.text())
    found.plot(out, view, heads=draw_heads, values=values)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())


@click.command()
@click.argument("source", type=Named())
@click.option(
    "--init",
    type=Named("initialisers"),
    help="NAME, NAME+NAME, MODULE:FUNCTION, or a .toml file with its parameters; all if not given.",
)
@click.option("--no-strict", is_flag=True, help="Audit what can be read, and list what looks alike and cannot.")
@json_option
def audit(source: str, init: str | None, no_strict: bool, json_file: Path | None) -> None:
    """Check whether a checkpoint has the structure that an initialiser produces.

    SOURCE is a .safetensors or .pt file, a model folder or PATH.pop::k, network k of a population. Tests the effective
    operators layer by layer and head by head, and exits with 1 unless every initialiser named has passed. Without
    --init it says which ones fit, and exits with 0.

    \b
    Example:
      weightscope audit vit/ --init mimetic_attention
      weightscope audit small.pt --init 'select_weights(teacher="large.pt")'
    """
    from weightscope.auditing import audit as run
    from weightscope.benchmarking.arms import labelled
    from weightscope.population import open_network

    model = open_network(source)
    name, parameters = init, {}
    if init is not None and (init.endswith(".toml") or "(" in init):
        config = labelled(init)[1]
        name, parameters = config.name, config.parameters
    report = run(model, name, **{"strict": not no_strict, **parameters})
    click.echo(str(report))
    write_json(json_file, report.to_dict())
    if init is not None and not report.passed:
        raise SystemExit(1)


@click.command("list")
@click.argument("kind", required=False, type=Named("kinds", files=False))
@json_option
def list_(kind: str | None, json_file: Path | None) -> None:
    """List initialisers, structures, networks, data sets and recipes, with their parameters and sources.

    KIND is initialisers, structures, networks, datasets or recipes; everything by default.

    \b
    Examples:
      weightscope list
      weightscope list initialisers --json initialisers.json
    """
    from weightscope.cli.catalogue import catalogue

    found = catalogue(kind)
    click.echo(found.text())
    write_json(json_file, found.to_dict())
