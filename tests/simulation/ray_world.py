"""Schedules of the Ray executor, drawn from a seed: a stage, a cluster with faults, drivers that are killed and started
again, and what must hold whatever happens."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

from sharmill.cli.stage_status import read_stage
from sharmill.engine import worker
from sharmill.engine.attempts import MAX_ATTEMPTS, MOST_INTERRUPTIONS
from sharmill.engine.ledger import read_ledger
from sharmill.engine.listener import Listener
from sharmill.engine.plan import load_plan
from sharmill.engine.progress import SILENT_SECONDS
from sharmill.engine.run import locked, run_stage
from sharmill.engine.worker import MAX_BROKEN_DEVICES
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.ray import actor as ray_actor
from sharmill.executors.ray import executor as ray_executor
from sharmill.executors.ray.executor import RayExecutor
from sharmill.staging import STAGING_NAME
from simulation.kernel import Kernel, make_folder
from simulation.ports import ended_after_port
from simulation.ray_cluster import Node, RayCluster
from simulation.ray_operator import Operator, expected_status
from simulation.ray_stage import RECORDS_PER_UNIT, UNIT_TIME_LIMITS, GpuStage, SimStage, worlds
from simulation.tasks import SimProcess, Stuck

# Of one driver: excused attempts, those at broken GPUs, and the three that count.
MOST_ATTEMPTS = MOST_INTERRUPTIONS + MAX_BROKEN_DEVICES + MAX_ATTEMPTS
# Stands for 1 where the driver has ended since there is no good node at this time: the operator goes on later.
_NO_NODES = 75


class Broken(AssertionError):
    """What must hold does not."""


@dataclass(eq=False)
class World:
    """One schedule as it runs.

    Attributes:
        wanted: what each driver is started with: option, and ``--restart``.
        attempts: by number of drivers so far and unit.
        broken_gpus: by host and number.
        blind: the hosts that do not see the audio, each since a moment.
        errors: what was found that must not be.
        told: what the status says at the end: the state, and how many units are done, have failed and are under way.
    """

    seed: int
    kernel: Kernel
    cluster: RayCluster
    folder: Path
    units: int
    does: dict[int, str]
    uses_gpu: bool
    unit_time_limit: float | Literal["auto"] | None
    attempts: Counter[tuple[int, int]] = field(default_factory=Counter)
    driver_runs: int = 0
    broken_gpus: set[tuple[str, str]] = field(default_factory=set)
    blind: dict[str, float] = field(default_factory=dict)
    statuses: list[int | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    option: int = 1
    nodes_made: int = 0
    told: tuple[str, int, int, int] | None = None

    def stage(self) -> SimStage:
        kind = GpuStage if self.uses_gpu else SimStage
        stage = kind(self.folder, self.units, self.option, self.does)
        stage.unit_time_limit = self.unit_time_limit
        return stage

    def is_blind(self) -> bool:
        """Return True if the process that runs does not see the audio."""
        return self.kernel.now >= self.blind.get(self.kernel.running.host, float("inf"))

    def count_attempt(self, unit: int) -> None:
        """Count an attempt at a unit, and end the schedule where nothing else would."""
        self.attempts[self.driver_runs, unit] += 1
        if self.attempts[self.driver_runs, unit] > 2 * MOST_ATTEMPTS:
            self.kernel.at(0.0, partial(_stop, f"unit {unit} is tried again and again"))

    def use_gpu(self) -> None:
        """Fail as a GPU does that is broken."""
        running = self.kernel.running
        if (running.host, running.environ.get("CUDA_VISIBLE_DEVICES", "")) in self.broken_gpus:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def meet(self, does: str) -> None:
        """Do what a unit is for."""
        running = self.kernel.running
        if does == "raises":
            raise ValueError("a bad day")
        if does == "kills":
            self.kernel.kill(running)
        if does == "takes its node down":
            node = self.cluster.node_of(running)
            assert node is not None
            self.replace()
            self.kernel.at(0.0, partial(self.cluster.lose, node))
        if does:
            while True:
                self.kernel.wait(None)

    def replace(self) -> None:
        """Have the autoscaler bring a good node some time later."""
        self.kernel.at(self.kernel.random.uniform(5.0, 200.0), self.add_good_node)

    def add_good_node(self) -> None:
        self.nodes_made += 1
        cores = self.kernel.random.choice((1, 1, 2))
        self.cluster.join(Node(f"node{self.nodes_made}", cores, cores if self.uses_gpu else 0))

    def drive(self, *, restart: bool) -> None:
        """Run the stage as the command line does, and end with its exit status."""
        self.driver_runs += 1
        stage = self.stage()
        try:
            with locked(stage.run_dir):
                result = run_stage(
                    stage, RayExecutor(address="simulated:1"), Listener(), max_reject_fraction=0.5, restart=restart
                )
        except ConfigError as error:
            self.kernel.note(f"driver: {error.code}: {error}")
            raise SystemExit(2) from None
        except SharmillError as error:
            self.kernel.note(f"driver: {error.code}: {error}")
            good = any(host.startswith("node") for host in self.cluster.listed)
            raise SystemExit(_NO_NODES if error.code == "unlike_nodes" and not good else 1) from None
        raise SystemExit(0 if result.ok else 1)


def _stop(why: str) -> NoReturn:
    raise Stuck(why)


# What is drawn.


def make_world(seed: int, folder: Path) -> World:
    """Return a schedule before it begins."""
    draw = random.Random(seed)
    kernel = Kernel(seed, folder, max_seconds=50_000.0)
    units = draw.randint(2, 5)
    does = {}
    if draw.random() < 0.3:
        does[draw.randrange(units)] = draw.choice(("raises", "kills", "hangs", "takes its node down"))
    world = World(
        seed, kernel, RayCluster(kernel), folder, units, does, draw.random() < 0.3, draw.choice(UNIT_TIME_LIMITS)
    )
    _draw_nodes(world, draw)
    world.cluster.crashes = draw.choice((0, 0, 1, 2))
    world.cluster.answers_lost = draw.choice((0, 0, 1, 2))
    return world


def _draw_nodes(world: World, draw: random.Random) -> None:
    kernel = world.kernel
    world.add_good_node()
    for _ in range(draw.randint(0, 2)):
        kernel.at(draw.uniform(0.0, 300.0), world.add_good_node)
    for number in range(draw.choice((0, 0, 1, 1, 2))):
        node = Node(f"bad{number}", 1, int(world.uses_gpu))
        kernel.at(draw.choice((0.0, draw.uniform(0.0, 200.0))), partial(_join_bad_node, world, node, draw.random()))
    # Often enough to end a unit three times, and not so often that it counts.
    for _ in range(draw.choice((0, 0, 1, 2, 8))):
        kernel.at(draw.uniform(5.0, 300.0), partial(_lose_a_node, world, draw.random()))
    if world.uses_gpu and draw.random() < 0.5:
        kernel.at(draw.uniform(5.0, 100.0), partial(_break_a_gpu, world))


def _join_bad_node(world: World, node: Node, drawn: float) -> None:
    """Add a node that does not see the audio, or one of the disks, from the beginning, later or for some seconds."""
    now, folder = world.kernel.now, str(world.folder / ("out" if drawn * 10 % 1 < 0.5 else "run"))
    since = now + (0.0 if drawn * 100 % 1 < 0.5 else 50.0 * drawn)
    if drawn < 0.3:
        world.blind[node.host] = since
    elif drawn < 0.8:
        node.hidden[folder] = (since, float("inf"))
    else:
        node.hidden[folder] = (now, now + 25.0)
    world.cluster.join(node)


def _lose_a_node(world: World, drawn: float) -> None:
    """Lose one, and have another come for it."""
    good = [node for node in world.cluster.nodes if node.is_reachable and node.host.startswith("node")]
    if good:
        world.cluster.lose(good[int(drawn * len(good))], cut_off=drawn * 10 % 1 < 0.5)
        world.replace()


def _break_a_gpu(world: World) -> None:
    """Break one GPU, where that is not the only one."""
    good = [node for node in world.cluster.nodes if node.is_reachable and node.host.startswith("node")]
    if sum(node.gpus for node in good) > 1:
        world.broken_gpus.add((good[0].host, "0"))
    world.replace()


# What must hold.


def watch(world: World) -> None:
    """Have each rename into the final folders checked: only ranks of the present plan publish."""
    stage = world.stage()
    root, staging = f"{stage.root}/", f"{stage.root}/{STAGING_NAME}/"

    def check(process: SimProcess, source: str, goal: str) -> None:
        if source.startswith(staging) and goal.startswith(root) and not goal.startswith(staging):
            token = source.removeprefix(staging).partition("/")[0]
            with world.kernel.outside():
                present = stage.dir.token_file.read_text().strip() if stage.dir.token_file.exists() else ""
            if token != present:
                world.errors.append(
                    f"{process.name} publishes {goal} for the plan {token}, and {present} is the present"
                )

    world.kernel.on_rename = check


def _read_status(world: World) -> None:
    status = read_stage(world.stage())
    world.told = (status.state, status.units_done, status.units_failed, status.units_running)


def check_end(world: World) -> None:
    """Raise Broken where something does not hold at the end of a schedule."""
    stage = world.stage()
    problems = list(world.errors)
    if world.statuses[-1:] != [expected_status(world)]:
        problems.append(f"exit statuses {world.statuses}, expected {expected_status(world)} at last")
    if (most := max(world.attempts.values(), default=0)) > MOST_ATTEMPTS:
        problems.append(f"a unit was tried {most} times by one driver")
    if not stage.dir.identity.exists():
        raise Broken("; ".join([*problems, "there is no plan"]))
    units = load_plan(stage)
    commits = read_ledger(stage.dir, units)
    good = {unit.index for unit in units} - set(world.does)
    if set(commits) != good:
        problems.append(f"done are {sorted(commits)}, expected {sorted(good)}")
    for index in sorted(set(commits) & good):
        found = [(stage.root / name) for name in stage.names(index)]
        if any(not path.exists() or path.read_bytes() != stage.content(index) for path in found):
            problems.append(f"unit {index} has other bytes")
        if (commits[index].num_in, commits[index].num_out) != (RECORDS_PER_UNIT, RECORDS_PER_UNIT):
            problems.append(f"unit {index} counts {commits[index].num_out} of {commits[index].num_in} records")
    expected = ("failed" if world.does else "done", len(good), len(world.does), 0)
    if world.told != expected:
        problems.append(f"status tells {world.told}, expected {expected}")
    if problems:
        raise Broken("; ".join(problems))


# Running.


@contextmanager
def _installed(world: World) -> Iterator[None]:
    stat = os.stat

    def stat_of_node(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if world.kernel.is_running and isinstance(path, Path):
            node = world.cluster.node_of(world.kernel.running)
            for folder, (since, until) in node.hidden.items() if node is not None else ():
                if since <= world.kernel.now < until and str(path).startswith(folder):
                    raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, *arguments, **options)

    def no_context(*arguments: object) -> Any:
        return nullcontext()

    with ExitStack() as stack:
        logger = logging.getLogger("sharmill")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL + 1)
        for module, name, value in (
            (ray_executor, "connect", lambda address: None),
            (ray_executor, "logging_to", no_context),
            (ray_actor, "logging_to", no_context),
            (ray_actor, "redirect_output", lambda log: None),
            (ray_actor, "limit_cores", lambda cores: None),
            (worker, "ended_after", ended_after_port(world.kernel)),
            (os, "stat", stat_of_node),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        worlds.append(world)
        stack.callback(worlds.pop)
        stack.enter_context(world.cluster.installed())
        # The first to go: it removes processes, which must not ask the real Ray for anything.
        stack.enter_context(world.kernel.installed())
        yield


def _run(world: World, operator: Operator) -> None:
    kernel = world.kernel
    operator.start()
    try:
        kernel.run()
    except Stuck:
        kernel.note(f"still there: {', '.join(process.name for process in kernel.alive()) or 'nothing'}")
        raise
    # Ranks that are gone have been silent long enough by then.
    kernel.now += 2 * SILENT_SECONDS
    kernel.spawn("status", "head0", partial(_read_status, world))
    kernel.run()


def run_schedule(seed: int) -> World:
    """Run one schedule, and return it.

    Raises:
        Broken, Stuck: something does not hold.
    """
    folder = make_folder()
    try:
        world = make_world(seed, folder)
        draw = random.Random(f"operator {seed}")
        operator = Operator(
            world, kills=draw.choice((0, 1, 1, 2)), restart=draw.random() < 0.5, second=draw.random() < 0.2
        )
        watch(world)
        try:
            with _installed(world):
                _run(world, operator)
            check_end(world)
        except (Broken, Stuck) as error:
            trace = "\n".join(world.kernel.trace[-60:])
            raise Broken(f"seed {seed}: {error}\n{trace}") from None
        return world
    finally:
        shutil.rmtree(folder)
