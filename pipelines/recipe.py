"""The parts that all recipes share: progress as plain lines, and exit statuses."""

import inspect
import signal
import sys
from collections.abc import Callable, Sequence

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import StageResult
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import ConfigError, SharmillError


class PrintProgress(Listener):
    """A listener that prints a line for each event; ``sharmill run`` shows bars instead."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._done, self._units = len(done), len(units)
        print(f"{stage.name}: {self._units} units, {self._done} of them done already", flush=True)

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self._done += 1
        print(f"  unit {unit.index}: {commit.num_out} of {commit.num_in} records went on "
              f"({self._done} of {self._units} units)", flush=True)  # fmt: skip

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        for error in result.failures.values():
            print(f"  unit {error.index} failed: {error.message}", flush=True)
        if result.totals is not None:
            rejected = ", ".join(f"{count} {reason}" for reason, count in result.totals.rejects.items())
            print(f"{stage.name}: {result.totals.num_out} records, rejected: {rejected or 'none'}", flush=True)


def exit_status(main: Callable[..., int], *arguments: str) -> int:
    """Call a recipe's ``main``, print an error of sharmill as one line, and return the exit status."""
    try:
        inspect.signature(main).bind(*arguments)
    except TypeError:
        print(inspect.getdoc(inspect.getmodule(main)), file=sys.stderr)
        return 2
    # A cluster ends jobs with SIGTERM: the same clean end as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main(*arguments)
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except SharmillError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. What is done is kept; the same command goes on.", file=sys.stderr)
        return 1
