"""Commands that look at what is there: `inspect`, `export`, `covariance`, `products`, `audit`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from weightscope.cli.shared import (
    OutputFile,
    figure_option,
    is_population,
    json_option,
    out_option,
    population_of,
    write_json,
)
from weightscope.errors import UsageError


@click.command()
@click.argument("source")
@json_option
def inspect(source: str, json_file: Path | None) -> None:
    """Show what is in a population, an initialiser's artifact or a checkpoint.

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
@click.argument("source")
@out_option("The HDF5 file to write.", type=OutputFile())
@click.option("--select", default="*", show_default=True, help="Patterns of tensor names, separated by commas.")
def export(source: str, out: Path, select: str) -> None:
    """Write a population's weights as one (N, D) matrix with its spec, for sharing.

    \b
    Example:
      weightscope export digits.pop -o digits.h5 --select "*.mlp.*"
    """
    from weightscope.population import export as write

    click.echo(f"wrote {write(population_of(source), out, select)}")


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--select", help="Of a population: patterns of tensor names.  [default: *.mlp.fc?.weight]")
@click.option("--compute", multiple=True, metavar="EXPR", help="Of a population: a coordinate, such as 'diag(A @ B)'.")
@click.option("--correlation", is_flag=True, help="Of a population: correlations instead of covariances.")
@click.option("--fold-norms", is_flag=True, help="Of a population: fold each normalisation's gain into the next map.")
@click.option("--means", is_flag=True, help="Of a population: draw means over hidden units.")
@click.option("--part", help="Within networks: filters, mlp-rows, mlp-columns, patch or patch-channels.")
@click.option("--picture", help="Within networks: maps, depth or samples.  [default: maps of one, depth of several]")
@click.option("--init", "inits", multiple=True, help="Compare with an initialiser (a name, or .toml); repeat it.")
@click.option("--network", type=int, help="Look within this network of a population, counted from 0.")
@click.option("--keep", type=int, help="Within networks: the most coordinates whose matrix is kept.  [default: 1024]")
@figure_option("covariance.png")
@click.option(
    "--matrix",
    type=OutputFile(".npz", ".npy"),
    help="Also write the matrix or matrices here (.npz). Of a population, .npy is made on the disk, whatever its size.",
)
@click.option("--precision", type=click.Choice(["float64", "float32"]), help="Of a population.  [default: float64]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Of a population: what multiplies.  [default: cpu]")
@json_option
def covariance(
    sources: tuple[str, ...], out: Path, matrix: Path | None, json_file: Path | None, **options: Any
) -> None:
    """Compute and plot the joint covariance of tensors across a population, or covariances within networks.

    A population is one .pop folder: its table says how much more the means of rows and columns of each matrix vary
    than those of independent entries. Anything else (.safetensors, .pt, .pth, a model folder, hf://org/name, one or
    several) is looked at layer by layer: its filters, rows, columns or patches are the samples.

    \b
    Examples:
      weightscope covariance digits.pop --select "stages.0.blocks.1.mlp.fc?.weight" -o block1.png
      weightscope covariance digits.pop --select "stages.0.blocks.0.mlp.fc1.weight" \\
          --compute "center(stages.0.blocks.0.conv_dw.weight)" --correlation
      weightscope covariance efficientnet-lite0.pth --part filters -o filters.png
      weightscope covariance efficientnet-lite0.pth --init default --picture depth
    """
    of_population = ("select", "compute", "correlation", "fold_norms", "means", "precision", "device")
    within = {key: options[key] for key in options if key not in of_population}
    across = {key: options[key] for key in of_population}
    if len(sources) == 1 and is_population(sources[0]) and not any(within.values()) and within["network"] is None:
        file = matrix if matrix is not None and matrix.suffix == ".npy" else None
        found, draw = _across(sources[0], **across, file=file)
    else:
        if given := [key for key in of_population if across[key]]:
            names = ", ".join("--" + key.replace("_", "-") for key in given)
            raise UsageError(f"{names}: for one population's folder alone; here networks are looked at one by one")
        if matrix is not None and matrix.suffix != ".npz":
            raise UsageError(f"{matrix}: matrices within networks are written as .npz")
        found, draw = _within(sources, **within)
    click.echo(found.text())
    draw(out)
    click.echo(f"wrote {out}")
    if matrix is not None:
        found.save_matrix(matrix)
        click.echo(f"wrote {matrix}")
    write_json(json_file, found.to_dict())


def _across(
    source: str,
    *,
    select: str | None,
    correlation: bool,
    compute: tuple[str, ...],
    means: bool,
    fold_norms: bool,
    precision: str | None,
    device: str | None,
    file: Path | None,
) -> tuple[Any, Callable[[Path], None]]:
    """A population's covariance, and what draws it."""
    from weightscope.analysis.covariances import covariance as compute_covariance

    kind = "correlation" if correlation else "covariance"
    chosen = select or "*.mlp.fc?.weight"
    options = {"fold_norms": fold_norms, "precision": precision or "float64", "file": file}
    if device == "cuda":
        from weightscope.training.engine import resolve_device

        options["device"] = resolve_device(device)
    found = compute_covariance(population_of(source), chosen, kind=kind, computed=compute, **options)
    return found, lambda out: found.plot(out, means=means)


def _within(
    sources: Sequence[str],
    *,
    part: str | None,
    picture: str | None,
    inits: Sequence[str],
    network: int | None,
    keep: int | None,
) -> tuple[Any, Callable[[Path], None]]:
    """Covariances within networks, and what draws them; initialisers are applied to the first one's shapes."""
    import torch

    from weightscope.analysis.within_network import covariance_within, skeleton
    from weightscope.recipe import InitConfig
    from weightscope.training.initial_weights import resolve

    if network is not None and not all(map(is_population, sources)):
        raise UsageError("--network: chooses within a population's folder, found another source")
    networks: list[Any] = [population_of(s).network(network or 0) if is_population(s) else s for s in sources]
    labels = [f"{Path(s).name} {network or 0}" if is_population(s) else None for s in sources]
    for init in inits:
        config = InitConfig.load(init) if init.endswith(".toml") else InitConfig(name=init)
        bare = skeleton(networks[0], part or "filters")
        networks.append(resolve(config)(bare, generator=torch.Generator().manual_seed(0)))
        labels.append(Path(init).stem if init.endswith(".toml") else init)
    options = {} if keep is None else {"keep": keep}
    found = covariance_within(*networks, part=part or "filters", labels=labels, **options)
    return found, lambda out: found.plot(out, picture)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@figure_option("products.png")
@click.option(
    "--view",
    type=click.Choice(["auto", "grid", "depth"]),
    default="auto",
    show_default=True,
    help="Matrices in a grid, or alpha and beta against depth.",
)
@click.option("--layer", "layers", type=int, multiple=True, help="Only this layer, counted from 0; repeat it.")
@click.option("--num-heads", type=int, help="Number of heads, for files without a config.json.")
@click.option("--clip", type=int, default=64, show_default=True, help="Draw the upper left so many rows and columns.")
@click.option("--draw-heads", type=int, default=8, show_default=True, help="Draw at most so many heads.")
@click.option("--cross", is_flag=True, help="Cross-attention too.")
@click.option("--fold-norms", is_flag=True, help="Fold the gain of the normalisation before the attention.")
@click.option("--fold-scales", is_flag=True, help="Fold LayerScale into W_V W_O.")
@click.option("--biases", is_flag=True, help="Add columns on what biases contribute.")
@click.option("--rotary", default="zero", show_default=True, help="zero, average, or a relative position.")
@click.option(
    "--spectra",
    type=click.Choice(["heads", "all", "none"]),
    default="heads",
    show_default=True,
    help="Of what singular values are computed.",
)
@json_option
def products(
    sources: tuple[str, ...],
    out: Path,
    view: str,
    draw_heads: int,
    num_heads: int | None,
    layers: tuple[int, ...],
    rotary: str,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Show W_Q W_K^T and W_V W_O of every layer and head: is the diagonal positive, negative, noticeable?

    SOURCE is a .safetensors or .pt file, a model folder or hf://org/name[@revision], of which only the attention's
    tensors are fetched. One model is drawn as a grid of matrices, several are compared by depth. With
    W ~ alpha Z + beta I, beta is the mean of the diagonal; z tells it from independent Gaussian factors.

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
    found.plot(out, view, heads=draw_heads)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())


@click.command()
@click.argument("source")
@click.option("--init", help="A name, names joined by +, or a .toml file with its numbers; without it, every one.")
@json_option
def audit(source: str, init: str | None, json_file: Path | None) -> None:
    """Does a checkpoint have the structure that an initialiser promises?

    SOURCE is a .safetensors or .pt file or a model folder. Looks at effective operators, layer by layer and head by
    head, and exits with 1 when a check fails.

    \b
    Example:
      weightscope audit vit/ --init mimetic_attention
    """
    from weightscope.auditing import audit as look
    from weightscope.checkpoint import Checkpoint
    from weightscope.recipe import InitConfig

    config = InitConfig.load(init) if init and init.endswith(".toml") else InitConfig(name=init or "default")
    checkpoint = Checkpoint(source)
    report = look(checkpoint, config.name if init else None, config=checkpoint.config, **config.parameters)
    click.echo(str(report))
    write_json(json_file, report.to_dict())
    if not report.passed:
        raise SystemExit(1)
