"""Curves over steps in the files of TensorBoard and in Weights & Biases.

A missing package, a full quota or a network that is down costs the curve, never the run.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_SECONDS_FOR_WANDB = 30.0


class Trackers:
    """The curves of one process: those that were opened and that still work."""

    def __init__(self) -> None:
        self._sinks: list[Callable[[Mapping[str, float], int], None]] = []
        self._closers: list[Callable[[], Any]] = []

    def open_tensorboard(self, folder: Path, *, first_step: int | None = None) -> None:
        """Write TensorBoard's files into a folder; ``first_step`` and what follows replace what is there of them."""
        self._try("tensorboard", lambda: self._open_tensorboard(folder, first_step))

    def open_wandb(self, project: str, name: str, folder: Path, **options: Any) -> None:
        """Log to a project of Weights & Biases; ``options`` are further ones of ``wandb.init``."""
        self._try("wandb", lambda: self._open_wandb(project, name, folder, options))

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to every curve."""
        for sink in list(self._sinks):
            if not self._try("metrics", lambda sink=sink: sink(values, step)):  # type: ignore[misc]
                self._sinks.remove(sink)

    def close(self) -> None:
        """Write what the curves still hold."""
        for closer in self._closers:
            self._try("metrics", closer)

    def _open_tensorboard(self, folder: Path, first_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(exist_ok=True)
        writer = SummaryWriter(str(folder), purge_step=first_step)

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self._sinks.append(write)
        self._closers.append(writer.close)

    def _open_wandb(self, project: str, name: str, folder: Path, options: dict[str, Any]) -> None:
        import wandb

        # Without a limit a network that goes down during the run would keep its end waiting for ever.
        settings = wandb.Settings(init_timeout=_SECONDS_FOR_WANDB, finish_timeout=_SECONDS_FOR_WANDB, silent=True)
        with _nobody_to_ask():
            run = wandb.init(project=project, name=name, dir=str(folder), settings=settings, **options)
        self._sinks.append(lambda values, step: run.log(dict(values), step=step))
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
