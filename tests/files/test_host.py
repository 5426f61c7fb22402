"""The cores that a process may use, and users without an entry in the user database."""

import os
import subprocess
import sys

import pytest

from sharmill.files import host
from sharmill.files.host import limit_cores, usable_cores


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch):
    """A machine with eight cores; this process is in the control groups a/b (version 2) and job (version 1)."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(host, "_own_cores", None)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/job\n0::/a/b\n")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "max 100000"}, 8),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ({"a/cpu.max": "600000 100000", "a/b/cpu.max": "250000 100000"}, 2),
        ({"a/cpu.max": "50000 100000"}, 1),
        # Control groups of version 1.
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/job/cpu.cfs_quota_us": "350000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_the_quotas(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path, tmp_path) == cores


def test_cores_of_a_rank_are_its_share_of_them(tmp_path):
    limit_cores(3)
    assert usable_cores(tmp_path, tmp_path) == 3
    limit_cores(30)
    assert usable_cores(tmp_path, tmp_path) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("home", [[], ["HOME=/"]])
def test_a_user_without_name_and_home_can_import_all(home):
    """This is the case in `docker run -u 12345`: pages, batches and models need libraries that look up both."""
    reads_all = "+dac_read_search"  # this Python may be in a folder of root's
    user = ["setpriv", "--reuid=12345", "--clear-groups", f"--inh-caps={reads_all}", f"--ambient-caps={reads_all}"]
    bare = [f"--unset={name}" for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME")]
    program = "import sharmill, lhotse, torch._dynamo; from sharmill.files.host import user_name; print(user_name())"
    command = [*user, "env", *bare, *home, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout == "user12345\n", done.stderr
