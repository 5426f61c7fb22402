"""Stages whose ranks are processes while they are recorded: of the local executor, or tasks of a SLURM array."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.executors.slurm.executor import pack_units
from sharmill.executors.slurm.task import RankTask
from sharmill.storage import make_folder


@dataclass(frozen=True)
class ForkedTasks:
    """Runs the tasks of an array as forks of this process, which is their driver job before and after.

    Models that stand in for others are theirs too.
    """

    ranks: int = 2

    def run(self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener) -> Finished:
        """Do the units; see ``engine.run.Executor``."""
        make_folder(stage.dir.taken)
        children = []
        for rank, part in enumerate(pack_units(units, self.ranks)):
            task = RankTask(stage, rank, [unit.index for unit in part], "cpu", rejects)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    task()
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert not any(statuses), "a rank has failed"
        return Finished({})
