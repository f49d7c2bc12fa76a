"""The command line, one file a command; a command's file is imported when the command is used."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

import click

COMMANDS = {
    "run": ("paceline.cli.run", "Train with a script on this machine, or as one of several machines."),
    "lab": ("paceline.cli.lab", "Run scripts on emulated clusters of unlike machines."),
    "watch": ("paceline.cli.watch", "See who computes and who waits, while a run goes on."),
    "dashboard": ("paceline.cli.dashboard", "Show runs in the browser, live."),
    "report": ("paceline.cli.report", "Say what happened in a run, as one page."),
    "trace": ("paceline.cli.trace", "Turn a run into a trace for Perfetto, or TensorBoard scalars."),
    "partition": ("paceline.cli.partition", "Divide samples into shards that follow speed and look alike."),
    "bench": ("paceline.cli.bench", "Compare ways to train, side by side, as records."),
    "demo": ("paceline.cli.demo", "See plain DDP, a hand-tuned split and paceline side by side."),
}


class Lazy(click.Group):
    """A group whose commands are imported on use, so that --help is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command itself."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Their descriptions, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paceline")
def cli() -> None:
    """Data-parallel PyTorch training at the speed of all your machines together."""


def _terminated(*_: Any) -> None:
    """Asked to end: undo what was made on the way out, as an interrupt does."""
    sys.exit(128 + signal.SIGTERM)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; errors end in one clear line and a telling exit code."""
    from paceline.errors import LaunchError, PacelineError, Stopped

    signal.signal(signal.SIGTERM, _terminated)
    try:
        return cli.main(arguments, prog_name="paceline", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        stopped = Stopped in (type(error), type(error.__cause__), type(error.__context__))
        click.echo("\npaceline: interrupted" + ("; the workers have been stopped" if stopped else ""), err=True)
        sys.exit(130)
    except LaunchError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except PacelineError as error:
        click.echo(f"paceline: error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # whoever read our output has enough
        if sys.stdout is sys.__stdout__:  # what is left goes nowhere, without a complaint
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        click.echo(f"paceline: error: cannot use{where} ({error.strerror or error})", err=True)
        sys.exit(2)
