"""Commands that train: `demo`, `collect`, `bench`."""

import re
from pathlib import Path
from typing import Any

import click

from weightscope.cli.shared import Named, json_option, out_option, training_options, write_json
from weightscope.errors import UsageError


@click.command()
@out_option("Folder for everything.", "weightscope-demo")
@click.option("--networks", type=int, default=256, show_default=True, help="Size of the population, at least 16.")
@click.option("--epochs", type=int, default=12, show_default=True, help="Epochs of the population's training.")
@click.option("--seeds", type=int, default=64, show_default=True, help="Paired seeds of the benchmark, at least 2.")
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
@click.argument("recipe", type=Named("recipes"))
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
    from weightscope.population import recipe_of

    wanted = recipe_of(recipe)
    if options["networks"] is not None:
        wanted.replace({"population.networks": options["networks"]})  # an invalid number is known before torch is
    if plan:
        from weightscope.training.planning import plan as estimate

        if options.pop("shard") is not None:
            raise UsageError("--shard: not available with --plan, which is about all tiles")
        click.echo(estimate(wanted, out, **options).text())
        return
    from weightscope.analysis.inspection import population_contents
    from weightscope.training.collection import collect as train

    train(wanted, out, **options)
    click.echo(population_contents(out).brief())


@click.command()
@click.argument("recipe", type=Named("recipes"))
@click.option(
    "--init",
    "inits",
    multiple=True,
    type=Named("initialisers"),
    help="NAME, 'NAME(NUMBER=VALUE)', NAME+NAME, MODULE:FUNCTION, an artifact or a .toml file; repeatable.",
)
@click.option("--epochs", type=int, multiple=True, help="Training length, each with a full schedule; repeatable.")
@click.option("--seeds", type=int, help="Paired seeds; by default the recipe's number of networks.")
@click.option("--seed", type=int, help="Root of the random streams.  [default: the recipe's plus 1,000,000]")
@click.option("--vary", multiple=True, help="FIELD=VALUE,VALUE,... of the recipe; in all combinations; repeatable.")
@click.option("--grid", multiple=True, help="INIT.NUMBER=VALUE,... or START:STOP:STEP of an initialiser; repeatable.")
@click.option("--frozen", help="Also train each initialiser with the tensors matching this pattern frozen.")
@click.option(
    "--control",
    help="'scale': also train each initialiser's control: independent entries with its means and variances.",
)
@click.option("--metric", help="The task's metric that is compared, such as test_loss.  [default: its primary one]")
@click.option("--probe", is_flag=True, help="Train only a linear classifier on the initialised networks' features.")
@click.option("--plan", "only_plan", is_flag=True, help="Only say what it will cost, from a few measured steps.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: named after the recipe]"
)
@training_options
@json_option
def bench(
    recipe: str,
    inits: tuple[str, ...],
    out: Path | None,
    json_file: Path | None,
    only_plan: bool,
    probe: bool,
    vary: tuple[str, ...],
    grid: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare initialisers on paired seeds, with confidence intervals and p-values.

    RECIPE is a TOML file, the name of a shipped recipe (weightscope list recipes), or a population, whose recipe is
    used; its [bench] table has what is not given here. The first --init is the reference of the others.
    MODULE:FUNCTION is a function f(module, *, generator) of yours; modules in the working directory are found. Writes
    results.json, tables and pictures. If interrupted, run the same command again to resume.

    \b
    Examples:
      weightscope bench digits-convnext --init default --init digits-mlp.safetensors \\
          --epochs 3 --epochs 10 --seeds 64 -o bench
      weightscope bench digits-convnext --init default --init mine:my_init --control scale
      weightscope bench digits-convnext --init default --init mimetic_mlp --seeds 8 \\
          --vary network.kernel_size=3,5,7 --vary data.train=500,all --plan
      weightscope bench digits-convnext --init default --init mimetic_mlp --grid mimetic_mlp.sigma=0:0.4:0.1
      weightscope bench digits-convnext --init default --init 'transfer(source="trained.safetensors")' --probe
    """
    from weightscope.benchmarking import bench as run
    from weightscope.benchmarking import linear_probe, plan_bench
    from weightscope.benchmarking.arms import default_folder
    from weightscope.benchmarking.axes import Axis

    folder = out or default_folder(recipe)
    axes: dict[str, Any] = {"vary": [Axis.parse(text) for text in vary], "grid": [Axis.parse(text) for text in grid]}
    if probe:
        if only_plan:
            raise UsageError("--plan: not available with --probe, which trains no tile")
        folder, run = out or Path(f"{str(folder).removesuffix('-bench')}-probe"), linear_probe
    else:
        plan = plan_bench(recipe, inits, folder, **axes, **options, measure=only_plan)
        if only_plan:
            click.echo(plan.text())
            write_json(json_file, plan.to_dict())
            return
        click.echo(plan.summary(), err=True)  # as progress is; the results are on stdout
    result = run(recipe, inits, folder, **axes, **options)
    click.echo(result.text())
    click.echo(f"wrote {', '.join(map(str, _write(result, folder)))}")
    write_json(json_file, result.to_dict())


def _write(result: Any, folder: Path) -> list[Path]:
    """Write the tables and pictures of a benchmark; returns all of its files."""
    from weightscope._util import atomic

    written = [folder / "results.json"]
    for form, name in (("markdown", "table.md"), ("latex", "table.tex")):
        written.append(folder / name)
        atomic.write(written[-1], result.table(form).encode())
    for name, draw in result.figures().items():
        written.append(folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-')}.png")
        draw(written[-1])
    return written
