"""Training of a small decoder-only transformer on a finished dataset: an example of reading Shar in training.

torchrun --nproc_per_node=2 jobs/train.py configs/training/example.yaml [key=value ...]
torchrun --nproc_per_node=4 jobs/train.py configs/training/example.yaml tensor_parallel=2 [key=value ...]

The ranks are a mesh: ``tensor_parallel`` of them share the layers of one copy of the model and read the same data, and
over the others FSDP2 divides parameters, gradients and optimizer.

It goes on from the newest checkpoint of ``out_dir``, on as many ranks and workers, in whatever layout, as there are
then: model, optimizer, seed and the place in the data, so that every utterance comes once per epoch whatever the
interruptions. On SIGTERM it saves a checkpoint and leaves; the exit status is 0 when it left in good order, finished or
not. If a batch does not come soon after SIGTERM, it ends with an error, and the checkpoint before it stays the newest.

A step is made of ``batches_per_step`` batches of all ranks, and each of their tokens has the same weight: with
``canonical`` in the settings of the loader, a training on four ranks is that on one.

It prints step, loss, speed and the time left every ``progress_seconds``. ``out_dir`` gets ``checkpoints/``, and for
each rank ``steps.rank<n>.jsonl``: loss, samples, tokens per second and the share of the time that was spent waiting
for data, and with ``log_ids`` the ids of the cuts. ``validation.jsonl`` has the losses on the validation data.
"""

import json
import math
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from speech_lm import Losses, SpeechLM, clip_gradients, count_targets, parallelize
from train_config import TrainConfig
from train_data import data_kind, end_readers, make_data, model_sizes, validation_batches
from train_world import Checkpoints, World, alone_in, world_of

from sharmill.config import load_typed
from sharmill.engine.curves import Curves
from sharmill.errors import ConfigError, FatalError, SharmillError, refuse
from sharmill.files.atomic import write_atomic
from sharmill.registry import require_package

# Code that reads may swallow the error of a wait that takes too long: it comes again.
_SECONDS_BETWEEN_ALARMS = 1.0


class ProgressLines:
    """Lines about a training: after its first step, then at most every ``seconds``, and after its last step.

    Loss and speed are means over the steps since the line before; the time left follows from these steps.
    """

    def __init__(self, max_steps: int, seconds: float) -> None:
        self._max_steps, self._seconds = max_steps, seconds
        # The first step waits for processes that read, and says nothing about the speed of others.
        self._started: float | None = None
        self._losses: list[float] = []
        self._num_tokens = 0

    def add(self, step: int, loss: float, num_tokens: int) -> None:
        """Count a step, and print a line where it is time."""
        self._losses.append(loss)
        self._num_tokens += num_tokens
        speed = ""
        if self._started is not None:
            elapsed = max(time.monotonic() - self._started, 1e-9)
            if elapsed < self._seconds and step < self._max_steps:
                return
            left = timedelta(seconds=round((self._max_steps - step) * elapsed / len(self._losses)))
            speed = f", {self._num_tokens / elapsed:,.0f} tokens per second on each rank, {left} left"
        mean = sum(self._losses) / len(self._losses)
        print(f"train: step {step:,} of {self._max_steps:,}, loss {mean:.4f}{speed}", flush=True)
        self._started, self._losses, self._num_tokens = time.monotonic(), [], 0


class TrainingCurves(Curves):
    """Values over steps for TensorBoard and Weights & Biases, as the configuration asks for them.

    In TensorBoard, values of steps that are made once more are replaced. In Weights & Biases all jobs of a training are
    one run, whose id is in ``out_dir``; it keeps the first values of a step. A missing package, a full quota or a
    network that is down costs the curve, never the run.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        super().__init__()
        out_dir = Path(config.out_dir)
        if config.tensorboard:
            self._try("tensorboard", self._open_tensorboard, out_dir / "tensorboard", step + 1)
        if config.wandb_project is not None:
            run_id = out_dir / "wandb_id"
            if not run_id.exists():
                write_atomic(run_id, secrets.token_hex(8).encode())
            self._try(
                "wandb", self._open_wandb,
                project=config.wandb_project, name=config.wandb_name or out_dir.name, dir=str(out_dir),
                id=run_id.read_text(), resume="allow", config=asdict(config),
            )  # fmt: skip

    def add(self, group: str, values: dict[str, Any]) -> None:
        """Add the values of a step, but for its number and ids."""
        numbers = {f"{group}/{name}": value for name, value in values.items() if name not in ("step", "ids")}
        self.add_point(numbers, values["step"])

    def _open_tensorboard(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(exist_ok=True)
        writer = SummaryWriter(str(folder), purge_step=first_step)

        def write(values: dict[str, Any], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self._places["tensorboard"] = write, writer.close


class Training:
    """One job's part of a training, which begins where the newest checkpoint ends."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.out_dir = Path(config.out_dir)
        asked = config.batches_per_step or world.data_size
        if asked % world.data_size:
            raise ConfigError(
                f"batches_per_step: {asked} cannot be divided among {world.data_size} data-parallel ranks",
                code="split_wrong",
            )
        self.batches_of_rank = asked // world.data_size
        self.leave = False
        self.saved_at = time.monotonic()
        self.checkpoints = Checkpoints(self.out_dir, config.keep, world)
        self.sizes = asdict(config.model) | model_sizes(config)
        record = self.checkpoints.read_record()
        self.seed = self._seed(record)
        self.step: int = 0 if record is None else record["step"]
        # Data that begin anew in each job are to come in another order then.
        self.data = make_data(config, world.mesh, seed=self.seed + (0 if config.resumable else self.step))
        if config.validation is not None:
            # Wrong data are an error now, not hundreds of steps later.
            next(validation_batches(config, world.mesh), None)
        # The same weights on all ranks, before each keeps its part of them.
        torch.manual_seed(self.seed)
        dtype = torch.bfloat16 if config.precision == "bf16-true" else torch.float32
        self.model = SpeechLM(config.model, **model_sizes(config)).to(world.device, dtype)
        parallelize(self.model, world.mesh, config)
        # Below this epsilon the gradients of rare codes are rounding, which differs between layouts. Variants that work
        # on all parameters in one go need them on one mesh.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-6, foreach=False
        )
        if record is not None:
            self._load(record)
        self.curves = TrainingCurves(config, self.step) if world.rank == 0 else None

    def _seed(self, record: dict[str, Any] | None) -> int:
        """Return the seed of the whole training: that of its checkpoints, if there are any."""
        if record is None:
            drawn = self.world.gather(secrets.randbits(31))[0]
            return drawn if self.config.seed is None else self.config.seed
        if self.config.seed not in (None, record["seed"]):
            raise ConfigError(
                f"seed: {self.out_dir} has checkpoints of a training with "
                f"seed {record['seed']}, not {self.config.seed}: leave it out, or use another out_dir",
                code="wrong_state",
            )
        return record["seed"]

    def run(self) -> None:
        """Train until ``max_steps`` are done, or until it is told to leave.

        Raises:
            FatalError: no batch came for ``data_timeout`` seconds, or soon after the training was told to leave.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            self._run_steps(iter(self.data))
        finally:
            end_readers()
            if self.curves is not None:
                self.curves.close()
        if self.world.rank == 0:
            ended = "finished" if self.step == self.config.max_steps else "told to leave"
            print(f"train: {ended} at step {self.step}, which is saved", flush=True)

    def _run_steps(self, batches: Iterator[dict[str, Any]]) -> None:
        """Run the steps, of which the last one is saved."""
        with (self.out_dir / f"steps.rank{self.world.rank}.jsonl").open("a", buffering=1) as log:
            begin = {"begin": self.step, "seed": self.seed, "rank": self.world.rank, "world_size": self.world.size}
            log.write(json.dumps(begin) + "\n")
            progress = ProgressLines(self.config.max_steps, self.config.progress_seconds)
            while self.step < self.config.max_steps:
                started = time.perf_counter()
                drawn = [self._draw(batches) for _ in range(self.batches_of_rank)]
                waited = time.perf_counter() - started
                losses = self._train(drawn)
                if self.world.device.type == "cuda":
                    # Kernels run later than they are called.
                    torch.cuda.synchronize(self.world.device)
                self.step += 1
                seconds = time.perf_counter() - started
                described = self._describe(drawn, losses, seconds, waited)
                log.write(json.dumps(described) + "\n")
                if self.world.rank == 0:
                    progress.add(self.step, described["loss"], losses.num_positions)
                if self.curves is not None:
                    self.curves.add("train", described)
                # The clock of rank 0 decides for all when a checkpoint is due by time.
                due = math.inf if self.config.checkpoint_seconds is None else self.config.checkpoint_seconds
                is_late = self.world.rank == 0 and time.monotonic() - self.saved_at >= due
                leave, is_late = self.world.any(self.leave, is_late)
                last = self.step == self.config.max_steps
                if leave or is_late or last or self.step % self.config.checkpoint_every == 0:
                    self._save()
                if leave:
                    break
                if self.config.validation is not None and self.step % self.config.validate_every == 0:
                    self._validate(drawn[-1])

    def _draw(self, batches: Iterator[dict[str, Any]], *default: None) -> Any:
        """Return the next batch, or the default at the end; SIGALRM ends a wait that takes too long."""
        self._limit_wait(self.config.data_timeout)
        try:
            return next(batches, *default)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _train(self, batches: list[dict[str, Any]]) -> Losses:
        """Make a step of the batches of all ranks, in which each token, and each code, has the same weight."""
        counts = torch.tensor([count_targets(batch) for batch in batches], dtype=torch.float64)
        # There may be no text, or no codes.
        shares = counts / self.world.add_up(counts.sum(dim=0).to(self.world.device)).clamp(min=1).cpu()
        rate = self.config.learning_rate * min(1.0, (self.step + 1) / self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        means, num_positions = torch.zeros(2, dtype=torch.float64, device=self.world.device), 0
        for number, (batch, (text, codes)) in enumerate(zip(batches, shares.tolist(), strict=True), start=1):
            # Ranks exchange gradients once a step.
            self.model.set_requires_gradient_sync(number == len(batches))
            losses = self._losses(batch)
            # Gradients of ranks are added up, as those of batches are.
            (text * losses.text + codes * losses.codes).backward()
            means += torch.stack([text * losses.text.detach(), codes * losses.codes.detach()])
            num_positions += losses.num_positions
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        return Losses(*self.world.add_up(means), num_positions)

    def _losses(self, batch: dict[str, Any]) -> Losses:
        return self.model(
            {name: value.to(self.world.device) for name, value in batch.items() if torch.is_tensor(value)}
        )

    def _validate(self, spare: dict[str, Any]) -> None:
        """Write the mean losses over the validation data.

        Ranks may have unequal parts of it, but compute together: who has no more computes ``spare``, which is not
        counted.
        """
        world = self.world
        batches = validation_batches(self.config, world.mesh)
        sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        with torch.no_grad():
            while world.any((batch := self._draw(batches, None)) is not None)[0]:
                losses = self._losses(spare if batch is None else batch)
                if batch is not None:
                    text, codes = count_targets(batch)
                    sums += torch.stack([losses.text * text, losses.codes * codes, *sums.new_tensor([text, codes])])
        self.model.reshard()
        *totals, num_tokens, num_codes = world.add_up(sums).tolist()
        if not num_tokens + num_codes:
            raise ConfigError(
                f"validation: nothing in {self.config.validation} is predicted: look at its filters and limits",
                code="too_few_cuts",
            )
        text_loss, codes_loss = totals[0] / max(1, num_tokens), totals[1] / max(1, num_codes)
        if world.rank == 0:
            values = {"step": self.step, "loss": text_loss + codes_loss}
            values |= {"text_loss": text_loss, "codes_loss": codes_loss}
            with (self.out_dir / "validation.jsonl").open("a") as log:
                log.write(json.dumps(values) + "\n")
            if self.curves is not None:
                self.curves.add("validation", values)
            print(f"train: step {self.step:,}, validation loss {values['loss']:.4f}", flush=True)

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
        # Ranks along tp read the same.
        data = self.data.merge(self.world.gather(self.data.state_dict())[:: self.config.tensor_parallel])
        self.saved_at = time.monotonic()
        record = {"step": self.step, "seed": self.seed, "sizes": self.sizes}
        record |= {"data_kind": data_kind(self.config), "data": data}
        self.checkpoints.save(self.model, self.optimizer, record)

    def _load(self, record: dict[str, Any]) -> None:
        kind, before = data_kind(self.config), record["data_kind"]
        refuse(
            (before != kind, f"{self.out_dir} has checkpoints of a training {before!r}, and this one is {kind!r}: its "
             "place in the data means nothing here; use the same again, or another out_dir"),
            (record["sizes"] != self.sizes, f"{self.out_dir} has checkpoints of another model, {record['sizes']}: use "
             "another out_dir"),
            code="wrong_state",
        )  # fmt: skip
        self.checkpoints.load(self.model, self.optimizer, record["files"])
        if record["data"] is not None:
            self.data.load_state_dict(record["data"])

    def _on_signal(self, number: int, frame: object) -> None:
        self.leave = True
        # The timer runs only while this rank waits for data.
        if (left := signal.getitimer(signal.ITIMER_REAL)[0]) > 0:
            self._limit_wait(left)

    def _limit_wait(self, seconds: float) -> None:
        limit = min(seconds, self.config.leave_timeout) if self.leave else seconds
        signal.setitimer(signal.ITIMER_REAL, limit, _SECONDS_BETWEEN_ALARMS)

    def _on_alarm(self, number: int, frame: object) -> None:
        waited = "soon after SIGTERM" if self.leave else f"in data_timeout: {self.config.data_timeout:g} seconds"
        raise FatalError(
            f"rank {self.world.rank} got no batch {waited}, at step {self.step}: look for errors of the processes that "
            "read, above, and at the disk or network that the data come from; start it again to go on from the newest "
            "checkpoint",
            code="step_failed",
        )


def main(arguments: list[str]) -> int:
    """Train as the arguments say, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        config = load_typed(TrainConfig, arguments[0], arguments[1:])
        # On every rank, before any waits for another.
        for package, is_asked in {"tensorboard": config.tensorboard, "wandb": config.wandb_project}.items():
            if is_asked:
                require_package(package)
        with world_of(config) as world, alone_in(Path(config.out_dir), world):
            Training(config, world).run()
    except SharmillError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
