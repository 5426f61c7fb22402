"""The frozen plan of a stage: made once, bound to the identity of its configuration, inputs and versions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import msgspec

from sharmill.engine.fence import remove_fences
from sharmill.engine.identity import find_changes
from sharmill.engine.patience import Patience
from sharmill.engine.reservations import make_run_id, new_token, require_own_output, reserve
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError
from sharmill.files.staging import STAGING_NAME
from sharmill.files.storage import (
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
from sharmill.files.stored import decode_stored, read_stored, read_stored_lines
from sharmill.registry import STAGES

# What the engine writes in a stage's folder, beside the plan and the folders of ranks; parts are those of units.
_OWN_FILES = (
    "done.json", "failures.jsonl", "rejects.jsonl", "revoked.jsonl", "merged", f"parts/{6 * '[0-9]'}.*",
    "logs/driver*.log", "logs/rank-[0-9]*.log",
)  # fmt: skip


def read_or_make_plan(stage: Stage, *, restart: bool) -> list[Unit]:
    """Return the units of the stage's plan; the plan is made if there is none. The stage gets the plan's token.

    Raises:
        ConfigError: there is a plan, but of another configuration, input or version; or the output is another run's.
    """
    stage.token = ""
    _refuse_linked_folders(stage)
    run_id = make_run_id(stage.run_dir, stage.seconds_until_seen)
    restart = restart or stage.dir.begin_anew.exists()
    require_own_output(stage)
    identity = _as_stored(stage.references.identify(_identity(stage), stage.kind))
    if stage.dir.identity.exists() and not restart:
        changes = find_changes(read_identity(stage), identity)
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
    return _freeze(stage, identity, run_id)


def _identity(stage: Stage) -> dict[str, Any]:
    """Return the identity of a stage, with the version of the package that brings it, if that is another."""
    is_added = stage.kind not in STAGES.own and stage.kind in STAGES.names()
    return stage.identity() | ({"package": STAGES.version(stage.kind)} if is_added else {})


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


def discard_stage(stage: Stage) -> None:
    """Remove the stage's plan, ledger and output, and the plans of the stages whose output goes with that.

    The output is that of this run, which has reserved it. First of all go the folders that ranks write to, so that none
    of these plans can publish any more. The output goes before the plan, for good, so that neither a process that dies
    in between nor a loss of power leaves output that belongs to nothing: by the ledger its units are to be done again.
    """
    with stopping_errors(stage.dir.path):
        for paths in (stage.dir, *stage.later()):
            remove_fences(paths, stage.root)
        remove_for_good([stage.dir.done])
        # Without a plan, what lies where the stage publishes is not this run's to remove.
        if stage.dir.token_file.exists():
            stage.discard()
        for paths in (*stage.later(), stage.dir):
            _remove_files(paths)


def _remove_files(paths: StageDir) -> None:
    """Remove from a stage's folder what the engine writes there, the plan last; what others have put there stays."""
    folders = [paths.path / name for name in ("parts", "logs", "ranks", STAGING_NAME)]
    if paths.token_file.exists():
        remove_asides(paths.path)
        for pattern in _OWN_FILES:
            for path in paths.path.glob(pattern):
                remove_tree(path)
        remove_if_empty(*folders)
        # What came back without the plan would be refused as a stranger's.
        fsync_directory(paths.path)
        remove_at_once(paths.plan)
    remove_if_empty(*folders, paths.path, paths.path.parent)


def _refuse_linked_folders(stage: Stage) -> None:
    """Raise ConfigError where a folder of the stage, a log or a file of a cluster's jobs is a link or a stranger's.

    What lies behind a link is not this run's to change.
    """
    run = stage.run_dir
    # Submitit itself makes links of such names, which SLURM does not write to.
    jobs = [path for path in run.jobs.glob("*") if not path.match(".submission_file_*.sh")]
    own = [run.manifests, run.copies, run.jobs, *jobs]
    for paths in (stage.dir, *stage.later()):
        own += [
            *paths.folders_of_ranks,
            paths.identity,
            paths.units,
            paths.token_file,
            paths.merged,
            paths.logs,
            *paths.logs.glob("*"),
        ]
    refuse_strangers(run.path, own)
    refuse_strangers(stage.root, (stage.root / name for name in (STAGING_NAME, *stage.folders)))


def _refuse_foreign_folder(stage: Stage) -> None:
    """Raise ConfigError where the stage's folder has files, but no plan and nothing that one leaves on its way."""
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


def _freeze(stage: Stage, identity: dict[str, Any], run_id: str) -> list[Unit]:
    _refuse_foreign_folder(stage)
    reserve([stage], restart=True)
    discard_stage(stage)
    make_folder(stage.dir.path)
    token, aside = new_token(run_id), path_aside(stage.dir.plan)
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
            raise
    stage.token = token
    return units


def _as_stored(identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity as it is read back, to be compared: JSON has no tuples, and the keys are stored in order."""
    return msgspec.json.decode(msgspec.json.encode(identity, order="sorted"))
