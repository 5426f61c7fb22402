"""The worker's side of the Ray executor: an actor is a supervisor of one rank."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import sharmill
from sharmill.engine.host import limit_cores
from sharmill.engine.stage import Stage
from sharmill.errors import ConfigError, DeviceError, FatalError, SharmillError
from sharmill.executors.devices import Device
from sharmill.executors.logs import logging_to
from sharmill.executors.ray import actors
from sharmill.executors.supervisor import Supervisor

log = logging.getLogger(__name__)

# A network file system may show a new file on other nodes some seconds late.
_SECONDS_UNTIL_VISIBLE = 30.0


@dataclass(frozen=True)
class ActorStart:
    """Values that an actor is started with.

    Attributes:
        stage: pickled; unpacking it imports its modules.
        folder: what relative paths are meant from; None where the driver itself has only a copy that Ray made.
        must_exist: the folders of the plan's token, which the driver has made in the run directory and where the
            output goes: a node may see one of the two disks only.
        log: where the supervisor logs.
        version: the driver's version of sharmill.
        given_up: places that are not waited for any more.
    """

    stage: bytes
    number: int
    device: str
    cores: int
    folder: Path | None
    must_exist: tuple[Path, ...]
    log: Path
    version: str
    given_up: frozenset[str] = frozenset()


class RankActor:
    """A supervisor of one rank. An error is returned and not raised, since Ray would wrap it."""

    def __init__(self, start: ActorStart) -> None:
        self._start = start

    def run(self) -> FatalError | None:
        """Do units until the stage has ended, or return why this rank can do none."""
        start = self._start
        try:
            self._check_node()
            limit_cores(start.cores)
            with logging_to(start.log):
                stage: Stage = pickle.loads(start.stage)
                supervisor = Supervisor(
                    stage, [Device.given(start.device)], [start.number],
                    join_seconds=stage.lease_seconds, beat_seconds=5.0,
                )  # fmt: skip
                supervisor.run()
                return self._as_answer(supervisor.error)
        except (ConfigError, FatalError) as error:
            log.warning("rank %d stops", start.number, exc_info=error)
            return self._as_answer(error)

    def answer(self) -> None:
        """Return, which says that the actor is there."""

    def _check_node(self) -> None:
        """Refuse a node that differs from the driver, which would otherwise show as output that has vanished."""
        start, host = self._start, socket.gethostname()
        if sharmill.__version__ != start.version:
            raise _unlike(f"node {host} has sharmill {sharmill.__version__}, but the driver has {start.version}")
        try:
            if start.folder is not None:
                os.chdir(start.folder)
        except OSError as error:
            raise _unlike(
                f"node {host} does not have the driver's folder {start.folder} ({error.strerror}): "
                "work in one that all nodes share"
            ) from error
        # A node that is given up had its time.
        deadline = time.monotonic() + (0.0 if _place() in start.given_up else _SECONDS_UNTIL_VISIBLE)
        for folder in start.must_exist:
            while not folder.is_dir():
                if time.monotonic() > deadline:
                    raise _does_not_see(folder)
                time.sleep(0.5)

    def _as_answer(self, error: SharmillError | None) -> FatalError | None:
        """Return an error made anew: what a library attached to it may not be picklable."""
        gone = [folder for folder in self._start.must_exist if not folder.is_dir()]
        if error is not None and gone:
            # The driver knows its plan. If that is the present one, this node has lost sight of it.
            return _does_not_see(*gone)
        if error is not None and error.code == "unlike_nodes":
            return _unlike(str(error))
        if isinstance(error, DeviceError):
            return DeviceError(str(error), place=error.place, code=error.code)
        return None if error is None else FatalError(str(error), code=error.code)


def _does_not_see(*folders: Path) -> DeviceError:
    return _unlike(
        f"node {socket.gethostname()} does not see {' and '.join(map(str, folders)) or 'its plan for some time'}: "
        "run_dir and dataset_dir must lie on file systems that all nodes share"
    )


def _unlike(message: str) -> DeviceError:
    return DeviceError(message, place=_place(), code="unlike_nodes")


def _place() -> str:
    """Return the node in words."""
    return f"node {socket.gethostname()} ({actors.this_node()[:8]})"
