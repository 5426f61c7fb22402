"""Training script equivalent to NeMo's examples/speechlm2/s2s_duplex_train.py, on CPUs."""

import torch
from lightning.pytorch import Trainer
from nemo.collections.speechlm2 import DataModule, DuplexS2SDataset, DuplexS2SModel
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import OmegaConf


@hydra_runner(config_path="conf", config_name="s2s_duplex")
def train(cfg):
    OmegaConf.resolve(cfg)
    torch.distributed.init_process_group(backend="gloo")
    trainer = Trainer(**resolve_trainer_cfg(cfg.trainer))
    log_dir = exp_manager(trainer, cfg.get("exp_manager", None))
    OmegaConf.save(cfg, log_dir / "exp_config.yaml")
    with trainer.init_module():
        model = DuplexS2SModel(OmegaConf.to_container(cfg.model, resolve=True))
    names = ("frame_length", "source_sample_rate", "target_sample_rate", "input_roles", "output_roles")
    dataset = DuplexS2SDataset(model.tokenizer, **{name: cfg.data[name] for name in names})
    trainer.fit(model, DataModule(cfg.data, tokenizer=model.tokenizer, dataset=dataset))


if __name__ == "__main__":
    train()
