"""The command line. A command parses, calls one function of the library, and prints.

Nothing heavy is imported here: each command imports what it needs when it runs, so that `--help` responds quickly.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import click

from weightscope._util.threads import one_thread
from weightscope._util.trust import trusting
from weightscope._version import __version__
from weightscope.cli import analysis
from weightscope.cli.catalogue import list_
from weightscope.cli.initialise import init
from weightscope.cli.options import Warnings
from weightscope.cli.training import bench, collect, compare, demo, fit_init, import_, publish, show_status
from weightscope.errors import WeightscopeError, one_line

INTERRUPTED = 130


class _Commands(click.Group):
    """Lists commands in the order of a study, and suggests the nearest one for an unknown name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of each command's help, whole."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(limit=200)) for name, c in self.commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from weightscope._util.names import unknown

            ctx.fail(unknown("command", args[0], self.commands))
        return super().resolve_command(ctx, args)


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="weightscope")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Analyse the distribution of trained weights, and make initialisers from it.

    \b
    weightscope demo                              the whole chain on embedded data, in minutes
    weightscope init timm:MODEL --init NAME -o FILE   start a model of timm, transformers or your own
    weightscope collect RECIPE -o NAME.pop        train a population
    weightscope import ZOO/ -o NAME.pop           make one of networks that were trained elsewhere
    weightscope covariance NAME.pop               analyse its structure
    weightscope fit-init NAME.pop -o INIT         turn the structure into an initialiser
    weightscope bench RECIPE --init default --init INIT
    weightscope products hf://ORG/MODEL           look inside a trained network
    weightscope list                              initialisers, structures, networks, data sets, recipes
    """


_TRUST = click.Option(
    ["--trust"],
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, trust: context.with_resource(trusting()) if trust else None,
    help="Run the code of users' own that populations and artifacts name.",
)
# In the order of their file; what `bench` makes is audited.
_ANALYSES = [c for c in vars(analysis).values() if isinstance(c, click.Command) and c is not analysis.audit]
_RUN_NO_CODE = (demo, compare, show_status, analysis.verify, analysis.export, publish, list_)
for _command in (
    demo,
    init,
    collect,
    import_,
    show_status,
    *_ANALYSES,
    fit_init,
    bench,
    compare,
    analysis.audit,
    publish,
    list_,
):
    if _command not in _RUN_NO_CODE:
        _command.params.append(_TRUST)
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; every error is one line and an exit code (see `weightscope.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logger, warnings = logging.getLogger("weightscope"), Warnings()
    logger.addHandler(warnings)
    try:
        with one_thread():
            code = cli.main(args=arguments, prog_name="weightscope", standalone_mode=False)
        sys.exit(code or 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("weightscope: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "info_name", None)
        where = "" if command in (None, "weightscope") else f" {command}"
        click.echo(f"weightscope{where}: {one_line(' '.join(error.format_message().split()))}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if "--debug" in arguments:
            raise
        if isinstance(error, WeightscopeError):
            text, code = str(error), error.exit_code
        else:
            text = f"internal error, {type(error).__name__}: {one_line(str(error))} (--debug shows the traceback)"
            code = 1
        click.echo(f"weightscope: {' '.join(text.split())}", err=True)
        sys.exit(code)
    finally:
        logger.removeHandler(warnings)
