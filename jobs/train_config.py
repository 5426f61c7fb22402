"""The configuration of the training example; without torch, so that jobs are launched in no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer."""

    dim: int = 256
    """Width: a multiple of twice ``num_heads``."""
    num_layers: int = 4
    """Number of layers."""
    num_heads: int = 4
    """Number of attention heads."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_heads < 1 or self.dim % (2 * self.num_heads):
            raise ValueError("dim must be a multiple of twice num_heads, and there must be layers and heads")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Data, length, checkpoints and model of a training."""

    dataset: str
    """Dataset directory to train on, with or without contexts; with ``loader``, the one whose codec the model has."""
    out_dir: str
    """Folder of checkpoints and logs."""
    codec: str | None = None
    """Codec whose codes are the model's tokens; needed where the dataset has several."""
    loader: str | None = None
    """YAML file with settings of ``sharmill.training.get_dataloader``. NeMo's loader then makes the batches, of
    whatever speech, text and conversations the settings name; ``null`` is the reader with lhotse's sampler."""
    resumable: bool = True
    """With ``loader``: a job goes on in the data where the one before ended, in the order of ``order_seed``; data and
    settings with which that is impossible are errors. ``false``: each job begins all data anew. All jobs of a training
    have the same."""
    shard_seed: Literal["randomized", "trng"] | int = "randomized"
    """With ``loader``: NeMo's setting for the order of data of other types."""
    max_steps: int = 1000
    """Number of training steps."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    checkpoint_seconds: float | None = None
    """Seconds after which a checkpoint is saved besides; ``null`` goes by steps alone."""
    keep: int = 2
    """Number of checkpoints that are kept."""
    batch_seconds: float = 60.0
    """Target audio of a batch on each rank, in seconds, padding included, also of a dataset in ``validation``. With
    ``loader`` the settings there say how large a batch is."""
    batches_per_step: int | None = None
    """Batches of all ranks together that one step is made of, a multiple of the number of data-parallel ranks; ``null``
    is one of each. With ``canonical: N`` in the settings of ``loader`` and N here, steps do not depend on the ranks."""
    validation: str | None = None
    """Dataset directory with codes of the same codec, or YAML file with settings of the loader (its ``validation_ds``,
    if it has one), whose mean loss goes to ``validation.jsonl``. All of it is read once, in the order of its files,
    with slices of contexts by the ``seed`` of these settings (0)."""
    validate_every: int = 100
    """Steps between validations."""
    num_workers: int = 1
    """Processes that read data, per rank. With ``loader`` the ``num_workers`` of its settings count."""
    order_seed: int = 0
    """Seed of the order of the data; one for the whole training."""
    seed: int | None = None
    """Seed of first weights and slices of contexts. Checkpoints keep it: the jobs of one training have the same, and
    another one is refused. ``null`` is that of the checkpoint, or draws one, and logs it."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model: with ``bf16``, FSDP's mixed precision, layers compute in bfloat16, while weights,
    optimizer and the sums of gradients stay float32."""
    tensor_parallel: int = 1
    """Ranks that share the attention heads and feed-forward layers of one copy of the model, and read the same data: a
    divisor of the number of ranks and of ``num_heads``. The other ranks are data-parallel, with sharded parameters."""
    sequence_parallel: bool = False
    """With ``tensor_parallel``: those ranks divide the positions between the layers too, which saves memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto`` is a GPU where there is one."""
    log_ids: bool = False
    """Write the ids of the cuts of every step to ``steps.rank<n>.jsonl``."""
    tensorboard: bool = False
    """Write curves of losses, speed and waiting to ``tensorboard/``, as TensorBoard reads them."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the same curves, of all jobs in one run; ``null`` logs nothing. Without
    network, ``WANDB_MODE=offline`` keeps them in ``wandb/`` for ``wandb sync``."""
    wandb_name: str | None = None
    """Name of the run there; by default that of ``out_dir``."""
    progress_seconds: float = 10.0
    """Seconds between lines with step, loss, speed and time left."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model: see below."""

    def __post_init__(self) -> None:
        if min(self.max_steps, self.checkpoint_every, self.keep, self.warmup_steps, self.validate_every) < 1:
            raise ValueError("max_steps, checkpoint_every, keep, warmup_steps and validate_every must be at least 1")
        if self.batches_per_step is not None and self.batches_per_step < 1:
            raise ValueError("batches_per_step must be at least 1")
        if self.checkpoint_seconds is not None and self.checkpoint_seconds <= 0:
            raise ValueError("checkpoint_seconds must be positive")
        if self.tensor_parallel < 1 or self.model.num_heads % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: {self.tensor_parallel} ranks cannot share {self.model.num_heads} attention heads"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel works among the ranks of tensor_parallel, which must be more than one")
        if self.batch_seconds <= 0 or self.learning_rate <= 0:
            raise ValueError("batch_seconds and learning_rate must be positive")
        if self.num_workers < 0 or self.progress_seconds < 0:
            raise ValueError("num_workers and progress_seconds must not be negative")
