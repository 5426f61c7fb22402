"""The cores of this host that a process may use."""

from __future__ import annotations

import pytest

from sharmill.engine import host
from sharmill.engine.host import limit_cores, usable_cores
from sharmill.models import make_deterministic


class TestCores:
    @pytest.fixture(autouse=True)
    def _machine(self, tmp_path, monkeypatch):
        """A machine of eight cores; this process is in the control group a/b."""
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
        monkeypatch.setattr(host, "_own_cores", None)
        (tmp_path / "self").mkdir()
        (tmp_path / "self/cgroup").write_text("0::/a/b\n")
        (tmp_path / "a/b").mkdir(parents=True)

    @pytest.mark.parametrize(
        ("outer", "inner", "cores"),
        [("max 100000", "max 100000", 8), ("300000 100000", "max 100000", 3), ("600000 100000", "250000 100000", 2),
         ("50000 100000", None, 1), (None, None, 8)],
    )  # fmt: skip
    def test_are_those_of_the_affinity_and_of_the_quotas(self, tmp_path, outer, inner, cores):
        for folder, quota in ((tmp_path / "a", outer), (tmp_path / "a/b", inner)):
            if quota is not None:
                (folder / "cpu.max").write_text(quota + "\n")
        assert usable_cores(tmp_path, tmp_path) == cores

    @pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("350000", 3)])
    def test_of_control_groups_of_version_1(self, tmp_path, quota, cores):
        (tmp_path / "self/cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/job\n")
        (tmp_path / "cpu/job").mkdir(parents=True)
        (tmp_path / "cpu/job/cpu.cfs_quota_us").write_text(quota + "\n")
        (tmp_path / "cpu/job/cpu.cfs_period_us").write_text("100000\n")
        assert usable_cores(tmp_path, tmp_path) == cores

    def test_of_a_rank_are_its_share_of_them(self, tmp_path):
        limit_cores(3)
        assert usable_cores(tmp_path, tmp_path) == 3
        limit_cores(30)
        assert usable_cores(tmp_path, tmp_path) == 8

    @pytest.mark.parametrize(("device", "cores", "threads"), [("cpu", 8, 1), ("cuda", 8, 8), ("cuda", 64, 16)])
    def test_threads_that_decode_for_a_gpu_follow_them(self, device, cores, threads, monkeypatch):
        monkeypatch.setattr("torch.set_num_threads", lambda number: None)
        monkeypatch.setattr("sharmill.models.arithmetic.usable_cores", lambda: cores)
        assert make_deterministic(device) == threads
