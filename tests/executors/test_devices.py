"""Which device a rank gets, and that it sees no other."""

from __future__ import annotations

import os

import pytest
from support.errors import raises
from support.toy_stage import GpuStage, ToyStage, run

from sharmill.errors import ConfigError
from sharmill.executors.devices import Device, plan_devices, usable_gpus, visible_gpus

GPUS = ("0", "3", "GPU-5f")


class TestPlan:
    def test_auto_is_one_rank_per_gpu(self):
        devices = plan_devices("auto", uses_gpu=True, gpus=GPUS, cores=16)
        assert devices == [Device("cuda", "0"), Device("cuda", "3"), Device("cuda", "GPU-5f")]

    def test_auto_without_gpus_is_one_rank_per_core(self):
        assert plan_devices("auto", uses_gpu=True, gpus=(), cores=3) == [Device()] * 3

    def test_a_stage_without_models_leaves_the_gpus_alone(self):
        assert plan_devices("auto", uses_gpu=False, gpus=GPUS, cores=5) == [Device()] * 5

    @pytest.mark.parametrize("workers", [4, "4"])
    def test_more_ranks_than_gpus_share_them_in_turn(self, workers):
        devices = plan_devices(workers, uses_gpu=True, gpus=GPUS, cores=2)
        assert [device.visible for device in devices] == ["0", "3", "GPU-5f", "0"]

    def test_fewer_ranks_than_gpus(self):
        assert plan_devices(1, uses_gpu=True, gpus=GPUS, cores=2) == [Device("cuda", "0")]

    def test_more_ranks_than_cores_may_be_asked_for(self):
        assert plan_devices(7, uses_gpu=False, gpus=(), cores=2) == [Device()] * 7

    @pytest.mark.parametrize("gpus", [(), GPUS])
    @pytest.mark.parametrize("workers", [0, -1, "many", "1.5", ""])
    def test_anything_else_is_a_wrong_configuration(self, workers, gpus):
        with raises(ConfigError, "bad_config_value", "executor.workers"):
            plan_devices(workers, uses_gpu=True, gpus=gpus, cores=2)


class TestVisibleGpus:
    @pytest.fixture(autouse=True)
    def _ask_again(self):
        visible_gpus.cache_clear()
        yield
        visible_gpus.cache_clear()

    @pytest.mark.parametrize(
        ("variable", "count", "expected"),
        [
            (None, 2, ("0", "1")),
            ("3, 5", 2, ("3", "5")),
            ("3,9", 1, ("3",)),
            ("", 0, ()),
            ("-1", 0, ()),
            # torch counts the first alone.
            ("MIG-aa,MIG-bb", 1, ("MIG-aa", "MIG-bb")),
            ("MIG-aa,MIG-bb", 0, ()),
        ],
    )
    def test_are_named_as_the_variable_names_them(self, monkeypatch, variable, count, expected):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if variable is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert visible_gpus() == expected


class TestUsableGpus:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch):
        monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: ())
        for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
            monkeypatch.delenv(name, raising=False)

    def test_none_is_no_error_where_none_is_asked_for(self):
        assert usable_gpus("auto") == ()

    def test_cpu_asks_nobody(self, monkeypatch):
        monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: ("0",))
        assert usable_gpus("auto") == ("0",)
        assert usable_gpus("cpu") == ()

    @pytest.mark.parametrize(
        ("device", "environment"),
        [
            ("cuda", {}),
            ("auto", {"CUDA_VISIBLE_DEVICES": "0"}),
            ("auto", {"SLURM_GPUS_ON_NODE": "4"}),
            ("cuda", {"CUDA_VISIBLE_DEVICES": ""}),
        ],
    )
    def test_gpus_that_are_asked_for_or_given_must_be_there(self, device, environment, monkeypatch):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sharmill.models.device.explain_missing", lambda: "the driver is too old")
        with raises(ConfigError, "device_failed", "executor.device=cpu", "the driver is too old"):
            usable_gpus(device)

    @pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
    def test_hidden_gpus_are_not_given(self, value, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
        assert usable_gpus("auto") == ()


class TestRestriction:
    @pytest.fixture
    def stage(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sharmill.executors.devices.visible_gpus", lambda: GPUS)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
        return GpuStage(tmp_path, units=9, everywhere="environment:CUDA_VISIBLE_DEVICES")

    def test_each_rank_sees_only_its_own(self, stage):
        stage.setup_does = "meet:3"
        run(stage, 3)
        log = {rank: stage.dir.rank_log(rank).read_text() for rank in range(3)}
        assert all("is ready for toy on cuda" in text for text in log.values())
        seen = {line.split()[0]: line.split()[1] for line in stage.marked("environment")}
        assert sorted(seen.values()) == sorted(GPUS)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_ranks_on_the_cpu_see_none_and_the_driver_all_again(self, tmp_path, stage, workers):
        on_cpu = ToyStage(tmp_path / "cpu", everywhere="environment:CUDA_VISIBLE_DEVICES")
        run(on_cpu, workers)
        assert {tuple(line.split()[1:]) for line in on_cpu.marked("environment")} == {()}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,3,GPU-5f"

    def test_a_variable_that_was_not_set_is_not_set_afterwards(self, tmp_path, stage, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        run(ToyStage(tmp_path / "cpu"), 1)
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
