"""Publishing of units: each attempt writes its files in a folder of its own and renames them when all are there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath
from uuid import uuid4

from sharmill.ports import process
from sharmill.storage import checksum, fsync_directory, fsync_file, refuse_strangers, remove_tree, stopping_errors

STAGING_NAME = ".sharmill-staging"


def check_name(name: str) -> None:
    """Raise ValueError unless a name that a file of a run directory holds is that of a file below a folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or not name.isprintable():
        raise ValueError(f"{name!r} is no name below a folder")


@dataclass(frozen=True)
class PublishedFile:
    """A file of a committed unit; ``name`` is relative to the root that it was published below."""

    name: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        check_name(self.name)


class Staging:
    """Folder in which one attempt at one unit writes its files before they are published below ``root``.

    It lies on the file system of ``root``, so that publishing is a rename. Each attempt has its own folder: two
    attempts at one unit do not meet before the rename, and then both bring the same bytes. Parents are never made: the
    folder of the plan's token, and those of the final files, are there as long as the plan is valid, and are missed
    (FileNotFoundError) as soon as it is not.
    """

    def __init__(self, root: Path, token: str, unit_index: int) -> None:
        self.root = root
        by = f"{process.gethostname()}-{process.getpid()}"
        self.folder = token_staging(root, token) / f"{unit_index:06d}-{by}-{uuid4().hex}"

    def __enter__(self) -> Staging:
        with stopping_errors(self.folder):
            self.folder.mkdir()
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Return the path at which to write the file that will be published as ``root / name``."""
        check_name(name)
        for parent in reversed(PurePath(name).parents[:-1]):
            (self.folder / parent).mkdir(exist_ok=True)
        return self.folder / name

    def publish(self, names: list[str]) -> list[PublishedFile]:
        """Publish the files in the order given; a reader may rely on the last one to mean that all are there."""
        if not names:
            return []
        # The disk gets all files at once, and writes while their checksums are computed.
        with stopping_errors(self.root), process.ThreadPoolExecutor(len(names), "fsync") as pool:
            flushed = [pool.submit(fsync_file, self.folder / name) for name in names]
            published = [self._describe(name) for name in names]
            for future in flushed:
                future.result()
            # Folders that were the run's own when it was planned may have been replaced since.
            refuse_strangers(self.root, ((self.root / name).parent for name in names))
            for name in names:
                final = self.root / name
                (self.folder / name).replace(final)
                fsync_directory(final.parent)
        return published

    def _describe(self, name: str) -> PublishedFile:
        path = self.folder / name
        return PublishedFile(name=name, size=path.stat().st_size, xxh3=checksum(path))


def token_staging(root: Path, token: str) -> Path:
    """Return the folder below which all ranks of a plan write aside what they publish below ``root``."""
    return root / STAGING_NAME / token


def remove_dead_attempts(root: Path, token: str) -> None:
    """Remove what processes of this host that have ended left aside for a plan. Others may be at work for it."""
    for folder in token_staging(root, token).glob(f"*-{process.gethostname()}-*-*"):
        if process.is_gone(int(folder.name.split("-")[-2])):
            remove_tree(folder)
