"""The frozen plan of a stage: made once, bound to the identity of its configuration, inputs and versions."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from sharmill.engine.fence import (
    claim_output,
    new_token,
    release_output,
    remove_fences,
    tokens_of,
)
from sharmill.engine.identity import find_changes
from sharmill.engine.locks import LOCK_NAME
from sharmill.engine.patience import Patience
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import decode_stored, read_stored, read_stored_lines
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError
from sharmill.staging import STAGING_NAME
from sharmill.storage import (
    fsync_directory,
    make_folder,
    path_aside,
    publish_directory,
    refuse_strangers,
    remove_asides,
    remove_at_once,
    remove_for_good,
    remove_if_empty,
    remove_tree,
    stopping_errors,
    write_atomic,
)

# The files of a unit in a stage's own folder: parts/000007.npy.
_UNIT_FILE = re.compile(r"\d{6}\..+")
_LOG = re.compile(r"(driver|rank-\d{3,})(\.old)?\.log")
_PLAN_ASIDE = re.compile(r"\.plan(-[0-9a-f]{32}|\.[0-9a-f]{32}\.tmp)")


def read_or_make_plan(stage: Stage, *, restart: bool) -> list[Unit]:
    """Return the units of the stage's plan; the plan is made if there is none. The stage gets the plan's token.

    Raises:
        ConfigError: there is a plan, but of another configuration, input or version; or the output is another run's.
    """
    stage.token = ""
    _refuse_linked_folders(stage)
    restart = restart or stage.dir.begin_anew.exists()
    identity = _as_stored(stage.references.identify(stage.identity(), stage.kind))
    if stage.dir.identity.exists() and not restart:
        before = read_identity(stage)
        changes = find_changes(before, identity)
        if not changes:
            stage.token = stage.dir.read_token()
            return load_plan(stage)
        begun = any(stage.dir.ledger.glob("*.jsonl"))
        if begun and not stage.replan_when_changed:
            raise ConfigError(
                f"{stage.name} was begun differently in {stage.run_dir.path}: {'; '.join(changes[:4])}. "
                "Restore that, choose another run_dir, or begin the stage anew",
                code="changed_plan",
            )
    elif not restart and _is_planned(stage):
        # Another node has made the plan, and this one did not see it yet.
        return read_or_make_plan(stage, restart=False)
    return _freeze(stage, identity)


def mark_to_begin_anew(stage: Stage) -> None:
    """Have the next run that comes to the stage begin it anew, also one without ``--restart``.

    A run may end before it has come there itself: killed, or since jobs are to go on.
    """
    if stage.dir.token_file.exists():
        with stopping_errors(stage.dir.plan):
            write_atomic(stage.dir.begin_anew, b"")


def _is_planned(stage: Stage) -> bool:
    """Return True if there is a plan, by the answer of the server: whatever a node sees, only one makes a folder."""
    make_folder(stage.dir.path)
    with stopping_errors(stage.dir.plan):
        # Left by a process that was killed here.
        remove_if_empty(stage.dir.plan)
        try:
            stage.dir.plan.mkdir()
        except FileExistsError:
            what = str(stage.dir.identity)
            return Patience(stage.seconds_until_seen).wait_until(stage.dir.identity.exists, what)
        remove_if_empty(stage.dir.plan)
    return False


def read_identity(stage: Stage) -> Any:
    """Return the identity that the stage's plan is bound to."""
    return decode_stored(stage.dir.identity, read_stored(stage.dir.identity), dict[str, Any])


def load_plan(stage: Stage) -> list[Unit]:
    """Return the units of a plan that is known to exist."""
    return list(iterate_plan(stage))


def count_planned(stage: Stage) -> int | None:
    """Return the number of units of a plan, or None where it is damaged: it is to be discarded all the same."""
    try:
        return len(load_plan(stage))
    except (ConfigError, FileNotFoundError):
        return None


def iterate_plan(stage: Stage) -> Iterator[Unit]:
    """Return an iterator over the units of a plan that is known to exist."""
    path = stage.dir.units
    return (decode_stored(path, line, Unit) for line in read_stored_lines(path))


def discard_stage(stage: Stage, keep: str) -> None:
    """Remove the stage's plan, ledger and output, and the plans of the stages whose output goes with that.

    The output is that of this run: it is claimed for the plan to come, whose token is ``keep``. First of all go the
    folders that ranks write to, so that none of these plans can publish any more. The output goes before the plan, for
    good, so that neither a process that dies in between nor a loss of power leaves output that belongs to nothing: by
    the ledger its units are to be done again.
    """
    later = stage.later()
    with stopping_errors(stage.dir.path):
        gone = {token for paths in (stage.dir, *later) for token in tokens_of(paths)} - {keep}
        for paths in (stage.dir, *later):
            remove_fences(paths, stage.root, keep)
        remove_for_good([stage.dir.done])
        # Without a plan, what lies where the stage publishes is not this run's to remove.
        if stage.dir.token_file.exists():
            stage.discard()
        for paths in later:
            _remove_parts(paths)
            _remove_own_files(paths)
            remove_if_empty(paths.path / "ranks", paths.path, paths.path.parent)
        release_output(stage.claims[0], gone)
        if not stage.shares_root:
            _remove_parts(stage.dir, stage.folders)
        _remove_own_files(stage.dir)


def remove_run(stage: Stage) -> None:
    """Remove the run directory of a finished stage that is alone in it; what others have put there stays.

    It is renamed first, so that no later run takes what a killed process has left of it for a state to go on from;
    ``remove_asides`` removes that.
    """
    folder = stage.run_dir.path
    aside = path_aside(folder)
    paths = StageDir(aside / stage.name)
    with stopping_errors(folder):
        folder.rename(aside)
        fsync_directory(folder.parent)
        remove_fences(paths, stage.root if stage.shares_root else paths.path)
        if not stage.shares_root:
            _remove_parts(paths, stage.folders)
        _remove_own_files(paths)
        remove_if_empty(paths.path / "ranks", paths.path, aside)
        if aside.exists():
            aside.rename(folder)


def _remove_parts(paths: StageDir, folders: Sequence[str] = Stage.folders) -> None:
    """Remove the files of units in the stage's own folder, and the staging folder."""
    if not paths.token_file.exists():
        return
    for name in folders:
        folder = paths.path / name
        for path in folder.iterdir() if folder.is_dir() else ():
            if _UNIT_FILE.fullmatch(path.name):
                remove_tree(path)
        remove_if_empty(folder)
    remove_if_empty(paths.path / STAGING_NAME)


def _remove_own_files(paths: StageDir) -> None:
    """Remove from a stage's folder what the engine writes there beside the ranks' folders, the plan last."""
    for path in paths.path.iterdir() if paths.path.is_dir() else ():
        if _PLAN_ASIDE.fullmatch(path.name):
            remove_tree(path)
    if not paths.token_file.exists():
        return
    remove_asides(paths.path)
    for path in (paths.done, paths.failures, paths.rejects, paths.revoked, paths.merged):
        remove_tree(path)
    for path in paths.logs.glob("*.log"):
        if _LOG.fullmatch(path.name):
            remove_tree(path)
    remove_if_empty(paths.logs)
    # What came back without the plan would be refused as a stranger's.
    fsync_directory(paths.path)
    remove_at_once(paths.plan)


def _refuse_linked_folders(stage: Stage) -> None:
    """Raise ConfigError where a folder of the stage, a log or a file of a cluster's jobs is a link or a stranger's.

    What lies behind a link is not this run's to change.
    """
    for paths in (stage.dir, *stage.later()):
        refuse_strangers(stage.run_dir.path, paths.folders_of_ranks)
        refuse_strangers(stage.run_dir.path, (paths.logs, paths.merged))
        refuse_strangers(stage.run_dir.path, (paths.identity, paths.units, paths.token_file))
        refuse_strangers(stage.run_dir.path, paths.logs.glob("*"))
    run = stage.run_dir
    refuse_strangers(run.path, (run.manifests, run.copies, run.jobs))
    # Submitit itself makes links of such names, which SLURM does not write to.
    refuse_strangers(run.path, (path for path in run.jobs.glob("*") if not path.match(".submission_file_*.sh")))
    refuse_strangers(stage.root, (stage.root / name for name in (STAGING_NAME, *stage.folders)))


def _freeze(stage: Stage, identity: dict[str, Any]) -> list[Unit]:
    # An empty one was left by a process that was killed while it asked whether there is a plan.
    remove_if_empty(stage.dir.plan)
    _refuse_foreign_folder(stage)
    token = new_token()
    ranks = stage.dir.ranks_of(token)
    make_folder(ranks)
    try:
        claim_output(stage, token, alone=stage.replaces_root)
    except BaseException:
        remove_if_empty(ranks, ranks.parent)
        raise
    discard_stage(stage, keep=token)
    aside = stage.dir.path / f".plan-{uuid4().hex}"
    with stopping_errors(aside):
        try:
            aside.mkdir()
            units = list(stage.plan(aside))
            with (aside / stage.dir.units.name).open("wb") as stream:
                for unit in units:
                    stream.write(msgspec.json.encode(unit) + b"\n")
            (aside / stage.dir.identity.name).write_bytes(msgspec.json.encode(identity))
            (aside / stage.dir.token_file.name).write_text(token)
            publish_directory(aside, stage.dir.plan)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            release_output(stage.claims[0], [token])
            remove_if_empty(ranks, ranks.parent)
            raise
    stage.token = token
    return units


def _as_stored(identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity as it is read back, to be compared: JSON has no tuples, and the keys are stored in order."""
    return msgspec.json.decode(msgspec.json.encode(identity, order="sorted"))


def _refuse_foreign_folder(stage: Stage) -> None:
    """Raise ConfigError where the stage's folder has files, but no plan and nothing that one leaves on its way."""
    paths = stage.dir
    if paths.token_file.exists() or not paths.path.exists():
        return
    own = re.compile(rf"ranks|{re.escape(STAGING_NAME)}|{re.escape(LOCK_NAME)}.*|{_PLAN_ASIDE.pattern}")
    foreign = [path.name for path in sorted(paths.path.iterdir()) if not own.fullmatch(path.name)]
    # Left by a process that asked whether there is a plan, on a disk that removes nothing.
    foreign = [name for name in foreign if name != paths.plan.name or any(paths.plan.iterdir())]
    ranks = paths.path / "ranks"
    foreign += [f"ranks/{p.name}" for p in sorted(ranks.glob("[!.]*")) if p.name not in tokens_of(paths)]
    if foreign:
        raise ConfigError(
            f"{paths.path} has {foreign[0]!r}, which is not sharmill's: choose another run_dir, or move that away",
            code="foreign_output",
        )
