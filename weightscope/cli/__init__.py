"""The command line. A command parses, calls one function of the library, and prints.

Nothing heavy is imported here: each command imports what it needs when it runs, so that `--help` answers at once.
"""

import sys
from collections.abc import Sequence

import click

from weightscope._version import __version__
from weightscope.cli.fitting import fit_init
from weightscope.cli.looking import audit, covariance, export, inspect, products
from weightscope.cli.training import bench, collect, demo
from weightscope.errors import WeightscopeError

INTERRUPTED = 130


class _Commands(click.Group):
    """Lists commands in the order of the chain, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="weightscope")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """The distribution of trained weights, and initialisers made from it.

    \b
    weightscope demo                              the whole chain on embedded data, in minutes
    weightscope collect RECIPE.toml -o NAME.pop   train a population
    weightscope covariance NAME.pop               look at its structure
    weightscope fit-init NAME.pop -o INIT         turn the structure into an initialiser
    weightscope bench RECIPE.toml --init default --init INIT
    weightscope products hf://ORG/MODEL           look inside a trained network
    """


for _command in (demo, collect, inspect, export, covariance, products, fit_init, bench, audit):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; every error leaves as one line and an exit code (see `weightscope.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(cli.main(args=arguments, prog_name="weightscope", standalone_mode=False) or 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("weightscope: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if "--debug" in arguments:
            raise
        known = isinstance(error, WeightscopeError)
        text = str(error) if known else f"internal error, {type(error).__name__}: {error} (--debug shows where)"
        click.echo(f"weightscope: {' '.join(text.split())}", err=True)
        sys.exit(error.exit_code if known else 1)
