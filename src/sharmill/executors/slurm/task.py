"""The work of one rank that no driver watches: a task of a SLURM array.

It gets its bin of units when it is submitted and does those that are not in the ledger, then those of other ranks that
none has begun, see ``taken_units``. Told to leave (preemption, time limit), it gives up the unit in flight and is
requeued, to go on from the ledger; so it is when its GPU works no more in its process. Whether too many records are
rejected it reads in the ledger, which has the commits of the other ranks as well.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import sys
from collections import Counter, deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sharmill.engine.attempts import AttemptLog
from sharmill.engine.fence import require_current, superseded
from sharmill.engine.late_views import wait_for_plan
from sharmill.engine.ledger import find_lost, read_ledger
from sharmill.engine.outcomes import BrokenDevice, FailedAttempt, Overtaken
from sharmill.engine.patience import Patience
from sharmill.engine.plan import load_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.worker import MAX_BROKEN_DEVICES, Worker
from sharmill.errors import ConfigError, DeviceError, SharmillError
from sharmill.executors.devices import Device
from sharmill.executors.logs import logging_to
from sharmill.executors.slurm.queue import cancel_pending
from sharmill.executors.slurm.taken_units import UnitsToDo
from sharmill.models.device import check_device
from sharmill.ports import clock, process
from sharmill.processes import limit_cores

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

log = logging.getLogger(__name__)

# Reading the ledger may take at most one part in so many of a rank's time, and is not worth it more often than this.
_LEDGER_SHARE = 50.0
_SECONDS_BETWEEN_LEDGERS = 20.0
_SECONDS_BETWEEN_LOOKS = 10.0
# A unit that had this much of the time that any unit can have, and did not end, counts as one that ends its rank.
_MOST_OF_THE_TIME = 0.8
# SLURM sends its signal up to a minute early. Under limits of few minutes that and the loading would leave nothing.
_SECONDS_OF_EARLY_SIGNAL = 60.0
_LEAST_OF_THE_LIMIT = 0.25


@dataclass
class RankTask:
    """A rank's part of a stage: picklable, and callable on the node.

    ``units`` are indices into the plan; ``limit`` is the number of seconds before the rank is told to leave.
    ``round`` is the name of the folder of what the ranks that were submitted together have taken.
    """

    stage: Stage
    rank: int
    units: list[int]
    device: str
    rejects: RejectLimit
    limit: float = math.inf
    round: str = ""

    def __post_init__(self) -> None:
        self._told_to_leave = False
        self._attempts = AttemptLog(self.stage.dir.attempts)
        # The unit in flight, if there is one; signals and threads take it out, in one operation.
        self._in_flight: deque[int] = deque(maxlen=1)
        self._begun = 0.0
        self._seconds_to_load = 0.0
        self._next_look = 0.0

    def __call__(self) -> int:
        """Do the units that are missing, and return how many of all are in the ledger now."""
        patience = Patience(self.stage.seconds_until_seen)
        wait_for_plan(self.stage, patience)
        taken = self.stage.dir.taken / self.round
        if not patience.wait_until(taken.is_dir, str(taken)):
            raise superseded(self.stage)
        hidden = Device().only_visible() if self.device == "cpu" else nullcontext()
        with hidden, logging_to(self.stage.dir.rank_log(self.rank)):
            # What was pickled is not this process's: a requeued task has a file of its own.
            self._attempts = AttemptLog(self.stage.dir.attempts)
            todo = UnitsToDo(self.stage, taken, self.rank, self._outstanding(), lambda: self._attempts.stopped)
            if not todo.is_empty():
                previous = process.set_handler(signal.SIGTERM, self._expect_the_end)
                self._run(todo)
                process.set_handler(signal.SIGTERM, previous)
            if (array := process.environ.get("SLURM_ARRAY_JOB_ID")) is not None and todo.are_all_over():
                # The driver job behind the array would wait until each had its turn, to find nothing left.
                cancel_pending(array)
        return len(read_ledger(self.stage.dir, self._own_units()))

    def checkpoint(self) -> DelayedSubmission:
        """Return what is run after the requeue; submitit calls this in the rank's process when it has to leave."""
        from submitit.helpers import DelayedSubmission

        self._told_to_leave = True
        self._excuse_current()
        log.warning("rank %d is told to leave", self.rank)
        # A fresh task: nothing of this process is carried over.
        return DelayedSubmission(dataclasses.replace(self))

    def _expect_the_end(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, as of scancel and of preemption without a warning: SIGKILL follows."""
        self._excuse_current()
        log.warning("rank %d will be killed", self.rank)

    def _excuse_current(self, *, of_node: bool = False) -> None:
        current = self._take_current()
        most = self.limit - _SECONDS_OF_EARLY_SIGNAL - self._seconds_to_load
        enough = _MOST_OF_THE_TIME * max(most, _LEAST_OF_THE_LIMIT * self.limit)
        if current is not None and clock.monotonic() - self._begun < enough:
            # The folder of the notes may have gone with the plan.
            with suppress(FileNotFoundError):
                self._attempts.give_up(current, of_node=of_node)

    def _take_current(self) -> int | None:
        """Return the unit in flight, to one caller alone: of its end, a signal and another rank's end of it."""
        with suppress(IndexError):
            return self._in_flight.pop()
        return None

    def _run(self, todo: UnitsToDo) -> None:
        ready = False
        if (cores := process.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            # A cluster need not bind tasks to their cores.
            limit_cores(int(cores))
        try:
            check_device(self.device)
            asked = process.environ.get("SLURM_MEM_PER_NODE", "")
            with Worker(
                self.stage, self.rank, self.device, may_publish=todo.may_publish,
                memory_asked_mb=float(asked) if asked.isdecimal() else 0.0,
                seconds_until_seen=self.stage.seconds_until_seen,
            ) as worker:  # fmt: skip
                ready = True
                self._seconds_to_load = process.seconds_since_start()
                leave = self._leave_when_overtaken
                process.Thread(target=leave, args=[worker, todo], name="overtaken", daemon=True).start()
                self._work(worker, todo)
        except FileNotFoundError:
            require_current(self.stage)
            raise
        except SharmillError as error:
            if self._told_to_leave:
                # The request to leave arrives as SystemExit, here in the middle of the set-up.
                sys.exit(1)
            if error.code == "superseded_plan":
                raise
            # A rank that cannot be set up, sees its input no more, or finds its scratch disk full, may lie on a broken
            # node; anything else would meet the others as well.
            if isinstance(error, ConfigError) or (ready and not isinstance(error, DeviceError)):
                self._attempts.stop(error)
            else:
                self._excuse_current(of_node=True)
                self._attempts.fail_setup(str(error))
            raise

    def _work(self, worker: Worker, todo: UnitsToDo) -> None:
        for unit in todo:
            if self._attempts.stopped:
                break
            self._attempts.begin(unit.index)
            self._begun = clock.monotonic()
            self._in_flight.append(unit.index)
            outcome = worker.run(unit, todo.following())
            if self._told_to_leave:
                # The request to leave arrives as SystemExit within the unit, which ended that unit only.
                sys.exit(1)
            is_ours = self._take_current() is not None
            if isinstance(outcome, BrokenDevice):
                self._leave(outcome, excused=todo.interruptions(unit) < MAX_BROKEN_DEVICES)
            if isinstance(outcome, Overtaken):
                if is_ours:
                    self._attempts.give_up(unit.index)
            elif isinstance(outcome, FailedAttempt):
                self._attempts.fail(outcome)
                todo.failed(unit)
            else:
                todo.done(unit)
                if outcome.num_rejected:
                    self._check_rejects()

    def _leave_when_overtaken(self, worker: Worker, todo: UnitsToDo) -> None:
        """End this process when another rank has ended the unit that it is late with, and it has nothing else left.

        It may hang, and all others would wait for it.
        """
        while True:
            clock.sleep(_SECONDS_BETWEEN_LOOKS)
            with suppress(OSError):
                current = next(iter(self._in_flight), None)
                if current is None or not todo.may_leave(current):
                    continue
                if (taken := self._take_current()) != current:
                    self._in_flight.extend([] if taken is None else [taken])
                    continue
                log.warning("rank %d leaves unit %d, which another rank has done meanwhile", self.rank, current)
                self._attempts.give_up(current)
                worker.note_end()
                process.end_at_once(0)

    def _leave(self, outcome: FailedAttempt, *, excused: bool) -> NoReturn:
        """Have this rank requeued, since nothing works on its device in this process; the attempt counts or not."""
        from submitit import JobEnvironment

        if excused:
            self._attempts.give_up(outcome.index)
        else:
            self._attempts.fail(outcome)
        log.warning("rank %d leaves, since its device works no more in its process: %s", self.rank, outcome.message)
        # What SLURM sends before it preempts a rank: submitit's handler requeues, and ends this process.
        signal.raise_signal(getattr(signal, f"SIG{JobEnvironment.USR_SIG}"))
        sys.exit(1)

    def _check_rejects(self) -> None:
        """Raise FatalError if more is rejected than the configuration allows; the ledger is read now and then."""
        began = clock.monotonic()
        if began < self._next_look:
            return
        reasons: Counter[str] = Counter()
        commits = read_ledger(self.stage.dir, load_plan(self.stage)).values()
        for commit in commits:
            reasons.update(commit.rejects)
        self.rejects.check(reasons, sum(commit.num_in for commit in commits))
        now = clock.monotonic()
        self._next_look = now + max(_SECONDS_BETWEEN_LEDGERS, _LEDGER_SHARE * (now - began))

    def _outstanding(self) -> list[Unit]:
        """Return what is left of this rank's units, largest first as they were packed."""
        mine = self._own_units()
        commits = read_ledger(self.stage.dir, mine)
        lost = find_lost(self.stage, commits.values())
        return [unit for unit in mine if unit.index not in commits or unit.index in lost]

    def _own_units(self) -> list[Unit]:
        units = load_plan(self.stage)
        return [units[index] for index in self.units]
