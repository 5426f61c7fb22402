"""Optional curves of throughput and rejects per rank in Weights & Biases; off unless configured.

A missing package, a missing key or a network that is down costs the curve, never the run.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharmill.config import MetricsConfig
from sharmill.engine.unit import Commit, Unit

log = logging.getLogger(__name__)


class MetricsLog:
    """Curves of one rank over its units; ``folder`` is there as long as the plan is the present one.

    Args:
        timeout: seconds to wait for the server at the start and at the end.
    """

    def __init__(
        self, config: MetricsConfig, stage_name: str, folder: Path, rank: int, *, timeout: float = 30.0
    ) -> None:
        self._started = time.monotonic()
        self._units, self._audio_seconds, self._rejects = 0, 0.0, 0
        self._run: Any = None
        if config.wandb_project:
            with self._costing_the_curve_alone():
                import wandb

                self._run = wandb.init(
                    project=config.wandb_project, entity=config.wandb_entity, group=stage_name, dir=str(folder),
                    name="-".join(filter(None, [config.wandb_name, stage_name, f"rank-{rank:03d}"])),
                    # Without a limit a network that goes down during the run would keep its end waiting for ever.
                    settings=wandb.Settings(init_timeout=timeout, finish_timeout=timeout, silent=True),
                )  # fmt: skip

    def commit(self, unit: Unit, commit: Commit) -> None:
        """Add a point to every curve."""
        self._units += 1
        self._audio_seconds += unit.cost
        self._rejects += commit.num_rejected
        if self._run is not None:
            values = {
                "audio_hours": self._audio_seconds / 3600,
                "audio_hours_per_hour": self._audio_seconds / max(time.monotonic() - self._started, 1e-6),
                "unit_seconds": commit.seconds,
                "rejects": float(self._rejects),
            }
            with self._costing_the_curve_alone():
                self._run.log(values, step=self._units)

    def close(self) -> None:
        """Send what the curves still hold."""
        if self._run is not None:
            with self._costing_the_curve_alone():
                self._run.finish()

    @contextmanager
    def _costing_the_curve_alone(self) -> Iterator[None]:
        # Without a key, Weights & Biases would ask for one at a terminal, and the run would wait for an answer.
        stdin, sys.stdin = sys.stdin, io.StringIO()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a curve must not cost the run
            self._run = None
            log.warning("wandb is off for this rank: %s: %s", type(error).__name__, error)
        finally:
            sys.stdin = stdin
