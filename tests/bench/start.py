"""Rows of what passes before any work is done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.models import save_titanet
from support.shar import Project, voice

from bench.rows import Case, row
from sharmill.engine.listener import Listener
from sharmill.engine.run import run_stage
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Commit, Unit
from sharmill.executors.local import LocalExecutor
from sharmill.match.stage import MatchStage


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


@row("start help", baseline="an empty Python", targets={"wall": "<= 0.2"}, inverse=True)
def help_page(folder: Path, tiny: bool) -> Case:
    """``sharmill --help``."""
    return Case(
        amount=1, unit="starts", by="wall",
        ours=lambda: _run("-m", "sharmill", "--help"), baseline=lambda: _run("-c", "pass"),
    )  # fmt: skip


class _Starts(Listener):
    """The seconds from the start of a stage to each rank's being ready for its first unit."""

    def __init__(self) -> None:
        self.ready: list[float] = []
        self._loading = 0

    def stage_started(self, stage: Stage, units: Sequence[Unit], done: Sequence[Commit]) -> None:
        self._began = time.perf_counter()

    def loading(self, num_ranks: int) -> None:
        self.ready += [time.perf_counter() - self._began] * max(0, self._loading - num_ranks)
        self._loading = num_ranks


@row(
    "start rank",
    targets={"seconds of the first rank": "<= 8", "seconds of the further rank": "<= 3"},
)
def rank(folder: Path, tiny: bool) -> Case:
    """Ranks of match with a NeMo encoder to their first unit, all on one core: one alone, and two."""
    project = Project(folder)
    for number in range(12):
        project.add(f"{number}.wav", voice(2.0, seed=number), speaker=f"s{number}")
        project.add(f"{number}b.wav", voice(2.0, seed=number), speaker=f"s{number}")
    encoder = "resemblyzer" if tiny else f"nemo:{save_titanet(folder / 'titanet.nemo')}"
    match: dict[str, Any] = {"encoder": encoder, "min_similarity": -1.0, "min_duration": 0.0, "unit_seconds": 4.0}
    config = project.configure(match=match)
    project.prepare(config)

    def seconds_of(num_ranks: int) -> list[float]:
        starts = _Starts()
        executor = LocalExecutor(num_ranks, device="cpu")
        stage = MatchStage(config)
        # A rank with a limit of time is a process of its own, even where it is the only one.
        stage.unit_time_limit = 3600.0
        assert run_stage(stage, executor, starts, max_reject_fraction=1.0, restart=True).ok
        return starts.ready

    def ours() -> dict[str, float]:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            (alone,), several = seconds_of(1), seconds_of(2)
        finally:
            os.sched_setaffinity(0, cores)
        return {"seconds of the first rank": alone, "seconds of the further rank": several[-1] - alone}

    return Case(amount=3, unit="ranks", by="wall", ours=ours)
