"""Notes about a run in its run directory: what it was given, and how it has ended.

Whatever else is known of a run follows from plans, ledgers, the ``done.json`` of each stage and the scheduler's queue.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sharmill.engine.rundir import RunDir
from sharmill.errors import CODES, ConfigError, FatalError, SharmillError
from sharmill.files.storage import write_atomic
from sharmill.files.stored import read_record


class Given(msgspec.Struct, kw_only=True):
    """Values that a run was begun with; who joins it, and the jobs that go on with it, take it from here.

    ``stages`` are the names of its stages, ``folder`` is what relative paths of its configuration begin at, and
    ``command`` is what goes on with it, "" where nobody knows. ``cluster`` is the name of the SLURM cluster that has
    its jobs, "" where it has none.
    """

    stages: list[str]
    folder: str = ""
    command: str = ""
    cluster: str = ""


class End(msgspec.Struct, kw_only=True):
    """The end of a run. ``code`` is that of an error, and ``findings`` are the errors that the checker found."""

    state: Literal["done", "failed", "cancelled"]
    message: str
    code: str = ""
    is_config: bool = False
    findings: int = 0

    @classmethod
    def of(cls, error: BaseException) -> End:
        """Return the end of a run that an error has ended."""
        if not isinstance(error, SharmillError):
            return cls(state="failed", message=f"{type(error).__name__}: {error}")
        is_config = isinstance(error, ConfigError)
        return cls(state="failed", message="; ".join(error.lines), code=error.code, is_config=is_config)

    def as_error(self) -> SharmillError:
        """Return the error that a run which has failed, or was cancelled, has ended with, to be raised."""
        kind = ConfigError if self.is_config else FatalError
        return kind(self.message, code=self.code if self.code in CODES else "unspecified")


def begin_run(run_dir: RunDir, given: Given) -> None:
    """Note what a run is given; that an earlier one has ended counts no more. The caller holds its lock."""
    write_atomic(run_dir.given, msgspec.json.encode(given) + b"\n")
    run_dir.end.unlink(missing_ok=True)


def read_given(run_dir: RunDir) -> Given | None:
    """Return what a run was given; None where none has begun."""
    return read_record(run_dir.given, Given)


def read_end(run_dir: RunDir) -> End | None:
    """Return how a run has ended; None where it is under way, or was killed."""
    return read_record(run_dir.end, End)


def note_end(run_dir: RunDir, end: End) -> None:
    """Note how a run has ended; that it was cancelled stays."""
    before = read_end(run_dir)
    if before is None or before.state != "cancelled":
        write_atomic(run_dir.end, msgspec.json.encode(end) + b"\n")


def require_not_cancelled(run_dir: RunDir) -> None:
    """Raise FatalError if a user has cancelled a run since it began."""
    end = read_end(run_dir)
    if end is not None and end.state == "cancelled":
        raise FatalError(f"the run was {end.message}", code="cancelled")
