"""Commands that train: `demo`, `collect`, `bench`."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.shared import json_option, out_option, recipe_of, training_options, write_json


@click.command()
@out_option("Folder of everything.", "weightscope-demo")
@click.option("--networks", type=int, default=256, show_default=True, help="Size of the population.")
@click.option("--epochs", type=int, default=12, show_default=True, help="Epochs of the population's training.")
@click.option("--seeds", type=int, default=64, show_default=True, help="Paired seeds of the benchmark.")
@training_options
def demo(out: Path, networks: int, epochs: int, seeds: int, **options: Any) -> None:
    """The whole chain on embedded real data: population, covariance, initialiser, benchmark, report.

    Runs on scikit-learn's handwritten digits and leaves a self-contained report.html. Stopped and started again,
    it goes on where it was.

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
@click.option("-n", "--networks", type=int, help="How many networks; a population may grow, never shrink.")
@click.option("--shard", type=int, help="Train this tile alone, for job arrays.")
@click.option("--backend", default="loky", show_default=True, help="loky, dask or ray.")
@click.option("--scheduler", help="Address of the cluster, such as tcp://host:8786.")
@training_options
def collect(recipe: str, out: Path, **options: Any) -> None:
    """Train a population of networks, or go on training one.

    RECIPE is a TOML file. Ctrl-C leaves a valid population; the same command goes on with it.

    \b
    Example:
      weightscope collect populations/digits-convnext.toml -o digits.pop -n 512
    """
    from weightscope.analysis.inspection import inspect
    from weightscope.training.collection import collect as train

    train(recipe_of(recipe), out, **options)
    click.echo(inspect(out).text())


@click.command()
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
@out_option("Folder of the results.", "weightscope-bench")
@training_options
@json_option
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
    from weightscope.benchmarking.run import bench as run

    result = run(recipe_of(recipe), inits, out, **options)
    click.echo(result.table())
    plots.save(plots.convergence(result.summary).figure, out / "convergence.png")
    click.echo(f"wrote {out / 'results.json'} and {out / 'convergence.png'}")
    write_json(json_file, result.to_dict())
