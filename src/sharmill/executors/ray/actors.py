"""Ray as it is reached from here: its nodes, and actors that are started, called, waited for and killed.

All that a driver and its ranks ask of Ray once they have joined it goes through these functions, called through the
module as ``actors.start``, so that a simulation of a cluster in one process can put its own in their place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from sharmill.errors import ConfigError

_NODE_DIED = "its node has died"


class ActorLost(Exception):
    """The actor of a call has ended, and the call with it; the message is Ray's reason in one line.

    Attributes:
        excused: it has ended for no fault of what it did.
        details: all that Ray says.
    """

    def __init__(self, message: str, details: str = "", *, excused: bool = False) -> None:
        super().__init__(message)
        self.details = details or message
        self.excused = excused


class ActorUnreachable(ActorLost):
    """The actor of a call cannot be reached, and the answer is lost; whether it has ended Ray does not know yet."""


def import_ray() -> ModuleType:
    """Ray, which is imported where it is used only.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "executor.kind=ray needs a package: pip install 'sharmill[ray]'", code="missing_package"
        ) from error
    return ray


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each node that is alive, such as ``CPU`` and ``GPU``."""
    return [node["Resources"] for node in import_ray().nodes() if node["Alive"]]


def start(kind: type, argument: object, *, cores: int, gpus: int) -> Any:
    """Start an actor of a class as soon as there is room for it, and return its handle at once."""
    return _remote(kind, cores, gpus).remote(argument)


@cache
def _remote(kind: type, cores: int, gpus: int) -> Any:
    # Nothing is restarted by Ray: the driver redoes what is lost.
    return import_ray().remote(
        num_cpus=cores, num_gpus=gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
    )(kind)


def call(actor: Any, method: str, *arguments: object) -> Any:
    """Have an actor run a method when it has run those before, and return the call at once."""
    return getattr(actor, method).remote(*arguments)


def wait(calls: Sequence[Any], number: int, seconds: float) -> list[Any]:
    """Return the calls that are over, as soon as so many are or this time has passed."""
    over, _ = import_ray().wait(list(calls), num_returns=number, timeout=seconds)
    return list(over)


def answer(call: Any) -> Any:
    """Return what a call that is over has returned.

    Raises:
        ActorUnreachable, ActorLost: there is no answer.
    """
    ray = import_ray()
    try:
        return ray.get(call)
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorUnreachable(_describe(error), str(error), excused=True) from error
    except ray.exceptions.RayTaskError as error:
        cause = f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
        raise ActorLost(f"the actor failed: {cause}", str(error)) from error
    except ray.exceptions.RayError as error:
        how = _describe(error)
        raise ActorLost(how, str(error), excused=_NODE_DIED in how) from error


def _describe(error: Exception) -> str:
    reason = re.split(r"The actor (?:is dead|died) because ", " ".join(str(error).split()))[-1]
    reason, _, _ = reason.partition(" Some common causes include")
    return f"the actor died: {reason[:400].rstrip('. ')}"


def kill(actor: Any) -> None:
    """End an actor at once, if it still is there."""
    import_ray().kill(actor)


def end_this() -> None:
    """End the actor that this process is."""
    import_ray().actor.exit_actor()


def this_node() -> str:
    """Return the id of the node of this process; several may be on one host."""
    return str(import_ray().get_runtime_context().get_node_id())
