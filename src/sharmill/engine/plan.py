"""The frozen plan of a stage, which is made once, and the ledger: what is in it is done, what is not is not.

A plan is bound to its identity, which is all that the output bytes depend on: configuration, inputs and versions of
packages. A difference of two is told in words.

In the ledger every process appends to a log of its own, one JSON line a commit, synced to disk, and notes of attempts
beside them; so a process that is killed can only leave one incomplete last line, which is not a record.
"""

import os
import secrets
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, TypeGuard
from uuid import uuid4

import msgspec

from sharmill.engine.attempts import Note
from sharmill.engine.fence import remove_fences, require_own_output, reserve
from sharmill.engine.order import dependent_folders
from sharmill.engine.run_dir import StageDir
from sharmill.engine.stage import StageRun, step_of
from sharmill.engine.unit import Commit, Unit
from sharmill.errors import REASONS_OF_NODES, ConfigError
from sharmill.files.atomic import (
    fsync,
    make_folder,
    open_folder_atomic,
    remove,
    remove_at_once,
    remove_if_empty,
    remove_temp_files,
    write_atomic,
    write_new,
)
from sharmill.files.disk import stopping_errors
from sharmill.files.record_log import Tail
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import STAGING_NAME, PublishedFile, token_staging
from sharmill.files.stored import load_record, read_records
from sharmill.files.trust import require_trusted_owner
from sharmill.manifest import Reject
from sharmill.registry import STAGES

_lines = msgspec.json.Encoder()
# Files of the engine in a stage's folder, beside the plan and the folders of ranks.
_OWN_FILES: Final = (
    "done.json", "failures.jsonl", "rejects.jsonl", "revoked.jsonl", "merged", f"parts/{6 * '[0-9]'}.*",
    "logs/driver*.log", "logs/rank-[0-9]*.log",
)  # fmt: skip
_SHOWN_CHARACTERS: Final = 60
_FOLDER_KEYS: Final = {"folder", "from_run_dir"}
# Their values say nothing to people.
_CHECKSUMS: Final = {"input": "the input has other content", "files": "files of the dataset have changed"}


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a clause for each difference of two identities: ``match.min_similarity is 0.7, was 0.6``."""
    changes = []
    for path, before, now in find_differences(old, new):
        top = path.partition(".")[0].partition("[")[0]
        changes.append(_CHECKSUMS.get(top) or f"{path} is {show(now)}, was {show(before)}")
    return list(dict.fromkeys(changes))


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost places at which two values differ, and what is there; keys in their alphabetical order.

    It is ``msgspec.UNSET`` where only the other has the key. Folders that ``identify_folder`` has identified are the
    same where their paths are, or their places as seen from the run directory.

    >>> list(find_differences({"a": [1, 2], "b": 3}, {"a": [1, 5], "b": 3}))
    [('a[1]', 2, 5)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() == new.keys() == _FOLDER_KEYS:
            if all(old[key] != new[key] for key in _FOLDER_KEYS):
                yield path, old["folder"], new["folder"]
            return
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            yield from find_differences(old.get(key, msgspec.UNSET), new.get(key, msgspec.UNSET), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from find_differences(left, right, f"{path}[{number}]")
    elif type(old) is not type(new) or old != new:
        yield path, old, new


def show(value: Any) -> str:
    """Return a value as JSON of at most 60 characters; ``absent`` for ``msgspec.UNSET``."""
    text = "absent" if value is msgspec.UNSET else msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def read_or_make_plan(stage: StageRun, *, restart: bool = False) -> tuple[StageRun, list[Unit]]:
    """Return the stage with its plan's token, and the units of the plan; it is made if there is none.

    Raises:
        ConfigError: there is a plan, but of another configuration, input or version; or the output is another run's.
    """
    refuse_linked_folders(stage)
    require_trusted_owner(stage.root, [stage.root / name for name in stage.folders])
    run_id = stage.run_dir.make_id()
    restart = restart or stage.dir.replan.exists()
    require_own_output(stage)
    identity = stage.declaration.identity(stage)
    if stage.kind not in STAGES.own and stage.kind in STAGES.names():
        # Another package brings it.
        identity |= {"package": STAGES.version(stage.kind)}
    # As it is read back: JSON has no tuples, and the keys are stored in order.
    identity = stage.options.references.identify(identity, step_of(stage.kind))
    identity = msgspec.json.decode(msgspec.json.encode(identity, order="sorted"))
    if stage.dir.identity.exists() and not restart:
        changes = find_changes(load_record(stage.dir.identity, dict[str, Any]), identity)
        if not changes:
            return stage.with_plan(stage.dir.read_token()), stage.dir.read_units()
        # Where everything was rejected, nothing is lost.
        goes_on = any(commit.num_out for commit in iterate_ledger(stage.dir))
        if goes_on and not _loses_nothing(stage):
            raise ConfigError(
                f"{stage.name} was begun differently in {stage.run_dir.path}: {'; '.join(changes[:4])}. "
                "Restore that, choose another run_dir, or begin the stage anew",
                code="changed_plan",
            )
    elif not restart and _is_planned(stage):
        # Another node has made the plan, and this one did not see it yet.
        return read_or_make_plan(stage, restart=False)
    return _freeze(stage, identity, run_id)


def _loses_nothing(stage: StageRun) -> bool:
    """Return True if another plan loses nothing: for a check of all stages, and rounds of a step that load no model."""
    return "*" in stage.declaration.after or step_of(stage.kind) != stage.kind


def request_replan(stage: StageRun) -> None:
    """Have the next run that comes to the stage make another plan, also one without ``--restart``.

    A run may end before it has come there itself: killed, or since jobs are to go on.
    """
    if stage.dir.token_file.exists():
        write_atomic(stage.dir.replan, b"")


def request_replan_if_audio_came(stage: StageRun, has_audio: Callable[[Any, int | None], bool]) -> None:
    """Have the stage planned again if it rejected all records, and audio of one that was missing is in place now.

    Args:
        has_audio: returns True if the audio of a record, from the source of a number, may be there.
    """
    paths = []
    for commit in iterate_ledger(stage.dir):
        if commit.num_out:
            return
        if commit.rejects.keys() & REASONS_OF_NODES:
            paths.append(stage.ranks.unit_rejects(commit.index))
    rejects = chain.from_iterable(read_records(path, Reject) for path in paths if path.exists())
    if any(one.reason in REASONS_OF_NODES and has_audio(one.record, one.source) for one in rejects):
        request_replan(stage)


def _is_planned(stage: StageRun) -> bool:
    """Return True if there is a plan, by the answer of the server: whatever a node sees, only one makes a folder."""
    make_folder(stage.dir.path)
    with stopping_errors(stage.dir.plan):
        # Left by a process that was killed here.
        remove_if_empty(stage.dir.plan)
        try:
            stage.dir.plan.mkdir()
        except FileExistsError:
            return VisibilityTimeout(stage.options.seconds_until_seen).wait_until(
                stage.dir.identity.exists, str(stage.dir.identity)
            )
        remove_if_empty(stage.dir.plan)
    return False


def count_planned(stage: StageRun) -> int | None:
    """Return the number of units of a plan, or None where it is damaged: it is to be discarded all the same."""
    try:
        return len(stage.dir.read_units())
    except (ConfigError, FileNotFoundError):
        return None


def discard_stage(stage: StageRun) -> None:
    """Remove the stage's plan, ledger and output, and the plans of the stages whose output goes with that.

    The output is that of this run, which has reserved it. First of all go the folders that ranks write to, so that none
    of these plans can publish any more. The output goes before the plan, for good, so that neither a process that dies
    in between nor a loss of power leaves output that belongs to nothing: by the ledger its units are to be done again.
    """
    with stopping_errors(stage.dir.path):
        behind = dependent_folders(stage)
        for paths in (stage.dir, *behind):
            remove_fences(paths, stage.root)
        products = _find_products(stage)
        remove(stage.dir.done)
        # Without a plan, files where the stage publishes are not this run's to remove.
        if stage.dir.token_file.exists():
            remove(*products)
            if stage.publication is not None:
                stage.publication.discard()
        for paths in (*behind, stage.dir):
            _remove_files(paths)


def _find_products(stage: StageRun) -> list[Path]:
    """Return the files that a stage has left for others; none if the record of its end is damaged.

    Raises:
        ConfigError: one lies behind a link.
    """
    try:
        totals = stage.dir.read_totals()
    except ConfigError:
        # The stage is to be discarded all the same.
        return []
    found = [stage.run_dir.path / file.name for file in totals.products.values()] if totals is not None else []
    require_trusted_owner(stage.run_dir.path, found)
    return found


def has_output(stage: StageRun) -> bool:
    """Return True if everything that a finished stage has left for others is still in place."""
    is_there = all(path.exists() for path in _find_products(stage))
    return is_there and (stage.publication is None or stage.publication.is_complete())


def _remove_files(paths: StageDir) -> None:
    """Remove from a stage's folder what the engine writes there, the plan last; what others have put there stays."""
    folders = [paths.path / name for name in ("parts", "logs", "ranks", STAGING_NAME)]
    if paths.token_file.exists():
        remove_temp_files(paths.path)
        remove(*(path for pattern in _OWN_FILES for path in paths.path.glob(pattern)))
        remove_if_empty(*folders)
        # What came back without the plan would be refused as a stranger's.
        fsync(paths.path)
        remove_at_once(paths.plan)
    remove_if_empty(*folders, paths.path, paths.path.parent)


def refuse_linked_folders(stage: StageRun) -> None:
    """Raise ConfigError where a folder of the stage, a log or a file of a cluster's jobs is a link or a stranger's.

    What lies behind a link is not this run's to change.
    """
    run = stage.run_dir
    # Submitit itself makes links of such names, which SLURM does not write to.
    jobs = [path for path in run.jobs.glob("*") if not path.match(".submission_file_*.sh")]
    own = [run.manifests, run.copies, run.jobs, *jobs]
    for paths in (stage.dir, *dependent_folders(stage)):
        own += [
            *paths.ranks.all,
            paths.path / STAGING_NAME,
            paths.path / "parts",
            paths.identity,
            paths.units,
            paths.token_file,
            paths.merged,
            paths.logs,
            *paths.logs.glob("*"),
        ]
    require_trusted_owner(run.path, own)
    require_trusted_owner(stage.root, [token_staging(stage.root, stage.ranks.token)])


def _freeze(stage: StageRun, identity: dict[str, Any], run_id: str) -> tuple[StageRun, list[Unit]]:
    """Make a new plan, and return the stage with its token, and its units.

    Raises:
        ConfigError: the stage's folder has files, but no plan and nothing that one leaves on its way.
    """
    # An empty one was left by a process that was killed while it asked whether there is a plan.
    remove_if_empty(stage.dir.plan)
    make_folder(stage.dir.path)
    names = sorted(path.name for path in stage.dir.path.iterdir() if not path.name.startswith("."))
    # Stages of several sections of one kind lie in each other's folders where there was a single one before.
    foreign = [name for name in names if name != "ranks" and not StageDir(stage.dir.path / name).token_file.exists()]
    if foreign and not stage.dir.token_file.exists():
        raise ConfigError(
            f"{stage.dir.path} has {foreign[0]!r}, which is not sharmill's: choose another run_dir, or move that away",
            code="foreign_output",
        )
    reserve([stage], restart=True)
    discard_stage(stage)
    make_folder(stage.dir.path)
    token = f"{run_id}-{secrets.token_hex(8)}"
    with open_folder_atomic(stage.dir.plan) as aside:
        units = list(stage.declaration.plan(replace(stage, plan_aside=aside)))
        write_new(aside / stage.dir.units.name, _lines.encode_lines(units))
        write_new(aside / stage.dir.identity.name, msgspec.json.encode(identity))
        write_new(aside / stage.dir.token_file.name, token.encode())
    return stage.with_plan(token), units


def read_ledger(paths: StageDir, units: Iterable[Unit]) -> dict[int, Commit]:
    """Return the commit of every unit that is done, by unit index. Records of another plan do not count."""
    return {commit.index: commit for commit in iterate_ledger(paths, {unit.index: unit.id for unit in units})}


def ledger_records(paths: StageDir) -> Tail[Commit | Note]:
    """Return a reader of the logs of all ranks."""
    return Tail(paths.ranks.ledger, Commit | Note)


def iterate_ledger(paths: StageDir, ids: Mapping[int, str] | None = None) -> Iterator[Commit]:
    """Yield the commits of units of a plan; one at a time is held in memory.

    A unit that two attempts have ended has two, of the same output.

    Args:
        ids: the ids of the units that count, by their indices; by default all units of the plan.
    """
    token = paths.ranks.token
    for record in ledger_records(paths).records():
        if counts(record, token) and (ids is None or ids.get(record.index) == record.id):
            yield record


def counts(record: Commit | Note, token: str) -> TypeGuard[Commit]:
    """Return True for a commit of the plan with this token."""
    return isinstance(record, Commit) and record.token == token


def committed_files(stage: StageRun) -> list[PublishedFile]:
    """Return the files of all units that the stage's present plan has finished, those that were revoked too."""
    if not stage.ranks.token:
        return []
    # Without a look at the plan's units: it may be damaged, and is to be discarded then.
    commits = [*iterate_ledger(stage.dir), *read_revoked(stage).values()]
    return [file for commit in commits for file in commit.files]


def revoke(stage: StageRun, indices: Collection[int]) -> None:
    """Take the commits of units out of the ledger, so that the next run does them again.

    They are kept aside, for what comes out then is to be the same. Interrupted in between, some units are done again
    and others not: the same call makes up for it. Only for the one process that directs a run.
    """
    remove_temp_files(stage.ranks.ledger)
    commits = read_ledger(stage.dir, stage.dir.read_units())
    taken_back = {index: commits[index] for index in indices if index in commits} | read_revoked(stage)
    write_atomic(stage.dir.revoked, _lines.encode_lines(taken_back.values()))
    kept = [commit for commit in commits.values() if commit.index not in indices]
    earlier = list(stage.ranks.ledger.glob("*.jsonl"))
    write_atomic(stage.ranks.ledger / f"{uuid4().hex}.jsonl", _lines.encode_lines(kept))
    remove(*earlier)


def read_revoked(stage: StageRun) -> dict[int, Commit]:
    """Return the commits that were revoked and whose units are not finished again, by unit index."""
    if not stage.dir.revoked.exists():
        return {}
    return {commit.index: commit for commit in read_records(stage.dir.revoked, Commit)}


def find_outstanding(
    stage: StageRun, units: Sequence[Unit], done: Mapping[int, Commit], *, check: Sequence[Unit]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Return the commits whose output is in place, and the units without one; only output of ``check`` is looked at.

    The files of a unit have the sizes of its commit, and its rejects are there. Once a stage is finished, the folders
    of its files are listed instead: that tells what was removed since, or replaced by a link, and asks a shared file
    system for little.

    Raises:
        ConfigError: a folder on the way to one of them is a link, or a stranger's.
    """
    ranks = stage.ranks
    is_finished = stage.dir.done.exists()
    commits = dict(done)
    checked = [done[unit.index] for unit in check if unit.index in done]
    require_trusted_owner(stage.root, {(stage.root / file.name).parent for commit in checked for file in commit.files})
    list_folder = cache(_regular_files)
    for commit in checked:
        output = [(stage.root / file.name, file.size) for file in commit.files]
        if commit.num_rejected:
            output.append((ranks.unit_rejects(commit.index), -1))
        for path, size in output:
            is_there = path.name in list_folder(path.parent) if is_finished else _is_regular_file(path, size)
            if not is_there:
                commits.pop(commit.index, None)
    return commits, [unit for unit in units if unit.index not in commits]


def wait_for_units(
    stage: StageRun, units: Sequence[Unit], given: Sequence[Unit], failures: Container[int]
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

    if not VisibilityTimeout(stage.options.seconds_until_seen).wait_until(
        look, f"{stage.name}: the output of all units"
    ):
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
