"""The local executor: ranks are processes on this machine, and one rank runs inline.

Units are handed out largest first to whichever rank is free, which is greedy bin packing done as the work goes. A rank
that dies costs only the unit that it had: a fresh rank takes its place.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from sharmill.engine.run import Listener
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import MAX_ATTEMPTS, UnitError, Worker
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.devices import Device, plan_devices, visible_gpus
from sharmill.executors.logs import logging_to, redirect_output

log = logging.getLogger(__name__)

_READY = "ready"
_SECONDS_TO_END = 2.0


@dataclass(frozen=True)
class LocalExecutor:
    """Runs a stage on ``workers`` ranks of this machine (a number, or ``auto``)."""

    workers: int | str = "auto"

    def run(self, stage: Stage, units: Sequence[Unit], listener: Listener) -> dict[int, UnitError]:
        """See ``engine.run.Executor``."""
        gpus = visible_gpus() if stage.uses_gpu else []
        cores = len(os.sched_getaffinity(0))
        devices = plan_devices(self.workers, uses_gpu=stage.uses_gpu, gpus=gpus, cores=cores)[: len(units)]
        queue = _Queue(units, listener)
        if len(devices) == 1:
            _run_inline(stage, devices[0], queue)
        else:
            _Pool(stage, devices, queue).run()
        return queue.failures


class _Queue:
    """The units still to do, largest first, and how often each was tried."""

    def __init__(self, units: Sequence[Unit], listener: Listener) -> None:
        self._waiting = deque(sorted(units, key=lambda unit: (-unit.cost, unit.index)))
        self._attempts: dict[int, int] = {}
        self._listener = listener
        self.failures: dict[int, UnitError] = {}

    def take(self) -> Unit | None:
        return self._waiting.popleft() if self._waiting else None

    def done(self, unit: Unit, commit: Commit) -> None:
        self._listener.unit_done(unit, commit)

    def failed(self, unit: Unit, error: UnitError) -> None:
        attempts = self._attempts[unit.index] = self._attempts.get(unit.index, 0) + 1
        if attempts < MAX_ATTEMPTS:
            log.warning("unit %d failed (%s); it is tried again", unit.index, error.message)
            self._waiting.appendleft(unit)
            return
        self.failures[unit.index] = error
        self._listener.unit_failed(unit, error, attempts)


def _run_inline(stage: Stage, device: Device, queue: _Queue) -> None:
    device.restrict_environment()
    with logging_to(stage.dir.rank_log(0)), Worker(stage, 0, device.kind) as worker:
        while unit := queue.take():
            outcome = worker.run(unit)
            if isinstance(outcome, Commit):
                queue.done(unit, outcome)
            else:
                queue.failed(unit, outcome)


@dataclass
class _Rank:
    """A worker process as the driver sees it."""

    number: int
    process: SpawnProcess
    connection: Connection
    ready: bool = False
    unit: Unit | None = None


@dataclass
class _Pool:
    """The driver's side: hands out units, hears the outcomes, replaces ranks that die."""

    stage: Stage
    devices: list[Device]
    queue: _Queue
    ranks: dict[int, _Rank] = field(default_factory=dict)
    failed_starts: int = 0

    def run(self) -> None:
        try:
            for number in range(len(self.devices)):
                self._start(number)
            while self.ranks:
                self._listen()
        finally:
            self._end_all()

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank_main,
            args=(self.stage, number, self.devices[number], theirs),
            name=f"sharmill-rank-{number}",
        )
        process.start()
        theirs.close()
        self.ranks[number] = _Rank(number, process, ours)

    def _listen(self) -> None:
        by_handle: dict[Any, _Rank] = {}
        for rank in self.ranks.values():
            by_handle[rank.connection] = rank
            by_handle[rank.process.sentinel] = rank
        # A rank's last message is taken before its death: it may have committed the unit.
        heard = {id(by_handle[handle]): by_handle[handle] for handle in wait(list(by_handle))}
        for rank in heard.values():
            try:
                message = rank.connection.recv() if rank.connection.poll() else None
            except (EOFError, OSError):
                message = None
            if message is not None:
                self._hear(rank, message)
            elif not rank.process.is_alive() or rank.connection.closed:
                self._bury(rank)
            else:
                rank.process.join(_SECONDS_TO_END)

    def _hear(self, rank: _Rank, message: Any) -> None:
        if isinstance(message, (ConfigError, FatalError)):
            raise message
        if isinstance(message, Commit):
            assert rank.unit is not None
            self.queue.done(rank.unit, message)
        elif isinstance(message, UnitError):
            assert rank.unit is not None
            self.queue.failed(rank.unit, message)
        else:
            assert message == _READY
            rank.ready = True
            self.failed_starts = 0
        rank.unit = self.queue.take()
        if rank.unit is None:
            self._dismiss(rank)
        else:
            rank.connection.send(rank.unit)

    def _dismiss(self, rank: _Rank) -> None:
        rank.connection.send(None)
        rank.process.join()
        del self.ranks[rank.number]

    def _bury(self, rank: _Rank) -> None:
        rank.process.join()
        how = _describe_exit(rank.process.exitcode)
        log.warning("rank %d %s", rank.number, how)
        del self.ranks[rank.number]
        if not rank.ready:
            self._count_failed_start(how)
        if rank.unit is not None:
            message = f"the worker process {how}; its log is {self.stage.dir.rank_log(rank.number)}"
            self.queue.failed(rank.unit, UnitError(rank.unit.index, message, message))
        self._start(rank.number)

    def _count_failed_start(self, how: str) -> None:
        self.failed_starts += 1
        if self.failed_starts >= MAX_ATTEMPTS:
            raise FatalError(
                f"{self.stage.name}: worker processes cannot start: the last one {how}; see {self.stage.dir.logs}"
            )

    def _end_all(self) -> None:
        for rank in self.ranks.values():
            rank.process.terminate()
        for rank in self.ranks.values():
            rank.process.join(_SECONDS_TO_END)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
        self.ranks.clear()


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was ended by signal {signal.Signals(-exitcode).name}"
    return f"ended with exit status {exitcode}"


def _rank_main(stage: Stage, number: int, device: Device, connection: Connection) -> None:
    """A rank's process. The driver decides when it ends, so Ctrl-C, which reaches the whole group, is left to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    device.restrict_environment()
    redirect_output(stage.dir.rank_log(number))
    _die_with_driver()
    with logging_to(stage.dir.rank_log(number)):
        try:
            with Worker(stage, number, device.kind) as worker:
                connection.send(_READY)
                while (unit := connection.recv()) is not None:
                    connection.send(worker.run(unit))
        except (ConfigError, FatalError) as error:
            log.exception("rank %d stops", number)
            connection.send(error)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            raise


def _die_with_driver() -> None:
    """Ends this process when the driver is gone: nobody would hear of its work, and a relaunch has its own ranks."""
    driver = multiprocessing.parent_process()
    assert driver is not None

    def watch() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-driver", daemon=True).start()
