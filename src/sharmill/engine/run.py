"""Runs one stage: plan, do what is missing, check the accounts, finalize. Knows neither stages nor executors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
from filelock import FileLock, Timeout

from sharmill.engine.ledger import outputs_in_place, read_ledger, read_revoked
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt, StageResult
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Totals, Unit
from sharmill.errors import REASONS, ConfigError, FatalError
from sharmill.storage import (
    PROBE,
    open_atomic,
    remove_asides,
    remove_staging,
    remove_tree,
    require_writable,
    write_atomic,
)

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the worker loop on ranks."""

    def run(self, stage: Stage, units: Sequence[Unit], listener: Listener) -> dict[int, FailedAttempt]:
        """Does the units and returns those that failed for good. Calls ``listener.unit_done`` for each commit.

        Raises:
            ConfigError, FatalError: the stage cannot go on.
        """


class RejectGuard(Listener):
    """Listens in and stops the stage when more records are rejected than the configuration allows."""

    def __init__(self, listener: Listener, stage: Stage, limit: float, expected_in: int) -> None:
        self._listener = listener
        self._stage = stage
        self._limit = limit
        self._expected_in = expected_in
        self._reasons: Counter[str] = Counter()

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._listener.stage_started(stage, units, done)
        for commit in done:
            self._reasons.update(commit.rejects)
        self.check(self._reasons)

    def loading(self, num_ranks: int) -> None:
        self._listener.loading(num_ranks)

    def unit_advanced(self, unit: Unit, done: float) -> None:
        self._listener.unit_advanced(unit, done)

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        self._listener.unit_done(unit, commit)
        self._reasons.update(commit.rejects)
        self.check(self._reasons)

    def unit_failed(self, unit: Unit, error: FailedAttempt, attempts: int) -> None:
        self._listener.unit_failed(unit, error, attempts)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        self._listener.stage_ended(stage, result)

    def check(self, reasons: Mapping[str, int]) -> None:
        """Raises FatalError if the limit is exceeded."""
        check_rejects(self._stage, reasons, self._expected_in, self._limit)


def check_rejects(stage: Stage, reasons: Mapping[str, int], expected_in: int, limit: float) -> None:
    """Raises FatalError with the three commonest reasons if more than ``limit`` of ``expected_in`` are rejected."""
    rejected = sum(reasons.values())
    # A quotient, since 0.29 * 100 is less than 29.
    if rejected == 0 or rejected / expected_in <= limit:
        return
    commonest = ", ".join(f"{reason} {count} ({REASONS[reason]})" for reason, count in Counter(reasons).most_common(3))
    raise FatalError(
        f"{stage.name} stopped: {rejected} of {expected_in} records are rejected, more than "
        f"max_reject_fraction={limit:g} allows. Commonest reasons: {commonest}. "
        f"See {stage.dir.path}/rejects; mend the input or raise max_reject_fraction"
    )


@contextmanager
def locked(run_dir: RunDir, wait_seconds: float = 0.0) -> Iterator[None]:
    """Holds the run directory for this process: two runs that direct one dataset would tread on each other.

    Raises:
        ConfigError: another process still holds it after ``wait_seconds``.
    """
    require_writable(run_dir.path)
    lock = FileLock(run_dir.lock, timeout=wait_seconds)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"another sharmill process is at work in {run_dir.path}; wait for it or end it first"
        ) from error
    try:
        yield
    finally:
        lock.release()


def run_stage(
    stage: Stage, executor: Executor, listener: Listener, *, max_reject_fraction: float, restart: bool = False
) -> StageResult:
    """Brings a stage to its end, doing only what is missing. The caller holds the run directory's lock.

    Raises:
        ConfigError: before any work.
        FatalError: the stage stopped: too many rejects, a full disk, accounts that do not add up.
    """
    require_writable(stage.run_dir.path)
    units = read_or_make_plan(stage, restart=restart)
    _remove_leftovers(stage)
    commits, missing = _outstanding(stage, units, check=units)
    if missing or not stage.is_finalized():
        remove_tree(stage.dir.done)
    expected_in = sum(unit.size for unit in units)
    guard = RejectGuard(listener, stage, max_reject_fraction, expected_in)
    guard.stage_started(stage, units, list(commits.values()))
    if missing:
        require_writable(stage.root)
        remove_tree(stage.dir.progress)
        failures = executor.run(stage, missing, guard)
        commits, missing = _outstanding(stage, units, check=missing)
        if missing:
            return _report_failures(stage, missing, failures, listener)
    totals = read_totals(stage) or _finalize(stage, units, commits, guard, expected_in)
    remove_tree(stage.dir.failures)
    result = StageResult(totals)
    listener.stage_ended(stage, result)
    return result


def read_totals(stage: Stage) -> Totals | None:
    """The totals of a finished stage, or None."""
    if not stage.dir.done.exists():
        return None
    return msgspec.json.decode(stage.dir.done.read_bytes(), type=Totals)


def _remove_leftovers(stage: Stage) -> None:
    """Removes what killed processes left aside, wherever this stage and its engine publish."""
    remove_staging(stage.root)
    paths = stage.run_dir
    remove_asides(paths.path, {path.name for path in (paths.config, paths.rejects, paths.stats)} | {PROBE})
    for folder in (paths.manifests, stage.dir.path, stage.dir.unit_rejects(0).parent, stage.dir.progress):
        remove_asides(folder)


def _outstanding(stage: Stage, units: Sequence[Unit], *, check: Sequence[Unit]) -> tuple[dict[int, Commit], list[Unit]]:
    """The commits whose files are in place, and the units without one; the files of ``check`` are looked at."""
    commits = read_ledger(stage.dir.ledger, units)
    for unit in check:
        if unit.index in commits and not outputs_in_place(commits[unit.index], stage):
            del commits[unit.index]
    return commits, [unit for unit in units if unit.index not in commits]


def _finalize(
    stage: Stage, units: list[Unit], commits: dict[int, Commit], guard: RejectGuard, expected_in: int
) -> Totals:
    in_order = [commits[unit.index] for unit in units]
    _check_redone(stage, commits)
    _merge_rejects(stage, in_order)
    totals = stage.finalize(units, in_order)
    totals.check(stage.name, expected_in)
    guard.check(totals.rejects)
    remove_staging(stage.root)
    write_atomic(stage.dir.done, msgspec.json.encode(totals))
    remove_tree(stage.dir.revoked)
    return totals


def _check_redone(stage: Stage, commits: dict[int, Commit]) -> None:
    """Units that were done again must give what they gave at first. On a GPU bytes may depend on its type: there, only
    the records count."""
    for index, first in read_revoked(stage).items():
        now = commits[index]
        if (now.num_out, now.rejects) != (first.num_out, first.rejects):
            what = f"{now.num_out} records went on instead of {first.num_out}"
        elif not stage.uses_gpu and now.files != first.files:
            what = "its files have other bytes"
        else:
            continue
        raise FatalError(
            f"{stage.name}: unit {index} was done again with another outcome: {what}. Its input has changed since: "
            f"restore that and use --redo again, or begin anew with sharmill run CONFIG {stage.kind} "
            "--restart"
        )


def _merge_rejects(stage: Stage, commits: Sequence[Commit]) -> None:
    with open_atomic(stage.dir.rejects) as merged:
        for commit in commits:
            if commit.num_rejected:
                merged.write(stage.dir.unit_rejects(commit.index).read_bytes())


def _report_failures(
    stage: Stage, missing: Sequence[Unit], failures: dict[int, FailedAttempt], listener: Listener
) -> StageResult:
    gone = "its output has vanished since it was committed"
    errors = {unit.index: failures.get(unit.index) or FailedAttempt(unit.index, gone, gone) for unit in missing}
    write_atomic(stage.dir.failures, b"".join(msgspec.json.encode(error) + b"\n" for error in errors.values()))
    result = StageResult(None, errors)
    listener.stage_ended(stage, result)
    return result
