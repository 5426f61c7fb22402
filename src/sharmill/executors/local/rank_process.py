"""The worker's side of the local executor: what runs in the process of a rank.

It talks to the driver over one pipe. Up go answers, the first of which is ``Ready``; down come pairs of a unit and the
unit that will follow, if that is known; then None.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
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
from sharmill.ports import process
from sharmill.processes import limit_cores

log = logging.getLogger(__name__)


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
    process.set_handler(signal.SIGINT, signal.SIG_IGN)
    process.set_handler(signal.SIGTERM, signal.SIG_DFL)
    start.device.restrict_environment()
    limit_cores(start.cores)
    _end_with_server()
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


def _end_with_server() -> None:
    """End this process when the driver is gone: nobody would know of its work, and a relaunch has its own ranks.

    The fork server, which is its parent, ends with the driver. Where it can, the kernel ends this process then; the
    server may have ended before it was asked.
    """
    server = multiprocessing.parent_process()
    assert server is not None

    def watch() -> None:
        server.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-server", daemon=True).start()


def set_up_server(log: Path) -> None:
    """Prepare the process that ranks are forked from, so that its imports print to a log and start no CUDA."""
    # Otherwise torch asks CUDA itself whether there are GPUs, after which no forked process can use them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    redirect_output(log)
