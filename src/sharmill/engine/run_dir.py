"""The paths in a run directory, and its records about the run.

Only the request and the outcome of a run are recorded. The rest of its state is derived from the plans, the ledgers,
the ``done.json`` of each stage, and the queue. A stage may have other files in its folder, which it names itself.
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
    """Return the text of a file, which is used in the names of folders; "" if the file is missing.

    Raises:
        ConfigError: the text does not match the pattern; the message is the path followed by ``problem``.
    """
    try:
        text = read_stored(path).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{path} {problem}", code="damaged_run_dir")
    return text


class RankFolders:
    """The paths of the files that the ranks of one plan write to the run directory, except ``rank-*.log``.

    Args:
        path: the folder, whose name is the token of the plan.
        token: the plan's token, "" if there is no plan.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token
        # One log per rank, with the commits of its units and notes about its attempts.
        self.ledger = path / "ledger"
        self.claims = path / "claims"
        self.progress = path / "progress"
        self.metrics = path / "metrics"
        self.rejects = path / "rejects"
        self.notes = path / "notes"
        self.all = [self.ledger, self.claims, self.progress, self.metrics, self.rejects, self.notes]
        # The values with which the present ranks were started, and the decisions of their leader.
        self.launch = path / "launch.json"
        self.state = path / "state.json"
        # The kind of device of the first rank, which all later ranks must have too.
        self.device_kind = path / "device_kind"

    def log(self, owner: str) -> Path:
        return self.ledger / f"{owner}.jsonl"

    def unit_rejects(self, index: int) -> Path:
        return self.rejects / f"{index:06d}.jsonl"

    def notes_on(self, checksums: Iterable[str]) -> Path:
        """Return the path of a unit's notes on its published files, which are identified by their checksums."""
        return self.notes / f"{checksum_bytes(''.join(sorted(checksums)).encode())}.npy"


class StageDir:
    """The folder of one stage in a run directory: plan, logs, rejects, and the folders of its ranks.

    Args:
        token: the token of the plan to which ``ranks`` belongs; by default the token in the folder at the time of
            access.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path = path
        self.plan = path / "plan"
        self.identity = self.plan / "identity.json"
        self.units = self.plan / "units.jsonl"
        self.token_file = self.plan / "token"
        # If this file exists, a new plan was requested. The file is removed together with the present plan.
        self.replan = self.plan / "replan"
        self.logs = path / "logs"
        self.driver_log = self.logs / "driver.log"
        self.failures = path / "failures.jsonl"
        self.rejects = path / "rejects.jsonl"
        # The original commits of units that must be processed again.
        self.revoked = path / "revoked.jsonl"
        # The totals, written last of all: if the file exists, the stage is finished.
        self.done = path / "done.json"
        # The stage's own merged files, for later stages.
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
        """Return True if the stage is finished and no new plan was requested."""
        return self.done.exists() and not self.replan.exists()

    def read_token(self) -> str:
        """Return the token of the present plan, "" if there is none."""
        problem = "is damaged: it has no valid token; start this stage over with --restart"
        return _read_name(self.token_file, "[0-9A-Za-z_-]{0,64}", problem)

    def read_units(self) -> list[Unit]:
        """Return the units of the plan, which must exist."""
        return list(read_records(self.units, Unit))

    def read_totals(self) -> Totals | None:
        """Return the totals of the stage, or None if it is not finished."""
        return read_record(self.done, Totals)

    def read_failures(self) -> list[FailedAttempt]:
        """Return the errors of the units that had failed for good when the stage last ended."""
        return list(read_records(self.failures, FailedAttempt)) if self.failures.exists() else []

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"


class RunDir:
    """The run directory of one dataset: plans, ledgers, logs, progress, rejects and intermediate manifests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A random number that identifies the jobs and the reservation of the run.
        self.id = path / "id"
        # The path of the dataset directory in which the run has a reservation.
        self.reserved = path / "reserved"
        self.config = path / "resolved_config.yaml"
        self.request = path / "given.json"
        self.outcome = path / "end.json"
        self.rejects = path / "rejects.jsonl"
        # The rejects of stages that keep the rejected cuts: segments and cuts without codes.
        self.bad_codes = path / "bad_codes.jsonl"
        self.stats = path / "stats.json"
        # The page written by ``sharmill report``.
        self.report = path / "report.html"
        # Similarities, yields, rejects and rates of a pilot run, written by ``sharmill calibrate``.
        self.calibration = path / "calibration.json"
        # The scripts, input and output of a cluster's jobs, and the log of the driver jobs.
        self.jobs = path / "jobs"
        self.advance_log = self.jobs / "advance.log"
        self.manifests = path / "manifests"
        # Audio that was downloaded from URLs.
        self.copies = path / "copies"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)

    def read_id(self) -> str:
        """Return the id of the run, "" if it has none yet."""
        return _read_name(
            self.id, "[0-9a-f]{16}",
            "is damaged: it has no valid run id, which identifies the jobs and reservations of the run; check with "
            "squeue that no jobs of the run are left, then remove the file",
        )  # fmt: skip

    def make_id(self) -> str:
        """Return the id of the run, which is created if necessary. The caller holds the lock of the run directory."""
        if not self.read_id():
            write_atomic(self.id, secrets.token_hex(8).encode())
        return self.read_id()

    def read_reserved(self) -> Path | None:
        """Return the directory in which the run has made a reservation; None if it never made one."""
        if not self.reserved.exists():
            return None
        root = Path(os.fsdecode(read_stored(self.reserved)))
        if not root.is_absolute() or "\0" in str(root):
            raise damaged_file(self.reserved, "it does not contain an absolute path")
        return root

    def begin(self, request: "RunRequest") -> None:
        """Record the request of a run, and remove the outcome of an earlier run. The caller holds the run's lock."""
        write_atomic(self.request, msgspec.json.encode(request) + b"\n")
        self.outcome.unlink(missing_ok=True)

    def read_request(self) -> "RunRequest | None":
        """Return the request of the run; None if no run was started."""
        return read_record(self.request, RunRequest)

    def read_outcome(self) -> "RunOutcome | None":
        """Return the outcome of the run; None if the run is in progress or was killed."""
        return read_record(self.outcome, RunOutcome)

    def note_outcome(self, outcome: "RunOutcome") -> None:
        """Record the outcome of the run, unless the run was cancelled."""
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
    """The values with which a run was started, for processes that join it and jobs that continue it.

    Attributes:
        stages: the names of its stages.
        folder: the folder to which relative paths in its configuration refer.
        run: the path of the run directory, so that a copy of the directory is recognized.
        command: the command that continues the run, "" if none is known.
        cluster: the name of the SLURM cluster with the jobs of the run, "" if there is none.
    """

    stages: list[str]
    folder: str = ""
    run: str = ""
    command: str = ""
    cluster: str = ""


class StoredError(msgspec.Struct, kw_only=True):
    """An error as stored in a run directory; ``place`` is set only for a ``DeviceError``."""

    message: str = ""
    code: str = ""
    details: list[str] = []
    place: str = ""
    is_config: bool = False

    def as_error(self) -> SharmillError:
        """Return the exception for this error."""
        code = self.code if self.code in CODES else "unspecified"
        if self.place:
            return DeviceError(self.message, place=self.place, code=code)
        kind = ConfigError if self.is_config else FatalError
        return kind(self.message, code=code, details=self.details)


def stored_fields(error: SharmillError) -> dict[str, Any]:
    """Return the fields of a ``StoredError`` for an error."""
    return {
        "message": error.lines[0],
        "details": list(error.lines[1:]),
        "code": error.code,
        "place": error.place if isinstance(error, DeviceError) else "",
        "is_config": isinstance(error, ConfigError),
    }


class RunOutcome(StoredError, kw_only=True):
    """The outcome of a run, with the error that ended it, if any.

    ``findings`` is the number of errors that validation found.
    """

    state: Literal["done", "failed", "cancelled"]
    findings: int = 0

    @classmethod
    def from_error(cls, error: BaseException) -> "RunOutcome":
        """Return the outcome of a run that was ended by an error."""
        if not isinstance(error, SharmillError):
            return cls(state="failed", message=f"{type(error).__name__}: {error}")
        return cls(
            state="failed",
            message="; ".join(error.lines),
            code=error.code,
            is_config=isinstance(error, ConfigError),
        )
