"""The Ray executor without Ray: behind the port ``executors/ray/actors.py`` stand forks of this process."""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from sharmill.executors.ray import actors
from sharmill.executors.ray.actors import ActorLost
from sharmill.executors.ray.executor import RayExecutor

_NODES = [{"CPU": 2.0}]


@dataclass(eq=False)
class _Actor:
    """An actor; ``calls`` are those without an answer, in the order in which it does them."""

    process: int
    connection: Connection
    calls: deque[_Call] = field(default_factory=deque)


@dataclass(eq=False)
class _Call:
    actor: _Actor
    outcome: Any = None
    is_over: bool = False


@contextmanager
def forked_actors() -> Iterator[RayExecutor]:
    """Gives an executor of two actors on one node; models that stand in for others are theirs too."""
    port = {
        "import_ray": lambda: None, "nodes": lambda: _NODES, "start": _start, "call": _call, "wait": _wait,
        "answer": _answer, "kill": _kill, "end_this": lambda: os._exit(0), "this_node": lambda: "the only node",
    }  # fmt: skip
    with (
        mock.patch.multiple(actors, **port),
        mock.patch("sharmill.executors.ray.executor.connect"),
    ):
        yield RayExecutor(workers=2, device="cpu")


def _start(kind: type, argument: object, *, cores: int, gpus: int) -> _Actor:
    ours, theirs = Pipe()
    process = os.fork()
    if process:
        theirs.close()
        return _Actor(process, ours)
    ours.close()
    try:
        actor = kind(argument)
        while True:
            method, arguments = theirs.recv()
            theirs.send(getattr(actor, method)(*arguments))
    except BaseException:  # noqa: BLE001 - shown, and then the actor ends
        traceback.print_exc()
    finally:
        os._exit(1)


def _call(actor: _Actor, method: str, *arguments: object) -> _Call:
    call = _Call(actor)
    actor.calls.append(call)
    actor.connection.send((method, arguments))
    return call


def _wait(calls: Sequence[_Call], number: int, seconds: float) -> list[_Call]:
    # Whoever has been killed or has ended answers all its calls at once.
    while len(over := [call for call in calls if call.is_over]) < number:
        ready = wait([call.actor.connection for call in calls if not call.is_over], seconds)
        if not ready:
            break
        for actor in {call.actor for call in calls if call.actor.connection in ready}:
            _receive(actor)
    return over[:number]


def _receive(actor: _Actor) -> None:
    """Take the next answer of an actor, or note of all its calls that it has ended."""
    try:
        outcomes = [actor.connection.recv()]
    except EOFError:
        outcomes = [ActorLost("the actor has ended")] * len(actor.calls)
    for outcome in outcomes:
        call = actor.calls.popleft()
        call.outcome, call.is_over = outcome, True


def _answer(call: _Call) -> Any:
    if isinstance(call.outcome, ActorLost):
        raise call.outcome
    return call.outcome


def _kill(actor: _Actor) -> None:
    os.kill(actor.process, signal.SIGKILL)
    os.waitpid(actor.process, 0)
    actor.connection.close()
