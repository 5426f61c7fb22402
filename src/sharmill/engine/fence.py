"""The fence around the output of a stage: only ranks of one run's current plan can publish there.

Each plan has a random token, which is passed to its ranks. The token begins with the id of the run, so that the owner
of a folder is known. Ranks write only below two folders that are named by the token: ``ranks/<token>`` in the stage's
folder of the run directory, and a folder in the staging folder beside the final files. Only the process that directs
the run creates them. A restart removes them first, so every late write or rename by an older rank fails.

A reservation keeps other runs out of folders of a dataset directory until its own run has published everything. It is
one file in the staging folder, named by the id of the run, and lists the folders of all unfinished stages of the run.
The id is a random number in the run directory. A run directory that was moved keeps its id and its reservation. A copy
has the same id; while the original exists, the reservation and the jobs belong to the original only. While a
reservation exists, only its run publishes into these folders.
"""

import logging
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Annotated

import msgspec
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from sharmill.engine.run_dir import RunDir, StageDir
from sharmill.engine.stage import Publication, StageRun
from sharmill.errors import ConfigError, FatalError, refuse
from sharmill.files.atomic import (
    fsync,
    make_folder,
    remove,
    remove_at_once,
    remove_if_empty,
    remove_temp_files,
    require_writable,
    write_atomic,
)
from sharmill.files.host import user_name
from sharmill.files.shared_disk import VisibilityTimeout
from sharmill.files.staging import STAGING_NAME, token_staging
from sharmill.files.stored import NOT_JSON, read_stored
from sharmill.files.trust import require_trusted_owner

log = logging.getLogger(__name__)

_SUFFIX = ".reservation"
# The name that stands for the whole directory in a list of folders.
_ALL = "."
_TOKEN = "-".join(2 * [16 * "[0-9a-f]"])


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a reservation.

    Attributes:
        id: the id of the run.
        run: the path of the run directory.
        host, user, since: host, user and time of the reservation.
        device: the device number, on ``host``, of the file system that contains the parent of the run directory.
        inode: the inode number of the run directory, which is the same on all hosts.
        folders: the reserved folders.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    run: str
    host: str
    user: str
    since: str
    device: int
    inode: int = 0
    folders: list[str]


def reserve(stages: Sequence[StageRun], *, restart: bool) -> None:
    """Reserve the folders of a run's unfinished stages, or of all its stages on a restart.

    The run checks for other reservations before it writes its own, so as not to obstruct an earlier one, and again
    afterwards. If two runs reserve at the same time, at least one of them therefore sees the other and gives up;
    perhaps both do.

    Raises:
        ConfigError: another run has reserved one of the folders, or has published files into it. Nothing is reserved.
    """
    publishing = _publishing(stages)
    unfinished = [(stage, own) for stage, own in publishing if restart or not stage.dir.is_finished()]
    if not unfinished:
        # A reservation may be left from a run that was killed after its last stage.
        release(stages)
        return
    root, run_dir = unfinished[0][1].root, unfinished[0][0].run_dir
    require_writable(root)
    wanted = {folder for _, own in unfinished for folder in own.reserves()}
    if any(own.replaces_root and (restart or not stage.dir.token_file.exists()) for stage, own in unfinished):
        # The stage removes the whole directory, so no other run may be adding to it.
        wanted.add(_ALL)
    run_id, before = run_dir.make_id(), _own_folders(root, run_dir)
    refuse_reservations(root, run_id, wanted)
    write_atomic(run_dir.reserved, os.fsencode(root.resolve()))
    run = run_dir.path.resolve()
    host, user, device = _place(run)
    since = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    _write(
        root,
        Reservation(
            id=run_id, run=str(run), host=host, user=user, since=since, device=device,
            inode=run.stat().st_ino, folders=sorted(before | wanted - {_ALL}),
        ),
    )  # fmt: skip
    try:
        refuse_reservations(root, run_id, wanted)
        for _, publication in unfinished:
            if not before.issuperset(publication.reserves()):
                # Check the output only now, when no other run can publish any more.
                publication.check_output()
    except BaseException:
        _keep(root, run_id, before)
        raise


def require_own_output(stage: StageRun) -> None:
    """Raise ConfigError if a stage would publish into folders that another run has reserved or written."""
    if (own := stage.publication) is None:
        return
    refuse_reservations(own.root, stage.run_dir.read_id(), own.reserves())
    # A reservation without a plan does not prove that the output is this run's own, since other runs may have written
    # files meanwhile.
    if not (_own_folders(own.root, stage.run_dir).issuperset(own.reserves()) and stage.dir.token_file.exists()):
        own.check_output()


def release(stages: Sequence[StageRun]) -> None:
    """Release the reservations of a run's stages, except those of stages in progress."""
    publishing = _publishing(stages)
    if publishing:
        root, run_dir = publishing[0][1].root, publishing[0][0].run_dir
        released = {folder for _, own in publishing for folder in own.reserves()}
        planned = [(stage, own) for stage, own in publishing if stage.dir.token_file.exists()]
        needed = {folder for stage, own in planned if not stage.dir.is_finished() for folder in own.reserves()}
        _keep(root, run_dir.read_id(), _own_folders(root, run_dir) - (released - needed))


def _publishing(stages: Sequence[StageRun]) -> list[tuple[StageRun, Publication]]:
    return [(stage, stage.publication) for stage in stages if stage.publication is not None]


def release_cancelled(run_dir: RunDir) -> list[Path]:
    """Release the reservation of a cancelled run, except for folders with published files; return these folders.

    No other run could use these folders anyway. The caller holds the lock of the run directory, and no rank is left.
    """
    root, own = run_dir.read_reserved(), run_dir.read_id()
    if root is None:
        return []
    used = {folder for folder in _own_folders(root, run_dir) if any((root / folder).glob("*"))}
    _remove_plans(root, own)
    _keep(root, own, used)
    return [root / folder for folder in sorted(used)]


def require_original(run_dir: RunDir) -> None:
    """Raise ConfigError unless this user has started the run in this very directory, and may therefore end it."""
    with suppress(FileNotFoundError):
        status = run_dir.id.lstat()
        # Hard links in a directory of this user are harmless; a backup may have made them.
        is_linked = status.st_nlink > 1 and run_dir.path.stat().st_uid != os.geteuid()
        refuse(
            (
                status.st_uid != os.geteuid(),
                f"{run_dir.id} belongs to another user, and may name any run: let that user cancel the run, or end its "
                "jobs with scancel",
            ),
            (
                is_linked or not S_ISREG(status.st_mode),
                f"{run_dir.id} is a link, and may belong to another run: replace it with a copy",
            ),
            code="foreign_output",
        )
    require_trusted_owner(run_dir.path, [run_dir.reserved])
    refuse_copy(run_dir)
    if (root := run_dir.read_reserved()) is not None:
        _own_folders(root, run_dir)


def refuse_copy(run_dir: RunDir) -> None:
    """Raise ConfigError for a copy of a run directory, because its id would identify the jobs of the original run."""
    request = run_dir.read_request()
    if request is not None and request.run and _is_copy(run_dir, request.run):
        raise ConfigError(
            f"{run_dir.path} is a copy of {request.run}, in which the run was started: cancel or continue it there. "
            f"For a new run here, remove {run_dir.id} and use --restart",
            code="reserved",
        )


def _is_copy(run_dir: RunDir, first: str) -> bool:
    """Return True if a run was started in another directory that still exists. Otherwise the directory was moved."""
    if _is_missing(first):
        return False
    original = RunDir(Path(first))
    try:
        # Compare only inodes, because a file system that is mounted twice may have two device numbers.
        is_same = original.path.stat().st_ino == run_dir.path.stat().st_ino
        return not is_same and original.read_id() == run_dir.read_id()
    except (OSError, ValueError):
        return True  # the directory may exist, although it cannot be accessed from here


def refuse_reservations(root: Path, own: str = "", folders: Collection[str] = (_ALL,)) -> None:
    """Raise ConfigError if another run has reserved one of these folders (by default, any folder).

    Reservations are removed if this user made them on this host and their run directory is gone.

    Args:
        own: the id of this run, whose reservation is ignored.
    """
    for path in _find(root, f"[!.]*{_SUFFIX}") if folders else ():
        other, gone = _read(path), ""
        if other is None or other.id == own or not (_ALL in folders or {*folders} & {*other.folders}):
            continue
        if _is_missing(other.run):
            gone = ", a run directory that no longer exists or is not visible from here"
            if _is_of_here(other):
                log.warning("%s no longer exists; removing its reservation %s", other.run, path)
                # Remove the staging folders too, so that ranks still running cannot publish.
                _remove_plans(root, other.id)
                _keep(root, other.id, ())
                continue
        raise ConfigError(
            f"{root} is reserved: {other.user} on {other.host} has been working on {', '.join(other.folders)} there "
            f"since {other.since}, from {other.run}{gone}. Wait until that run is finished, or choose another "
            f"dataset_dir. If that run will never continue, use sharmill cancel {other.run}, or remove {path}",
            code="reserved",
        )


def _place(run: Path) -> tuple[str, str, int]:
    """Return this host, this user, and the device number of the file system that holds the run directory's parent."""
    return socket.gethostname(), user_name(), run.parent.stat().st_dev


def _is_of_here(reservation: Reservation) -> bool:
    """Return True if this user made a reservation on this host, and the file system with its run directory is mounted.

    If that file system is not mounted, its empty mount point belongs to another file system, with another device
    number.
    """
    with suppress(OSError):
        return _place(Path(reservation.run)) == (reservation.host, reservation.user, reservation.device)
    return False


def _is_missing(run: str) -> bool:
    """Return True if a run directory does not exist, as far as this user can tell."""
    try:
        Path(run).lstat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)  # another error does not prove that the directory is missing
    return False


def _staging(root: Path) -> Path:
    """Return the staging folder of a directory.

    Raises:
        ConfigError: the staging folder is a link, whose target may not belong to the run.
    """
    require_trusted_owner(root, [root / STAGING_NAME])
    return root / STAGING_NAME


def _path(root: Path, run_id: str) -> Path:
    return _staging(root) / f"{run_id}{_SUFFIX}"


def _find(root: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in the staging folder that match a pattern."""
    with suppress(FileNotFoundError):  # another run may remove the folder meanwhile
        return sorted(_staging(root).glob(pattern))
    return []


def _read(path: Path) -> Reservation | None:
    try:
        return msgspec.json.decode(read_stored(path), type=Reservation)
    except FileNotFoundError:
        return None
    except NOT_JSON as error:
        raise ConfigError(
            f"{path} is a damaged reservation: if no run is working on {path.parent.parent}, remove this file",
            code="reserved",
        ) from error


def _own_folders(root: Path, run_dir: RunDir) -> set[str]:
    """Return the folders of a directory that a run has reserved.

    Raises:
        ConfigError: the reservation belongs to another run directory, of which this one is a copy.
    """
    path = _path(root, run_dir.read_id())
    found = _read(path)
    if found is None:
        return set()
    is_gone = _is_missing(found.run)
    try:
        held = (run_dir if is_gone else RunDir(Path(found.run))).read_reserved()
        # The dataset directory may have been moved or copied as well; this is False then.
        is_held = held is not None and held.exists() and held.samefile(root)
    except OSError:
        is_held = True
    # If the recorded run directory is missing, it was moved here, unless it is on another host.
    is_own = not is_held or (_is_of_here(found) if is_gone else not _is_copy(run_dir, found.run))
    if not is_own and found.inode != run_dir.path.stat().st_ino:
        raise ConfigError(
            f"{root} is reserved by {found.run} on {found.host}, and {run_dir.path} seems to be a copy of that run "
            "directory: continue the run there, or choose another dataset_dir. If you have moved the directory here, "
            f"or that run will never continue, remove {path}",
            code="reserved",
        )
    return {*found.folders}


# Retry, because another run may remove the empty staging folder at any moment.
@retry(retry=retry_if_exception_type(FileNotFoundError), stop=stop_after_attempt(10), reraise=True)
def _write(root: Path, reservation: Reservation) -> None:
    write_atomic(_path(root, reservation.id), msgspec.json.encode(reservation) + b"\n")


def _keep(root: Path, run_id: str, folders: Collection[str]) -> None:
    """Restrict a run's reservation to these folders; remove it if there are none."""
    path, staging = _path(root, run_id), _staging(root)
    if not staging.is_dir():
        return
    if folders:
        if (found := _read(path)) is not None:
            _write(root, msgspec.structs.replace(found, folders=sorted(folders)))
        return
    path.unlink(missing_ok=True)
    # Remove temporary files of this run only, whose names begin with its id, because other runs may be writing theirs.
    for temporary in _find(root, f".{run_id}*.tmp"):
        remove(temporary)
    remove_if_empty(staging)
    # Sync the removal: if a power failure restored the reservation after the last stage, nothing would remove it again.
    for folder in (staging, root):
        with suppress(FileNotFoundError):
            fsync(folder)


def _remove_plans(root: Path, run_id: str) -> None:
    """Remove the staging folders of the run with this id."""
    for folder in _find(root, f"{run_id}-*"):
        remove_at_once(folder)


def fenced_folders(stage: StageRun) -> list[Path]:
    """Return all folders to which the ranks of the stage's plan write."""
    return [
        *stage.ranks.all,
        token_staging(stage.root, stage.token),
        *(stage.root / name for name in stage.folders),
    ]


def make_fence(stage: StageRun) -> None:
    """Create all folders to which the ranks of the stage's plan write; existing folders stay unchanged."""
    remove_temp_files(stage.dir.path / "ranks")
    for folder in (*fenced_folders(stage), stage.dir.logs):
        make_folder(folder)


def wait_for_plan(stage: StageRun, visibility: VisibilityTimeout) -> None:
    """Wait until this node sees the stage's plan and its folders, and check their owner.

    Return even if the time runs out; the caller must check that the plan is current.
    """
    paths, folders = stage.dir, fenced_folders(stage)
    visibility.wait_until(
        lambda: paths.read_token() == stage.token and all(folder.is_dir() for folder in folders),
        f"{stage.name}: the plan {stage.token}, or one of its folders,",
    )
    for root in dict.fromkeys((stage.run_dir.path, stage.root)):
        require_trusted_owner(root, folders)


def require_current(stage: StageRun) -> None:
    """Raise FatalError if another process has replaced or finished the stage's plan, so that its ranks must stop."""
    if not is_current(stage):
        raise superseded(stage)


def is_current(stage: StageRun) -> bool:
    """Return True if ranks of the stage's plan may still write."""
    return stage.ranks.path.is_dir() and token_staging(stage.root, stage.token).is_dir()


def superseded(stage: StageRun) -> FatalError:
    """Return the error of a rank whose plan is no longer current, or whose plan never became visible on its node."""
    seconds = stage.options.seconds_until_seen
    late = f", or is not visible on this node after {seconds:g} s (executor.seconds_until_seen)" if seconds else ""
    return FatalError(
        f"{stage.name}: the plan {stage.token} of this rank has been replaced or finished by another process in "
        f"{stage.run_dir.path}{late}; this process stops without changing anything",
        code="superseded_plan",
    )


def remove_fences(paths: StageDir, root: Path) -> None:
    """Remove the folders of a stage's plans, so that the ranks of these plans can no longer write anything."""
    for ranks in (paths.path / "ranks").glob(_TOKEN):
        for folder in (root, paths.path):
            remove_at_once(token_staging(folder, ranks.name))
        remove_at_once(ranks)
    remove_temp_files(paths.path / "ranks")


def stop_ranks(stage: StageRun) -> None:
    """Stop the ranks of the stage's plan. The plan and the finished work stay, so that a later run can continue."""
    for ranks in (stage.dir.path / "ranks").glob(_TOKEN):
        remove_at_once(token_staging(stage.root, ranks.name))
