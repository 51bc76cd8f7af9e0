"""The command `fit-init`."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.shared import OutputFile, json_option, maybe_partial, out_option, partial_option, write_json
from weightscope.errors import UsageError


@click.command("fit-init")
@click.argument("source")
@out_option("The artifact (.safetensors).", type=OutputFile(".safetensors"))
@click.option(
    "--structure",
    default="auto",
    show_default=True,
    help="Of a population: auto, NAME or MODULE:CLASS. Of one network: filters, conv_schedule, identity_product.",
)
@click.option("--option", "texts", multiple=True, metavar="NAME=VALUE", help="Option of the structure; repeatable.")
@click.option("--select", default="*.mlp.fc?.weight", show_default=True, help="Which tensors the initialiser sets.")
@click.option("--joint", default="block", show_default=True, help="Tensors fitted jointly: tensor, block or all.")
@click.option(
    "--holdout",
    type=float,
    default=0.2,
    show_default=True,
    help="Fraction of networks held out to choose the structure.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed that selects the held-out networks.")
@click.option("--standalone", type=OutputFile(".py"), help="Also write a Python file that applies it.")
@partial_option
@json_option
@click.pass_context
def fit_init(
    context: click.Context,
    source: str,
    out: Path,
    structure: str,
    texts: tuple[str, ...],
    standalone: Path | None,
    partial: bool,
    json_file: Path | None,
    **settings: Any,
) -> None:
    """Fit structures to a population or to one network, and write an initialiser.

    For a population, structures are chosen by held-out likelihood; tensors that --select does not match keep the
    network's default initialisation. For one network (a checkpoint, hf://org/name), --structure is required, and the
    initialiser applies to networks of any width and depth; --select to --seed are for populations.

    \b
    Examples:
      weightscope fit-init digits.pop -o digits-mlp.safetensors --standalone digits_mlp.py
      weightscope fit-init efficientnet-lite0.pth --structure filters --option kernel=5 -o filters.safetensors
      weightscope fit-init hf://facebook/dinov2-small --structure identity_product -o products.safetensors
    """
    from click.core import ParameterSource

    from weightscope.artifacts import PopulationFit, write_standalone
    from weightscope.fitting.source import fit_init as run
    from weightscope.fitting.source import parsed_options

    given = {k: v for k, v in settings.items() if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
    result = run(maybe_partial(source, partial), structure, options=parsed_options(texts) or None, **given)
    if standalone is not None and not isinstance(result, PopulationFit):
        raise UsageError(
            "--standalone: expected a population, found one network; use load_init to apply its initialiser"
        )
    click.echo(result.text())
    result.save(out)
    click.echo(f"wrote {out}")
    if standalone is not None and isinstance(result, PopulationFit):
        write_standalone(out, standalone, structures=[type(g.structure) for g in result.groups if g.structure])
        click.echo(f"wrote {standalone}")
    write_json(json_file, result.to_dict())
