"""The configuration of the training example; without torch, so that jobs are launched in no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer."""

    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_heads < 1 or self.dim % (2 * self.num_heads):
            raise ValueError("dim must be a multiple of twice num_heads, and there must be layers and heads")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train on, how long, and where to keep it.

    ``batch_seconds`` limits the padded target audio of a batch, on each rank. ``order_seed`` makes the order of the
    data and belongs to the whole training; ``seed`` is of one job: the first weights and the slices of contexts (null:
    drawn and logged). ``keep`` is how many checkpoints stay.

    With ``loader``, a YAML file for ``sharmill.training.get_dataloader``, NeMo's loader makes the batches, of this
    dataset and whatever else is in it. Our datasets are then read in the order of ``order_seed``, and a job goes on in
    it where the one before ended; other data begin anew, in an order that follows from ``seed`` and ``shard_seed``.
    Settings under which that cannot be are refused, unless ``resumable`` is false: then each job begins all data anew.
    """

    dataset: str
    out_dir: str
    codec: str | None = None
    loader: str | None = None
    resumable: bool = True
    shard_seed: Literal["randomized", "trng"] | int = "randomized"
    max_steps: int = 1000
    checkpoint_every: int = 100
    keep: int = 2
    batch_seconds: float = 60.0
    num_workers: int = 1
    order_seed: int = 0
    seed: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_ids: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        if min(self.max_steps, self.checkpoint_every, self.keep, self.warmup_steps) < 1:
            raise ValueError("max_steps, checkpoint_every, keep and warmup_steps must be at least 1")
        if self.batch_seconds <= 0 or self.learning_rate <= 0 or self.num_workers < 0:
            raise ValueError("batch_seconds and learning_rate must be positive, num_workers not negative")
