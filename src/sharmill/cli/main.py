"""The command ``sharmill``: its groups of commands, and its entry point.

The commands are modules of this package, imported when they are asked for. What they import at their top is light, so
that ``sharmill --help`` starts neither torch nor NeMo nor Ray; what is heavy they import when they run.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

import sharmill
from sharmill.cli.console import quiet_option
from sharmill.cli.exit_status import FAILED, OK, WRONG_USE, status_of_error
from sharmill.errors import SharmillError
from sharmill.executors.logs import PrintableFormatter, describe_error, one_line

# A command NAME is the function NAME of the module NAME of this package, with "_" for "-".
COMMANDS: Final = {
    "Make": ("demo", "run", "manifest", "submit", "work"),
    "Watch": ("calibrate", "plan", "status", "cancel"),
    "Look": ("report", "inspect", "decode", "validate"),
    "Change": ("append", "merge", "split", "index", "sidecars", "export"),
    "Train": ("bins", "tune-batch", "verify-resume"),
    "Set up": ("doctor",),
}
# Commands and options of earlier versions, and what to use instead.
_REMOVED: Final = {
    "certify": "validate --recheck-codes SHARE tells how far codes differ",
    "completion": 'eval "$(_SHARMILL_COMPLETE=bash_source sharmill)" in ~/.bashrc completes commands; zsh_source and '
    "fish_source are for other shells",
    "--simulate": "a plan is for the ranks of its configuration, such as sharmill plan CONFIG executor.workers=1024",
}
# Their output is the text that they were called for.
_ONLY_LINES: Final = ("bins", "tune-batch", "verify-resume")


class GroupedCommands(click.Group):
    """A group of commands that are imported when they are asked for, and listed under the headings of ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(name for names in COMMANDS.values() for name in names), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not any(cmd_name in names for names in COMMANDS.values()):
            return super().get_command(ctx, cmd_name)
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"sharmill.cli.{name}"), name)
        if cmd_name not in _ONLY_LINES and quiet_option not in command.params:
            command.params.append(quiet_option)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] in _REMOVED:
            ctx.fail(f"the command '{args[0]}' was removed: {_REMOVED[args[0]]}")
        if args[0] not in names and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], names, n=1)
            ctx.fail(f"there is no command '{args[0]}'" + (f", did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for names in COMMANDS.values() for name in names)
        for heading, names in COMMANDS.items():
            with formatter.section(heading):
                commands = {name: self.get_command(ctx, name) for name in names}
                formatter.write_dl([
                    (name.ljust(width), command.get_short_help_str(limit=formatter.width - width))
                    for name, command in commands.items() if command
                ])  # fmt: skip


@click.group(cls=GroupedCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sharmill.__version__)
def cli() -> None:
    """Turn speech manifests into training-ready Lhotse Shar datasets.

    Every command may be ended at any time; the same command goes on where it stopped.
    """


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command line and exit with its status. An error that is meant for the user is printed as one line.

    Args:
        arguments: those of the command line; ``sys.argv`` by default.

    Raises:
        SystemExit: always.
    """
    # The run directory has the full logs; the terminal gets what must be seen.
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name == "sharmill.files.locks")
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    # A cluster ends jobs with SIGTERM: the same clean end as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        given = list(arguments) if arguments is not None else None
        sys.exit(cli.main(args=given, prog_name="sharmill", standalone_mode=False) or OK)
    except click.ClickException as error:
        click.echo(_describe_wrong_use(error), err=True)
        sys.exit(WRONG_USE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. What is done is kept; run the same command again to go on.", err=True)
        sys.exit(FAILED)
    except SharmillError as error:
        click.echo(f"Error: {describe_error(error)}", err=True)
        sys.exit(status_of_error(error))


def _describe_wrong_use(error: click.ClickException) -> str:
    """Return one line for wrong use of a command; the whole help for a group without a command."""
    # click has this class from 8.2 on; before, it prints the help itself.
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return error.format_message()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sharmill"
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.option_name in _REMOVED:
        message = f"the option '{error.option_name}' was removed: {_REMOVED[error.option_name]}"
    return one_line(f"Error: {message}; see {command} --help")


if __name__ == "__main__":
    main()
