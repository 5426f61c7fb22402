"""Training of a small decoder-only transformer on a finished dataset: an example of reading Shar in training.

torchrun --nproc_per_node=2 jobs/train.py configs/training/example.yaml [key=value ...]
torchrun --nproc_per_node=4 jobs/train.py configs/training/example.yaml tensor_parallel=2 [key=value ...]

The ranks form a mesh. Groups of ``tensor_parallel`` ranks share the layers of one copy of the model and read the same
data. FSDP2 shards parameters, gradients and optimizer over the other axis.

The training resumes from the newest checkpoint in ``out_dir``, on any number of ranks and workers and in any layout. A
checkpoint contains model, optimizer, seed and the position in the data, so that every utterance is read once per epoch
despite interruptions. On SIGTERM the training saves a checkpoint and exits with status 0, finished or not. If no batch
arrives soon after SIGTERM, it exits with an error, and the previous checkpoint remains the newest.

In each step, all ranks together process ``batches_per_step`` batches, and all tokens of these batches have the same
weight. With ``canonical`` in the settings of the loader, training on four ranks therefore equals training on one rank.

Step, loss, speed and remaining time are printed every ``progress_seconds``. ``out_dir`` contains ``checkpoints/`` and,
for each rank, ``steps.rank<n>.jsonl`` with loss, samples, tokens per second, the share of time spent waiting for data,
and the ids of the cuts if ``log_ids`` is set. ``validation.jsonl`` contains the losses on the validation data.
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
from train_data import data_kind, kill_workers, make_data, model_sizes, validation_batches
from train_world import Checkpoints, World, join_world, lock_out_dir

from sharmill.config import load_typed
from sharmill.engine.curves import Curves
from sharmill.errors import ConfigError, FatalError, SharmillError, refuse
from sharmill.files.atomic import write_atomic
from sharmill.registry import require_package

# The alarm repeats, because code that reads data may swallow the first error.
_SECONDS_BETWEEN_ALARMS = 1.0


class ProgressLines:
    """Progress lines of a training: one after the first and the last step, and otherwise at most one every ``seconds``.

    Loss and speed are means over the steps since the previous line. The remaining time is estimated from these steps.
    """

    def __init__(self, max_steps: int, seconds: float) -> None:
        self._max_steps, self._seconds = max_steps, seconds
        # The first step is not timed, because it waits for the workers to start.
        self._started: float | None = None
        self._losses: list[float] = []
        self._num_tokens = 0

    def add(self, step: int, loss: float, num_tokens: int) -> None:
        """Count a step, and print a line if one is due."""
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
    """Curves for TensorBoard and Weights & Biases, if the configuration requests them.

    TensorBoard replaces the values of repeated steps. In Weights & Biases, all jobs of a training are one run, whose id
    is in ``out_dir``; the run keeps the first values of a repeated step. If a package is missing, a quota is exceeded
    or the network fails, the curves are lost but the training continues.
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
        """Add the values of a step, except its number and ids."""
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
    """One job of a training, which resumes from the newest checkpoint."""

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
        # If every job reads the data from the start, adding the step to the seed changes the order of the data.
        self.data = make_data(config, world.mesh, seed=self.seed + (0 if config.resumable else self.step))
        if config.validation is not None:
            # Unusable data should be detected now, not hundreds of steps later.
            next(validation_batches(config, world.mesh), None)
        # All ranks need the same weights before each keeps only its shard.
        torch.manual_seed(self.seed)
        dtype = torch.bfloat16 if config.precision == "bf16-true" else torch.float32
        self.model = SpeechLM(config.model, **model_sizes(config)).to(world.device, dtype)
        parallelize(self.model, world.mesh, config)
        # Gradients of rare codes that are smaller than this epsilon are rounding errors, which differ between layouts.
        # ``foreach`` would require all parameters to be on one mesh.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-6, foreach=False
        )
        if record is not None:
            self._load(record)
        self.curves = TrainingCurves(config, self.step) if world.rank == 0 else None

    def _seed(self, record: dict[str, Any] | None) -> int:
        """Return the seed of the training, which is stored in its checkpoints, if there are any."""
        if record is None:
            drawn = self.world.gather(secrets.randbits(31))[0]
            return drawn if self.config.seed is None else self.config.seed
        if self.config.seed not in (None, record["seed"]):
            raise ConfigError(
                f"seed: {self.out_dir} has checkpoints of a training run with "
                f"seed {record['seed']}, not {self.config.seed}; omit seed, or use another out_dir",
                code="wrong_state",
            )
        return record["seed"]

    def run(self) -> None:
        """Train until ``max_steps`` are done or SIGTERM arrives.

        Raises:
            FatalError: no batch arrived within ``data_timeout``, or soon enough after SIGTERM.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            self._run_steps(iter(self.data))
        finally:
            kill_workers()
            if self.curves is not None:
                self.curves.close()
        if self.world.rank == 0:
            ended = "finished" if self.step == self.config.max_steps else "told to leave"
            print(f"train: {ended} at step {self.step}; checkpoint saved", flush=True)

    def _run_steps(self, batches: Iterator[dict[str, Any]]) -> None:
        """Run the steps; save checkpoints when they are due and after the last step."""
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
                    # Wait for the kernels, which run asynchronously; otherwise the measured time would be too short.
                    torch.cuda.synchronize(self.world.device)
                self.step += 1
                seconds = time.perf_counter() - started
                described = self._describe(drawn, losses, seconds, waited)
                log.write(json.dumps(described) + "\n")
                if self.world.rank == 0:
                    progress.add(self.step, described["loss"], losses.num_positions)
                if self.curves is not None:
                    self.curves.add("train", described)
                # Rank 0 decides for all ranks, because clocks may differ.
                due = math.inf if self.config.checkpoint_seconds is None else self.config.checkpoint_seconds
                is_late = self.world.rank == 0 and time.monotonic() - self.saved_at >= due
                leave, is_late = self.world.any(self.leave, is_late)
                is_due = self.step == self.config.max_steps or self.step % self.config.checkpoint_every == 0
                if leave or is_late or is_due:
                    self._save()
                if leave:
                    break
                if self.config.validation is not None and self.step % self.config.validate_every == 0:
                    self._validate(drawn[-1])

    def _draw(self, batches: Iterator[dict[str, Any]], *default: None) -> Any:
        """Return the next batch, or the default at the end of the data; SIGALRM limits the wait."""
        self._limit_wait(self.config.data_timeout)
        try:
            return next(batches, *default)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _train(self, batches: list[dict[str, Any]]) -> Losses:
        """Run a step, and return the losses over all ranks.

        All text tokens of the step have equal weights, and so do all codes.
        """
        counts = torch.tensor([count_targets(batch) for batch in batches], dtype=torch.float64)
        # The clamp is needed if a step has no text or no codes.
        shares = counts / self.world.sum_over_data(counts.sum(dim=0).to(self.world.device)).clamp(min=1).cpu()
        rate = self.config.learning_rate * min(1.0, (self.step + 1) / self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        means, num_positions = torch.zeros(2, dtype=torch.float64, device=self.world.device), 0
        for number, (batch, (text, codes)) in enumerate(zip(batches, shares.tolist(), strict=True), start=1):
            # Ranks exchange gradients only once per step.
            self.model.set_requires_gradient_sync(number == len(batches))
            losses = self._losses(batch)
            # Gradients are summed over ranks, just as they are summed over batches.
            (text * losses.text + codes * losses.codes).backward()
            means += torch.stack([text * losses.text.detach(), codes * losses.codes.detach()])
            num_positions += losses.num_positions
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        return Losses(*self.world.sum_over_data(means), num_positions)

    def _losses(self, batch: dict[str, Any]) -> Losses:
        return self.model(
            {name: value.to(self.world.device) for name, value in batch.items() if torch.is_tensor(value)}
        )

    def _validate(self, spare: dict[str, Any]) -> None:
        """Write the mean losses over the validation data.

        All ranks must compute together, although their parts of the data may be unequal. A rank without further data
        computes the losses of ``spare``, which are not counted.
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
        *totals, num_tokens, num_codes = world.sum_over_data(sums).tolist()
        if not num_tokens + num_codes:
            raise ConfigError(
                f"validation: {self.config.validation} has nothing to predict; check its filters and limits",
                code="too_few_cuts",
            )
        text_loss, codes_loss = totals[0] / max(1, num_tokens), totals[1] / max(1, num_codes)
        if world.rank == 0:
            values = {
                "step": self.step,
                "loss": text_loss + codes_loss,
                "text_loss": text_loss,
                "codes_loss": codes_loss,
            }
            with (self.out_dir / "validation.jsonl").open("a") as log:
                log.write(json.dumps(values) + "\n")
            if self.curves is not None:
                self.curves.add("validation", values)
            print(f"train: step {self.step:,}, validation loss {values['loss']:.4f}", flush=True)

    def _describe(self, batches: list[dict[str, Any]], losses: Losses, seconds: float, waited: float) -> dict[str, Any]:
        ids = [cut_id for batch in batches for cut_id in batch["ids"]]
        return {
            "step": self.step,
            "loss": round(losses.total.item(), 4),
            "text_loss": round(losses.text.item(), 4),
            "codes_loss": round(losses.codes.item(), 4),
            "samples": len(ids),
            "tokens_per_second": round(losses.num_positions / seconds, 1),
            "wait_share": round(waited / seconds, 4),
            **({"ids": ids} if self.config.log_ids else {}),
        }

    def _save(self) -> None:
        # Ranks of a tensor-parallel group read the same data, so one state per group suffices.
        data = self.data.merge(self.world.gather(self.data.state_dict())[:: self.config.tensor_parallel])
        self.saved_at = time.monotonic()
        record = {
            "step": self.step,
            "seed": self.seed,
            "sizes": self.sizes,
            "data_kind": data_kind(self.config),
            "data": data,
        }
        self.checkpoints.save(self.model, self.optimizer, record)

    def _load(self, record: dict[str, Any]) -> None:
        kind, before = data_kind(self.config), record["data_kind"]
        refuse(
            (before != kind, f"{self.out_dir} has checkpoints of a training {before!r}, and this one is {kind!r}: it "
             "cannot use their position in the data; use the same settings again, or another out_dir"),
            (record["sizes"] != self.sizes, f"{self.out_dir} has checkpoints of another model, {record['sizes']}; use "
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
        waited = (
            "in time after SIGTERM" if self.leave else f"within {self.config.data_timeout:g} seconds (data_timeout)"
        )
        raise FatalError(
            f"rank {self.world.rank} got no batch {waited}, at step {self.step}; look above for worker errors, "
            "check the disk or network that holds the data, and repeat the command to resume from the newest "
            "checkpoint",
            code="step_failed",
        )


def main(arguments: list[str]) -> int:
    """Run the training that the arguments describe, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        config = load_typed(TrainConfig, arguments[0], arguments[1:])
        # Every rank checks this before any rank waits for another.
        for package, is_asked in {"tensorboard": config.tensorboard, "wandb": config.wandb_project}.items():
            if is_asked:
                require_package(package)
        with join_world(config) as world, lock_out_dir(Path(config.out_dir), world):
            Training(config, world).run()
    except SharmillError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
