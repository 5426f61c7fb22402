"""A dataset on SLURM, from stage to stage without a process that has to wait: every step submits the next.

A step runs the stages as they stand: what is complete is finalized, what is missing is submitted with the next step
behind it. Each dataset has its own chain, so that a slow one does not hold up another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from sharmill.config import Config
from sharmill.engine.run import StageResult
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.engine.worker import UnitError
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.logs import logging_to
from sharmill.executors.profile import ClusterProfile
from sharmill.executors.slurm import HandedOver, SlurmExecutor, active_jobs
from sharmill.pipeline import make_stages, run_dataset
from sharmill.store import remove_tree, require_writable, write_atomic

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0


class ChainState(msgspec.Struct, kw_only=True):
    """How far a chain has got. ``jobs`` are those that the last step submitted."""

    state: Literal["waiting", "done", "failed"]
    message: str
    jobs: list[str] = []
    findings: int = 0


@dataclass(frozen=True)
class Chain:
    """The chain of one dataset; as a callable, its next step."""

    config: Config
    stages: tuple[str, ...]
    profile: ClusterProfile
    restart: bool = False

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.config.run_dir).absolute())

    def start(self) -> ChainState:
        """The first step, in this process: plans and submits. Units that were given up before have new attempts.

        Raises:
            ConfigError: the configuration is wrong, or jobs of this dataset are still in the queue.
            FatalError: a stage stopped, or the step failed.
        """
        require_writable(self.run_dir.path)
        self.refuse_while_active()
        for stage in make_stages(self.config, self.stages):
            remove_tree(stage.dir.attempts)
            remove_tree(stage.dir.rounds)
        return self._step()

    def __call__(self) -> None:
        """A later step, in a job of its own."""
        self.run_dir.jobs.mkdir(parents=True, exist_ok=True)
        with logging_to(self.run_dir.jobs / "chain.log"):
            state = self._step()
        log.info("%s: %s", state.state, state.message)
        if state.state == "failed":
            raise FatalError(state.message)

    def refuse_while_active(self) -> None:
        """Raises ConfigError while jobs of an earlier submission are queued: they would lose what is in flight."""
        state = read_state(self.run_dir)
        alive = active_jobs(state.jobs) if state is not None else []
        if alive:
            raise ConfigError(
                f"{self.config.name}: jobs {', '.join(alive[:5])} of this dataset are still in the queue; "
                f"wait for them (sharmill status {self.config.run_dir}) or scancel them"
            )

    def _step(self) -> ChainState:
        try:
            state = self._run_stages()
        except SharmillError as error:
            state = ChainState(state="failed", message=str(error))
            self._write(state)
            raise
        self._write(state)
        return state

    def _run_stages(self) -> ChainState:
        # Only the first step begins anew.
        executor = SlurmExecutor(self.profile, self.run_dir.jobs, replace(self, restart=False), self.config.name)
        try:
            result = run_dataset(
                self.config, LogListener(), stages=self.stages, restart=self.restart, executor=executor
            )
        except HandedOver as handed_over:
            jobs = [*handed_over.ranks, handed_over.continuation]
            return ChainState(state="waiting", message=str(handed_over), jobs=jobs)
        if not result.ok:
            stage, outcome = result.stages[-1]
            named = "; ".join(f"unit {error.index}: {error.message}" for error in list(outcome.failures.values())[:3])
            message = f"{stage.name}: {len(outcome.failures)} units failed ({named}); tracebacks: {stage.dir.failures}"
            return ChainState(state="failed", message=message)
        return ChainState(state="done", message="all stages are done", findings=len(result.findings))

    def _write(self, state: ChainState) -> None:
        write_atomic(self.run_dir.chain, msgspec.json.encode(state) + b"\n")


def read_state(run_dir: RunDir) -> ChainState | None:
    """How far the chain of a run directory has got; None where there is none."""
    if not run_dir.chain.exists():
        return None
    return msgspec.json.decode(run_dir.chain.read_bytes(), type=ChainState)


def wait_for_end(chain: Chain) -> ChainState:
    """Waits until a chain is done or has failed.

    Raises:
        FatalError: its jobs are gone and it has not come to an end, as after scancel of a step.
    """
    while True:
        state = read_state(chain.run_dir)
        assert state is not None
        if state.state != "waiting":
            return state
        # Asked twice: a step may have submitted the next one just before its own end.
        if not active_jobs(state.jobs):
            time.sleep(_POLL_SECONDS)
            again = read_state(chain.run_dir)
            if again is not None and again.state == "waiting" and again.jobs == state.jobs:
                raise FatalError(
                    f"{chain.config.name}: the jobs have ended before the work did; see {chain.run_dir.jobs}, "
                    "and submit again to go on"
                )
        time.sleep(_POLL_SECONDS)


class LogListener:
    """Notes in the log what happens; nobody watches a step."""

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        log.info("%s: %d of %d units are done", stage.name, len(done), len(units))

    def unit_done(self, unit: Unit, commit: Commit) -> None:
        log.info("unit %d is done", unit.index)

    def unit_failed(self, unit: Unit, error: UnitError, attempts: int) -> None:
        log.warning("unit %d failed %d times: %s", unit.index, attempts, error.message)

    def stage_ended(self, stage: Stage, result: StageResult) -> None:
        log.info("%s: %s", stage.name, "done" if result.ok else f"{len(result.failures)} units failed")
