"""Child processes with a pipe, whatever becomes of them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

from sharmill.training.child_process import ChildEnded, ChildProcess

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
    if number:
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


def test_messages_go_both_ways_in_order_and_are_not_waited_for_without_end(start):
    child = start(echo, "said")
    with pytest.raises(TimeoutError):
        child.receive(0.1)
    with pytest.raises(TypeError, match="pickle"):
        child.send(threading.Lock())
    for message in (1, None, b""):
        child.send(message)
    assert [child.receive(PATIENCE) for _ in range(3)] == [("said", 1), ("said", None), ("said", b"")]
    assert child.is_alive()


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (0, "ended with exit status 0"),
        (signal.SIGKILL, "was ended by signal SIGKILL (as the kernel does when memory runs out)"),
        (signal.SIGTERM, "was ended by signal SIGTERM"),
        # No member of signal.Signals: its value alone names it.
        (signal.SIGRTMIN + 3, f"was ended by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_it_is_told_how_a_child_ended_without_an_answer(start, number, how):
    child = start(end_by, number)
    child.send("go")
    for _ in range(2):
        with pytest.raises(ChildEnded, match=f"^{re.escape(how)}$"):
            child.receive(PATIENCE)
        # What is sent now has no answer either.
        child.send("more")


def test_a_child_that_dies_within_a_message_has_ended(start):
    child = start(die_in_a_message)
    with pytest.raises(ChildEnded):
        child.receive(PATIENCE)


def test_a_child_that_ignores_sigterm_is_killed(start):
    child = start(ignore_sigterm)
    assert child.receive(PATIENCE) == "ready"
    child.end(0.2)
    assert child.exitcode == -signal.SIGKILL


def test_an_interrupt_is_for_the_parent_alone(start):
    assert signal.SIGINT in start(tell_blocked_signals).receive(PATIENCE)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
