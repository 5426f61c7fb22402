"""The progress of runs as numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sharmill.errors import ConfigError
from sharmill.registry import require_package

if TYPE_CHECKING:
    from sharmill.cli.stage_status import StageStatus
    from sharmill.engine.run_notes import End

_STATES = ("not begun", "under way", "in the queue", "stopped", "silent", "failed", "done")


def write_metrics(path: Path, runs: Mapping[str, tuple[Sequence[StageStatus], End | None]], num_unread: int) -> None:
    """Write the progress of runs to a file, whole or not at all.

    Args:
        runs: stages and end of each run, by its run directory.
        num_unread: how many run directories could not be read.

    Raises:
        ConfigError: prometheus_client is not installed, or the file cannot be written.
    """
    require_package("prometheus_client", extra="prometheus")
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"sharmill_{name}", meaning, ["run_dir", "stage", *labels], registry=registry)

    state = gauge("stage_state", "1 for the state of a stage, 0 for the others", "state")
    units = gauge("units", "Units of a stage", "kind")
    cost = gauge("cost", "Seconds of audio, or records, of a stage", "kind")
    rejects = gauge("rejects", "Rejected records", "reason")
    ranks = gauge("ranks", "Ranks that have not ended")
    late = gauge("late_units", "Units that take far longer than is usual")
    spent = gauge("rank_seconds", "Time of all ranks in units that are done")
    memory = gauge("peak_memory_bytes", "Most memory that a rank has held")
    failed = Gauge("sharmill_run_failed", "1 where a run has failed, or lost its jobs", ["run_dir"],
                   registry=registry)  # fmt: skip
    for run_dir, (stages, end) in runs.items():
        failed.labels(run_dir).set(end is not None and end.state != "done")
        for stage in stages:
            for name in _STATES:
                state.labels(run_dir, stage.name, name).set(stage.state == name)
            for kind in ("", "_done", "_running", "_failed"):
                units.labels(run_dir, stage.name, kind[1:] or "all").set(getattr(stage, f"units{kind}"))
            cost.labels(run_dir, stage.name, "all").set(stage.cost)
            cost.labels(run_dir, stage.name, "done").set(stage.cost_done)
            for reason, count in stage.rejects.items():
                rejects.labels(run_dir, stage.name, reason).set(count)
            ranks.labels(run_dir, stage.name).set(len(stage.ranks))
            late.labels(run_dir, stage.name).set(len(stage.late))
            if stage.pace is not None:
                spent.labels(run_dir, stage.name).set(stage.pace.seconds)
                memory.labels(run_dir, stage.name).set(stage.pace.memory_mb * 2**20)
    Gauge("sharmill_unread_run_dirs", "Run directories that cannot be read", registry=registry).set(num_unread)
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", code="bad_usage") from error
