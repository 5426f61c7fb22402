"""The paths of a run directory, and the records about a run that lie in it.

Only the request of a run and its outcome are recorded: all else follows from plans, ledgers, the ``done.json`` of each
stage and the queue. Files that a stage keeps in its own folder beside these are named by the stage.
"""

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from sharmill.engine.unit import FailedAttempt, Totals, Unit
from sharmill.errors import CODES, ConfigError, DeviceError, FatalError, SharmillError
from sharmill.files.atomic import write_atomic
from sharmill.files.checksums import checksum_bytes
from sharmill.files.stored import damaged_file, read_record, read_records, read_stored


def _read_name(path: Path, pattern: str, problem: str) -> str:
    """Return the text of a file, which is a part of the names of folders; "" if there is no such file.

    Raises:
        ConfigError: it does not have the pattern; ``problem`` says so, behind the path.
    """
    try:
        text = read_stored(path).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{path} {problem}", code="damaged_run_dir")
    return text


class RankFolders:
    """Everything that the ranks of one plan write in the run directory, except their logs.

    Args:
        path: the folder, which is named by the token of the plan.
        token: the plan's token, "" if there is no plan.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token
        # Of each rank one log: the commits of its units, and notes of its attempts.
        self.ledger = path / "ledger"
        self.claims = path / "claims"
        self.progress = path / "progress"
        self.metrics = path / "metrics"
        self.rejects = path / "rejects"
        self.notes = path / "notes"
        self.all = [self.ledger, self.claims, self.progress, self.metrics, self.rejects, self.notes]
        # The values that the ranks that are at work were started with, and what their leader has decided since.
        self.launch = path / "launch.json"
        self.state = path / "state.json"
        # The kind of device that the stage keeps to.
        self.device_kind = path / "device_kind"

    def log(self, owner: str) -> Path:
        return self.ledger / f"{owner}.jsonl"

    def unit_rejects(self, index: int) -> Path:
        return self.rejects / f"{index:06d}.jsonl"

    def notes_on(self, checksums: Iterable[str]) -> Path:
        """Return the path of the notes of a unit on all the files that it has published, which have these checksums."""
        return self.notes / f"{checksum_bytes(''.join(sorted(checksums)).encode())}.npy"


class StageDir:
    """The folder of one stage in a run directory: plan, logs, rejects, and the folders of its ranks.

    Args:
        token: the token of the plan whose ranks are meant; by default the token of the plan that is there when
            ``ranks`` is asked for.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path = path
        self.plan = path / "plan"
        self.identity = self.plan / "identity.json"
        self.units = self.plan / "units.jsonl"
        self.token_file = self.plan / "token"
        # There once a user has asked for another plan, whose folder takes the place of this one.
        self.replan = self.plan / "replan"
        self.logs = path / "logs"
        self.driver_log = self.logs / "driver.log"
        self.failures = path / "failures.jsonl"
        self.rejects = path / "rejects.jsonl"
        # The first commits of units that were to be done again.
        self.revoked = path / "revoked.jsonl"
        # Written last of all: the stage is finished, with these totals.
        self.done = path / "done.json"
        # The stage's own merged files, for the stages behind it.
        self.merged = path / "merged"
        self.all_ranks = path / "ranks"
        self.token = token
        self._ranks = RankFolders(self.all_ranks / token, token) if token else None

    @property
    def ranks(self) -> RankFolders:
        if self._ranks is not None:
            return self._ranks
        token = self.read_token()
        return RankFolders(self.all_ranks / (token or "none"), token)

    def is_finished(self) -> bool:
        """Return True if the stage is finished and no other plan was asked for."""
        return self.done.exists() and not self.replan.exists()

    def read_token(self) -> str:
        """Return the token of the plan that is there, "" if there is none."""
        return _read_name(self.token_file, "[0-9A-Za-z_-]{0,64}", "is damaged: it has no token; begin this stage anew")

    def read_units(self) -> list[Unit]:
        """Return the units of a plan that is known to exist."""
        return list(read_records(self.units, Unit))

    def read_totals(self) -> Totals | None:
        """Return the totals of a finished stage, or None."""
        return read_record(self.done, Totals)

    def read_failures(self) -> list[FailedAttempt]:
        """Return the units that failed for good when the stage ended last."""
        return list(read_records(self.failures, FailedAttempt)) if self.failures.exists() else []

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"


class RunDir:
    """Plans, ledgers, logs, progress, rejects and intermediate manifests of one dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A random number, by which the jobs and the reservations of the run are found.
        self.id = path / "id"
        # The path of the dataset directory in which the run has reservations.
        self.reserved = path / "reserved"
        self.config = path / "resolved_config.yaml"
        self.request = path / "given.json"
        self.outcome = path / "end.json"
        self.rejects = path / "rejects.jsonl"
        # Of stages that keep the cuts of what they reject: segments and cuts without codes.
        self.bad_codes = path / "bad_codes.jsonl"
        self.stats = path / "stats.json"
        # The page that ``sharmill report`` makes.
        self.report = path / "report.html"
        # Written by ``sharmill calibrate``: similarities, yields, rejects and rates of a pilot.
        self.calibration = path / "calibration.json"
        # The scripts of a cluster's jobs, their input and their output, and the log of its advance jobs.
        self.jobs = path / "jobs"
        self.advance_log = self.jobs / "advance.log"
        self.manifests = path / "manifests"
        # Audio that was fetched from URLs.
        self.copies = path / "copies"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)

    def read_id(self) -> str:
        """Return the id of the run, "" if it has none yet."""
        return _read_name(
            self.id, "[0-9a-f]{16}",
            "is not the id of a run directory, by which its jobs and reservations are found: look for jobs with "
            "squeue, and remove the file once there are none",
        )  # fmt: skip

    def make_id(self) -> str:
        """Return the id of the run, made now if it has none. The caller holds the lock of the run directory."""
        if not self.read_id():
            write_atomic(self.id, secrets.token_hex(8).encode())
        return self.read_id()

    def read_reserved(self) -> Path | None:
        """Return the directory in which the run has reservations; None if it never had one."""
        if not self.reserved.exists():
            return None
        root = Path(os.fsdecode(read_stored(self.reserved)))
        if not root.is_absolute() or "\0" in str(root):
            raise damaged_file(self.reserved, "it names no directory")
        return root

    def begin(self, request: "RunRequest") -> None:
        """Record the request of a run; the outcome of an earlier one goes. The caller holds the lock."""
        write_atomic(self.request, msgspec.json.encode(request) + b"\n")
        self.outcome.unlink(missing_ok=True)

    def read_request(self) -> "RunRequest | None":
        """Return the request of the run; None if none has begun."""
        return read_record(self.request, RunRequest)

    def read_outcome(self) -> "RunOutcome | None":
        """Return how the run has ended; None if it is under way, or was killed."""
        return read_record(self.outcome, RunOutcome)

    def note_outcome(self, outcome: "RunOutcome") -> None:
        """Record how the run has ended; a cancelled run stays cancelled."""
        if not self.is_cancelled():
            write_atomic(self.outcome, msgspec.json.encode(outcome) + b"\n")

    def is_cancelled(self) -> bool:
        """Return True if a user has cancelled the run since it began."""
        outcome = self.read_outcome()
        return outcome is not None and outcome.state == "cancelled"

    def require_not_cancelled(self) -> None:
        """Raise FatalError if a user has cancelled the run since it began."""
        if (outcome := self.read_outcome()) is not None and outcome.state == "cancelled":
            raise FatalError(f"the run was {outcome.message}", code="cancelled")


class RunRequest(msgspec.Struct, kw_only=True):
    """Values that a run was begun with; whoever joins it, and the jobs that continue it, take them from here.

    ``stages`` are the names of its stages, ``folder`` is the folder that relative paths of its configuration begin at,
    and ``run`` is the run directory, so that a copy of it is recognized. ``command`` continues the run, "" if nobody
    knows one. ``cluster`` is the name of the SLURM cluster that has its jobs, "" if it has none.
    """

    stages: list[str]
    folder: str = ""
    run: str = ""
    command: str = ""
    cluster: str = ""


class StoredError(msgspec.Struct, kw_only=True):
    """An error as a file of a run directory has it; ``place`` is that of a ``DeviceError``."""

    message: str = ""
    code: str = ""
    details: list[str] = []
    place: str = ""
    is_config: bool = False

    def as_error(self) -> SharmillError:
        """Return the error, to be raised."""
        code = self.code if self.code in CODES else "unspecified"
        if self.place:
            return DeviceError(self.message, place=self.place, code=code)
        kind = ConfigError if self.is_config else FatalError
        return kind(self.message, code=code, details=self.details)


def stored_fields(error: SharmillError) -> dict[str, Any]:
    """Return the values of a ``StoredError`` for an error."""
    return {
        "message": error.lines[0],
        "details": list(error.lines[1:]),
        "code": error.code,
        "place": error.place if isinstance(error, DeviceError) else "",
        "is_config": isinstance(error, ConfigError),
    }


class RunOutcome(StoredError, kw_only=True):
    """The end of a run, with the error that has ended it; ``findings`` are the errors that the checker found."""

    state: Literal["done", "failed", "cancelled"]
    findings: int = 0

    @classmethod
    def from_error(cls, error: BaseException) -> "RunOutcome":
        """Return the outcome of a run that an error has ended."""
        if not isinstance(error, SharmillError):
            return cls(state="failed", message=f"{type(error).__name__}: {error}")
        return cls(
            state="failed",
            message="; ".join(error.lines),
            code=error.code,
            is_config=isinstance(error, ConfigError),
        )
