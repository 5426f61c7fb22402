"""The worker's side of the local executor: what runs in the process of a rank.

It talks to the driver over one pipe. Up go answers, the first of which is ``Ready``; down come pairs of a unit and the
unit that will follow, if that is known; then None.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.worker import Worker
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.devices import Device
from sharmill.executors.driven_rank import Advanced, Ready, as_answer
from sharmill.executors.logs import logging_to, redirect_output
from sharmill.processes import limit_cores

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankStart:
    """Values that the process of a rank is started with.

    ``stage`` is pickled: it is unpacked, which imports its modules, once the log and the device are in place.
    """

    stage: bytes
    number: int
    device: Device
    cores: int
    log: Path


def rank_main(connection: Connection, start: RankStart) -> None:
    """Run a rank. The driver decides when it ends, so Ctrl-C, which reaches the whole group, is left to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start.device.restrict_environment()
    limit_cores(start.cores)
    _die_with_driver()
    try:
        redirect_output(start.log)
        with logging_to(start.log):
            _work(start, connection)
    except (ConfigError, FatalError) as error:
        connection.send(as_answer(error))


def _work(start: RankStart, connection: Connection) -> None:
    stage: Stage = pickle.loads(start.stage)

    def report(unit: Unit, done: float) -> None:
        connection.send(Advanced(done))

    try:
        with Worker(stage, start.number, start.device.kind, report) as worker:
            connection.send(Ready())
            while (units := connection.recv()) is not None:
                connection.send(worker.run(*units))  # after a broken device the driver ends this process
    except (ConfigError, FatalError):
        log.warning("rank %d stops", start.number, exc_info=True)
        raise


def _die_with_driver() -> None:
    """End this process when the driver is gone: nobody would know of its work, and a relaunch has its own ranks."""
    if sys.platform == "linux":
        # The kernel ends this process even in the middle of native code that keeps Python's threads from running.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def watch() -> None:
        driver.join()
        os._exit(1)

    # The driver may have died before the kernel was asked.
    threading.Thread(target=watch, name="watch-driver", daemon=True).start()
