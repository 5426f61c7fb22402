"""The worker's side of the Ray executor: what runs in the process of an actor."""

from __future__ import annotations

import logging
import os
import pickle
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import sharmill
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.engine.worker import Worker
from sharmill.errors import ConfigError, DeviceError, FatalError, SharmillError
from sharmill.executors.devices import Device
from sharmill.executors.driven_rank import Answer, Ready, as_answer
from sharmill.executors.logs import logging_to, redirect_output
from sharmill.executors.ray import actors
from sharmill.ports import clock, process
from sharmill.processes import limit_cores

log = logging.getLogger(__name__)

# A network file system may show a new file on other nodes some seconds late.
_SECONDS_UNTIL_VISIBLE = 30.0


@dataclass(frozen=True)
class ActorStart:
    """Values that an actor is started with.

    Attributes:
        stage: pickled; unpacking it imports its modules, once the log is in place.
        folder: what relative paths are meant from; None where the driver itself has only a copy that Ray made.
        must_exist: the folders of the plan's token, which the driver has made in the run directory and where the
            output goes: a node may see one of the two disks only.
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
    """One rank. An error that ends the stage is returned and not raised, since Ray would wrap it."""

    def __init__(self, start: ActorStart) -> None:
        self._start = start
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def set_up(self) -> Answer:
        """Load the model; the first call."""
        start = self._start
        try:
            self._check_node()
            if start.device == "cpu":
                Device().restrict_environment()
            limit_cores(start.cores)
            redirect_output(start.log)
            self._stack.enter_context(logging_to(start.log))
            stage: Stage = pickle.loads(start.stage)
            worker = Worker(stage, start.number, start.device, seconds_until_seen=stage.seconds_until_seen)
            self._worker = self._stack.enter_context(worker)
        except (ConfigError, FatalError) as error:
            return self._stop(error)
        return Ready()

    def run(self, unit: Unit, following: Unit | None) -> Answer:
        """Try a unit once."""
        assert self._worker is not None
        try:
            return self._worker.run(unit, following)
        except (ConfigError, FatalError) as error:
            return self._stop(error)

    def answer(self) -> None:
        """Return, which says that the actor is there."""

    def close(self) -> None:
        """End the process once the progress record says so."""
        self._stack.close()
        actors.end_this()

    def _check_node(self) -> None:
        """Refuse a node that differs from the driver, which would otherwise show as output that has vanished."""
        start, host = self._start, process.gethostname()
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
        deadline = clock.monotonic() + (0.0 if _place() in start.given_up else _SECONDS_UNTIL_VISIBLE)
        for folder in start.must_exist:
            while not folder.is_dir():
                if clock.monotonic() > deadline:
                    raise _does_not_see(folder)
                clock.sleep(0.5)

    def _stop(self, error: ConfigError | FatalError) -> SharmillError:
        log.warning("rank %d stops", self._start.number, exc_info=error)
        if error.code == "superseded_plan":
            # The driver knows its plan. If that is the present one, this node has lost sight of it.
            gone = [folder for folder in self._start.must_exist if not folder.is_dir()]
            return _does_not_see(*gone)
        if error.code == "unlike_nodes":
            return _unlike(str(error))
        return as_answer(error)


def _does_not_see(*folders: Path) -> DeviceError:
    return _unlike(
        f"node {process.gethostname()} does not see {' and '.join(map(str, folders)) or 'its plan for some time'}: "
        "run_dir and dataset_dir must lie on file systems that all nodes share"
    )


def _unlike(message: str) -> DeviceError:
    return DeviceError(message, place=_place(), code="unlike_nodes")


def _place() -> str:
    """Return the node in words."""
    return f"node {process.gethostname()} ({actors.this_node()[:8]})"
