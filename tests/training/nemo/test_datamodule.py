"""NeMo's trainer continues exactly in our data, by its own script and checkpoints, on other numbers of ranks too."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest
from support.models import HIDDEN, save_models
from support.project import REPOSITORY, Project

from sharmill.models.nemo_models import quiet_nemo
from sharmill.training.codes import epoch_of

pytest.importorskip("peft")
NUM_CUTS = 12
LIMIT_SECONDS = 300


def fit(dataset, folder, limit, *, num_steps, fail_at=None):
    """Train in pseudo-epochs of ``limit`` batches, from the checkpoint of a step that failed; return epochs and ids."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from omegaconf import OmegaConf

    from sharmill.training.nemo.datamodule import DataModule

    seen = []

    class Ids(torch.utils.data.Dataset):
        def __getitem__(self, cuts):
            return [(epoch_of(cut), cut.id) for cut in cuts]

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, ids, number):
            if len(seen) == fail_at:
                raise RuntimeError("step")
            seen.extend(map(tuple, ids))
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    entry = {"type": "sharmill", "dataset": str(dataset), "fields": ["target_codes"]}
    settings = {"input_cfg": [entry], "batch_size": 1, "shuffle": True, "shard_seed": 1, "shuffle_buffer_size": 2}
    trainer = Trainer(
        max_steps=num_steps, limit_train_batches=limit, accelerator="cpu", devices=1, use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[OnExceptionCheckpoint(folder)],
    )  # fmt: skip
    last = folder / "on_exception.ckpt"
    data = OmegaConf.create({"train_ds": settings | {"num_workers": 1, "resumable": True}})
    with suppress(RuntimeError):
        trainer.fit(Model(), DataModule(data, None, Ids()), ckpt_path=last if last.exists() else None)
    return seen


@pytest.mark.parametrize("limit", [4, None])
def test_a_step_that_failed_comes_again(corpora, tmp_path, limit):
    """Without a limit Lightning fetches a batch ahead."""
    before = fit(corpora.large, tmp_path, limit, num_steps=99, fail_at=6)
    after = fit(corpora.large, tmp_path, limit, num_steps=30)
    assert len(before) == 6
    seen = Counter(before + after)
    assert set(seen.values()) == {1}
    assert sum(epoch == 0 for epoch, _ in seen) == 23


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with quiet_nemo():
        return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("speech"))
    project.add_voices([1.0 + 0.05 * number for number in range(NUM_CUTS)], text="hello")
    project.write(write={"shard_size": 4, "order": "manifest"}, match={"min_duration": 0.0})
    return project.dataset


@pytest.fixture
def train(speech, models, tmp_path):
    """Train a SALM by NeMo's script; return what it printed, and its batches."""
    data = "input_cfg.0.input_cfg.0.dataset"
    settings = {
        "model.pretrained_llm": models["pretrained_llm"], "model.pretrained_asr": models["pretrained_asr"],
        "model.prompt_format": "llama2", "model.perception.output_dim": HIDDEN,
        "model.perception.modality_adapter.d_model": HIDDEN, "trainer.accelerator": "cpu",
        "trainer.precision": "32-true", "trainer.limit_train_batches": 4, "trainer.limit_val_batches": 1,
        "data.train_ds.batch_size": 1, "+data.train_ds.shuffle_buffer_size": 2,
        f"data.train_ds.{data}": speech, f"data.validation_ds.datasets.heldout.{data}": speech,
        "exp_manager.explicit_log_dir": tmp_path / "log", "+exp_manager.seconds_to_sleep": 0,
        "exp_manager.checkpoint_callback_params.monitor": "step",
        "exp_manager.checkpoint_callback_params.every_n_epochs": "null",
        "+exp_manager.checkpoint_callback_params.every_n_train_steps": 3,
    }  # fmt: skip
    folders = (tmp_path / f"run{number}" for number in range(9))

    def run(ranks, max_steps, *, kill_at=-1, changes=None):
        notes = next(folders)
        notes.mkdir()
        values = settings | {"trainer.devices": ranks, "trainer.max_steps": max_steps} | (changes or {})
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            "jobs/nemo_script.py", "tests/support/salm_train.py", f"--config-path={REPOSITORY}/configs/training",
            "--config-name=salm", *(f"{key}={value}" for key, value in values.items()),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "NOTES": str(notes), "KILL_AT": str(kill_at)}
        with (notes / "printed").open("w") as printed:
            subprocess.run(
                command, stdout=printed, stderr=printed, cwd=REPOSITORY, env=os.environ | environment,
                timeout=LIMIT_SECONDS, check=False,
            )  # fmt: skip
        batches = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
        return (notes / "printed").read_text(), batches

    return run


@pytest.mark.slow
def test_every_example_comes_once_per_epoch_after_two_kills(train):
    """The steps after the newest checkpoint are undone by a kill: 4 is the end of an epoch of Lightning, 9 a third."""
    kept = []
    for ranks, kill_at, last, workers in ((2, 5, 4, 1), (1, 11, 9, 2), (2, -1, 26, 1)):
        printed, batches = train(ranks, 26, kill_at=kill_at, changes={"data.train_ds.num_workers": workers})
        kept += [batch for batch in batches if batch["step"] <= last]
        assert max(batch["step"] for batch in batches) == (26 if kill_at < 0 else kill_at), printed
    seen = Counter(tuple(example) for batch in kept for example in batch["examples"])
    assert set(seen.values()) == {1}
    assert [sum(epoch == number for epoch, _ in seen) for number in range(3)] == [NUM_CUTS] * 3


@pytest.mark.slow
def test_another_order_of_the_data_is_refused_and_none_is_told(train):
    fresh = {"data.train_ds.resumable": False}
    train(1, 3, changes=fresh)
    printed, batches = train(1, 6)
    assert "saved without resumable: true, and the training data begin from scratch" in printed
    assert [batch["step"] for batch in batches] == [4, 5, 6]
    printed, batches = train(1, 9, changes={"data.train_ds.shard_seed": 43})
    assert "ConfigError: the saved state and this reader differ in seed: 42 and 43" in printed
    assert not batches
