"""Optional curves of throughput and rejects per rank, for TensorBoard and Weights & Biases; off unless configured."""

from __future__ import annotations

from pathlib import Path

from sharmill.config import MetricsConfig
from sharmill.engine.trackers import Trackers
from sharmill.engine.unit import Commit, Unit
from sharmill.ports import clock


class MetricsLog:
    """Curves of one rank over its units, in ``folder``, which is there as long as the plan is the present one."""

    def __init__(self, config: MetricsConfig, stage_name: str, folder: Path, rank: int) -> None:
        self._started = clock.monotonic()
        self._units = 0
        self._audio_seconds = 0.0
        self._rejects = 0
        self.trackers = Trackers()
        if config.tensorboard:
            self.trackers.open_tensorboard(folder / f"rank-{rank:03d}")
        if config.wandb_project:
            name = f"{stage_name}-rank-{rank:03d}"
            self.trackers.open_wandb(config.wandb_project, name, folder, group=stage_name)

    def commit(self, unit: Unit, commit: Commit) -> None:
        """Add a point to every curve."""
        self._units += 1
        self._audio_seconds += unit.cost
        self._rejects += commit.num_rejected
        elapsed = max(clock.monotonic() - self._started, 1e-6)
        values = {
            "audio_hours": self._audio_seconds / 3600,
            "audio_hours_per_hour": self._audio_seconds / elapsed,
            "unit_seconds": commit.seconds,
            "rejects": float(self._rejects),
        }
        self.trackers.add(values, self._units)

    def close(self) -> None:
        """Write what the curves still hold."""
        self.trackers.close()
