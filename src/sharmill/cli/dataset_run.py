"""The run of one dataset as the jobs of a cluster carry it along: its configuration, and the stages to be run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sharmill.config import Config
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Submitted
from sharmill.engine.run import Executor
from sharmill.engine.run_notes import End
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.grow.append import append_dataset
from sharmill.pilot.predict import ranks_of_use
from sharmill.pipeline import make_stages, run_dataset, stages_of
from sharmill.report.last_step import report_on_run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetRun:
    """The stages of one dataset that are to be run, by default all: what the jobs of a cluster carry along."""

    config: Config
    stages: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def make_stages(self) -> list[Stage]:
        """Return the stages in the order in which they run."""
        return make_stages(self.config, self.stages)

    def run(self, executor: Executor, *, restart: bool, wait_seconds: float) -> End | Submitted:
        """Run the stages; see ``run_dataset``. Once all of them are done, the shards are appended to ``append_to``."""
        config = self.config
        result = run_dataset(
            config, Listener(), stages=self.stages, restart=restart, executor=executor, wait_seconds=wait_seconds
        )
        if result.stages and (submitted := result.stages[-1][1].submitted) is not None:
            return submitted
        if config.append_to is None or not self.is_whole or result.report is None or result.num_errors:
            return result.end()
        appended = append_dataset(config.append_to, config.dataset_dir)
        return result.end(appended.describe(config.append_to, config.dataset_dir))

    def ranks_of_use(self, stage: Stage, units: Sequence[Unit]) -> int:
        """Return for how many ranks the units of a stage are enough."""
        return ranks_of_use(self.config, stage, units)

    def show(self) -> None:
        """Make the page about a finished run of all stages."""
        if self.is_whole:
            # An advance job has little memory: no model is loaded in it.
            log.info("%s", report_on_run(self.config, make_stages(self.config), decode=False))

    @property
    def is_whole(self) -> bool:
        """Return True if all stages of the dataset are among these."""
        return self.stages is None or set(stages_of(self.config)) <= set(self.stages)
