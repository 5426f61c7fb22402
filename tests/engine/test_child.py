"""Child processes with a pipe, whatever becomes of them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

from sharmill.engine.child import ChildEnded, ChildProcess

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
    for child in children:
        child.end(2.0)


def test_messages_go_both_ways_in_order(start):
    child = start(echo, "said")
    for message in (1, "two", None, b""):
        child.send(message)
    assert [child.receive(PATIENCE) for _ in range(4)] == [("said", 1), ("said", "two"), ("said", None), ("said", b"")]
    assert child.is_alive()
    assert child.exitcode is None


def test_a_child_that_ends_without_an_answer_tells_its_exit_status(start):
    child = start(echo, "said")
    child.connection.send_bytes(b"")
    with pytest.raises(ChildEnded, match=r"^ended with exit status 0$"):
        child.receive(PATIENCE)


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
    with pytest.raises(ChildEnded, match=f"^{re.escape(f'was ended by signal {name}')}$"):
        child.receive(PATIENCE)
    assert child.exitcode == -number


def test_a_child_that_dies_within_a_message_has_ended(start):
    child = start(die_in_a_message)
    with pytest.raises(ChildEnded):
        child.receive(PATIENCE)


def test_what_is_sent_to_a_child_that_has_ended_has_no_answer(start):
    child = start(end_by, signal.SIGKILL)
    child.send("go")
    child.join(PATIENCE)
    child.send("more")
    with pytest.raises(ChildEnded):
        child.receive(PATIENCE)


def test_a_message_that_does_not_come_is_not_waited_for(start):
    child = start(echo, "said")
    with pytest.raises(TimeoutError):
        child.receive(0.1)
    child.send("later")
    assert child.receive(PATIENCE) == ("said", "later")


def test_what_cannot_be_pickled_is_not_sent(start):
    child = start(echo, "said")
    with pytest.raises(TypeError, match="pickle"):
        child.send(threading.Lock())
    child.send("whole")
    assert child.receive(PATIENCE) == ("said", "whole")


def test_a_child_that_ignores_sigterm_is_killed(start):
    child = start(ignore_sigterm)
    assert child.receive(PATIENCE) == "ready"
    child.end(0.2)
    assert child.exitcode == -signal.SIGKILL


def test_an_interrupt_is_for_the_parent_alone(start):
    assert signal.SIGINT in start(tell_blocked_signals).receive(PATIENCE)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
