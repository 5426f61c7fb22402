"""``sharmill status``: the progress of a run."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sharmill.cli.console import (
    describe_cost,
    describe_time,
    json_option,
    make_console,
    make_table,
    plain,
    print_json,
)
from sharmill.cli.exit_status import FAILED, OK, status_of_error, worst
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.logs import describe_error

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sharmill.cli.stage_status import LateUnit, StageStatus
    from sharmill.engine.progress import RankProgress
    from sharmill.engine.run_notes import End
    from sharmill.engine.stage import Stage
    from sharmill.executors.slurm.queue import QueuedJob

_MAX_FAILURES = 5
_SECONDS_TO_ASK = 5.0
_SECONDS_BETWEEN_QUESTIONS = 20.0
# From this many columns on there is room for all columns of the table.
_WIDE = 110


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("--watch", is_flag=True, help="Go on showing it, every two seconds, until Ctrl-C.")
@click.option(
    "--gpu-hour", type=click.FloatRange(0), metavar="PRICE", help="Price of an hour of a GPU; not with --json."
)
@click.option(
    "--check", is_flag=True, help="End with status 1 where something failed, is silent, or has lost its jobs."
)
@click.option(
    "--prometheus", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write numbers to a file, as the textfile collector of Prometheus' node exporter reads them.",
)  # fmt: skip
@json_option
def status(
    run_dirs: Sequence[str], watch: bool, gpu_hour: float | None, check: bool, prometheus: Path | None, as_json: bool
) -> int:
    """Show the progress of every stage and rank of run directories."""
    if as_json and gpu_hour is not None:
        message = "--gpu-hour is of the text: --json has the seconds of each stage, and on_gpu, in pace"
        raise ConfigError(message, code="bad_usage")
    if watch and (as_json or prometheus is not None):
        raise ConfigError("--watch is for people: leave out --json and --prometheus", code="bad_usage")
    queues = [QueueView(Path(run_dir)) for run_dir in run_dirs]
    if as_json or prometheus is not None:
        # One bad run directory hides no other.
        runs, errors = _read_runs(queues)
        if prometheus is not None:
            from sharmill.cli.status_metrics import write_metrics

            write_metrics(prometheus, runs, num_unread=len(errors))
        if as_json and runs:
            found = {str(queue.path): _describe_run(queue, *runs[str(queue.path)]) for queue in queues
                     if str(queue.path) in runs}  # fmt: skip
            # Of a single run directory there is nothing to tell apart.
            print_json(found if len(queues) > 1 else next(iter(found.values())))
        for error in errors:
            click.echo(f"Error: {describe_error(error)}", err=True)
        if errors:
            return worst(map(status_of_error, errors))
    else:
        console = make_console()
        with suppress(KeyboardInterrupt):
            while True:
                for queue in queues:
                    print_status(console, queue.path, queue, gpu_hour=gpu_hour)
                if not watch:
                    break
                time.sleep(2)
                console.clear()
    return FAILED if check and any(_is_in_trouble(*_read_run(queue)) for queue in queues) else OK


def _read_runs(
    queues: Sequence[QueueView],
) -> tuple[dict[str, tuple[list[StageStatus], End | None]], list[SharmillError]]:
    """Return what is known of each run directory, and the errors of those that cannot be read."""
    runs, errors = {}, []
    for queue in queues:
        try:
            runs[str(queue.path)] = _read_run(queue)
        except SharmillError as error:
            errors.append(error)
    return runs, errors


def _read_run(queue: QueueView) -> tuple[list[StageStatus], End | None]:
    """Return the stages of a run directory, and the end of its run."""
    from sharmill.cli.stage_status import read_stage, stages_in

    queued = queue.holds_jobs()
    stages = [read_stage(stage, queued=queued) for stage in stages_in(queue.path)]
    return stages, _end_of_run(queue, stages)


def _end_of_run(queue: QueueView, stages: Sequence[StageStatus]) -> End | None:
    """Return the end of a run; one whose jobs are gone before its work was done has failed."""
    from sharmill.engine.run_notes import End, read_end, read_given
    from sharmill.engine.rundir import RunDir
    from sharmill.executors.slurm.queue import waits_for_jobs
    from sharmill.files.locks import lock_owner

    run_dir = RunDir(queue.path)
    is_done = all(stage.state == "done" for stage in stages)
    # Planning and submitting the first jobs takes its time.
    if not waits_for_jobs(run_dir) or queue.holds_jobs() or is_done or lock_owner(run_dir.path) is not None:
        return read_end(run_dir)
    given = read_given(run_dir)
    again = f": {given.command}" if given is not None and given.command else ""
    return End(state="failed", message=f"no job is left though work is: submit again{again}", code="jobs_gone")


def _describe_run(queue: QueueView, stages: Sequence[StageStatus], end: End | None) -> dict[str, Any]:
    """Return what is known of a run directory, as JSON has it; ``jobs`` are those of SLURM's queue."""
    return {
        "stages": [msgspec.to_builtins(one) | {"seconds_left": one.seconds_left} for one in stages],
        "end": msgspec.to_builtins(end),
        "jobs": [dataclasses.asdict(job) for job in queue.jobs],
        "problem": queue.problem,
    }


def _is_in_trouble(stages: Sequence[StageStatus], end: End | None) -> bool:
    failed = any(stage.state in ("failed", "silent") or stage.late for stage in stages)
    return failed or (end is not None and end.state != "done")


@dataclasses.dataclass
class QueueView:
    """Answers of SLURM about a run directory's jobs; asked now and then, since squeue is work for its controller."""

    path: Path
    jobs: list[QueuedJob] = dataclasses.field(default_factory=list)
    problem: str = ""
    next_question: float = 0.0

    def ask(self) -> None:
        """Bring ``jobs`` up to date, or say in ``problem`` why they are not known."""
        from sharmill.engine.rundir import RunDir
        from sharmill.executors.slurm.queue import queued_jobs

        if time.monotonic() < self.next_question:
            return
        try:
            self.jobs, self.problem = queued_jobs(RunDir(self.path), patience=_SECONDS_TO_ASK), ""
        except SharmillError as error:
            self.jobs, self.problem = [], str(error)
        self.next_question = time.monotonic() + _SECONDS_BETWEEN_QUESTIONS

    def holds_jobs(self) -> bool:
        """Ask, and return True if a run waits for jobs, or if SLURM cannot be asked about them."""
        from sharmill.engine.rundir import RunDir
        from sharmill.executors.slurm.queue import waits_for_jobs

        self.ask()
        return bool(self.jobs or self.problem) and waits_for_jobs(RunDir(self.path))


def print_status(
    console: Console, run_dir: Path, queue: QueueView | None = None, *, gpu_hour: float | None = None
) -> None:
    """Print a row per stage, one per rank of the stages that are under way, the end of the run, and its jobs.

    ``gpu_hour`` is the price of an hour of a GPU, or None.

    Raises:
        ConfigError: there is no run directory.
    """
    from sharmill.cli.stage_status import stages_in

    stages = stages_in(run_dir)
    queue = queue or QueueView(run_dir)
    statuses, end = _read_run(queue)
    console.print(_table(str(run_dir), statuses, wide=console.width >= _WIDE))
    for status in statuses:
        if status.seconds_left is not None:
            console.print(_end_line(status))
        for rank in status.ranks:
            console.print(_rank_line(status.name, rank, status.now))
        for late in status.late:
            console.print(_late_line(status.name, late))
    for line in _run_lines(run_dir, stages, statuses, gpu_hour):
        console.print(line)
    for status in statuses:
        for line in _pace_lines(status):
            console.print(line)
    for status in statuses:
        if status.rejects:
            listed = ", ".join(f"{reason} {count}" for reason, count in Counter(status.rejects).most_common())
            console.print(plain(f"{status.name} rejects: {listed}"))
    for stage in stages:
        for line in _failure_lines(stage):
            console.print(line)
    if end is not None:
        console.print(_run_line(end, run_dir))
    for line in _queue_lines(queue):
        console.print(line)


def _table(title: str, statuses: Sequence[StageStatus], *, wide: bool) -> Table:
    names = ["stage", "state", "units", "processed", "rejects", "time left"]
    if wide:
        names[3:3] = ["running", "failed", "waiting"]
        names.insert(-2, "rate")
    table = make_table(title, names, left=("stage", "state"), no_wrap=True)
    for status in statuses:
        cells = _cells(status)
        table.add_row(*(plain(cells.get(name, "")) for name in names))
    return table


def _cells(status: StageStatus) -> dict[str, str]:
    """Return the cells of a row, by the name of the column."""
    cells = {"stage": status.name, "state": status.state}
    if status.state == "not begun":
        return cells
    records = status.cost_unit == "records"
    return cells | {
        "units": f"{status.units_done}/{status.units}",
        "running": str(status.units_running),
        "failed": str(status.units_failed),
        "waiting": str(status.units_left),
        "processed": describe_cost(status.cost_done, status.cost, records=records),
        "rate": f"{status.rate:.0f} x real time" if status.rate and not records else "",
        "rejects": str(sum(status.rejects.values())),
        "time left": "" if status.seconds_left is None else describe_time(status.seconds_left),
    }


def _end_line(status: StageStatus) -> Text:
    """Return when a stage is predicted to end, by this machine's clock."""
    assert status.seconds_left is not None
    end = datetime.now() + timedelta(seconds=status.seconds_left)
    style = "%H:%M:%S" if status.seconds_left < 12 * 3600 else "%Y-%m-%d %H:%M"
    return plain(f"{status.name}: done at about {end:{style}}")


def _run_lines(
    run_dir: Path, stages: Sequence[Stage], statuses: Sequence[StageStatus], gpu_hour: float | None
) -> Iterator[Text]:
    """Yield the time left of all stages, while one is under way, and what they have cost so far."""
    from sharmill.pilot.predict import expect_seconds
    from sharmill.pipeline import config_of_run

    left = [status for status in statuses if status.state != "done"]
    if len(left) > 1 and any(status.state == "under way" for status in left):
        config = config_of_run(run_dir)
        # On how many ranks a stage will run is known of this machine alone.
        expected: dict[str, float] = {}
        try:
            expected = expect_seconds(config, stages) if config.executor.runs_here else {}
        except SharmillError as error:
            yield plain(f"the time left of the whole run is not known: {error}", style="red")
        parts = [status.seconds_left if status.seconds_left is not None else expected.get(status.name)
                 for status in left]  # fmt: skip
        if known := [part for part in parts if part is not None]:
            least = "" if len(known) == len(parts) else "at least "
            yield plain(f"all stages: {least}{describe_time(sum(known))} left")
    paces = [status.pace for status in statuses if status.pace is not None]
    if paces:
        gpus = sum(pace.seconds for pace in paces if pace.on_gpu)
        cores = sum(pace.seconds for pace in paces) - gpus
        spent = f"{describe_time(cores)} of ranks on cores, {describe_time(gpus)} of ranks on GPUs"
        # Ranks may share a GPU; commits do not say which one they had.
        price = "" if gpu_hour is None else f", {gpus / 3600 * gpu_hour:,.2f} if each had a GPU of its own"
        yield plain(f"all stages: {spent} so far in units that are done{price}")


def _pace_lines(status: StageStatus) -> Iterator[Text]:
    """Yield what a stage has cost so far and where its time went, and which ranks and units are the slowest."""
    if (pace := status.pace) is None:
        return
    kind = "ranks on GPUs" if pace.on_gpu else "ranks on cores"
    unit = "records a second" if status.cost_unit == "records" else "x real time"
    noted = [f"{share:.0%} {name}" for name, share in pace.delays.items()]
    if noted:
        noted.append(f"{max(0.0, 1 - sum(pace.delays.values())):.0%} the rest")
    of_time = f", of which {', '.join(noted)}" if noted else ""
    yield plain(f"{status.name}: {describe_time(pace.seconds)} of {kind} so far at {pace.rate:,.1f} {unit}{of_time}")
    if pace.memory_mb:
        asked = f", of {pace.memory_asked_mb:,.0f} MB asked" if pace.memory_asked_mb else ""
        yield plain(f"  memory: at most {pace.memory_mb:,.0f} MB on a rank{asked}; hosts: {pace.hosts}")
    for name, slowest in (("ranks", pace.slowest_ranks), ("units", pace.slowest_units)):
        if len(slowest) > 1:
            listed = ", ".join(f"{index} at {rate:,.1f}" for index, rate in slowest)
            yield plain(f"  slowest {name}: {listed} {unit}")


def _failure_lines(stage: Stage) -> Iterator[Text]:
    """Yield a line for each of the first units that failed, and one that names the file of their tracebacks."""
    from sharmill.cli.stage_status import read_failures

    failures = read_failures(stage)
    for error in failures[:_MAX_FAILURES]:
        yield plain(f"{stage.name} unit {error.index} failed: {error.message}", style="red")
    if failures:
        yield plain(f"{stage.name}: {len(failures)} units failed; tracebacks: {stage.dir.failures}", style="red")


def _run_line(end: End, run_dir: Path) -> Text:
    """Return how a run has ended, and when that was noted."""
    from sharmill.engine.rundir import RunDir

    path = RunDir(run_dir).end
    since = f" since {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}" if path.exists() else ""
    return plain(f"run: {end.state}{since}: {end.message}", style="red" if end.state == "failed" else "")


def _queue_lines(queue: QueueView) -> Iterator[Text]:
    """Yield a line for each kind and state of jobs, with what they wait for, or one that says that nobody answers."""
    names = {"rank": "rank job", "advance": "advance job", "second": "the job behind it"}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for job in queue.jobs:
        why = ": ".join(filter(None, [job.reason.replace("None", ""), job.waits_for]))
        groups.setdefault((names.get(job.role, job.role), job.state, f" ({why})" if why else ""), []).append(job.id)
    for (name, state, why), ids in groups.items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        yield plain(f"{name} {ids[0]}{more}: {state}{why}")
    if queue.problem and queue.holds_jobs():
        yield plain(f"it is not known whether its jobs are left: {queue.problem}", style="red")


def _late_line(stage: str, late: LateUnit) -> Text:
    seconds, expected = describe_time(late.seconds), describe_time(late.expected)
    end = (
        "executor.unit_time_limit ends units that hang"
        if late.limit is None
        else f"it is ended after {describe_time(late.limit)}"
    )
    return plain(
        f"{stage}: unit {late.unit} has taken rank {late.rank} {seconds}, where {expected} is usual, so the time left "
        f"is not known; {end}",
        style="red",
    )


def _rank_line(stage: str, rank: RankProgress, now: float) -> Text:
    # A file of the next second is nothing that a reader should puzzle over.
    silent = max(0.0, now - rank.written)
    idle = "between units" if rank.units_done else "loading"
    unit = (
        idle
        if rank.unit is None
        else f"unit {rank.unit} for {timedelta(seconds=round(rank.updated - rank.unit_began))}"
    )
    line = f"{stage} rank {rank.rank} on {rank.host}: {unit}, {rank.units_done} done, {rank.peak_memory_mb:.0f} MB"
    if not rank.is_alive(now):
        return plain(f"{line}, SILENT for {silent:.0f} s (pid {rank.pid})", style="red")
    return plain(f"{line}, seen {silent:.0f} s ago")
