"""One schedule: a submission, the disturbances that its seed draws, and what must hold at its end."""

from __future__ import annotations

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

import msgspec

from sharmill.cli.stage_status import read_stage
from sharmill.engine.attempts import MAX_ATTEMPTS, MOST_INTERRUPTIONS
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.listener import Listener
from sharmill.engine.progress import SILENT_SECONDS
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.errors import SharmillError
from sharmill.executors.local.executor import LocalExecutor
from sharmill.executors.slurm import scheduler as scheduler_port
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import cancel_chain, read_state, wait_for_end
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile, StageProfile, StageProfiles
from sharmill.staging import STAGING_NAME
from simulation import dataset as toy
from simulation.dataset import RECORDS_PER_UNIT, SimDataset, expected_files
from simulation.disturbances import DISTURBANCES
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


@dataclass(frozen=True)
class Choice:
    """What a schedule is drawn from: disturbances by name, all by default, what becomes of the first unit, and whether
    stages are submitted ahead."""

    disturbances: Sequence[str] = ()
    behaviour: str | None = None
    submits_ahead: bool | None = None


@dataclass
class World:
    """The cluster, the dataset and what is done to them in one schedule."""

    seed: int
    folder: Path
    choice: Choice
    kernel: Kernel = field(init=False)
    cluster: Scheduler = field(init=False)
    dataset: SimDataset = field(init=False)
    problems: list[str] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)
    is_gentle: bool = True
    excuses: int = 0
    may_double: bool = False
    waited_for: str = ""
    is_cancelled: bool = False
    driver_units: int = 0
    submits_ahead: bool = False

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed, self.folder)
        self.cluster = Scheduler(self.kernel)
        draw = self.kernel.random
        self.cluster.queue_seconds = draw.choice([1.0, 20.0, 20.0, 300.0])
        self.driver_units = draw.choice([0, 0, 4])
        # Drawn apart, so that what else a seed says stays.
        self.submits_ahead = Random(f"{self.seed} ahead").random() < 0.4
        if self.choice.submits_ahead is not None:
            self.submits_ahead = self.choice.submits_ahead
        drawn = draw.choice(["", "", "", "", "", "", "", "", "kill", "hang"])
        self.dataset = SimDataset(
            self.folder, units=draw.choice([2, 3, 5]), seconds=draw.choice([1.0, 5.0, 15.0]),
            behaviour=drawn if self.choice.behaviour is None else self.choice.behaviour,
        )  # fmt: skip
        self.kernel.on_rename = self._check_rename
        self.cluster.on_begin = self._check_begin
        self.cluster.on_submit, self.cluster.on_watcher_killed = self._check_submit, self._expect_failure

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.dataset.run_dir)

    def run(self) -> Outcome:
        """Let the schedule come to its end, and check what it has left; then let an operator bring it to its end."""
        for log in (toy.attempts, toy.directors, toy.second_writers):
            log.clear()
        with self._installed():
            try:
                self.kernel.spawn("submission", "login", partial(self._submit_first, self.kernel.random.random() < 0.2))
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
        profile = replace(PROFILE, driver_units=self.driver_units, submit_ahead=self.submits_ahead)
        return JobChain(dataset, profile, restart, "sharmill submit all c.yaml")

    def _submit_first(self, waits: bool) -> None:
        try:
            self.submit(self.dataset)
        except SharmillError:
            # Whoever submits is told.
            self.is_gentle = False
            raise
        if waits:
            self.waited_for = wait_for_end(self.run_dir).state
            self.kernel.note(f"submit --wait returns: {self.waited_for}")

    def submit(self, dataset: SimDataset, *, restart: bool = False) -> None:
        """Do what ``sharmill submit`` does."""
        self.is_cancelled = False
        state = self.chain(dataset, restart=restart).start()
        self.kernel.note(f"submitted: {state.message}")

    def run_here(self, option: int, *, take_over: bool) -> None:
        """Do what ``sharmill run --restart`` does."""
        self.is_cancelled = False
        dataset = replace(self.dataset, option=option, take_over=take_over, behaviour="")
        dataset.run(LocalExecutor(1), Listener(), restart=True, wait_seconds=0.0)

    def cancel(self) -> None:
        """Do what ``sharmill cancel`` does."""
        ended = cancel_chain(self.run_dir)
        by_hand = [one for one in self.kernel.alive() if one.name.startswith(("submission", "sharmill run"))]
        # What runs on nodes out of reach, and jobs of which nobody knows, cannot be ended.
        self.is_cancelled = bool(ended) and not by_hand and not self.may_double
        self.kernel.note(f"cancelled: {', '.join(ended)}")

    # Disturbances.

    def _draw_disturbances(self) -> None:
        draw = self.kernel.random
        kinds = list(self.choice.disturbances or DISTURBANCES)
        # Of those that are named, one at least.
        for _ in range(max(draw.choice([0, 1, 1, 2, 3]), bool(self.choice.disturbances))):
            name = draw.choice(kinds)
            when = draw.expovariate(1.0 / (10.0 * self.cluster.queue_seconds + 20.0 * self.dataset.seconds))
            self.disturbances.append(f"{name} at {when:.0f} s")
            self.kernel.at(when, partial(self._disturb, name))

    def _disturb(self, name: str) -> None:
        self.kernel.note(f"disturbance: {name}")
        DISTURBANCES[name](self)

    def running_jobs(self) -> list[SimJob]:
        """Return the jobs that run, in the order of their numbers."""
        return [job for job in self.cluster.queue() if job.state == "RUNNING" and job.process is not None]

    def choose_job(self) -> SimJob | None:
        """Return a running job, or None where there is none."""
        jobs = self.running_jobs()
        return self.kernel.random.choice(jobs) if jobs else None

    # Invariants.

    def _check_rename(self, owner: SimProcess, source: str, goal: str) -> None:
        """Nothing is published for another plan than the present one, nor after the chain was cancelled."""
        inside = Path(source).parts
        if STAGING_NAME not in inside or STAGING_NAME in Path(goal).parts:
            return
        if self.is_cancelled:
            self.problems.append(f"{owner.name} publishes {goal} after the chain was cancelled")
        token = inside[inside.index(STAGING_NAME) + 1]
        with self.kernel.outside():
            present = {self.run_dir.stage(name).read_token() for name in toy.NAMES}
        if token not in present:
            self.problems.append(f"{owner.name} publishes {goal} for the plan {token}, which is not the present one")

    def _expect_failure(self) -> None:
        """Note that the watcher job has been killed too: nobody goes on by himself."""
        self.is_gentle = False

    def _check_submit(self, role: str) -> None:
        """No ranks are submitted beside others of the dataset, unless an answer was lost or a node is out of reach."""
        if self.is_cancelled:
            self.problems.append(f"a {role} is submitted after the chain was cancelled")
        ranks = [job for job in self.cluster.queue() if job.role == role == "rank" and self._has_work(job)]
        run_id = self.run_dir.id.read_bytes().decode()
        if ranks and not self.may_double and all(run_id in job.comment for job in ranks):
            self.problems.append(f"ranks are submitted beside {ranks[0].id}")

    def _check_begin(self, job: SimJob) -> None:
        """No ranks that were submitted ahead begin after the end of the chain, if SLURM has heard who cancels them."""
        if job.role != "rank" or self._has_work(job) or self.may_double or self.cluster.away_until:
            return
        with self.kernel.outside():
            state = read_state(self.run_dir)
        if state is not None and state.state != "waiting":
            self.problems.append(f"rank {job.id} was submitted ahead, and begins although the chain is {state.state}")

    def _has_work(self, job: SimJob) -> bool:
        with self.kernel.outside():
            return not job.was_submitted_ahead or self.run_dir.job_work(int(job.id.split("_")[0])).exists()

    def _check_quiet(self) -> None:
        """Check what the schedule has left, when nothing goes on any more."""
        if alive := self.kernel.alive():
            self.problems.append(f"{alive[0].name} waits for ever")
        if jobs := self.cluster.queue():
            self.problems.append(f"job {jobs[0].id} is in the queue for ever")
        self._check_always()
        state = read_state(self.run_dir)
        is_done = self._is_done()
        if self.is_cancelled and (state is None or state.state != "failed" or "cancelled by" not in state.message):
            self.problems.append(f"the chain was cancelled, and is {state}")
        if state is not None and state.state == "done" and not is_done:
            self.problems.append("the chain is done, and its stages are not")
        if self.is_gentle and (state is None or state.state != ("failed" if self.dataset.behaviour else "done")):
            self.problems.append(f"the chain has not come to its end: {state}")
        elif state is not None and state.state == "waiting" and not state.submitting:
            self.problems.append(f"the chain waits, and has no jobs: {state}")
        if self.waited_for and self.is_gentle and (state is None or state.state != self.waited_for):
            self.problems.append(f"submit --wait has said {self.waited_for}, and it is {state}")

    def _is_done(self) -> bool:
        return all(read_totals(stage) is not None for stage in self.dataset.make_stages())

    def _check_always(self) -> None:
        if toy.second_writers:
            self.problems.append(f"two processes direct the run at once: {toy.second_writers}")
        counts = Counter((attempt.stage, attempt.token, attempt.unit) for attempt in toy.attempts)
        for (stage, token, unit), number in counts.items():
            if number > 2 * MAX_ATTEMPTS + MOST_INTERRUPTIONS + 2 * self.excuses:
                self.problems.append(f"{number} attempts at unit {unit} of {stage} with plan {token}")
        self._check_who_did_what()
        for stage in self.dataset.make_stages():
            # A rank that was killed shows as alive for a minute.
            self.kernel.now += 2 * SILENT_SECONDS
            status = read_stage(stage)
            if status.state == "under way":
                self.problems.append(f"{stage.name} is shown as under way, and nobody is at work")

    def _check_who_did_what(self) -> None:
        """Check that two ranks of a round at most began a unit, and no stage that killed its driver job another."""
        ranks: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
        drivers: defaultdict[str, set[int]] = defaultdict(set)
        for attempt in toy.attempts:
            if attempt.role == "rank":
                ranks[attempt.stage, attempt.token, str(attempt.unit), attempt.job].add(attempt.task)
            elif attempt.role:
                drivers[attempt.token].add(attempt.pid)
        for unit, tasks in ranks.items():
            if len(tasks) > 2:
                self.problems.append(f"{len(tasks)} ranks of a round have begun the unit {unit}")
        # A submission tries stages anew.
        if not any("subm" in text or "run" in text for text in self.disturbances):
            self.problems += [
                f"driver jobs have done units of the plan {token} {len(pids)} times"
                for token, pids in drivers.items()
                if len(pids) > 1
            ]

    def _go_on(self) -> None:
        """Submit again, as an operator does, and check that this ends with the output of an undisturbed run."""
        self.cluster.away_until, self.cluster.answers_lost, self.cluster.max_jobs = 0.0, 0, 100
        self.cluster.queue_seconds, self.cluster.next_lives_for = 5.0, None
        self.cluster.broken.clear()
        self.dataset = replace(self.dataset, behaviour="", option=self._planned_option())
        for attempt in range(3):
            self.kernel.spawn(f"submission again {attempt}", "login", partial(self.submit, self.dataset))
            self.kernel.run()
            if self._is_done():
                break
        else:
            self.problems.append(f"submitted again, it is not done: {read_state(self.run_dir)}")
            return
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
