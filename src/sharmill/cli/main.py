"""The command ``sharmill``: its groups of commands, and its entry point.

The module of a command is imported when the command is called; ``sharmill --help`` imports none of them. Importing
these modules does not load torch, NeMo or Ray; a command imports those only when it runs.
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

# Commands by heading: for each command, its function in this package and its line in ``sharmill --help``.
COMMANDS: Final = {
    "Build datasets": {
        "demo": ("run.demo", "Run all stages on a synthetic corpus."),
        "run": ("run.run", "Run all or the named stages for one or more datasets."),
        "manifest": ("datasets.manifest", "Create a manifest from a folder, table or corpus."),
        "submit": ("submit.submit", "Submit stages to a cluster."),
        "work": ("run.join_run", "Add workers on this machine to a run."),
    },
    "Plan and monitor": {
        "calibrate": ("plan.calibrate", "Process a sample and recommend thresholds."),
        "plan": ("plan.plan", "Show the work that is left and its cost."),
        "status": ("status.status", "Show the progress of runs."),
        "cancel": ("status.cancel", "Stop the jobs and processes of a run."),
    },
    "Inspect and check": {
        "report": ("datasets.report", "Create an HTML report with plots and audio."),
        "inspect": ("datasets.inspect", "Show a dataset, shard or cut."),
        "decode": ("datasets.decode", "Decode the codes of a cut to an audio file."),
        "validate": ("validate.validate", "Check a finished dataset."),
    },
    "Change datasets": {
        "append": ("datasets.append", "Append shards to a finished dataset."),
        "merge": ("datasets.merge", "Merge several datasets into one."),
        "split": ("datasets.split", "Split a dataset by speaker."),
        "index": ("datasets.index", "Rebuild the index of a dataset from its files."),
        "sidecars": ("datasets.sidecars", "Write lhotse 2 index files for a dataset."),
        "export": ("datasets.export", "Export a dataset for trainers that cannot read Shar."),
        "publish": ("datasets.publish", "Copy a finished dataset to an object store."),
    },
    "Train": {
        "bins": ("train.bins", "Estimate length buckets for batches."),
        "tune-batch": ("train.tune_batch", "Find the largest batch size that fits for each bucket."),
        "verify-resume": ("train.verify_resume", "Check that data loading resumes exactly."),
    },
    "Set up": {"doctor": ("train.doctor", "Check this machine or a training configuration.")},
}
_ALL: Final = {name: found for commands in COMMANDS.values() for name, found in commands.items()}


class GroupedCommands(click.Group):
    """A group of commands that are imported on demand and listed under the headings of ``COMMANDS``."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ALL:
            return super().get_command(ctx, cmd_name)
        from sharmill.cli.command import quiet_option

        module, function = _ALL[cmd_name][0].split(".")
        command: click.Command = getattr(importlib.import_module(f"sharmill.cli.{module}"), function)
        # The output of these commands is their only purpose, so --quiet would be useless.
        if cmd_name not in ("bins", "tune-batch", "verify-resume") and quiet_option not in command.params:
            command.params.append(quiet_option)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; report errors such as a full disk or a read-only folder in one line."""
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


# Click suggests similar names from ``commands`` for a misspelled command.
@click.group(
    cls=GroupedCommands, commands=dict.fromkeys(_ALL), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(sharmill.__version__)
def cli() -> None:
    """Turn speech manifests into training-ready Lhotse Shar datasets.

    Any command can be interrupted at any time. Run it again to resume.
    """


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command line and exit with its status; print errors for the user as one line.

    Args:
        arguments: command-line arguments; ``sys.argv`` by default.

    Raises:
        SystemExit: always.
    """
    # The run directory has the full logs; the terminal shows only messages that users must see.
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name == "sharmill.files.locks")
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    # Libraries that are imported later assume that PATH is set.
    os.environ.setdefault("PATH", os.defpath)
    # Clusters end jobs with SIGTERM, which is handled like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(cli.main(args=arguments, prog_name="sharmill", standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(_describe_wrong_use(error), err=True)
        sys.exit(ConfigError.exit_status)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. Finished work is kept; run the same command again to resume.", err=True)
        sys.stdout.flush()
        # Exit at once: model libraries would take seconds to shut down, and nothing is left to do.
        os._exit(SharmillError.exit_status)
    except SharmillError as error:
        click.echo(f"Error: {describe_error(error)}", err=True)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        # The reader of the output is gone, so no message is printed.
        os._exit(SharmillError.exit_status)
    except ImportError as error:
        click.echo(f"Error: {printable_line(describe_import_error(error))}", err=True)
        sys.exit(SharmillError.exit_status)
    except ConnectionError as error:
        click.echo(f"Error: {printable_line(str(error))}", err=True)
        sys.exit(SharmillError.exit_status)


def _describe_wrong_use(error: click.ClickException) -> str:
    """Return one line about incorrect usage, or the whole help if no command was given."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sharmill"
    return printable_line(f"Error: {error.format_message().rstrip('.')}; see {command} --help")


if __name__ == "__main__":
    main()
