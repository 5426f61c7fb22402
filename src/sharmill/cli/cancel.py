"""``sharmill cancel``: the end of whatever is at work in a run directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK
from sharmill.errors import ConfigError, FatalError
from sharmill.files.host import is_gone, user_name

if TYPE_CHECKING:
    from sharmill.engine.rundir import RunDir
    from sharmill.files.locks import LockOwner

_SECONDS_TO_END: Final = 60.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--ray-address", help="Dashboard of the Ray cluster; by default that of RAY_API_SERVER_ADDRESS.")
@json_option
def cancel(run_dir: Path, ray_address: str | None, as_json: bool) -> int:
    """End what is at work in a run directory: jobs, or a process.

    What is done is kept: the command that began the run goes on from there. A dataset directory in which the run has
    published nothing yet is free for others.
    """
    from sharmill.engine.reservations import release_cancelled
    from sharmill.engine.run import locked
    from sharmill.engine.run_notes import End, note_end, read_end
    from sharmill.engine.rundir import RunDir
    from sharmill.engine.state import describe_workers, find_workers
    from sharmill.executors.slurm.queue import SECONDS_TO_CANCEL, cancel_jobs, queued_jobs
    from sharmill.files.locks import lock_owner

    paths, console = RunDir(run_dir), make_console()
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: there is no {paths.config.name} in it", code="no_run_dir")
    queued, owner, live = queued_jobs(paths), lock_owner(paths.path), find_workers(paths)
    if read_end(paths) is None and (queued or live or (owner is not None and not _is_gone(owner))):
        # First of all: what goes on meanwhile submits nothing more.
        note_end(paths, End(state="cancelled", message=f"cancelled by {user_name()}; what is done is kept"))
    jobs = cancel_jobs(paths)
    ended = _end_owner(paths, ray_address, jobs)
    if live:
        # They look every few seconds, also on other hosts. Of its own ranks SLURM has said that they are gone.
        _wait_for_workers(paths, ranks=not jobs)
        console.print(plain(f"ended: {describe_workers(live)}"))
    if ended:
        # It may just have submitted some.
        jobs = sorted({*jobs, *cancel_jobs(paths)}, key=int)
        console.print(plain(f"ended: {ended}"))
    if jobs:
        console.print(plain(f"ended on SLURM: jobs {', '.join(jobs)}"))
    if not jobs and not ended and not live:
        console.print(plain(f"nothing is at work in {run_dir}"))
    kept: list[Path] = []
    try:
        if jobs or paths.reserved.exists():
            # The process of an advance job may outlast its job for a while, and one that was told by the mark notes its
            # end under the lock. A run that has begun again meanwhile keeps its reservations, and ranks their staging
            # folder.
            with locked(paths, SECONDS_TO_CANCEL if jobs else _SECONDS_TO_END):
                kept = [] if find_workers(paths, ranks=not jobs) else release_cancelled(paths)
    finally:
        # What was ended is told in any case.
        if as_json:
            names = [str(path) for path in kept]
            print_json({"slurm_jobs": jobs, "ended": live + ([ended] if ended else []), "reservations": names})
    if kept:
        line = f"{kept[0].parent.parent} has files of this run, so its reservations stay: {' '.join(map(str, kept))}"
        console.print(plain(line), soft_wrap=True)
    return OK


def _wait_for_workers(run_dir: RunDir, *, ranks: bool) -> None:
    """Wait until no process is at work that has read that the run is cancelled; ``ranks`` as that of ``find_workers``.

    Raises:
        FatalError: one still is after a minute.
    """
    from sharmill.engine.state import describe_workers, find_workers

    deadline = time.monotonic() + _SECONDS_TO_END
    while live := find_workers(run_dir, ranks=ranks):
        if time.monotonic() > deadline:
            message = f"{describe_workers(live)} still at work {_SECONDS_TO_END:.0f} s after the run was cancelled"
            raise FatalError(message, code="locked")
        time.sleep(0.2)


def _end_owner(run_dir: RunDir, ray_address: str | None, ended_jobs: Sequence[str]) -> str:
    """End the process that holds the lock of a run directory; return a few words about it, "" where there is none.

    A process that ended with its SLURM job on another host has left its lock, which runs out by itself.

    Raises:
        ConfigError: it can be ended only from elsewhere, or by another user.
    """
    from sharmill.files.locks import RAY_JOB, SLURM_JOB, lock_owner

    owner = lock_owner(run_dir.path)
    if owner is None or _is_gone(owner):
        return ""
    slurm_job = owner.job.removeprefix(SLURM_JOB) if owner.job.startswith(SLURM_JOB) else ""
    if slurm_job in ended_jobs:
        return ""
    if owner.job.startswith(RAY_JOB):
        from sharmill.executors.ray import stop_job

        stop_job(owner.job.removeprefix(RAY_JOB), ray_address)
        return str(owner)
    if not owner.is_here:
        how = f"scancel {slurm_job}" if slurm_job else f"on that host: kill -TERM {owner.pid}"
        message = f"{owner} is at work in {run_dir.path}, which cannot be ended from here; {how}"
        raise ConfigError(message, code="locked")
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except PermissionError as error:
        raise ConfigError(f"{owner} is another user's; ask them to run this", code="locked") from error
    deadline = time.monotonic() + _SECONDS_TO_END
    while lock_owner(run_dir.path) == owner and not _is_gone(owner):
        if time.monotonic() > deadline:
            raise FatalError(f"{owner} has not ended within {_SECONDS_TO_END:.0f} s of being told to", code="locked")
        time.sleep(0.1)
    return str(owner)


def _is_gone(owner: LockOwner) -> bool:
    """Return whether it was a process of this machine, which has ended."""
    return owner.is_here and is_gone(owner.pid, owner.started)
