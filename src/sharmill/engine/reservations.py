"""Reservations: a run keeps other runs from the folders of a dataset directory until their stages are finished.

A run reserves the folders of all its unfinished stages when it begins, all or none, by one file for each in the staging
folder. It names the run by the random id in its run directory, so a run that was moved, or copied, is the same run. As
long as a reservation is there, nobody but its run has published in the folder since it was found to be free or the
run's own.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from tenacity import retry, retry_if_exception_type

from sharmill.engine.patience import Patience
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.errors import ConfigError
from sharmill.files.host import user_name
from sharmill.files.staging import STAGING_NAME, token_staging
from sharmill.files.storage import (
    create_atomic,
    fsync_directory,
    make_folder,
    remove_asides,
    remove_at_once,
    remove_if_empty,
    require_writable,
    write_atomic,
)
from sharmill.files.stored import NOT_JSON, read_stored

log = logging.getLogger(__name__)

_SUFFIX = ".reservation"
_ID = re.compile(r"[0-9a-f]{16}")


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a reservation: the run that has reserved a folder.

    ``device`` is the number, on ``host``, of the file system that the run directory's parent is on.
    """

    id: Annotated[str, msgspec.Meta(pattern=f"^{_ID.pattern}$")]
    run: str
    host: str
    user: str
    since: str
    device: int


def read_run_id(run_dir: RunDir) -> str:
    """Return the id of a run, "" where it has none yet."""
    try:
        found = read_stored(run_dir.id).decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    if not _ID.fullmatch(found):
        raise ConfigError(
            f"{run_dir.id} is not the id of a run directory, by which its jobs and reservations are found: look for "
            "jobs with squeue, and remove the file once there are none",
            code="damaged_run_dir",
        )
    return found


def make_run_id(run_dir: RunDir, seconds_until_seen: float = 0.0) -> str:
    """Return the id of a run, made now if it has none: one that another node has made may be seen late."""
    if not read_run_id(run_dir):
        make_folder(run_dir.path)
        with suppress(FileExistsError):
            create_atomic(run_dir.id, secrets.token_hex(8).encode())
        Patience(seconds_until_seen).wait_until(lambda: bool(read_run_id(run_dir)), str(run_dir.id))
    return read_run_id(run_dir)


def new_token(run_id: str) -> str:
    """Return a random token for a plan of a run; it begins with the run's id, which tells whose its folders are."""
    return f"{run_id}-{secrets.token_hex(8)}"


def reserve(stages: Sequence[Stage], *, restart: bool) -> None:
    """Reserve the folders of those of a run's stages that are not done, or of all on a restart.

    Raises:
        ConfigError: another run has reserved one of them, or has made what is there; nothing is reserved then.
    """
    made: list[Path] = []
    try:
        for stage in stages:
            if stage.reserves[1] and (restart or not stage.dir.done.exists()):
                make_run_id(stage.run_dir, stage.seconds_until_seen)
                _reserve(stage, made, restart=restart)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
            remove_if_empty(path.parent)
        raise


def require_own_output(stage: Stage) -> None:
    """Raise ConfigError if a stage would publish into what another run has reserved, or has made."""
    own = read_run_id(stage.run_dir)
    are_own = [_is_own(path, own) for path in _files(stage)]
    # A reservation without a plan says nothing about what was put there since.
    if not all(are_own) or not stage.dir.token_file.exists():
        stage.check_output()


def release(stage: Stage) -> None:
    """Remove the staging folder of a finished stage, and its reservations if no other has still to publish there."""
    _remove(stage.root, [token_staging(stage.root, stage.token)], [])
    if not stage.is_published_later():
        _remove(stage.reserves[0], [], _own_files(stage))


def release_unbegun(stages: Sequence[Stage]) -> None:
    """Remove the reservations of those stages of a run that have not begun: the run ends."""
    begun = [stage for stage in stages if stage.dir.token_file.exists() and not stage.dir.done.exists()]
    kept = {path for stage in begun for path in _files(stage)}
    for stage in stages:
        _remove(stage.reserves[0], [], [path for path in _own_files(stage) if path not in kept])


def release_cancelled(run_dir: RunDir) -> list[Path]:
    """Remove the reservations of a run that is given up, and return those that stay: it has published files there.

    Nobody else could use these folders in any case. The caller holds the run directory's lock, and no rank is left.
    """
    if not run_dir.reserved.exists():
        return []
    root, own = Path(os.fsdecode(read_stored(run_dir.reserved))), read_run_id(run_dir)
    used = [path for path in _files_of(root, own) if any(_folder(path).glob("*"))]
    _remove_run(root, own, keep=used)
    return used


def refuse_reservations(root: Path) -> None:
    """Raise ConfigError if a run has reserved any folder of a dataset directory."""
    for path in _all_files(root):
        _is_own(path, "")


def _reserve(stage: Stage, made: list[Path], *, restart: bool) -> None:
    """Reserve the folders of a stage, and add the files that are new to ``made``."""
    root, run_dir = stage.reserves[0], stage.run_dir
    require_writable(root)
    own, run, directory = read_run_id(run_dir), run_dir.path.resolve(), os.fsencode(root.resolve())
    if stage.replaces_root and (restart or not stage.dir.token_file.exists()):
        # What others are adding to the directory would be lost.
        for path in _all_files(root):
            _is_own(path, own)
    if not run_dir.reserved.exists() or read_stored(run_dir.reserved) != directory:
        write_atomic(run_dir.reserved, directory)
    since = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    host, user, device = _place(run)
    reservation = Reservation(id=own, run=str(run), host=host, user=user, since=since, device=device)
    new = [path for path in _files(stage) if _create(path, reservation, made)]
    if new:
        # Nobody else can come in between any more.
        stage.check_output()


@retry(retry=retry_if_exception_type(FileNotFoundError))
def _create(path: Path, reservation: Reservation, made: list[Path]) -> bool:
    """Create a reservation and add it to ``made``; return False if the run has it already.

    Tried again where another run releases its own at this moment, and removes the folder with it.

    Raises:
        ConfigError: another run has it.
    """
    text = msgspec.json.encode(reservation) + b"\n"
    make_folder(path.parent)
    try:
        create_atomic(path, text)
    except FileExistsError:
        if not _is_own(path, reservation.id):
            raise FileNotFoundError(path) from None
        # Its run directory may have been moved since.
        write_atomic(path, text)
        return False
    made.append(path)
    return True


def _is_own(path: Path, own: str) -> bool:
    """Return True if a reservation is that of the run with this id, and False if it is not there.

    One whose run directory was removed on this host by this user goes.

    Raises:
        ConfigError: it is another run's.
    """
    reservation, root, gone = _read(path), path.parent.parent, ""
    if reservation is None or reservation.id == own:
        return reservation is not None
    if _is_missing(reservation.run):
        gone = ", a run directory that is not there any more, or cannot be seen from here"
        with suppress(OSError):
            # A file system that is not mounted leaves an empty folder of another one.
            if _place(Path(reservation.run)) == (reservation.host, reservation.user, reservation.device):
                log.warning("%s has gone, and so does its reservation %s", reservation.run, path)
                # Ranks that were left have lost their ledger, and lose their staging folder now.
                _remove_run(root, reservation.id)
                return False
    files = " ".join(map(str, _files_of(root, reservation.id)))
    raise ConfigError(
        f"{root} is reserved: {reservation.user} on {reservation.host} has been at work on "
        f"{_folder(path).relative_to(root)} there since {reservation.since}, from {reservation.run}{gone}. Wait until "
        "that run is finished, or choose another dataset_dir; if it will never go on: sharmill cancel "
        f"{reservation.run}, or remove {files}",
        code="reserved",
    )


def _place(run: Path) -> tuple[str, str, int]:
    """Return this host, this user, and the number of the file system that a run directory's parent is on here."""
    return socket.gethostname(), user_name(), run.parent.stat().st_dev


def _is_missing(run: str) -> bool:
    """Return True if a run directory is not there, as far as this user may see."""
    try:
        Path(run).lstat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)  # what lies in a private home, say, may be there
    return False


def _read(path: Path) -> Reservation | None:
    try:
        return msgspec.json.decode(read_stored(path), type=Reservation)
    except FileNotFoundError:
        return None
    except NOT_JSON as error:
        message = f"{path} is no reservation: if no run is at work on {path.parent.parent}, remove that file"
        raise ConfigError(message, code="reserved") from error


def _files(stage: Stage) -> list[Path]:
    """Return the paths of the reservations of a stage."""
    root, folders = stage.reserves
    return [root / STAGING_NAME / f"{folder.replace('/', '+')}{_SUFFIX}" for folder in folders]


def _folder(path: Path) -> Path:
    """Return the folder that a reservation is for."""
    return path.parent.parent / path.stem.replace("+", "/")


def _all_files(root: Path) -> list[Path]:
    return sorted((root / STAGING_NAME).glob(f"[!.]*{_SUFFIX}"))


def _files_of(root: Path, run_id: str) -> list[Path]:
    """Return the reservations in a directory of the run with this id."""
    found = []
    for path in _all_files(root):
        with suppress(ConfigError):  # one that is damaged is nobody's
            if (reservation := _read(path)) is not None and reservation.id == run_id:
                found.append(path)
    return found


def _own_files(stage: Stage) -> list[Path]:
    """Return the reservations of a stage that its run has."""
    files = _files(stage)
    return [path for path in _files_of(stage.reserves[0], read_run_id(stage.run_dir)) if path in files]


def _remove_run(root: Path, run_id: str, keep: Sequence[Path] = ()) -> None:
    """Remove the reservations and the staging folders of the run with this id, of which no rank is left."""
    plans = list((root / STAGING_NAME).glob(f"{run_id}-*"))
    _remove(root, plans, [path for path in _files_of(root, run_id) if path not in keep])


def _remove(root: Path, plans: Sequence[Path], files: Sequence[Path]) -> None:
    """Remove staging folders of plans and reservations, what killed processes left of any, and the empty folder."""
    staging = root / STAGING_NAME
    if not staging.is_dir() or not (plans or files):
        return
    for folder in plans:
        remove_at_once(folder)
    # An append, which writes a note there too, cannot begin as long as there is a reservation.
    remove_asides(staging)
    for path in files:
        path.unlink(missing_ok=True)
    remove_if_empty(staging)
    # A stage is noted as finished elsewhere: what came back after that would stay.
    fsync_directory(staging if staging.is_dir() else root)
