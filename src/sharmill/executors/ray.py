"""The Ray executor: ranks are actors on the nodes of a cluster.

Each actor is the supervisor of one rank, which claims its units itself. While units are missing, the driver requests
one more actor than the cluster has room for. Nodes that join later are therefore used, an autoscaler sees the demand,
and actors that died with their process or node are replaced. An actor whose GPU or node cannot be used keeps its place,
so that Ray does not give this place to another actor.
"""

import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_fixed,
)

import sharmill
from sharmill.config import Config, Positive
from sharmill.engine.attempts import MAX_FAILURES
from sharmill.engine.fence import is_current, require_current
from sharmill.engine.progress import mark_ended
from sharmill.engine.stage import StageRun, versions
from sharmill.engine.unit import Unit
from sharmill.engine.watch import Watcher
from sharmill.errors import ConfigError, DeviceError, FatalError, SharmillError, one_line
from sharmill.executors.local import Check, ConfiguredExecutor
from sharmill.executors.supervisor import Device, logging_to, pickle_stage, supervise_rank
from sharmill.files.host import limit_cores
from sharmill.files.regular import open_regular
from sharmill.files.staging import remove_dead_attempts, token_staging

log = logging.getLogger(__name__)

# A gRPC client starts with the HTTP/2 preface and a SETTINGS frame. The server answers with its own SETTINGS frame. The
# fourth byte of a frame is its type.
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP2_SETTINGS: Final = b"\4"
_PROBE_SECONDS: Final = 20.0


def _import_ray() -> Any:
    """Import and return Ray, which is optional.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "executor.kind=ray needs Ray, which is not installed: pip install 'sharmill[ray]'", code="missing_package"
        ) from error
    return ray


@dataclass(frozen=True)
class RayExecutor(ConfiguredExecutor):
    """Runs a stage on at most ``workers`` actors of a Ray cluster (``auto``: as many as there is room for).

    Each actor gets ``cores`` cores. If the stage uses GPUs, each actor also gets one GPU: with ``device: auto`` only if
    the cluster has GPUs; with ``cuda`` always, for clusters that add GPU nodes only on demand.
    """

    kind: str = field(default="ray", kw_only=True)
    address: str = "auto"
    """Address of the Ray cluster."""
    cores: Positive = 1
    """Number of cores reserved for each rank."""

    @classmethod
    def examine(cls) -> Iterator[Check]:
        yield Check("Ray", f"{versions('ray')['ray']}, RAY_ADDRESS is {os.environ.get('RAY_ADDRESS', 'not set')}")

    def check(self, config: Config) -> None:
        """Raise ConfigError if Ray is not installed, or if relative paths refer to a folder that Ray removes."""
        _import_ray()
        paths = {"run_dir": config.run_dir, "dataset_dir": config.dataset_dir}
        for number, source in enumerate(config.sources):
            paths |= {f"sources[{number}].{key}": path for key, path in source.paths().items()}
        relative = [f"{key} is {path!r}" for key, path in paths.items() if not Path(path).is_absolute()]
        if relative and _is_in_copy():
            raise ConfigError(
                f"{', '.join(relative)}: relative paths cannot be used, since a Ray job runs in a temporary copy of "
                "the working directory; use absolute paths on a file system that all nodes share, or pass --root DIR "
                "to jobs/ray_job.py to resolve them against DIR",
                code="bad_config_value",
            )

    def num_ranks(self, stage: StageRun, units: Sequence[Unit]) -> int:
        connect(self.address)
        if self.workers != "auto":
            return int(self.workers)
        return _count_places(self.cores, self._gpus(stage)) or len(units)

    def supervise(self, stage: StageRun, numbers: Sequence[int], watcher: Watcher) -> None:
        actors = _Actors(stage, watcher, self.workers, self.cores, self._gpus(stage), numbers[0])
        try:
            with logging_to(stage.dir.driver_log, stage.options.log_level):
                actors.run()
        finally:
            # No actor is left that could remove its own temporary files.
            remove_dead_attempts(token_staging(stage.root, stage.token))

    def _gpus(self, stage: StageRun) -> int:
        """Return the number of GPUs that a rank gets."""
        may_use_gpus = stage.resource == "gpu" and self.device != "cpu"
        return int(may_use_gpus and (self.device == "cuda" or _count_places(self.cores, 1) > 0))


def _count_places(cores: int, gpus: int) -> int:
    """Return the number of ranks that would fit on the present nodes if nothing else were running there."""
    wanted = {"CPU": cores, "GPU": gpus} if gpus else {"CPU": cores}
    nodes = [node["Resources"] for node in _import_ray().nodes() if node["Alive"]]
    return sum(min(int(node.get(name, 0) // number) for name, number in wanted.items()) for node in nodes)


class RankActor:
    """The supervisor of one rank, on a node of the cluster."""

    def run(
        self, version: str, folder: Path | None, pickled: bytes, number: int, device: str, cores: int
    ) -> SharmillError | None:
        """Process units until the stage has ended, or return the error that prevents this rank from working.

        The error is returned rather than raised, because Ray would wrap an exception.

        Args:
            version: the driver's version of sharmill.
            folder: the folder to which relative paths refer; None if the driver runs in Ray's temporary copy of the
                job's working directory.
            pickled: the pickled stage; unpickling imports its modules.
            number: the number of the rank.
            device, cores: the kind of device of the rank, and its number of cores.
        """
        if sharmill.__version__ != version:
            return _unlike(f"has sharmill {sharmill.__version__}, but the driver has {version}")
        try:
            if folder is not None:
                os.chdir(folder)
        except OSError as error:
            return _unlike(
                f"does not have the driver's folder {folder} ({error.strerror}): start the driver in a folder that all "
                "nodes share"
            )
        limit_cores(cores)
        stage: StageRun = pickle.loads(pickled)
        try:
            supervise_rank(stage, Device.given(device), number, beat_seconds=5.0)
            return None
        except SharmillError as error:
            if is_current(stage):
                return error
        # The plan seems to have been replaced. If the driver finds that it was not, the disk of the run directory or of
        # the dataset is not visible on this node.
        folders = stage.ranks.path, token_staging(stage.root, stage.token)
        gone = " and ".join(str(folder) for folder in folders if not folder.is_dir())
        return _unlike(f"does not see {gone}: run_dir and dataset_dir must lie on file systems that all nodes share")

    def hold_place(self) -> None:
        """Occupy the place until the actor is killed or its node dies."""
        threading.Event().wait()


def _unlike(message: str) -> DeviceError:
    return DeviceError(f"node {socket.gethostname()} {message}", code="unlike_nodes")


@dataclass
class _Actors:
    """The actors of a stage, which the driver requests, keeps in bad places, and kills at the end.

    A place is the room for one actor on a node. It is bad if a rank cannot work there.

    Attributes:
        working: the rank number and the handle of each working actor, by Ray's reference to its call.
        holding: the same for each actor that occupies a bad place.
        given_up: the errors of ranks that cannot work in their places, by message.
        deaths: number of actors that have died since a rank was last ready.
    """

    stage: StageRun
    watcher: Watcher
    workers: int | str
    cores: int
    gpus: int
    first_number: int
    working: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    holding: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    given_up: dict[str, SharmillError] = field(default_factory=dict)
    deaths: int = 0

    def run(self) -> None:
        """Keep ranks working until the stage has ended.

        Raises:
            FatalError: no place is left in which a rank can work, or actors cannot start.
        """
        ray, pickled = _import_ray(), pickle_stage(self.stage)
        usable_at, warns_at = time.monotonic(), time.monotonic() + 60.0
        try:
            while not self.watcher.look():
                places, now = _count_places(self.cores, self.gpus), time.monotonic()
                self._request_actors(pickled, places)
                if self.watcher.num_ready or len(self.holding) < max(places, 1):
                    usable_at = now
                # If units have been completed before, wait until lost nodes, such as spot instances, are replaced.
                elif now - usable_at >= (600.0 if self.watcher.num_done else 0.0):
                    raise list(self.given_up.values())[-1]
                if now > warns_at and not self.watcher.num_ready:
                    warns_at = float("inf")
                    log.error("%s: no actor is ready yet: actors are still loading (see %s) or waiting for room in the "
                              "cluster; each needs %d cores and %d GPUs, and there is room for %d", self.stage.name,
                              self.stage.dir.logs, self.cores, self.gpus, places)  # fmt: skip
                self._collect()
            self._await_end()
        finally:
            for _, actor in [*self.working.values(), *self.holding.values()]:
                ray.kill(actor)
            # Wait before marking the ranks as ended, because an actor that is still alive would overwrite the mark with
            # its next heartbeat.
            self._await_end()
            self._mark_ended({number for number, _ in self.working.values()})

    def _await_end(self) -> None:
        """Wait until all actors have ended, but for at most ten seconds."""
        if self.working:
            _import_ray().wait(list(self.working), num_returns=len(self.working), timeout=10.0)

    def _mark_ended(self, numbers: set[int]) -> None:
        """Write the last heartbeat of dead ranks, so that their units are released without waiting for a lease."""
        for rank in self.watcher.ranks:
            if rank.rank in numbers and not rank.ended:
                mark_ended(self.stage.ranks.progress, rank.owner)

    def _request_actors(self, pickled: bytes, places: int) -> None:
        """Request the missing actors, with replacements for actors in bad places."""
        most = places + 1 - len(self.holding) if self.workers == "auto" else int(self.workers)
        kind = _import_ray().remote(num_cpus=self.cores, num_gpus=self.gpus, scheduling_strategy="SPREAD")(RankActor)
        folder = None if _is_in_copy() else Path.cwd()
        for _ in range(min(most, len(self.watcher.notes.missing)) - len(self.working)):
            # Do not reuse the numbers of actors in bad places, whose slots are excluded, or the numbers of other
            # drivers' ranks.
            taken = {number for number, _ in [*self.working.values(), *self.holding.values()]}
            taken |= {rank.rank for rank in self.watcher.ranks if not rank.ended}
            number = next(number for number in count(self.first_number) if number not in taken)
            actor = kind.remote()
            call = actor.run.remote(
                sharmill.__version__, folder, pickled, number, "cuda" if self.gpus else "cpu", self.cores
            )
            self.working[call] = number, actor

    def _collect(self) -> None:
        """Wait up to two seconds for calls to end, and handle the calls that have ended.

        Raises:
            FatalError: one actor after another dies, and no rank is ready.
        """
        ray, calls = _import_ray(), self.working | self.holding
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=2.0)
        for call in ended:
            number, actor = calls[call]
            self.working.pop(call, None)
            self.holding.pop(call, None)
            self._mark_ended({number})
            try:
                error = ray.get(call)
            except ray.exceptions.RayTaskError as failed:
                error = self._cannot_start(failed.cause)
            except ray.exceptions.RayError as died:
                error = None
                log.warning("the actor of rank %d died: %s", number, died)
                # Tolerate several deaths, because Ray keeps placing actors on a dead node for some seconds.
                self.deaths = 0 if self.watcher.num_ready else self.deaths + 1
                if self.deaths >= MAX_FAILURES * len(calls):
                    raise self._cannot_start(died) from died
            if error is None:
                # An actor that Ray cannot reach may still run, and must not continue beside its replacement.
                ray.kill(actor)
                continue
            # Check the plan here, because a rank cannot tell a replaced plan from a disk that is missing on its node.
            require_current(self.stage)
            log.error("rank %d is given up, and its place in the cluster stays occupied: %s", number, error)
            self.given_up[str(error)] = error
            self.watcher.given_up = list(self.given_up)
            self.holding[actor.hold_place.remote()] = number, actor

    def _cannot_start(self, error: Exception) -> FatalError:
        # Ray's messages end with the reason.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"
        return FatalError(
            f"{self.stage.name}: actors cannot start: {reason}; see {self.stage.dir.logs}. "
            "Every node needs the same versions of Python, Ray and sharmill as the driver",
            code="no_ranks",
        )


def connect(address: str) -> None:
    """Connect to the cluster as a driver, unless this process is connected already.

    Raises:
        ConfigError: no cluster is running at ``address``.
    """
    ray = _import_ray()
    if ray.is_initialized():
        return
    # Retry, because a busy or new cluster may need longer than Ray waits. A ConnectionError means that no cluster
    # exists.
    retrying = Retrying(
        stop=stop_after_attempt(3), wait=wait_fixed(5),
        retry=retry_if_exception_type(RuntimeError), before_sleep=lambda state: ray.shutdown(), reraise=True,
    )  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or _read_address()
        _probe(address)
        retrying(ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = "no Ray cluster is running here" if address == "auto" else f"there is no Ray cluster at {address}"
        raise ConfigError(
            f"{where} ({one_line(error)}); start a cluster with `ray start --head`, "
            "submit the run with `ray job submit`, or name a cluster with executor.address=HOST:PORT",
            code="no_cluster",
        ) from error
    finally:
        # Restore the handler of SIGTERM, since Ray's own would turn a clean end into exit status 15.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _probe(address: str) -> None:
    """Check that a gRPC server answers, if an address names a host and a port.

    Ray itself would try for minutes, and then end this process.

    Raises:
        OSError: no gRPC server answers at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal() or "://" in host:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS) as probe:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            probe.sendall(_HTTP2_HELLO)
            # Read until the whole frame header has arrived.
            header, ends = b"", time.monotonic() + _PROBE_SECONDS
            while len(header) < 9 and (part := probe.recv(9 - len(header))):
                header += part
                probe.settimeout(max(0.01, ends - time.monotonic()))
            if header[3:4] != _HTTP2_SETTINGS:
                raise OSError("another service is listening on this port")


def _read_address() -> str:
    """Return the address of the cluster that this user has started on this machine.

    Ray itself would trust a file in a folder that every user can write to, or any process with the name of one of its
    own processes. That is unsafe, because a driver runs code that its cluster sends.

    Raises:
        ConfigError: the cluster belongs to another user.
        OSError, ValueError: there is no cluster.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder) / "ray/ray_current_cluster"
    with open_regular(file, follow_links=False) as stream:
        owner, address = os.fstat(stream.fileno()).st_uid, stream.read(300).decode("ascii").strip()
    if owner not in (os.getuid(), 0):
        raise ConfigError(
            f"{file} belongs to another user, and names that user's cluster: to use that cluster, set "
            f"executor.address={address!r}",
            code="no_cluster",
        )
    return address


def _is_in_copy() -> bool:
    """Return True if the current folder is Ray's temporary copy of a job's working directory."""
    return "working_dir_files" in Path.cwd().parts
