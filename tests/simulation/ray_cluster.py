"""A simulated Ray: nodes, actors and calls behind ``sharmill.executors.ray.actors``, with the faults of a real one.

Nodes join late and are lost, with or without their processes. Actors die, are placed on nodes that are gone already,
and answer without being heard. Ray kills the actors of a driver that has ended some time afterwards. As on a real one,
nothing is restarted and no call is repeated.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from sharmill.executors.ray import actors
from sharmill.executors.ray.actors import ActorLost, ActorUnreachable
from simulation.kernel import Kernel
from simulation.tasks import SimProcess, Task

_NODE_DIED = "the actor died: its node has died"


@dataclass(eq=False)
class Node:
    """A node, of one host.

    Attributes:
        is_up: its processes can run.
        is_known: Ray counts on it.
        is_reachable: what is sent to and from its actors arrives.
        hidden: folders that its processes do not see, each between two moments.
    """

    host: str
    cores: int = 1
    gpus: int = 0
    is_up: bool = True
    is_known: bool = True
    is_reachable: bool = True
    hidden: dict[str, tuple[float, float]] = field(default_factory=dict)
    actors: list[Actor] = field(default_factory=list)


@dataclass(eq=False)
class Actor:
    """An actor of a driver; without a node it waits for room."""

    driver: SimProcess
    make: bytes
    cores: int
    gpus: int
    node: Node | None = None
    gpu: int | None = None
    process: SimProcess | None = None
    error: ActorLost | None = None
    calls: deque[Call] = field(default_factory=deque)
    unanswered: list[Call] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A call of an actor's method. ``outcome`` is pickled, or an error, once it is over."""

    actor: Actor
    method: str
    arguments: bytes
    outcome: bytes | ActorLost | None = None
    waiting: list[Task] = field(default_factory=list)


class RayCluster:
    """The cluster.

    Attributes:
        crashes: so many of the next actors die in the middle of some file operation.
        answers_lost: so many of the next answers to units are lost.
        actors: all that were started, in order.
        listed: the hosts that the last driver to ask was told of.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.nodes: list[Node] = []
        self.actors: list[Actor] = []
        self.crashes = 0
        self.answers_lost = 0
        self.listed: set[str] = set()

    # Nodes.

    def join(self, node: Node) -> None:
        """Add a node."""
        self.kernel.note(f"{node.host} joins")
        self.nodes.append(node)
        self._place_all()

    def lose(self, node: Node, *, cut_off: bool = False) -> None:
        """Lose a node. Ray finds out some time later; one that is cut off only goes on working for some time more."""
        if not node.is_up or not node.is_reachable:
            return
        self.kernel.note(f"{node.host} is {'cut off' if cut_off else 'lost'}")
        node.is_reachable = False
        noticed = self.kernel.random.uniform(1.0, 30.0)
        if self.kernel.random.random() < 0.5:
            self.kernel.at(self.kernel.random.uniform(0.0, noticed), partial(self._break_connections, node))
        self.kernel.at(noticed, partial(self._give_up, node))
        if cut_off:
            # Its raylet ends itself and its workers when it hears that it counts as dead.
            self.kernel.at(noticed + self.kernel.random.uniform(0.0, 200.0), partial(self._end_processes, node))
        else:
            self._end_processes(node)

    def node_of(self, process: SimProcess) -> Node | None:
        """Return the node that a process is on."""
        return next((node for node in self.nodes if node.host == process.host), None)

    def _end_processes(self, node: Node) -> None:
        node.is_up = False
        for actor in node.actors:
            if actor.process is not None:
                self.kernel.kill(actor.process)

    def _break_connections(self, node: Node) -> None:
        for actor in node.actors:
            for call in list(actor.unanswered):
                self._finish(call, ActorUnreachable("the actor died: it is unavailable", excused=True))

    def _give_up(self, node: Node) -> None:
        self.kernel.note(f"{node.host} counts as dead")
        node.is_known = False
        for actor in node.actors:
            self._lose(actor, ActorLost(_NODE_DIED, excused=True))

    # What the shipped code asks for.

    def list_nodes(self) -> list[Mapping[str, float]]:
        self.kernel.wait(self.kernel.latency())
        known = [node for node in self.nodes if node.is_known]
        self.listed = {node.host for node in known}
        return [{"CPU": node.cores, "GPU": node.gpus} for node in known]

    def start(self, kind: type, argument: object, *, cores: int, gpus: int) -> Actor:
        self.kernel.wait(self.kernel.latency())
        actor = Actor(self.kernel.running, pickle.dumps((kind, argument)), cores, gpus)
        self.actors.append(actor)
        self.kernel.at(self.kernel.random.uniform(0.0, 1.0), self._place_all)
        return actor

    def call(self, actor: Actor, method: str, *arguments: object) -> Call:
        self.kernel.wait(self.kernel.latency())
        call = Call(actor, method, pickle.dumps(arguments))
        actor.unanswered.append(call)
        self.kernel.at(self.kernel.latency(), partial(self._deliver, call))
        return call

    def wait(self, calls: Sequence[Call], number: int, seconds: float) -> list[Call]:
        until = self.kernel.now + seconds
        while True:
            over = [call for call in calls if call.outcome is not None]
            if len(over) >= number or self.kernel.now >= until:
                return over[:number]
            for call in calls:
                call.waiting.append(self.kernel.current)
            self.kernel.wait(until - self.kernel.now)

    def answer(self, call: Call) -> Any:
        assert call.outcome is not None
        if isinstance(call.outcome, ActorLost):
            raise call.outcome
        return pickle.loads(call.outcome)

    def kill(self, actor: Actor) -> None:
        # As with all that is asked for: nothing comes of it where the process that asks has been killed.
        self.kernel.wait(self.kernel.latency())
        self._end_actor(actor)

    def _end_actor(self, actor: Actor) -> None:
        if actor.node is None or actor.node.is_reachable:
            self.kernel.at(self.kernel.latency(), partial(self._kill, actor))
        self._lose(actor, ActorLost("the actor died: it was killed by ray.kill"))

    def end_this(self) -> None:
        raise SystemExit(0)

    def this_node(self) -> str:
        return f"{self.kernel.running.host}-node"

    def driver_ended(self, driver: SimProcess) -> None:
        """Have Ray end the actors of a driver, when it finds out."""

        def end() -> None:
            for actor in self.actors:
                if actor.driver is driver:
                    self._end_actor(actor)

        self.kernel.at(self.kernel.random.expovariate(0.03), end)

    # Actors.

    def _place_all(self) -> None:
        for actor in self.actors:
            if actor.node is None and actor.error is None and not actor.driver.is_dead:
                self._place(actor)

    def _place(self, actor: Actor) -> None:
        def room(node: Node) -> int:
            here = [one for one in node.actors if one.error is None]
            free = [node.cores - sum(one.cores for one in here) - actor.cores]
            return min(free + ([node.gpus - sum(one.gpus for one in here) - actor.gpus] if actor.gpus else []))

        # SPREAD: where most is free.
        found = max((node for node in self.nodes if node.is_known), key=room, default=None)
        if found is None or room(found) < 0:
            return
        actor.node = found
        if actor.gpus:
            taken = {one.gpu for one in found.actors if one.error is None}
            actor.gpu = next(gpu for gpu in range(found.gpus) if gpu not in taken)
        found.actors.append(actor)
        self.kernel.at(self.kernel.random.uniform(0.5, 3.0), partial(self._spawn, actor))

    def _spawn(self, actor: Actor) -> None:
        node = actor.node
        assert node is not None
        if actor.error is not None or not (node.is_up and node.is_reachable):
            return
        environ = {} if actor.gpu is None else {"CUDA_VISIBLE_DEVICES": str(actor.gpu)}
        name = f"actor {self.actors.index(actor)}"
        actor.process = self.kernel.spawn(
            name, node.host, partial(self._work, actor), environ=environ, on_end=lambda process: self._ended(actor)
        )
        if self.crashes and self.kernel.random.random() < 0.5:
            self.crashes -= 1
            actor.process.operations_left = self.kernel.random.randrange(200)

    def _work(self, actor: Actor) -> None:
        kind, argument = pickle.loads(actor.make)
        instance = kind(argument)
        while True:
            while not actor.calls:
                self.kernel.wait(None)
            call = actor.calls.popleft()
            try:
                outcome = getattr(instance, call.method)(*pickle.loads(call.arguments))
            except Exception as error:  # noqa: BLE001 - as Ray does, which keeps the actor
                self._send(call, ActorLost(f"the actor failed: {type(error).__name__}: {error}"))
                continue
            if call.method == "run" and self.answers_lost and self.kernel.random.random() < 0.3:
                self.answers_lost -= 1
                self.kernel.note(f"an answer of {actor.process and actor.process.name} is lost")
                self._send(call, ActorUnreachable("the actor died: it is unavailable", excused=True))
            else:
                self._send(call, pickle.dumps(outcome))

    def _deliver(self, call: Call) -> None:
        actor = call.actor
        if actor.error is not None:
            self._finish(call, actor.error)
        elif actor.node is None or actor.node.is_reachable:
            actor.calls.append(call)
            if actor.process is not None and not actor.process.is_dead:
                self.kernel.wake(actor.process.tasks[0])

    def _send(self, call: Call, outcome: bytes | ActorLost) -> None:
        if call.actor.node is not None and call.actor.node.is_reachable:
            self.kernel.at(self.kernel.latency(), partial(self._finish, call, outcome))

    def _finish(self, call: Call, outcome: bytes | ActorLost) -> None:
        if call.outcome is None:
            call.outcome = outcome
            call.actor.unanswered.remove(call)
            for task in call.waiting:
                self.kernel.wake(task)
            call.waiting.clear()

    def _ended(self, actor: Actor) -> None:
        assert actor.node is not None
        if actor.node.is_reachable:
            self._lose(actor, ActorLost("the actor died: its process has ended"))
        self._place_all()

    def _lose(self, actor: Actor, error: ActorLost) -> None:
        if actor.error is None:
            actor.error = error
            for call in list(actor.unanswered):
                self.kernel.at(self.kernel.latency(), partial(self._finish, call, error))
            self._place_all()

    def _kill(self, actor: Actor) -> None:
        if actor.process is not None and not actor.process.is_dead:
            self.kernel.kill(actor.process)

    @contextmanager
    def installed(self) -> Iterator[RayCluster]:
        """Put this cluster behind the port of the Ray executor."""
        replaced = {
            "nodes": self.list_nodes, "start": self.start, "call": self.call, "wait": self.wait, "answer": self.answer,
            "kill": self.kill, "end_this": self.end_this, "this_node": self.this_node, "import_ray": lambda: None,
        }  # fmt: skip
        with ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(actors, name, function))
            yield self
