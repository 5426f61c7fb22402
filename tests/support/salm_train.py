"""A training script that does what NeMo's examples/speechlm2/salm_train.py does; NeMo's wheel has no examples.

With NOTES in the environment each rank notes there on which examples it has trained. At step KILL_AT all are killed.
"""

import json
import multiprocessing
import os
import signal
from pathlib import Path

from lightning.pytorch import Callback, Trainer, seed_everything
from nemo.collections.speechlm2 import SALM, DataModule, SALMDataset
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import OmegaConf


class Notes(Callback):
    """A line per batch: the step of the optimizer that it made, and epoch and id of each example."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == int(os.environ.get("KILL_AT", -1)):
            for worker in multiprocessing.active_children():  # they would wait to hand over their batches
                worker.kill()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        cuts = [cut for conversation in batch["conversations"] for cut in conversation.list_cuts()]
        examples = [(cut.custom["shar_position"][0], cut.id) for cut in cuts]
        with (Path(os.environ["NOTES"]) / f"{trainer.global_rank}.jsonl").open("a") as notes:
            notes.write(json.dumps({"step": trainer.global_step, "examples": examples}) + "\n")


@hydra_runner(config_path="conf", config_name="salm")
def train(cfg):
    OmegaConf.resolve(cfg)
    seed_everything(cfg.data.train_ds.seed)
    trainer = Trainer(**resolve_trainer_cfg(cfg.trainer), callbacks=[Notes()] if "NOTES" in os.environ else None)
    log_dir = exp_manager(trainer, cfg.get("exp_manager", None))
    OmegaConf.save(cfg, log_dir / "exp_config.yaml")
    with trainer.init_module():
        model = SALM(OmegaConf.to_container(cfg.model, resolve=True))
    trainer.fit(model, DataModule(cfg.data, tokenizer=model.tokenizer, dataset=SALMDataset(model.tokenizer)))


if __name__ == "__main__":
    train()
