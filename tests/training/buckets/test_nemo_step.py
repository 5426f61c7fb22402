"""Tests of the built-in step of ``tune-batch``: batches by a model's schema, real NeMo models, profiles and errors."""

import math
from typing import ClassVar

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from nemo.core.neural_types import AudioSignal, LabelsType, LengthsType, MaskType, NeuralType
from nemo.utils.app_state import AppState
from omegaconf import OmegaConf
from support.models import model_settings, save_models, save_multitask_config
from torch.optim.optimizer import register_optimizer_step_post_hook

from sharmill.training.buckets.batch_size import (
    Bucket,
    Budget,
    StepProcess,
    batch_sizes_to_yaml,
    choose_step,
    make_budget,
    read_bins,
    tune_batch_sizes,
)
from sharmill.training.buckets.nemo_step import NemoStep

HERE = __name__
OF_TIME = ("B", "T")


class Recorder(LightningModule):
    """A model that records its batches."""

    batches: ClassVar[list] = []

    def __init__(self, cfg):
        super().__init__()
        self.cfg = OmegaConf.create(cfg)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    @property
    def oomptimizer_schema(self):
        return {
            "cls": dict,
            "inputs": [
                {"name": "audio", "type": NeuralType(OF_TIME, AudioSignal()), "seq_length": "input"},
                {"name": "audio_lens", "type": NeuralType(("B",), LengthsType()), "seq_length": "input"},
                {"name": "ids", "type": NeuralType(OF_TIME, LabelsType()), "seq_length": "output", "vocab_size": 7},
                {"name": "mask", "type": NeuralType(OF_TIME, MaskType()), "seq_length": "output"},
                {"name": "prompt", "type": "dummy"},
            ],
        }

    def training_step(self, batch, batch_idx):
        Recorder.batches.append(batch)
        return {"loss": self.weight.sum()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: {sample_rate: 100, train_ds: {manifest_filepath: '???'}}\n")
    return str(path)


def batch_of(config, *sizes, model="Recorder", **options):
    Recorder.batches.clear()
    NemoStep(module_name=f"{HERE}.{model}", config_path=config, **options)(*sizes, "cpu")
    (batch,) = Recorder.batches
    return batch


def test_batches_have_the_lengths_of_the_bucket(config):
    batch = batch_of(config, 3, 2.5, 4)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "audio": (3, 250), "audio_lens": (3,), "ids": (3, 4), "mask": (3, 4), "prompt": (3,)
    }  # fmt: skip
    assert batch["audio_lens"].tolist() == [250] * 3
    assert 0 <= batch["ids"].min() <= batch["ids"].max() < 7


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return keyword arguments of the step for tiny models of NeMo's real classes."""
    folder = tmp_path_factory.mktemp("models")
    saved = save_models(folder)
    OmegaConf.save(OmegaConf.create({"model": model_settings(saved)}), folder / "salm.yaml")
    return {
        "ctc": {"pretrained_name": saved["pretrained_asr"]},
        "multitask": {
            "module_name": "nemo.collections.asr.models.EncDecMultiTaskModel",
            "config_path": str(save_multitask_config(folder)),
        },
        "salm": {
            "module_name": "nemo.collections.speechlm2.models.SALM", "config_path": str(folder / "salm.yaml"),
            "precision": "bf16",
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ctc", "multitask", "salm"])
def test_models_of_nemo_take_a_whole_step(models, name):
    if name == "salm":
        pytest.importorskip("peft")
    # A multitask model reads from the file that the process restored last, but a step's process creates one model.
    AppState().model_restore_path = None
    step = NemoStep(**models[name])
    optimizers = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    step(3, 2.0, None, "cpu")
    step(2, 1.0, 12, "cpu")
    hook.remove()
    assert len(optimizers) == 2
    values = [value for state in optimizers[0].state.values() for value in state.values()]
    assert sum(value.numel() for value in values) > len(values)


def choose(bins, **options):
    names = ("step", "module_name", "config_path", "pretrained_name", "tokens_per_second")
    return choose_step(*read_bins(bins), **{name: options.get(name) for name in names}, precision="fp32")


OF_FILE = {
    "seconds": "bucket_duration_bins: [2.0, 9.5]\nmax_tps: 15.5\n",
    "seconds and tokens": "bucket_duration_bins: [[2.0, 20], [9.5, 80]]\nmax_tps: [15.5, 12.0]\n",
    "tokens": "bucket_duration_bins: [20, 90]\nuse_multimodal_sampling: true\ntoken_equivalent_duration: 0.08\n"
    "measure_total_length: true\nprompt_format: plain\n",
}


@pytest.mark.parametrize(
    ("bins", "options", "profile", "ratio"),
    [
        ("[2.0, 40.0]", {}, {"max_tps": 12.0, "max_duration": 40.0}, 12.0),
        ("[2.0, 40.0]", {"tokens_per_second": 20.0}, {"max_tps": 20.0, "max_duration": 40.0}, 20.0),
        ("[[2.0, 10], [40.0, 300]]", {}, {"max_duration": 40.0}, 12.0),
        ("seconds", {}, {"max_tps": 15.5, "max_duration": 9.5}, 15.5),
        ("seconds and tokens", {}, {"max_tps": [15.5, 12.0], "max_duration": 9.5}, 12.0),
        ("tokens", {}, {"use_multimodal_sampling": True, "token_equivalent_duration": 0.08,
                        "measure_total_length": True, "prompt_format": "plain"}, 12.0),
    ],
)  # fmt: skip
def test_the_profile_has_the_limits_that_batches_were_made_for(tmp_path, bins, options, profile, ratio):
    if bins in OF_FILE:
        (tmp_path / "bins.yaml").write_text(OF_FILE[bins])
        bins = str(tmp_path / "bins.yaml")
    _, step_options, found = choose(bins, pretrained_name="a.nemo", **options)
    assert found == profile
    assert step_options["tokens_per_second"] == ratio
    budget = Budget("cpu", 2**30, 2**34)
    buckets, _ = read_bins(bins)
    sizes = [4] * len(buckets)
    values = yaml.safe_load(batch_sizes_to_yaml("a.nemo", buckets, sizes, budget, found))
    assert {key: values[key] for key in profile} == profile
    assert values["bucket_batch_size"] == sizes


@pytest.mark.gpu
def test_a_model_of_nemo_on_a_gpu(models):
    """The largest batch fits in the share of the GPU, but twice its size does not."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    budget = make_budget("cuda:0", 0.9, 4 * 2**30)
    bucket = Bucket(30.0, 200)
    (found,) = tune_batch_sizes(
        "sharmill.training.buckets.nemo_step:NemoStep", [bucket], budget, step_options=models["multitask"]
    )
    with StepProcess(
        "sharmill.training.buckets.nemo_step:NemoStep", budget, options=models["multitask"]
    ) as process:  # fmt: skip
        assert process.fits(found, bucket)
        assert not process.fits(math.ceil(2 * found), bucket)
