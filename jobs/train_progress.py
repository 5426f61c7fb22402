"""Lines and curves that show the progress of a training."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from train_config import TrainConfig
from train_trackers import Trackers

from sharmill.files.storage import write_atomic


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
    """Values over steps for TensorBoard and Weights & Biases, as the configuration asks for them.

    In TensorBoard, values of steps that are made once more are replaced. In Weights & Biases all jobs of a training are
    one run, whose id is in ``out_dir``; it keeps the first values of a step.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        out_dir = Path(config.out_dir)
        self._trackers = Trackers()
        if config.tensorboard:
            self._trackers.open_tensorboard(out_dir / "tensorboard", first_step=step + 1)
        if config.wandb_project is not None:
            run_id = out_dir / "wandb_id"
            if not run_id.exists():
                write_atomic(run_id, secrets.token_hex(8).encode())
            name = config.wandb_name or out_dir.name
            options = {"id": run_id.read_text(), "resume": "allow", "config": asdict(config)}
            self._trackers.open_wandb(config.wandb_project, name, out_dir, **options)

    def add(self, group: str, values: dict[str, Any]) -> None:
        """Add the values of a step, but for its number and ids."""
        numbers = {f"{group}/{name}": value for name, value in values.items() if name not in ("step", "ids")}
        self._trackers.add(numbers, values["step"])

    def close(self) -> None:
        """Write what the curves still hold."""
        self._trackers.close()
