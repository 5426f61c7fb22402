"""Running one stage with any executor: plan it, process the missing units, check the accounts, and finalize."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from sharmill.engine.executor import Executor, Listener, StageResult, Unlocked
from sharmill.engine.fence import make_fence, release, reserve
from sharmill.engine.launch import find_live, find_workers
from sharmill.engine.plan import (
    find_outstanding,
    has_output,
    read_ledger,
    read_or_make_plan,
    read_revoked,
    revoke,
    wait_for_units,
)
from sharmill.engine.rejects import check_rejects
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Commit, FailedAttempt, Unit
from sharmill.errors import ConfigError, FatalError
from sharmill.files.atomic import (
    open_atomic,
    remove,
    remove_at_once,
    remove_if_empty,
    remove_temp_files,
    require_writable,
    write_atomic,
)
from sharmill.files.locks import FolderLock
from sharmill.files.shared_disk import time_of_folder
from sharmill.files.staging import remove_dead_attempts, token_staging
from sharmill.files.stored import open_stored


def locked(run_dir: RunDir, wait_seconds: float = 0.0) -> FolderLock:
    """Return the lock on a run directory, which keeps two processes that direct the run from undoing each other's work.

    Raises:
        ConfigError: the directory is not writable, or, when the lock is entered, another process still holds it after
            ``wait_seconds``.
    """
    require_writable(run_dir.path)
    return FolderLock(run_dir.path, wait_seconds=wait_seconds)


@contextmanager
def reserved(run_dir: RunDir, stages: Sequence[StageRun], *, restart: bool, releases: bool = True) -> Iterator[None]:
    """Reserve the folders into which the stages of a run publish, and release them at the end if ``releases`` is True.

    Raises:
        ConfigError: another run has reserved one of the folders.
    """

    def end() -> None:
        # If other processes of the run still need the reservation, the last of them releases it.
        if releases and not find_workers(run_dir):
            release(stages)

    try:
        reserve(stages, restart=restart)
        yield
    except BaseException:
        # Raise the error that ended the run, rather than an error that occurs while the reservation is released.
        with suppress(FatalError, OSError):
            end()
        raise
    end()


def run_stage(
    stage: StageRun,
    executor: Executor,
    listener: Listener,
    *,
    restart: bool = False,
    unlocked: Unlocked = nullcontext,
) -> StageResult:
    """Process the missing units of a stage, perhaps with other processes, and finalize the stage if all are complete.

    If other processes are already at work on the stage, this process joins them.

    Args:
        unlocked: returns a context in which other processes may direct the run. The caller holds the lock of the run
            directory.

    Raises:
        ConfigError: the configuration or the output directory cannot be used; raised before any work.
        FatalError: the stage stopped because of too many rejects, a full disk, or accounts that do not add up.
    """
    stage, units = read_or_make_plan(stage, restart=restart)
    _remove_leftovers(stage)
    if stage.ranks.ledger.is_dir():
        # Another process may have written commits just now. This call makes the node refresh its view of the ledger.
        time_of_folder(stage.ranks.ledger)
    is_joining = bool(find_live(stage.dir, stage.options.lease_seconds, ranks=executor.waits))
    commits = read_ledger(stage.dir, units)
    missing = [unit for unit in units if unit.index not in commits]
    if not is_joining:
        commits, missing = _revoke_lost(stage, units, commits)
    listener.stage_started(stage, units, list(commits.values()))
    result = StageResult()
    if missing:
        if not is_joining:
            make_fence(stage)
            if not any(commit.device_kind for commit in commits.values()):
                # No commit depends on a device yet, so the stage may use any kind of device.
                remove(stage.ranks.device_kind)
        result = executor.run(stage, missing, listener, unlocked)
    if result.submitted is None:
        if missing:
            commits, missing = wait_for_units(stage, units, missing, result.failures)
        result = _finish(stage, units, commits, result)
    listener.stage_ended(stage, result)
    return result


def _revoke_lost(stage: StageRun, units: list[Unit], done: dict[int, Commit]) -> tuple[dict[int, Commit], list[Unit]]:
    """Revoke commits whose output is missing, and reserve the output folders of a stage that is not finished.

    Returns:
        The commits whose output is in place, and the units to be processed.

    Raises:
        ConfigError: all output is missing, so it was probably moved rather than lost.
    """
    commits, missing = find_outstanding(stage, units, done, check=units)
    lost = done.keys() - commits.keys()
    files = [stage.root / file.name for index in lost for file in done[index].files]
    if not commits and stage.shares_root and files and not any(path.exists() for path in files):
        raise ConfigError(
            f"{stage.name}: the output of all {len(done)} finished units is missing from {stage.root}: move it back, "
            "put its new path into the configuration, or create it again with --restart",
            code="no_dataset",
        )
    if lost:
        # Remove the earlier commit, because the new one may differ, for instance on another GPU.
        revoke(stage, lost)
    if missing or not has_output(stage):
        remove(stage.dir.done)
    if not stage.dir.done.exists():
        reserve([stage], restart=False)
    return commits, missing


def _finish(stage: StageRun, units: list[Unit], commits: dict[int, Commit], outcome: StageResult) -> StageResult:
    """Finalize a stage if all its units are complete; otherwise record the errors of the missing units."""
    paths = stage.dir
    missing = [unit.index for unit in units if unit.index not in commits]
    if missing:
        gone = "its output has vanished since it was committed"
        errors = {index: outcome.failures.get(index) or FailedAttempt(index, gone, gone) for index in missing}
        write_atomic(paths.failures, b"".join(msgspec.json.encode(error) + b"\n" for error in errors.values()))
        return StageResult(failures=errors, given_up=outcome.given_up)
    totals = stage.dir.read_totals()
    if totals is None:
        # All units are complete. Remove the staging folder, so that a late rank cannot publish any more.
        staging, ranks = token_staging(stage.root, stage.token), stage.ranks
        remove_at_once(staging)
        remove_if_empty(staging.parent)
        for folder in (ranks.path, ranks.rejects, ranks.notes):
            remove_temp_files(folder)
        _check_repeated(stage, commits)
        in_order = [commits[unit.index] for unit in units]
        merge_files((ranks.unit_rejects(commit.index) for commit in in_order if commit.num_rejected), paths.rejects)
        totals = stage.declaration.finalize(replace(stage, units=units, commits=in_order))
        expected_in = sum(unit.size for unit in units)
        totals.check(stage.name, expected_in)
        check_rejects(stage, expected_in, totals.rejects, totals.num_in)
        write_atomic(paths.done, msgspec.json.encode(totals))
        remove(paths.revoked)
    remove(paths.failures)
    return StageResult(totals, given_up=outcome.given_up)


def _check_repeated(stage: StageRun, commits: dict[int, Commit]) -> None:
    """Raise FatalError if units that were processed again gave a different result.

    For a stage on GPUs, only the counts of records are compared, because the bytes may depend on the type of GPU.
    """
    for index, first in read_revoked(stage).items():
        now = commits[index]
        if (now.num_out, now.rejects) != (first.num_out, first.rejects):
            what = f"{now.num_out} records were kept instead of {first.num_out}"
        elif stage.resource == "cpu" and now.files != first.files:
            what = "its files have other bytes"
        else:
            continue
        raise FatalError(
            f"{stage.name}: unit {index} was processed again with a different result: {what}. Its input has changed: "
            "restore it and run the unit again, or start the stage over with --restart",
            code="changed_input",
        )


def merge_files(paths: Iterable[Path], goal: Path) -> None:
    """Concatenate files of a run directory, and publish the result as one file."""
    with open_atomic(goal) as merged:
        for path in paths:
            with open_stored(path) as part:
                shutil.copyfileobj(part, merged)


def _remove_leftovers(stage: StageRun) -> None:
    """Remove temporary files of killed processes, but not of ranks, which may still be working on the same plan."""
    remove_dead_attempts(token_staging(stage.root, stage.token))
    paths = stage.run_dir
    own = (
        paths.id,
        paths.reserved,
        paths.config,
        paths.request,
        paths.outcome,
        paths.rejects,
        paths.bad_codes,
        paths.stats,
    )
    remove_temp_files(paths.path, {path.name for path in own})
    for folder in (paths.manifests, stage.dir.path, stage.dir.merged):
        remove_temp_files(folder)
