"""Steps of the training example: saved by time, validated, in bf16."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from support.errors import raises
from support.example import make_example
from support.shar import Project, voice
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train import Training, main
from train_config import TrainConfig
from train_world import World

from sharmill.errors import ConfigError
from sharmill.files.locks import FolderLock


@pytest.fixture
def train():
    """``train(example, *overrides)``: a training of one rank in this process; its exit status."""
    handler = signal.getsignal(signal.SIGTERM)
    yield lambda example, *overrides: main([str(example.config), "num_workers=0", *overrides])
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def refused(train, capsys):
    """``refused(example, *overrides)``: the one line with which a training ends before it begins."""

    def refused(example, *overrides):
        capsys.readouterr()
        assert train(example, *overrides) == 2
        (error,) = capsys.readouterr().err.splitlines()
        return error

    return refused


@pytest.mark.slow
def test_it_learns(speech, tmp_path, train, capsys):
    keys = {"max_steps": 80, "learning_rate": 2e-2, "checkpoint_every": 80}
    learner = make_example(tmp_path, "learner", speech, **keys)
    assert train(learner) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train: step ")]
    assert printed[0].startswith("train: step 1 of 80, loss ")
    assert printed[-1].startswith("train: step 80 of 80, loss ")
    assert "tokens per second" in printed[-1]
    steps = learner.steps(0)
    first, last = steps[0]["loss"], sum(values["loss"] for values in steps[-5:]) / 5
    assert last < first / 2
    assert all(values["tokens_per_second"] > 0 and 0 <= values["wait_share"] <= 1 for values in steps)
    assert all(values["samples"] == len(values["ids"]) for values in steps)


def test_it_saves_by_time_computes_in_bf16_and_draws_curves(speech, tmp_path, train):
    keys = {"checkpoint_every": 1000, "checkpoint_seconds": 1e-6, "keep": 10, "max_steps": 3}
    keys |= {"tensorboard": True, "validation": str(speech), "validate_every": 3}
    example = make_example(tmp_path, "bf16", speech, precision="bf16", **keys)
    assert train(example) == 0
    assert sorted(path.name for path in (example.out_dir / "checkpoints").iterdir()) == [
        f"step-{step:09d}" for step in (1, 2, 3)
    ]
    assert {tensor.dtype for tensor in example.weights(3).values()} == {torch.float32}
    curves = EventAccumulator(str(example.out_dir / "tensorboard")).Reload()
    assert [(point.step, round(point.value, 4)) for point in curves.Scalars("train/loss")] == [
        (values["step"], pytest.approx(values["loss"], abs=1e-4)) for values in example.steps(0)
    ]
    assert [point.step for point in curves.Scalars("validation/loss")] == [3]


def test_layouts_that_do_not_fit_are_refused_in_one_line(speech, tmp_path, monkeypatch, capsys):
    config = TrainConfig(dataset=str(speech), out_dir=str(tmp_path), seed=1, batches_per_step=3)
    mesh = {"dp": SimpleNamespace(size=lambda: 2)}
    with raises(ConfigError, "split_wrong", "batches_per_step: 3", "2 data-parallel ranks"):
        Training(config, World(0, 2, torch.device("cpu"), mesh))
    with pytest.raises(ValueError, match="batches_per_step"):
        TrainConfig(dataset="d", out_dir="o", batches_per_step=0)
    with pytest.raises(ValueError, match="checkpoint_seconds"):
        TrainConfig(dataset="d", out_dir="o", checkpoint_seconds=0)
    with pytest.raises(ValueError, match="3 ranks cannot share 4 attention heads"):
        TrainConfig(dataset="d", out_dir="o", tensor_parallel=3)
    with pytest.raises(ValueError, match="sequence_parallel"):
        TrainConfig(dataset="d", out_dir="o", sequence_parallel=True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    example = make_example(tmp_path, "odd", speech, tensor_parallel=2)
    assert main([str(example.config)]) == 2
    assert capsys.readouterr().err == "Error: tensor_parallel: 3 ranks cannot be divided into groups of 2\n"


def test_a_training_has_one_seed_and_keeps_the_newest_checkpoints(speech, tmp_path, train, refused):
    example = make_example(tmp_path, "chain", speech, seed=None, checkpoint_every=1, keep=2)
    assert train(example, "max_steps=1") == 0
    assert train(example, "max_steps=3") == 0
    begins = [json.loads(line) for line in (example.out_dir / "steps.rank0.jsonl").read_text().splitlines()]
    first, second = (values["seed"] for values in begins if "begin" in values)
    assert first == second
    names = {path.name for path in (example.out_dir / "checkpoints").iterdir()}
    assert names == {"step-000000002", "step-000000003"}
    assert train(example, "max_steps=4", f"seed={first}") == 0
    error = refused(example, "max_steps=5", f"seed={first + 1}")
    assert error.startswith("Error: seed: ")
    assert f"with seed {first}, not {first + 1}" in error


def test_what_a_killed_save_left_is_no_checkpoint(speech, tmp_path, train):
    example = make_example(tmp_path, "killed", speech, checkpoint_every=1)
    assert train(example, "max_steps=2") == 0
    folder = example.out_dir / "checkpoints"
    (folder / "step-000000002").rename(folder / f".step-000000002.{'0' * 32}.tmp")
    assert train(example, "max_steps=2") == 0
    assert [values["step"] for values in example.steps(0)] == [1, 2, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize("missing", ["record.json", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(speech, tmp_path, train, capsys, missing):
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


def test_a_checkpoint_with_other_bytes_than_were_written_is_refused(speech, tmp_path, train, refused):
    example = make_example(tmp_path, "flipped", speech, max_steps=1)
    assert train(example) == 0
    newest = example.out_dir / "checkpoints" / "step-000000001"
    path = newest / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert refused(example, "max_steps=2").startswith(f"Error: {newest} is damaged: __0_0.distcp ")


@pytest.mark.parametrize(("record", "said"), [("[]", "step"), ("{}", "step"), ('{"step": 1, "seed": 1}', "sizes")])
def test_a_damaged_record_is_named_in_one_line(speech, tmp_path, refused, record, said):
    example = make_example(tmp_path, "record", speech, max_steps=2)
    newest = example.out_dir / "checkpoints" / "step-000000001"
    newest.mkdir(parents=True)
    (newest / "record.json").write_text(record)
    assert refused(example).startswith(f"Error: {newest} is damaged: record.json has no {said} ")


def test_a_full_disk_ends_it_in_one_line(speech, tmp_path, train, capsys, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    example = make_example(tmp_path, "full", speech, max_steps=1)
    monkeypatch.setattr(os, "fsync", refuse)
    assert train(example) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"Error: cannot write {example.out_dir}/checkpoints")
    assert os.strerror(errno.ENOSPC) in error


def test_a_finished_training_ends_at_once(speech, tmp_path, train, capsys):
    example = make_example(tmp_path, "done", speech, max_steps=1)
    assert train(example) == train(example) == 0
    assert capsys.readouterr().out.endswith("train: finished at step 1, saved at step 1\n")
    assert [values["step"] for values in example.steps(0)] == [1]


def test_checkpoints_of_another_training_are_refused(speech, tmp_path, train, refused):
    example = make_example(tmp_path, "done", speech, max_steps=1)
    assert train(example) == 0
    assert refused(example, "model.dim=32").startswith(f"Error: {example.out_dir} has checkpoints of another model")
    error = refused(example, "loader=loader.yaml", "resumable=false")
    assert error.startswith(f"Error: {example.out_dir} has checkpoints of a training 'without loader', and this one is")
    assert "'loader and resumable: false'" in error


def test_validation_data_that_are_not_there_are_refused_before_the_first_step(speech, tmp_path, refused):
    example = make_example(tmp_path, "unseen", speech, max_steps=1, validation=str(tmp_path / "absent"))
    error = refused(example)
    assert error.startswith("Error: ")
    assert str(tmp_path / "absent") in error
    assert example.steps(0) == []


@pytest.mark.parametrize("text", [None, "a: [", "[1, 2]", "[1, 2]: 3"])
@pytest.mark.parametrize("key", ["loader", "validation"])
def test_settings_that_cannot_be_read_are_named_in_one_line(speech, tmp_path, refused, key, text):
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text)
    error = refused(make_example(tmp_path, "unread", speech, **{key: str(path)}))
    assert error.startswith("Error: ")
    assert str(path) in error


def test_folders_and_devices_that_cannot_be_used_are_refused_in_one_line(speech, tmp_path, refused, monkeypatch):
    example = make_example(tmp_path, "nowhere", speech, max_steps=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = refused(example, "device=cuda")
    assert error.startswith("Error: device: 1 ranks on this node need a GPU each, and torch finds 0")
    example.out_dir.touch()
    assert refused(example).startswith(f"Error: out_dir: cannot use {example.out_dir}: ")


def test_a_dataset_without_contexts_is_trained_on(tmp_path, train):
    project = Project(tmp_path / "plain")
    for number in range(4):
        project.add(f"{number}.wav", voice(0.5, seed=number), text=f"number {number}")
    project.encode(project.write(match=None))
    example = make_example(tmp_path, "alone", project.dataset, max_steps=2, validation=str(project.dataset))
    assert train(example, "validate_every=1") == 0
    assert [values["step"] for values in example.steps(0)] == [1, 2]


@pytest.mark.slow
def test_two_trainings_in_one_folder_are_refused(speech, tmp_path, refused):
    example = make_example(tmp_path, "done", speech, max_steps=1)
    example.out_dir.mkdir()
    with FolderLock(example.out_dir):
        error = refused(example)
    said = f"Error: another sharmill process is at work in {example.out_dir}: process {os.getpid()} of "
    assert error.startswith(said)
    assert example.saved_step() == 0


@pytest.mark.slow
def test_a_loader_without_batches_ends_it(speech, tmp_path, train, capsys):
    entry = {"type": "sharmill", "dataset": str(speech), "fields": ["target_codes", "context_codes"]}
    settings = {"input_cfg": [entry], "batch_duration": 1.5, "force_finite": True, "max_duration": 0.01}
    loader = tmp_path / "loader.yaml"
    loader.write_text(json.dumps(settings))
    assert train(make_example(tmp_path, "idle", speech, loader=str(loader), resumable=False)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"Error: {loader}")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_ends_at_once_where_the_package_for_curves_is_absent(rank, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    # Without the others of two, a rank that waits for them has no place to.
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    example = make_example(tmp_path, "curves", tmp_path / "absent", tensorboard=True)
    assert main([str(example.config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: the package tensorboard is not installed")
    assert error.count("\n") == 1
