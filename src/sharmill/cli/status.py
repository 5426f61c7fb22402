"""``sharmill status``: the progress of runs as a table, as JSON or as Prometheus metrics; and ``sharmill cancel``."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import click
import msgspec

from sharmill.cli.command import (
    FAILED,
    OK,
    combine_exit_codes,
    describe_sum,
    describe_time,
    echo,
    echo_all,
    has_option,
    json_option,
    make_console,
    print_json,
    print_table,
    verbose_option,
)
from sharmill.cli.progress import describe_amount, describe_rate
from sharmill.config import Config
from sharmill.engine.fence import release_cancelled, require_original
from sharmill.engine.launch import describe_workers, find_workers
from sharmill.engine.order import config_of_run
from sharmill.engine.progress import RankProgress
from sharmill.engine.run import locked
from sharmill.engine.run_dir import RunDir, RunOutcome
from sharmill.engine.stage import StageRun
from sharmill.engine.view import Pace, StageReader, StageView, views_of_steps
from sharmill.errors import ConfigError, FatalError, SharmillError, counted, describe_error, refuse
from sharmill.executors.slurm.queue import SECONDS_TO_CANCEL, QueuedJob, cancel_jobs, queued_jobs, waits_for_jobs
from sharmill.files.host import SLURM_JOB, user_name
from sharmill.files.locks import lock_owner
from sharmill.pipeline import ALL_DONE, stages_of_run
from sharmill.rates import expect_seconds
from sharmill.registry import require_package

_SECONDS_TO_END: Final = 60.0
_STATES = ("not begun", "under way", "in the queue", "stopped", "silent", "failed", "done")
# Prometheus metrics of stages: the help text and, for some metrics, a label besides those for run directory and stage.
_METRICS: Final[dict[str, tuple[str, ...]]] = {
    "stage_state": ("1 for the state of a stage, 0 for the others", "state"),
    "units": ("Units of a stage", "kind"),
    "cost": ("Seconds of audio, or records, of a stage", "kind"),
    "rejects": ("Rejected records", "reason"),
    "ranks": ("Ranks that have not ended",),
    "late_units": ("Units that take far longer than usual",),
    "rank_seconds": ("Total time of all ranks in finished units",),
    "peak_memory_bytes": ("Peak memory of any rank",),
}


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option("--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Price of one GPU hour; not with --json.")
@click.option(
    "--check", is_flag=True, help="Exit with status 1 if anything failed, stopped reporting, or lost its jobs."
)
@click.option(
    "--prometheus", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write metrics to a file for the textfile collector of Prometheus' node exporter.",
)  # fmt: skip
@verbose_option
@json_option
def status(
    run_dirs: Sequence[str], watch: bool, gpu_hour: float | None, check: bool, prometheus: Path | None, verbose: bool
) -> int:
    """Show the progress of runs.

    The output lists the stages, active workers, failures and cluster jobs of each run directory.
    """
    is_text = not has_option("json") and prometheus is None
    refuse(
        (
            gpu_hour is not None and has_option("json"),
            "--gpu-hour cannot be combined with --json: use the fields seconds and on_gpu of each stage's pace",
        ),
        (watch and not is_text, "--watch cannot be combined with --json or --prometheus: leave it out"),
        code="bad_usage",
    )
    runs, errors = _read_runs([(Path(run_dir), None) for run_dir in run_dirs])
    with suppress(KeyboardInterrupt):
        for run in runs if is_text else ():
            _print_status(run, gpu_hour, verbose=verbose)
        while watch and not errors:
            time.sleep(2)
            runs, errors = _read_runs([(run.path, run) for run in runs])
            make_console().clear()
            for run in runs:
                _print_status(run, gpu_hour, verbose=verbose)
    if prometheus is not None:
        write_metrics(prometheus, runs, num_unread=len(errors))
        echo(f"wrote {prometheus}: {len(runs)} run directories")
    if runs:
        found = {
            str(run.path): {
                "stages": [msgspec.to_builtins(one) | {"seconds_left": one.seconds_left} for one in run.views],
                "end": msgspec.to_builtins(run.end),
                "jobs": [asdict(job) for job in run.jobs],
                "problem": run.problem,
            }
            for run in runs
        }
        # With a single run directory, no key is needed to distinguish the runs.
        print_json(found if len(run_dirs) > 1 else next(iter(found.values())))
    if errors:
        return combine_exit_codes(error.exit_status for error in errors)
    return FAILED if check and any(run.is_in_trouble for run in runs) else OK


@dataclass(frozen=True)
class RunView:
    """State of a run: its stages, its outcome if it has ended, and its jobs in SLURM's queue.

    Attributes:
        views: views of the stages that are shown, in order.
        rounds: views of ``stages``, in which each round of a stage is separate.
        end: the outcome; None while the run is in progress.
        problem: the reason why the jobs are unknown, or an empty string.
        asked: ``time.monotonic()`` at the last query to SLURM.
        readers: readers of the stages by key; a later view reads only what has changed.
    """

    path: Path
    config: Config
    stages: list[StageRun]
    views: list[StageView]
    rounds: list[StageView]
    end: RunOutcome | None
    jobs: list[QueuedJob]
    problem: str
    asked: float
    readers: dict[str, StageReader]

    @property
    def has_failed(self) -> bool:
        return self.end is not None and self.end.state != "done"

    @property
    def is_in_trouble(self) -> bool:
        return self.has_failed or any(view.state in ("failed", "silent") or view.late for view in self.views)


def read_run(path: Path, before: RunView | None = None) -> RunView:
    """Return the state of a run. A run whose jobs have vanished before its work was finished counts as failed.

    Args:
        before: an earlier view. Its jobs are reused for 20 seconds, since squeue puts load on SLURM's controller.

    Raises:
        ConfigError: ``path`` is not a run directory.
    """
    run_dir, asked = RunDir(path), time.monotonic()
    jobs: list[QueuedJob] = []
    problem = ""
    if before is not None and asked < before.asked + 20.0:
        jobs, problem, asked = before.jobs, before.problem, before.asked
    else:
        try:
            jobs = queued_jobs(run_dir, patience=5.0)
        except SharmillError as error:
            problem = str(error)
    waits = waits_for_jobs(run_dir)
    queued = waits and bool(jobs or problem)
    config = config_of_run(path)
    stages = stages_of_run(config)
    readers = before.readers if before is not None else {}
    readers |= {stage.key: StageReader(stage) for stage in stages if stage.key not in readers}
    rounds = [readers[stage.key].read(queued=queued) for stage in stages]
    is_done = all(view.state == "done" for view in rounds)
    end = run_dir.read_outcome()
    # While the lock is held, the run has not failed: planning and submitting the first jobs takes some time.
    if waits and not queued and not is_done and lock_owner(run_dir.path) is None:
        given = run_dir.read_request()
        again = f": {given.command}" if given is not None and given.command else ""
        end = RunOutcome(
            state="failed", message=f"work is left, but no job for it: submit again{again}", code="jobs_gone"
        )
    return RunView(path, config, stages, views_of_steps(stages, rounds), rounds, end, jobs, problem, asked, readers)


def _read_runs(wanted: Sequence[tuple[Path, RunView | None]]) -> tuple[list[RunView], list[SharmillError]]:
    """Return the runs that can be read and the errors of all other runs, and print these errors.

    Args:
        wanted: run directories, each with an earlier view of its run or None.
    """
    runs, errors = [], []
    for path, before in wanted:
        try:
            runs.append(read_run(path, before))
        except SharmillError as error:
            click.echo(f"Error: {describe_error(error)}", err=True)
            errors.append(error)
    return runs, errors


def _print_status(run: RunView, gpu_hour: float | None, *, verbose: bool) -> None:
    """Print a row per stage, a line per active rank, failures, the outcome of the run, and its jobs.

    Args:
        gpu_hour: the price of one GPU hour, or None.
    """
    if verbose:
        named = [replace(view, name=stage.key) for stage, view in zip(run.stages, run.rounds, strict=True)]
        run = replace(run, views=named)
    _print_stages(run)
    for view in run.views:
        if (left := view.seconds_left) is not None:
            style = "%H:%M:%S" if left < 12 * 3600 else "%Y-%m-%d %H:%M"
            echo(f"{view.name}: finishes at about {datetime.now() + timedelta(seconds=left):{style}}")
        for rank in view.ranks:
            _print_rank(view, rank)
        for late in view.late:
            end = "set executor.unit_time_limit to stop units that hang"
            if late.limit is not None:
                end = f"the unit is stopped after {describe_time(late.limit)}"
            echo(
                f"{view.name}: unit {late.unit} on rank {late.rank} has taken {describe_time(late.seconds)} instead of "
                f"the usual {describe_time(late.expected)}, so the time left is unknown; {end}",
                style="red",
            )
    _print_sums(run, gpu_hour)
    for view in run.views:
        if view.pace is not None:
            _print_pace(view, view.pace, verbose=verbose)
    for view in run.views:
        if view.rejects:
            listed = ", ".join(f"{reason} {count}" for reason, count in Counter(view.rejects).most_common())
            echo(f"{view.name} rejects: {listed}")
        echo_all(f"{view.name}: {note}" for note in view.notes)
    for stage in run.stages:
        failures = stage.dir.read_failures()
        for error in failures[:5]:
            echo(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
        if failures:
            echo(
                f"{stage.name}: {counted(len(failures), 'unit')} failed; tracebacks: {stage.dir.failures}", style="red"
            )
    if run.end is not None:
        path = RunDir(run.path).outcome
        when = f" {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}" if path.exists() else ""
        state = "finished" if run.end.state == "done" else run.end.state
        message = run.end.message.removeprefix(ALL_DONE).removeprefix("; ")
        reason = f": {message}" if message else ""
        echo(f"run: {state}{when}{reason}", style="red" if run.end.state == "failed" else "")
    _print_jobs(run)


def _print_stages(run: RunView) -> None:
    """Print a row for each stage, without zeros and without empty columns."""
    names = ["stage", "state", "units", "processed", "rejects", "time left"]
    # This many columns leave room for the whole table.
    is_wide = make_console().width >= 120
    if is_wide:
        names[3:3] = ["running", "failed", "waiting"]
        names.insert(-2, "rate")
    if is_wide or all(view.seconds_left is None for view in run.views):
        names += ["worker time", "worker speed"]
    rows = []
    for view in run.views:
        cells = {"stage": view.name, "state": view.state}
        if view.state != "not begun":
            cells |= {
                "units": f"{view.units_done}/{view.units}",
                "running": str(view.units_running or ""),
                "failed": str(view.units_failed or ""),
                "waiting": str(view.units - view.units_done - view.units_running - view.units_failed or ""),
                "processed": describe_amount(view),
                "rate": describe_rate(view),
                "rejects": str(view.num_rejects or ""),
                "time left": "" if view.seconds_left is None else describe_time(view.seconds_left),
            }
        if view.pace is not None:
            unit = "/s" if view.cost_unit == "records" else " x"
            cells |= {
                "worker time": describe_time(view.pace.seconds),
                "worker speed": f"{view.pace.rate:,.{0 if view.pace.rate >= 100 else 1}f}{unit}",
            }
        rows.append([cells.get(name, "") for name in names])
    print_table(str(run.path), names, rows, left=("stage", "state"), no_wrap=names)


def _print_sums(run: RunView, gpu_hour: float | None) -> None:
    """Print the time left for all stages if one is in progress, and the worker time spent so far."""
    left = [view for view in run.views if view.state != "done"]
    if len(left) > 1 and any(view.state == "under way" for view in left):
        # The number of ranks of a future stage is known only if it runs on this machine.
        expected: dict[str, float] = {}
        try:
            expected = expect_seconds(run.config, run.stages) if run.config.executor.runs_here else {}
        except SharmillError as error:
            echo(f"the time left of the whole run is unknown: {error}", style="red")
        parts = [expected.get(view.name) if view.seconds_left is None else view.seconds_left for view in left]
        if line := describe_sum("all stages", parts):
            echo(line)
    paces = [view.pace for view in run.rounds if view.pace is not None]
    if paces:
        gpus = sum(pace.seconds for pace in paces if pace.on_gpu)
        cores = sum(pace.seconds for pace in paces) - gpus
        kinds = (("CPU", cores), ("GPU", gpus))
        spent = ", ".join(f"{describe_time(seconds)} of {kind} workers" for kind, seconds in kinds if seconds)
        # Workers may share a GPU, and commits do not record which GPU they used.
        price = "" if gpu_hour is None else f" (price with one GPU per worker: {gpus / 3600 * gpu_hour:,.2f})"
        echo(f"total so far: {spent}{price}")


def _print_pace(view: StageView, pace: Pace, *, verbose: bool) -> None:
    """Print the bottleneck of a stage; if ``verbose``, also its time breakdown, memory, and slowest ranks and units."""
    if pace.bottleneck:
        busy = f"{view.name}: its GPUs are busy {pace.delays['model']:.0%} of the time"
        echo(f"{busy}: {pace.bottleneck}", style="yellow")
    if not verbose:
        return
    unit = " records/s" if view.cost_unit == "records" else "x real time"
    shares = [*pace.delays.items()]
    if shares:
        shares.append(("other", max(0.0, 1 - sum(pace.delays.values()))))
    breakdown = ", ".join(f"{share:.0%} {name}" for name, share in shares if share >= 0.005)
    of_time = f" ({breakdown})" if breakdown else ""
    kind = "GPU" if pace.on_gpu else "CPU"
    echo(f"{view.name}: {describe_time(pace.seconds)} of {kind} workers, {pace.rate:,.1f}{unit}{of_time}")
    if pace.memory_mb:
        asked = f" of {pace.memory_asked_mb:,.0f} MB requested" if pace.memory_asked_mb else ""
        echo(f"  peak memory per worker: {pace.memory_mb:,.0f} MB{asked}; hosts: {pace.hosts}")
    for name, slowest in (("ranks", pace.slowest_ranks), ("units", pace.slowest_units)):
        if len(slowest) > 1:
            listed = ", ".join(f"{index} ({rate:,.1f}{unit})" for index, rate in slowest)
            echo(f"  slowest {name}: {listed}")


def _print_jobs(run: RunView) -> None:
    """Print a line for each kind and state of jobs, with the reason why they wait, or say that the jobs are unknown."""
    names = {"rank": "rank job", "advance": "driver job", "second": "backup driver job"}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for job in run.jobs:
        why = ": ".join(filter(None, [job.reason.replace("None", ""), job.waits_for]))
        groups.setdefault((names.get(job.role, job.role), job.state, f" ({why})" if why else ""), []).append(job.id)
    for (name, state, why), ids in groups.items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        echo(f"{name} {ids[0]}{more}: {state}{why}")
    if run.problem and waits_for_jobs(RunDir(run.path)):
        echo(f"the run's jobs are unknown: {run.problem}", style="red")


def _print_rank(view: StageView, rank: RankProgress) -> None:
    # Hide clock skew, which would show as a negative time.
    silent = max(0.0, view.now - rank.written)
    unit = "between units" if rank.units_done else "loading"
    if rank.unit is not None:
        unit = f"unit {rank.unit} for {timedelta(seconds=round(rank.updated - rank.unit_began))}"
    line = f"{view.name} rank {rank.rank} on {rank.host}: {unit}, {rank.units_done} done, {rank.peak_memory_mb:.0f} MB"
    if rank.is_alive(view.now):
        echo(f"{line}, last seen {silent:.0f} s ago")
    else:
        echo(f"{line}, SILENT for {silent:.0f} s (pid {rank.pid})", style="red")


def write_metrics(path: Path, runs: Sequence[RunView], num_unread: int) -> None:
    """Write the progress of runs to a file for Prometheus, atomically.

    Args:
        num_unread: number of run directories that could not be read.

    Raises:
        ConfigError: prometheus_client is not installed, or the file cannot be written.
    """
    require_package("prometheus_client")
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"sharmill_{name}", meaning, ["run_dir", "stage", *labels], registry=registry)
        for name, (meaning, *labels) in _METRICS.items()
    }
    failed = Gauge("sharmill_run_failed", "1 if a run has failed or lost its jobs", ["run_dir"],
                   registry=registry)  # fmt: skip
    for run in runs:
        failed.labels(str(run.path)).set(run.has_failed)
        for view in run.views:
            numbers: dict[str, dict[str, float]] = {
                "stage_state": {state: view.state == state for state in _STATES},
                "units": {
                    "all": view.units, "done": view.units_done, "running": view.units_running,
                    "failed": view.units_failed,
                },
                "cost": {"all": view.cost, "done": view.cost_done},
                "rejects": dict(view.rejects),
                "ranks": {"": len(view.ranks)},
                "late_units": {"": len(view.late)},
            }  # fmt: skip
            if (pace := view.pace) is not None:
                numbers |= {"rank_seconds": {"": pace.seconds}, "peak_memory_bytes": {"": pace.memory_mb * 2**20}}
            for name, values in numbers.items():
                for label, value in values.items():
                    gauges[name].labels(str(run.path), view.name, *filter(None, [label])).set(value)
    Gauge("sharmill_unread_run_dirs", "Run directories that cannot be read", registry=registry).set(num_unread)
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): name another file", code="bad_usage") from error


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@json_option
def cancel(run_dir: Path) -> None:
    """Stop the jobs and processes of a run.

    Finished work is kept; run the original command again to resume. If the run has not yet published anything in its
    dataset directory, other runs may use the directory afterwards.
    """
    paths = RunDir(run_dir)
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: {paths.config.name} is missing", code="no_run_dir")
    require_original(paths)
    queued, live = queued_jobs(paths), _find_processes(paths)
    if queued or live:
        # Mark the run as cancelled first, so that no driver job submits further jobs.
        _mark(paths)
    jobs = cancel_jobs(paths)
    if live:
        # Processes on this and other hosts check for the mark every few seconds, and may have submitted more jobs.
        _wait_for_processes(paths, jobs)
        jobs = sorted({*jobs, *cancel_jobs(paths)}, key=int)
        echo(f"stopped: {describe_workers(live)}")
    if jobs:
        echo(f"stopped on SLURM: jobs {', '.join(jobs)}")
    if not jobs and not live:
        echo(f"nothing is running in {run_dir}")
    kept: list[Path] = []
    try:
        if jobs or paths.reserved.exists():
            # The lock is needed because the process of a driver job may outlive its job for a while, and a process that
            # has read the mark writes the outcome under the lock. If the run has meanwhile been started again, its
            # reservations and staging folders are kept.
            with locked(paths, SECONDS_TO_CANCEL if jobs else _SECONDS_TO_END):
                kept = [] if find_workers(paths, ranks=not jobs) else release_cancelled(paths)
    finally:
        # The stopped jobs and processes are reported even if the reservations could not be released.
        print_json({"slurm_jobs": jobs, "ended": live, "reservations": [str(path) for path in kept]})
    if kept:
        echo(f"folders that contain files of this run stay reserved for it: {' '.join(map(str, kept))}")


def _find_processes(run_dir: RunDir, ended_jobs: Sequence[str] = ()) -> list[str]:
    """Return a description of each process that may be working on a run or holds the lock of its run directory.

    Args:
        ended_jobs: jobs that SLURM has confirmed as ended, so their ranks have ended too. Their locks will expire.
    """
    owner, live = lock_owner(run_dir.path), find_workers(run_dir, ranks=not ended_jobs)
    if owner is None or owner.is_known_dead() or owner.job in {f"{SLURM_JOB}{job}" for job in ended_jobs}:
        return live
    return [*live, str(owner)]


def _mark(run_dir: RunDir) -> None:
    """Record that a run is cancelled, unless it has an outcome already."""
    if run_dir.read_outcome() is None:
        run_dir.note_outcome(
            RunOutcome(state="cancelled", message=f"cancelled by {user_name()}; finished work is kept")
        )


def _wait_for_processes(run_dir: RunDir, ended_jobs: Sequence[str]) -> None:
    """Wait until no process is working on the cancelled run any more.

    Raises:
        FatalError: a process is still at work after a minute.
    """
    deadline = time.monotonic() + _SECONDS_TO_END
    while live := _find_processes(run_dir, ended_jobs):
        if time.monotonic() > deadline:
            raise FatalError(
                f"still running {_SECONDS_TO_END:.0f} s after the run was cancelled: {describe_workers(live)}; wait, "
                "then cancel again",
                code="locked",
            )
        # A process that was just starting its run under the lock may have removed the mark.
        _mark(run_dir)
        time.sleep(0.2)
