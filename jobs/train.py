"""Training of a small decoder-only transformer on a finished dataset: an example of reading Shar in training.

torchrun --nproc_per_node=2 jobs/train.py configs/training/example.yaml [key=value ...]

It goes on from the newest checkpoint of ``out_dir``, on as many ranks and workers as there are then: model, optimizer
and the place in the data, so that every utterance comes once per epoch whatever the interruptions. On SIGTERM it saves
a checkpoint and leaves; the exit status is 0 when it left in good order, finished or not.

A step is made of ``batches_per_step`` batches of all ranks, and each of their tokens has the same weight: with
``canonical`` in the settings of the loader, a training on two ranks is that on one.

It prints step, loss, speed and the time left every ``progress_seconds``. ``out_dir`` gets ``checkpoints/``, and for
each rank ``steps.rank<n>.jsonl``: loss, samples, tokens per second and the share of the time that was spent waiting
for data, and with ``log_ids`` the ids of the cuts. ``validation.jsonl`` has the losses on the validation data.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from speech_lm import Losses, SpeechLM, count_targets
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_config import TrainConfig
from train_data import TEXT_SIZE, codes_sizes, end_readers, make_data, validation_batches
from train_world import World, alone_in, world_of

from sharmill.config import load_typed
from sharmill.errors import ConfigError
from sharmill.registry import require_package
from sharmill.storage import write_atomic

_CHECKPOINT = re.compile(r"step-(\d{9})\.pt")


class Checkpoints:
    """The checkpoints of a training: whole or not there."""

    def __init__(self, out_dir: Path, keep: int) -> None:
        self._folder = out_dir / "checkpoints"
        self._keep = keep

    def newest(self) -> dict[str, Any] | None:
        paths = self._paths()
        return torch.load(paths[-1], map_location="cpu", weights_only=True) if paths else None

    def save(self, state: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        torch.save(state, stream)
        write_atomic(self._folder / f"step-{state['step']:09d}.pt", stream.getvalue())
        for path in self._paths()[: -self._keep]:
            path.unlink()

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _CHECKPOINT.fullmatch(path.name))


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


class Training:
    """One job's part of a training, which begins where the newest checkpoint ends."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.out_dir = Path(config.out_dir)
        self.checkpoints = Checkpoints(self.out_dir, config.keep)
        self.seed: int = world.gather(secrets.randbits(31))[0] if config.seed is None else config.seed
        torch.manual_seed(self.seed)
        self.step = 0
        self.leave = False
        asked = config.batches_per_step or world.size
        if asked % world.size:
            raise ConfigError(
                f"batches_per_step: {asked} cannot be divided among {world.size} ranks", code="split_wrong"
            )
        self.batches_of_rank = asked // world.size
        self.saved_at = time.monotonic()
        self.data = make_data(config, rank=world.rank, world_size=world.size, seed=self.seed)
        model = SpeechLM(config.model, TEXT_SIZE, *codes_sizes(config)).to(world.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / config.warmup_steps)
        )
        if (state := self.checkpoints.newest()) is not None:
            self._load(model, state)
        self.curves = Curves(self.out_dir, self.step) if config.tensorboard and world.rank == 0 else None
        self.model: nn.Module = DistributedDataParallel(model) if world.size > 1 else model

    def run(self) -> None:
        """Train until ``max_steps`` are done, or until it is told to leave."""
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            saved = self._run_steps(iter(self.data))
        finally:
            end_readers()
        if self.world.rank == 0:
            ended = "finished" if self.step == self.config.max_steps else "told to leave"
            print(f"train: {ended} at step {self.step}, saved at step {saved}", flush=True)

    def _run_steps(self, batches: Iterator[dict[str, Any]]) -> int:
        """Run the steps, and return the step that was saved last."""
        saved = self.step
        with (self.out_dir / f"steps.rank{self.world.rank}.jsonl").open("a", buffering=1) as log:
            log.write(json.dumps(self._begin()) + "\n")
            progress = ProgressLines(self.config.max_steps, self.config.progress_seconds)
            while self.step < self.config.max_steps:
                started = time.perf_counter()
                drawn = [next(batches) for _ in range(self.batches_of_rank)]
                waited = time.perf_counter() - started
                losses = self._train(drawn)
                # Kernels run later than they are called.
                self.world.synchronize()
                self.step += 1
                seconds = time.perf_counter() - started
                described = self._describe(drawn, losses, seconds, waited)
                log.write(json.dumps(described) + "\n")
                if self.world.rank == 0:
                    progress.add(self.step, described["loss"], losses.num_positions)
                if self.curves is not None:
                    self.curves.add("train", described)
                if self.config.validation is not None and self.step % self.config.validate_every == 0:
                    self._validate()
                leave = self.world.any(self.leave)
                if leave or self._is_time_to_save():
                    self._save()
                    saved = self.step
                if leave:
                    break
        return saved

    def _train(self, batches: list[dict[str, Any]]) -> Losses:
        """Make a step of the batches of all ranks, in which each token, and each code, has the same weight."""
        counts = torch.tensor([count_targets(batch) for batch in batches], dtype=torch.float64)
        shares = counts / self.world.add_up(counts.sum(dim=0).to(self.world.device)).cpu()
        self.optimizer.zero_grad(set_to_none=True)
        means, num_positions = torch.zeros(2, dtype=torch.float64, device=self.world.device), 0
        for number, (batch, (text, codes)) in enumerate(zip(batches, shares.tolist(), strict=True), start=1):
            # Ranks exchange gradients once a step.
            waits = isinstance(self.model, DistributedDataParallel) and number < len(batches)
            with self.model.no_sync() if waits else nullcontext():
                losses = self._losses(self.model, batch)
                # Gradients of ranks are averaged, and these are parts of a sum.
                (self.world.size * (text * losses.text + codes * losses.codes)).backward()
            means += torch.stack([text * losses.text.detach(), codes * losses.codes.detach()])
            num_positions += losses.num_positions
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return Losses(*self.world.add_up(means), num_positions)

    def _losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        moved = {name: value.to(self.world.device) for name, value in batch.items() if torch.is_tensor(value)}
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            losses: Losses = model(moved)
        return losses

    def _validate(self) -> None:
        """Write the mean losses over the validation data; ranks may have unequal parts, since they meet at the end."""
        model = self._plain_model()
        sums = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        with torch.no_grad():
            for batch in validation_batches(self.config, rank=self.world.rank, world_size=self.world.size):
                losses, (text, codes) = self._losses(model, batch), count_targets(batch)
                sums += torch.stack([losses.text * text, losses.codes * codes, *sums.new_tensor([text, codes])])
        text_loss, codes_loss = (self.world.add_up(sums)[:2] / sums[2:]).tolist()
        if self.world.rank == 0:
            values = {"step": self.step, "loss": text_loss + codes_loss}
            values |= {"text_loss": text_loss, "codes_loss": codes_loss}
            with (self.out_dir / "validation.jsonl").open("a") as log:
                log.write(json.dumps(values) + "\n")
            if self.curves is not None:
                self.curves.add("validation", values)
            print(f"train: step {self.step:,}, validation loss {values['loss']:.4f}", flush=True)

    def _is_time_to_save(self) -> bool:
        seconds = self.config.checkpoint_seconds
        # One clock decides for all ranks.
        is_late = seconds is not None and self.world.rank == 0 and time.monotonic() - self.saved_at >= seconds
        is_late = seconds is not None and self.world.any(is_late)
        return is_late or self.step % self.config.checkpoint_every == 0 or self.step == self.config.max_steps

    def _plain_model(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def _begin(self) -> dict[str, Any]:
        return {"begin": self.step, "seed": self.seed, "rank": self.world.rank, "world_size": self.world.size}

    def _describe(self, batches: list[dict[str, Any]], losses: Losses, seconds: float, waited: float) -> dict[str, Any]:
        ids = [cut_id for batch in batches for cut_id in batch["ids"]]
        values = {
            "step": self.step,
            "loss": round(losses.total.item(), 4),
            "text_loss": round(losses.text.item(), 4),
            "codes_loss": round(losses.codes.item(), 4),
            "samples": len(ids),
            "tokens_per_second": round(losses.num_positions / seconds, 1),
            "wait_share": round(waited / seconds, 4),
        }
        return values | ({"ids": ids} if self.config.log_ids else {})

    def _save(self) -> None:
        data = self.data.merge(self.world.gather(self.data.state_dict()))
        self.saved_at = time.monotonic()
        if self.world.rank == 0:
            self.checkpoints.save(
                {
                    "step": self.step,
                    "model_config": asdict(self.config.model),
                    "model": self._plain_model().state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "schedule": self.schedule.state_dict(),
                    "data": data,
                }
            )

    def _load(self, model: SpeechLM, state: dict[str, Any]) -> None:
        if state["model_config"] != asdict(self.config.model):
            raise ConfigError(
                f"{self.out_dir} has checkpoints of another model, {state['model_config']}: use another out_dir",
                code="wrong_state",
            )
        model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if state["data"] is not None:
            self.data.load_state_dict(state["data"])
        self.step = state["step"]

    def _on_signal(self, number: int, frame: object) -> None:
        self.leave = True


def main(arguments: list[str]) -> int:
    """Train as the arguments say, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        config = load_typed(TrainConfig, arguments[0], arguments[1:])
        if config.tensorboard:
            # On every rank, before any waits for another.
            require_package("tensorboard", extra="nemo")
        with world_of(config) as world, alone_in(Path(config.out_dir), world):
            Training(config, world).run()
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
