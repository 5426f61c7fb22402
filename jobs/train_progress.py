"""What a training shows of its progress: lines and curves."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


class ProgressLines:
    """Lines about a training: after its first step, then at most every ``seconds``, and after its last step.

    Loss and speed are means over the steps since the line before; the time left follows from these steps.
    """

    def __init__(self, max_steps: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_steps, self._seconds, self._clock = max_steps, seconds, clock
        self._printed: float | None = None
        self._begin()

    def add(self, step: int, loss: float, num_tokens: int) -> None:
        """Count a step, and print a line where it is time."""
        self._losses.append(loss)
        self._num_tokens += num_tokens
        now = self._clock()
        is_first = self._printed is None
        if not is_first and now - self._started < self._seconds and step < self._max_steps:
            return
        elapsed = max(now - self._started, 1e-9)
        left = timedelta(seconds=round((self._max_steps - step) * elapsed / len(self._losses)))
        loss = sum(self._losses) / len(self._losses)
        said = f"train: step {step:,} of {self._max_steps:,}, loss {loss:.4f}"
        # The first step waits for processes that read, and says nothing about the others.
        if not is_first:
            said += f", {self._num_tokens / elapsed:,.0f} tokens per second on each rank, {left} left"
        print(said, flush=True)
        self._printed = now
        self._begin()

    def _begin(self) -> None:
        self._started = self._clock()
        self._losses: list[float] = []
        self._num_tokens = 0


class Curves:
    """Values over steps for TensorBoard; those of steps that are made once more are replaced."""

    def __init__(self, out_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out_dir / "tensorboard"), purge_step=step + 1)

    def add(self, group: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in ("step", "ids"):
                self._writer.add_scalar(f"{group}/{name}", value, values["step"])
        self._writer.flush()
