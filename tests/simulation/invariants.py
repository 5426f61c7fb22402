"""What must hold in every schedule on a simulated SLURM, while it goes on and when nothing goes on any more."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sharmill.cli.stage_status import read_stage
from sharmill.engine.attempts import MAX_ATTEMPTS, MOST_INTERRUPTIONS
from sharmill.engine.ledger import iterate_ledger
from sharmill.engine.progress import SILENT_SECONDS
from sharmill.engine.run import read_totals
from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.chain_state import read_state
from sharmill.staging import STAGING_NAME
from simulation import dataset as toy
from simulation.dataset import RECORDS_PER_UNIT, SimDataset, expected_files
from simulation.tasks import SimProcess

if TYPE_CHECKING:
    from simulation.world import World

_SECONDS_TO_END = 10.0
_SECONDS_TO_SUBMIT = 60.0
# By the limit of units: an attempt, with some time for the end.
_LONGEST = {"auto": math.inf, 600.0: 660.0}


# While it goes on.


def check_rename(world: World, owner: SimProcess, source: str, goal: str) -> None:
    """Nothing is published for another plan than a present one, by two runs, or once it was to end."""
    inside = Path(source).parts
    if STAGING_NAME not in inside or STAGING_NAME in Path(goal).parts:
        return
    token = inside[inside.index(STAGING_NAME) + 1]
    with world.kernel.outside():
        present = {
            RunDir(run.run_dir).stage(name).read_token(): run.run_name for run in world.runs for name in toy.NAMES
        }
    run = present.get(token, "")
    if not run:
        world.problems.append(f"{owner.name} publishes {goal} for the plan {token}, which is not the present one")
    elif run == world.dataset.run_name and world.cancelled_at is not None and not world.may_go_on:
        world.problems.append(f"{owner.name} publishes {goal} after the chain was cancelled")
    if (
        owner.environ.get("SLURM_JOB_NAME") in ("driver", "watcher")
        and world.kernel.now > owner.told_at + _SECONDS_TO_END
    ):
        world.problems.append(f"{owner.name} publishes {goal} long after it was told to end")
    if run and goal.startswith(str(world.folder / "out")):
        world.publishers.add(run)
        if len(world.publishers) == 2:
            world.problems.append(f"{owner.name} publishes {goal}, where another run has published")


def check_submit(world: World, comment: str) -> None:
    """No ranks are submitted beside others of the dataset, unless an answer was lost or a node is out of reach."""
    role = comment.split(":")[2]
    # What cannot be ended may be in the middle of a submission, and nothing more.
    last = None if world.cancelled_at is None else world.cancelled_at + _SECONDS_TO_SUBMIT * world.may_go_on
    if last is not None and world.kernel.now > last and world.run_dir.id.read_bytes().decode() in comment:
        world.problems.append(f"a {role} is submitted after the chain was cancelled")
    ranks = [job for cluster in world.clusters for job in cluster.queue() if job.role == role == "rank"]
    if ranks and not world.may_double:
        world.problems.append(f"ranks are submitted beside {ranks[0].id}")


def check_cancelled(world: World, claims: list[str]) -> None:
    """Once a run was cancelled, it has no claims but those that are named."""
    left = [path for path in (world.folder / "out" / STAGING_NAME).glob("[!.]*.claim") if str(path) not in claims]
    if own := [path.name for path in left if f'"{world.dataset.run_dir}"'.encode() in path.read_bytes()]:
        world.problems.append(f"the run was cancelled, and keeps {own[0]}")


# When nothing goes on any more.


def check_quiet(world: World) -> None:
    """Check what the schedule has left."""
    if alive := world.kernel.alive():
        world.problems.append(f"{alive[0].name} waits for ever")
    if jobs := [job for cluster in world.clusters for job in cluster.queue()]:
        world.problems.append(f"job {jobs[0].id} is in the queue for ever")
    world.problems += _wrong_attempts(world)
    world.problems += _wrong_state(world)
    for run in world.runs:
        state = read_state(RunDir(run.run_dir))
        if run.run_name in world.accepted and state is not None and _is_refusal(state.message):
            world.problems.append(f"the submission of {run.run_name} was accepted, and is refused later: {state}")
    for stage in world.dataset.make_stages():
        # A rank that was killed shows as alive for a minute.
        world.kernel.now += 2 * SILENT_SECONDS
        if read_stage(stage).state == "under way":
            world.problems.append(f"{stage.name} is shown as under way, and nobody is at work")


def _is_refusal(message: str) -> bool:
    return " is claimed: " in message or "another run's" in message


def _wrong_state(world: World) -> Iterator[str]:
    """Yield what the chain's state tells that is not true."""
    state = read_state(world.run_dir)
    if world.cancelled_at is not None and (
        state is None or state.state != "failed" or "cancelled by" not in state.message
    ):
        yield f"the chain was cancelled, and is {state}"
    if state is not None and state.state == "done" and not is_done(world.dataset):
        yield "the chain is done, and its stages are not"
    if world.is_gentle and (state is None or state.state != ("failed" if world.dataset.behaviour else "done")):
        yield f"the chain has not come to its end: {state}"
    elif state is not None and state.state == "waiting" and not state.submitting and not world.is_deserted:
        yield f"the chain waits, and has no jobs: {state}"
    if world.waited_for and world.is_gentle and (state is None or state.state != world.waited_for):
        yield f"submit --wait has said {world.waited_for}, and it is {state}"


def _wrong_attempts(world: World) -> Iterator[str]:
    """Yield who has done what he should not have."""
    if toy.second_writers:
        yield f"two processes direct the run at once: {toy.second_writers}"
    counts = Counter((attempt.stage, attempt.token, attempt.unit) for attempt in toy.attempts)
    for (stage, token, unit), number in counts.items():
        if number > 2 * MAX_ATTEMPTS + MOST_INTERRUPTIONS + 2 * world.excuses:
            yield f"{number} attempts at unit {unit} of {stage} with plan {token}"
    limit = world.dataset.unit_time_limit
    for attempt in toy.attempts:
        ended = world.kernel.processes[attempt.rank_pid].ended_at
        if world.dataset.behaviour == "hang" and attempt.unit == 0 and ended > attempt.began + _LONGEST[limit]:
            yield f"unit 0 of {attempt.stage} hangs for {ended - attempt.began:.0f} s"
    ranks: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    drivers: defaultdict[str, set[int]] = defaultdict(set)
    for attempt in toy.attempts:
        if attempt.role == "rank":
            ranks[attempt.stage, attempt.token, str(attempt.unit), attempt.job].add(attempt.task)
        elif attempt.role:
            drivers[attempt.token].add(attempt.pid)
    for unit, tasks in ranks.items():
        if len(tasks) > 2:
            yield f"{len(tasks)} ranks of a round have begun the unit {unit}"
    # A submission tries stages anew.
    if not any("subm" in text or "run" in text for text in world.disturbances):
        for token, pids in drivers.items():
            if len(pids) > 1:
                yield f"driver jobs have done units of the plan {token} {len(pids)} times"


def is_done(run: SimDataset) -> bool:
    """Return True if all stages of a run are done."""
    return all(read_totals(stage) is not None for stage in run.make_stages())


def planned_option(run: SimDataset) -> int:
    """Return the option of a run's plan, with which an operator goes on."""
    identity = RunDir(run.run_dir).stage(toy.NAMES[0]).identity
    return int(msgspec.json.decode(identity.read_bytes())["option"]) if identity.exists() else run.option


def wrong_output(run: SimDataset) -> Iterator[str]:
    """Yield what is not as in an undisturbed run: files of the dataset directory, counts and the units of a ledger."""
    root = run.folder / "out"
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in _files(root)}
    expected = expected_files(run)
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        yield f"the output is not that of an undisturbed run: {', '.join(wrong[:3])}"
    for stage in run.make_stages():
        totals = read_totals(stage)
        units = {commit.index for commit in iterate_ledger(stage.dir)}
        if totals is None or totals.num_in != run.units * RECORDS_PER_UNIT or totals.num_out != totals.num_in:
            yield f"the accounts of {stage.name} are {totals}"
        if units != set(range(run.units)):
            yield f"the ledger of {stage.name} has the units {units}"


def _files(root: Path) -> Iterable[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())
