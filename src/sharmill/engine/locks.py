"""Locks on folders that several hosts share, with or without ``flock``; each says who holds it.

The lock on a folder is the folder ``.sharmill-lock`` in it, with one file of a unique name: the record of its owner. A
process enters by renaming a folder of its own to that name, which succeeds only where none or an empty one lies. It
leaves by removing its file, and so is the file of a dead owner removed: by its name, which no later owner's file has.

Processes under the same kernel as the owner see whether it has ended. For others it is alive while ``flock`` on its
file is refused, or while the file is touched: they watch its time for a whole lease, by their own clocks, before they
take the lock over. So no wrong clock ends the lock of a live process, nor does ``flock`` that one host alone sees.

The leases of the library filelock are taken over only where two names can be exchanged, which Lustre and NFS cannot.
"""

from __future__ import annotations

import errno
import fcntl
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
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from sharmill.engine.host import interrupt, is_gone, state_and_start, this_kernel, user_name
from sharmill.errors import ConfigError, FatalError
from sharmill.storage import open_regular, stopping_errors

log = logging.getLogger(__name__)

LOCK_NAME = ".sharmill-lock"
# A disk may fail once, and what is left then stays until the next lock.
_REMOVALS = 2
LEASE_SECONDS = 120.0
# Words before the number of the job that a process belongs to.
SLURM_JOB: Final = "SLURM job "
RAY_JOB: Final = "Ray job "
SECONDS_TO_WAIT_FOR_INDEX = 600.0
_TOUCHES_PER_LEASE = 6
_POLL_SECONDS = 0.25
_SECONDS_UNTIL_SAID = 5.0
# A folder that nobody owns and that cannot be entered: for a moment so on NFS, where an open file is removed.
_SECONDS_WITHOUT_OWNER = 5.0
_MOST_SECONDS_WITHOUT_OWNER = 600.0
# Lustre without ``-o flock``, FUSE, and NFS without a lock service.
_WITHOUT_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})


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


@dataclass
class _Seen:
    """The record of an owner as it was found: its file, and whether ``flock`` on it is refused."""

    file: Path
    owner: LockOwner
    touched: int
    is_locked: bool

    @classmethod
    def read(cls, lock: Path, lease_seconds: float) -> _Seen | None:
        """Read the record in a lock's folder; None where there is none.

        Args:
            lease_seconds: of an owner whose record says nothing.
        """
        file: Path | None = None
        try:
            file = next((path for path in lock.iterdir() if path.name.startswith("owner-")), None)
            # Opening makes NFS ask the server for the time too.
            stream = open_regular(file, follow_links=False) if file else None
        except FileNotFoundError:
            return None
        except (NotADirectoryError, ValueError) as error:
            message = f"{file or lock} is not sharmill's: it is a link, or no regular file; remove it"
            raise ConfigError(message, code="locked") from error
        if file is None or stream is None:
            return None
        with stream:
            touched, data = os.fstat(stream.fileno()).st_mtime_ns, os.read(stream.fileno(), 1 << 16)
            is_locked = _flock(stream.fileno(), fcntl.LOCK_SH) is False
        try:
            owner = msgspec.json.decode(data, type=LockOwner)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            owner = LockOwner(lease_seconds=lease_seconds)  # torn by a power cut
        return cls(file, owner, touched, is_locked)


def lock_owner(folder: Path) -> LockOwner | None:
    """Return who holds the lock on a folder, as far as its record says; None where nobody does."""
    seen = _Seen.read(folder / LOCK_NAME, LEASE_SECONDS)
    return None if seen is None else seen.owner


class FolderLock:
    """The lock on a folder, held as long as the context lasts. The folder must exist and be writable.

    Args:
        folder: nothing is left in it afterwards.
        wait_seconds: how long to wait for another process; longer only while it is not known to be alive.
        lease_seconds: how long others wait for a sign of life of this one before they take the lock over.

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
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        self._file = self.path / f"owner-{uuid4().hex}.json"
        self._last_sign: tuple[Path, int] | None = None
        self._last_sign_at = 0.0
        self._is_alive = False
        self._is_lost = False
        self._leave = threading.Event()
        self._toucher = threading.Thread(target=self._keep_touching, name="sharmill-lock", daemon=True)
        with stopping_errors(self.path):
            self._wait_and_enter()
            # What processes left that were killed while they entered; nobody can enter meanwhile.
            for aside in self.path.parent.glob(f"{LOCK_NAME}.*"):
                for _ in range(_REMOVALS):
                    shutil.rmtree(aside, ignore_errors=True)
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
        if self._descriptor < 0:
            return  # it was released, and an error came while it was waited for
        self._leave.set()
        self._toucher.join()
        # Before the file is removed: NFS keeps an open one under another name.
        os.close(self._descriptor)
        self._descriptor = -1
        if self._is_lost or not self._file.exists():
            raise FatalError(
                f"{self._file} is gone: another process took the lock over, since this one gave no sign of life for "
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
        began, said = time.monotonic(), False
        while True:
            seen = _Seen.read(self.path, self._lease_seconds)
            if seen is None:
                if self._enter():
                    return
                longest = min(self._wait_seconds, _MOST_SECONDS_WITHOUT_OWNER)
                enough = time.monotonic() > began + max(longest, _SECONDS_WITHOUT_OWNER)
            elif self._is_dead(seen):
                log.info("%s: its owner has ended: %s", self.path, seen.owner)
                seen.file.unlink(missing_ok=True)
                continue
            else:
                enough = self._is_alive and time.monotonic() >= began + self._wait_seconds
                if not said and time.monotonic() > began + _SECONDS_UNTIL_SAID:
                    said = True
                    log.warning("waiting for %s to leave %s", seen.owner, self.path.parent)
            if enough:
                raise ConfigError(self._describe(seen), code="locked")
            time.sleep(_POLL_SECONDS)

    def _enter(self) -> bool:
        """Return False if another process was faster."""
        aside = self.path.with_name(f"{LOCK_NAME}.{uuid4().hex}")
        mode = self.path.parent.stat().st_mode
        descriptor = -1
        aside.mkdir()
        try:
            # The owner of the lock removes whatever it finds beside it.
            with suppress(FileNotFoundError):
                # Whoever may write in the folder may remove a dead owner's file, whatever this process's umask.
                aside.chmod(mode & 0o777)
                descriptor = os.open(aside / self._file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.fchmod(descriptor, mode & 0o666)
                os.write(descriptor, msgspec.json.encode(_describe_this_process(self._lease_seconds)))
                if _flock(descriptor, fcntl.LOCK_EX) is None:
                    _warn_without_flock(self.path.parent, self._lease_seconds)
                with _occupied():
                    # Not every file system renames onto an empty folder.
                    self.path.rmdir()
                with _occupied():
                    aside.rename(self.path)
            # Asked in any case, since a server's answer to a rename may be lost.
            if self._file.exists():
                self._descriptor = descriptor
                return True
            if descriptor >= 0:
                os.close(descriptor)
            return False
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _is_dead(self, seen: _Seen) -> bool:
        if seen.owner.is_here:
            self._is_alive = not is_gone(seen.owner.pid, seen.owner.started)
            return not self._is_alive
        sign, now = (seen.file, seen.touched), time.monotonic()
        if sign != self._last_sign or seen.is_locked:
            was_touched = self._last_sign is not None and self._last_sign[0] == seen.file
            self._is_alive = seen.is_locked or was_touched
            if not self._is_alive:
                log.warning("%s: watching whether its owner is alive: %s", self.path, seen.owner)
            self._last_sign, self._last_sign_at = sign, now
        return now - self._last_sign_at >= seen.owner.lease_seconds

    def _describe(self, seen: _Seen | None) -> str:
        if seen is None:
            return f"{self.path} has files of nobody's; remove it if no sharmill process is at work there"
        return (
            f"another sharmill process is at work in {self.path.parent}: {seen.owner} (lock: {seen.file}); "
            "wait for it or end it first"
        )

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


def _flock(descriptor: int, kind: int) -> bool | None:
    """Lock an open file; return False if another process has it locked, None where the file system has no ``flock``."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_FLOCK:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextmanager
def _occupied() -> Iterator[None]:
    """Do nothing where a folder is not there or not empty, or where another process is faster."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


@cache
def _warn_without_flock(folder: Path, lease_seconds: float) -> None:
    log.warning(
        "the file system of %s has no flock: its lock is touched instead, and lasts up to %g s longer than its owner, "
        "should that be killed on another host",
        folder,
        lease_seconds,
    )


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
