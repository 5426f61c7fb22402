"""Functions that all recipes share: progress as plain lines, and exit statuses."""

import inspect
import signal
import sys
from collections.abc import Callable, Sequence

from sharmill.config import load_config
from sharmill.engine.executor import Listener, StageResult
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, SharmillError
from sharmill.pipeline import run_dataset


class PrintProgress(Listener):
    """Listener that prints a line for each event; ``sharmill run`` shows bars instead."""

    def stage_started(self, stage: StageRun, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._done, self._units = len(done), len(units)
        print(f"{stage.name}: {self._units} units, {self._done} of them already done", flush=True)

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self._done += 1
        print(f"  unit {unit.index}: {commit.num_out} of {commit.num_in} records kept "
              f"({self._done} of {self._units} units)", flush=True)  # fmt: skip

    def stage_ended(self, stage: StageRun, result: StageResult) -> None:
        for error in result.failures.values():
            print(f"  unit {error.index} failed: {error.message}", flush=True)
        if result.totals is not None:
            rejected = ", ".join(f"{count} {reason}" for reason, count in result.totals.rejects.items())
            print(f"{stage.name}: {result.totals.num_out} records, rejected: {rejected or 'none'}", flush=True)


def run_stage(name: str, path: str, *overrides: str) -> int:
    """Run one stage of a configuration, and return 0 if it is done, otherwise 1."""
    return 0 if run_dataset(load_config(path, overrides), PrintProgress(), stages=[name]).ok else 1


def exit_with(main: Callable[..., int], *given: str) -> None:
    """Call a recipe's ``main`` with the given arguments and those of the command line, and exit with its status.

    Errors of sharmill are printed as one line.
    """
    arguments = [*given, *sys.argv[1:]]
    try:
        inspect.signature(main).bind(*arguments)
    except TypeError:
        print(inspect.getdoc(sys.modules["__main__"]), file=sys.stderr)
        sys.exit(ConfigError.exit_status)
    # Clusters end jobs with SIGTERM, on which the recipe should exit as cleanly as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(*arguments))
    except SharmillError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit("Interrupted. Finished work is kept; repeat the command to continue.")
