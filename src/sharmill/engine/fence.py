"""The fence around the output of a stage: only ranks of the present plan, of one run, can publish there.

Each plan has a random token, which its ranks carry from the start on; it begins with the id of the run, which tells
whose its folders are. All that they write lies below two folders that are named by it: ``ranks/<token>`` in the stage's
folder of the run directory, and one in the staging folder beside the final files. Only the process that directs the run
makes these; a restart removes them before anything else, so that every late write and rename of an older rank fails.

A reservation keeps other runs from folders of a dataset directory until its run has published all. It is one file in
the staging folder, called by the random id in the run directory, so a run that was moved is the same run. A copy has
the same id: as long as the first directory is there, the reservation and the jobs are those of the first alone. It
names the folders of all unfinished stages of the run. As long as it is there, nobody but its run has published in these
folders since they were found to be free or the run's own.
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
# In the place of the name of a folder: the directory as a whole.
_ALL = "."
_TOKEN = "-".join(2 * [16 * "[0-9a-f]"])


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a reservation: the run, and the folders that it has reserved.

    ``device`` is the number, on ``host``, of the file system that the run directory's parent is on, and ``inode`` that
    of the run directory on any host.
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
    """Reserve the folders of those of a run's stages that are not done, or of all on a restart.

    The run looks before it writes, since its reservation must not be in the way of one that is there, and after it.
    So of two that come at once one at least sees the other, and perhaps both give way.

    Raises:
        ConfigError: another run has reserved one of them, or has made what is there; nothing is reserved then.
    """
    publishing = _publishing(stages)
    unfinished = [(stage, own) for stage, own in publishing if restart or not stage.dir.is_finished()]
    if not unfinished:
        # A run that was killed between the end of its last stage and this may have left one.
        release(stages)
        return
    root, run_dir = unfinished[0][1].root, unfinished[0][0].run_dir
    require_writable(root)
    wanted = {folder for _, own in unfinished for folder in own.reserves()}
    if any(own.replaces_root and (restart or not stage.dir.token_file.exists()) for stage, own in unfinished):
        # What others are adding to the directory would be lost.
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
                # Nobody else can come in between any more.
                publication.check_output()
    except BaseException:
        _keep(root, run_id, before)
        raise


def require_own_output(stage: StageRun) -> None:
    """Raise ConfigError if a stage would publish into what another run has reserved, or has made."""
    if (own := stage.publication) is None:
        return
    refuse_reservations(own.root, stage.run_dir.read_id(), own.reserves())
    # A reservation without a plan says nothing about what was put there since.
    if not (_own_folders(own.root, stage.run_dir).issuperset(own.reserves()) and stage.dir.token_file.exists()):
        own.check_output()


def release(stages: Sequence[StageRun]) -> None:
    """Give up what stages of a run have reserved, but what those of them need that are begun and not finished."""
    publishing = _publishing(stages)
    if publishing:
        root, run_dir = publishing[0][1].root, publishing[0][0].run_dir
        given_up = {folder for _, own in publishing for folder in own.reserves()}
        begun = [(stage, own) for stage, own in publishing if stage.dir.token_file.exists()]
        needed = {folder for stage, own in begun if not stage.dir.is_finished() for folder in own.reserves()}
        _keep(root, run_dir.read_id(), _own_folders(root, run_dir) - (given_up - needed))


def _publishing(stages: Sequence[StageRun]) -> list[tuple[StageRun, Publication]]:
    return [(stage, stage.publication) for stage in stages if stage.publication is not None]


def release_cancelled(run_dir: RunDir) -> list[Path]:
    """Give up what a run has reserved; return the folders that stay reserved, since it has published files there.

    Nobody else could use these folders in any case. The caller holds the run directory's lock, and no rank is left.
    """
    root, own = run_dir.read_reserved(), run_dir.read_id()
    if root is None:
        return []
    used = {folder for folder in _own_folders(root, run_dir) if any((root / folder).glob("*"))}
    _remove_plans(root, own)
    _keep(root, own, used)
    return [root / folder for folder in sorted(used)]


def require_original(run_dir: RunDir) -> None:
    """Raise ConfigError unless this user has begun a run in this very directory: only then it is his to end."""
    with suppress(FileNotFoundError):
        status = run_dir.id.lstat()
        # Links of a backup, within a folder of one's own, bring nothing of another run.
        is_linked = status.st_nlink > 1 and run_dir.path.stat().st_uid != os.geteuid()
        refuse(
            (
                status.st_uid != os.geteuid(),
                f"{run_dir.id} belongs to another user, and may name any run: let that user cancel, or end jobs by "
                "scancel",
            ),
            (
                is_linked or not S_ISREG(status.st_mode),
                f"{run_dir.id} is no file of its own, and may be that of any run: put a copy in its place",
            ),
            code="foreign_output",
        )
    require_trusted_owner(run_dir.path, [run_dir.reserved])
    refuse_copy(run_dir)
    if (root := run_dir.read_reserved()) is not None:
        _own_folders(root, run_dir)


def refuse_copy(run_dir: RunDir) -> None:
    """Raise ConfigError for a copy of a directory in which a run was begun: its id would find the jobs of that run."""
    request = run_dir.read_request()
    if request is not None and request.run and _is_copy(run_dir, request.run):
        raise ConfigError(
            f"{run_dir.path} is a copy of {request.run}, in which the run was begun: cancel that, or go on there; for "
            f"another run here, remove {run_dir.id} and use --restart",
            code="reserved",
        )


def _is_copy(run_dir: RunDir, first: str) -> bool:
    """Return True if a run was begun in another directory, which is still there: else it was moved."""
    if _is_missing(first):
        return False
    original = RunDir(Path(first))
    try:
        # By the inode: mounted twice, a directory may be on two devices.
        is_same = original.path.stat().st_ino == run_dir.path.stat().st_ino
        return not is_same and original.read_id() == run_dir.read_id()
    except (OSError, ValueError):
        return True  # what cannot be looked at from here may be there


def refuse_reservations(root: Path, own: str = "", folders: Collection[str] = (_ALL,)) -> None:
    """Raise ConfigError if another run than that of an id has reserved one of these folders, by default any.

    One whose run directory was removed on this host by this user goes.
    """
    for path in _find(root, f"[!.]*{_SUFFIX}") if folders else ():
        other, gone = _read(path), ""
        if other is None or other.id == own or not (_ALL in folders or {*folders} & {*other.folders}):
            continue
        if _is_missing(other.run):
            gone = ", a run directory that is not there any more, or cannot be seen from here"
            if _is_of_here(other):
                log.warning("%s has gone, and so does its reservation %s", other.run, path)
                # Ranks that were left have lost their ledger, and lose their staging folder now.
                _remove_plans(root, other.id)
                _keep(root, other.id, ())
                continue
        raise ConfigError(
            f"{root} is reserved: {other.user} on {other.host} has been at work on {', '.join(other.folders)} there "
            f"since {other.since}, from {other.run}{gone}. Wait until that run is finished, or choose another "
            f"dataset_dir; if it will never go on: sharmill cancel {other.run}, or remove {path}",
            code="reserved",
        )


def _place(run: Path) -> tuple[str, str, int]:
    """Return this host, this user, and the number of the file system that a run directory's parent is on here."""
    return socket.gethostname(), user_name(), run.parent.stat().st_dev


def _is_of_here(reservation: Reservation) -> bool:
    """Return True if this user has made a reservation on this host, by a run directory on the file system that is here.

    One that is not mounted leaves an empty folder of another one.
    """
    with suppress(OSError):
        return _place(Path(reservation.run)) == (reservation.host, reservation.user, reservation.device)
    return False


def _is_missing(run: str) -> bool:
    """Return True if a run directory is not there, as far as this user may see."""
    try:
        Path(run).lstat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)  # what lies in a private home, say, may be there
    return False


def _staging(root: Path) -> Path:
    """Return the staging folder of a directory.

    Raises:
        ConfigError: it is a link: what lies behind it is not the run's to change.
    """
    require_trusted_owner(root, [root / STAGING_NAME])
    return root / STAGING_NAME


def _path(root: Path, run_id: str) -> Path:
    return _staging(root) / f"{run_id}{_SUFFIX}"


def _find(root: Path, pattern: str) -> list[Path]:
    """Return what matches a pattern in the staging folder, in order; another run may remove the folder meanwhile."""
    with suppress(FileNotFoundError):
        return sorted(_staging(root).glob(pattern))
    return []


def _read(path: Path) -> Reservation | None:
    try:
        return msgspec.json.decode(read_stored(path), type=Reservation)
    except FileNotFoundError:
        return None
    except NOT_JSON as error:
        raise ConfigError(
            f"{path} is no reservation: if no run is at work on {path.parent.parent}, remove that file", code="reserved"
        ) from error


def _own_folders(root: Path, run_dir: RunDir) -> set[str]:
    """Return the folders of a directory that a run has reserved.

    Raises:
        ConfigError: another directory has, and this one is a copy of it.
    """
    path = _path(root, run_dir.read_id())
    found = _read(path)
    if found is None:
        return set()
    is_gone = _is_missing(found.run)
    try:
        held = (run_dir if is_gone else RunDir(Path(found.run))).read_reserved()
        # It does not if the dataset directory was moved or copied as well.
        is_held = held is not None and held.exists() and held.samefile(root)
    except OSError:
        is_held = True
    # Gone, it was moved, unless it lies on another host.
    is_own = not is_held or (_is_of_here(found) if is_gone else not _is_copy(run_dir, found.run))
    if not is_own and found.inode != run_dir.path.stat().st_ino:
        raise ConfigError(
            f"{root} is reserved by {found.run} on {found.host}, and {run_dir.path} seems to be a copy of that run "
            "directory: go on there, or choose another dataset_dir; if you moved it here, or that run will never go "
            f"on: remove {path}",
            code="reserved",
        )
    return {*found.folders}


# Another run may remove the empty folder at this moment.
@retry(retry=retry_if_exception_type(FileNotFoundError), stop=stop_after_attempt(10), reraise=True)
def _write(root: Path, reservation: Reservation) -> None:
    write_atomic(_path(root, reservation.id), msgspec.json.encode(reservation) + b"\n")


def _keep(root: Path, run_id: str, folders: Collection[str]) -> None:
    """Have the reservation of a run be for these folders alone, and go where there are none."""
    path, staging = _path(root, run_id), _staging(root)
    if not staging.is_dir():
        return
    if folders:
        if (found := _read(path)) is not None:
            _write(root, msgspec.structs.replace(found, folders=sorted(folders)))
        return
    path.unlink(missing_ok=True)
    # Of this run alone: others may be making theirs. Names of tokens and reservations begin with the id.
    for aside in _find(root, f".{run_id}*.tmp"):
        remove(aside)
    remove_if_empty(staging)
    # A stage is noted as finished elsewhere: what came back after that would stay.
    for folder in (staging, root):
        with suppress(FileNotFoundError):
            fsync(folder)


def _remove_plans(root: Path, run_id: str) -> None:
    """Remove the staging folders of the run with this id, of which no rank is left."""
    for folder in _find(root, f"{run_id}-*"):
        remove_at_once(folder)


def fenced_folders(stage: StageRun) -> list[Path]:
    """Return all folders that the ranks of the stage's plan write to."""
    return [
        *stage.ranks.all,
        token_staging(stage.root, stage.token),
        *(stage.root / name for name in stage.folders),
    ]


def make_fence(stage: StageRun) -> None:
    """Make all folders that the ranks of the stage's plan write to; those that are there stay as they are."""
    remove_temp_files(stage.dir.path / "ranks")
    for folder in (*fenced_folders(stage), stage.dir.logs):
        make_folder(folder)


def wait_for_plan(stage: StageRun, patience: VisibilityTimeout) -> None:
    """Wait until this node sees the stage's plan and the folders that ranks write to; the caller looks at them."""
    paths, folders = stage.dir, fenced_folders(stage)
    patience.wait_until(
        lambda: paths.read_token() == stage.token and all(folder.is_dir() for folder in folders),
        f"{stage.name}: the plan {stage.token}, or a folder of it,",
    )
    for root in dict.fromkeys((stage.run_dir.path, stage.root)):
        require_trusted_owner(root, folders)


def require_current(stage: StageRun) -> None:
    """Raise FatalError unless ranks of the stage's plan may write: another process has replaced or finished it."""
    if not is_current(stage):
        raise superseded(stage)


def is_current(stage: StageRun) -> bool:
    """Return True as long as ranks of the stage's plan may write."""
    return stage.ranks.path.is_dir() and token_staging(stage.root, stage.token).is_dir()


def superseded(stage: StageRun) -> FatalError:
    """Return the error of a rank whose plan is not the present one any more, or was never seen on its node."""
    seconds = stage.options.seconds_until_seen
    late = f", or cannot be seen on this node even {seconds:g} s later (executor.seconds_until_seen)" if seconds else ""
    return FatalError(
        f"{stage.name}: the plan {stage.token} that this rank works for has been replaced or finished by another "
        f"process in {stage.run_dir.path}{late}: it stops and changes nothing",
        code="superseded_plan",
    )


def remove_fences(paths: StageDir, root: Path) -> None:
    """Remove the folders of a stage's plans: whatever their ranks still write comes to nothing."""
    for ranks in (paths.path / "ranks").glob(_TOKEN):
        for folder in (root, paths.path):
            remove_at_once(token_staging(folder, ranks.name))
        remove_at_once(ranks)
    remove_temp_files(paths.path / "ranks")


def stop_ranks(stage: StageRun) -> None:
    """Stop ranks that are at work for the stage's plan, which stays with what they have done: a later run goes on."""
    for ranks in (stage.dir.path / "ranks").glob(_TOKEN):
        remove_at_once(token_staging(stage.root, ranks.name))
