"""Tests that NeMo's trainer resumes exactly from its own checkpoints, also on other numbers of ranks."""

import json
import os
import shutil
import subprocess
import sys
import time
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
LAST = "on_exception.ckpt"


def configure(dataset, **keys):
    from omegaconf import OmegaConf

    entry = {"type": "sharmill", "dataset": str(dataset), "fields": ["target_codes"]}
    settings = {"input_cfg": [entry], "batch_size": 1, "shuffle": True, "shard_seed": 1, "shuffle_buffer_size": 2}
    return OmegaConf.create({"train_ds": settings | {"num_workers": 1, "resumable": True} | keys})


def make_data(config):
    """Return a DataModule whose batches contain epochs and ids."""
    import torch

    from sharmill.training.nemo.datamodule import DataModule

    class Ids(torch.utils.data.Dataset):
        def __getitem__(self, cuts):
            return [(epoch_of(cut), cut.id) for cut in cuts]

    return DataModule(config, None, Ids())


def fit(data, folder, limit, *, num_steps, fail_at=None, fail_in="training_step", checkpoint=None, **options):
    """Train in pseudo-epochs of ``limit`` batches, and return epochs and ids. A failure writes on_exception.ckpt."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    seen = []

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def fail(self, where):
            if len(seen) == fail_at and where == fail_in and self.trainer.is_global_zero:
                raise RuntimeError(where)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.fail("transfer_batch_to_device")
            return batch

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if len(seen) == fail_at and fail_in == "on_train_epoch_end" else None

        def training_step(self, ids, number):
            self.fail("training_step")
            seen.extend(map(tuple, ids))
            return self.weight.sum()

        def on_train_epoch_end(self):
            self.fail("on_train_epoch_end")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        max_steps=num_steps, limit_train_batches=limit, accelerator="cpu", use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[OnExceptionCheckpoint(folder)], **{"devices": 1} | options,
    )  # fmt: skip
    with suppress(RuntimeError):
        trainer.fit(Model(), data, ckpt_path=checkpoint)
    return seen


@pytest.fixture
def saved(corpora, tmp_path):
    """Checkpoint of a training with ``resumable: true`` that failed after three steps."""
    fit(make_data(configure(corpora.large)), tmp_path, 4, num_steps=99, fail_at=3)
    return shutil.copy(tmp_path / LAST, tmp_path / "saved.ckpt")


@pytest.mark.parametrize(
    ("limit", "fail_in"),
    [(4, "training_step"), (None, "training_step"), (None, "transfer_batch_to_device"), (None, "on_train_epoch_end")],
)
def test_a_batch_that_was_not_trained_comes_again(corpora, tmp_path, limit, fail_in):
    """If there is no limit, Lightning fetches a batch ahead. The last failure follows a batch that the model skips."""
    config = configure(corpora.large)
    before = fit(make_data(config), tmp_path, limit, num_steps=99, fail_at=6, fail_in=fail_in)
    after = fit(make_data(config), tmp_path, limit, num_steps=30, checkpoint=tmp_path / LAST)
    assert len(before) == 6
    seen = Counter(before + after)
    assert set(seen.values()) == {1}
    assert sum(epoch == 0 for epoch, _ in seen) == 23


def test_a_second_fit_begins_where_its_checkpoint_was_saved(corpora, tmp_path, saved):
    data = make_data(configure(corpora.large))
    first, second = [fit(data, tmp_path, 4, num_steps=6, checkpoint=saved) for _ in range(2)]
    assert first == second


def test_the_callers_settings_are_not_changed(corpora):
    config = configure(corpora.large)
    make_data(config)
    assert config == configure(corpora.large)


def test_without_the_key_checkpoints_have_no_place(corpora, tmp_path, saved):
    import torch

    data = make_data(configure(corpora.large, resumable=False))
    fit(data, tmp_path, 4, num_steps=9, fail_at=3, checkpoint=saved)
    assert "DataModule" in torch.load(saved, weights_only=False)
    assert "DataModule" not in torch.load(tmp_path / LAST, weights_only=False)


ONE_RANK_FAILS = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from training.nemo.test_datamodule import configure, fit, make_data
fit(make_data(configure(sys.argv[2])), Path(sys.argv[3]), 4, num_steps=99, fail_at=3, devices=2, strategy="ddp")
"""


@pytest.mark.slow
def test_an_error_on_one_rank_alone_leaves_a_checkpoint(corpora, tmp_path):
    program = tmp_path / "one_rank.py"
    program.write_text(ONE_RANK_FAILS)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        program, REPOSITORY / "tests", corpora.large, tmp_path,
    ]  # fmt: skip
    with (tmp_path / "printed").open("w") as printed:
        running = subprocess.Popen(list(map(str, command)), stdout=printed, stderr=printed)
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while not (tmp_path / LAST).exists() and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.2)
        assert (tmp_path / LAST).exists(), (tmp_path / "printed").read_text()
        assert "saved without a position in the training data" in (tmp_path / "printed").read_text()
    finally:
        running.terminate()
        running.wait()


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
    """Train a SALM with NeMo's script; return its output and its batches."""
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
    """A kill undoes the steps after the newest checkpoint: step 4 ends an epoch of Lightning, and 9 is within one."""
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
    assert "the checkpoint stores no position in the training data" in printed
    assert [batch["step"] for batch in batches] == [4, 5, 6]
    printed, batches = train(1, 9, changes={"data.train_ds.shard_seed": 43})
    assert "ConfigError: the saved state and this reader differ in seed: 42 and 43" in printed
    assert not batches
