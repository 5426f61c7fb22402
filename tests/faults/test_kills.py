"""SIGKILL at random moments of a stage: readers see nothing bad, and a relaunch gives the same bytes."""

import os
import random
import signal
import subprocess
import tempfile
import time

import pytest
from faults.runs import SmallRun
from support.project import REPOSITORY
from support.toy_stage import session_members

# Each test launches the program many times.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20
VICTIMS = ("rank", "driver", "group")
SECONDS_TO_DIE = 60.0
SECONDS_TO_END = 240.0


class Launch:
    """A run of a stage on two ranks from the command line, in its own session."""

    def __init__(self, run: SmallRun, stage: str) -> None:
        self.run, self.stage = run, stage
        self.killed = False
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            [*run.command(stage, workers=2), "executor.feeders=1"], stdout=subprocess.DEVNULL, stderr=self.errors,
            start_new_session=True,
            cwd=REPOSITORY,
        )  # fmt: skip

    def kill(self, victim: str, rng: random.Random) -> bool:
        """Kill a victim shortly after a few more commits; return False if the run ended before."""
        commits = self.run.commits(self.stage) + rng.randint(0, 3)
        while self.run.commits(self.stage) < commits and self.process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.5 if commits else 5.0))
        if victim == "rank":
            # Skip the fork server, which is the child of the driver and the parent of the ranks.
            found = session_members(self.process.pid)
            ranks = [pid for pid, parent in found.items() if self.process.pid not in (pid, parent)]
            self.killed = bool(ranks) and ended(os.kill, rng.choice(ranks))
        else:
            ended(os.kill if victim == "driver" else os.killpg, self.process.pid)
            self.killed = self.process.wait() == -signal.SIGKILL
            self.wait_for_ranks()
        return self.killed

    def wait_for_ranks(self) -> None:
        """Wait for ranks without a driver to end themselves."""
        deadline = time.monotonic() + SECONDS_TO_DIE
        while session_members(self.process.pid):
            assert time.monotonic() < deadline, "ranks outlive their driver"
            time.sleep(0.005)

    def finish(self) -> bool:
        """Wait for the end; return False if a relaunch must finish the stage after a kill."""
        status = self.process.wait(SECONDS_TO_END)
        self.wait_for_ranks()
        self.errors.seek(0)
        errors = self.errors.read()
        assert status == 0 or (self.killed and status in (1, -signal.SIGKILL)), f"ended with {status}: {errors}"
        assert "Traceback" not in errors, errors
        return status == 0

    def end(self) -> None:
        """Kill all remaining processes."""
        for pid in session_members(self.process.pid):
            ended(os.kill, pid)
        self.process.wait()
        self.errors.close()


def ended(kill, pid: int) -> bool:
    try:
        kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def torture(run: SmallRun, stage: str, victims: list[str], rng: random.Random) -> int:
    """Run a stage, kill the victims one after the other while it runs, let it finish; return the number of kills."""
    run.restore(stage)
    launch, kills = Launch(run, stage), 0
    try:
        for victim in victims:
            if not launch.kill(victim, rng):
                break
            kills += 1
            run.check_readers(stage)
            if victim != "rank":
                launch.end()
                launch = Launch(run, stage)
        while not launch.finish():
            launch.end()
            launch = Launch(run, stage)
    finally:
        launch.end()
    assert run.differences(stage) == []
    run.check_readers(stage)
    return kills


# Prepare and validate are interrupted at all moments in test_power.py.
@pytest.mark.parametrize("stage", ["voices", "match", "write", "encode"])
def test_kills_of_ranks_drivers_and_groups_change_no_byte(small_run, stage):
    rng = random.Random(f"{SEED} {stage}")
    left = [*VICTIMS, rng.choice(VICTIMS)]
    while left:
        # A run may end before all victims are killed; the next run takes the rest.
        left = left[torture(small_run, stage, left, rng) :]
