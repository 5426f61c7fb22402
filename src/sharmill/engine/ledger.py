"""The ledger of a stage: what is in it is done, what is not is not.

Every process appends to a file of its own, one JSON line a commit, synced to disk; so a process that is killed can
only leave one incomplete last line, which is not a record.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

import msgspec

from sharmill.engine.patience import Patience
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import NOT_JSON, Tail, decode_stored, read_stored_lines
from sharmill.engine.unit import Commit, Unit
from sharmill.staging import PublishedFile
from sharmill.storage import refuse_strangers, remove_asides, remove_for_good, write_atomic

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(Commit)


def read_ledger(paths: StageDir, units: Iterable[Unit]) -> dict[int, Commit]:
    """Return the commit of every unit that is done, by unit index. Records of another plan do not count."""
    return {commit.index: commit for commit in iterate_ledger(paths, {unit.index: unit.id for unit in units})}


def iterate_ledger(paths: StageDir, ids: Mapping[int, str] | None = None, tail: Tail | None = None) -> Iterator[Commit]:
    """Yield the commits of units of a plan; one at a time is held in memory.

    A unit that two attempts have ended has two, of the same output.

    Args:
        ids: the ids of the units that count, by their indices; by default all units of the plan.
        tail: reads the ledger; what it has read before is not read again.
    """
    for path, line in (tail or Tail(paths.ledger)).lines():
        try:
            commit = _decoder.decode(line)
        except NOT_JSON as error:
            # A file system that lost its power may leave such lines; the unit is done again.
            log.warning("a line of %s is no record: %s", path, error)
            continue
        if commit.token == paths.token and (ids is None or ids.get(commit.index) == commit.id):
            yield commit


def committed_files(stage: Stage) -> list[PublishedFile]:
    """Return the files of all units that the stage's present plan has finished, those that were revoked too."""
    if not stage.dir.token:
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
    commits = read_ledger(stage.dir, load_plan(stage))
    taken_back = {index: commits[index] for index in indices if index in commits} | read_revoked(stage)
    write_atomic(stage.dir.revoked, _encode(taken_back.values()))
    kept = [commit for commit in commits.values() if commit.index not in indices]
    earlier = list(stage.dir.ledger.glob("*.jsonl"))
    write_atomic(stage.dir.ledger / f"{uuid4().hex}.jsonl", _encode(kept))
    remove_for_good(earlier)


def read_revoked(stage: Stage) -> dict[int, Commit]:
    """Return the commits that were revoked and whose units are not finished again, by unit index."""
    path = stage.dir.revoked
    if not path.exists():
        return {}
    commits = (decode_stored(path, line, Commit) for line in read_stored_lines(path))
    return {commit.index: commit for commit in commits}


def _encode(commits: Iterable[Commit]) -> bytes:
    return b"".join(msgspec.json.encode(commit) + b"\n" for commit in commits)


def find_outstanding(
    stage: Stage, units: Sequence[Unit], done: Mapping[int, Commit], *, check: Sequence[Unit]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Return the commits whose output is in place, and the units without one; only output of ``check`` is looked at.

    The files of a unit have the sizes of its commit, and its rejects are there. Once a stage is finished, the folders
    of its files are listed instead: that tells what was removed since, or replaced by a link, and asks a shared file
    system for little.

    Raises:
        ConfigError: a folder on the way to one of them is a link, or a stranger's.
    """
    paths = stage.dir
    is_finished = paths.done.exists()
    commits = dict(done)
    checked = [done[unit.index] for unit in check if unit.index in done]
    refuse_strangers(stage.root, {(stage.root / file.name).parent for commit in checked for file in commit.files})
    list_folder = cache(_regular_files)
    for commit in checked:
        output = [(stage.root / file.name, file.size) for file in commit.files]
        if commit.num_rejected:
            output.append((paths.unit_rejects(commit.index), -1))
        for path, size in output:
            if is_finished:
                is_there = path.name in list_folder(path.parent)
            else:
                is_there = _is_regular_file(path, size)
            if not is_there:
                commits.pop(commit.index, None)
    return commits, [unit for unit in units if unit.index not in commits]


def wait_for_units(
    stage: Stage, units: Sequence[Unit], given: Sequence[Unit], failures: Container[int]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Wait until this node sees that units are done which ranks have reported as such.

    Args:
        units: all those of the stage.
        given: those that the executor was given.
        failures: the indices of units that failed for good.

    Returns: the commits whose files are in place, and the units without one.
    """
    found: tuple[dict[int, Commit], list[Unit]] = ({}, [])

    def look() -> bool:
        nonlocal found
        found = find_outstanding(stage, units, read_ledger(stage.dir, units), check=given)
        return all(unit.index in failures for unit in found[1])

    patience = Patience(stage.seconds_until_seen)
    if not patience.wait_until(look, f"{stage.name}: the output of all units"):
        # Here an error that has not passed ends the stage.
        look()
    return found


def _regular_files(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _is_regular_file(path: Path, size: int) -> bool:
    """Return True if there is a file of this size, or of any for -1."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return S_ISREG(status.st_mode) and size in (status.st_size, -1)
