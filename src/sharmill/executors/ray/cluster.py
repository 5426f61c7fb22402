"""The Ray cluster as the driver sees it: connecting to it, and how many ranks have room on it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tenacity import Retrying, before_sleep_log, retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from sharmill.config import Config
from sharmill.errors import ConfigError, FatalError
from sharmill.executors.ray import actors
from sharmill.executors.ray.actors import import_ray
from sharmill.storage import open_regular

log = logging.getLogger(__name__)

# Ray unpacks the working directory of a job below a folder of this name.
_WORKING_DIR_COPIES = "working_dir_files"
_SECONDS_TO_CONNECT = 20.0
_SECONDS_BETWEEN_TRIES = 5.0
_SECONDS_TO_STOP = 60.0
_ADDRESS_CHARACTERS = 300


@dataclass(frozen=True)
class RankNeeds:
    """Resources that Ray sets aside for one rank."""

    cores: int
    gpus: int

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def capacity(self) -> int:
        """Return the number of ranks that fit on the present nodes, were nothing else running on them."""
        nodes = actors.nodes()
        room = [int(node.get("CPU", 0) // self.cores) for node in nodes]
        if self.gpus:
            room = [min(cores, int(node.get("GPU", 0) // self.gpus)) for cores, node in zip(room, nodes, strict=True)]
        return sum(room)


def connect(address: str) -> None:
    """Join the cluster as a driver, unless this process has already.

    Raises:
        ConfigError: there is no cluster at ``address``.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    address = _find_address() if address == "auto" else address
    _require_listener(address)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _join(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, error) from error
    finally:
        # Ray installs its own, which would turn a clean end into exit status 15.
        if in_main_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@retry(
    stop=stop_after_attempt(3),
    wait=wait_fixed(_SECONDS_BETWEEN_TRIES),
    # Not ConnectionError, which means that nothing is there.
    retry=retry_if_exception_type(RuntimeError),
    before_sleep=before_sleep_log(log, logging.WARNING),
    reraise=True,
)
def _join(address: str) -> None:
    """Join, with patience: a cluster that has just been started, or is busy, may take longer than Ray waits."""
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except RuntimeError:
        ray.shutdown()
        raise


def _find_address() -> str:
    """Return the address in RAY_ADDRESS, or of the cluster that this user has started on this machine.

    Ray itself would take whatever stands in a file of a folder that every user can write to, or whatever process is
    called like one of its own; and a driver runs what its cluster sends.

    Raises:
        ConfigError: there is none, or it is another user's.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder) / "ray/ray_current_cluster"
    try:
        with open_regular(file, follow_links=False) as stream:
            owner, data = os.fstat(stream.fileno()).st_uid, stream.read(_ADDRESS_CHARACTERS).strip()
    except (OSError, ValueError) as error:
        raise _no_cluster("auto", error) from error
    address = data.decode("ascii", "replace")
    if owner not in (os.getuid(), 0):
        raise ConfigError(
            f"{file} belongs to another user, whose cluster it names: if you mean that one, say executor.address="
            f"{address!r}",
            code="no_cluster",
        )
    if not data.isascii():
        raise _no_cluster("auto", ValueError(f"{file} holds no address"))
    return address


def _require_listener(address: str) -> None:
    """Ask before Ray does, which goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> ConfigError:
    where = "no Ray cluster is running here" if address == "auto" else f"there is no Ray cluster at {address}"
    return ConfigError(
        f"{where} ({' '.join(str(error).split())[:200]}); start one with `ray start --head`, "
        "submit with `ray job submit`, or name one with executor.address=HOST:PORT",
        code="no_cluster",
    )


def in_working_dir_copy() -> bool:
    """Return True if the current folder is a copy that Ray made of a job's working directory, and will remove."""
    return _WORKING_DIR_COPIES in Path.cwd().parts


def check_paths(config: Config) -> None:
    """Refuse paths below the copy of a job's working directory: what is written there is lost with the copy.

    Raises:
        ConfigError: a path of the configuration is relative, and the current folder is such a copy.
    """
    if not in_working_dir_copy():
        return
    paths = {"run_dir": config.run_dir, "dataset_dir": config.dataset_dir}
    for number, source in enumerate(config.sources):
        paths |= {f"sources[{number}].{key}": path for key, path in source.paths().items()}
    for key, path in paths.items():
        if not Path(path).is_absolute():
            raise ConfigError(
                f"{key} is {path!r}, but a Ray job runs in a copy of the working directory that is removed afterwards: "
                "give absolute paths on a file system that all nodes share, or the folder that relative paths are "
                "meant from with `jobs/ray_job.py --root DIR`",
                code="bad_config_value",
            )


def stop_job(submission_id: str, address: str | None) -> None:
    """Tell a Ray job to end, as ``ray job stop`` does, and wait for it: its driver gets a SIGTERM, and its ranks end.

    Ray kills a driver that has not ended within three seconds: its lock stays behind, and a later run removes it.

    Args:
        address: of the dashboard, as ``ray job submit`` takes it; None for Ray's own settings.

    Raises:
        ConfigError: there is no such dashboard, or it knows no such job.
        FatalError: the job goes on.
    """
    import_ray()
    from ray.job_submission import JobSubmissionClient

    # The dashboard of a busy head answers late.
    tries = Retrying(
        retry=retry_if_exception_type(ConnectionError), stop=stop_after_attempt(3), wait=wait_fixed(2), reraise=True
    )
    if address is not None:
        # Else Ray takes these before what it is told.
        for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            os.environ.pop(name, None)
    try:
        client = tries(lambda: JobSubmissionClient(address))
        tries(lambda: client.stop_job(submission_id))
        deadline = time.monotonic() + _SECONDS_TO_STOP
        while not tries(lambda: client.get_job_status(submission_id)).is_terminal():
            if time.monotonic() > deadline:
                message = f"Ray job {submission_id} goes on {_SECONDS_TO_STOP:.0f} s after it was told to end"
                raise FatalError(message, code="locked")
            time.sleep(0.2)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray job {submission_id} cannot be stopped from here: {' '.join(str(error).split())}; name the dashboard "
            f"of its cluster with --ray-address, or: ray job stop {submission_id}",
            code="no_cluster",
        ) from error
