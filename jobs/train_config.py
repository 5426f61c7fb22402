"""The configuration of the training example; without torch, so that jobs are launched in no time."""

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
    max_steps: Positive = 1000
    """Number of training steps."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints."""
    checkpoint_seconds: Above0 | None = None
    """Seconds after which a checkpoint is saved besides; ``null`` goes by steps alone."""
    keep: Positive = 2
    """Number of checkpoints that are kept."""
    batch_seconds: Above0 = 60.0
    """Target audio of a batch on each rank, in seconds, padding included, also of a dataset in ``validation``. With
    ``loader`` the settings there say how large a batch is."""
    batches_per_step: Positive | None = None
    """Batches of all ranks together that one step is made of, a multiple of the number of data-parallel ranks; ``null``
    is one of each. With ``canonical: N`` in the settings of ``loader`` and N here, steps do not depend on the ranks."""
    validation: str | None = None
    """Dataset directory with codes of the same codec, or YAML file with settings of the loader (its ``validation_ds``,
    if it has one), whose mean loss goes to ``validation.jsonl``. All of it is read once, in the order of its files,
    with slices of contexts by the ``seed`` of these settings (0)."""
    validate_every: Positive = 100
    """Steps between validations."""
    num_workers: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Processes that read data, per rank. With ``loader`` the ``num_workers`` of its settings count."""
    data_timeout: Above0 = 1800.0
    """Seconds that a rank waits for a batch before it ends with an error."""
    leave_timeout: Above0 = 15.0
    """The same after SIGTERM. torchrun kills ranks after 30 seconds, so that there all batches of a step have to come
    sooner; ``jobs/start_ranks.py`` lets them take as long as they need."""
    order_seed: int = 0
    """Seed of the order of the data; one for the whole training."""
    seed: int | None = None
    """Seed of first weights and slices of contexts. Checkpoints keep it: the jobs of one training have the same, and
    another one is refused. ``null`` is that of the checkpoint, or draws one, and logs it."""
    learning_rate: Above0 = 1e-3
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: Positive = 50
    """Steps over which the learning rate rises."""
    precision: Literal["fp32", "bf16", "bf16-true"] = "fp32"
    """Arithmetic: with ``bf16`` layers compute in bfloat16, while weights, optimizer and sums of gradients stay
    float32; with ``bf16-true`` all are bfloat16."""
    tensor_parallel: Positive = 1
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
    progress_seconds: NotNegative = 10.0
    """Seconds between lines with step, loss, speed and time left."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes of the model: see below."""

    def __post_init__(self) -> None:
        require(
            self.model.num_heads % self.tensor_parallel == 0,
            f"tensor_parallel: {self.tensor_parallel} ranks cannot share {self.model.num_heads} attention heads",
        )
        require(
            self.tensor_parallel > 1 or not self.sequence_parallel,
            "sequence_parallel works among the ranks of tensor_parallel, which must be more than one",
        )
