"""The command `import`: networks that were trained elsewhere as a population."""

import re
from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import Named, command, out_option
from weightscope.errors import UsageError


@command("import")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@out_option("The population's folder.")
@click.option("--select", default="*", help="Patterns of tensor names, separated by commas; others are left out.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Replace the beginning of tensor names; repeatable.")
@click.option("--key", help="The dictionary of weights in files that hold several, such as ema.")
@click.option("--network", metavar="MODULE:FUNCTION|RECIPE", type=Named("recipes"), help="What builds the network.")
@click.option("--snapshots", default="all", help="Moments of training to keep beside the last: all, none or 0,10,20.")
@click.option("--by-reference", is_flag=True, help="Keep paths and digests only, and read weights from the sources.")
@click.option("--skip-unfit", is_flag=True, help="Leave out networks that do not fit, in place of an error.")
def import_(sources: tuple[str, ...], out: Path, select: str, snapshots: str, **options: Any) -> None:
    """Make a population of networks that were trained elsewhere.

    SOURCE is a file (.pt, .pth, .safetensors, .npz, .onnx), a pattern of files, a folder of files or of models, a
    folder of Ray Tune's trials as Model Zoos are published (result.json, checkpoint_000050/checkpoints: the results are
    metrics, checkpoints before the last are snapshots), a .csv or .parquet table with a column `path` and columns of
    metrics, or models at the hub, in which {1..9} and {a,b} expand. Several revisions of one model at the hub are its
    snapshots.

    Half precision is read as float32. Networks with NaN and equal ones are named and left out of statistics. If
    interrupted, run the same command again to resume. FUNCTION is called without arguments and returns the network, or
    the network and example inputs, of which permutations are derived.

    \b
    Examples:
      weightscope import zoo/ -o zoo.pop
      weightscope import runs.csv -o zoo.pop --rename module.= --network mine:network
      weightscope import 'hf://org/bert-seed{1..9}@step{0,1000}' -o berts.pop --by-reference
    """
    from weightscope.analysis.inspection import population_contents
    from weightscope.population import Population
    from weightscope.population.importing import sources_of

    networks, metrics, moments = sources_of(sources)
    if moments is not None and snapshots != "all":
        words = [] if snapshots == "none" else snapshots.split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,12}\s*", word) for word in words):
            raise UsageError(f"--snapshots: expected all, none or numbers such as 0,10,20, found {snapshots}")
        wanted = sorted({int(word) for word in words})
        if missing := [moment for moment in wanted if moment not in moments]:
            raise UsageError(
                f"--snapshots: not all networks have {missing[0]}; they have {', '.join(map(str, moments))}"
            )
        moments = wanted
    Population.of(networks, out, metrics=metrics, select=select, snapshots=moments, **options)
    click.echo(population_contents(out).brief())
