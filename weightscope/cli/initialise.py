"""The command `init`."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import Named, command, json_option, overwriting, parsed_options, write_json
from weightscope.errors import UsageError


@command()
@click.argument("model")
@click.option(
    "--init",
    required=True,
    type=Named("initialisers"),
    help="NAME, 'NAME(NUMBER=VALUE)', NAME+NAME, MODULE:FUNCTION, an artifact (or hf://) or a .toml file.",
)
@click.option("--option", "texts", multiple=True, metavar="NAME=VALUE", help="Option of the model; repeatable.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the model's own start and of the initialisers.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file (.safetensors, .pt, .pth) or folder.")
@click.option("--audit", is_flag=True, help="Also audit the model; exits with 1 unless it passes.")
@click.option("--verify-only", is_flag=True, help="Write nothing: show what would be set, and audit it.")
@json_option
@click.pass_context
def init(
    context: click.Context,
    model: str,
    init: str,
    texts: tuple[str, ...],
    seed: int,
    out: Path | None,
    audit: bool,
    verify_only: bool,
) -> None:
    """Build an untrained model, initialise it, and write it where its library loads it from.

    MODEL is timm:NAME (writes a state dict, for timm's --initial-checkpoint), hf:FOLDER with a config.json or
    hf://org/name (writes a folder, for from_pretrained), or package.module:function (writes a state dict). --option is
    passed to timm.create_model or to the function, or is a field of the config; architectures is the class of
    transformers. What no initialiser sets is as the library starts it.

    \b
    Examples:
      weightscope init timm:vit_tiny_patch16_224 --init mimetic_attention+mimetic_mlp --seed 0 -o vit.safetensors
      weightscope init hf:gpt/ --init 'mimetic_attention(preset="language")' --option n_layer=6 -o start
      weightscope init mine:network --init mine.safetensors --audit -o start.pt
    """
    from weightscope.init.initialise import Initialised, initialise
    from weightscope.init.models import build, check_output, save
    from weightscope.init.named import labelled

    if (out is None) != verify_only:
        raise UsageError(
            "-o: expected the file or folder to write, or --verify-only"
            if out is None
            else "--verify-only writes no model; leave out -o"
        )
    if out is not None:
        check_output(model, out, overwrite=overwriting(context))
    config = labelled(init)[1]
    module, reports = build(model, parsed_options(texts), seed), list[Initialised]()
    initialise(module, config, seed=seed, report=reports.append)
    result: dict[str, Any] = {"model": model, "init": init, "seed": seed, **reports[0].to_dict()}
    click.echo(reports[0].text())
    if out is not None:
        save(model, module, out)
        click.echo(f"wrote {out}")
    passed = True
    if audit or verify_only:
        from weightscope.auditing import audit as run

        names = [config.artifact, None if config.name == "default" else config.name]
        report = run(module, "+".join(filter(None, names)), **config.parameters)
        click.echo(f"\naudit: {report.summary()}" if report.passed else f"\n{report}")
        result["audit"], passed = report.to_dict(), report.passed
    write_json(result)
    if not passed:
        raise SystemExit(1)
