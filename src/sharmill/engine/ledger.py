"""The ledger of a stage: what is in it is done, what is not is not.

Every process appends to a file of its own, one JSON line a commit, synced to disk; so a process that is killed can
only leave one incomplete last line, which is not a record.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

import msgspec

from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import NOT_JSON, decode_stored, read_stored_lines
from sharmill.engine.unit import Commit, Unit
from sharmill.staging import PublishedFile
from sharmill.storage import (
    fsync_directory,
    open_stored,
    refuse_strangers,
    remove_asides,
    stopping_errors,
    write_atomic,
)

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(Commit)


class LedgerWriter:
    """Appends commit records; for one process."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is there as long as the plan is the present one."""
        self.folder = folder
        self._path: Path | None = None

    def append(self, commit: Commit) -> None:
        """Append a commit record and return when it is on disk.

        Raises:
            FatalError: it cannot be written; the unit does not count as done.
        """
        path, self._path = self._path or self._new_file(), None
        with stopping_errors(path), open_stored(path, append=True) as stream:
            stream.write(msgspec.json.encode(commit) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        # Kept only after a success: after a failed write the file may end in half a line, and gets no more.
        self._path = path

    def _new_file(self) -> Path:
        path = self.folder / f"{uuid4().hex}.jsonl"
        with stopping_errors(path):
            path.touch(exist_ok=False)
            fsync_directory(self.folder)
        return path


def read_ledger(paths: StageDir, units: Iterable[Unit]) -> dict[int, Commit]:
    """Return the commit of every unit that is done, by unit index. Records of another plan do not count."""
    return {commit.index: commit for commit in iterate_ledger(paths, {unit.index: unit.id for unit in units})}


def iterate_ledger(paths: StageDir, ids: Mapping[int, str] | None = None) -> Iterator[Commit]:
    """Yield the commits of units of the present plan; one at a time is held in memory.

    A unit that two attempts have ended has two, of the same output.

    Args:
        ids: the ids of the units that count, by their indices; by default all units of the plan.
    """
    paths = paths.of_present_plan()
    for path in sorted(paths.ledger.glob("*.jsonl")):
        for line in read_stored_lines(path):
            commit = decode_commit(path, line)
            if commit is None or commit.token != paths.token:
                continue
            if ids is None or ids.get(commit.index) == commit.id:
                yield commit


def committed_files(stage: Stage) -> list[PublishedFile]:
    """Return the files of all units that the stage's present plan has finished, those that were revoked too."""
    if not stage.dir.token_file.exists():
        return []
    # Without a look at the plan's units: it may be damaged, and is to be discarded then.
    commits = [*iterate_ledger(stage.dir), *read_revoked(stage).values()]
    return [file for commit in commits for file in commit.files]


def revoke(stage: Stage, indices: Collection[int]) -> None:
    """Take the commits of units out of the ledger, so that the next run does them again.

    They are kept aside, for what comes out then is to be the same. Interrupted in between, some units are done again
    and others not: the same call makes up for it. Only for the one process that directs a run.
    """
    remove_asides(stage.dir.ledger)
    units = [unit for unit in load_plan(stage) if unit.index in indices]
    first = read_revoked(stage)
    for index, commit in read_ledger(stage.dir, units).items():
        first.setdefault(index, commit)
    write_atomic(stage.dir.revoked, b"".join(msgspec.json.encode(commit) + b"\n" for commit in first.values()))
    ids = {unit.id for unit in units}
    for path in sorted(stage.dir.ledger.glob("*.jsonl")):
        kept, num_lines = list[bytes](), 0
        for line in read_stored_lines(path):
            num_lines += 1
            if (found := decode_commit(path, line)) is not None and found.id not in ids:
                kept.append(line)
        if len(kept) < num_lines:
            write_atomic(path, b"".join(kept))


def read_revoked(stage: Stage) -> dict[int, Commit]:
    """Return the commits that were revoked and whose units are not finished again, by unit index."""
    if not stage.dir.revoked.exists():
        return {}
    path = stage.dir.revoked
    commits = (decode_stored(path, line, Commit) for line in read_stored_lines(path))
    return {commit.index: commit for commit in commits}


def decode_commit(path: Path, line: bytes) -> Commit | None:
    """Return the commit record in a line of the ledger; None for one that is incomplete or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decoder.decode(line)
    except NOT_JSON as error:
        # A file system that lost its power may leave such lines; the unit is done again.
        log.warning("a line of %s is no record: %s", path, error)
        return None


def find_outstanding(
    stage: Stage, units: Sequence[Unit], done: Mapping[int, Commit], *, check: Sequence[Unit]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Return the commits whose files are in place, and the units without one; only files of ``check`` are looked at.

    Raises:
        ConfigError: a folder on the way to one of them is a link, or a stranger's.
    """
    found = [done[unit.index] for unit in check if unit.index in done]
    lost = find_lost(stage, found, is_finished=stage.dir.done.exists())
    commits = {index: commit for index, commit in done.items() if index not in lost}
    return commits, [unit for unit in units if unit.index not in commits]


def find_lost(stage: Stage, commits: Collection[Commit], *, is_finished: bool = False) -> set[int]:
    """Return the units whose files are not there any more with the sizes of their commits, or whose rejects are not.

    Args:
        is_finished: the stage was finished with these files. Then their folders are listed, which tells what was
            removed since, or replaced by a link, and asks a shared file system for little; else each file's size is.

    Raises:
        ConfigError: a folder on the way to one of them is a link, or a stranger's.
    """
    refuse_strangers(stage.root, {(stage.root / file.name).parent for commit in commits for file in commit.files})
    listed: dict[Path, set[str]] = {}

    def is_there(path: Path, size: int | None) -> bool:
        if is_finished:
            if path.parent not in listed:
                listed[path.parent] = _regular_files(path.parent)
            return path.name in listed[path.parent]
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return S_ISREG(status.st_mode) and size in (status.st_size, None)

    return {
        commit.index
        for commit in commits
        if not all(is_there(stage.root / file.name, file.size) for file in commit.files)
        or (commit.num_rejected and not is_there(stage.dir.unit_rejects(commit.index), None))
    }


def _regular_files(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    except (FileNotFoundError, NotADirectoryError):
        return set()
