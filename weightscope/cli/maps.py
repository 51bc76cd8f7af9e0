"""The command `attention-maps`."""

from pathlib import Path
from typing import Any, Literal

import click

from weightscope.cli.shared import Named, figure_option, json_option, write_json
from weightscope.errors import UsageError


@click.command("attention-maps")
@click.argument("source", type=Named())
@figure_option("attention.png")
@click.option(
    "--kind",
    type=click.Choice(["maps", "expected", "offsets", "ranks"]),
    default="maps",
    show_default=True,
    help="Mean maps, those that positions predict, means by relative place, or stable ranks of the inputs.",
)
@click.option("--network", type=int, help="Of a population: the network, counted from 0.  [default: 0]")
@click.option(
    "--images", "name", type=Named("datasets", files=False), help="The data set of a model's folder.  [cifar10]"
)
@click.option("--count", type=click.IntRange(1), default=64, show_default=True, help="Number of images or sequences.")
@click.option("--size", type=click.IntRange(1), help="Pixels per side.  [default: that of config.json]")
@click.option(
    "--tokens",
    type=Named("tasks"),
    metavar="FILE|TASK:LENGTH",
    help="Of a state-space model: numbers, a sequence in each line; or copy:20.  [a population's: its recipe's]",
)
@click.option("--filter-size", type=int, default=3, show_default=True, help="f of the neighbourhood and of D >= k f^2.")
@click.option(
    "--data", "root", type=click.Path(path_type=Path, file_okay=False), help="Folder searched first for the data."
)
@json_option
def attention_maps(
    source: str,
    out: Path,
    kind: Literal["maps", "expected", "offsets", "ranks"],
    network: int | None,
    tokens: str | None,
    filter_size: int,
    json_file: Path | None,
    **inputs: Any,
) -> None:
    """Draw the mean attention maps of a vision transformer's heads, and test D >= k f^2.

    SOURCE is a population, of which one network is run on the test images of its recipe, or a folder of transformers
    (config.json, model.safetensors), run on test images of a data set that are scaled to the model's size.

    With --tokens, SOURCE is a Mamba or Mamba-2 (weights of transformers or mamba_ssm), and what each token adds to each
    later one is drawn in the same way, with the mean mask, the product of the decays. Networks of a population of these
    are run on held-out sequences of its recipe, at the training length, if no tokens are given.

    \b
    Examples:
      weightscope attention-maps vits.pop --network 3 -o attention.png
      weightscope attention-maps mambas.pop --count 16 -o maps.png
      weightscope attention-maps vit/ --kind offsets --count 32 --json heads.json
      weightscope attention-maps mamba/ --tokens copy:20 -o maps.png
    """
    from weightscope._util.sources import is_population

    sequences = is_population(source) and _of_sequences(source)
    if tokens is not None or sequences:
        if kind != "maps" or inputs["name"] or inputs["size"]:
            raise UsageError("sequences: expected no --kind, --images and --size, which are of images")
        write_json(json_file, _of_tokens(source, tokens, network, out, inputs["count"], inputs["root"]))
        return
    from weightscope.analysis.attention_maps import attention_maps as compute
    from weightscope.analysis.attention_maps.opening import images_for, open_network

    batch = images_for(source, **inputs)
    model, note = open_network(source, network)
    found = compute(model, batch, filter_size=filter_size)
    click.echo(found.text())
    if note:
        click.echo(f"warning: {note}")
    found.plot(out, kind)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())


def _of_tokens(
    source: str, tokens: str | None, network: int | None, out: Path, count: int, root: Path | None
) -> dict[str, Any]:
    from weightscope.analysis.state_space_maps import state_space_maps
    from weightscope.analysis.state_space_maps.opening import held_out, open_sequences, tokens_for

    model = open_sequences(source, network)
    batch = held_out(source, count, root) if tokens is None else tokens_for(tokens, model, count)
    found = state_space_maps(model, batch)
    click.echo(found.text())
    found.plot(out)
    click.echo(f"wrote {out}")
    return found.to_dict()


def _of_sequences(source: str) -> bool:
    """Whether a population's networks take tokens.

    Raises:
        UsageError: if they are Transformers, which have no map of a state-space layer.
    """
    from weightscope.population import population_in

    recipe = population_in(source).recipe
    if recipe.network.type == "transformer":
        raise UsageError(
            f"{source}: expected networks with state-space layers, or vision transformers, found causal Transformers; "
            "the products of their weights, in Python: weightscope.products(population.network(0))"
        )
    return recipe.data.sequences
