"""Kills a run at random moments: one of its ranks, its driver, or the whole process group."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sharmill.shar import open_shar
from support.paths import REPOSITORY
from support.small_run import SmallRun

VICTIMS = ("rank", "driver", "group")
_SECONDS_TO_DIE = 60.0
_SECONDS_TO_END = 240.0


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after so many commits are in the ledger."""

    commits: int
    seconds: float


@dataclass
class Torture:
    """What became of one run that was killed, perhaps several times, and then left alone.

    Attributes:
        kills: the victims.
        redone: attempts at units beyond the first one.
        differences: how the outcome differs from that of an untroubled run.
    """

    stage: str
    kills: list[str] = field(default_factory=list)
    relaunches: int = 0
    redone: int = 0
    differences: list[str] = field(default_factory=list)

    def relaunch(self, run: SmallRun) -> Launch:
        """The same command once more."""
        self.relaunches += 1
        return Launch(run, self.stage)


def torture(run: SmallRun, stage: str, victims: Sequence[str], rng: random.Random) -> Torture:
    """Runs a stage, kills the victims in turn as far as it lasts that long, and lets it finish.

    Between a kill and the relaunch, and while ranks are replaced, the dataset directory is read.
    """
    outcome = Torture(stage)
    run.restore(stage)
    launch = Launch(run, stage)
    try:
        with reading(run, stage):
            for victim in victims:
                if not launch.kill(victim, choose_moment(run, stage, rng), rng):
                    break
                outcome.kills.append(victim)
                run.check_readers(stage)
                if victim != "rank":
                    launch = outcome.relaunch(run)
            while not launch.check_end():
                launch = outcome.relaunch(run)
    finally:
        launch.end()
    outcome.redone = sum(attempts - 1 for attempts in run.attempts(stage).values())
    outcome.differences = run.differences(stage)
    run.check_readers(stage)
    return outcome


def choose_moment(run: SmallRun, stage: str, rng: random.Random) -> Moment:
    """Any moment of what is left of a run: while it starts, within a unit, between two, or while it is finalized."""
    pace, done = run.paces[stage], run.commits(stage)
    while_starting = Moment(done, rng.uniform(0, pace.start))
    while_finalizing = Moment(pace.num_units, rng.uniform(0, pace.end + (pace.start if done == pace.num_units else 0)))
    if done + 1 >= pace.num_units:
        return rng.choice([while_starting, while_finalizing])
    within_units = Moment(rng.randint(done + 1, pace.num_units - 1), rng.uniform(0, 2 * pace.units / pace.num_units))
    return rng.choices([while_starting, within_units, while_finalizing], weights=[1, 3, 1])[0]


class Launch:
    """The command line that runs a stage on two ranks, in a session of its own."""

    def __init__(self, run: SmallRun, stage: str) -> None:
        self.run = run
        self.stage = stage
        self.killed = 0
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            run.command(stage, workers=2), stdout=subprocess.DEVNULL, stderr=self._stderr, start_new_session=True,
            cwd=REPOSITORY,
        )  # fmt: skip

    def kill(self, victim: str, moment: Moment, rng: random.Random) -> bool:
        """Kills the victim at the moment; False if the run was over before."""
        if not self._wait_until(lambda: self.run.commits(self.stage) >= moment.commits):
            return False
        time.sleep(moment.seconds)
        hit = self._kill_rank(rng) if victim == "rank" else self._kill_driver(group=victim == "group")
        self.killed += hit
        return hit

    def check_end(self) -> bool:
        """Waits for the end; False if a relaunch has to finish what the kills have left.

        Only a run whose ranks, or itself, were killed may fail; and it must not leave processes.
        """
        status = self.process.wait(_SECONDS_TO_END)
        self._wait_for_the_last()
        if status == 0:
            return True
        self._stderr.seek(0)
        errors = self._stderr.read()
        assert self.killed, f"{self.stage} ended with {status}: {errors}"
        assert status in (1, -signal.SIGKILL), f"{self.stage} ended with {status}: {errors}"
        assert "Traceback" not in errors, errors
        return False

    def end(self) -> None:
        """Ends whatever still runs."""
        for pid in self._members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._stderr.close()

    def _kill_rank(self, rng: random.Random) -> bool:
        if not self._wait_until(self._ranks):
            return False
        ranks = self._ranks()
        return bool(ranks) and _kill_surely(rng.choice(ranks))

    def _kill_driver(self, *, group: bool) -> bool:
        pid = self.process.pid
        try:
            os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        hit = self.process.wait() == -signal.SIGKILL
        self._wait_for_the_last()
        return hit

    def _wait_until(self, condition: Callable[[], object]) -> bool:
        """Whether it comes to hold before the run is over."""
        while not condition():
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return True

    def _wait_for_the_last(self) -> None:
        """Ranks without a driver have to end themselves."""
        deadline = time.monotonic() + _SECONDS_TO_DIE
        while self._members():
            assert time.monotonic() < deadline, "ranks outlive their driver"
            time.sleep(0.005)

    def _ranks(self) -> list[int]:
        """Return the processes that fork servers of the driver have forked."""
        found = _processes()
        servers = {pid for pid, parent, _ in found if parent == self.process.pid and _is_fork_server(pid)}
        return [pid for pid, parent, _ in found if parent in servers]

    def _members(self) -> list[int]:
        return [pid for pid, _, session in _processes() if session == self.process.pid]


@contextmanager
def reading(run: SmallRun, stage: str) -> Iterator[None]:
    """Reads a finished dataset again and again, codes and all, while the context lasts."""
    if stage not in ("encode", "validate"):
        yield
        return
    expected = sum(1 for _ in open_shar(run.dataset, []))
    errors: list[Exception] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(0.05):
            try:
                cuts = list(open_shar(run.dataset))
                assert len(cuts) == expected
                for cut in cuts:
                    if cut.has_custom("target_codes"):
                        assert len(cut.load_target_codes()) == len(cut.load_context_codes()) > 0
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
                errors.append(error)
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors, f"a reader was disturbed: {errors[0]!r}"


def _processes() -> list[tuple[int, int, int]]:
    """Process id, parent and session of all processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in ("Z", "X"):
            found.append((int(path.parent.name), int(parent), int(session)))
    return found


def _is_fork_server(pid: int) -> bool:
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill_surely(pid: int) -> bool:
    """Whether it was this kill that ended the process: it is stopped first, and what stops has not ended."""
    try:
        handle = os.pidfd_open(pid)
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        while _state(pid) not in ("T", ""):
            pass
        stopped = _state(pid) == "T"
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    select.select([handle], [], [], _SECONDS_TO_DIE)
    os.close(handle)
    return stopped


def _state(pid: int) -> str:
    """The letter of a process's state; nothing for one that has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in ("Z", "X") else state
