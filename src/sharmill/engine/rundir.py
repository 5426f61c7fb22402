"""Paths of a run directory, as the engine, the executors and the command line use them.

The files that a stage keeps in its own folder beside these are named by the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage in a run directory: plan, ledger, logs, progress, rejects."""

    path: Path

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
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def attempts(self) -> Path:
        """The notes of ranks that no driver watches."""
        return self.path / "attempts"

    @property
    def rounds(self) -> Path:
        """The number of attempts so far, each time that ranks were submitted."""
        return self.path / "rounds"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def progress(self) -> Path:
        return self.path / "progress"

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
    def driver_log(self) -> Path:
        return self.logs / "driver.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:03d}.log"

    def rank_progress(self, rank: int) -> Path:
        return self.progress / f"rank-{rank:03d}.json"

    def unit_rejects(self, index: int) -> Path:
        return self.path / "rejects" / f"{index:06d}.jsonl"


@dataclass(frozen=True)
class RunDir:
    """Plans, ledgers, logs, progress, rejects and intermediate manifests of one dataset."""

    path: Path

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

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
    def chain(self) -> Path:
        """The state of the driver jobs on a cluster."""
        return self.path / "chain.json"

    @property
    def jobs(self) -> Path:
        """The scripts of a cluster's jobs, their input and their output."""
        return self.path / "jobs"

    @property
    def chain_log(self) -> Path:
        """The log of the driver jobs on a cluster."""
        return self.jobs / "chain.log"

    @property
    def manifests(self) -> Path:
        return self.path / "manifests"

    def stage(self, name: str) -> StageDir:
        return StageDir(self.path / name)
