"""Child processes with a pipe, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import wait

import pytest

from sharmill import processes
from sharmill.models import make_deterministic
from sharmill.processes import (
    ChildEnded,
    ChildProcess,
    describe_exit,
    end_by_force,
    limit_cores,
    usable_cores,
)

PATIENCE = 60.0


def echo(connection, prefix):
    """Answers until it is told to end."""
    while True:
        try:
            connection.send((prefix, connection.recv()))
        except EOFError:
            return


def end_by(connection, number):
    connection.recv()
    os.kill(os.getpid(), number)
    time.sleep(PATIENCE)


def die_in_a_message(connection):
    """Sends a header for 1000 bytes and three of them."""
    os.write(connection.fileno(), (1000).to_bytes(4, "big") + b"abc")
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    time.sleep(PATIENCE)


def tell_blocked_signals(connection):
    connection.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@pytest.fixture
def start():
    """Starts children, which end with the test."""
    children = []

    def start(*args):
        children.append(ChildProcess(*args, name="sharmill-test"))
        return children[-1]

    yield start
    end_by_force(child for child in children if child.is_alive())


def test_messages_go_both_ways_in_order(start):
    child = start(echo, "said")
    for message in (1, "two", None, b""):
        child.send(message)
    assert [child.receive(PATIENCE) for _ in range(4)] == [("said", 1), ("said", "two"), ("said", None), ("said", b"")]
    assert child.is_alive()
    assert child.exitcode is None


def test_a_child_that_is_asked_to_end_does(start):
    child = start(echo, "said")
    child.ask_to_end()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert child.describe_exit() == "ended with exit status 0"
    child.ask_to_end()


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL (as the kernel does when memory runs out)"),
        (signal.SIGTERM, "SIGTERM"),
        # No member of signal.Signals: its value alone names it.
        (signal.SIGRTMIN + 3, str(signal.SIGRTMIN + 3)),
    ],
)
def test_the_signal_that_ended_a_child_is_named(start, number, name):
    child = start(end_by, number)
    child.send("go")
    with pytest.raises(ChildEnded):
        child.receive(PATIENCE)
    child.join(PATIENCE)
    assert child.exitcode == -number
    assert child.describe_exit() == describe_exit(-number) == f"was ended by signal {name}"


def test_a_child_that_dies_within_a_message_has_ended(start):
    child = start(die_in_a_message)
    with pytest.raises(ChildEnded):
        child.receive(PATIENCE)


def test_nothing_can_be_sent_to_a_child_that_has_ended(start):
    child = start(end_by, signal.SIGKILL)
    child.send("go")
    child.join(PATIENCE)
    with pytest.raises(ChildEnded):
        child.send("more")
    assert wait(child.handles, timeout=PATIENCE)


def test_a_message_that_does_not_come_is_not_waited_for(start):
    child = start(echo, "said")
    with pytest.raises(TimeoutError, match=r"no message after 0\.1 seconds"):
        child.receive(0.1)
    child.send("later")
    assert child.receive(PATIENCE) == ("said", "later")


def test_what_cannot_be_pickled_is_not_sent(start):
    child = start(echo, "said")
    with pytest.raises(TypeError, match="pickle"):
        child.send(threading.Lock())
    child.send("whole")
    assert child.receive(PATIENCE) == ("said", "whole")


def test_children_that_ignore_sigterm_are_killed(start):
    children = [start(ignore_sigterm), start(ignore_sigterm)]
    assert [child.receive(PATIENCE) for child in children] == ["ready", "ready"]
    end_by_force(children, seconds=0.2)
    assert [child.exitcode for child in children] == [-signal.SIGKILL] * 2


def test_an_interrupt_is_for_the_parent_alone(start):
    assert signal.SIGINT in start(tell_blocked_signals).receive(PATIENCE)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class TestCores:
    @pytest.fixture(autouse=True)
    def _machine(self, tmp_path, monkeypatch):
        """A machine of eight cores; this process is in the control group a/b."""
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
        monkeypatch.setattr(processes, "_own_cores", None)
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
