"""Commands that train: `demo`, `collect`, `bench`."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.shared import json_option, out_option, training_options, write_json
from weightscope.errors import UsageError


@click.command()
@out_option("Folder for everything.", "weightscope-demo")
@click.option("--networks", type=int, default=256, show_default=True, help="Size of the population.")
@click.option("--epochs", type=int, default=12, show_default=True, help="Epochs of the population's training.")
@click.option("--seeds", type=int, default=64, show_default=True, help="Paired seeds of the benchmark.")
@training_options
def demo(out: Path, networks: int, epochs: int, seeds: int, **options: Any) -> None:
    """The whole chain on embedded real data: population, covariance, initialiser, benchmark, report.

    Runs on scikit-learn's handwritten digits and writes a self-contained report.html. If interrupted, run the same
    command again to resume.

    \b
    Example:
      weightscope demo -o weightscope-demo
    """
    from weightscope.demo.run import run_demo

    report = run_demo(out, networks=networks, epochs=epochs, seeds=seeds, say=click.echo, **options)
    click.echo(f"\nThe report: {report}")


@click.command()
@click.argument("recipe")
@out_option("The population's folder.")
@click.option("-n", "--networks", type=int, help="Number of networks; a population can grow and shrink.")
@click.option("--shard", type=int, help="Train only this tile, for job arrays.")
@click.option("--backend", default="loky", show_default=True, help="loky, dask or ray.")
@click.option("--scheduler", help="Address of the cluster, such as tcp://host:8786.")
@click.option("--plan", is_flag=True, help="Only show tiles, bytes and expected hours, from a few timed steps.")
@training_options
def collect(recipe: str, out: Path, plan: bool, **options: Any) -> None:
    """Train a population of networks, or resume training one.

    RECIPE is a TOML file, the name of a shipped recipe (weightscope list recipes), or a population, whose recipe is
    used. Ctrl-C leaves a valid population; run the same command again to resume.

    \b
    Example:
      weightscope collect digits-convnext -o digits.pop -n 512
      weightscope collect digits-convnext -o digits.pop -n 100000 --workers 8 --plan
    """
    from weightscope.analysis.inspection import inspect
    from weightscope.benchmarking.arms import recipe_of
    from weightscope.training.collection import collect as train

    if plan:
        from weightscope.training.planning import plan as estimate

        if options.pop("shard") is not None:
            raise UsageError("--shard: not available with --plan, which is about all tiles")
        click.echo(estimate(recipe_of(recipe), out, **options).text())
        return
    train(recipe_of(recipe), out, **options)
    click.echo(inspect(out).text())


@click.command()
@click.argument("recipe")
@click.option(
    "--init",
    "inits",
    multiple=True,
    required=True,
    help="NAME, NAME+NAME, MODULE:FUNCTION, an artifact or a .toml file; repeatable.",
)
@click.option("--epochs", type=int, multiple=True, help="Training length, each with a full schedule; repeatable.")
@click.option("--seeds", type=int, help="Paired seeds; by default the recipe's number of networks.")
@click.option("--frozen", help="Also train each initialiser with the tensors matching this pattern frozen.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: named after the recipe]"
)
@training_options
@json_option
def bench(recipe: str, inits: tuple[str, ...], out: Path | None, json_file: Path | None, **options: Any) -> None:
    """Compare initialisers on paired seeds, with confidence intervals and p-values.

    RECIPE is a TOML file, the name of a shipped recipe (weightscope list recipes), or a population, whose recipe is
    used. The first --init is the reference of the others. MODULE:FUNCTION is a function f(module, *, generator) of
    yours; modules in the working directory are found. Writes results.json and convergence.png. If interrupted, run the
    same command again to resume.

    \b
    Examples:
      weightscope bench digits-convnext --init default --init digits-mlp.safetensors \\
          --epochs 3 --epochs 10 --seeds 64 -o bench
      weightscope bench digits-convnext --init default --init mine:my_init
    """
    from weightscope.benchmarking import bench as run
    from weightscope.benchmarking.arms import default_folder

    folder = out or default_folder(recipe)
    result = run(recipe, inits, folder, **options)
    click.echo(result.text())
    result.plot(folder / "convergence.png")
    click.echo(f"wrote {folder / 'results.json'} and {folder / 'convergence.png'}")
    write_json(json_file, result.to_dict())
