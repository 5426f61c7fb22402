"""Steps of the training example: checkpoints by time, validation, bf16, and mixtures of text, conversations, speech."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from omegaconf import OmegaConf
from support.example import make_example
from support.project import REPOSITORY, Project, voice
from support.training import link_data, make_corpora
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train import main
from train_data import make_data


@pytest.fixture
def train():
    """Return ``train(example, *overrides)``, which trains on one rank in this process and returns the exit status."""
    handler = signal.getsignal(signal.SIGTERM)
    yield lambda example, *overrides: main([str(example.config), "num_workers=0", *overrides])
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.float32), ("bf16-true", torch.bfloat16)])
def test_it_saves_by_time_in_bf16_with_curves_and_progress_lines(speech, tmp_path, train, capsys, precision, dtype):
    keys = {"checkpoint_every": 1000, "checkpoint_seconds": 1e-6, "keep": 10, "max_steps": 3}
    keys |= {"tensorboard": True, "validation": str(speech), "validate_every": 3}
    example = make_example(tmp_path, "bf16", speech, precision=precision, **keys)
    assert train(example) == 0
    first, *_, speed, last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train: step ")]
    assert first.startswith("train: step 1 of 3, loss ")
    assert "tokens per second" in speed
    assert last.startswith("train: step 3, validation loss ")
    steps = example.steps(0)
    assert all(values["tokens_per_second"] > 0 and 0 <= values["wait_share"] <= 1 for values in steps)
    assert all(values["samples"] == len(values["ids"]) for values in steps)
    assert sorted(path.name for path in (example.out_dir / "checkpoints").iterdir()) == [
        f"step-{step:09d}" for step in (1, 2, 3)
    ]
    assert {tensor.dtype for tensor in example.weights(3).values()} == {dtype}
    curves = EventAccumulator(str(example.out_dir / "tensorboard")).Reload()
    assert [(point.step, round(point.value, 4)) for point in curves.Scalars("train/loss")] == [
        (values["step"], pytest.approx(values["loss"], abs=1e-4)) for values in steps
    ]
    assert [point.step for point in curves.Scalars("validation/loss")] == [3]


def test_a_training_keeps_its_seed_and_the_newest_checkpoints(speech, tmp_path, train, capsys):
    example = make_example(tmp_path, "chain", speech, seed=None, checkpoint_every=1, keep=2)
    assert train(example, "max_steps=1") == 0
    assert train(example, "max_steps=3") == 0
    begins = [json.loads(line) for line in (example.out_dir / "steps.rank0.jsonl").read_text().splitlines()]
    first, second = (values["seed"] for values in begins if "begin" in values)
    assert first == second
    names = {path.name for path in (example.out_dir / "checkpoints").iterdir()}
    assert names == {"step-000000002", "step-000000003"}
    assert train(example, "max_steps=4", f"seed={first}") == 0
    capsys.readouterr()
    assert train(example, "max_steps=5", f"seed={first + 1}") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("Error: seed: ")
    assert f"with seed {first}, not {first + 1}" in error


@pytest.mark.parametrize("missing", ["record.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named_and_can_be_removed(speech, tmp_path, train, capsys, missing):
    example = make_example(tmp_path, "damaged", speech, checkpoint_every=1)
    assert train(example, "max_steps=2") == 0
    newest = example.out_dir / "checkpoints" / "step-000000002"
    (newest / missing).unlink()
    assert train(example, "max_steps=3") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"Error: {newest} is damaged: ")
    assert missing in error
    shutil.rmtree(newest)
    assert train(example, "max_steps=3") == 0
    assert [values["step"] for values in example.steps(0)] == [1, 2, 2, 3]


def test_a_dataset_without_contexts_is_trained_on(tmp_path, train):
    project = Project(tmp_path / "plain")
    for number in range(4):
        project.add(f"{number}.wav", voice(0.5, seed=number), text=f"number {number}")
    project.encode(project.write(match=None))
    example = make_example(tmp_path, "alone", project.dataset, max_steps=2, validation=str(project.dataset))
    assert train(example, "validate_every=1") == 0
    assert [values["step"] for values in example.steps(0)] == [1, 2]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("max_steps=0", "max_steps"),
        ("batches_per_step=0", "batches_per_step"),
        ("checkpoint_seconds=0", "checkpoint_seconds"),
        ("learning_rate=0", "learning_rate"),
        ("num_workers=-1", "num_workers"),
        ("tensor_parallel=3", "3 ranks cannot share"),
        ("sequence_parallel=true", "must be more than one"),
        ("device=gpu", "device"),
        ("steps=3", "steps"),
        ("dataset=no/such", "no/such"),
        ("validation=no/such", "no/such"),
        ("loader=no/such.yaml", "no/such.yaml"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(speech, tmp_path, train, capsys, override, told):
    example = make_example(tmp_path, "refused", speech)
    assert main([str(example.config), override]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("Error: ")
    assert told in error


CONFIGS = REPOSITORY / "configs/training"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return make_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def train_mixed(corpora, tmp_path, monkeypatch):
    """Return a function that trains in this process with settings of a loader, whose paths lead to test data."""
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
    """Return a configuration of the repository, reduced for little data."""
    small = {"bucket_buffer_size": 4, "shuffle_buffer_size": 4, "batch_tokens": 500, "num_workers": 0}
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    for section in (settings, *settings.values()):
        if isinstance(section, dict):
            section |= {key: value for key, value in small.items() if key in section}
    return settings


class SlowData:
    """Data that take half a second per batch, and send SIGTERM with the first one."""

    def __init__(self, data):
        self._data = data

    def __getattr__(self, name):
        return getattr(self._data, name)

    def __iter__(self):
        for number, batch in enumerate(self._data):
            if not number:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            yield batch


def test_a_slow_step_is_saved_after_sigterm(speech, tmp_path, train, monkeypatch):
    monkeypatch.setattr("train.make_data", lambda *options, **keys: SlowData(make_data(*options, **keys)))
    example = make_example(tmp_path, "slow", speech, batches_per_step=6, leave_timeout=2)
    assert train(example) == 0
    assert example.saved_step() == 1


def test_a_wait_for_validation_data_ends(speech, tmp_path, train, monkeypatch, capsys):
    """The validation data are available before the first step, but not after it."""
    found = iter([iter([]), iter(threading.Event().wait, None)])
    monkeypatch.setattr("train.validation_batches", lambda *_: next(found))
    example = make_example(tmp_path, "stuck", speech, validation=str(speech), validate_every=1, data_timeout=5)
    assert train(example) == 2
    assert "got no batch within 5 seconds (data_timeout)" in capsys.readouterr().err


def falls(example, name, count=5):
    losses = [values[name] for values in example.steps(0) if values[name] > 0]
    assert sum(losses[-count:]) < 0.9 * sum(losses[:count])


@pytest.mark.slow
def test_speech_text_and_pairs_resume_exactly(train_mixed):
    settings = load("speech_text")
    # The data come in reading order, and the first job ends within the first epoch of all data.
    settings["train_ds"] |= {"shuffle_buffer_size": 1, "batch_tokens": 250}
    example = train_mixed(settings, max_steps=3)
    train_mixed(settings, "max_steps=60")
    falls(example, "text_loss", 10)
    falls(example, "codes_loss", 10)
    assert [values["step"] for values in example.steps(0)] == list(range(1, 61))
    before, ids = ([one for values in example.steps(0)[:end] for one in values["ids"]] for end in (3, 60))
    # One of the 24 utterances was rejected. The 40 lines start their second epoch before the 10 pairs are finished.
    for kind, count in {"cut-": 23, "text-": 50}.items():
        assert 0 < sum(one.startswith(kind) for one in before) < count
        found = [one for one in ids if one.startswith(kind)]
        first = found[:count] if kind == "cut-" else list(dict.fromkeys(found))
        assert len(set(first)) == len(first) == count


@pytest.mark.slow
def test_conversations_of_audio_and_text_are_validated(train_mixed):
    settings = load("conversation")
    dialogs = settings["dialogs"] | {"batch_tokens": 100, "force_map_dataset": True}
    OmegaConf.save({"validation_ds": dialogs}, "validation.yaml")
    example = train_mixed(settings, max_steps=30, validation="validation.yaml", validate_every=15)
    falls(example, "text_loss")
    assert {values["codes_loss"] for values in example.steps(0)} == {0.0}, "input audio is not predicted"
    found = [json.loads(line) for line in (example.out_dir / "validation.jsonl").read_text().splitlines()]
    assert [values["step"] for values in found] == [15, 30]
    assert found[1]["text_loss"] < found[0]["text_loss"]
