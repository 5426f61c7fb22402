"""Paths of a run directory, as the engine, the executors and the command line use them.

The files that a stage keeps in its own folder beside these are named by the stage.
"""

from __future__ import annotations

import re
from pathlib import Path

from sharmill.errors import ConfigError
from sharmill.files.stored import read_stored

# The name of folders.
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")
# In the place of a token where there is no plan.
_NO_PLAN = "none"


class StageDir:
    """The folder of one stage in a run directory: plan, ledger, logs, progress, rejects.

    Args:
        token: that of the plan whose ranks are meant; by default that of the plan which is there now.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self.path = path
        self.plan = path / "plan"
        self.identity = self.plan / "identity.json"
        self.units = self.plan / "units.jsonl"
        self.token_file = self.plan / "token"
        # There once a user has asked for another plan, whose folder takes the place of this one.
        self.begin_anew = self.plan / "begin_anew"
        self.logs = path / "logs"
        self.driver_log = self.logs / "driver.log"
        self.failures = path / "failures.jsonl"
        self.rejects = path / "rejects.jsonl"
        # The first commits of units that were to be done again.
        self.revoked = path / "revoked.jsonl"
        # Written last of all: the stage is finished, with these totals.
        self.done = path / "done.json"
        # What the stage makes of its parts at its end, for the stages behind it.
        self.merged = path / "merged"

        self.token = token or self.read_token()
        # All that the ranks of the plan write in the run directory, but their logs.
        self.ranks = self.ranks_of(self.token or _NO_PLAN)
        self.ledger = self.ranks / "ledger"
        self.attempts = self.ranks / "attempts"
        self.claims = self.ranks / "claims"
        self.progress = self.ranks / "progress"
        self.metrics = self.ranks / "metrics"
        self.rejects_of_units = self.ranks / "rejects"
        self.folders_of_ranks = [
            self.ledger, self.attempts, self.claims, self.progress, self.metrics, self.rejects_of_units,
        ]  # fmt: skip
        # The values that the ranks that are at work were started with.
        self.round = self.ranks / "round.json"
        # The kind of device that the stage keeps to.
        self.device_kind = self.ranks / "device_kind"

    def read_token(self) -> str:
        """Return the token of the plan that is there, or nothing where there is none."""
        try:
            token = read_stored(self.token_file).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        # It is the name of folders.
        if token and not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{self.token_file} is damaged: it has no token; begin this stage anew", code="damaged_run_dir"
            )
        return token

    def ranks_of(self, token: str) -> Path:
        return self.path / "ranks" / token

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def rank_progress(self, owner: str) -> Path:
        return self.progress / f"rank-{owner}.json"

    def unit_rejects(self, index: int) -> Path:
        return self.rejects_of_units / f"{index:06d}.jsonl"


class RunDir:
    """Plans, ledgers, logs, progress, rejects and intermediate manifests of one dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A random number, by which the jobs and the reservations of the run are found.
        self.id = path / "id"
        # The path of the dataset directory in which the run has reservations.
        self.reserved = path / "reserved"
        self.config = path / "resolved_config.yaml"
        # What the run was begun with, and how it has ended; see ``run_notes``.
        self.given = path / "given.json"
        self.end = path / "end.json"
        self.rejects = path / "rejects.jsonl"
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
