"""The ready step of ``tune-batch``: batches by the schema of a model, real models of NeMo's, profiles and errors."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from nemo.core.neural_types import AudioSignal, LabelsType, LengthsType, MaskType, NeuralType, SpectrogramType
from nemo.utils.app_state import AppState
from omegaconf import OmegaConf
from support.errors import raises
from support.recognizers import save_multitask_config
from support.speechlm2 import model_settings, save_models
from torch.optim.optimizer import register_optimizer_step_post_hook

from sharmill.errors import ConfigError, FatalError
from sharmill.training.buckets.batch_size import (
    batch_sizes_to_yaml,
    make_budget,
    read_bin_settings,
    read_buckets,
    tune_batch_sizes,
)
from sharmill.training.buckets.model_profile import choose_step
from sharmill.training.buckets.nemo_step import NemoStep
from sharmill.training.buckets.step_process import Bucket, Budget, StepProcess

HERE = __name__
OF_TIME = ("B", "T")


class Recorder(LightningModule):
    """A model that notes the batches that it gets."""

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


class NoSchema(LightningModule):
    def __init__(self, cfg):
        super().__init__()


class Pictures(Recorder):
    """A model whose step takes something that no batch is made of."""

    @property
    def oomptimizer_schema(self):
        picture = {"name": "x", "type": NeuralType(("B", "D", "T"), SpectrogramType()), "seq_length": "input"}
        return {"cls": tuple, "inputs": [picture]}


class Tagged(Recorder):
    """A model in whose texts a token stands for each audio."""

    audio_locator_tag_id = 3


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


@pytest.mark.parametrize(
    ("length", "tokens", "options", "expected"),
    [
        (2.5, None, {}, (250, 30)),
        (2.5, None, {"tokens_per_second": 3.0}, (250, 8)),
        (100, 20, {"seconds_per_frame": 0.1}, (1000, 20)),
        (100, None, {"seconds_per_frame": 0.1, "tokens_per_second": 5.0}, (1000, 50)),
        # Of 150 tokens in all, 100 are frames of 10 seconds and 50 are text.
        (150, None, {"seconds_per_frame": 0.1, "tokens_per_second": 5.0, "in_total": True}, (1000, 50)),
    ],
    ids=["seconds", "ratio", "frames and tokens", "frames", "in total"],
)
def test_lengths_are_told_in_every_kind_of_bins(config, length, tokens, options, expected):
    batch = batch_of(config, 2, length, tokens, **options)
    assert (batch["audio"].shape[1], batch["ids"].shape[1]) == expected


def test_one_token_of_each_text_stands_for_audio(config):
    ids = batch_of(config, 4, 1.0, 50, model="Tagged")["ids"]
    assert (ids == 3).sum(dim=1).tolist() == [1] * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Keyword arguments of the step for tiny models of NeMo's real classes."""
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
    # A multitask model looks for a part in the file that a process restored last; a step's process makes one model.
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


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ({"module_name": "Recorder"}, "bad_callable", ["'Recorder'", "full name of a class"]),
        ({"module_name": "no_such_module.Model"}, "bad_callable", ["no_such_module"]),
        ({"module_name": "nemo.collections.asr.models.Nope"}, "bad_callable", ["Nope"]),
        ({"module_name": "collections.Counter"}, "bad_callable", ["collections.Counter is not a class of models"]),
        ({"module_name": f"{HERE}.NoSchema"}, "bad_model", ["NoSchema", "oomptimizer_schema", "--step"]),
        ({"module_name": f"{HERE}.Recorder", "config_path": "gone.yaml"}, "missing_input", ["gone.yaml"]),
        ({"module_name": f"{HERE}.Recorder", "config_path": "broken.yaml"}, "bad_config_file", ["broken.yaml"]),
        ({"module_name": f"{HERE}.Recorder", "config_path": "other.yaml"}, "missing_key", ["no section model"]),
        ({"module_name": f"{HERE}.Recorder", "config_path": "no_rate.yaml"}, "bad_model", ["no sample_rate"]),
        ({"module_name": "nemo.collections.asr.models.EncDecCTCModel"}, "bad_model", ["EncDecCTCModel", "model.yaml"]),
        ({"pretrained_name": "gone.nemo", "config_path": None}, "missing_input", ["gone.nemo"]),
        ({"pretrained_name": "nobody/nothing", "config_path": None}, "unreachable_model", ["nobody/nothing", ".nemo"]),
    ],
)
def test_what_is_no_model_is_told_in_one_line(config, tmp_path, monkeypatch, options, code, told):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "no_rate.yaml").write_text("model: {a: 1}\n")
    with raises(ConfigError, code, *told) as caught:
        NemoStep(**({"config_path": config} | options))
    assert "\n" not in str(caught.value)


def test_inputs_that_no_batch_is_made_of_are_named(config):
    with raises(ConfigError, "bad_model", "SpectrogramType", "--step"):
        batch_of(config, 2, 1.0, None, model="Pictures")


def choose(bins, **options):
    names = ("step", "module_name", "config_path", "pretrained_name", "tokens_per_second")
    return choose_step(
        read_buckets(bins), read_bin_settings(bins), **{name: options.get(name) for name in names}, precision="fp32"
    )


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
    chosen = choose(bins, pretrained_name="a.nemo", **options)
    assert chosen.profile == profile
    assert chosen.options["tokens_per_second"] == ratio
    budget = Budget("cpu", 2**30, 2**34)
    sizes = [4] * len(read_buckets(bins))
    values = yaml.safe_load(batch_sizes_to_yaml(chosen.name, read_buckets(bins), sizes, budget, chosen.profile))
    assert {key: values[key] for key in profile} == profile
    assert values["bucket_batch_size"] == sizes


@pytest.mark.parametrize(
    "options",
    [
        {}, {"module_name": "a.B"}, {"config_path": "a.yaml"}, {"step": "a:b", "module_name": "a.B"},
        {"module_name": "a.B", "config_path": "a.yaml", "pretrained_name": "a.nemo"},
    ],
)  # fmt: skip
def test_exactly_one_step_is_named(options):
    with raises(ConfigError, "bad_usage", "--step"):
        choose("[1.0]", **options)


def test_bins_of_text_alone_have_no_ready_step(tmp_path):
    (tmp_path / "bins.yaml").write_text("bucket_duration_bins: [20, 90]\nuse_multimodal_sampling: true\n")
    with raises(ConfigError, "bad_usage", "text alone", "--step"):
        choose(str(tmp_path / "bins.yaml"), pretrained_name="a.nemo")
    assert choose(str(tmp_path / "bins.yaml"), step="a:b").profile == {"use_multimodal_sampling": True}


def test_a_step_that_found_no_memory_while_loading_is_told(config, monkeypatch):
    """As extensions in C end where they find none."""

    def fails(self, cfg):
        raise SystemError("error return without exception set")

    monkeypatch.setattr(Recorder, "__init__", fails)
    with pytest.raises(MemoryError):
        NemoStep(module_name=f"{HERE}.Recorder", config_path=config)


@pytest.mark.slow
def test_the_memory_of_a_real_model_decides(models):
    chosen = choose("[[60.0, 500]]", **{key: value for key, value in models["multitask"].items() if key != "precision"})
    budget = Budget("cpu", 3 * 2**30, 2**34)
    bucket = Bucket(60.0, 500)
    (found,) = tune_batch_sizes(
        chosen.step, [bucket], budget, step_options=chosen.options, tolerance=0.6, max_batch_size=256
    )
    assert 1 <= found < 256
    with raises(FatalError, "step_failed", "not enough memory"):
        tune_batch_sizes(chosen.step, [bucket], Budget("cpu", 600 * 2**20, 2**34), step_options=chosen.options)


@pytest.mark.gpu
def test_a_model_of_nemo_on_a_gpu(models):
    """The largest batch fits in the share of the GPU, and twice as much does not."""
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
