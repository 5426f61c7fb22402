"""Train a tiny model with Lightning, with validation between pseudo-epochs and exact resume.

python examples/train_lightning.py DATASET OUT_DIR [--steps 40] [--ranks 1]

A checkpoint is saved after each validation and at the end. Repeat the command, after a stop or with more steps, to
resume from OUT_DIR/last.ckpt with the remaining cuts of the epoch, on any number of ranks.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import click
import lightning as L
import torch
import torch.distributed as dist
from train import NextFrame

from sharmill.training import get_dataloader, merge_data_states
from sharmill.training.codes import CodecForm

STEPS_BETWEEN_VALIDATIONS = 10


class Stream:
    """The batches of an endless loader; each pseudo-epoch continues where the previous one ended.

    Without a length, Lightning would prefetch a batch, which a checkpoint would count as trained on. The stream has no
    state, because Lightning would save only the state of rank 0.
    """

    def __init__(self, loader: Iterable[dict]) -> None:
        self._batches = iter(loader)

    def __len__(self) -> int:
        return STEPS_BETWEEN_VALIDATIONS

    def __iter__(self) -> Iterator[dict]:
        return islice(self._batches, len(self))


class Speech(L.LightningDataModule):
    """NeMo's loader for a dataset; checkpoints include its position in the data."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        source = {"type": "sharmill", "dataset": dataset, "fields": ["target_codes", "context_codes"]}
        # All cuts have already been shuffled; a larger buffer would mix the epochs of a small dataset.
        self.settings = {
            "input_cfg": [source], "batch_size": 4, "shuffle": True, "shuffle_buffer_size": 1, "shard_seed": 0
        }  # fmt: skip
        self.data_state = None

    def train_dataloader(self) -> Stream:
        ranks = (self.trainer.global_rank, self.trainer.world_size)
        self.loader = get_dataloader(self.settings, *ranks, resumable=True, state=self.data_state)
        return Stream(self.loader)

    def val_dataloader(self) -> Iterable[dict]:
        # Each rank reads its own part of the data, so no cut is validated twice, but the ranks may have unequal numbers
        # of batches.
        once = {"force_finite": True, "shuffle": False}
        return get_dataloader(self.settings | once, self.trainer.global_rank, self.trainer.world_size)

    def state_dict(self) -> dict:
        states = [None] * self.trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(states, self.loader.state_dict())
        else:
            states[0] = self.loader.state_dict()
        return merge_data_states(states)

    def load_state_dict(self, state_dict: dict) -> None:
        self.data_state = state_dict


class SpeechModel(L.LightningModule):
    """Tiny model that saves a checkpoint after each validation."""

    def __init__(self, form: CodecForm, checkpoint: Path) -> None:
        super().__init__()
        self.model = NextFrame(form)
        self.checkpoint = checkpoint

    def training_step(self, batch: dict, number: int) -> torch.Tensor:
        print(f"rank {self.global_rank} trains on {' '.join(batch['ids'])}")
        return self.model(batch)

    def validation_step(self, batch: dict, number: int) -> None:
        self.log("validation", self.model(batch), batch_size=len(batch["ids"]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.print(f"step {self.global_step}: validation loss {self.trainer.callback_metrics['validation']:.3f}")

    def on_validation_end(self) -> None:
        self.trainer.save_checkpoint(self.checkpoint)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@click.command()
@click.argument("dataset")
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--steps", default=40)
@click.option("--ranks", default=1)
def main(dataset: str, out_dir: Path, steps: int, ranks: int) -> None:
    """Train a tiny model with Lightning, with validation between pseudo-epochs and exact resume."""
    L.seed_everything(0)
    trainer = L.Trainer(
        max_steps=steps,
        limit_train_batches=STEPS_BETWEEN_VALIDATIONS,
        val_check_interval=STEPS_BETWEEN_VALIDATIONS,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the loader divides the data itself
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    last = out_dir / "last.ckpt"
    model = SpeechModel(CodecForm.of_dataset(dataset), last)
    trainer.fit(model, Speech(dataset), ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last)


if __name__ == "__main__":
    main()
