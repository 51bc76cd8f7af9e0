"""Commands that make populations and initialisers: `demo`, `collect`, `import`, `fit-init`, `bench`."""

import math
import re
from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import (
    Named,
    OutputFile,
    backend_options,
    choice_option,
    code_option,
    command,
    csv_option,
    data_option,
    device_option,
    figure_option,
    file_options,
    heads_option,
    json_option,
    layout_option,
    maybe_partial,
    out_option,
    parsed_options,
    partial_option,
    permutations_option,
    reading_config,
    refuse_others,
    set_option,
    show,
    spread_options,
    training_options,
    varied,
    write_json,
)
from weightscope.errors import UsageError


@command()
@out_option("Folder for everything.", "weightscope-demo")
@click.option("--networks", type=int, default=40, help="Size of the population, at least 16.")
@click.option("--epochs", type=int, default=12, help="Epochs of the population's training.")
@click.option("--seeds", type=int, default=16, help="Paired seeds of the benchmark, at least 2.")
@training_options
def demo(out: Path, networks: int, epochs: int, seeds: int, **options: Any) -> None:
    """The whole chain on embedded real data: population, covariance, initialiser, benchmark, report.

    Runs on scikit-learn's handwritten digits and writes a self-contained report.html. If interrupted, run the same
    command again to resume.

    \b
    Example:
      weightscope demo -o weightscope-demo
    """
    from weightscope.cli.demo import run_demo

    report = run_demo(out, networks=networks, epochs=epochs, seeds=seeds, say=click.echo, **options)
    click.echo(f"\nThe report: {report}")


@command()
@click.argument("recipe", type=Named("recipes"))
@out_option("The population's folder, or its URL in an object store.", type=Named())
@click.option("-n", "--networks", type=int, help="Number of networks; a population can grow and shrink.")
@click.option("--shard", type=int, help="Train only this tile, for job arrays.")
@backend_options
@click.option("--plan", is_flag=True, help="Only show tiles, bytes, expected hours and limits, from a few timed steps.")
@click.option("--price", type=float, help="Of an hour of one worker, for the cost with --plan.")
@set_option
@training_options
@json_option
def collect(recipe: str, out: str, plan: bool, price: float | None, changes: tuple[str, ...], **options: Any) -> None:
    """Train a population of networks, or resume training one.

    RECIPE is a TOML file, the name of a shipped recipe (weightscope list recipes), or a population, whose recipe is
    used. Ctrl-C leaves a valid population; run the same command again to resume.

    \b
    Example:
      weightscope collect digits-convnext -o digits.pop -n 512
      weightscope collect digits-convnext -o digits.pop -n 100000 --workers 8 --plan --price 0.05
    """
    from weightscope.population import recipe_of

    wanted = recipe_of(recipe).replace(parsed_options(changes))
    if options["networks"] is not None:  # an invalid number is an error before torch is imported
        wanted = wanted.replace({"population.networks": options["networks"]})
    if price is not None and not plan:
        raise UsageError("--price requires --plan")
    if plan:
        from weightscope.training.planning import plan as estimate

        if options.pop("shard") is not None:
            raise UsageError("--shard cannot be combined with --plan, which is about all tiles")
        show(estimate(wanted, out, price=price, **options))
        return
    from weightscope.analysis.inspection import population_contents
    from weightscope.training.collection import collect as train

    train(wanted, out, **options)
    contents = population_contents(out)
    click.echo(contents.brief())
    write_json(contents.to_dict())


@command("import")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=Named())
@out_option("The population's folder, or its URL in an object store.", type=Named())
@click.option("--select", default="*", help="Patterns of tensor names, separated by commas; others are left out.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Replace the beginning of tensor names; repeatable.")
@click.option("--key", help="The dictionary of weights in files that hold several, such as ema.")
@click.option("--network", metavar="MODULE:FUNCTION|RECIPE", type=Named("recipes"), help="What builds the network.")
@click.option("--snapshots", default="all", help="Epochs or steps to keep beside the last: all, none or 0,10,20.")
@click.option("--skip-unfit", is_flag=True, help="Leave out networks that do not fit, in place of an error.")
def import_(sources: tuple[str, ...], out: str, select: str, snapshots: str, **options: Any) -> None:
    """Make a population of networks that were trained elsewhere.

    SOURCE is a file (.pt, .pth, .safetensors, .npz), a pattern of files, a folder of files or of models, a
    folder of Ray Tune's trials as Model Zoos are published (result.json, checkpoint_000050/checkpoints: the results are
    metrics, checkpoints before the last are snapshots), a .csv table with a column `path` and columns of
    metrics, or models at the hub, in which {1..9} and {a,b} expand. Several revisions of one model at the hub are its
    snapshots.

    Half precision is read as float32. Networks with NaN and equal ones are named and left out of statistics. If
    interrupted, run the same command again to resume. FUNCTION is called without arguments and returns the network, or
    the network and example inputs, of which permutations are derived.

    \b
    Examples:
      weightscope import zoo/ -o zoo.pop
      weightscope import runs.csv -o zoo.pop --rename module.= --network mine:network
      weightscope import 'hf://org/bert-seed{1..9}@step{0,1000}' -o berts.pop
    """
    from weightscope.analysis.inspection import population_contents
    from weightscope.population import Population
    from weightscope.population.importing import sources_of

    networks, metrics, there = sources_of(sources)
    if there is None and snapshots not in ("all", "none"):
        raise UsageError(f"--snapshots: expected several snapshots of each network, found one; leave out {snapshots}")
    if there is not None and snapshots != "all":
        words = [] if snapshots == "none" else snapshots.split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,12}\s*", word) for word in words):
            raise UsageError(f"--snapshots: expected all, none or numbers such as 0,10,20, found {snapshots}")
        wanted = sorted({int(word) for word in words})
        if missing := [step for step in wanted if step not in there]:
            raise UsageError(f"--snapshots: not all networks have {missing[0]}; they have {', '.join(map(str, there))}")
        there = wanted
    Population.of(networks, out, metrics=metrics, select=select, snapshots=there, **options)
    click.echo(population_contents(out).brief())


@command("status")
@click.argument("path", type=Named())
@json_option
def show_status(path: str) -> None:
    """How far a population or a benchmark is: networks, rate, expected end.

    PATH is a population's folder or a benchmark's. Counts files only, so it works for every backend and from another
    machine.

    \b
    Example:
      weightscope status digits.pop
    """
    from weightscope.training.status import status

    show(status(path))


def _gain(text: str) -> float | str:
    """`auto` or a number; 3 and 3.0 are the same one."""
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"--gain: expected a number >= 0 or auto, found {text}")
    return int(value) if value.is_integer() else value


@command("fit-init")
@click.argument("sources", type=Named(), nargs=-1, required=True)
@out_option("The artifact (.safetensors); with --explain, Python (.py).", type=OutputFile(".safetensors", ".py"))
@click.option("--explain", is_flag=True, help="State a population's distribution in few terms, as Python code.")
@click.option(
    "--structure",
    type=Named("structures", files=False),
    default="auto",
    help="For a population: auto, NAME or MODULE:CLASS. For networks: exchangeable, filters, conv_schedule, "
    "identity_product.",
)
@click.option("--option", "texts", multiple=True, metavar="NAME=VALUE", help="Option of the structure; repeatable.")
@click.option("--select", help="Which tensors the initialiser sets.  [default: *.mlp.fc?.weight, or all matrices]")
@click.option(
    "--scale",
    type=Named(files=False),
    help="For networks with --structure exchangeable: default keeps each tensor's scale, source takes theirs.",
)
@click.option("--at", type=int, help="For a population with snapshots: the epoch (of sequences, the step) of training.")
@heads_option
@layout_option
@code_option
@click.option("--joint", default="block", help="Tensors fitted jointly: tensor, block or all.")
@click.option(
    "--holdout",
    type=float,
    default=0.2,
    help="Share of networks held out to choose the structure, or a number of folds, 2 or more.",
)
@click.option("--seed", type=int, default=0, help="Seed that selects the held-out networks.")
@permutations_option
@click.option(
    "--gain",
    type=_gain,
    metavar="NUMBER|auto",
    help="Factor of the correlations, with --structure exchangeable; auto chooses by training.",
)
@click.option("--gain-seeds", type=int, default=16, help="Networks for each gain, with --gain auto.")
@click.option(
    "--gain-epochs", type=int, help="Training length, with --gain auto.  [default: a quarter of the recipe's]"
)
@data_option
@device_option
@spread_options
@partial_option
@file_options
@json_option
@click.pass_context
def fit_init(
    context: click.Context,
    sources: tuple[str, ...],
    out: Path,
    explain: bool,
    structure: str,
    texts: tuple[str, ...],
    gain: float | str | None,
    at: int | None,
    partial: bool,
    workers: Any,
    **settings: Any,
) -> None:
    """Fit structures to a population or to networks, and write an initialiser.

    For a population, structures are chosen by held-out likelihood; tensors that --select does not match keep the
    network's default initialisation. For one network (a checkpoint, hf://org/name), --structure is required, and the
    initialiser applies to networks of any width and depth; --joint to --seed are for populations. With exchangeable,
    several networks of any widths and depths are pooled, and all matrices of their blocks are set unless --select says
    which (docs/whole-network.md).

    --explain writes an initialiser of ten lines: the means and scales of all tensors in blocks (or --select), and the
    terms (a correlation of two tensors, the scale of a tensor's column means) that held-out networks confirm.

    --gain auto trains networks of the population's recipe with each of several gains, on a part of the training images,
    and also writes the trainings into a folder (NAME-gain); --data, --device and --gain-* are for these trainings,
    --workers, --backend and --scheduler for them, too.

    \b
    Examples:
      weightscope fit-init digits.pop -o digits-mlp.safetensors
      weightscope fit-init digits.pop --structure exchangeable --joint all --gain auto -o digits.safetensors
      weightscope fit-init digits.pop --explain -o start.py
      weightscope fit-init efficientnet-lite0.pth --structure filters --option kernel=5 -o filters.safetensors
      weightscope fit-init hf://facebook/dinov2-small --structure identity_product -o products.safetensors
      weightscope fit-init hf://facebook/dinov2-small --structure exchangeable --gain 4 -o vit.safetensors
    """
    from click.core import ParameterSource

    from weightscope._util.sources import is_population
    from weightscope.population import Population

    given = {k: v for k, v in settings.items() if context.get_parameter_source(k) is not ParameterSource.DEFAULT}
    given |= {} if workers is None else {"workers": workers}
    training = {key: given.pop(key) for key in _GAIN_TRAINING if key in given}
    if gain is not None and structure != "exchangeable":
        raise UsageError("--gain requires --structure exchangeable")
    if gain != "auto" and training:
        raise UsageError(f"--{next(iter(training)).replace('_', '-')} requires --gain auto")
    source: Any = sources[0] if len(sources) == 1 else list(sources)
    if is_population(source):
        source = maybe_partial(source, partial, at)
        source = source if isinstance(source, Population) else Population(source)
        source = source if len(source) != 1 else f"{source.path}::0"  # an imported network
    if explain and not out.stem.isidentifier():
        raise UsageError(f"-o: expected a name that Python can import, such as start.py, found {out.name}")
    if explain is not (out.suffix == ".py"):
        raise UsageError(f"-o: expected .py with --explain and .safetensors without, found {out}")
    kind = "networks" if structure == "exchangeable" else "one network"
    if isinstance(source, Population):
        kind = "a population with --explain" if explain else "a population"
    elif explain:
        raise UsageError(f"--explain: expected one population, found {', '.join(sources)}")
    elif len(sources) > 1 and kind == "one network":
        raise UsageError(f"--structure {structure}: expected one source, found {len(sources)}")
    special = {"at": at is not None, "partial": partial, "gain auto": gain == "auto"}
    used = [*given, *(name for name, holds in special.items() if holds)]
    used += ["structure"] if explain and structure != "auto" else []
    refuse_others(used, _FITTED[kind], f"to {kind}" + ("" if explain else f" with --structure {structure}"))
    options = parsed_options(texts) | ({} if gain in (None, "auto") else {"gain": gain})
    curve: dict[str, Any] = {}
    result: Any
    if gain == "auto":
        from weightscope.benchmarking.gain import choose_gain

        fitting = {"joint": settings["joint"], **given, "options": options}
        training = {key.removeprefix("gain_"): value for key, value in training.items()} | {"workers": workers}
        select = fitting.pop("select", settings["select"])
        choice = choose_gain(source, select, out.with_name(f"{out.stem}-gain"), fitting=fitting, **training)
        click.echo(f"{choice.text()}\n")
        result, curve = choice.fit, {"gain": choice.to_dict()}
    elif explain:
        from weightscope.fits.terms import explain as explained

        result = explained(source, **given)
    elif kind == "a population":
        from weightscope.fits.fitting import fit

        result = fit(source, structure=structure, options=options or None, **given)
    elif kind == "networks":
        from weightscope.fits import Exchangeable, checked_options
        from weightscope.fits.pretrained import fit_pretrained

        result = fit_pretrained(source, **given, **checked_options(structure, options, Exchangeable.options))
    else:
        from weightscope.fits.one_network import fit_network

        if (config := reading_config(settings["heads"], settings["layout"], settings["code"])) is not None:
            if "config" in options:
                raise UsageError("--option config=: expected it or --heads, --layout and --code, found both")
            options["config"] = config
        result = fit_network(source, structure, **options)
    click.echo(result.text())
    result.save(out)
    click.echo(
        f"wrote {out}"
        + (f"; try it: weightscope bench RECIPE --init {out.stem}:start, in its folder" if explain else "")
    )
    write_json(result.to_dict() | curve)


# What is fitted -> the options that go with it.
_FITTED = {
    "a population": ("select", "joint", "holdout", "seed", "permutations", "workers", "at", "partial", "gain auto"),
    "a population with --explain": ("select", "permutations", "at", "partial"),
    "networks": ("select", "scale"),
    "one network": ("heads", "layout", "code"),
}
_GAIN_TRAINING = ("data", "device", "gain_seeds", "gain_epochs")  # options of the trainings of --gain auto


@command()
@click.argument("recipe", type=Named("recipes"))
@click.option(
    "--init",
    "inits",
    multiple=True,
    type=Named("initialisers"),
    help="NAME, 'NAME(NUMBER=VALUE)', NAME+NAME, MODULE:FUNCTION, an artifact (or hf://) or a .toml file; repeatable.",
)
@click.option("--epochs", type=int, multiple=True, help="Training length, each with a full schedule; repeatable.")
@click.option("--seeds", type=int, help="Paired seeds; by default the recipe's number of networks.")
@click.option("--seed", type=int, help="Root of the random streams.  [default: the recipe's plus 1,000,000]")
@click.option("--vary", multiple=True, help="FIELD=VALUE,VALUE,... of the recipe; in all combinations; repeatable.")
@click.option("--frozen", help="Also train each initialiser with the tensors matching this pattern frozen.")
@click.option(
    "--control",
    multiple=True,
    help="Also train each initialiser's controls: 'scale' for independent entries with its mean and variance of each "
    "tensor, 'uncorrelated' for those of every part, without correlations; repeatable.",
)
@click.option("--metric", help="The task's metric that is compared, such as test_loss.  [default: its primary one]")
@set_option
@click.option("--probe", is_flag=True, help="Train only a linear classifier on the initialised networks' features.")
@click.option(
    "--throughput",
    is_flag=True,
    help="Also measure test images per second of a tile's networks together, at evaluations but the first (2 epochs or "
    "more); on a CPU of one thread's processor time.",
)
@click.option("--plan", "only_plan", is_flag=True, help="Only say what it will cost, from a few measured steps.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: named after the recipe]"
)
@click.option("--overwrite", is_flag=True, help="Replace the results of another benchmark in this folder.")
@training_options
@csv_option
@json_option
def bench(
    recipe: str,
    inits: tuple[str, ...],
    out: Path | None,
    only_plan: bool,
    probe: bool,
    throughput: bool,
    vary: tuple[str, ...],
    changes: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare initialisers on paired seeds, with confidence intervals and p-values.

    RECIPE is a TOML file, the name of a shipped recipe (weightscope list recipes), or a population, whose recipe is
    used; its [bench] table has what is not given here, and numbers of initialisers to compare (grid) and contrasts that
    decide (contrasts). The first --init is the reference of the others.
    MODULE:FUNCTION is a function f(module, *, generator) of yours; modules in the working directory are found. Writes
    results.json, tables and pictures. If interrupted, run the same command again to resume.

    \b
    Examples:
      weightscope bench digits-convnext --init default --init digits-mlp.safetensors \\
          --epochs 3 --epochs 10 --seeds 64 -o bench
      weightscope bench digits-convnext --init default --init mine:my_init --control scale --control uncorrelated
      weightscope bench digits-convnext --init default --init mimetic_mlp --seeds 8 \\
          --vary network.kernel_size=3,5,7 --vary data.train=500,all --plan
      weightscope bench digits-convnext --init default --init 'transfer(source="trained.safetensors")' --probe
    """
    from weightscope.benchmarking import linear_probe, plan_bench
    from weightscope.benchmarking.design import default_folder
    from weightscope.population import recipe_of

    folder = out or default_folder(recipe)
    wanted = recipe_of(recipe).replace(parsed_options(changes)) if changes else recipe
    if probe:
        unused = {"--plan": only_plan, "--throughput": throughput, "--workers": options.pop("workers")}
        if given := next((flag for flag, value in unused.items() if value), None):
            raise UsageError(f"{given} cannot be combined with --probe, which trains no tile")
        folder = out or Path(f"{str(folder).removesuffix('-bench')}-probe")
        result = linear_probe(wanted, inits, folder, vary=varied(vary), **options)
    else:
        plan = plan_bench(wanted, inits, folder, vary=varied(vary), **options, measure=only_plan)
        if only_plan:
            show(plan)
            return
        click.echo(plan.summary(), err=True)  # as progress is; the results are on stdout
        result = plan.run(throughput=throughput)
    show(result)
    click.echo(f"wrote {', '.join(map(str, _write(result, folder)))}")


def _write(result: Any, folder: Path) -> list[Path]:
    """Write the tables and pictures of a benchmark; returns all of its files."""
    from weightscope._util import atomic

    written = [folder / "results.json", folder / "table.md"]
    atomic.write(written[-1], result.table().encode())
    for name, draw in result.figures().items():
        written.append(folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-')}.png")
        draw(written[-1])
    return written


@command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--metric", required=True, help="The column that is compared.")
@click.option("--arm", default="init", help="The column with the arm.")
@click.option("--pair", default="seed", help="The column that pairs runs of different arms.")
@click.option("--control", help="The arm that others are compared with.  [default: the first]")
@choice_option("--better", "higher lower", "Which is better.  [default: by the name of the metric]")
@click.option("--pattern", help="For folders: a regular expression of their names with the groups arm and pair.")
@figure_option("comparison.png")
@csv_option
@json_option
def compare(runs: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Compare arms of runs that were made elsewhere, paired by seed: differences, intervals, Holm's adjustment.

    RUNS is a CSV with a row for each run, or folders of timm (summary.csv) or TensorBoard logs, whose names tell the
    arm and the seed, such as mimetic-3.

    \b
    Examples:
      weightscope compare runs.csv --arm init --pair seed --metric top1
      weightscope compare output/train --metric eval_top1 --pattern '(?P<arm>.+)-s(?P<pair>[0-9]+)'
    """
    from weightscope.benchmarking.comparing import compare as run

    result = run(list(runs), **{key: value for key, value in options.items() if value is not None})
    show(result)
    result.plot(out)
    click.echo(f"wrote {out}")


@command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("address")
@click.option("--private", is_flag=True, help="Only the owner sees it.")
@click.option("--update", is_flag=True, help="Add a commit to a repository that exists.")
@click.option(
    "--bench",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of a benchmark of this file, for the card.",
)
@click.option("--licence", help="The hub's identifier of a licence, such as apache-2.0.")
def publish(artifact: Path, address: str, **options: Any) -> None:
    """Upload an initialiser to the Hugging Face Hub, with a generated card.

    ARTIFACT is a file of `fit-init`, ADDRESS hf://org/name. The token is that of `hf auth login` or HF_TOKEN. The card
    says what it initialises, what it was fitted to, and with --bench what it showed.

    \b
    Example:
      weightscope publish mlp.safetensors hf://me/digits-mlp --bench digits-bench --licence apache-2.0
    """
    from weightscope.benchmarking.publishing import publish as upload

    click.echo(f'published {upload(artifact, address, **options)}; load_init("{address}") loads it')
