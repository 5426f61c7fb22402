"""One schedule: a submission, the disturbances that its seed draws, and what must hold at its end."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from rich.console import Console

from sharmill.cli import cancel as cancel_module
from sharmill.engine import worker
from sharmill.engine.listener import Listener
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.executors.slurm import scheduler as scheduler_port
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import read_state, wait_for_end
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile, StageProfile, StageProfiles
from simulation import dataset as toy
from simulation import invariants, local_ranks
from simulation.dataset import NAMES, SimDataset
from simulation.disturbances import DISTURBANCES
from simulation.jobs import SimJob
from simulation.kernel import Kernel
from simulation.ports import ended_after_port
from simulation.scheduler import Scheduler
from simulation.tasks import SimProcess, Stuck

# The second is longer than any unit takes that does not hang.
UNIT_TIME_LIMITS: tuple[float | Literal["auto"], ...] = ("auto", "auto", 600.0)


@dataclass
class Outcome:
    """What came of a schedule. ``problems`` are the invariants that did not hold."""

    seed: int
    disturbances: list[str]
    problems: list[str]
    trace: list[str]
    state: str
    operations: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """What a schedule is drawn from.

    Attributes:
        disturbances: their names; all by default.
        behaviour: what becomes of the first unit.
        event: after which they come, the first or a later one: an attempt at a unit by a job with this role, or
            "sbatch"; "" for any moment, drawn by default.
        driver_units: as the profile has it.
        workers: of a driver job, and of a run without a cluster.
    """

    disturbances: Sequence[str] = ()
    behaviour: str | None = None
    event: str | None = None
    driver_units: int | None = None
    workers: int | None = None


@dataclass
class World:
    """The clusters, the datasets and what is done to them in one schedule.

    Attributes:
        elsewhere: another cluster with the same file system.
        runs: the datasets of the runs that were begun, all with one dataset directory; first that of this schedule.
        accepted: the names of the runs of which a submission has gone through.
        publishers: the names of the runs that have published into the dataset directory.
        said: what cancelling processes have printed.
        submissions: the processes that have submitted this run.
        is_gentle: nothing has happened that a chain does not get over by itself.
        is_deserted: the last jobs were ended with no chance to note it.
        may_double: jobs of which the chain does not know, or that it cannot end, may be at work.
        may_go_on: of these, such as cannot be ended.
        cancelled_at: when the chain was cancelled, unless it was submitted again since.
    """

    seed: int
    folder: Path
    choice: Choice
    kernel: Kernel = field(init=False)
    cluster: Scheduler = field(init=False)
    elsewhere: Scheduler = field(init=False)
    runs: list[SimDataset] = field(init=False)
    problems: list[str] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)
    accepted: set[str] = field(default_factory=set)
    publishers: set[str] = field(default_factory=set)
    said: dict[int, Any] = field(default_factory=dict)
    _waiting: list[list[Any]] = field(default_factory=list)
    is_gentle: bool = True
    is_deserted: bool = False
    excuses: int = 0
    may_double: bool = False
    waited_for: str = ""
    cancelled_at: float | None = None
    may_go_on: bool = False
    driver_units: int = 0
    workers: int = 1
    submissions: list[SimProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed, self.folder)
        draw = self.kernel.random
        self.kernel.slow_share = draw.choice([0.02, 0.02, 0.02, 0.2])
        self.cluster = Scheduler(self.kernel, "here", queue_seconds=draw.choice([1.0, 20.0, 20.0, 300.0]))
        self.elsewhere = Scheduler(self.kernel, "elsewhere", nodes=("e1", "e2"), last_number=500)
        drawn_units = draw.choice([0, 0, 4])
        self.driver_units = drawn_units if self.choice.driver_units is None else self.choice.driver_units
        drawn_workers = draw.choice([1, 2])
        self.workers = drawn_workers if self.choice.workers is None else self.choice.workers
        drawn = draw.choice(["", "", "", "", "", "", "", "", "kill", "hang"])
        self.runs = [
            SimDataset(
                self.folder, units=draw.choice([2, 3, 5]), seconds=draw.choice([1.0, 5.0, 15.0]),
                behaviour=drawn if self.choice.behaviour is None else self.choice.behaviour,
                shared=draw.choice([NAMES, NAMES[1:]]), unit_time_limit=draw.choice(UNIT_TIME_LIMITS),
            )
        ]  # fmt: skip
        self.kernel.on_rename = partial(invariants.check_rename, self)
        for cluster in self.clusters:
            cluster.on_submit = self._see_submission
            cluster.on_watcher_killed = self._expect_failure

    @property
    def clusters(self) -> tuple[Scheduler, Scheduler]:
        return self.cluster, self.elsewhere

    @property
    def dataset(self) -> SimDataset:
        """That of this schedule's run."""
        return self.runs[0]

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.dataset.run_dir)

    def run(self) -> Outcome:
        """Let the schedule come to its end, and check what it has left; then let an operator bring it to its end."""
        for log in (toy.attempts, toy.directors, toy.second_writers):
            log.clear()
        toy.on_attempt[:] = [lambda attempt: self._see(attempt.role)]
        with self._installed():
            try:
                self.start("submission", "login", partial(self._submit_first, self.kernel.random.random() < 0.2))
                self._draw_disturbances()
                self.kernel.run()
                invariants.check_quiet(self)
                self._go_on()
            except Stuck as error:
                self.problems.append(str(error))
            self.problems += self.kernel.mistakes
            state = read_state(self.run_dir)
        return Outcome(
            self.seed, self.disturbances, self.problems, self.kernel.trace, state.state if state else "none",
            self.kernel.operations, self.kernel.now,
        )  # fmt: skip

    @contextmanager
    def _installed(self) -> Iterator[None]:
        def ask(name: str, *arguments: Any, **options: Any) -> Any:
            there = self.kernel.is_running and self.kernel.running.host in ("login elsewhere", *self.elsewhere.nodes)
            return getattr(self.elsewhere if there else self.cluster, name)(*arguments, **options)

        port = {name: partial(ask, name) for name in ("is_here", "failed_job_error", "submit", "run")}
        command = {
            "make_console": lambda: Console(quiet=True),
            "print_json": lambda said: self.said.update({self.kernel.running.pid: said}),
        }
        with (
            self.kernel.installed(),
            mock.patch.multiple(scheduler_port, **port),
            mock.patch.multiple(cancel_module, **command),
            mock.patch.object(worker, "ended_after", ended_after_port(self.kernel)),
            local_ranks.installed(self.kernel),
        ):
            yield

    # What people do.

    def start(self, name: str, host: str, work: Callable[[], object]) -> SimProcess:
        """Start a command, which ends at SIGTERM as ``sharmill`` does."""
        started = self.kernel.spawn(name, host, work)
        started.handlers[signal.SIGTERM] = signal.default_int_handler
        return started

    def _submit_first(self, waits: bool) -> None:
        try:
            self.submit(self.dataset)
        except BaseException:
            # Whoever submits is told.
            self.is_gentle = False
            raise
        if waits:
            self.waited_for = wait_for_end(self.run_dir).state
            self.kernel.note(f"submit --wait returns: {self.waited_for}")

    def submit(self, dataset: SimDataset, *, restart: bool = False) -> None:
        """Do what ``sharmill submit`` does."""
        if dataset.run_name == self.dataset.run_name:
            self.cancelled_at = None
            self.submissions.append(self.kernel.running)
        chain = make_chain(dataset, driver_units=self.driver_units, workers=self.workers, restart=restart)
        state = chain.start()
        self.accepted.add(dataset.run_name)
        self.kernel.note(f"submitted: {state.message}")

    def run_here(self, option: int, *, take_over: bool) -> None:
        """Do what ``sharmill run --restart`` does."""
        self.cancelled_at = None
        dataset = replace(self.dataset, option=option, take_over=take_over, behaviour="")
        dataset.run(LocalExecutor(self.workers), Listener(), restart=True, wait_seconds=0.0)

    def cancel(self) -> None:
        """Do what ``sharmill cancel`` does."""
        assert cancel_module.cancel.callback is not None
        begun = len(self.submissions)
        try:
            cancel_module.cancel.callback(run_dir=self.dataset.run_dir, ray_address=None, as_json=True)
        except ConfigError as error:
            state = read_state(self.run_dir)
            is_submission = any(f"process {one.pid} " in str(error) for one in self.submissions)
            if is_submission and state is not None and state.is_withdrawn and not self.may_go_on:
                self.problems.append(f"cancel has ended the jobs of a submission that goes on: {error}")
            raise
        said = self.said[self.kernel.running.pid]
        self.kernel.note(f"cancelled: {said}")
        by_hand = [one for one in self.kernel.alive() if one.name.startswith(("submission", "sharmill run"))]
        if not (by_hand or len(self.submissions) > begun) and (said["slurm_jobs"] or said["ended"]):
            self.cancelled_at = self.kernel.now if said["slurm_jobs"] else None
            invariants.check_cancelled(self, said["claims"])

    # Disturbances.

    def _draw_disturbances(self) -> None:
        draw = self.kernel.random
        kinds = list(self.choice.disturbances or DISTURBANCES)
        # Of those that are named, one at least.
        for _ in range(max(draw.choice([0, 1, 1, 2, 3]), bool(self.choice.disturbances))):
            name = draw.choice(kinds)
            when = draw.expovariate(1.0 / (10.0 * self.cluster.queue_seconds + 20.0 * self.dataset.seconds))
            event, number = draw.choice(["", "", "", "driver", "rank", "sbatch"]), draw.choice([1, 2, 3, 3])
            event = event if self.choice.event is None else self.choice.event
            if event:
                self.disturbances.append(f"{name} at {event} {number}")
                self._waiting.append([event, number, partial(self._disturb, name)])
            else:
                self.disturbances.append(f"{name} at {when:.0f} s")
                self.kernel.at(when, partial(self._disturb, name))

    def _see(self, event: str) -> None:
        """Have disturbances happen soon that wait for this."""
        for waiting in list(self._waiting):
            waiting[1] -= waiting[0] == event
            if not waiting[1]:
                self._waiting.remove(waiting)
                longest = 5.0 if event == "sbatch" else 2.0 * self.dataset.seconds
                self.kernel.at(self.kernel.random.uniform(0.0, longest), waiting[2])

    def _see_submission(self, comment: str) -> None:
        invariants.check_submit(self, comment)
        self._see("sbatch")

    def _disturb(self, name: str) -> None:
        self.kernel.note(f"disturbance: {name}")
        DISTURBANCES[name](self)

    def running_jobs(self) -> list[SimJob]:
        """Return the jobs that run, in the order of their numbers."""
        jobs = [job for cluster in self.clusters for job in cluster.queue()]
        return [job for job in jobs if job.state == "RUNNING" and job.process is not None]

    def choose_job(self) -> SimJob | None:
        """Return a running job, or None where there is none."""
        jobs = self.running_jobs()
        return self.kernel.random.choice(jobs) if jobs else None

    def _expect_failure(self) -> None:
        """Note that the watcher job has been killed too: nobody goes on by himself."""
        self.is_gentle, self.is_deserted = False, True

    def _go_on(self) -> None:
        """Submit again, as an operator does, and check that this ends with the output of an undisturbed run."""
        self._waiting.clear()
        for cluster in self.clusters:
            cluster.away_until, cluster.answers_lost, cluster.max_jobs = 0.0, 0, 100
            cluster.queue_seconds, cluster.next_lives_for = 5.0, None
            cluster.broken.clear()
        self.runs = [replace(run, behaviour="", option=invariants.planned_option(run)) for run in self.runs]
        # One of the runs has the dataset directory, and one of the clusters its chain.
        for attempt in range(3):
            for run in self.runs:
                for host in ("login", "login elsewhere"):
                    self.start(f"submission again {attempt}", host, partial(self.submit, run))
                    self.kernel.run()
                    if invariants.is_done(run):
                        self.problems += invariants.wrong_output(run)
                        return
        self.problems.append(f"submitted again, it is not done: {read_state(self.run_dir)}")


def make_chain(dataset: SimDataset, *, driver_units: int, workers: int = 1, restart: bool = False) -> JobChain:
    """Return the chain that a submission starts; its driver jobs have room for so many workers."""
    cpu = RankProfile(max_ranks=3, timeout_min=30)
    driver = StageProfile(timeout_min=60, cores=workers * cpu.cores, memory_gb=workers * cpu.memory_gb)
    stages = StageProfiles(driver=driver)
    profile = ClusterProfile(cpu=cpu, stages=stages, signal_s=90, driver_units=driver_units)
    return JobChain(dataset, profile, restart, "sharmill submit all c.yaml")


def simulate(seed: int, folder: Path, choice: Choice = Choice()) -> Outcome:
    """Run the schedule of a seed in a new folder below ``folder``, which is removed."""
    place = folder / f"{seed}"
    place.mkdir()
    logging.disable(logging.CRITICAL)
    try:
        return World(seed, place, choice).run()
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(place, ignore_errors=True)
