"""NeMo's speech language models train on our shards: its models, datasets, DataModule and Lightning's strategy."""

import json
import math
import runpy

import pytest
from support.example import run_ranks
from support.models import FRAME, PLACEHOLDER, model_settings, save_models, train_all, write_conversations
from support.project import REPOSITORY, Project, voice

from sharmill.models.nemo_models import quiet_nemo

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

STEPS = 20
NUM_CUTS = 8


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Eight utterances with contexts, of 1 s to 1.7 s, in two shards."""
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
    """Eight conversations of which both sides are recorded, as examples/conversations.py writes them."""
    folder = tmp_path_factory.mktemp("conversations")
    manifest = write_conversations(folder, NUM_CUTS)
    runpy.run_path(str(REPOSITORY / "examples" / "conversations.py"))["main"](manifest, folder / "shar")
    return folder / "shar"


def sides_data(conversations):
    return {"input_cfg": [{"type": "sharmill", "dataset": str(conversations)}]}


def settings_of(models, data, *, data_parallel=2):
    common = {"sample_rate": 16000, "batch_size": 2, "seed": 1, "shard_seed": "randomized", "num_workers": 1}
    common |= {"shuffle": True, "shuffle_buffer_size": 1}
    strategy = {"_target_": "lightning.pytorch.strategies.ModelParallelStrategy"}
    strategy |= {"data_parallel_size": data_parallel, "tensor_parallel_size": 2 // data_parallel}
    return {
        "model": model_settings(models),
        "data": {"train_ds": data | common},
        "trainer": {
            "devices": 2, "accelerator": "cpu", "strategy": strategy, "max_steps": STEPS, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "use_distributed_sampler": False,
            "limit_val_batches": 0,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(speech, conversations, tmp_path_factory):
    """The results of two ranks: both models, the duplex one on both kinds of data, and one that is tensor-parallel."""
    folder = tmp_path_factory.mktemp("ranks")
    with quiet_nemo():
        models = save_models(folder)
    trainings = {
        "salm": settings_of(models, salm_data(speech)),
        "duplex": settings_of(models, duplex_data(speech)),
        "duplex-sides": settings_of(models, sides_data(conversations)),
        "salm-tensor": settings_of(models, salm_data(speech), data_parallel=1),
    }
    (folder / "settings.json").write_text(json.dumps(trainings))
    run_ranks(train_all, 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


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
    """Of eight cuts each rank has four in an epoch: two batches of two. Nothing but the entry's type says so."""
    first = [{one for step in rank["salm"]["steps"][:2] for one in step["examples"]} for rank in found]
    assert [len(ids) for ids in first] == [4, 4]
    assert len(first[0] | first[1]) == NUM_CUTS


def test_tensor_parallelism_is_stopped_by_the_model(found):
    """NeMo 3.0.0 sets ``num_heads`` of attention layers, which transformers 5 has not any more."""
    for rank in found:
        assert rank["salm-tensor"] == {"error": "AttributeError: 'LlamaAttention' object has no attribute 'num_heads'"}
