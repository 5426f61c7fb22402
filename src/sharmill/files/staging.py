"""Staging of a unit's files: one process writes them in its own folder, then publishes them together by renames."""

import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from sharmill.files.checksums import checksum_bytes, checksum_stream
from sharmill.files.disk import STOPPING_ERRNOS, stopping_errors
from sharmill.files.host import is_gone, this_kernel
from sharmill.files.regular import open_regular
from sharmill.files.trust import check_name, owned_by_other_user, require_trusted_owner

STAGING_NAME = ".sharmill-staging"
_SCRATCH_PREFIX = "sharmill-"


def token_staging(root: Path, token: str) -> Path:
    """Return the folder in which all ranks of a plan write files before publishing them below ``root``."""
    return root / STAGING_NAME / token


@dataclass(frozen=True)
class PublishedFile:
    """A file of a committed unit; ``name`` is relative to the root of its stage."""

    name: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        check_name(self.name)


class Staging:
    """A folder in which one process writes the files of its units, one unit at a time, before publishing them.

    The folder is on the file system of ``root``, so publishing is a rename. Two attempts at the same unit write to
    different folders, and their files have the same bytes, so either may replace the other. Parent folders are never
    created: the folder of the plan's token, and the folders of the final files, exist as long as the plan is valid;
    after that, writing and publishing raise FileNotFoundError. Each process uses one flat folder instead of a tree per
    attempt, because creating and removing trees would dominate a unit's file system requests.

    If ``scratch`` names a folder on a local disk, files are written there. When all files of a unit are complete, they
    are copied to the shared disk in a few large writes.
    """

    def __init__(self, root: Path, token: str, scratch: Path | None = None) -> None:
        self.root = root
        name = f"{_names_here()}{os.getpid()}-{uuid4().hex}"
        self.folder = token_staging(root, token) / name
        self.written_in = self.folder if scratch is None else scratch / f"{_SCRATCH_PREFIX}{name}"
        self._has_scratch = scratch is not None
        # Paths of the current attempt, recorded because listing the folder would cost another request per unit.
        self._paths: set[Path] = set()

    def __enter__(self) -> "Staging":
        require_trusted_owner(self.root, [self.folder.parent])
        with stopping_errors(self.folder):
            self.folder.mkdir()
        if self._has_scratch:
            remove_dead_attempts(self.written_in.parent)
            with self.write_errors():
                # Other users may have access to the scratch folder.
                self.written_in.mkdir(mode=0o700)
        return self

    def __exit__(self, *exception: object) -> None:
        for folder in dict.fromkeys((self.folder, self.written_in)):
            shutil.rmtree(folder, ignore_errors=True)

    def write_errors(self, errnos: frozenset[int] = STOPPING_ERRNOS) -> AbstractContextManager[None]:
        """Turn write errors into a FatalError, or into a DeviceError if the disk is local."""
        host = socket.gethostname() if self._has_scratch else ""
        return stopping_errors(self.written_in, errnos, host=host)

    def path(self, name: str) -> Path:
        """Return the path at which to write the file that will be published as ``root / name``."""
        path = self.written_in / self._staged(name).name
        self._paths.add(path)
        return path

    def publish(self, names: list[str]) -> list[PublishedFile]:
        """Publish the files in the given order.

        If the last file has a folder of its own, its presence shows readers that all files are complete.
        """
        if not names:
            return []
        finals = [self.root / name for name in names]
        with stopping_errors(self.root), ExitStack() as stack:
            for name in names if self._has_scratch else ():
                self._paths.add(self._staged(name))
                shutil.copyfile(self.path(name), self._staged(name), follow_symlinks=False)
            streams = [stack.enter_context(open_regular(self._staged(name), buffering=0)) for name in names]
            # All files are flushed in parallel while their checksums are computed.
            with ThreadPoolExecutor(len(names), "fsync") as pool:
                flushed = [pool.submit(os.fsync, stream.fileno()) for stream in streams]
                published = [
                    PublishedFile(name, os.fstat(stream.fileno()).st_size, checksum_stream(stream))
                    for name, stream in zip(names, streams, strict=True)
                ]
                for future in flushed:
                    future.result()
            folders = {folder: self._open_folder(folder, stack) for folder in {final.parent: None for final in finals}}
            for name, final in zip(names, finals, strict=True):
                if final == finals[-1]:
                    for folder, descriptor in folders.items():
                        if folder != final.parent:
                            os.fsync(descriptor)
                self._staged(name).replace(final)
                self._paths.discard(self._staged(name))
            os.fsync(folders[finals[-1].parent])
        return published

    def clear(self) -> None:
        """Remove the unpublished files of an attempt."""
        with suppress(OSError):
            while self._paths:
                self._paths.pop().unlink(missing_ok=True)

    def _staged(self, name: str) -> Path:
        check_name(name)
        return self.folder / name.replace("/", "+")

    def _open_folder(self, folder: Path, stack: ExitStack) -> int:
        """Open a folder of final files for syncing, until ``stack`` is closed.

        Raises:
            ConfigError: the folder was replaced by a link or an untrusted user's folder after the plan was made.
        """
        require_trusted_owner(self.root, [folder])
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if folder != self.root else 0)
        descriptor = os.open(folder, flags)
        stack.callback(os.close, descriptor)
        if owned_by_other_user(os.fstat(descriptor), folder.parent):
            require_trusted_owner(self.root, [folder])
        return descriptor


def _names_here() -> str:
    """Return the name prefix of the staging folders of all processes that this process can see.

    It contains the kernel as well as the host, since containers of one machine may share a host name but not process
    ids.
    """
    return f"rank-{socket.gethostname()}-{checksum_bytes(this_kernel().encode())[:8]}-"


def remove_dead_attempts(parent: Path) -> None:
    """Remove this user's staging folders whose processes ran on this machine and have ended.

    Args:
        parent: staging folder of a plan or a scratch folder; other processes may be working in it.
    """
    name = re.compile(rf"({_SCRATCH_PREFIX})?{re.escape(_names_here())}([0-9]{{1,9}})-[0-9a-f]+")
    for folder in parent.glob("*rank-*"):
        match = name.fullmatch(folder.name)
        with suppress(FileNotFoundError):
            if match and folder.lstat().st_uid == os.geteuid() and is_gone(int(match[2])):
                shutil.rmtree(folder, ignore_errors=True)
