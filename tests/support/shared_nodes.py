"""A small run on several nodes that share a disk: what SLURM would start, in forks of one warm process.

The process has shared_disk.so preloaded; see there for what the nodes see. Ranks of a round run side by side, each on a
node of its own, and the driver jobs in turn on two others. Nothing here waits for a cluster: what is submitted begins.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sharmill.config import Config
from sharmill.errors import SharmillError
from sharmill.executors.slurm.chain import JobChain
from sharmill.executors.slurm.chain_state import read_state
from sharmill.executors.slurm.profile import ClusterProfile, RankProfile
from sharmill.executors.slurm.scheduler import JobRequest
from sharmill.pipeline import DatasetRun
from sharmill.ports.process import this_kernel
from support.power_runs import stand_ins
from support.shar import Project, voice
from support.small_run import is_temporary, lasting_files

_RANKS = RankProfile(max_ranks=2)
# The driver jobs' nodes, in turn; ranks have those behind.
_DRIVERS = 2
# What differs from run to run on a cluster, by the names of files and folders.
_OWN = frozenset({"attempts", "rounds", "taken", "id", "jobs", "chain.json", "report.html"})
# A process that lasts longer hangs.
_SECONDS = 240
_MOST_ROUNDS = 30

# Kinds of changes, as in shared_disk.h; LISTINGS show all late, while names that are asked for are known.
NEW_NAMES, REMOVALS, RENAMES, APPENDS, LISTINGS, EVERYTHING = 1, 4, 8, 16, 32, -1


@dataclass(frozen=True)
class SharedDisk:
    """How a disk treats its nodes; see ``shared_disk.c``.

    Attributes:
        late: seconds until changes of other nodes are seen, at most.
        kinds: the changes that are seen late, of those below.
        flock: -1 for one that all nodes see, 0 for one of each node, or an errno.
        clocks: seconds by which the clocks of two nodes differ.
        quota: the operation that needs room from which on there is none (EDQUOT), or 0.
    """

    late: float = 0.0
    kinds: int = EVERYTHING
    stale: bool = False
    silly: bool = False
    flock: int = -1
    clocks: float = 0.0
    quota: int = 0


@dataclass
class Ended:
    """What became of a process on a node: what it submitted, or its error.

    Attributes:
        submitted: the tasks of each submission, pickled.
        error: the line that its user gets.
        code: that of the error; nothing where it is a traceback.
    """

    submitted: list[list[bytes]] = field(default_factory=list)
    error: str = ""
    code: str = ""
    traceback: str = ""


@dataclass
class SharedOutcome:
    """What became of a run on a shared disk, and of the relaunches.

    Attributes:
        rounds: how often ranks were submitted.
        redone: attempts at units beyond the first one.
        errors: the lines that users got.
        problems: what should not have happened; none.
        same_bytes: the outcome is that of an undisturbed run.
    """

    disk: SharedDisk
    seed: int
    rounds: int = 0
    redone: int = 0
    relaunches: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    same_bytes: bool = True


class SharedRuns:
    """Runs of one small dataset, in ``folder``; each begins with an empty disk."""

    def __init__(self, folder: Path, seconds_until_seen: float) -> None:
        self._patience = seconds_until_seen
        self._folder = folder
        self._work = folder / "work"
        self.config = self._configure()
        with _cluster():
            # Imports what the run imports, once for all forks.
            self.usual = self._run(SharedDisk(), seed=0)
        assert self.usual.errors == self.usual.problems == [], self.usual
        self._expected = self._outcome()

    def run(self, disk: SharedDisk, seed: int) -> SharedOutcome:
        """Run all stages on a disk, and again where that ends with an error; compare with an undisturbed run."""
        with _cluster():
            found = self._run(disk, seed)
            if found.errors:
                found.relaunches += 1
                # What was late is seen by now.
                time.sleep(disk.late)
                before = len(found.errors)
                self._run(SharedDisk(late=disk.late, clocks=disk.clocks), seed, outcome=found)
                if found.errors[before:]:
                    found.problems.append(f"the relaunch ends with {found.errors[-1]}")
        differences = self._differences()
        found.same_bytes = not differences
        found.problems += differences
        return found

    def _configure(self) -> Config:
        """The configuration of twelve utterances of three voices, and of one that is not there, in four shards."""
        project = Project(self._folder)
        for number in range(12):
            pitch = 200 + 2 * number
            project.add(f"{number}.wav", voice(0.3, pitch=pitch, seed=number), duration=0.3, speaker=f"s{number % 3}")
        project.add("absent.wav", duration=0.3)
        project.run_dir, project.dataset = self._work / "run", self._work / "dataset"
        return project.configure(
            prepare={"min_duration": 0.0, "unit_records": 4}, match={"min_duration": 0.0, "unit_seconds": 0.6},
            write={"shard_size": 3}, encode={"codecs": [{"name": "toy", "model": "builtin"}]},
            executor={"workers": 1, "device": "cpu", "seconds_until_seen": self._patience},
        )  # fmt: skip

    def _run(self, disk: SharedDisk, seed: int, outcome: SharedOutcome | None = None) -> SharedOutcome:
        if outcome is None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir()
        for path in (self._folder / "state", self._folder / "asides"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (self._folder / "asides").mkdir()
        found = outcome or SharedOutcome(disk, seed)
        began = time.monotonic()
        driver = 0

        def on_node(node: int, job: Callable[[], Any]) -> _Process:
            return _Process(job, lambda: self._become(node, disk, seed))

        chain = JobChain(DatasetRun(self.config), ClusterProfile(cpu=_RANKS, gpu=_RANKS, driver_units=0))
        ended = on_node(driver, chain.start).wait()
        watcher: bytes | None = None
        while found.rounds < _MOST_ROUNDS:
            driver = (driver + 1) % _DRIVERS
            if ended.error:
                self._note(ended, found)
                if watcher is None:
                    break
                ended, watcher = on_node(driver, pickle.loads(watcher)).wait(), None
            elif not ended.submitted:
                break
            else:
                found.rounds += 1
                *arrays, (job,), (watcher,) = ended.submitted
                ranks = [pickle.loads(task) for array in arrays for task in array]
                running = [on_node(_DRIVERS + number, rank) for number, rank in enumerate(ranks)]
                for process in running:
                    self._note_rank(process.wait(), found)
                ended = on_node(driver, pickle.loads(job)).wait()
        found.seconds += round(time.monotonic() - began, 1)
        state = read_state(chain.run_dir)
        if state is None or state.state != "done":
            found.errors += [] if ended.error or state is None else [state.message]
            if not found.errors:
                found.problems.append(f"the chain ended as {state}")
        found.redone = sum(count - 1 for count in self._begun().values())
        return found

    def _become(self, node: int, disk: SharedDisk, seed: int) -> None:
        library = ctypes.CDLL(None)
        library.become_node.argtypes = [
            *3 * [ctypes.c_char_p], ctypes.c_int, ctypes.c_double, ctypes.c_int, ctypes.c_uint, *3 * [ctypes.c_int],
            ctypes.c_double, ctypes.c_long,
        ]  # fmt: skip
        paths = [str(path).encode() for path in (self._work, self._folder / "state", self._folder / "asides")]
        library.become_node(
            *paths, node, disk.late, disk.kinds, seed, disk.stale, disk.silly, disk.flock, (node - 1) * disk.clocks,
            disk.quota,
        )  # fmt: skip
        this_kernel.cache_clear()

    def _note(self, ended: Ended, found: SharedOutcome) -> None:
        found.errors.append(ended.error)
        if not ended.code:
            found.problems.append(f"a driver ends with a traceback: {ended.traceback}")

    def _note_rank(self, ended: Ended, found: SharedOutcome) -> None:
        if ended.error and not ended.code:
            found.problems.append(f"a rank ends with a traceback: {ended.traceback}")
        elif ended.error:
            found.errors.append(ended.error)

    def _begun(self) -> Counter[str]:
        """How often each unit was begun, by the logs of the ranks."""
        lines = [
            f"{path.parent.parent} {line.split(' unit ', 1)[1].split(' begins')[0]}"
            for path in self._work.glob("run/**/logs/rank-*.log")
            for line in path.read_text().splitlines()
            if " begins: " in line
        ]
        return Counter(lines)

    def _outcome(self) -> dict[str, bytes]:
        found = lasting_files(self._work)
        return {name: found[name] for name in found if not _OWN & set(name.split("/"))}

    def _differences(self) -> list[str]:
        """Differences between what is there and what an undisturbed run leaves: there may be none."""
        left = self._outcome()
        wrong = [f"{name} is missing" for name in sorted(self._expected.keys() - left.keys())]
        wrong += [f"{name} is too much" for name in sorted(left.keys() - self._expected.keys())]
        both = sorted(left.keys() & self._expected.keys())
        for name in both:
            if left[name] != self._expected[name]:
                pairs = enumerate(zip(left[name], self._expected[name], strict=False))
                place = max(0, next((at for at, (one, other) in pairs if one != other), 0) - 40)
                shown = (data[name][place : place + 120] for data in (left, self._expected))
                wrong.append(f"{name} has other bytes: {' and not '.join(map(repr, shown))}")
        names = (path.relative_to(self._work).as_posix() for path in sorted(self._work.rglob("*")))
        return wrong + [f"{name} is left over" for name in names if is_temporary(name) and "/progress/" not in name]


@contextmanager
def _cluster() -> Iterator[None]:
    """Stands in for SLURM and for the models; nobody waits for what other ranks do longer than needed."""
    with (
        stand_ins(),
        mock.patch.multiple(
            "sharmill.executors.slurm.scheduler",
            is_here=lambda command: True,
            run=lambda command, timeout: "",
            submit=_submit,
        ),
        mock.patch("sharmill.executors.slurm.taken_units._SECONDS_BETWEEN_LOOKS", new=0.05),
    ):
        yield


_submitted: list[list[bytes]] = []


def _submit(request: JobRequest, tasks: Sequence[Any]) -> list[str]:
    """In the place of sbatch: what a process submits is run when it has ended."""
    _submitted.append([pickle.dumps(task) for task in tasks])
    return [f"{len(_submitted)}_{number}" for number in range(len(tasks))]


class _Process:
    """A fork that does a job on a node."""

    def __init__(self, job: Callable[[], Any], become: Callable[[], None]) -> None:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # The child makes no use of the threads that it lacks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            signal.alarm(_SECONDS)
            try:
                become()
                ended = _do(job)
                with os.fdopen(writing, "wb") as stream:
                    pickle.dump(ended, stream)
            except BaseException:  # noqa: BLE001 - shown, and then the child ends
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writing)
        self._answer = os.fdopen(reading, "rb")

    def wait(self) -> Ended:
        """Return what has become of it."""
        with self._answer:
            data = self._answer.read()
        _, status = os.waitpid(self._pid, 0)
        return pickle.loads(data) if data else Ended(error="it hangs", traceback=f"ended with status {status}")


def _do(job: Callable[[], Any]) -> Ended:
    _submitted.clear()
    # A library has a handler of a stream that is closed by now.
    logging.raiseExceptions = False
    try:
        job()
    except SharmillError as error:
        return Ended(error=str(error), code=error.code, traceback=traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return Ended(error=repr(error), traceback=traceback.format_exc())
    return Ended(list(_submitted))
