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
    help="Of a model of sequences: numbers, a sequence in each line; or copy:20.  [a population's: its recipe's]",
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
    """Draw the mean attention maps of a Transformer's heads, and test D >= k f^2.

    SOURCE is a population, of which one network (--network, or PATH.pop::k) is run on the test images of its recipe, or
    a folder of transformers (config.json, model.safetensors), run on test images of a data set that are scaled to the
    model's size.

    With --tokens, SOURCE is a causal Transformer (a folder of transformers) or a Mamba or Mamba-2 (weights of
    transformers or mamba_ssm). Of the latter, what each token adds to each later one is drawn in the same way, with the
    mean mask, the product of the decays. Networks of a population of any of these are run on held-out sequences of its
    recipe, at the training length, if no tokens are given.

    \b
    Examples:
      weightscope attention-maps vits.pop --network 3 -o attention.png
      weightscope attention-maps mambas.pop --count 16 -o maps.png
      weightscope attention-maps vit/ --kind offsets --count 32 --json heads.json
      weightscope attention-maps mamba/ --tokens copy:20 -o maps.png
    """
    from weightscope._util.sources import is_population, population_member

    if (member := population_member(source)) is not None:
        if network not in (None, member[1]):
            raise UsageError(f"--network: expected {member[1]}, the network of {source}, found {network}")
        source, network = str(member[0]), member[1]
    sequences = is_population(source) and _of_sequences(source)
    note, drawing = "", {} if kind == "maps" else {"kind": kind}
    if tokens is not None or sequences:
        if inputs["name"] or inputs["size"] or kind in ("expected", "ranks"):
            raise UsageError("sequences: --images, --size, --kind expected and --kind ranks are for images only")
        found = _of_tokens(source, tokens, network, inputs["count"], inputs["root"], filter_size, drawing)
    else:
        from weightscope.analysis.attention_maps import attention_maps as compute
        from weightscope.analysis.runnable import images_for, open_network

        batch = images_for(source, **inputs)
        model, note = open_network(source, network)
        found = compute(model, batch, filter_size=filter_size)
    click.echo(found.text())
    if note:
        click.echo(f"warning: {note}")
    found.plot(out, **drawing)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())


def _of_tokens(
    source: str,
    tokens: str | None,
    network: int | None,
    count: int,
    root: Path | None,
    filter_size: int,
    drawing: dict[str, Any],
) -> Any:
    """The maps of a network's state-space layers, or of its attention if it has none."""
    from weightscope.analysis.attention_maps import attention_maps as of_attention
    from weightscope.analysis.runnable import has_state_spaces, held_out, open_sequences, tokens_for
    from weightscope.analysis.state_space_maps import state_space_maps

    model = open_sequences(source, network)
    batch = held_out(source, count, root) if tokens is None else tokens_for(tokens, model, count)
    if not has_state_spaces(model):
        return of_attention(model, batch, filter_size=filter_size)
    if drawing:
        raise UsageError(f"--kind: expected maps for a network with state-space layers, found {drawing['kind']}")
    return state_space_maps(model, batch)


def _of_sequences(source: str) -> bool:
    """Whether a population's networks take tokens."""
    from weightscope.data import SequenceConfig
    from weightscope.population import recipe_of

    return isinstance(recipe_of(source).data, SequenceConfig)
