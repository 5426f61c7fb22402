"""Runs on a disk that fails at a chosen operation; see ``failing_disk`` for what counts as one and how it may fail."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.paths import REPOSITORY, TESTS
from support.small_run import SmallRun

# The error of each kind of fault; a kill has none.
_ERRNOS = {
    "glitch": errno.EIO, "dead": errno.EIO, "full": errno.ENOSPC, "quota": errno.EDQUOT, "readonly": errno.EROFS,
    "fsync": errno.EIO, "unreadable": errno.EIO, "stale": errno.ESTALE, "kill": 0,
}  # fmt: skip
KINDS = tuple(_ERRNOS)
# Those that strike reads.
READ_KINDS = ("unreadable", "stale")
# With these, nothing can be removed either: what is left aside stays until the relaunch.
_NOTHING_GOES = ("dead", "readonly", "kill")
_OK, _FAILED, _WRONG_USE, _KILLED = 0, 1, 2, -9


@dataclass
class Trouble:
    """What became of one run on a disk that failed, and of the relaunch on one that did not.

    Attributes:
        hit: the first operation that failed, or nothing if the run was over before.
        status: exit status of the run.
        problems: what should not have happened; none.
    """

    stage: str
    kind: str
    at: int
    hit: str = ""
    status: int = 0
    problems: list[str] = field(default_factory=list)


class FaultyDisk:
    """The disk below a folder, in runs whose Python has ``failing_disk`` in its path."""

    def __init__(self, folder: Path) -> None:
        self._count = folder / "count"
        self._log = folder / "log"
        self._counts: dict[tuple[str, bool], int] = {}

    def run(
        self, run: SmallRun, stage: str, kind: str, at: int, workers: int = 1, **more: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs a stage to its end, or to the error's; ``more`` are further settings of the disk."""
        for path in (self._count, self._log, self._count.with_suffix(".failed")):
            path.unlink(missing_ok=True)
        values = {"FOLDER": f"{run.work}/", "KIND": kind, "AT": at, "COUNT": self._count, "LOG": self._log} | more
        return run.run(stage, workers, env=os.environ | self.environment(**values))

    def environment(self, **values: object) -> dict[str, str]:
        """What puts a Python process on the disk of these settings."""
        values["ERRNO"] = _ERRNOS.get(str(values["KIND"]), 0)
        settings = {f"FAULTY_DISK_{key}": str(value) for key, value in values.items()}
        path = (TESTS / "support/failing_disk", TESTS, REPOSITORY / "src")
        return settings | {"PYTHONPATH": ":".join(map(str, path))}

    def operations(self) -> list[str]:
        """The operations of the last run that failed, or all of them if none should: a name and a path each."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.split(" ", 1)[1] for line in lines]

    def count(self, run: SmallRun, stage: str, kind: str) -> int:
        """At how many operations the fault can occur in the stage. It is put back to its beginning."""
        run.restore(stage)
        key = stage, kind in READ_KINDS
        if key not in self._counts:
            # What comes after the last operation of a run never fails.
            assert self.run(run, stage, "unreadable" if key[1] else "none", sys.maxsize).returncode == _OK
            self._counts[key] = self._count.stat().st_size
            run.restore(stage)
        return self._counts[key]


def trouble(disk: FaultyDisk, run: SmallRun, stage: str, kind: str, at: int, workers: int = 1) -> Trouble:
    """Runs a stage from where it stands, with one fault, and looks at what that leaves."""
    earlier = run.leftovers()
    outcome = disk.run(run, stage, kind, at, workers)
    failed = disk.operations()
    found = Trouble(stage, kind, at, hit=_describe(failed[0], run) if failed else "", status=outcome.returncode)
    found.problems += _check_message(outcome, kind)
    if outcome.returncode == _OK:
        found.problems += run.differences(stage)
    elif kind not in _NOTHING_GOES:
        found.problems += [f"{name} is left over" for name in run.leftovers() if name not in earlier]
    try:
        run.check_readers(stage)
    except Exception as error:  # noqa: BLE001 - whatever a reader meets is the outcome
        found.problems.append(f"a reader gets {error!r}")
    return found


def relaunch(run: SmallRun, stage: str) -> list[str]:
    """Runs the stage on a good disk; what is wrong then."""
    outcome = run.run(stage)
    wrong = [] if outcome.returncode == _OK else [f"the relaunch ends with {outcome.returncode}: {outcome.stderr}"]
    return wrong + run.differences(stage)


def _check_message(outcome: subprocess.CompletedProcess[str], kind: str) -> list[str]:
    """What is wrong with how a run ended: one line says what failed and why, and the exit status agrees."""
    status, name = outcome.returncode, os.strerror(_ERRNOS[kind])
    if status == _OK:
        return []
    if kind == "kill":
        return [] if status == _KILLED else [f"the exit status is {status}"]
    if status not in (_FAILED, _WRONG_USE):
        return [f"the exit status is {status}: {outcome.stderr}"]
    lines = outcome.stderr.strip().splitlines()
    units = re.findall(r"unit \d+ failed: .*", outcome.stdout)
    if not lines and status == _FAILED and units:
        return [] if all(name in " ".join(outcome.stdout.split()) for _ in units) else [f"unclear: {outcome.stdout}"]
    if len(lines) != 1 or not lines[0].startswith("Error: ") or name not in lines[0]:
        return [f"no single clear line: {outcome.stderr}"]
    before_any_work = "cannot write to " in lines[0]
    return [] if (status == _WRONG_USE) == before_any_work else [f"the exit status is {status}: {lines[0]}"]


def _describe(operation: str, run: SmallRun) -> str:
    """Without what differs from run to run."""
    name, path = operation.split(" ", 1)
    return f"{name} {re.sub('[0-9a-f]{32}', '*', os.path.relpath(path, run.work))}"
