"""Optional curves of throughput and rejects per rank, for TensorBoard and Weights & Biases.

Off unless configured. A missing package, a full quota or a network that is down costs the curve, never the run.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharmill.config import MetricsConfig
from sharmill.engine.unit import Commit, Unit

log = logging.getLogger(__name__)

_SECONDS_FOR_WANDB = 30.0

# Takes the values and the number of units done so far.
Sink = Callable[[dict[str, float], int], None]


class MetricsLog:
    """Curves of one rank over its units, in ``folder``, which is there as long as the plan is the present one."""

    def __init__(self, config: MetricsConfig, stage_name: str, folder: Path, rank: int) -> None:
        self._started = time.monotonic()
        self._units = 0
        self._audio_seconds = 0.0
        self._rejects = 0
        self._sinks: list[Sink] = []
        self._closers: list[Callable[[], Any]] = []
        if config.tensorboard:
            self._try("tensorboard", lambda: self._open_tensorboard(folder / f"rank-{rank:03d}"))
        if config.wandb_project:
            self._try("wandb", lambda: self._open_wandb(config.wandb_project or "", stage_name, folder, rank))

    def commit(self, unit: Unit, commit: Commit) -> None:
        """Add a point to every curve."""
        self._units += 1
        self._audio_seconds += unit.cost
        self._rejects += commit.num_rejected
        elapsed = max(time.monotonic() - self._started, 1e-6)
        values = {
            "audio_hours": self._audio_seconds / 3600,
            "audio_hours_per_hour": self._audio_seconds / elapsed,
            "unit_seconds": commit.seconds,
            "rejects": float(self._rejects),
        }
        for sink in list(self._sinks):
            if not self._try("metrics", lambda sink=sink: sink(values, self._units)):  # type: ignore[misc]
                self._sinks.remove(sink)

    def close(self) -> None:
        """Write what the sinks still hold."""
        for closer in self._closers:
            self._try("metrics", closer)

    def _open_tensorboard(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(exist_ok=True)
        writer = SummaryWriter(str(folder))

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self._sinks.append(write)
        self._closers.append(writer.close)

    def _open_wandb(self, project: str, stage_name: str, folder: Path, rank: int) -> None:
        import wandb

        # Without a limit a network that goes down during the run would keep its end waiting for ever.
        settings = wandb.Settings(init_timeout=_SECONDS_FOR_WANDB, finish_timeout=_SECONDS_FOR_WANDB, silent=True)
        with _nobody_to_ask():
            run = wandb.init(
                project=project, name=f"{stage_name}-rank-{rank:03d}", group=stage_name, dir=str(folder),
                settings=settings,
            )  # fmt: skip
        self._sinks.append(lambda values, step: run.log(values, step=step))
        self._closers.append(run.finish)

    def _try(self, what: str, action: Callable[[], Any]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a curve must not cost the run
            log.warning("%s is off for this rank: %s: %s", what, type(error).__name__, error)
            return False
        return True


@contextmanager
def _nobody_to_ask() -> Iterator[None]:
    """Without a key, Weights & Biases asks for one where there is a terminal, and the run would wait for an answer."""
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = stdin
