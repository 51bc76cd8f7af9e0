"""The command `attention-maps`."""

from pathlib import Path
from typing import Literal

import click

from weightscope.cli.shared import Named, figure_option, json_option, write_json


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
@click.option("--images", type=Named("datasets", files=False), help="The data set of a model's folder.  [cifar10]")
@click.option("--count", type=click.IntRange(1), default=64, show_default=True, help="Number of test images.")
@click.option("--size", type=click.IntRange(1), help="Pixels per side.  [default: that of config.json]")
@click.option("--filter-size", type=int, default=3, show_default=True, help="f of the neighbourhood and of D >= k f^2.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Folder searched first for the data.")
@json_option
def attention_maps(
    source: str,
    out: Path,
    kind: Literal["maps", "expected", "offsets", "ranks"],
    network: int | None,
    images: str | None,
    count: int,
    size: int | None,
    filter_size: int,
    data: Path | None,
    json_file: Path | None,
) -> None:
    """Draw the mean attention maps of a vision transformer's heads, and test D >= k f^2.

    SOURCE is a population, of which one network is run on the test images of its recipe, or a folder of transformers
    (config.json, model.safetensors), run on test images of a data set that are scaled to the model's size.

    \b
    Examples:
      weightscope attention-maps vits.pop --network 3 -o attention.png
      weightscope attention-maps vit/ --kind offsets --count 32 --json heads.json
    """
    from weightscope.analysis.attention_maps import attention_maps as compute
    from weightscope.analysis.attention_maps.opening import images_for, open_network

    batch = images_for(source, name=images, count=count, size=size, root=data)
    model, note = open_network(source, network)
    found = compute(model, batch, filter_size=filter_size)
    click.echo(found.text())
    if note:
        click.echo(f"warning: {note}")
    found.plot(out, kind)
    click.echo(f"wrote {out}")
    write_json(json_file, found.to_dict())
