"""Locks on folders that several hosts share; each says who holds it.

The lock on a folder is the folder ``.sharmill-lock`` in it, with one file of a unique name: the record of its owner. A
process enters by renaming a folder of its own to that name, which succeeds only where none or an empty one lies. It
leaves by removing its file, and so is the file of a dead owner removed: by its name, which no later owner's file has.

Processes under the same kernel as the owner see whether it has ended. For others it is alive while its file is touched:
they watch its time for a whole lease, by their own clocks, before they take the lock over. So no wrong clock ends the
lock of a live process. ``flock`` is not needed: on some file systems it is missing, or holds on one node only.

The leases of the library filelock are taken over only where two names can be exchanged, which Lustre and NFS cannot.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import msgspec
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from sharmill.errors import ConfigError, FatalError
from sharmill.files.host import interrupt, is_gone, state_and_start, this_kernel, user_name
from sharmill.files.storage import open_regular, stopping_errors

log = logging.getLogger(__name__)

LOCK_NAME = ".sharmill-lock"
LEASE_SECONDS = 120.0
# Words before the number of the job that a process belongs to.
SLURM_JOB: Final = "SLURM job "
RAY_JOB: Final = "Ray job "
SECONDS_TO_WAIT_FOR_INDEX = 600.0
_TOUCHES_PER_LEASE = 6
_POLL_SECONDS = 0.25
_SECONDS_UNTIL_SAID = 5.0


class LockOwner(msgspec.Struct, kw_only=True):
    """The process that holds a lock, as its record describes it.

    ``kernel`` says where ``pid`` means this process, and ``started`` tells it from a later one of the same number.
    """

    host: str = "an unknown host"
    pid: int = 0
    user: str = "an unknown user"
    job: str = ""
    since: str = "an unknown time"
    kernel: str = ""
    started: int = 0
    lease_seconds: float = LEASE_SECONDS

    @property
    def is_here(self) -> bool:
        """True for a process under the same kernel as this, which may have ended."""
        return self.kernel == this_kernel()

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return f"process {self.pid} of {self.user} on {self.host}{job}, since {self.since}"


class _Seen(NamedTuple):
    """The record of an owner as it was found: its file, and when that was touched."""

    file: Path
    touched: int
    owner: LockOwner


def _read(lock: Path, lease_seconds: float) -> _Seen | None:
    """Read the record in a lock's folder; None if there is none.

    Args:
        lease_seconds: of an owner whose record says nothing.
    """
    file = lock
    try:
        file = next(path for path in lock.iterdir() if path.name.startswith("owner-"))
        # Opening makes NFS ask the server for the time too.
        with open_regular(file, follow_links=False) as stream:
            touched, data = os.fstat(stream.fileno()).st_mtime_ns, stream.read(1 << 16)
    except (FileNotFoundError, StopIteration):
        return None
    except (NotADirectoryError, ValueError) as error:
        message = f"{file} is not sharmill's: it is a link, or no regular file; remove it"
        raise ConfigError(message, code="locked") from error
    try:
        owner = msgspec.json.decode(data, type=LockOwner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        owner = LockOwner(lease_seconds=lease_seconds)  # torn by a power cut
    return _Seen(file, touched, owner)


def lock_owner(folder: Path) -> LockOwner | None:
    """Return who holds the lock on a folder, as far as its record says; None where nobody does."""
    seen = _read(folder / LOCK_NAME, LEASE_SECONDS)
    return None if seen is None else seen.owner


class FolderLock:
    """The lock on a folder, held as long as the context lasts. The folder must exist and be writable.

    Args:
        folder: nothing is left in it afterwards.
        wait_seconds: how long to wait for another process; longer only while it is not known to be alive.
        lease_seconds: how long others wait for a heartbeat of this process before they take the lock over, and this
            process for the record of an owner.

    Raises:
        ConfigError: another process holds the lock; the message says which one.
        FatalError: the lock cannot be written; or, at the end, another process has taken it over. That interrupts this
            process.

    Example:
        >>> with FolderLock(Path("runs/librispeech"), wait_seconds=60):  # doctest: +SKIP
        ...     write_index()
    """

    def __init__(self, folder: Path, *, wait_seconds: float = 0.0, lease_seconds: float = LEASE_SECONDS) -> None:
        self.path = folder / LOCK_NAME
        self._wait_seconds = wait_seconds
        self._lease_seconds = lease_seconds
        self._is_held = False

    def __enter__(self) -> FolderLock:
        self._file = self.path / f"owner-{uuid4().hex}.json"
        self._heartbeat: tuple[Path, int] | None = None
        self._heartbeat_at = time.monotonic()
        self._is_alive = False
        self._is_lost = False
        self._leave = threading.Event()
        self._toucher = threading.Thread(target=self._keep_touching, name="sharmill-lock", daemon=True)
        with stopping_errors(self.path):
            self._wait_and_enter()
            # What processes left that were killed while they entered; nobody can enter meanwhile.
            for aside in self.path.parent.glob(f"{LOCK_NAME}.*"):
                for _ in range(2):  # a disk may fail once, and what is left then stays until the next lock
                    shutil.rmtree(aside, ignore_errors=True)
        self._is_held = True
        self._toucher.start()
        return self

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leave the folder to others as long as the context lasts; then wait for it, however long they hold it."""
        self.__exit__(None)
        self._wait_seconds = math.inf
        try:
            yield
        except BaseException:
            # The error that has ended the work is the one to be raised.
            with suppress(ConfigError, FatalError, OSError):
                self.__enter__()
            raise
        self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._is_held:
            return  # it was released, and an error came while it was waited for
        self._is_held = False
        self._leave.set()
        self._toucher.join()
        if self._is_lost or not self._file.exists():
            raise FatalError(
                f"{self._file} is gone: another process took the lock over, since this one gave no heartbeat for "
                f"{self._lease_seconds:g} s, or somebody removed it; see that nobody else is at work in "
                f"{self.path.parent}, then run the same command again",
                code="locked",
            )
        try:
            with stopping_errors(self.path):
                self._remove()
        except (FatalError, OSError) as error:
            if kind is None:
                raise
            log.info("%s", error)  # what has ended the work is to be raised

    def _wait_and_enter(self) -> None:
        began, is_said = time.monotonic(), False
        while True:
            seen = _read(self.path, self._lease_seconds)
            if seen is None and self._enter():
                return
            if self._has_ended(seen):
                if seen is None:
                    message = f"{self.path} has files of nobody's; remove it if no sharmill process is at work there"
                    raise ConfigError(message, code="locked")
                log.info("%s: its owner has ended: %s", self.path, seen.owner)
                seen.file.unlink(missing_ok=True)
                continue
            waited = time.monotonic() - began
            if seen is not None and self._is_alive and waited >= self._wait_seconds:
                raise ConfigError(
                    f"another sharmill process is at work in {self.path.parent}: {seen.owner} (lock: {seen.file}); "
                    "wait for it or end it first",
                    code="locked",
                )
            if not is_said and waited > _SECONDS_UNTIL_SAID:
                is_said = True
                log.warning("waiting for %s to leave %s", seen and seen.owner, self.path.parent)
            time.sleep(_POLL_SECONDS)

    def _has_ended(self, seen: _Seen | None) -> bool:
        """Return True if the owner has ended, or gave no heartbeat for a lease, and note if it is known to be alive.

        A folder that nobody owns, and that cannot be entered, is watched for a lease too: NFS may show it so for a
        while.
        """
        if seen is not None and seen.owner.is_here:
            self._is_alive = not is_gone(seen.owner.pid, seen.owner.started)
            return not self._is_alive
        heartbeat, now = (seen.file, seen.touched) if seen is not None else None, time.monotonic()
        if heartbeat != self._heartbeat:
            self._is_alive = bool(heartbeat and self._heartbeat and heartbeat[0] == self._heartbeat[0])
            self._heartbeat, self._heartbeat_at = heartbeat, now
        return now - self._heartbeat_at >= (self._lease_seconds if seen is None else seen.owner.lease_seconds)

    def _enter(self) -> bool:
        """Return False if another process was faster."""
        aside = self.path.with_name(f"{LOCK_NAME}.{uuid4().hex}")
        mode = self.path.parent.stat().st_mode
        aside.mkdir()
        try:
            # The owner of the lock removes whatever it finds beside it.
            with suppress(FileNotFoundError):
                # Whoever may write in the folder may remove a dead owner's file, whatever this process's umask.
                aside.chmod(mode & 0o777)
                file = aside / self._file.name
                file.write_bytes(msgspec.json.encode(_describe_this_process(self._lease_seconds)))
                file.chmod(mode & 0o666)
                with _occupied():
                    # Not every file system renames onto an empty folder.
                    self.path.rmdir()
                with _occupied():
                    aside.rename(self.path)
            # Asked in any case, since a server's answer to a rename may be lost.
            return self._file.exists()
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _keep_touching(self) -> None:
        while not self._leave.wait(self._lease_seconds / _TOUCHES_PER_LEASE):
            try:
                os.utime(self._file)
            except FileNotFoundError:
                if self._leave.is_set():
                    return
                self._is_lost = True
                log.error("%s is gone: this process ends, since another one may be at work", self._file)
                interrupt()
                return
            except OSError as error:
                log.warning("cannot touch %s: %s; trying again", self._file, error)

    @retry(retry=retry_if_exception_type(OSError), stop=stop_after_attempt(3), wait=wait_fixed(0.2), reraise=True)
    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        with _occupied():
            self.path.rmdir()


@contextmanager
def _occupied() -> Iterator[None]:
    """Do nothing where a folder is not there or not empty, or where another process is faster."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _describe_this_process(lease_seconds: float) -> LockOwner:
    job = ""
    if "SLURM_JOB_ID" in os.environ:
        job = SLURM_JOB + os.environ["SLURM_JOB_ID"]
    elif "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]).get("metadata", {})
        job = f"{RAY_JOB}{metadata.get('job_submission_id')}"
    return LockOwner(
        host=socket.gethostname(),
        pid=os.getpid(),
        user=user_name(),
        job=job,
        since=datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        kernel=this_kernel(),
        started=state_and_start(os.getpid())[1],
        lease_seconds=lease_seconds,
    )
