"""The configuration of the training example. This module does not import torch, so that jobs start quickly."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from sharmill.config import Above0, NotNegative, Positive, require


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer."""

    dim: Positive = 256
    """Width: a multiple of twice ``num_heads``."""
    num_layers: Positive = 4
    """Number of layers."""
    num_heads: Positive = 4
    """Number of attention heads."""

    def __post_init__(self) -> None:
        require(self.dim % (2 * self.num_heads) == 0, "dim must be a multiple of twice num_heads")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Data, length, checkpoints and model of a training."""

    dataset: str
    """Dataset directory to train on, with or without contexts. With ``loader``, only its codec is used."""
    out_dir: str
    """Folder of checkpoints and logs."""
    codec: str | None = None
    """Codec whose codes are the model's tokens; required if the dataset has several."""
    loader: str | None = None
    """YAML file with settings of ``sharmill.training.get_dataloader``. NeMo's loader then makes batches from their
    speech, text and conversations. ``null``: the reader with lhotse's sampler."""
    resumable: bool = True
    """With ``loader``: a job continues in the data where the previous one ended, in the order of ``order_seed``. Data
    and settings that do not allow this are errors. ``false``: each job reads the data from the start. All jobs of a
    training must agree."""
    shard_seed: Literal["randomized", "trng"] | int = "randomized"
    """With ``loader``: NeMo's ``shard_seed``, which determines the order of data of all types except ``sharmill``."""
    max_steps: Positive = 1000
    """Number of training steps."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints."""
    checkpoint_seconds: Above0 | None = None
    """Seconds between additional checkpoints; ``null`` counts only steps."""
    keep: Positive = 2
    """Number of checkpoints to keep."""
    batch_seconds: Above0 = 60.0
    """Target audio of a batch on each rank, in seconds with padding, also for a dataset in ``validation``. With
    ``loader``, its settings apply."""
    batches_per_step: Positive | None = None
    """Total number of batches per step, a multiple of the number of data-parallel ranks; ``null`` is one per rank. With
    the same number as ``canonical`` in the settings of ``loader``, steps do not depend on the number of ranks."""
    validation: str | None = None
    """Dataset directory with codes of the same codec, or YAML file with settings of the loader (its ``validation_ds``,
    if it has one). All of it is read once in file order, and the mean loss is written to ``validation.jsonl``. The
    ``seed`` of these settings (0) selects slices of contexts."""
    validate_every: Positive = 100
    """Steps between validations."""
    num_workers: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Worker processes that read data, per rank. With ``loader``, its settings apply."""
    data_timeout: Above0 = 1800.0
    """Seconds that a rank waits for a batch before it ends with an error."""
    leave_timeout: Above0 = 15.0
    """Seconds that a rank waits for a batch after SIGTERM. torchrun kills ranks after 30 seconds, so all batches of a
    step must arrive within that time. ``jobs/start_ranks.py`` sets no limit."""
    order_seed: int = 0
    """Seed of the order of the data, the same for the whole training."""
    seed: int | None = None
    """Seed of initial weights and slices of contexts. Checkpoints store it; later jobs with another seed are refused.
    ``null`` takes the checkpoint's seed, or draws one and logs it."""
    learning_rate: Above0 = 1e-3
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: Positive = 50
    """Steps over which the learning rate rises."""
    precision: Literal["fp32", "bf16", "bf16-true"] = "fp32"
    """Arithmetic. ``bf16``: layers compute in bfloat16, while weights, optimizer and gradient sums stay float32.
    ``bf16-true``: everything except losses is bfloat16."""
    tensor_parallel: Positive = 1
    """Number of ranks that share the attention heads and feed-forward layers of one copy of the model and read the same
    data: a divisor of the number of ranks and of ``num_heads``. Copies are data-parallel, with sharded parameters."""
    sequence_parallel: bool = False
    """With ``tensor_parallel``: these ranks also divide sequence positions between the layers, which saves memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto`` is a GPU if the machine has one."""
    log_ids: bool = False
    """Write the ids of the cuts of every step to ``steps.rank<n>.jsonl``."""
    tensorboard: bool = False
    """Write TensorBoard curves of losses, speed and waiting to ``tensorboard/``."""
    wandb_project: str | None = None
    """Project of Weights & Biases for the same curves, with all jobs in one run; ``null`` logs nothing."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases; by default the name of ``out_dir``."""
    progress_seconds: NotNegative = 10.0
    """Seconds between lines with step, loss, speed and remaining time."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model: see below."""

    def __post_init__(self) -> None:
        require(
            self.model.num_heads % self.tensor_parallel == 0,
            f"tensor_parallel: {self.tensor_parallel} ranks cannot share {self.model.num_heads} attention heads evenly",
        )
        require(
            self.tensor_parallel > 1 or not self.sequence_parallel,
            "sequence_parallel needs tensor_parallel, which must be more than one",
        )
