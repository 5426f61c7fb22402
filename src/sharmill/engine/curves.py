"""Curves of throughput and rejects in Weights & Biases; off by default.

A missing package, a missing key or a network failure only stops the curves, never the run.
"""

import io
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharmill.config import MetricsConfig
from sharmill.engine.unit import Commit, Unit

log = logging.getLogger(__name__)


class Curves:
    """Curves in trackers such as Weights & Biases. An error of a tracker ends its curves, never the run."""

    def __init__(self) -> None:
        # For each tracker, the function that adds the values of a step, and the function that closes it.
        self._places: dict[str, tuple[Callable[[dict[str, Any], int], object], Callable[[], object]]] = {}

    def add_point(self, values: dict[str, Any], step: int) -> None:
        """Add a point to every curve."""
        for name, (write, _) in list(self._places.items()):
            self._try(name, write, values, step)

    def close(self) -> None:
        """Flush and close all curves."""
        for name, (_, close) in list(self._places.items()):
            self._try(name, close)

    def _open_wandb(self, *, timeout: float = 30.0, **options: Any) -> None:
        """Start a run in Weights & Biases without asking for a key and without waiting longer than ``timeout``.

        Args:
            timeout: seconds to wait for the server at the start and at the end.
            options: arguments for ``wandb.init``.
        """
        import wandb

        # A network failure during the run would otherwise block its end forever.
        settings = wandb.Settings(init_timeout=timeout, finish_timeout=timeout, silent=True)
        # If no key is set, wandb would ask for one on the terminal and block the run.
        stdin, sys.stdin = sys.stdin, io.StringIO()
        try:
            run = wandb.init(settings=settings, **options)
        finally:
            sys.stdin = stdin
        self._places["wandb"] = lambda values, step: run.log(values, step=step), run.finish

    def _try(self, place: str, action: Callable[..., object], /, *arguments: Any, **options: Any) -> None:
        try:
            action(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a curve must not cost the run
            self._places.pop(place, None)
            log.warning("%s is off for this rank: %s: %s", place, type(error).__name__, error)


class MetricsLog(Curves):
    """Curves of one rank over its units.

    Args:
        folder: the folder for wandb's files; it is removed together with the plan.
        timeout: seconds to wait for the server at the start and at the end.
    """

    def __init__(
        self, config: MetricsConfig, stage_name: str, folder: Path, rank: int, *, timeout: float = 30.0
    ) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._units, self._audio_seconds, self._rejects = 0, 0.0, 0
        if config.wandb_project:
            self._try(
                "wandb", self._open_wandb,
                project=config.wandb_project, entity=config.wandb_entity, group=stage_name, dir=str(folder),
                name="-".join(filter(None, [config.wandb_name, stage_name, f"rank-{rank:03d}"])), timeout=timeout,
            )  # fmt: skip

    def commit(self, unit: Unit, commit: Commit) -> None:
        """Add the point for a completed unit to the curves."""
        self._units += 1
        self._audio_seconds += unit.cost
        self._rejects += commit.num_rejected
        self.add_point(
            {
                "audio_hours": self._audio_seconds / 3600,
                "audio_hours_per_hour": self._audio_seconds / max(time.monotonic() - self._started, 1e-6),
                "unit_seconds": commit.seconds,
                "rejects": float(self._rejects),
            },
            self._units,
        )
