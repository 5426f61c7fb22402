"""A training script that does what NeMo's examples/speechlm2/salm_train.py does; NeMo's wheel has no examples."""

from lightning.pytorch import Trainer, seed_everything
from nemo.collections.speechlm2 import SALM, DataModule, SALMDataset
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import OmegaConf


@hydra_runner(config_path="conf", config_name="salm")
def train(cfg):
    OmegaConf.resolve(cfg)
    seed_everything(cfg.data.train_ds.seed)
    trainer = Trainer(**resolve_trainer_cfg(cfg.trainer))
    log_dir = exp_manager(trainer, cfg.get("exp_manager", None))
    OmegaConf.save(cfg, log_dir / "exp_config.yaml")
    with trainer.init_module():
        model = SALM(OmegaConf.to_container(cfg.model, resolve=True))
    trainer.fit(model, DataModule(cfg.data, tokenizer=model.tokenizer, dataset=SALMDataset(model.tokenizer)))


if __name__ == "__main__":
    train()
