"""Whoever starts drivers on a simulated Ray: again when one is killed, and now and then another one beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from simulation.tasks import SimProcess

if TYPE_CHECKING:
    from simulation.ray_world import World


@dataclass
class Operator:
    """Starts a driver, starts it again when it is killed, and now and then another one beside it.

    Attributes:
        kills: how often it is killed.
        restart: begin anew, with another option, after the first time that it is killed.
    """

    world: World
    kills: int
    restart: bool
    second: bool
    is_restarting: bool = False
    processes: list[SimProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start a driver."""
        world, kernel = self.world, self.world.kernel
        number = len(self.processes)
        work = partial(world.drive, restart=self.is_restarting)
        host = "head1" if number and kernel.random.random() < 0.2 else "head0"
        new = kernel.spawn(f"driver {number}", host, work, on_end=self.ended)
        self.processes.append(new)
        if self.kills:
            self.kills -= 1
            if kernel.random.random() < 0.5:
                new.operations_left = kernel.random.randrange(400)
            else:
                kernel.at(kernel.random.uniform(0.0, 200.0), partial(self._kill, new))
        if self.second and number == 0:
            kernel.at(kernel.random.uniform(0.0, 100.0), self.start)

    def _kill(self, killed: SimProcess) -> None:
        if not killed.is_dead:
            self.world.kernel.kill(killed)

    def ended(self, process: SimProcess) -> None:
        """Go on as an operator does."""
        world = self.world
        world.statuses.append(process.status)
        world.cluster.driver_ended(process)
        if any(not other.is_dead for other in self.processes):
            return
        status = process.status
        assert status is not None
        if status in (0, 1) and status != expected_status(world):
            world.errors.append(f"driver ends with status {status}, not {expected_status(world)}")
        if status in (0, 1) or len(world.statuses) > 20:
            return
        if self.restart and not self.is_restarting:
            self.is_restarting = True
            world.option = 2
        # Also after status 2: another had the run directory.
        world.kernel.at(world.kernel.random.choice((1.0, 1.0, 30.0, 200.0)), self.start)


def expected_status(world: World) -> int:
    return 1 if world.does else 0
