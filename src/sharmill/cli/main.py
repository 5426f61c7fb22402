"""The command ``sharmill``: its groups of commands, and its entry point.

A command's module is imported when the command is called, and no module for ``sharmill --help``. What modules of
commands import at their top starts neither torch nor NeMo nor Ray; that they import when they run.
"""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

import sharmill
from sharmill.errors import ConfigError, PrintableFormatter, SharmillError, describe_error, printable_line
from sharmill.registry import describe_import_error

# By heading: the function of each command in this package, and the first line of its help.
COMMANDS: Final = {
    "Make": {
        "demo": ("run.demo", "Run all stages on a synthetic corpus."),
        "run": ("run.run", "Run all stages, or those named, for datasets."),
        "manifest": ("datasets.manifest", "Make a manifest of a folder, a table or a corpus."),
        "submit": ("submit.submit", "Run stages on a cluster, each dataset with jobs of its own."),
        "work": ("run.join_run", "Add ranks on this machine to a run, until it has ended."),
    },
    "Watch": {
        "calibrate": ("plan.calibrate", "Try a sample, and advise on thresholds."),
        "plan": ("plan.plan", "Show what would run, and what it would cost."),
        "status": ("status.status", "Show the progress of every stage and rank of run directories."),
        "cancel": ("status.cancel", "End what is at work in a run directory: jobs, or a process."),
    },
    "Look": {
        "report": ("datasets.report", "Make a page to look at and to listen to."),
        "inspect": ("datasets.inspect", "Look at a dataset, a shard or a cut."),
        "decode": ("datasets.decode", "Turn the codes of a cut into audio that can be listened to."),
        "validate": ("validate.validate", "Check a finished dataset."),
    },
    "Change": {
        "append": ("datasets.append", "Append shards to a finished dataset."),
        "merge": ("datasets.merge", "Make one dataset of several."),
        "split": ("datasets.split", "Divide a dataset by speakers."),
        "index": ("datasets.index", "Make the index of a dataset from its files."),
        "sidecars": ("datasets.sidecars", "Write the index files of lhotse 2 for a dataset."),
        "export": ("datasets.export", "Write a dataset as files for trainers that do not read Shar."),
        "publish": ("datasets.publish", "Copy a finished dataset to an object store."),
    },
    "Train": {
        "bins": ("train.bins", "Estimate buckets for batches from lengths alone."),
        "tune-batch": ("train.tune_batch", "Find the largest batch of each bucket that fits."),
        "verify-resume": ("train.verify_resume", "Stop and resume a training's data."),
    },
    "Set up": {"doctor": ("train.doctor", "Examine this machine, or a training's settings.")},
}
_ALL: Final = {name: found for commands in COMMANDS.values() for name, found in commands.items()}


class GroupedCommands(click.Group):
    """A group of commands that are imported when they are called, and listed under the headings of ``COMMANDS``."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ALL:
            return super().get_command(ctx, cmd_name)
        from sharmill.cli.command import quiet_option

        module, function = _ALL[cmd_name][0].split(".")
        command: click.Command = getattr(importlib.import_module(f"sharmill.cli.{module}"), function)
        # The output of these is the text that they were called for.
        if cmd_name not in ("bins", "tune-batch", "verify-resume") and quiet_option not in command.params:
            command.params.append(quiet_option)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a full disk, a folder that this user may not write to and the like end it in one line."""
        from sharmill.files.disk import PUT_BACK, disk_errors

        with disk_errors(Path(), PUT_BACK):
            return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=line) for name, (_, line) in _ALL.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _ALL))
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])


# Their names are what click looks for a near one among.
@click.group(
    cls=GroupedCommands, commands=dict.fromkeys(_ALL), context_settings={"help_option_names": ["-h", "--help"]}
)
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
    # Libraries that are imported later take it for granted.
    os.environ.setdefault("PATH", os.defpath)
    # A cluster ends jobs with SIGTERM: the same clean end as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(cli.main(args=arguments, prog_name="sharmill", standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(_describe_wrong_use(error), err=True)
        sys.exit(ConfigError.exit_status)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. What is done is kept; run the same command again to go on.", err=True)
        sys.stdout.flush()
        # Libraries of models take seconds to leave a process, and nothing is left to be done.
        os._exit(SharmillError.exit_status)
    except SharmillError as error:
        click.echo(f"Error: {describe_error(error)}", err=True)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        # Click is interrupted, and nobody is left to read that.
        os._exit(SharmillError.exit_status)
    except ImportError as error:
        click.echo(f"Error: {printable_line(describe_import_error(error))}", err=True)
        sys.exit(SharmillError.exit_status)
    except ConnectionError as error:
        click.echo(f"Error: {printable_line(str(error))}", err=True)
        sys.exit(SharmillError.exit_status)


def _describe_wrong_use(error: click.ClickException) -> str:
    """Return one line for wrong use of a command; the whole help for a group without a command."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sharmill"
    return printable_line(f"Error: {error.format_message().rstrip('.')}; see {command} --help")


if __name__ == "__main__":
    main()
