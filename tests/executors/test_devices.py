"""The devices of ranks: which one each gets, and that it sees no other."""

from __future__ import annotations

import os

import pytest
from support.errors import raises
from support.toy_stage import GpuStage, ToyStage, run

from sharmill.errors import ConfigError
from sharmill.executors.devices import Device, plan_devices, usable_gpus, visible_gpus

GPUS = ("0", "3", "GPU-5f")
ON_GPUS = [Device("cuda", gpu) for gpu in GPUS]


@pytest.mark.parametrize(("workers", "uses_gpu", "gpus", "cores", "devices"), [
    ("auto", True, GPUS, 16, ON_GPUS),
    ("auto", True, (), 3, [Device()] * 3),
    ("auto", False, GPUS, 5, [Device()] * 5),
    (4, True, GPUS, 2, [*ON_GPUS, ON_GPUS[0]]),
    ("4", True, GPUS, 2, [*ON_GPUS, ON_GPUS[0]]),
    (1, True, GPUS, 2, ON_GPUS[:1]),
    (7, False, (), 2, [Device()] * 7),
])  # fmt: skip
def test_auto_is_one_rank_for_each_gpu_or_core_and_more_share_them(workers, uses_gpu, gpus, cores, devices):
    assert plan_devices(workers, uses_gpu=uses_gpu, gpus=gpus, cores=cores) == devices


@pytest.mark.parametrize("workers", [0, -1, "many", "1.5", ""])
def test_any_other_number_of_workers_is_a_wrong_configuration(workers):
    with raises(ConfigError, "bad_config_value", "executor.workers"):
        plan_devices(workers, uses_gpu=True, gpus=GPUS, cores=2)


@pytest.mark.parametrize(("variable", "count", "expected"), [
    (None, 2, ("0", "1")),
    ("3, 5", 2, ("3", "5")),
    ("3,9", 1, ("3",)),
    ("", 0, ()),
    ("-1", 0, ()),
    # torch counts the first alone.
    ("MIG-aa,MIG-bb", 1, ("MIG-aa", "MIG-bb")),
    ("MIG-aa,MIG-bb", 0, ()),
])  # fmt: skip
def test_gpus_are_named_as_the_variable_names_them(monkeypatch, variable, count, expected):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    visible_gpus.cache_clear()
    try:
        assert visible_gpus() == expected
    finally:
        visible_gpus.cache_clear()


@pytest.mark.parametrize(("device", "found", "environment", "usable"), [
    ("auto", (), {}, ()),
    ("auto", ("0",), {}, ("0",)),
    ("cpu", ("0",), {}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "4"}, ()),
    ("cuda", (), {}, None),
    ("cuda", (), {"CUDA_VISIBLE_DEVICES": ""}, None),
    ("auto", (), {"CUDA_VISIBLE_DEVICES": "0"}, None),
    ("auto", (), {"SLURM_GPUS_ON_NODE": "4"}, None),
])  # fmt: skip
def test_gpus_that_are_asked_for_or_given_must_be_there(monkeypatch, device, found, environment, usable):
    monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: found)
    monkeypatch.setattr("sharmill.models.device.explain_missing", lambda: "the driver is too old")
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if usable is None:
        with raises(ConfigError, "device_failed", "executor.device=cpu", "the driver is too old"):
            usable_gpus(device)
    else:
        assert usable_gpus(device) == usable


def test_each_rank_sees_only_its_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: GPUS)
    stage = GpuStage(tmp_path, units=9, everywhere="environment:CUDA_VISIBLE_DEVICES", setup_does="meet:3")
    run(stage, 3)
    seen = {line.split()[0]: line.split()[1] for line in stage.marked("environment")}
    assert sorted(seen.values()) == sorted(GPUS)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("before", ["0,3", None])
def test_ranks_on_the_cpu_see_none_and_the_run_all_again(tmp_path, monkeypatch, workers, before):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    stage = ToyStage(tmp_path, everywhere="environment:CUDA_VISIBLE_DEVICES")
    run(stage, workers)
    assert {tuple(line.split()[1:]) for line in stage.marked("environment")} == {()}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
