"""Paths of a run directory, as the engine, the executors and the command line use them.

The files that a stage keeps in its own folder beside these are named by the stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sharmill.engine.stored import read_stored
from sharmill.errors import ConfigError

# The name of folders.
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")
# In the place of a token where there is no plan.
_NO_PLAN = "none"


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage in a run directory: plan, ledger, logs, progress, rejects.

    Args:
        token: that of the plan whose ranks are meant; by default that of the plan which is there.
    """

    path: Path
    token: str = ""

    @property
    def plan(self) -> Path:
        return self.path / "plan"

    @property
    def identity(self) -> Path:
        return self.plan / "identity.json"

    @property
    def units(self) -> Path:
        return self.plan / "units.jsonl"

    @property
    def begin_anew(self) -> Path:
        """There once a user has asked for another plan, whose folder takes the place of this one."""
        return self.plan / "begin_anew"

    @property
    def token_file(self) -> Path:
        return self.plan / "token"

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

    def of_present_plan(self) -> StageDir:
        """Return this folder with the token of the plan that is there, so that no path has to look for it again."""
        return StageDir(self.path, self.token or self.read_token())

    def ranks_of(self, token: str) -> Path:
        return self.path / "ranks" / token

    @property
    def ranks(self) -> Path:
        """The folder of all that the ranks of a plan write in the run directory, but their logs."""
        return self.ranks_of(self.token or self.read_token() or _NO_PLAN)

    @property
    def ledger(self) -> Path:
        return self.ranks / "ledger"

    @property
    def device_kind(self) -> Path:
        """The kind of device that the stage keeps to."""
        return self.ranks / "device_kind"

    @property
    def attempts(self) -> Path:
        """The notes of ranks about their attempts."""
        return self.ranks / "attempts"

    @property
    def claims(self) -> Path:
        """The claims of ranks on units."""
        return self.ranks / "claims"

    @property
    def round(self) -> Path:
        """The values that the ranks that are at work were started with."""
        return self.ranks / "round.json"

    @property
    def metrics(self) -> Path:
        return self.ranks / "metrics"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def progress(self) -> Path:
        return self.ranks / "progress"

    @property
    def failures(self) -> Path:
        return self.path / "failures.jsonl"

    @property
    def rejects(self) -> Path:
        return self.path / "rejects.jsonl"

    @property
    def revoked(self) -> Path:
        """The first commits of units that were to be done again."""
        return self.path / "revoked.jsonl"

    @property
    def done(self) -> Path:
        """Written last of all: the stage is finished, with these totals."""
        return self.path / "done.json"

    @property
    def merged(self) -> Path:
        """The folder of what a stage makes of its parts at its end, for the stages behind it."""
        return self.path / "merged"

    @property
    def driver_log(self) -> Path:
        return self.logs / "driver.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def rank_progress(self, owner: str) -> Path:
        return self.progress / f"rank-{owner}.json"

    def unit_rejects(self, index: int) -> Path:
        return self.ranks / "rejects" / f"{index:06d}.jsonl"


@dataclass(frozen=True)
class RunDir:
    """Plans, ledgers, logs, progress, rejects and intermediate manifests of one dataset."""

    path: Path

    @property
    def id(self) -> Path:
        """A random number, made by the first submission to a cluster, by which the cluster's jobs are found."""
        return self.path / "id"

    @property
    def claim(self) -> Path:
        """The token of the run's claims on the dataset directory, until its stages have plans."""
        return self.path / "claim.json"

    @property
    def config(self) -> Path:
        return self.path / "resolved_config.yaml"

    @property
    def rejects(self) -> Path:
        return self.path / "rejects.jsonl"

    @property
    def stats(self) -> Path:
        return self.path / "stats.json"

    @property
    def report(self) -> Path:
        """The page that ``sharmill report`` makes."""
        return self.path / "report.html"

    @property
    def calibration(self) -> Path:
        """Written by ``sharmill calibrate``: similarities, yields, rejects and rates of a pilot."""
        return self.path / "calibration.json"

    @property
    def given(self) -> Path:
        """The stages that a run was begun with; see ``run_notes``."""
        return self.path / "given.json"

    @property
    def end(self) -> Path:
        """The note of how a run has ended; not there while it is under way."""
        return self.path / "end.json"

    @property
    def jobs(self) -> Path:
        """The scripts of a cluster's jobs, their input and their output."""
        return self.path / "jobs"

    @property
    def advance_log(self) -> Path:
        """The log of the advance jobs on a cluster."""
        return self.jobs / "advance.log"

    @property
    def manifests(self) -> Path:
        return self.path / "manifests"

    @property
    def copies(self) -> Path:
        """The folder of audio that was fetched from URLs."""
        return self.path / "copies"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)
