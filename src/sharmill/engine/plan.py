"""The frozen plan of a stage, and the ledger of the units that are complete.

A plan is bound to its identity, which contains everything that the output bytes depend on: the configuration, the
inputs and the versions of packages. Differences between two identities are described in words.

The ledger has one log per process. A process appends each commit as one JSON line and syncs it to disk; notes about
attempts go into the same log. A process that is killed can therefore leave only one incomplete last line, which does
not count as a record.
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
# The engine's own files in a stage's folder, except the plan and the folders of ranks.
_OWN_FILES: Final = (
    "done.json", "failures.jsonl", "rejects.jsonl", "revoked.jsonl", "merged", f"parts/{6 * '[0-9]'}.*",
    "logs/driver*.log", "logs/rank-[0-9]*.log",
)  # fmt: skip
_SHOWN_CHARACTERS: Final = 60
_FOLDER_KEYS: Final = {"folder", "from_run_dir"}
# Keys of an identity whose values mean nothing to people, each with the message about a change of its value.
_CHECKSUMS: Final = {"input": "the input has other content", "files": "files of the dataset have changed"}


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a clause for each difference between two identities, such as ``match.min_similarity is 0.7, was 0.6``."""
    changes = []
    for path, before, now in find_differences(old, new):
        top = path.partition(".")[0].partition("[")[0]
        changes.append(_CHECKSUMS.get(top) or f"{path} is {show(now)}, was {show(before)}")
    return list(dict.fromkeys(changes))


def find_differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost paths at which two nested values differ, with the old and the new value, in order of keys.

    The value is ``msgspec.UNSET`` on the side that lacks the key. Folders from ``identify_folder`` are equal if their
    resolved paths or their paths relative to the run directory are equal.

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
    """Return the stage with its plan's token, and the units of the plan; make a plan if there is none.

    A new plan is also made if ``restart`` is True, if one was requested, or if the plan is outdated and replacing it
    loses little work.

    Raises:
        ConfigError: the existing plan has another configuration, input or version, or the output belongs to another
            run.
    """
    refuse_linked_folders(stage)
    require_trusted_owner(stage.root, [stage.root / name for name in stage.folders])
    run_id = stage.run_dir.make_id()
    restart = restart or stage.dir.replan.exists()
    require_own_output(stage)
    identity = identify(stage)
    if stage.dir.identity.exists() and not restart:
        if is_plan_current(stage, identity):
            return stage.with_plan(stage.dir.read_token()), stage.dir.read_units()
    elif not restart and _is_planned(stage):
        # Another node has made the plan, but this node had not seen it until now.
        return read_or_make_plan(stage, restart=False)
    return _freeze(stage, identity, run_id)


def identify(stage: StageRun) -> dict[str, Any]:
    """Return everything that the output of a stage depends on, in the form in which it is stored.

    Raises:
        ConfigError: the configuration or an input cannot be used.
    """
    identity = stage.declaration.identity(stage)
    if stage.kind not in STAGES.own and stage.kind in STAGES.names():
        # The stage comes from a plug-in, whose version affects the output.
        identity |= {"package": STAGES.version(stage.kind)}
    # JSON has no tuples, and the keys are sorted.
    identity = stage.options.references.identify(identity, step_of(stage.kind))
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(identity, order="sorted"))
    return found


def is_plan_current(stage: StageRun, identity: dict[str, Any]) -> bool:
    """Return True if the stored plan of a stage was made with this identity, and False if it can be replaced.

    Raises:
        ConfigError: the plan has another configuration, input or version, and replacing it would lose work.
    """
    changes = find_changes(load_record(stage.dir.identity, dict[str, Any]), identity)
    # A new plan loses no work if all records were rejected so far.
    if changes and any(commit.num_out for commit in iterate_ledger(stage.dir)) and not _is_cheap_to_replan(stage):
        raise ConfigError(
            f"{stage.name} was started with other settings, inputs or versions in {stage.run_dir.path}: "
            f"{'; '.join(changes[:4])}. Restore them, choose another run_dir, or start the stage over with --restart",
            code="changed_plan",
        )
    return not changes


def _is_cheap_to_replan(stage: StageRun) -> bool:
    """Return True if a new plan loses little work.

    This is true of stages that read the output of all stages, such as checks, and of stages that declare it.
    """
    return "*" in stage.declaration.after or stage.declaration.is_cheap


def request_replan(stage: StageRun) -> None:
    """Request that the next run that reaches the stage makes a new plan for it, even without ``--restart``.

    The request is stored because the current run may end before it reaches the stage: it may be killed, or it may leave
    the rest to jobs.
    """
    if stage.dir.token_file.exists():
        write_atomic(stage.dir.replan, b"")


def request_replan_if_audio_came(stage: StageRun, has_audio: Callable[[Any, int | None], bool]) -> None:
    """Request another plan if the stage rejected all records, but the missing audio of one of them exists now.

    Args:
        has_audio: returns True if the audio of a record may exist; its second argument is the number of the source.
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
    """Return True if a plan exists.

    The check tries to create the plan's folder, because the file server answers that reliably, whereas the node's
    listing of the folder may be outdated.
    """
    make_folder(stage.dir.path)
    with stopping_errors(stage.dir.plan):
        # A process that was killed during this check may have left an empty folder.
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
    """Return the number of units of a plan, or None if the plan is damaged; a damaged plan can still be discarded."""
    try:
        return len(stage.dir.read_units())
    except (ConfigError, FileNotFoundError):
        return None


def discard_stage(stage: StageRun) -> None:
    """Remove the stage's plan, ledger and output, and the plans of the stages whose output is removed with it.

    The output belongs to this run, which has reserved it. The folders that ranks write to are removed first, so that
    ranks of these plans cannot publish any more. The output is removed durably before the plan. A process that is
    killed in between, or a power failure, therefore leaves no output without a plan.
    """
    with stopping_errors(stage.dir.path):
        dependents = dependent_folders(stage)
        for paths in (stage.dir, *dependents):
            remove_fences(paths, stage.root)
        # If there is no plan, the published files may belong to another run.
        is_planned = stage.dir.token_file.exists()
        if is_planned:
            # The totals name the products, so they are removed after them.
            remove(*_find_products(stage))
        remove(stage.dir.done)
        if is_planned and stage.publication is not None:
            stage.publication.discard()
        for paths in (*dependents, stage.dir):
            _remove_files(paths)


def _find_products(stage: StageRun) -> list[Path]:
    """Return the files that a stage has made for other stages; an empty list if its ``done.json`` is damaged.

    Raises:
        ConfigError: a file lies behind a link.
    """
    try:
        totals = stage.dir.read_totals()
    except ConfigError:
        # A stage with a damaged record can still be discarded.
        return []
    found = [stage.run_dir.path / file.name for file in totals.products.values()] if totals is not None else []
    require_trusted_owner(stage.run_dir.path, found)
    return found


def has_output(stage: StageRun) -> bool:
    """Return True if all products and published files of a finished stage are still in place."""
    has_products = all(path.exists() for path in _find_products(stage))
    return has_products and (stage.publication is None or stage.publication.is_complete())


def _remove_files(paths: StageDir) -> None:
    """Remove the engine's files from a stage's folder, the plan last. All other files stay."""
    folders = [paths.path / name for name in ("parts", "logs", "ranks", STAGING_NAME)]
    if paths.token_file.exists():
        remove_temp_files(paths.path)
        remove(*(path for pattern in _OWN_FILES for path in paths.path.glob(pattern)))
        remove_if_empty(*folders)
        # Sync before the plan is removed: files that reappeared after a power failure would be refused as foreign.
        fsync(paths.path)
        remove_at_once(paths.plan)
    remove_if_empty(*folders, paths.path, paths.path.parent)


def refuse_linked_folders(stage: StageRun) -> None:
    """Raise ConfigError if a folder, a log or a job file of the stage is a link or belongs to another user.

    A link is refused because its target may not belong to this run.
    """
    run = stage.run_dir
    # Submitit itself makes links with these names; SLURM does not write to them.
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
    """Make a new plan. Return the stage with the plan's token, and the units.

    Raises:
        ConfigError: the stage's folder has files that do not belong to the engine, and no plan.
    """
    # ``_is_planned`` leaves an empty folder if its process is killed.
    remove_if_empty(stage.dir.plan)
    make_folder(stage.dir.path)
    names = sorted(path.name for path in stage.dir.path.iterdir() if not path.name.startswith("."))
    # If a section has become a list, the folders of its stages lie in the folder of the former single stage.
    foreign = [name for name in names if name != "ranks" and not StageDir(stage.dir.path / name).token_file.exists()]
    if foreign and not stage.dir.token_file.exists():
        raise ConfigError(
            f"{stage.dir.path} contains {foreign[0]!r}, which sharmill did not write: choose another run_dir, or "
            "move that file away",
            code="foreign_output",
        )
    reserve([stage], restart=True)
    discard_stage(stage)
    make_folder(stage.dir.path)
    token = f"{run_id}-{secrets.token_hex(8)}"
    with open_folder_atomic(stage.dir.plan) as draft:
        units = list(stage.declaration.plan(replace(stage, plan_draft=draft)))
        write_new(draft / stage.dir.units.name, _lines.encode_lines(units))
        write_new(draft / stage.dir.identity.name, msgspec.json.encode(identity))
        write_new(draft / stage.dir.token_file.name, token.encode())
    return stage.with_plan(token), units


def read_ledger(paths: StageDir, units: Iterable[Unit]) -> dict[int, Commit]:
    """Return the commits of all complete units, by unit index. Records of another plan do not count."""
    return {commit.index: commit for commit in iterate_ledger(paths, {unit.index: unit.id for unit in units})}


def ledger_records(paths: StageDir) -> Tail[Commit | Note]:
    """Return a reader of the logs of all ranks."""
    return Tail(paths.ranks.ledger, Commit | Note)


def iterate_ledger(paths: StageDir, ids: Mapping[int, str] | None = None) -> Iterator[Commit]:
    """Yield the commits of a plan's units, with only one at a time in memory.

    A unit that was completed by two attempts has two commits with the same output.

    Args:
        ids: the ids of the units whose commits are wanted, by unit index; by default all units of the plan.
    """
    token = paths.ranks.token
    for record in ledger_records(paths).records():
        if counts(record, token) and (ids is None or ids.get(record.index) == record.id):
            yield record


def counts(record: Commit | Note, token: str) -> TypeGuard[Commit]:
    """Return True for a commit of the plan with this token."""
    return isinstance(record, Commit) and record.token == token


def committed_files(stage: StageRun) -> list[PublishedFile]:
    """Return the files of all units that the stage's current plan has completed, including revoked units."""
    if not stage.ranks.token:
        return []
    # Do not read the list of units, because it must be possible to discard a damaged plan too.
    commits = [*iterate_ledger(stage.dir), *read_revoked(stage).values()]
    return [file for commit in commits for file in commit.files]


def revoke(stage: StageRun, indices: Collection[int]) -> None:
    """Remove the commits of units from the ledger, so that the next run processes these units again.

    The commits are kept in a separate file, because the new results must be the same. If the call is interrupted,
    repeat it. Only the process that directs a run may call it.
    """
    remove_temp_files(stage.ranks.ledger)
    commits = read_ledger(stage.dir, stage.dir.read_units())
    revoked = {index: commits[index] for index in indices if index in commits} | read_revoked(stage)
    write_atomic(stage.dir.revoked, _lines.encode_lines(revoked.values()))
    kept = [commit for commit in commits.values() if commit.index not in indices]
    earlier = list(stage.ranks.ledger.glob("*.jsonl"))
    write_atomic(stage.ranks.ledger / f"{uuid4().hex}.jsonl", _lines.encode_lines(kept))
    remove(*earlier)


def read_revoked(stage: StageRun) -> dict[int, Commit]:
    """Return the commits that were revoked since the stage was last finished, by unit index."""
    if not stage.dir.revoked.exists():
        return {}
    return {commit.index: commit for commit in read_records(stage.dir.revoked, Commit)}


def find_outstanding(
    stage: StageRun, units: Sequence[Unit], done: Mapping[int, Commit], *, check: Sequence[Unit]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Return the commits whose output is in place, and the units without such a commit.

    The output of a unit is in place if its files have the sizes in the commit and its file of rejects exists. For a
    finished stage, the folders are only listed. This costs a shared file system little, and still finds files that were
    removed or replaced by links.

    Args:
        check: the units whose output is checked; other commits are trusted.

    Raises:
        ConfigError: a folder that leads to the output is a link, or belongs to another user.
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
            exists = path.name in list_folder(path.parent) if is_finished else _is_regular_file(path, size)
            if not exists:
                commits.pop(commit.index, None)
    return commits, [unit for unit in units if unit.index not in commits]


def wait_for_units(
    stage: StageRun, units: Sequence[Unit], given: Sequence[Unit], failures: Container[int]
) -> tuple[dict[int, Commit], list[Unit]]:
    """Wait until this node sees the output of all units that ranks have reported as complete.

    Args:
        units: all units of the stage.
        given: the units that the executor was given.
        failures: the indices of units that failed for good.

    Returns:
        The commits whose files are in place, and the units without such a commit.
    """
    found: tuple[dict[int, Commit], list[Unit]] = ({}, [])

    def look() -> bool:
        nonlocal found
        found = find_outstanding(stage, units, read_ledger(stage.dir, units), check=given)
        return all(unit.index in failures for unit in found[1])

    if not VisibilityTimeout(stage.options.seconds_until_seen).wait_until(
        look, f"{stage.name}: the output of all units"
    ):
        # Look once more, so that an error that persists is raised.
        look()
    return found


def _regular_files(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _is_regular_file(path: Path, size: int) -> bool:
    """Return True if a regular file of this size exists; a size of -1 stands for any size."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return S_ISREG(status.st_mode) and size in (status.st_size, -1)
