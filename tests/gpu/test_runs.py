"""Tests of runs on a device: all stages, shared and hidden GPUs, broken contexts, lack of memory, training."""

import gc
import json
import os
from contextlib import contextmanager

import pytest
import torch
from support.example import make_example, make_speech
from support.project import raises, run_sharmill, snapshot
from support.toy_stage import GpuStage, run

from sharmill.errors import FatalError, UnitFailed, is_device_error
from sharmill.executors.supervisor import visible_gpus
from sharmill.models.device import check_device
from sharmill.models.memory import MemoryGuard

REAL_MODELS = {
    "match": {"encoder": "resemblyzer", "unit_seconds": 30.0},
    "encode": {"codecs": [{"name": "builtin", "model": "builtin"}]},
}


@pytest.mark.slow
def test_ranks_that_share_a_gpu_give_the_same_bytes(device, make_config, tmp_path, record):
    workers = (1,) if device == "cpu" else (1, 2 * len(visible_gpus()))
    models = {} if device == "cpu" else REAL_MODELS
    digests = []
    for number in workers:
        folder = tmp_path / str(number)
        config = make_config(folder, executor={"workers": number, "device": device}, **models)
        run_sharmill("run", config)
        digests.append(snapshot(folder / "dataset"))
    (codec,) = json.loads((folder / "dataset/dataset.json").read_text())["codecs"]
    record(ranks=workers, files=len(digests[0]), same_bytes=digests[0] == digests[-1], devices=codec["devices"])
    assert codec["devices"] == [check_device(device)]
    assert digests[0] == digests[-1]


@pytest.mark.slow
def test_a_hidden_gpu_is_missed_before_any_work(device, make_config, tmp_path):
    config = make_config(tmp_path, executor={"workers": 1, "device": "cuda"})
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    outcome = run_sharmill("run", config, env=hidden, status=2)
    assert "torch cannot use the GPU" in outcome.stderr
    assert not (tmp_path / "run/prepare").exists()
    check_device(device)


@pytest.mark.slow
def test_a_device_side_assert_costs_its_unit_alone(device, tmp_path, monkeypatch, record):
    if device == "cpu":
        monkeypatch.setattr("sharmill.executors.supervisor.visible_gpus", lambda: ("0",))
    does = "break" if device == "cpu" else "assert"
    result, heard = run(GpuStage(tmp_path, units=3, behaviour={1: does}), "auto")
    record(message=result.failures[1].message[:80], done=sorted(heard.done))
    assert "device-side assert" in result.failures[1].message
    assert sorted(heard.done) == [0, 2]


@contextmanager
def little_memory(device):
    """Limit this process to a thousandth of its GPU's memory."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def take_memory(device):
    """Allocate more than ``little_memory`` allows; on the CPU, raise torch's error instead."""
    if device == "cpu":
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
    return torch.empty(torch.cuda.get_device_properties(device).total_memory // 20, dtype=torch.uint8, device=device)


def test_after_a_lack_of_memory_the_device_works_on(device, record):
    gc.collect()
    guard = MemoryGuard("the codec", "encode.batch_seconds")
    messages = []
    for kind in (UnitFailed, FatalError):
        # The first failure only fails its unit; the second one ends the stage.
        refused = raises(kind, "out_of_memory", "lower encode.batch_seconds below 30")
        with little_memory(device), refused as caught, guard.batch(30.0, 6):
            take_memory(device)
        messages.append(str(caught.value))
        assert isinstance(caught.value.__cause__, torch.cuda.OutOfMemoryError)
        assert not is_device_error(caught.value)
    record(message=messages[-1])
    with guard.batch(1.0, 1):
        assert check_device(device)


@pytest.mark.slow
def test_two_training_steps(gpu, tmp_path, record):
    example = make_example(tmp_path, "gpu", make_speech(tmp_path / "speech"), max_steps=2, device=gpu)
    printed = example.run(ranks=1)
    steps = example.steps(0)
    record(tokens_per_second=[step["tokens_per_second"] for step in steps], loss=[step["loss"] for step in steps])
    assert "finished at step 2" in printed
    assert [step["step"] for step in steps] == [1, 2]
