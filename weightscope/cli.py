"""The command line. A command parses, calls one function of the library, and prints.

Nothing heavy is imported here: each command imports what it needs when it runs, so that `--help` answers at once.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightscope._version import __version__
from weightscope.errors import UsageError, WeightscopeError

if TYPE_CHECKING:
    from weightscope.population import Population
    from weightscope.recipe import Recipe

INTERRUPTED = 130


class _Commands(click.Group):
    """Lists commands in the order of the chain, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="weightscope")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """The distribution of trained weights, and initialisers made from it.

    \b
    weightscope demo                              the whole chain on embedded data, in minutes
    weightscope collect RECIPE.toml -o NAME.pop   train a population
    weightscope covariance NAME.pop               look at its structure
    weightscope fit-init NAME.pop -o INIT         turn the structure into an initialiser
    weightscope bench RECIPE.toml --init default --init INIT
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; every error leaves as one line and an exit code (see `weightscope.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(cli.main(args=arguments, prog_name="weightscope", standalone_mode=False) or 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("weightscope: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if "--debug" in arguments:
            raise
        known = isinstance(error, WeightscopeError)
        text = str(error) if known else f"internal error, {type(error).__name__}: {error} (--debug shows where)"
        click.echo(f"weightscope: {' '.join(text.split())}", err=True)
        sys.exit(error.exit_code if known else 1)


def _training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that trains."""
    options = [
        click.option("--data", type=click.Path(path_type=Path), help="Folder to look for the data set in first."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
        click.option("--workers", type=int, help="Worker processes; by default one for each core, or one on a GPU."),
    ]

    @wraps(command)
    def wrapped(**arguments: Any) -> Any:
        return command(**arguments)

    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


_json_option = click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the table here.")


def _write_json(path: Path | None, values: Any) -> None:
    if path is None:
        return
    from weightscope import _atomic

    _atomic.write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def _recipe(source: str) -> "Recipe":
    """A recipe file, or the recipe of a population."""
    from weightscope.recipe import Recipe

    if Path(source).is_dir():
        return _population(source).recipe
    return Recipe.load(source)


def _population(source: str) -> "Population":
    from weightscope.population import Population

    if not Path(source).is_dir():
        raise UsageError(f"expected a population's folder, made by `weightscope collect`, found {source}")
    return Population(source)


@cli.command()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weightscope-demo"),
    show_default=True,
    help="Folder of everything.",
)
@click.option("--networks", type=int, default=256, show_default=True, help="Size of the population.")
@click.option("--epochs", type=int, default=12, show_default=True, help="Epochs of the population's training.")
@click.option("--seeds", type=int, default=64, show_default=True, help="Paired seeds of the benchmark.")
@_training_options
def demo(out: Path, networks: int, epochs: int, seeds: int, **options: Any) -> None:
    """The whole chain on embedded real data: population, covariance, initialiser, benchmark, report.

    Runs on scikit-learn's handwritten digits and leaves a self-contained report.html. Stopped and started again,
    it goes on where it was.

    \b
    Example:
      weightscope demo -o weightscope-demo
    """
    from weightscope.demo import run_demo

    report = run_demo(out, networks=networks, epochs=epochs, seeds=seeds, say=click.echo, **options)
    click.echo(f"\nThe report: {report}")


@cli.command()
@click.argument("recipe")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The population's folder.")
@click.option("-n", "--networks", type=int, help="How many networks; a population may grow, never shrink.")
@click.option("--shard", type=int, help="Train this tile alone, for job arrays.")
@click.option("--backend", default="loky", show_default=True, help="loky, dask or ray.")
@click.option("--scheduler", help="Address of the cluster, such as tcp://host:8786.")
@_training_options
def collect(recipe: str, out: Path, **options: Any) -> None:
    """Train a population of networks, or go on training one.

    RECIPE is a TOML file. Ctrl-C leaves a valid population; the same command goes on with it.

    \b
    Example:
      weightscope collect populations/digits-convnext.toml -o digits.pop -n 512
    """
    from weightscope.collect import collect as train
    from weightscope.inspect import describe

    train(_recipe(recipe), out, **options)
    click.echo(describe(out).text())


@cli.command()
@click.argument("source")
@_json_option
def inspect(source: str, json_file: Path | None) -> None:
    """Show what is in a population, an initialiser's artifact or a checkpoint.

    \b
    Examples:
      weightscope inspect digits.pop
      weightscope inspect vit/model.safetensors
    """
    from weightscope.inspect import look

    description = look(source)
    click.echo(description.text())
    _write_json(json_file, description.to_dict())


@cli.command()
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The HDF5 file to write.")
@click.option("--select", default="*", show_default=True, help="Patterns of tensor names, separated by commas.")
def export(source: str, out: Path, select: str) -> None:
    """Write a population's weights as one (N, D) matrix with its spec, for sharing.

    \b
    Example:
      weightscope export digits.pop digits.h5 --select "*.mlp.*"
    """
    from weightscope.population import export as write

    click.echo(f"wrote {write(_population(source), out, select)}")


@cli.command()
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
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("covariance.png"),
    show_default=True,
    help="The figure, .png, .pdf or .svg.",
)
@click.option(
    "--matrix",
    type=click.Path(path_type=Path),
    help="Also write the matrix or matrices here (.npz). Of a population, .npy is made on the disk, whatever its size.",
)
@click.option("--precision", type=click.Choice(["float64", "float32"]), help="Of a population.  [default: float64]")
@_json_option
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
    of_population = ("select", "compute", "correlation", "fold_norms", "means", "precision")
    within = {key: options[key] for key in options if key not in of_population}
    across = {key: options[key] for key in of_population}
    if len(sources) == 1 and _is_population(sources[0]) and not any(within.values()) and within["network"] is None:
        file = matrix if matrix is not None and matrix.suffix == ".npy" else None
        found, draw = _across(sources[0], **across, file=file)
    else:
        if given := [key for key in of_population if across[key]]:
            names = ", ".join("--" + key.replace("_", "-") for key in given)
            raise UsageError(f"{names}: for one population's folder alone; here networks are looked at one by one")
        found, draw = _within(sources, **within)
    click.echo(found.text())
    draw(out)
    click.echo(f"wrote {out}")
    if matrix is not None:
        found.save_matrix(matrix)
        click.echo(f"wrote {matrix}")
    _write_json(json_file, found.to_dict())


def _is_population(source: str) -> bool:
    return Path(source).suffix == ".pop" or (Path(source) / "population.json").exists()


def _across(
    source: str,
    *,
    select: str | None,
    correlation: bool,
    compute: tuple[str, ...],
    means: bool,
    fold_norms: bool,
    precision: str | None,
    file: Path | None,
) -> tuple[Any, Callable[[Path], None]]:
    """A population's covariance, and what draws it."""
    from weightscope.study import study

    kind = "correlation" if correlation else "covariance"
    chosen = select or "*.mlp.fc?.weight"
    options = {"fold_norms": fold_norms, "precision": precision or "float64", "file": file}
    found = study(_population(source), chosen, kind=kind, computed=compute, **options)
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

    from weightscope.recipe import InitConfig
    from weightscope.train.initial import resolve
    from weightscope.within import covariance_within, skeleton

    if network is not None and not all(map(_is_population, sources)):
        raise UsageError("--network: chooses within a population's folder, found another source")
    networks: list[Any] = [_population(s).network(network or 0) if _is_population(s) else s for s in sources]
    labels = [f"{Path(s).name} {network or 0}" if _is_population(s) else None for s in sources]
    for init in inits:
        config = InitConfig.load(init) if init.endswith(".toml") else InitConfig(name=init)
        bare = skeleton(networks[0], part or "filters")
        networks.append(resolve(config)(bare, generator=torch.Generator().manual_seed(0)))
        labels.append(Path(init).stem if init.endswith(".toml") else init)
    options = {} if keep is None else {"keep": keep}
    found = covariance_within(*networks, part=part or "filters", labels=labels, **options)
    return found, lambda out: found.plot(out, picture)


@cli.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("products.png"),
    show_default=True,
    help="The figure, .png, .pdf or .svg.",
)
@click.option("--view", default="auto", show_default=True, help="grid (matrices), depth (alpha, beta), or auto.")
@click.option("--layer", "layers", type=int, multiple=True, help="Only this layer, counted from 0; repeat it.")
@click.option("--num-heads", type=int, help="Number of heads, for files without a config.json.")
@click.option("--clip", type=int, default=64, show_default=True, help="Draw the upper left so many rows and columns.")
@click.option("--draw-heads", type=int, default=8, show_default=True, help="Draw at most so many heads.")
@click.option("--cross", is_flag=True, help="Cross-attention too.")
@click.option("--fold-norms", is_flag=True, help="Fold the gain of the normalisation before the attention.")
@click.option("--fold-scales", is_flag=True, help="Fold LayerScale into W_V W_O.")
@click.option("--biases", is_flag=True, help="Add columns on what biases contribute.")
@click.option("--rotary", default="zero", show_default=True, help="zero, average, or a relative position.")
@click.option("--spectra", default="heads", show_default=True, help="Singular values of heads, all or none.")
@_json_option
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
    from weightscope.products import products as compute

    config = None if num_heads is None else {"num_attention_heads": num_heads}
    position = int(rotary) if rotary.lstrip("-").isdigit() else rotary
    found = compute(*sources, config=config, layers=layers or None, rotary=position, **options)
    click.echo(found.text())
    found.plot(out, view, heads=draw_heads)
    click.echo(f"wrote {out}")
    _write_json(json_file, found.to_dict())


@cli.command("fit-init")
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The artifact (.safetensors).")
@click.option(
    "--structure",
    default="auto",
    show_default=True,
    help="Of a population: auto or a structure. Of one network: filters, conv-schedule, identity-product.",
)
@click.option("--option", "texts", multiple=True, metavar="NAME=VALUE", help="An option of the structure; repeat it.")
@click.option("--select", default="*.mlp.fc?.weight", show_default=True, help="Which tensors the initialiser sets.")
@click.option("--joint", default="block", show_default=True, help="What is fitted together: tensor, block or all.")
@click.option("--holdout", type=float, default=0.2, show_default=True, help="Share of networks to choose by.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which networks are held out.")
@click.option("--standalone", type=click.Path(path_type=Path), help="Also write a Python file that applies it.")
@_json_option
@click.pass_context
def fit_init(
    context: click.Context,
    source: str,
    out: Path,
    structure: str,
    texts: tuple[str, ...],
    standalone: Path | None,
    json_file: Path | None,
    **settings: Any,
) -> None:
    """Fit structures to a population or to one network, write an initialiser.

    Of a population, structures are chosen by held-out likelihood; tensors that --select does not name keep the
    network's own initialisation. Of one network (a checkpoint, hf://org/name), the structure is named, and the
    initialiser fits networks of any width and depth; --select to --seed are for populations.

    \b
    Examples:
      weightscope fit-init digits.pop -o digits-mlp.safetensors --standalone digits_mlp.py
      weightscope fit-init efficientnet-lite0.pth --structure filters --option kernel=5 -o filters.safetensors
      weightscope fit-init hf://facebook/dinov2-small --structure identity-product -o products.safetensors
    """
    from click.core import ParameterSource

    from weightscope.fit import FitResult, write_standalone
    from weightscope.fit_init import fit_init as run
    from weightscope.fit_init import parsed_options

    given = {k: v for k, v in settings.items() if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
    result = run(source, structure, options=parsed_options(texts) or None, **given)
    if standalone is not None and not isinstance(result, FitResult):
        raise UsageError("--standalone writes initialisers of populations; load_init applies those of one network")
    click.echo(result.text())
    result.save(out)
    click.echo(f"wrote {out}")
    if standalone is not None:
        write_standalone(out, standalone)
        click.echo(f"wrote {standalone}")
    _write_json(json_file, result.to_dict())


@cli.command()
@click.argument("recipe")
@click.option(
    "--init",
    "inits",
    multiple=True,
    required=True,
    help="A name, names joined by +, an artifact, or a .toml file; repeat it.",
)
@click.option("--epochs", type=int, multiple=True, help="A training length, each a full schedule; repeat it.")
@click.option("--seeds", type=int, help="Paired seeds; the recipe's networks by default.")
@click.option("--frozen", help="Run each initialiser also with the tensors of this pattern frozen.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("weightscope-bench"),
    show_default=True,
    help="Folder of the results.",
)
@_training_options
@_json_option
def bench(recipe: str, inits: tuple[str, ...], out: Path, json_file: Path | None, **options: Any) -> None:
    """Compare initialisers on paired seeds, with confidence intervals and p-values.

    RECIPE is a TOML file or a population, whose recipe is taken. The first --init is what the others are compared
    to. Writes results.json and convergence.png; stopped and started again, it goes on where it was.

    \b
    Example:
      weightscope bench populations/digits-convnext.toml --init default --init digits-mlp.safetensors \\
          --epochs 3 --epochs 10 --seeds 64 -o bench
    """
    from weightscope import plots
    from weightscope.bench import bench as run

    result = run(_recipe(recipe), inits, out, **options)
    click.echo(result.table())
    plots.save(plots.convergence(result.summary).figure, out / "convergence.png")
    click.echo(f"wrote {out / 'results.json'} and {out / 'convergence.png'}")
    _write_json(json_file, result.to_dict())


@cli.command()
@click.argument("source")
@click.option("--init", help="A name, names joined by +, or a .toml file with its numbers; without it, every one.")
@_json_option
def audit(source: str, init: str | None, json_file: Path | None) -> None:
    """Does a checkpoint have the structure that an initialiser promises?

    SOURCE is a .safetensors or .pt file or a model folder. Looks at effective operators, layer by layer and head by
    head, and exits with 1 when a check fails.

    \b
    Example:
      weightscope audit vit/ --init mimetic_attention
    """
    from weightscope.audit import audit as look
    from weightscope.checkpoint import Checkpoint
    from weightscope.recipe import InitConfig

    config = InitConfig.load(init) if init and init.endswith(".toml") else InitConfig(name=init or "default")
    checkpoint = Checkpoint(source)
    report = look(checkpoint, config.name if init else None, config=checkpoint.config, **config.parameters)
    click.echo(str(report))
    _write_json(json_file, report.to_dict())
    if not report.passed:
        raise SystemExit(1)
