"""The local executor: ranks are processes on this machine, and one rank on the CPU runs inline.

Units are handed out to whichever rank is free. A rank that dies costs only the attempt at the unit that it had: a fresh
rank takes its place. A rank whose device cannot be used is given up, and the others go on.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.progress import mark_ended
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import Worker
from sharmill.errors import DeviceError, FatalError
from sharmill.executors.devices import Device, plan_devices, usable_gpus
from sharmill.executors.driven_rank import FINAL_CODES, Answer, DrivenRank, FailedStarts, Ready
from sharmill.executors.local.rank_process import RankStart, rank_main, set_up_server
from sharmill.executors.logs import logging_to
from sharmill.executors.signals import deferred_interrupts
from sharmill.executors.unit_queue import UnitQueue
from sharmill.fork_server import ForkServer
from sharmill.processes import ChildEnded, ChildProcess, end_by_force, join_all, usable_cores
from sharmill.staging import remove_dead_attempts

log = logging.getLogger(__name__)

_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_END = 2.0
# The end of a rank shows in its pipe at once, unless a process that it started holds the pipe open.
_SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(frozen=True)
class LocalExecutor:
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``), on GPUs as ``device`` says."""

    workers: int | str = "auto"
    device: str = "auto"

    def require_devices(self, stages: Iterable[Stage]) -> None:
        """Raise ConfigError where a stage is to run on GPUs, and none can be used."""
        if any(stage.uses_gpu for stage in stages):
            usable_gpus(self.device)

    def run(self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener) -> Finished:
        """Do the units; see ``engine.run.Executor``."""
        gpus = usable_gpus(self.device) if stage.uses_gpu else ()
        cores = usable_cores()
        devices = plan_devices(self.workers, uses_gpu=stage.uses_gpu, gpus=gpus, cores=cores)[: len(units)]
        queue = UnitQueue(units, rejects, listener)
        try:
            is_exact = isinstance(stage.unit_time_limit, float | int)
            # A time limit ends the rank, and an error of a GPU does: that must not be this process then.
            if len(devices) == 1 and devices[0].kind == "cpu" and not is_exact:
                _run_inline(stage, devices[0], queue, listener)
                return Finished(queue.failures)
            pool = _Pool(stage, devices, queue, listener)
            with logging_to(stage.dir.driver_log):
                pool.run()
            return Finished(queue.failures, list(pool.unusable.values()))
        finally:
            # No rank is left that could do it for itself.
            remove_dead_attempts(stage.root, stage.token)
            mark_ended(stage.dir.progress)


def _run_inline(stage: Stage, device: Device, queue: UnitQueue, listener: Listener) -> None:
    listener.loading(1)
    with (
        device.only_visible(),
        logging_to(stage.dir.rank_log(0)),
        Worker(stage, 0, device.kind, queue.advanced, in_driver=True) as worker,
    ):
        listener.loading(0)
        while unit := queue.take():
            outcome = worker.run(unit, queue.following())
            if isinstance(outcome, Commit):
                queue.done(unit, outcome)
            else:
                queue.failed(unit, outcome)


@dataclass(kw_only=True)
class _Rank(DrivenRank):
    child: ChildProcess


@dataclass
class _Pool:
    """The driver's side: hands out units, handles the answers, replaces ranks that die.

    Attributes:
        server: the process that ranks are forked from, so that they share its imports.
        unusable: by number, why a rank does not get ready; after some starts it is tried no more.
    """

    stage: Stage
    devices: list[Device]
    queue: UnitQueue
    listener: Listener
    num_loading: int = 0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    failed_starts: FailedStarts = field(default_factory=FailedStarts)
    unusable: dict[int, str] = field(default_factory=dict)
    device_error: DeviceError | None = None
    server: ForkServer | None = None

    def run(self) -> None:
        try:
            while self.queue or any(rank.unit or rank.following for rank in self.ranks.values()):
                self._start_missing()
                self._report_loading(sum(not rank.ready for rank in self.ranks.values()))
                self._hand_out()
                self._poll_all()
            self._dismiss_all()
        finally:
            with deferred_interrupts():
                self._end(self.ranks.values())
                if self.server is not None:
                    self.server.end()

    def _start_missing(self) -> None:
        """Start ranks while there are units for them; a rank that cannot start is given up, the others go on."""
        if self.server is not None and not self.server.is_alive():
            self.server = None
        for number in range(len(self.devices)):
            free = sum(rank.unit is None for rank in self.ranks.values())
            if number not in self.ranks and free < len(self.queue) and not self.failed_starts.too_many(number):
                try:
                    self._start(number)
                except OSError as error:
                    self._count_failed_start(number, f"could not be started: {error}")
        if not self.ranks and all(map(self.failed_starts.too_many, range(len(self.devices)))):
            if self.device_error is not None:
                raise self.device_error
            raise FatalError(
                f"{self.stage.name}: worker processes cannot start: the last one {self.failed_starts.last}; "
                f"see {self.stage.dir.logs}",
                code="no_ranks",
            )

    def _start(self, number: int) -> None:
        cores = max(1, usable_cores() // len(self.devices))
        log = self.stage.dir.rank_log(number)
        start = RankStart(pickle.dumps(self.stage), number, self.devices[number], cores, log)
        # An interrupt would leave a process that nobody knows of. Imports, which may take a minute, can be interrupted.
        if self.server is None:
            self._report_loading(len(self.devices))
            with deferred_interrupts():
                setup = partial(set_up_server, self.stage.dir.driver_log)
                self.server = ForkServer(self.stage.modules(), setup)
        self.server.await_imports()
        with deferred_interrupts():
            child = ChildProcess(rank_main, start, name=f"sharmill-rank-{number}", server=self.server)
            self.ranks[number] = _Rank(number=number, child=child)

    def _report_loading(self, loading: int) -> None:
        if loading != self.num_loading:
            self.num_loading = loading
            self.listener.loading(loading)

    def _hand_out(self) -> None:
        for rank in self.ranks.values():
            if not rank.ready or rank.unit or not rank.child.is_alive():
                continue
            if rank.take_unit(self.queue, len(self.devices) if self.stage.looks_ahead else None) is None:
                continue
            # A rank that has died since is removed as one that had a unit. The attempt counts, so that a rank that
            # always dies there does not go on for ever.
            with suppress(ChildEnded):
                rank.child.send((rank.unit, rank.following))

    def _poll_all(self) -> None:
        wait([handle for rank in self.ranks.values() for handle in rank.child.handles], timeout=_SECONDS_BETWEEN_LOOKS)
        for rank in list(self.ranks.values()):
            self._poll(rank)

    def _poll(self, rank: _Rank) -> None:
        # Asked first: the answers of a dead rank are then all there, and the last may be a commit.
        alive = rank.child.is_alive()
        try:
            answer = rank.child.receive(timeout=0.0)
        except TimeoutError:
            if not alive:
                self._remove_dead(rank)
        except ChildEnded:
            self._remove_dead(rank)
        else:
            self._handle_answer(rank, answer)

    def _handle_answer(self, rank: _Rank, answer: Answer) -> None:
        try:
            rank.handle_answer(answer, self.queue)
        except DeviceError as error:
            self._remove(rank)
            rank.report_lost_unit(self.queue, str(error), self.stage, excused=True)
            self.device_error = error
            self._count_failed_start(rank.number, str(error), final=error.code in FINAL_CODES)
            return
        if isinstance(answer, Ready):
            self.failed_starts.reset(rank.number)
            self.unusable.pop(rank.number, None)
        if rank.needs_replacing():
            self._remove(rank)

    def _remove_dead(self, rank: _Rank) -> None:
        # Its pipe is closed before its status is known; if it does not end by itself, it is made to.
        rank.child.join(_SECONDS_TO_END)
        self._remove(rank)
        how = rank.child.describe_exit()
        log.warning("rank %d %s", rank.number, how)
        if not rank.ready:
            self._count_failed_start(rank.number, how)
        rank.report_lost_unit(self.queue, f"the worker process {how}", self.stage)

    def _remove(self, rank: _Rank) -> None:
        self._end([rank])
        rank.give_back(self.queue)
        del self.ranks[rank.number]

    def _count_failed_start(self, number: int, how: str, *, final: bool = False) -> None:
        self.failed_starts.add(how, number, final=final)
        self.unusable[number] = f"rank {number} did no work: {how}"
        if self.failed_starts.too_many(number):
            log.error("rank %d cannot start and is given up: %s", number, how)

    def _dismiss_all(self) -> None:
        """Let ranks that wait for units leave by themselves; those still loading are not waited for."""
        leaving = [rank for rank in self.ranks.values() if rank.ready]
        for rank in leaving:
            with suppress(ChildEnded):
                rank.child.send(None)
        join_all([rank.child for rank in leaving], _SECONDS_TO_LEAVE)

    def _end(self, ranks: Iterable[_Rank]) -> None:
        """End processes by force, and return when there are none."""
        with deferred_interrupts():
            end_by_force([rank.child for rank in ranks], _SECONDS_TO_END)
