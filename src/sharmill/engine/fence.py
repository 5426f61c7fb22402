"""The fence around the output of a stage: only ranks of the present plan, of one run, can publish there.

Each plan has a random token, which its ranks carry from the start on. All that they write lies below two folders that
are named by it: ``ranks/<token>`` in the stage's folder of the run directory, and one in the staging folder beside the
final files. Only the process that directs the run makes these; a restart removes them before anything else, so that
every late write and rename of an older rank fails.

Where stages of several runs publish into one directory, a run claims its folders there as long as it is at work: all
of them when it begins or is submitted, and each stage its own again for its plan.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sharmill.engine.host import user_name
from sharmill.engine.rundir import RunDir, StageDir
from sharmill.engine.stage import Stage
from sharmill.engine.stored import NOT_JSON, decode_stored, read_stored
from sharmill.errors import ConfigError, FatalError
from sharmill.staging import STAGING_NAME, token_staging
from sharmill.storage import (
    create_atomic,
    fsync_directory,
    make_folder,
    remove_asides,
    remove_at_once,
    remove_if_empty,
    require_writable,
    stopping_errors,
    write_atomic,
)

log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[0-9a-f]{16}")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim: who is at work on a folder of ``root``, for the plan with this token.

    ``device`` is the number, on ``host``, of the file system that the run directory's parent is on.
    """

    token: str
    run: str
    host: str
    user: str
    since: str
    device: int | None = None


class RunClaim(msgspec.Struct, frozen=True):
    """The token of the claims that a run has made for stages without a plan, and the directory that these are in."""

    token: str
    directory: str


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(8)


def make_fence(stage: Stage) -> None:
    """Make all folders that the ranks of the stage's plan write to; those that are there stay as they are."""
    paths = stage.dir
    # Of plans that were given up before they were published.
    for token in tokens_of(paths) - {stage.token}:
        remove_at_once(paths.ranks_of(token))
    remove_asides(paths.path / "ranks")
    for folder in (*paths.folders_of_ranks, paths.logs):
        make_folder(folder)
    for folder in (token_staging(stage.root, stage.token), *(stage.root / name for name in stage.folders)):
        make_folder(folder)


def require_current(stage: Stage) -> None:
    """Raise FatalError unless ranks of the stage's plan may write: another process has replaced or finished it."""
    if not is_current(stage):
        raise superseded(stage)


def is_current(stage: Stage) -> bool:
    """Return True as long as ranks of the stage's plan may write."""
    return stage.dir.ranks.is_dir() and token_staging(stage.root, stage.token).is_dir()


def superseded(stage: Stage) -> FatalError:
    """Return the error of a rank whose plan is not the present one any more, or was never seen on its node."""
    late = (
        f", or cannot be seen on this node even {stage.seconds_until_seen:g} s later (executor.seconds_until_seen)"
        if stage.seconds_until_seen
        else ""
    )
    return FatalError(
        f"{stage.name}: the plan {stage.token} that this rank works for has been replaced or finished by another "
        f"process in {stage.run_dir.path}{late}: it stops and changes nothing",
        code="superseded_plan",
    )


def tokens_of(paths: StageDir) -> set[str]:
    """Return the tokens of a stage's plans: of the present one, and of those whose restart was interrupted."""
    folder = paths.path / "ranks"
    return {path.name for path in folder.iterdir() if _TOKEN.fullmatch(path.name)} if folder.is_dir() else set()


def remove_fences(paths: StageDir, root: Path, keep: str = "") -> None:
    """Remove the folders of a stage's tokens but one: whatever ranks of these plans still write comes to nothing."""
    for token in tokens_of(paths) - {keep}:
        for folder in (root, paths.path):
            remove_at_once(token_staging(folder, token))
        remove_at_once(paths.ranks_of(token))
    remove_asides(paths.path / "ranks")


def stop_ranks(stage: Stage) -> None:
    """Stop ranks that are at work for the stage's plan, which stays with what they have done: a later run goes on."""
    for token in tokens_of(stage.dir):
        remove_at_once(token_staging(stage.root, token))


def require_own_output(stage: Stage) -> None:
    """Raise ConfigError where the stage would publish into what another run has made, or is making."""
    if not _holds_claims(stage):
        stage.check_output()


def claim_output(stage: Stage, token: str, *, alone: bool = False) -> None:
    """Claim the folders that ``stage.claims`` names for the plan with this token, until ``release_output``.

    Args:
        alone: all that others are adding to the directory would be lost.

    Raises:
        ConfigError: another run has claimed one of them, or has made what is there; nothing is claimed then.
    """
    root, folders = stage.claims
    if not folders:
        return
    require_writable(root)
    if alone:
        _require_alone(stage)
    held = _holds_claims(stage)
    text, own = _claim_text(stage.run_dir, token), _own_tokens(stage) | _run_token(stage.run_dir)
    make_folder(root / STAGING_NAME)
    paths = [_claim_file(root, folder) for folder in folders]
    made: list[Path] = []
    try:
        for path in paths:
            if _create(path, text, own):
                made.append(path)
            elif not _names(path, [token]):
                write_atomic(path, text)
        if not held:
            # Nobody else can come in between any more.
            stage.check_output()
    except BaseException:
        # Those that were held before stay, whichever of the run's tokens they name by now; so does another run's.
        for path in made if held else paths:
            if _names(path, own | {token}):
                path.unlink(missing_ok=True)
        remove_if_empty(root / STAGING_NAME)
        raise


def claim_for_run(stages: Sequence[Stage], *, restart: bool) -> None:
    """Claim the folders of all these stages of a run that are not done, before any of them begins.

    Each stage takes its claims over with its plan, see ``claim_output``; ``release_run`` removes the others.

    Raises:
        ConfigError: another run has claimed one of them.
    """
    for stage in stages:
        root, folders = stage.claims
        if not folders or (stage.dir.done.exists() and not restart):
            continue
        require_writable(root)
        if stage.replaces_root and (restart or not stage.dir.token_file.exists()):
            _require_alone(stage)
        _holds_claims(stage)
        text = _claim_text(stage.run_dir, _make_run_claim(stage.run_dir, root))
        own = _own_tokens(stage) | _run_token(stage.run_dir)
        for folder in folders:
            _create(_claim_file(root, folder), text, own)


def release_run(run_dir: RunDir) -> None:
    """Remove the claims of a run that none of its stages has taken over."""
    if (claim := _read_run_claim(run_dir)) is not None:
        release_output(Path(claim.directory), [claim.token])


def release_unused(run_dir: RunDir) -> list[Path]:
    """Remove the claims of a run that is given up, and return those that stay, since the run has published files there.

    As long as those are there, the directory can be used by no other run anyway. The caller holds the run directory's
    lock.
    """
    if (claim := _read_run_claim(run_dir)) is None:
        return []
    root = Path(claim.directory)
    paths = [path.parent for pattern in ("*/ranks", "*/*/ranks") for path in run_dir.path.glob(pattern)]
    own = {claim.token} | {token for path in paths for token in tokens_of(StageDir(path))}
    claims = {path: token for path in _claim_files(root) if (token := _token_of(path)) in own}
    used = {token for path, token in claims.items() if any(_claimed_folder(path).glob("*"))}
    release_output(root, own - used)
    return [path for path, token in claims.items() if token in used]


def release_output(root: Path, tokens: Iterable[str]) -> None:
    """Remove the claims and the staging folders of plans, and the whole staging folder with the last of them."""
    tokens = set(tokens)
    staging = root / STAGING_NAME
    was_there = staging.is_dir()
    for token in tokens:
        remove_at_once(token_staging(root, token))
    claims = [path for path in _claim_files(root) if _names(path, tokens)]
    for path in claims:
        path.unlink(missing_ok=True)
    removed = {path.name.split(".")[1] for path in staging.glob(".*.tmp") if _TOKEN.match(path.name[1:])}
    remove_asides(staging, removed | {path.name for path in claims})
    remove_if_empty(staging)
    if was_there:
        # The stage is noted as finished elsewhere: what came back after that would stay.
        fsync_directory(staging if staging.is_dir() else root)


def refuse_claims(root: Path) -> None:
    """Raise ConfigError where a run is at work on any folder of a dataset directory, or means to go on with it."""
    for path in _claim_files(root):
        _refuse_claim(path, own=())


def _holds_claims(stage: Stage) -> bool:
    """Return True if the stage has claimed all its folders for a plan, and raise ConfigError if another run has one."""
    root, folders = stage.claims
    if not folders:
        return True
    plans = _own_tokens(stage)
    held = []
    for folder in folders:
        path = _claim_file(root, folder)
        # A copied or a moved run directory has its tokens with it: no path tells whose a claim is.
        _refuse_claim(path, plans | _run_token(stage.run_dir))
        held.append(_names(path, plans))
    return all(held)


def _require_alone(stage: Stage) -> None:
    """Raise ConfigError where another run has claimed any folder of the directory that the stage publishes in."""
    root, _ = stage.claims
    own = _own_tokens(stage) | {token for later in stage.later() for token in tokens_of(later)}
    for path in _claim_files(root):
        _refuse_claim(path, own | _run_token(stage.run_dir))


def _own_tokens(stage: Stage) -> set[str]:
    return {token for paths in (stage.dir, *stage.sharers()) for token in tokens_of(paths)}


def _run_token(run_dir: RunDir) -> set[str]:
    claim = _read_run_claim(run_dir)
    return set() if claim is None else {claim.token}


def _read_run_claim(run_dir: RunDir) -> RunClaim | None:
    if not run_dir.claim.exists():
        return None
    claim = decode_stored(run_dir.claim, read_stored(run_dir.claim), RunClaim)
    # It is the name of a folder.
    if not _TOKEN.fullmatch(claim.token):
        message = f"{run_dir.claim} is damaged: it has no token; remove it, and the claims of this run"
        raise ConfigError(message, code="damaged_run_dir")
    return claim


def _make_run_claim(run_dir: RunDir, root: Path) -> str:
    """Return the token of a run's claims in a directory; it is stored before any claim has it."""
    claim, directory = _read_run_claim(run_dir), str(root.resolve())
    if claim is None or claim.directory != directory:
        release_run(run_dir)
        claim = RunClaim(new_token(), directory)
        write_atomic(run_dir.claim, msgspec.json.encode(claim) + b"\n")
    return claim.token


def _claim_text(run_dir: RunDir, token: str) -> bytes:
    since = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    host, run = socket.gethostname(), run_dir.path.resolve()
    device = run.parent.stat().st_dev
    claim = Claim(token=token, run=str(run), host=host, user=user_name(), since=since, device=device)
    return msgspec.json.encode(claim) + b"\n"


def _claim_file(root: Path, folder: str) -> Path:
    return root / STAGING_NAME / f"{folder.replace('/', '+')}.claim"


def _claimed_folder(path: Path) -> Path:
    return path.parent.parent / path.stem.replace("+", "/")


def _claim_files(root: Path) -> list[Path]:
    return sorted((root / STAGING_NAME).glob("[!.]*.claim"))


def _read_claim(path: Path) -> Claim | None:
    try:
        return msgspec.json.decode(read_stored(path), type=Claim)
    except FileNotFoundError:
        return None
    except NOT_JSON as error:
        message = f"{path} is no claim: if no run is at work on {path.parent.parent}, remove that file"
        raise ConfigError(message, code="claimed") from error


def _token_of(path: Path) -> str:
    """Return the token of a claim, and "" where that is gone or damaged."""
    with suppress(ConfigError):
        if (claim := _read_claim(path)) is not None:
            return claim.token
    return ""


def _names(path: Path, tokens: Container[str]) -> bool:
    """Return True if a claim is for one of these plans."""
    return _token_of(path) in tokens


def _create(path: Path, text: bytes, own: Container[str]) -> bool:
    """Create a claim, unless there is one that names one of the run's own tokens; return True if it was created.

    Raises:
        ConfigError: another run has just claimed the same.
    """
    with stopping_errors(path):
        while True:
            make_folder(path.parent)
            # Another run may give its claim up at this moment, and remove the folder with it.
            with suppress(FileNotFoundError):
                try:
                    create_atomic(path, text)
                except FileExistsError:
                    _refuse_claim(path, own)
                    if _names(path, own):
                        return False
                else:
                    return True


def _refuse_claim(path: Path, own: Container[str]) -> None:
    """Raise ConfigError where there is a claim that names none of these tokens; one whose run was removed goes."""
    claim, root = _read_claim(path), path.parent.parent
    if claim is None or claim.token in own:
        return
    if _was_removed(claim):
        # Ranks that were left have lost their ledger, and lose their staging folder with the claim.
        log.warning("%s has gone, and so does its claim %s", claim.run, path)
        release_output(root, [claim.token])
        return
    folder = _claimed_folder(path).relative_to(root)
    files = [str(other) for other in _claim_files(root) if _names(other, [claim.token])]
    gone = ", a run directory that is not there any more, or cannot be seen from here" if _is_missing(claim) else ""
    raise ConfigError(
        f"{root} is claimed: {claim.user} on {claim.host} has been at work on {folder} there since "
        f"{claim.since}, from {claim.run}{gone}. Wait until that run is finished, or choose another dataset_dir; if it "
        f"will never go on: sharmill cancel {claim.run}, or remove {' '.join(files) or path}",
        code="claimed",
    )


def _was_removed(claim: Claim) -> bool:
    """Return True if a claim's run directory was removed here by this user, rather than being out of sight."""
    is_own = claim.host == socket.gethostname() and claim.user == user_name() and _TOKEN.fullmatch(claim.token)
    if is_own and _is_missing(claim):
        with suppress(OSError):
            # A file system that is not mounted leaves an empty folder of another one.
            return Path(claim.run).parent.stat().st_dev == claim.device
    return False


def _is_missing(claim: Claim) -> bool:
    """Return True if a claim's run directory is not there, as far as this user may see."""
    try:
        Path(claim.run).lstat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)  # what lies in a private home, say, may be there
    return False
