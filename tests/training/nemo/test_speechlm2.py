"""Tests that NeMo's speech language models train on sharmill's shards with NeMo's datasets, DataModule and strategy."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.example import run_ranks
from support.models import (
    FRAME,
    HIDDEN,
    PLACEHOLDER,
    model_settings,
    save_llm,
    save_models,
    train_all,
    write_conversations,
)
from support.project import REPOSITORY, Project, voice

from sharmill.models.nemo_models import quiet_nemo

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STEPS = 20
NUM_CUTS = 8
# The limit is below the gradient norm of every step. With Adam, clipping would have almost no effect.
CLIP = 0.1
SGD = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 1.0}}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Eight utterances of 1 s to 1.7 s with contexts, in two shards."""
    project = Project(tmp_path_factory.mktemp("speechlm2"))
    for number in range(NUM_CUTS):
        project.add(f"{number}.flac", voice(1 + 0.1 * number, seed=number), text="hello world"[: 4 + number])
    project.write(write={"shard_size": 4, "order": "manifest"}, match={"min_duration": 0.0})
    return project.dataset


def salm_data(dataset):
    audio = {"type": "sharmill", "dataset": str(dataset), "fields": ["target_audio"]}
    entry = {"type": "lhotse_as_conversation", "input_cfg": [audio], "audio_locator_tag": PLACEHOLDER}
    entry["tags"] = {"context": "Repeat after me:"}
    return {"input_cfg": [entry], "prompt_format": "llama2", "token_equivalent_duration": FRAME}


def duplex_data(dataset):
    shar_path = {
        "cuts": f"{dataset}/cuts/cuts.{{000000..000001}}.jsonl.gz",
        "target_audio": f"{dataset}/target_audio/recording.{{000000..000001}}.tar",
        "context_audio": f"{dataset}/context_audio/recording.{{000000..000001}}.tar",
    }
    return {"input_cfg": [{"type": "lhotse_magpietts_data_as_continuation", "shar_path": shar_path}]}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Eight conversations with recordings of both sides, as examples/conversations.py writes them."""
    folder = tmp_path_factory.mktemp("conversations")
    manifest = write_conversations(folder, NUM_CUTS)
    runpy.run_path(str(REPOSITORY / "examples" / "conversations.py"))["main"](manifest, folder / "shar")
    return folder / "shar"


def sides_data(conversations):
    return {"input_cfg": [{"type": "sharmill", "dataset": str(conversations)}]}


def settings_of(models, data, *, data_parallel=2, tensor_parallel=1, **trainer):
    common = {"sample_rate": 16000, "batch_size": 2, "seed": 1, "shard_seed": "randomized", "num_workers": 1}
    common |= {"shuffle": True, "shuffle_buffer_size": 1}
    strategy = {"_target_": "lightning.pytorch.strategies.ModelParallelStrategy"}
    strategy |= {"data_parallel_size": data_parallel, "tensor_parallel_size": tensor_parallel}
    return {
        "model": model_settings(models),
        "data": {"train_ds": data | common},
        "trainer": {
            "devices": data_parallel * tensor_parallel, "accelerator": "cpu", "strategy": strategy,
            "max_steps": STEPS, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "use_distributed_sampler": False,
            "limit_val_batches": 0, **trainer,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with quiet_nemo():
        return save_models(tmp_path_factory.mktemp("models"))


def results_of(trainings, num_ranks, folder):
    """Return the results of each rank by the name of the training."""
    (folder / "settings.json").write_text(json.dumps(trainings))
    run_ranks(train_all, num_ranks, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def found(speech, conversations, models, tmp_path_factory):
    """The results of two ranks for both models, the duplex model on both kinds of data, and tensor-parallel models.

    An LLM with a single key-value head or with adapters cannot be sharded.
    """
    folder = tmp_path_factory.mktemp("ranks")
    tensor = {
        kind: settings_of(models, data, data_parallel=1, tensor_parallel=2, gradient_clip_val=CLIP)
        for kind, data in (("salm", salm_data(speech)), ("duplex", sides_data(conversations)))
    }
    adapters = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    lora = {"lora": adapters, "prevent_freeze_params": []}
    heads = {"pretrained_llm": str(save_llm(folder / "one_head", num_key_value_heads=1))}
    trainings = {
        "salm": settings_of(models, salm_data(speech)),
        "duplex": settings_of(models, duplex_data(speech)),
        "duplex-sides": settings_of(models, sides_data(conversations)),
    }
    for kind, settings in tensor.items():
        trainings[f"{kind}-tensor"] = settings | {"model": settings["model"] | SGD}
        trainings[f"{kind}-lora"] = settings | {"model": settings["model"] | lora}
        trainings[f"{kind}-heads"] = settings | {"model": settings["model"] | heads}
    return results_of(trainings, 2, folder)


@pytest.mark.parametrize("kind", ["salm", "duplex", "duplex-sides"])
def test_it_trains(found, kind):
    for rank in found:
        assert "error" not in rank[kind], rank[kind]["error"]
        losses = [step["loss"] for step in rank[kind]["steps"]]
        assert len(losses) == STEPS
        assert all(map(math.isfinite, losses))
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert rank[kind]["sharded"] == ["DTensor"]


def test_conversations_are_divided_among_the_ranks(found):
    """Each rank has four of eight cuts per epoch, in two batches of two, only because of the entry's type."""
    first = [{one for step in rank["salm"]["steps"][:2] for one in step["examples"]} for rank in found]
    assert [len(ids) for ids in first] == [4, 4]
    assert len(first[0] | first[1]) == NUM_CUTS


@pytest.fixture(scope="module")
def alone(speech, conversations, models, tmp_path_factory):
    """The results of one process with clipped gradients, and of one without clipping."""
    trainings = {}
    for kind, data in (("salm", salm_data(speech)), ("duplex", sides_data(conversations))):
        for clip in (CLIP, None):
            settings = settings_of(models, data, data_parallel=1, gradient_clip_val=clip)
            trainings[f"{kind}-{clip}"] = settings | {"model": settings["model"] | SGD}
    (one,) = results_of(trainings, 1, tmp_path_factory.mktemp("alone"))
    return {name: [step["loss"] for step in training["steps"]] for name, training in one.items()}


@pytest.mark.parametrize("kind", ["salm", "duplex"])
def test_two_tensor_parallel_ranks_train_as_one_process(found, alone, kind):
    expected = alone[f"{kind}-{CLIP}"]
    assert expected[-1] < expected[0]
    assert expected[1:] != pytest.approx(alone[f"{kind}-None"][1:], rel=1e-2), "clipping changes the steps"
    for rank in found:
        assert "error" not in rank[f"{kind}-tensor"], rank[f"{kind}-tensor"]["error"]
        assert [step["loss"] for step in rank[f"{kind}-tensor"]["steps"]] == pytest.approx(expected, rel=1e-4)
        assert "DTensor" in rank[f"{kind}-tensor"]["sharded"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("salm-lora", "2 ranks cannot share the LLM of type llama with model.lora: set tensor_parallel_size: 1"),
        ("salm-heads", "4 attention heads and 1 key-value heads: choose a divisor of both"),
        ("duplex-lora", "cannot add adapters to the LLM of a DuplexS2SModel; remove model.lora"),
        ("duplex-heads", "4 attention heads and 1 key-value heads: choose a divisor of both"),
    ],
)
def test_an_llm_that_cannot_be_shared_is_refused(found, name, words):
    for rank in found:
        assert rank[name]["error"].startswith("ConfigError: ")
        assert words in rank[name]["error"]


@pytest.fixture
def changes(speech, conversations, models):
    """Options that the test models need in the shipped configurations, by configuration."""
    adapter = "model.perception.modality_adapter"
    datasets = {
        "salm": {"input_cfg.0.input_cfg.0.dataset": speech}, "s2s_duplex": {"input_cfg.0.dataset": conversations}
    }  # fmt: skip
    common = {
        "model.pretrained_llm": models["pretrained_llm"], "model.pretrained_asr": models["pretrained_asr"],
        f"{adapter}.d_model": HIDDEN, "trainer.accelerator": "cpu", "trainer.precision": "32-true",
        "trainer.limit_train_batches": 2, "trainer.limit_val_batches": 1, "data.train_ds.batch_size": 2,
        "+data.train_ds.shuffle_buffer_size": 1, "+exp_manager.seconds_to_sleep": 0,
    }  # fmt: skip
    own = {
        "salm": {"model.prompt_format": "llama2", "model.perception.output_dim": HIDDEN},
        "s2s_duplex": {
            "model.pretrained_audio_codec": models["pretrained_audio_codec"],
            "model.scoring_asr": models["pretrained_asr"], f"{adapter}.feat_in": HIDDEN, f"{adapter}.n_heads": 2,
            "data.target_sample_rate": 16000,
        },
    }  # fmt: skip
    for name, data in datasets.items():
        for key, dataset in data.items():
            own[name] |= {f"data.train_ds.{key}": dataset, f"data.validation_ds.datasets.heldout.{key}": dataset}
    return {name: common | changes for name, changes in own.items()}


@pytest.mark.parametrize("name", ["salm", "s2s_duplex"])
def test_a_training_script_of_nemo_runs_in_jobs_and_goes_on(changes, tmp_path, name):
    """Run the batch script with sharmill's configuration and a substitute for srun that runs the command locally."""
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n')
    srun.chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "1", "RANKS": "2"}
    path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for seed, steps in ((17, 2), (18, 4)):
        own = {"exp_manager.explicit_log_dir": tmp_path / "log", "trainer.max_steps": steps}
        values = [f"{key}={value}" for key, value in (changes[name] | own).items()]
        script = [f"tests/support/{name}_train.py", f"configs/training/{name}.yaml", *values]
        printed = subprocess.run(
            ["bash", "jobs/sbatch/nemo.sbatch", str(seed), *script], check=False, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.STDOUT, cwd=REPOSITORY, env=os.environ | slurm | {"PATH": path, "OMP_NUM_THREADS": "1"},
        ).stdout  # fmt: skip
        assert f"`max_steps={steps}` reached" in printed, printed
        config = yaml.safe_load((tmp_path / "log/exp_config.yaml").read_text())
        assert config["exp_manager"]["name"] == name
        assert [config["data"][one]["seed"] for one in ("train_ds", "validation_ds")] == [seed, seed]
    assert f"Restored all states from the checkpoint at {tmp_path}/log/checkpoints/step=2-last.ckpt" in printed
    assert "no position in the training data" not in printed
