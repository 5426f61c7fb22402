"""Nodes that do not come up at once, and clusters that do not answer at once; Ray itself is a stand-in here."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.executors.ray import cluster as ray_cluster
from sharmill.executors.ray import node as ray_node


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Returns a function: a shell script that is Ray -> the exit status of the node and how often it was started."""
    monkeypatch.setattr(ray_node, "_SECONDS_BETWEEN_STARTS", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    starts = tmp_path / "starts"

    def run(script: str) -> tuple[int, int]:
        script = f"echo start >> {starts}; starts=$(wc -l < {starts}); {script}"
        monkeypatch.setattr(ray_node, "node_command", lambda *arguments: ["bash", "-c", script])
        status = ray_node.run_node(["127.0.0.1", "1"])
        return status, len(starts.read_text().splitlines())

    yield run
    signal.alarm(0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_node_that_does_not_come_up_in_time_is_started_again(node):
    assert node("[ $starts = 2 ]") == (0, 2)


def test_a_node_that_never_comes_up_is_given_up(node):
    assert node("exit 7") == (7, 3)


def test_a_node_that_is_told_to_end_is_not_started_again(node):
    assert node("kill -TERM $PPID; sleep 60") == (-signal.SIGTERM, 1)


def test_a_node_that_does_not_listen_is_killed(node, monkeypatch):
    monkeypatch.setattr(ray_node, "_SECONDS_TO_END", 1)
    assert node("trap '' TERM; kill -TERM $PPID; while :; do sleep 0.1; done") == (-signal.SIGKILL, 1)


class Ray(SimpleNamespace):
    """A cluster that answers after so many calls."""

    def __init__(self, silent: int = 0, error: Exception | None = None) -> None:
        super().__init__(calls=0, left=0, silent=silent, error=error, address="")

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.left += 1

    def init(self, **options) -> None:
        self.calls += 1
        self.address = options["address"]
        if self.calls <= self.silent:
            raise self.error


@pytest.fixture
def join(monkeypatch):
    """Returns a function: a cluster, an address -> the cluster, after a driver has joined."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)

    def join(ray: Ray, address: str = "") -> Ray:
        monkeypatch.setitem(sys.modules, "ray", ray)
        ray_cluster.connect(address or listener)
        return ray

    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = f"127.0.0.1:{server.getsockname()[1]}"
        yield join


def test_a_cluster_that_does_not_answer_at_once_is_asked_again(join):
    ray = join(Ray(2, RuntimeError("failed to get node info")))
    assert (ray.calls, ray.left) == (3, 2)


def test_a_cluster_that_never_answers_is_named(join):
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127.0.0.1:\d+ .failed to get node info"):
        join(Ray(9, RuntimeError("failed to get node info")))


def test_where_there_is_no_cluster_one_question_is_enough(join):
    ray = Ray(9, ConnectionError("nobody is there"))
    with raises(ConfigError, "no_cluster", "nobody"):
        join(ray)
    assert ray.calls == 1


class TestAuto:
    @pytest.fixture
    def named(self, tmp_path, monkeypatch):
        """The file in which Ray notes its address, in a folder that is this test's."""
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        (tmp_path / "ray").mkdir()
        file = tmp_path / "ray/ray_current_cluster"
        file.write_text("127.0.0.1:1\n")
        return file

    @pytest.mark.parametrize("variable", ["", "127.0.0.1:x"])
    def test_a_cluster_of_this_user_is_found_and_the_environment_comes_first(self, named, join, monkeypatch, variable):
        named.write_text("here\n")
        if variable:
            monkeypatch.setenv("RAY_ADDRESS", variable)
        assert join(Ray(), "auto").address == (variable or "here")

    def test_that_of_another_user_is_not_joined(self, named, monkeypatch):
        if os.getuid() == 0:
            os.chown(named, 4242, -1)
        else:
            monkeypatch.setattr("os.getuid", lambda: 4242)
        with raises(ConfigError, "no_cluster", str(named), "127.0.0.1:1"):
            ray_cluster.connect("auto")

    def test_a_link_is_not_followed(self, named):
        named.rename(named.with_name("elsewhere"))
        named.symlink_to(named.with_name("elsewhere"))
        with raises(ConfigError, "no_cluster", "executor.address"):
            ray_cluster.connect("auto")

    def test_what_is_no_text_ends_in_one_line_whosever_it_is(self, named, monkeypatch):
        named.write_bytes(b"\xff\xfe\x1b[2J")
        with raises(ConfigError, "no_cluster", str(named), "no address"):
            ray_cluster.connect("auto")
        monkeypatch.setattr("os.getuid", lambda: 4242)
        named.chmod(0o644)
        if os.geteuid() == 0:
            os.chown(named, 4243, -1)
        with raises(ConfigError, "no_cluster", str(named), "another user") as error:
            ray_cluster.connect("auto")
        assert "\x1b" not in str(error.value)

    @pytest.mark.timeout(20)
    def test_a_fifo_is_not_waited_for(self, named):
        named.unlink()
        os.mkfifo(named)
        with raises(ConfigError, "no_cluster", "not a regular file"):
            ray_cluster.connect("auto")

    def test_a_process_that_is_called_like_rays_is_not_asked(self, named):
        named.unlink()
        with raises(ConfigError, "no_cluster", "no Ray cluster is running here"):
            ray_cluster.connect("auto")
