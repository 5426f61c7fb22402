"""Locks on folders that several hosts share; each says who holds it.

The lock on a folder is the folder ``.sharmill-lock`` in it, with one file of a unique name: the record of its owner. A
process enters by putting its own record there, and then looking at the others: if one is not known to have ended, it
takes its own back and comes again. It leaves by removing its file, and so is the file of a dead owner removed: by its
name, which no later owner's file has.

Processes under the same kernel as the owner see whether it has ended. For others it is alive while its file is touched:
they watch its time for a whole lease, by their own clocks, before they take the lock over. So no wrong clock ends the
lock of a live process. ``flock`` is not needed: on some file systems it is missing, or holds on one node only.

The leases of the library filelock are taken over only where two names can be exchanged, which Lustre and NFS cannot.
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
# A record that asks for more, or for nothing, is none of ours: nobody waits for it longer than for a torn one.
_MAX_LEASE_SECONDS = 3600.0
_POLL_SECONDS = 0.25
# An interrupted command ends within five seconds, the end of its ranks included.
_SECONDS_AFTER_ERROR = 1.0


class LockOwner(Process, kw_only=True):
    """The process that holds a lock, or tries to, as its record describes it."""

    since: str = "an unknown time"
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=_MAX_LEASE_SECONDS)] = LEASE_SECONDS

    def __str__(self) -> str:
        if not self.pid:
            return "a process whose record of itself is incomplete"
        return f"{super().__str__()}, since {self.since}"


def lock_owner(folder: Path) -> LockOwner | None:
    """Return who holds the lock on a folder, as far as its record says; None where nobody does."""
    return next((owner for owner, _ in _read_owners(folder / LOCK_NAME, LEASE_SECONDS).values()), None)


def _read_owners(lock: Path, lease_seconds: float) -> dict[Path, tuple[LockOwner, int]]:
    """Return the records in a lock's folder, and when each was touched, by their files.

    Args:
        lease_seconds: of an owner whose record says nothing.
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
            # Opening makes NFS ask the server for the time too.
            with open_regular(file, follow_links=False) as stream:
                touched, data = os.fstat(stream.fileno()).st_mtime_ns, stream.read(1 << 16)
            owner = msgspec.json.decode(data, type=LockOwner)
        except FileNotFoundError:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            owner = LockOwner(lease_seconds=lease_seconds)  # not written yet, or torn by a power cut
        except ValueError as error:
            raise _foreign(file) from error
        found[file] = owner, touched
    return found


def _foreign(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not sharmill's: it is a link, or no regular file; remove it", code="locked")


class FolderLock:
    """The lock on a folder, held as long as the context lasts. The folder must exist and be writable.

    Args:
        folder: nothing is left in it afterwards.
        wait_seconds: how long to wait for another process; longer only while it is not known to be alive.
        lease_seconds: how long others wait for a heartbeat of this process before they take the lock over, and this
            process for the record of an owner.

    Attributes:
        must_end: is asked every few seconds while the lock is held; where it returns True, this process is interrupted.

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
        self.must_end: Callable[[], bool] = lambda: False
        self._wait_seconds = wait_seconds
        self._lease_seconds = lease_seconds
        self._is_held = False

    def __enter__(self) -> "FolderLock":
        self._take(self._wait_seconds)
        return self

    def _take(self, seconds: float, *, outwaits_silent: bool = True) -> None:
        self._file = self.path / f"owner-{uuid4().hex}.json"
        # For each other record: when it was touched, since when it has been so, and if it was seen to be touched.
        self._seen: dict[Path, tuple[int, float, bool]] = {}
        self._leave = threading.Event()
        self._toucher = threading.Thread(target=self._keep_touching, name="sharmill-lock", daemon=True)
        with stopping_errors(self.path):
            self._wait_and_enter(seconds, outwaits_silent=outwaits_silent)
        self._is_held = True
        self._toucher.start()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leave the folder to others as long as the context lasts; then wait for it, however long they hold it.

        If an error ends the context, the lock is taken again only if it is free within a second.
        """
        self.__exit__(None)
        try:
            yield
        except BaseException:
            # The error that has ended the work is the one to be raised.
            with suppress(ConfigError, FatalError, OSError):
                self._take(_SECONDS_AFTER_ERROR, outwaits_silent=False)
            raise
        self._take(math.inf)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._is_held:
            return  # it was released, and an error came before it was free again
        self._is_held = False
        self._leave.set()
        self._toucher.join()
        if not self._file.exists():
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

    def _wait_and_enter(self, seconds: float, *, outwaits_silent: bool) -> None:
        """Enter once no other process is inside.

        Args:
            seconds: how long to wait for a process that is known to be alive.
            outwaits_silent: wait for one that is not known to be alive until its lease is over, if that is longer.
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
                    f"another sharmill process is at work in {self.path.parent}: {owner} (lock: {file}); "
                    "wait for it or end it first",
                    code="locked",
                )
            if owner is not None and not is_said and waited > 5.0:
                is_said = True
                log.warning("waiting for %s to leave %s", owner, self.path.parent)
            # Processes that come at once, and give way to each other, come back at different times.
            time.sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))

    def _find_others(self) -> dict[Path, tuple[LockOwner, bool]]:
        """Return the records of others that have not ended, and if each is known to be alive; remove those of the dead.

        One of another kernel has ended if its file was not touched for its lease.
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
                log.info("%s: its owner has ended: %s", self.path, owner)
                file.unlink(missing_ok=True)
            else:
                others[file] = owner, is_alive
        return others

    def _enter(self) -> bool:
        """Put the record of this process into the folder; take it back and return False if another one is there.

        Making it has NFS list the folder anew. So of two that come at once one at least sees the other.
        """
        mode = self.path.parent.stat().st_mode
        since = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        record = msgspec.json.encode(LockOwner.this(since=since, lease_seconds=self._lease_seconds))
        try:
            # Whoever may write in the folder may remove a dead owner's file, whatever this process's umask.
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
        # Six times in a lease, or more often, since ``must_end`` is asked as well.
        while not self._leave.wait(min(5.0, self._lease_seconds / 6)):
            try:
                os.utime(self._file, follow_symlinks=False)
                if self.must_end():
                    interrupt()
                    return
            except FileNotFoundError:
                if not self._leave.is_set():
                    log.error("%s is gone: this process ends, since another one may be at work", self._file)
                    interrupt()
                return
            except (OSError, SharmillError) as error:
                log.warning("cannot touch %s: %s; trying again", self._file, error)

    @retry(retry=retry_if_exception_type(OSError), stop=stop_after_attempt(3), wait=wait_fixed(0.2), reraise=True)
    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        # Others may be in it.
        with suppress(OSError):
            self.path.rmdir()
