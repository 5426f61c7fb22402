"""Locks on folders: at most one process is inside, dead owners do not block, and messages name the owner."""

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from support.project import REPOSITORY, raises, within

from sharmill.errors import ConfigError
from sharmill.files.locks import LOCK_NAME, FolderLock


@pytest.fixture
def start(tmp_path):
    """Start processes that hold the lock on ``tmp_path``."""
    with ExitStack() as stack:

        def start(host="here", lease=60.0, turns=0, **environment):
            command = [sys.executable, "-m", "support.lock_holder", tmp_path, str(lease), host, str(turns)]
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY / 'tests'}"} | environment,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            if not turns:
                assert process.stdout.readline() == "inside\n", process.communicate()
            return process

        yield start


def left_over(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("hosts", ["one host", "four hosts"])
def test_contending_processes_are_never_both_inside(tmp_path, start, hosts):
    (tmp_path / "counter").write_text("0")
    processes = [start("here" if hosts == "one host" else f"node{i}", turns=40) for i in range(4)]
    for process in processes:
        assert process.communicate(timeout=120)[0] == ""
        assert process.returncode == 0
    assert (tmp_path / "counter").read_text() == "160"
    assert left_over(tmp_path) == []


def test_only_one_process_takes_over_a_dead_owners_lock(tmp_path, start):
    """Half of the processes are killed at a random moment while the others continue."""
    (tmp_path / "counter").write_text("0")
    doomed = [start(turns=100_000) for _ in range(3)]
    while int((tmp_path / "counter").read_text() or 0) < 20:
        time.sleep(0.01)
    for process in doomed:
        process.kill()
        process.wait()
        # The killed process may have been inside.
        (tmp_path / "occupied").unlink(missing_ok=True)
        if not (tmp_path / "counter").read_text():
            (tmp_path / "counter").write_text("0")
    before = int((tmp_path / "counter").read_text())
    healthy = [start(turns=20) for _ in range(3)]
    for process in healthy:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, ""), err
    assert int((tmp_path / "counter").read_text()) == before + 60
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(("host", "lease", "least", "most"), [("here", 60.0, 0.0, 5.0), ("node7", 2.0, 2.0, 60.0)])
def test_dead_owners_lose_the_lock_at_once_or_after_a_lease(tmp_path, start, host, lease, least, most):
    holder = start(host, lease=lease)
    holder.kill()
    holder.wait()
    began = time.monotonic()
    with FolderLock(tmp_path):
        assert least <= time.monotonic() - began < most
    assert left_over(tmp_path) == []


def test_the_dead_whose_number_another_process_has_by_now(tmp_path, start):
    holder = start()
    (record,) = (tmp_path / LOCK_NAME).iterdir()
    record.write_text(json.dumps(json.loads(record.read_text()) | {"process_started": 1}))
    with FolderLock(tmp_path):
        assert holder.poll() is None


@pytest.mark.parametrize(("lease", "waits"), [(3.0, [0.0]), pytest.param(1.5, 3 * [2.0], marks=pytest.mark.slow)])
def test_the_living_of_another_host_keep_it_whatever_their_clock(tmp_path, start, lease, waits):
    holder = start("node7", lease=lease)
    (record,) = (tmp_path / LOCK_NAME).iterdir()
    os.utime(record, (0, 0))
    for seconds in waits:
        with raises(ConfigError, "locked", "node7"):
            FolderLock(tmp_path, wait_seconds=seconds).__enter__()
    assert holder.communicate("")[0] == ""
    assert holder.returncode == 0


def test_the_living_who_lost_it_are_interrupted_and_say_so(tmp_path, start):
    holder = start("node7", lease=1)
    holder.send_signal(signal.SIGSTOP)
    with FolderLock(tmp_path):
        holder.send_signal(signal.SIGCONT)
        # Its input stays open, so only losing the lock can end it.
        holder.wait(timeout=60)
    printed = holder.stdout.read()
    assert holder.returncode == 1
    assert printed.startswith(f"locked {tmp_path / LOCK_NAME}")
    assert left_over(tmp_path) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("host", ["here", "node7"])
def test_who_is_interrupted_while_another_is_inside_ends_at_once(tmp_path, start, host):
    interrupts = []

    def work():
        with FolderLock(tmp_path) as lock, lock.released():
            start(host)
            interrupts.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - interrupts[0] < within(3.0)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, " (SLURM job 4711)"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "ray-1"}}'}, " (Ray job ray-1)"),
    ],
)
def test_messages_name_file_process_user_host_job_and_time(tmp_path, start, environment, job):
    holder = start(**environment)
    (record,) = (tmp_path / LOCK_NAME).iterdir()
    owner = f"process {holder.pid} of {getpass.getuser()} on {socket.gethostname()}{job}, since "
    with raises(ConfigError, "locked", str(record), owner + time.strftime("%Y-%m-%d", time.gmtime())):
        FolderLock(tmp_path).__enter__()


def test_another_users_may_take_over_where_the_folder_is_shared(tmp_path):
    tmp_path.chmod(0o777)
    with FolderLock(tmp_path):
        lock = tmp_path / LOCK_NAME
        assert lock.stat().st_mode & 0o777 == 0o777
        assert [file.stat().st_mode & 0o777 for file in lock.iterdir()] == [0o666]
