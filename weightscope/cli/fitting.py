"""The command `fit-init`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightscope.cli.shared import (
    Named,
    OutputFile,
    json_option,
    maybe_partial,
    out_option,
    partial_option,
    training_options,
    write_json,
)
from weightscope.errors import UsageError

if TYPE_CHECKING:
    from weightscope.fits import NetworkFit, PopulationFit

_TRAINING = ("data", "device", "workers", "gain_seeds", "gain_epochs")


@click.command("fit-init")
@click.argument("source", type=Named())
@out_option("The artifact (.safetensors).", type=OutputFile(".safetensors"))
@click.option(
    "--structure",
    type=Named("structures", files=False),
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
    help="Share of networks held out to choose the structure, or a number of folds, 2 or more.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed that selects the held-out networks.")
@click.option("--gain", help="Of exchangeable: factor of its correlations, or auto: chosen by short trainings.")
@click.option("--gain-seeds", type=int, default=16, show_default=True, help="Of --gain auto: networks for each gain.")
@click.option("--gain-epochs", type=int, help="Of --gain auto: training length.  [default: a quarter of the recipe's]")
@click.option("--standalone", type=OutputFile(".py"), help="Also write a Python file that applies it.")
@training_options
@partial_option
@json_option
@click.pass_context
def fit_init(
    context: click.Context,
    source: str,
    out: Path,
    structure: str,
    texts: tuple[str, ...],
    gain: str | None,
    standalone: Path | None,
    partial: bool,
    json_file: Path | None,
    **settings: Any,
) -> None:
    """Fit structures to a population or to one network, and write an initialiser.

    For a population, structures are chosen by held-out likelihood; tensors that --select does not match keep the
    network's default initialisation. For one network (a checkpoint, hf://org/name), --structure is required, and the
    initialiser applies to networks of any width and depth; --select to --seed are for populations.

    --gain auto trains networks of the population's recipe with each of several gains, on a part of the training images,
    and also writes the curve as a picture (NAME-gain.png) and the trainings into a folder (NAME-gain); --data,
    --device, --workers and --gain-* are for these trainings.

    \b
    Examples:
      weightscope fit-init digits.pop -o digits-mlp.safetensors --standalone digits_mlp.py
      weightscope fit-init digits.pop --structure exchangeable --joint all --gain auto -o digits.safetensors
      weightscope fit-init efficientnet-lite0.pth --structure filters --option kernel=5 -o filters.safetensors
      weightscope fit-init hf://facebook/dinov2-small --structure identity_product -o products.safetensors
    """
    from click.core import ParameterSource

    from weightscope.fits import PopulationFit, write_standalone
    from weightscope.fits.fitting import fit_init as run
    from weightscope.fits.fitting import parsed_options

    given = {k: v for k, v in settings.items() if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
    training = {key: given.pop(key) for key in _TRAINING if key in given}
    options = parsed_options(texts)
    _check_gain(gain, structure, training)
    curve: dict[str, Any] = {}
    if gain == "auto":
        fitting = {"joint": settings["joint"], **given, "options": options}
        result, curve = _chosen(source, out, fitting.pop("select", settings["select"]), fitting, training)
    else:
        options |= {} if gain is None else parsed_options([f"gain={gain}"])
        result = run(maybe_partial(source, partial), structure, options=options or None, **given)
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
    write_json(json_file, result.to_dict() | curve)


def _chosen(
    source: str, out: Path, select: str, fitting: dict[str, Any], training: dict[str, Any]
) -> tuple["PopulationFit | NetworkFit", dict[str, Any]]:
    """The fit with the gain that `choose_gain` takes, and the curve for the JSON file; prints and draws the curve."""
    from weightscope.benchmarking.gain import choose_gain

    training = {key.removeprefix("gain_"): value for key, value in training.items()}
    choice = choose_gain(source, select, out.with_name(f"{out.stem}-gain"), fitting=fitting, **training)
    picture = out.with_name(f"{out.stem}-gain.png")
    choice.plot(picture)
    click.echo(f"{choice.text()}\nwrote {picture}\n")
    return choice.fit, {"gain": choice.to_dict()}


def _check_gain(gain: str | None, structure: str, training: dict[str, Any]) -> None:
    """Raise UsageError unless --gain suits the structure, and the options of its trainings suit --gain."""
    if gain is not None and structure != "exchangeable":
        raise UsageError(f"--gain: for --structure exchangeable, found {structure}")
    if gain not in (None, "auto") and not _is_gain(gain):
        raise UsageError(f"--gain: expected a number >= 0 or auto, found {gain}")
    if gain != "auto" and training:
        raise UsageError(f"--{next(iter(training)).replace('_', '-')}: for --gain auto, found {gain or 'no gain'}")


def _is_gain(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
