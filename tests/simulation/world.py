"""One schedule: a submission, the disturbances that its seed draws, and what must hold at its end."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec

from sharmill.cli.stage_status import read_stage
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.listener import Listener
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.engine.worker import MAX_ATTEMPTS
from sharmill.errors import SharmillError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.executors.slurm import scheduler as scheduler_port
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import cancel_chain, read_state
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile, StageProfile, StageProfiles
from sharmill.staging import STAGING_NAME
from simulation import dataset as toy
from simulation.dataset import RECORDS_PER_UNIT, SimDataset, expected_files
from simulation.kernel import Kernel, SimProcess, Stuck
from simulation.scheduler import Scheduler, SimJob

PROFILE = ClusterProfile(
    cpu=RankProfile(max_ranks=3, timeout_min=30),
    stages=StageProfiles(driver=StageProfile(timeout_min=60)),
    signal_s=90,
)


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


@dataclass
class World:
    """The cluster, the dataset and what is done to them in one schedule."""

    seed: int
    folder: Path
    kernel: Kernel = field(init=False)
    cluster: Scheduler = field(init=False)
    dataset: SimDataset = field(init=False)
    problems: list[str] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)
    is_gentle: bool = True
    options: set[int] = field(default_factory=lambda: {1})
    excuses: int = 0

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed, self.folder)
        self.cluster = Scheduler(self.kernel)
        draw = self.kernel.random
        self.cluster.queue_seconds = draw.choice([1.0, 20.0, 20.0, 300.0])
        poison = frozenset([0]) if draw.random() < 0.1 else frozenset[int]()
        self.dataset = SimDataset(
            self.folder, units=draw.choice([2, 3, 5]), seconds=draw.choice([1.0, 5.0, 15.0]), poison=poison
        )
        self.kernel.on_rename = self._check_rename

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.dataset.run_dir)

    def run(self) -> Outcome:
        """Let the schedule come to its end, and check what it has left; then let an operator bring it to its end."""
        for log in (toy.attempts, toy.directors, toy.second_writers):
            log.clear()
        with self._installed():
            try:
                self.kernel.spawn("submission", "login", partial(self._submit, self.dataset))
                self._draw_disturbances()
                self.kernel.run()
                self._check_quiet()
                self._go_on()
            except Stuck as error:
                self.problems.append(str(error))
            state = read_state(self.run_dir)
        return Outcome(
            self.seed, self.disturbances, self.problems, self.kernel.trace, state.state if state else "none",
            self.kernel.operations, self.kernel.now,
        )  # fmt: skip

    @contextmanager
    def _installed(self) -> Iterator[None]:
        port = {name: getattr(self.cluster, name) for name in ("is_here", "failed_job_error", "submit", "run")}
        with self.kernel.installed(), mock.patch.multiple(scheduler_port, **port):
            yield

    # What people do.

    def chain(self, dataset: SimDataset, *, restart: bool = False) -> JobChain:
        """Return the chain that a submission starts."""
        return JobChain(dataset, PROFILE, restart, "sharmill submit all c.yaml")

    def _submit(self, dataset: SimDataset, *, restart: bool = False) -> None:
        try:
            state = self.chain(dataset, restart=restart).start()
        except SharmillError:
            # Whoever submits is told.
            self.is_gentle = False
            raise
        self.kernel.note(f"submitted: {state.message}")

    def _run_here(self, option: int, *, take_over: bool) -> None:
        dataset = replace(self.dataset, option=option, take_over=take_over)
        dataset.run(LocalExecutor(1), Listener(), restart=True, wait_seconds=0.0)

    # Disturbances.

    def note_kill(self, job: SimJob) -> None:
        """Note that a job is killed, whose attempt may count, or not; behind a watcher job there is no other."""
        self.excuses += 1
        self.is_gentle &= job.role != "watcher"

    def _draw_disturbances(self) -> None:
        draw = self.kernel.random
        kinds = list(_DISTURBANCES)
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            name = draw.choice(kinds)
            when = draw.expovariate(1.0 / 200.0)
            self.disturbances.append(f"{name} at {when:.0f} s")
            self.kernel.at(when, partial(self._disturb, name))

    def _disturb(self, name: str) -> None:
        self.kernel.note(f"disturbance: {name}")
        _DISTURBANCES[name](self)

    def running_jobs(self) -> list[SimJob]:
        """Return the jobs that run, in the order of their numbers."""
        return [job for job in self.cluster.queue() if job.state == "RUNNING" and job.process is not None]

    def choose_job(self) -> SimJob | None:
        """Return a running job, or None where there is none."""
        jobs = self.running_jobs()
        return self.kernel.random.choice(jobs) if jobs else None

    # Invariants.

    def _check_rename(self, owner: SimProcess, source: str, goal: str) -> None:
        """Nothing is published for another plan than the present one."""
        inside = Path(source).parts
        if STAGING_NAME not in inside or STAGING_NAME in Path(goal).parts:
            return
        token = inside[inside.index(STAGING_NAME) + 1]
        with self.kernel.outside():
            present = {self.run_dir.stage(name).read_token() for name in toy.NAMES}
        if token not in present:
            self.problems.append(f"{owner.name} publishes {goal} for the plan {token}, which is not the present one")

    def _check_quiet(self) -> None:
        """Check what the schedule has left, when nothing goes on any more."""
        if alive := self.kernel.alive():
            self.problems.append(f"{alive[0].name} waits for ever")
        if jobs := self.cluster.queue():
            self.problems.append(f"job {jobs[0].id} is in the queue for ever")
        self._check_always()
        state = read_state(self.run_dir)
        is_done = self._is_done()
        if state is not None and state.state == "done" and not is_done:
            self.problems.append("the chain is done, and its stages are not")
        if self.is_gentle and not self.dataset.poison and (state is None or state.state != "done"):
            self.problems.append(f"the chain has not come to its end: {state}")
        if self.dataset.poison and self.is_gentle and (state is None or state.state != "failed"):
            self.problems.append(f"a unit that ends its rank each time has not failed: {state}")

    def _is_done(self) -> bool:
        return all(read_totals(stage) is not None for stage in self.dataset.make_stages())

    def _check_always(self) -> None:
        if toy.second_writers:
            self.problems.append(f"two processes direct the run at once: {toy.second_writers}")
        counts = Counter(toy.attempts)
        for (stage, token, unit), number in counts.items():
            if number > 2 * MAX_ATTEMPTS + 2 * self.excuses + 4:
                self.problems.append(f"{number} attempts at unit {unit} of {stage} with plan {token}")
        for stage in self.dataset.make_stages():
            status = read_stage(stage)
            if status.state == "under way" and self.kernel.now > 0 and not self.kernel.alive() and False:
                self.problems.append(f"{stage.name} is shown as under way, and nobody is at work")

    def _go_on(self) -> None:
        """Submit again, as an operator does, and check that this ends with the output of an undisturbed run."""
        self.cluster.away_until, self.cluster.answers_lost, self.cluster.max_jobs = 0.0, 0, 100
        self.cluster.queue_seconds = 5.0
        self.dataset = replace(self.dataset, poison=frozenset(), option=self._planned_option())
        for attempt in range(3):
            last = self.kernel.spawn(f"submission again {attempt}", "login", partial(self._submit, self.dataset))
            self.kernel.run()
            if self._is_done():
                break
        else:
            self.problems.append(f"submitted again, it is not done: {read_state(self.run_dir)}")
            return
        del last
        self._check_output()

    def _planned_option(self) -> int:
        identity = self.run_dir.stage(toy.NAMES[0]).identity
        return int(msgspec.json.decode(identity.read_bytes())["option"]) if identity.exists() else self.dataset.option

    def _check_output(self) -> None:
        root = self.folder / "out"
        found = {
            path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
        }
        expected = expected_files(self.dataset)
        if found != expected:
            wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            self.problems.append(f"the output is not that of an undisturbed run: {', '.join(wrong[:3])}")
        for stage in self.dataset.make_stages():
            totals = read_totals(stage)
            units = {commit.index for commit in iterate_ledger(stage.dir)}
            if (
                totals is None
                or totals.num_in != self.dataset.units * RECORDS_PER_UNIT
                or totals.num_out != totals.num_in
            ):
                self.problems.append(f"the accounts of {stage.name} are {totals}")
            if units != set(range(self.dataset.units)):
                self.problems.append(f"the ledger of {stage.name} has the units {units}")


def _preempt(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        world.cluster.preempt(job, with_warning=world.kernel.random.random() < 0.5)


def _lose_node(world: World) -> None:
    world.excuses += 3
    world.cluster.lose_node(
        world.kernel.random.choice(list(world.cluster.nodes)), is_dead=world.kernel.random.random() < 0.5
    )


def _kill(world: World) -> None:
    if (job := world.choose_job()) is not None and job.process is not None:
        world.note_kill(job)
        world.kernel.kill(job.process)


def _kill_at_operation(world: World) -> None:
    if (job := world.choose_job()) is not None and job.process is not None:
        world.note_kill(job)
        job.process.operations_left = world.kernel.random.randrange(60)


def _controller_away(world: World) -> None:
    world.cluster.away_until = world.kernel.now + world.kernel.random.choice([20.0, 200.0, 4000.0])


def _lose_answers(world: World) -> None:
    world.cluster.answers_lost += world.kernel.random.choice([1, 1, 2])


def _few_jobs(world: World) -> None:
    world.cluster.max_jobs = world.kernel.random.choice([1, 3])

    def allow() -> None:
        world.cluster.max_jobs = 100

    world.kernel.at(world.kernel.random.choice([60.0, 2000.0]), allow)


def _start_twice(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        first = job.process
        world.cluster.start_process(job)
        job.process = first


def _requeue(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        world.cluster.requeue(job)


def _cancel_ranks(world: World) -> None:
    for job in world.running_jobs():
        if job.role == "rank":
            world.excuses += 1
            world.cluster.cancel(job)


def _submit_again(world: World) -> None:
    world.kernel.spawn("second submission", "login2", partial(world._submit, world.dataset))


def _restart_here(world: World) -> None:
    world.kernel.spawn(
        "sharmill run --restart", "login2", partial(world._run_here, world.dataset.option, take_over=False)
    )


def _take_over(world: World) -> None:
    """Restart with another configuration where the controller does not answer, so that nobody can be asked."""
    world.is_gentle = False
    world.cluster.away_until = max(world.cluster.away_until, world.kernel.now + 200.0)
    world.kernel.spawn("sharmill run --restart --take-over", "login2", partial(world._run_here, 2, take_over=True))


def _cancel(world: World) -> None:
    world.is_gentle = False
    world.kernel.spawn("sharmill cancel", "login2", partial(cancel_chain, world.run_dir))


_DISTURBANCES: dict[str, Callable[[World], None]] = {
    "preemption": _preempt,
    "node lost": _lose_node,
    "kill -9": _kill,
    "kill -9 at an operation": _kill_at_operation,
    "controller away": _controller_away,
    "answers lost": _lose_answers,
    "MaxSubmitJobs": _few_jobs,
    "started twice": _start_twice,
    "requeue": _requeue,
    "ranks cancelled": _cancel_ranks,
    "second submission": _submit_again,
    "run --restart": _restart_here,
    "run --restart --take-over": _take_over,
    "cancel": _cancel,
}


def simulate(seed: int, folder: Path) -> Outcome:
    """Run the schedule of a seed in a new folder below ``folder``, which is removed."""
    place = folder / f"{seed}"
    place.mkdir()
    logging.disable(logging.CRITICAL)
    try:
        return World(seed, place).run()
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(place, ignore_errors=True)
