"""Ray clusters and nodes that do not answer, start late, or belong to another user; Ray itself is a mock."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from unittest.mock import Mock

import pytest
from support.project import raises

from sharmill.errors import ConfigError
from sharmill.executors import ray_node
from sharmill.executors.ray import connect


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("script", "status", "starts"),
    [
        pytest.param("[ $starts = 2 ]", 0, 2, id="it does not come up in time"),
        pytest.param("exit 7", 7, 3, id="it never comes up", marks=pytest.mark.slow),
        pytest.param("kill -TERM $PPID; sleep 60", 143, 1, id="it is told to end"),
        pytest.param(
            "trap '' TERM; kill -TERM $PPID; while :; do sleep 0.1; done",
            143,
            1,
            id="it does not listen",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_node_is_started_again_until_it_is_told_to_end(tmp_path, monkeypatch, script, status, starts):
    log, handler = tmp_path / "starts", signal.getsignal(signal.SIGTERM)
    script = f"echo start >> {log}; starts=$(wc -l < {log}); {script}"
    monkeypatch.setattr(ray_node, "node_command", lambda *arguments: ["bash", "-c", script])
    assert ray_node.run_node("127.0.0.1", 1) == status
    assert len(log.read_text().splitlines()) == starts
    assert signal.getsignal(signal.SIGTERM) == handler


@contextmanager
def listening(*answer: bytes) -> Iterator[str]:
    """Yield the address of a server that answers each client with these parts, one after the other.

    A SETTINGS frame stands for a gRPC server.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as taken:
                        taken.recv(100)
                        for part in answer:
                            taken.sendall(part)
                            Event().wait(0.2 if len(answer) > 1 else 0.0)

        Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def join(monkeypatch):
    """Return a function: the results of ``ray.init``, an address -> the mock of Ray after ``connect``."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)

    def join(answers: list[Exception | None], address: str = "") -> Mock:
        ray = Mock(**{"is_initialized.return_value": False, "init.side_effect": answers})
        monkeypatch.setitem(sys.modules, "ray", ray)
        connect(address or listener)
        return ray

    with listening(bytes(3) + b"\4" + bytes(5)) as listener:
        yield join


@pytest.mark.parametrize("errors", [[RuntimeError("no node info")] * 3, [ConnectionError("nobody is there")]])
def test_a_cluster_that_never_answers_is_named(join, errors):
    with raises(ConfigError, "no_cluster", "no Ray cluster at 127.0.0.1:", str(errors[0])):
        join(errors)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("variable", ["RAY_ADDRESS", "executor.address"])
@pytest.mark.parametrize(
    ("answer", "told"), [(b"HTTP/1.1 400 Bad Request", "another service is listening"), (None, "Connection refused")]
)
def test_an_address_without_a_cluster_is_never_left_to_ray(join, monkeypatch, scheme, variable, answer, told):
    with listening(answer or b"") as address:
        # No service uses port 1 of this machine.
        address = scheme + (address if answer else "127.0.0.1:1")
        monkeypatch.setenv("RAY_ADDRESS", address if variable == "RAY_ADDRESS" else "")
        with raises(ConfigError, "no_cluster", f"no Ray cluster at {address}", told):
            join([SystemExit("Ray ends the process")], "auto" if variable == "RAY_ADDRESS" else address)


def test_a_cluster_may_answer_in_parts(join):
    with listening(bytes(2), b"\0\4" + bytes(5)) as address:
        assert join([None], address).init.called


def test_without_ray_the_message_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(ConfigError, "missing_package", "sharmill[ray]"):
        connect("127.0.0.1:1023")


class TestAuto:
    @pytest.fixture
    def named(self, tmp_path, monkeypatch):
        """The file with the address of the cluster, in a folder of this test."""
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        (tmp_path / "ray").mkdir()
        file = tmp_path / "ray/ray_current_cluster"
        file.write_text("here\n")
        return file

    @pytest.mark.parametrize("variable", ["", "127.0.0.1:x"])
    def test_a_cluster_of_this_user_is_found_after_the_environment(self, named, join, monkeypatch, variable):
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert join([None], "auto").init.call_args.kwargs["address"] == (variable or "here")

    def test_a_cluster_of_another_user_is_not_joined(self, named, join, monkeypatch):
        if os.getuid() == 0:
            os.chown(named, 4242, -1)
        else:
            monkeypatch.setattr("os.getuid", lambda: 4242)
        with raises(ConfigError, "no_cluster", str(named), "executor.address='here'"):
            join([None], "auto")

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("kind", ["missing", "link", "fifo", "no text"])
    def test_an_unreadable_address_gives_one_line(self, named, join, kind):
        """Ray itself would search for processes by name."""
        named.unlink()
        if kind == "link":
            named.with_name("elsewhere").write_text("here\n")
            named.symlink_to(named.with_name("elsewhere"))
        elif kind == "fifo":
            os.mkfifo(named)
        elif kind == "no text":
            named.write_bytes(b"\xff\xfe\x1b[2J")
        with raises(ConfigError, "no_cluster", "no Ray cluster is running here", "executor.address") as error:
            join([None], "auto")
        assert str(error.value).isprintable()
