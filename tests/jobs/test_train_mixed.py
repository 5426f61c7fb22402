"""The training example on text, pairs, conversations and speech in one loader."""

from __future__ import annotations

import json
import signal

import pytest
from omegaconf import OmegaConf
from support.corpora import link_data, make_corpora
from support.errors import raises
from support.example import make_example
from support.paths import REPOSITORY
from train import main
from train_config import TrainConfig
from train_data import validation_batches

from sharmill.errors import ConfigError

CONFIGS = REPOSITORY / "configs/training"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def train(corpora, tmp_path, monkeypatch):
    """Returns a function: trains in this process, on settings of a loader whose paths lead to test data."""
    link_data(corpora, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def run(settings, *overrides, **keys):
        OmegaConf.save(settings, tmp_path / "loader.yaml")
        options = {"loader": "loader.yaml", "checkpoint_every": 1000, "learning_rate": 1e-2}
        example = make_example(tmp_path, "mixed", "data/libritts", **options | keys)
        assert main([str(example.config), *overrides]) == 0
        return example

    yield run
    signal.signal(signal.SIGTERM, handler)


def load(name):
    """A configuration of the repository, for few data."""
    small = {"bucket_buffer_size": 4, "shuffle_buffer_size": 4, "batch_tokens": 500, "num_workers": 0}
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    for section in (settings, *settings.values()):
        if isinstance(section, dict):
            section |= {key: value for key, value in small.items() if key in section}
    return settings


def falls(example, name, count=5):
    losses = [values[name] for values in example.steps(0) if values[name] > 0]
    assert sum(losses[-count:]) < 0.9 * sum(losses[:count])


@pytest.mark.slow
def test_speech_text_and_pairs_go_on_at_the_exact_place(train):
    settings = load("speech_text")
    # In the order in which they are read; the first job ends within the first epoch of everything.
    settings["train_ds"] |= {"shuffle_buffer_size": 1, "batch_tokens": 250}
    example = train(settings, max_steps=3)
    train(settings, "max_steps=60")
    falls(example, "text_loss", 10)
    falls(example, "codes_loss", 10)
    assert [values["step"] for values in example.steps(0)] == list(range(1, 61))
    before, ids = ([one for values in example.steps(0)[:end] for one in values["ids"]] for end in (3, 60))
    # One of the 24 utterances failed a check. Of the 40 lines and 10 pairs, lines begin their second epoch before.
    for kind, count in {"cut-": 23, "text-": 50}.items():
        assert 0 < sum(one.startswith(kind) for one in before) < count
        found = [one for one in ids if one.startswith(kind)]
        first = found[:count] if kind == "cut-" else list(dict.fromkeys(found))
        assert len(set(first)) == len(first) == count


@pytest.mark.slow
def test_conversations_of_audio_and_text_with_validation_on_them(train):
    settings = load("conversation")
    dialogs = settings["dialogs"] | {"batch_tokens": 100, "force_map_dataset": True}
    OmegaConf.save({"validation_ds": dialogs}, "validation.yaml")
    example = train(settings, max_steps=30, validation="validation.yaml", validate_every=15)
    falls(example, "text_loss")
    assert {values["codes_loss"] for values in example.steps(0)} == {0.0}, "audio that is heard is not predicted"
    found = [json.loads(line) for line in (example.out_dir / "validation.jsonl").read_text().splitlines()]
    assert [values["step"] for values in found] == [15, 30]
    assert found[1]["text_loss"] < found[0]["text_loss"]


def test_validation_has_the_same_batches_in_every_process(corpora, tmp_path):
    """Entries are mixed by a seed, which NeMo would draw anew each time; ``canonical`` is left out."""
    entries = [corpora.entry("large", weight=0.5, shard_seed="trng"), corpora.entry("small", weight=0.5)]
    settings = {"input_cfg": entries, "batch_duration": 3.0, "canonical": 4, "seed": "trng"}
    (tmp_path / "validation.yaml").write_text(json.dumps({"validation_ds": settings}))
    config = TrainConfig(dataset=str(corpora.large), out_dir="", validation=str(tmp_path / "validation.yaml"))
    once, again, third = (
        [batch["ids"] for batch in validation_batches(config, rank=0, world_size=1)] for _ in range(3)
    )
    # One of the 24 utterances failed a check.
    assert len({cut_id for ids in once for cut_id in ids}) == sum(map(len, once)) == 23 + 8
    assert once == again == third


def test_entries_with_and_without_contexts_are_not_mixed(corpora, tmp_path):
    entries = [corpora.entry("large"), corpora.entry("small") | {"fields": ["target_codes"]}]
    config = TrainConfig(dataset=str(corpora.large), out_dir="", validation=str(tmp_path / "validation.yaml"))

    def read(entries):
        settings = {"input_cfg": entries, "batch_duration": 3.0}
        (tmp_path / "validation.yaml").write_text(json.dumps(settings))
        return list(validation_batches(config, rank=0, world_size=1))

    with raises(ConfigError, "unlike_datasets", "input_cfg"):
        read(entries)
    assert sum(len(batch["ids"]) for batch in read(entries[1:])) == 8


@pytest.mark.slow
def test_text_alone_with_curves_in_weights_and_biases(train, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = load("speech_text")
    train_ds = settings["train_ds"]
    train_ds["input_cfg"] = [entry for entry in train_ds["input_cfg"] if entry["type"] == "txt"]
    keys = {"wandb_project": "speech", "checkpoint_every": 10}
    example = train(settings, max_steps=20, **keys)
    train(settings, "max_steps=30", **keys)
    falls(example, "text_loss")
    assert {values["codes_loss"] for values in example.steps(0)} == {0.0}
    run_id = (example.out_dir / "wandb_id").read_text()
    runs = sorted(example.out_dir.glob("wandb/offline-run-*"))
    assert len(runs) == 2, "one for each job"
    assert all(run.name.endswith(f"-{run_id}") for run in runs)
