"""Locks on folders that several hosts share; each lock names its owner.

The lock on a folder is the subfolder ``.sharmill-lock``, with one uniquely named file: the record of the lock's owner.
To enter, a process adds its own record and then checks for others. Unless all other owners are known to have ended, the
process removes its own record and retries later. A process leaves by removing its file. The file of a dead owner is
removed in the same way, which is safe because no later owner uses the same name.

Processes under the owner's kernel can see whether it has ended. For all others, the owner is alive as long as it
touches its file: they watch the file's time for a whole lease, by their own clocks, before they take over the lock. A
wrong clock therefore never breaks the lock of a live process. ``flock`` is not used, because on some file systems it is
missing or works on one node only.

The library filelock is not used either: taking over one of its leases requires exchanging two names atomically, which
Lustre and NFS do not support.
"""

import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import msgspec
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.files.atomic import write_new
from sharmill.files.disk import stopping_errors
from sharmill.files.host import Process, interrupt
from sharmill.files.regular import open_regular
from sharmill.files.trust import require_trusted_owner

log = logging.getLogger(__name__)

LOCK_NAME = ".sharmill-lock"
LEASE_SECONDS = 120.0
# A record with a longer or invalid lease was not written by sharmill; it is treated like a torn record.
_MAX_LEASE_SECONDS = 3600.0
_POLL_SECONDS = 0.25
# Time to wait for the lock after an error. It is short, because an interrupted command and its ranks must end within
# five seconds.
_SECONDS_AFTER_ERROR = 1.0


class LockOwner(Process, kw_only=True):
    """The process that holds or requests a lock, as described in its record."""

    since: str = "an unknown time"
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=_MAX_LEASE_SECONDS)] = LEASE_SECONDS

    def __str__(self) -> str:
        if not self.pid:
            return "a process with an incomplete record"
        return f"{super().__str__()}, since {self.since}"


def lock_owner(folder: Path) -> LockOwner | None:
    """Return the owner of the lock on a folder, according to its record; None if the folder is not locked."""
    return next((owner for owner, _ in _read_owners(folder / LOCK_NAME, LEASE_SECONDS).values()), None)


def _read_owners(lock: Path, lease_seconds: float) -> dict[Path, tuple[LockOwner, int]]:
    """Return (owner, time of the last touch in ns) for each file in the folder of a lock.

    Args:
        lease_seconds: lease of an owner whose record is incomplete.
    """
    found = {}
    try:
        require_trusted_owner(lock.parent, [lock])
        files = [path for path in lock.iterdir() if path.name.startswith("owner-")]
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise _foreign(lock) from error
    for file in files:
        try:
            # Opening the file also makes NFS ask the server for the file's modification time.
            with open_regular(file, follow_links=False) as stream:
                touched, data = os.fstat(stream.fileno()).st_mtime_ns, stream.read(1 << 16)
            owner = msgspec.json.decode(data, type=LockOwner)
        except FileNotFoundError:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            owner = LockOwner(lease_seconds=lease_seconds)  # not written yet, or torn by a power failure
        except ValueError as error:
            raise _foreign(file) from error
        found[file] = owner, touched
    return found


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is not a sharmill lock, because it is a link or not a regular file; remove it", code="locked"
    )


class FolderLock:
    """The lock on a folder, held for the duration of the context. The folder must exist and be writable.

    Args:
        folder: folder to lock; nothing is left in it afterwards.
        wait_seconds: time to wait for a process that is known to be alive; other owners are waited for until their
            lease expires.
        lease_seconds: time without a heartbeat after which others take over this lock, and time after which an owner
            with an incomplete record is considered dead.

    Attributes:
        must_end: called every few seconds while the lock is held; this process is interrupted if it returns True.

    Raises:
        ConfigError: another process holds the lock; the message names it.
        FatalError: the lock cannot be written, or another process has taken it over in the meantime, which also
            interrupts this process.

    Example:
        >>> with FolderLock(Path("runs/librispeech"), wait_seconds=60):  # doctest: +SKIP
        ...     write_index()
    """

    def __init__(self, folder: Path, *, wait_seconds: float = 0.0, lease_seconds: float = LEASE_SECONDS) -> None:
        self.path = folder / LOCK_NAME
        self.must_end: Callable[[], bool] = lambda: False
        self._wait_seconds = wait_seconds
        self._lease_seconds = lease_seconds
        self._is_held = False

    def __enter__(self) -> "FolderLock":
        self._take(self._wait_seconds)
        return self

    def _take(self, seconds: float, *, outwaits_silent: bool = True) -> None:
        self._file = self.path / f"owner-{uuid4().hex}.json"
        # For the record of each owner: the time of its last touch, the local time when this process first saw that
        # touch, and True if the owner is known to be alive.
        self._seen: dict[Path, tuple[int, float, bool]] = {}
        self._leave = threading.Event()
        self._toucher = threading.Thread(target=self._keep_touching, name="sharmill-lock", daemon=True)
        with stopping_errors(self.path):
            self._wait_and_enter(seconds, outwaits_silent=outwaits_silent)
        self._is_held = True
        self._toucher.start()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock for the duration of the context, then acquire it again, however long that takes.

        If an error ends the context, the lock is acquired again only if it is free within a second.
        """
        self.__exit__(None)
        try:
            yield
        except BaseException:
            # The error that ended the work is raised, not an error from the lock.
            with suppress(ConfigError, FatalError, OSError):
                self._take(_SECONDS_AFTER_ERROR, outwaits_silent=False)
            raise
        self._take(math.inf)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._is_held:
            return  # the lock was released, and an error occurred before it was acquired again
        self._is_held = False
        self._leave.set()
        self._toucher.join()
        if not self._file.exists():
            raise FatalError(
                f"{self._file} is gone: another process took over the lock, because this one sent no heartbeat for "
                f"{self._lease_seconds:g} s, or somebody removed it; make sure that no other process is working in "
                f"{self.path.parent}, then run the same command again",
                code="locked",
            )
        try:
            with stopping_errors(self.path):
                self._remove()
        except (FatalError, OSError) as error:
            if kind is None:
                raise
            log.info("%s", error)  # the error that ended the work is raised instead

    def _wait_and_enter(self, seconds: float, *, outwaits_silent: bool) -> None:
        """Enter as soon as no other process holds the lock.

        Args:
            seconds: time to wait for a process that is known to be alive.
            outwaits_silent: wait for processes not known to be alive until their leases expire, even if that takes
                longer.
        """
        began, is_said = time.monotonic(), False
        while True:
            others = self._find_others()
            if not others and self._enter():
                return
            waited = time.monotonic() - began
            file, (owner, is_alive) = next(iter(others.items()), (self._file, (None, False)))
            if waited >= seconds and (is_alive or (others and not outwaits_silent)):
                raise ConfigError(
                    f"another sharmill process is working in {self.path.parent}: {owner} (lock: {file}); "
                    "wait for it, or end it first",
                    code="locked",
                )
            if owner is not None and not is_said and waited > 5.0:
                is_said = True
                log.warning("waiting for %s to release its lock on %s", owner, self.path.parent)
            # Random delays prevent processes that arrive at the same time from giving way to each other forever.
            time.sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))

    def _find_others(self) -> dict[Path, tuple[LockOwner, bool]]:
        """Return {record: (owner, True if known to be alive)} for other live owners; remove the records of dead ones.

        A process under another kernel is considered dead if its file was not touched during its lease.
        """
        others, now = {}, time.monotonic()
        for file, (owner, touched) in _read_owners(self.path, self._lease_seconds).items():
            before, since, is_alive = self._seen.get(file, (touched, now, owner.is_here))
            if touched != before:
                since, is_alive = now, True
            self._seen[file] = touched, since, is_alive
            if file == self._file:
                continue
            if owner.is_known_dead() or (not owner.is_here and now - since >= owner.lease_seconds):
                log.info("the owner of the lock %s has ended: %s", self.path, owner)
                file.unlink(missing_ok=True)
            else:
                others[file] = owner, is_alive
        return others

    def _enter(self) -> bool:
        """Add the record of this process; remove it and return False if another record exists.

        Creating the record makes NFS list the folder again. If two processes arrive together, at least one therefore
        sees the other.
        """
        mode = self.path.parent.stat().st_mode
        since = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        record = msgspec.json.encode(LockOwner.this(since=since, lease_seconds=self._lease_seconds))
        try:
            # Let everyone who may write to the folder remove a dead owner's file, regardless of this process's umask.
            with suppress(FileExistsError):
                self.path.mkdir()
                self.path.chmod(mode & 0o777)
            write_new(self._file, record)
            self._file.chmod(mode & 0o666)
            if not self._find_others():
                return True
        except FileNotFoundError:
            log.debug("%s: its last owner removed it at this moment", self.path)
        except OSError:
            with suppress(OSError):
                self._remove()
            raise
        self._remove()
        return False

    def _keep_touching(self) -> None:
        # Touch the file at least six times per lease, and at least every five seconds so that ``must_end`` is checked.
        while not self._leave.wait(min(5.0, self._lease_seconds / 6)):
            try:
                os.utime(self._file, follow_symlinks=False)
                if self.must_end():
                    interrupt()
                    return
            except FileNotFoundError:
                if not self._leave.is_set():
                    log.error("%s is gone; ending this process, since another one may hold the lock", self._file)
                    interrupt()
                return
            except (OSError, SharmillError) as error:
                log.warning("cannot touch %s: %s; retrying", self._file, error)

    @retry(retry=retry_if_exception_type(OSError), stop=stop_after_attempt(3), wait=wait_fixed(0.2), reraise=True)
    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        # Other processes may have records in the folder.
        with suppress(OSError):
            self.path.rmdir()
