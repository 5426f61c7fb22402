"""``sharmill status``, the progress of runs as a table, JSON or numbers for Prometheus; and ``sharmill cancel``."""

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
    describe_sum,
    describe_time,
    has_option,
    json_option,
    make_console,
    print_json,
    print_table,
    say,
    say_all,
    verbose_option,
    worst,
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
from sharmill.pipeline import stages_of_run
from sharmill.rates import expect_seconds
from sharmill.registry import require_package

_SECONDS_TO_END: Final = 60.0
_STATES = ("not begun", "under way", "in the queue", "stopped", "silent", "failed", "done")
# Numbers of stages for Prometheus: the meaning of each, and its label beside run directory and stage.
_METRICS: Final[dict[str, tuple[str, ...]]] = {
    "stage_state": ("1 for the state of a stage, 0 for the others", "state"),
    "units": ("Units of a stage", "kind"),
    "cost": ("Seconds of audio, or records, of a stage", "kind"),
    "rejects": ("Rejected records", "reason"),
    "ranks": ("Ranks that have not ended",),
    "late_units": ("Units that take far longer than is usual",),
    "rank_seconds": ("Time of all ranks in units that are done",),
    "peak_memory_bytes": ("Most memory that a rank has held",),
}


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("--watch", is_flag=True, help="Go on showing it, every two seconds, until Ctrl-C.")
@click.option(
    "--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Price of an hour of a GPU; not with --json."
)
@click.option(
    "--check", is_flag=True, help="Exit with status 1 if anything failed, stopped reporting, or lost its jobs."
)
@click.option(
    "--prometheus", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write numbers to a file, as the textfile collector of Prometheus' node exporter reads them.",
)  # fmt: skip
@verbose_option
@json_option
def status(
    run_dirs: Sequence[str], watch: bool, gpu_hour: float | None, check: bool, prometheus: Path | None, verbose: bool
) -> int:
    """Show the progress of every stage and rank of run directories."""
    is_text = not has_option("json") and prometheus is None
    refuse(
        (
            gpu_hour is not None and has_option("json"),
            "--gpu-hour is of the text: --json has the seconds of each stage, and on_gpu, in pace",
        ),
        (watch and not is_text, "--watch is for people: leave out --json and --prometheus"),
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
        say(f"wrote {prometheus}: {len(runs)} run directories")
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
        # Of a single run directory there is nothing to tell apart.
        print_json(found if len(run_dirs) > 1 else next(iter(found.values())))
    if errors:
        return worst(error.exit_status for error in errors)
    return FAILED if check and any(run.is_in_trouble for run in runs) else OK


@dataclass(frozen=True)
class RunView:
    """The state of a run: its stages, its end if it has ended, and its jobs in SLURM's queue.

    Attributes:
        views: of the steps, in their order.
        rounds: the views of all rounds of the steps.
        problem: why the jobs are not known, or an empty string.
        asked: the time at which SLURM was asked about them, by ``time.monotonic``.
        readers: of the stages, by their keys, so that a further view reads what has changed.
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
    """Return the state of a run; one whose jobs are gone before its work was done has failed.

    Args:
        before: an earlier view; the answer of SLURM is kept for a while, since squeue is work for its controller.

    Raises:
        ConfigError: there is no run directory.
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
    # Planning and submitting the first jobs takes its time.
    if waits and not queued and not is_done and lock_owner(run_dir.path) is None:
        given = run_dir.read_request()
        again = f": {given.command}" if given is not None and given.command else ""
        end = RunOutcome(
            state="failed", message=f"no job is left though work is: submit again{again}", code="jobs_gone"
        )
    return RunView(path, config, stages, views_of_steps(stages, rounds), rounds, end, jobs, problem, asked, readers)


def _read_runs(wanted: Sequence[tuple[Path, RunView | None]]) -> tuple[list[RunView], list[SharmillError]]:
    """Return the runs, and print and return the errors of those that cannot be read: they hide no other.

    Each is wanted by its run directory and its earlier view, if there is one.
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
    """Print a row per stage, one per rank of the stages that are under way, the end of the run, and its jobs.

    ``gpu_hour`` is the price of an hour of a GPU, or None.
    """
    if verbose:
        named = [replace(view, name=stage.key) for stage, view in zip(run.stages, run.rounds, strict=True)]
        run = replace(run, views=named)
    _print_stages(run)
    for view in run.views:
        if (left := view.seconds_left) is not None:
            # By this machine's clock.
            style = "%H:%M:%S" if left < 12 * 3600 else "%Y-%m-%d %H:%M"
            say(f"{view.name}: done at about {datetime.now() + timedelta(seconds=left):{style}}")
        for rank in view.ranks:
            _print_rank(view, rank)
        for late in view.late:
            end = "executor.unit_time_limit ends units that hang"
            if late.limit is not None:
                end = f"it is ended after {describe_time(late.limit)}"
            say(
                f"{view.name}: unit {late.unit} has taken rank {late.rank} {describe_time(late.seconds)}, where "
                f"{describe_time(late.expected)} is usual, so the time left is not known; {end}",
                style="red",
            )
    _print_sums(run, gpu_hour)
    for view in run.views:
        if view.pace is not None:
            _print_pace(view, view.pace, verbose=verbose)
    for view in run.views:
        if view.rejects:
            listed = ", ".join(f"{reason} {count}" for reason, count in Counter(view.rejects).most_common())
            say(f"{view.name} rejects: {listed}")
        say_all(f"{view.name}: {note}" for note in view.notes)
    for stage in run.stages:
        failures = stage.dir.read_failures()
        for error in failures[:5]:
            say(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
        if failures:
            say(f"{stage.name}: {counted(len(failures), 'unit')} failed; tracebacks: {stage.dir.failures}", style="red")
    if run.end is not None:
        path = RunDir(run.path).outcome
        since = f" since {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}" if path.exists() else ""
        say(f"run: {run.end.state}{since}: {run.end.message}", style="red" if run.end.state == "failed" else "")
    _print_jobs(run)


def _print_stages(run: RunView) -> None:
    """Print a row for each stage: without zeros, and without columns that would be empty."""
    names = ["stage", "state", "units", "processed", "rejects", "time left"]
    # From this many columns on there is room for all columns of the table.
    is_wide = make_console().width >= 120
    if is_wide:
        names[3:3] = ["running", "failed", "waiting"]
        names.insert(-2, "rate")
    if is_wide or all(view.seconds_left is None for view in run.views):
        names += ["rank time", "rank speed"]
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
                "rank time": describe_time(view.pace.seconds),
                "rank speed": f"{view.pace.rate:,.{0 if view.pace.rate >= 100 else 1}f}{unit}",
            }
        rows.append([cells.get(name, "") for name in names])
    print_table(str(run.path), names, rows, left=("stage", "state"), no_wrap=names)


def _print_sums(run: RunView, gpu_hour: float | None) -> None:
    """Print the time left of all stages, while one is under way, and what they have cost so far."""
    left = [view for view in run.views if view.state != "done"]
    if len(left) > 1 and any(view.state == "under way" for view in left):
        # On how many ranks a stage will run is known of this machine alone.
        expected: dict[str, float] = {}
        try:
            expected = expect_seconds(run.config, run.stages) if run.config.executor.runs_here else {}
        except SharmillError as error:
            say(f"the time left of the whole run is not known: {error}", style="red")
        parts = [expected.get(view.name) if view.seconds_left is None else view.seconds_left for view in left]
        if line := describe_sum("all stages", parts):
            say(line)
    paces = [view.pace for view in run.rounds if view.pace is not None]
    if paces:
        gpus = sum(pace.seconds for pace in paces if pace.on_gpu)
        cores = sum(pace.seconds for pace in paces) - gpus
        kinds = (("cores", cores), ("GPUs", gpus))
        spent = ", ".join(f"{describe_time(seconds)} of ranks on {kind}" for kind, seconds in kinds if seconds)
        # Ranks may share a GPU; commits do not say which one they had.
        price = "" if gpu_hour is None else f", {gpus / 3600 * gpu_hour:,.2f} if each had a GPU of its own"
        say(f"all stages: {spent} so far in units that are done{price}")


def _print_pace(view: StageView, pace: Pace, *, verbose: bool) -> None:
    """Print what holds a stage up; if ``verbose``, also where its time went, and which ranks and units are slow."""
    if pace.bottleneck:
        worked = f"{view.name}: its GPUs work for {pace.delays['model']:.0%} of their time"
        say(f"{worked}: {pace.bottleneck}", style="yellow")
    if not verbose:
        return
    kind = "ranks on GPUs" if pace.on_gpu else "ranks on cores"
    unit = "records a second" if view.cost_unit == "records" else "x real time"
    noted = [f"{share:.0%} {name}" for name, share in pace.delays.items()]
    if noted:
        noted.append(f"{max(0.0, 1 - sum(pace.delays.values())):.0%} the rest")
    of_time = f", of which {', '.join(noted)}" if noted else ""
    say(f"{view.name}: {describe_time(pace.seconds)} of {kind} so far at {pace.rate:,.1f} {unit}{of_time}")
    if pace.memory_mb:
        asked = f", of {pace.memory_asked_mb:,.0f} MB asked" if pace.memory_asked_mb else ""
        say(f"  memory: at most {pace.memory_mb:,.0f} MB on a rank{asked}; hosts: {pace.hosts}")
    for name, slowest in (("ranks", pace.slowest_ranks), ("units", pace.slowest_units)):
        if len(slowest) > 1:
            listed = ", ".join(f"{index} at {rate:,.1f}" for index, rate in slowest)
            say(f"  slowest {name}: {listed} {unit}")


def _print_jobs(run: RunView) -> None:
    """Print a line for each kind and state of jobs, with what they wait for, or one that says that nobody answers."""
    names = {"rank": "rank job", "advance": "advance job", "second": "the job behind it"}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for job in run.jobs:
        why = ": ".join(filter(None, [job.reason.replace("None", ""), job.waits_for]))
        groups.setdefault((names.get(job.role, job.role), job.state, f" ({why})" if why else ""), []).append(job.id)
    for (name, state, why), ids in groups.items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        say(f"{name} {ids[0]}{more}: {state}{why}")
    if run.problem and waits_for_jobs(RunDir(run.path)):
        say(f"it is not known whether its jobs are left: {run.problem}", style="red")


def _print_rank(view: StageView, rank: RankProgress) -> None:
    # A file of the next second is nothing that a reader should puzzle over.
    silent = max(0.0, view.now - rank.written)
    unit = "between units" if rank.units_done else "loading"
    if rank.unit is not None:
        unit = f"unit {rank.unit} for {timedelta(seconds=round(rank.updated - rank.unit_began))}"
    line = f"{view.name} rank {rank.rank} on {rank.host}: {unit}, {rank.units_done} done, {rank.peak_memory_mb:.0f} MB"
    if rank.is_alive(view.now):
        say(f"{line}, seen {silent:.0f} s ago")
    else:
        say(f"{line}, SILENT for {silent:.0f} s (pid {rank.pid})", style="red")


def write_metrics(path: Path, runs: Sequence[RunView], num_unread: int) -> None:
    """Write the progress of runs to a file for Prometheus, whole or not at all.

    Args:
        num_unread: how many run directories could not be read.

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
    failed = Gauge("sharmill_run_failed", "1 where a run has failed, or lost its jobs", ["run_dir"],
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
        raise ConfigError(f"cannot write {path}: {error.strerror}", code="bad_usage") from error


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@json_option
def cancel(run_dir: Path) -> None:
    """End what is at work in a run directory: jobs, or a process.

    What is done is kept: the command that began the run goes on from there. A dataset directory in which the run has
    published nothing yet is free for others.
    """
    paths = RunDir(run_dir)
    if not paths.config.exists():
        raise ConfigError(f"{run_dir} is not a run directory: there is no {paths.config.name} in it", code="no_run_dir")
    require_original(paths)
    queued, live = queued_jobs(paths), _find_processes(paths)
    if queued or live:
        # First of all: what goes on meanwhile submits nothing more.
        _mark(paths)
    jobs = cancel_jobs(paths)
    if live:
        # They look every few seconds, also on other hosts, and may just have submitted some.
        _wait_for_processes(paths, jobs)
        jobs = sorted({*jobs, *cancel_jobs(paths)}, key=int)
        say(f"ended: {describe_workers(live)}")
    if jobs:
        say(f"ended on SLURM: jobs {', '.join(jobs)}")
    if not jobs and not live:
        say(f"nothing is at work in {run_dir}")
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
        print_json({"slurm_jobs": jobs, "ended": live, "reservations": [str(path) for path in kept]})
    if kept:
        say(f"these folders have files of this run, and stay reserved for it: {' '.join(map(str, kept))}")


def _find_processes(run_dir: RunDir, ended_jobs: Sequence[str] = ()) -> list[str]:
    """Return a few words about each process that may be at work on a run, or holds the lock of its run directory.

    Args:
        ended_jobs: SLURM has said that these and their ranks are gone. A lock that one has left runs out by itself.
    """
    owner, live = lock_owner(run_dir.path), find_workers(run_dir, ranks=not ended_jobs)
    if owner is None or owner.is_known_dead() or owner.job in {f"{SLURM_JOB}{job}" for job in ended_jobs}:
        return live
    return [*live, str(owner)]


def _mark(run_dir: RunDir) -> None:
    """Note that a run is cancelled, unless it has ended."""
    if run_dir.read_outcome() is None:
        run_dir.note_outcome(RunOutcome(state="cancelled", message=f"cancelled by {user_name()}; what is done is kept"))


def _wait_for_processes(run_dir: RunDir, ended_jobs: Sequence[str]) -> None:
    """Wait until no process is at work that has read that the run is cancelled.

    Raises:
        FatalError: one still is after a minute.
    """
    deadline = time.monotonic() + _SECONDS_TO_END
    while live := _find_processes(run_dir, ended_jobs):
        if time.monotonic() > deadline:
            raise FatalError(
                f"{describe_workers(live)} still at work {_SECONDS_TO_END:.0f} s after the run was cancelled",
                code="locked",
            )
        # One that has the lock, but had not begun its run yet, has removed the mark.
        _mark(run_dir)
        time.sleep(0.2)
